"""Quantization of weights to int8, and of the key-value cache to int8 or float8.

A weight takes a quarter of its float32 bytes, half of its bfloat16 bytes, with a scale for each
output channel. The matrix product casts the weight back to the dtype of the activations, so a CPU
saves memory but no time.

Suffixes: O outputs, I inputs of a linear map.
"""

from __future__ import annotations

from types import MethodType
from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.models.decoder import Decoder
from phalanx.models.layers import Linear

LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest finite value of each quantized dtype (E4M3: Micikevicius et al. 2022, table 1)."""


def quantized(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Quantize x over its last dimension; return q and the float32 scale, with x about q * scale.

    The rounding error is at most scale / 2 for int8, and 1/16 of each value for float8.
    """
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = (largest / LARGEST[dtype]).clamp_(min=torch.finfo(torch.float32).tiny)
    q = x / scale
    return (q.round_() if dtype == torch.int8 else q).to(dtype), scale


@torch.no_grad()
def quantize_linears(model: Decoder) -> None:
    """Quantize the weights of all linear layers of the blocks to int8, in place.

    Embedding and output projection are kept, because they would cause most of the error.
    """
    for name, module in model.blocks.named_modules():
        if isinstance(module, Linear) and ".lora_" not in name:
            weight_OI, scale_O1 = quantized(module.weight)
            del module.weight
            module.register_buffer("weight", weight_OI)
            module.register_buffer("scale_O", scale_O1[:, 0])
            module.forward = MethodType(_forward, module)


def _forward(self: Linear, x: Tensor) -> Tensor:
    weight_OI, scale_O = cast(Tensor, self.weight), cast(Tensor, self.scale_O)
    y = F.linear(x, weight_OI.to(x.dtype)) * scale_O.to(x.dtype)
    return self.adapted(y if self.bias is None else y + self.bias.to(x.dtype), x)
