"""A block of the Llama family: its sizes as they are written, and the block alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.models.decoder import Block
from phalanx.models.shape import ModelShape
from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.tensor.roles import DECODER, Patterns

Precision = Literal["bfloat16", "float32", "float64"]

DEFAULT_SIZES = ("512x8x32", "512x8x128", "512x8x512")

_WIDE = 3072
"""From this width on Llama's heads are twice as wide (Llama 3.2 1B and 3B)."""


@dataclass(frozen=True)
class BlockSize:
    """A block of the Llama family, and a microbatch for it: rows of `length` positions.

    Heads and MLP follow from `hidden`, the features of the residual.
    """

    hidden: int
    num_rows: int
    length: int

    @classmethod
    def parse(cls, text: str) -> BlockSize:
        """Read HIDDENxROWSxPOSITIONS.

        Raises:
            ConfigError: it is written otherwise, or the width is not a whole number of heads.
        """
        if re.fullmatch(r"[1-9][0-9]{0,7}(x[1-9][0-9]{0,7}){2}", text) is None:
            raise ConfigError(
                f"size is '{text}'; it must be HIDDENxROWSxPOSITIONS, such as {DEFAULT_SIZES[0]}"
            )
        size = cls(*map(int, text.split("x")))
        width = size.head_dim
        if size.hidden % width:
            nearest = max(1, round(size.hidden / width)) * width
            raise ConfigError(
                f"size {text}: hidden is {size.hidden}; it must be a multiple of {width}, the "
                f"width of a head, and {nearest} is the nearest"
            )
        return size

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return 128 if self.hidden >= _WIDE else 64

    @property
    def num_tokens(self) -> int:
        """Tokens of the microbatch."""
        return self.num_rows * self.length

    @property
    def batch(self) -> BatchShape:
        """Rows and positions of the microbatch."""
        return BatchShape(self.num_rows, self.length)

    @property
    def shape(self) -> ModelShape:
        """The block's shape: the MLP is 8/3 as wide, up to the next 256 (Touvron et al. 2023)."""
        num_heads = self.hidden // self.head_dim
        return ModelShape(
            vocab_size=1,  # a block has no vocabulary
            num_layers=1,
            hidden=self.hidden,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=self.head_dim,
            ffn=-(-8 * self.hidden // (3 * 256)) * 256,
            max_seq_len=self.length,
        )

    def __str__(self) -> str:
        return f"{self.hidden}x{self.num_rows}x{self.length}"


PATTERNS: Patterns = {
    name.replace("blocks.*", "block"): role
    for name, role in DECODER.items()
    if name.startswith("blocks.") and role not in ("dropout", "local")
    if not name.endswith("_output_norm")
}
"""Roles of a block of Llama, which has no norms of queries and keys, nor after its branches."""


class OneBlock(nn.Module):
    """A block alone, so that what stands around it costs nothing; on the meta device.

    Its masters are at least float32, whatever it computes in.
    """

    def __init__(self, shape: ModelShape, precision: Precision) -> None:
        super().__init__()
        with torch.device("meta"):
            self.block = Block(shape, 0)
        self.compute: torch.dtype = getattr(torch, precision)
        self.to(torch.promote_types(self.compute, torch.float32))

    def forward(self, x_BTD: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map the residual to one like it."""
        return self.block(x_BTD, angles)
