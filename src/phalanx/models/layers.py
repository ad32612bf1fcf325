"""The linear map, the MLP, the norms and dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models import cpu
from phalanx.models.random import dropout
from phalanx.models.shape import Lora, ModelShape


class Linear(nn.Module):
    """`x @ weight.T + bias`, computed in the dtype of x, plus the adapter if there is one.

    Attributes:
        lora_A, lora_B: the two maps of the adapter, see `Lora`; None without one.
        scaling: factor of the adapter.
    """

    def __init__(self, num_in: int, num_out: int, bias: bool) -> None:
        super().__init__()
        self.lora_A: Linear | None = None
        self.lora_B: Linear | None = None
        self.scaling = 1.0
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dimension of x from num_in to num_out."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self.adapted(F.linear(x, self.weight.to(x.dtype), bias), x)

    def adapt(self, lora: Lora) -> None:
        """Add an adapter, whose maps have no weights yet."""
        num_out, num_in = self.weight.shape
        self.lora_A = Linear(num_in, lora.rank, False)
        self.lora_B = Linear(lora.rank, num_out, False)
        self.scaling = lora.scaling

    def adapted(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y, the product with `weight`, plus the adapter's output for x."""
        if self.lora_A is None or self.lora_B is None:
            return y
        return y + self.lora_B(self.lora_A(x)) * self.scaling


class MLP(nn.Module):
    """The feed-forward branch: SwiGLU, GEGLU (Shazeer 2020) or GELU; GELU is its tanh form."""

    def __init__(self, shape: ModelShape, ffn: int) -> None:
        super().__init__()
        has_bias = shape.has_bias("other")
        self.kind = shape.mlp
        self.gate = Linear(shape.hidden, ffn, has_bias) if self.kind != "gelu" else None
        self.up = Linear(shape.hidden, ffn, has_bias)
        self.down = Linear(ffn, shape.hidden, has_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output of the branch, a tensor like x_BTD."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))
        return self.down(gated(self.kind, self.gate(x_BTD), self.up(x_BTD)))


def gated(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return the inner activation of a SwiGLU, or of a GEGLU if `kind` is "geglu"."""
    return (F.gelu(gate, approximate="tanh") if kind == "geglu" else F.silu(gate)) * up


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last dimension.

    Attributes:
        offset: constant added to the weight in the forward; 1 for norms that store weight - 1.
    """

    def __init__(self, width: int, shape: ModelShape) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.offset = 1.0 if shape.norm == "rms+1" else 0.0
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if shape.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x over its last dimension."""
        if self.bias is not None:
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return F.layer_norm(x, weight.shape, weight, bias, self.eps)
        weight = self.weight + self.offset if self.offset else self.weight
        if cpu.is_preferred(x):
            return cpu.rms_norm(x, weight, self.eps)
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps)


class Dropout(nn.Module):
    """Dropout whose mask depends on the position in the row; see `models.random.dropout`.

    Attributes:
        row_positions: `row_positions(T, device)` returns the positions of the T tokens in their
            full row; replaced where each rank has a part of the positions.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.row_positions: Callable[[int, torch.device], Tensor] = first_positions

    def forward(self, x_BTD: Tensor, keys_B: Tensor | None, salt: int) -> Tensor:
        """Drop elements of x_BTD by the dropout keys of its rows; `salt` numbers this use."""
        if keys_B is None:
            return x_BTD
        positions_T = self.row_positions(x_BTD.shape[1], x_BTD.device)
        return dropout(x_BTD, self.p, keys_B, salt, positions_T)


def first_positions(length: int, device: torch.device) -> Tensor:
    """Return 0..length-1, the positions of a full row."""
    return torch.arange(length, device=device)
