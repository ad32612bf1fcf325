"""Weights in int8, a scale for each output channel; activations and sums stay as they are.

A weight takes a quarter of its float32 bytes, half of its bfloat16 bytes. It is cast back where it
is multiplied, so a CPU saves memory, and no time.

Suffixes: O outputs, I inputs of a linear map.
"""

from __future__ import annotations

from types import MethodType
from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.decoder import Decoder
from phalanx.models.layers import Linear

LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each type that is rounded to (E4M3: Micikevicius et al. 2022, table 1)."""


def quantized(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Return x in a type of one byte, and the scales of its last dimension: x is about q * scale.

    int8 has an error of at most half a scale, float8 of at most 1/16 of each number.
    """
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = (largest / LARGEST[dtype]).clamp_(min=torch.finfo(torch.float32).tiny)
    q = x / scale
    return (q.round_() if dtype == torch.int8 else q).to(dtype), scale


@torch.no_grad()
def quantize_linears(model: Decoder) -> None:
    """Round the weights of all linear maps of the blocks to int8, in place.

    Embedding and output projection stay: most of the error would come of them.
    """
    for module in model.blocks.modules():
        if isinstance(module, Linear):
            weight_OI, scale_O1 = quantized(module.weight)
            del module.weight
            module.register_buffer("weight", weight_OI)
            module.register_buffer("scale_O", scale_O1[:, 0])
            module.forward = MethodType(_forward, module)


def _forward(self: nn.Module, x: Tensor) -> Tensor:
    weight_OI, scale_O = cast(Tensor, self.weight), cast(Tensor, self.scale_O)
    bias = cast("Tensor | None", self.bias)
    y = F.linear(x, weight_OI.to(x.dtype)) * scale_O.to(x.dtype)
    return y if bias is None else y + bias.to(x.dtype)
