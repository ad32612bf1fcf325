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
from torch import Tensor, nn
from typing_extensions import override

from phalanx.infer.paged import KVCache
from phalanx.infer.pool import BlockPool
from phalanx.models.decoder import Decoder
from phalanx.models.layers import Linear
from phalanx.models.shape import ModelShape

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


class QuantizedCache(KVCache):
    """A cache in int8 or float8 with a scale for each position and head; `read` returns `dtype`.

    Attributes:
        key_scales, value_scales: [L, S, G, 1], float32.
    """

    def __init__(
        self,
        shape: ModelShape,
        pool: BlockPool,
        dtype: torch.dtype,
        device: torch.device,
        num_shards: int = 1,
        *,
        stored: torch.dtype = torch.int8,
    ) -> None:
        super().__init__(shape, pool, stored, device, num_shards)
        self._dtype = dtype
        self.key_scales = self.keys.new_zeros((*self.keys.shape[:3], 1), dtype=torch.float32)
        self.value_scales = torch.zeros_like(self.key_scales)

    @override
    def parts(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, self.key_scales, self.value_scales

    @override
    def write(self, layer: int, slots_N: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> None:
        k, key_scales = quantized(k_NGK, self.keys.dtype)
        v, value_scales = quantized(v_NGK, self.values.dtype)
        for home, value in ((self.keys, k), (self.values, v)):  # index_copy_ has no float8 kernel
            home[layer].view(torch.uint8).index_copy_(0, slots_N, value.view(torch.uint8))
        self.key_scales[layer].index_copy_(0, slots_N, key_scales)
        self.value_scales[layer].index_copy_(0, slots_N, value_scales)

    @override
    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        k, v, key_scales, value_scales = (part[layer][slots] for part in self.parts())
        k, v = k.float() * key_scales, v.float() * value_scales
        return k.to(self._dtype), v.to(self._dtype)
