"""What the server process imports once, so that each rank forked from it has it at once."""

from torch.distributed import tensor

from phalanx import mesh

__all__ = ["mesh", "tensor"]
