"""What the server process imports once, so that each rank forked from it has it at once."""

import torch
import torch.distributed
import torch.distributed.tensor

import phalanx.mesh

__all__ = ["phalanx", "torch"]
