"""Quantization of weights to int8, and of the key-value cache to int8 or float8.

A weight takes a quarter of its float32 bytes, half of its bfloat16 bytes, with a scale for each
output channel. The matrix product casts the weight back to the dtype of the activations, so a CPU
saves memory but no time.

Suffixes: O outputs, I inputs of a linear map; E experts, M rows sorted by expert, D hidden.
"""

from __future__ import annotations

from types import MethodType
from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.models.decoder import Decoder
from phalanx.models.experts import Experts
from phalanx.models.layers import Linear, gated

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
    """Quantize the weights of all linear layers and experts of the blocks to int8, in place.

    Embedding and output projection are kept, because they would cause most of the error; routers
    are kept, because they are small and a rounded one may choose other experts.
    """
    for name, module in model.blocks.named_modules():
        if isinstance(module, Experts):
            for projection in ("gate", "up", "down"):
                weight_EOI, scale_EO1 = quantized(getattr(module, projection))
                delattr(module, projection)
                module.register_buffer(projection, weight_EOI)
                module.register_buffer(f"{projection}_scale", scale_EO1[:, :, 0])
            module.forward = MethodType(_forward_experts, module)
        elif isinstance(module, Linear) and ".lora_" not in name:
            weight_OI, scale_O1 = quantized(module.weight)
            del module.weight
            module.register_buffer("weight", weight_OI)
            module.register_buffer("scale_O", scale_O1[:, 0])
            module.forward = MethodType(_forward, module)


def _product(x: Tensor, weight_OI: Tensor, scale_O: Tensor) -> Tensor:
    return F.linear(x, weight_OI.to(x.dtype)) * scale_O.to(x.dtype)


def _forward(self: Linear, x: Tensor) -> Tensor:
    y = _product(x, self.weight, cast(Tensor, self.scale_O))
    return self.adapted(y if self.bias is None else y + self.bias.to(x.dtype), x)


def _forward_experts(self: Experts, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
    def product(x: Tensor, projection: str, expert: int) -> Tensor:
        scale_EO = getattr(self, f"{projection}_scale")
        return _product(x, getattr(self, projection)[expert], scale_EO[expert])

    outputs: list[Tensor] = []
    for expert, rows in enumerate(rows_MD.split(counts_E.tolist())):
        if len(rows):  # only weights of experts that are selected are cast
            inner = gated(self.kind, product(rows, "gate", expert), product(rows, "up", expert))
            outputs.append(product(inner, "down", expert))
    return torch.cat(outputs)
