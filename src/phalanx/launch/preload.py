"""What the server process imports once, so that each rank forked from it has it at once."""

import torch._dynamo as dynamo  # the first optimizer and the first dispatch mode ask for it
from torch.distributed import tensor

from phalanx.comm import join

__all__ = ["dynamo", "join", "tensor"]
