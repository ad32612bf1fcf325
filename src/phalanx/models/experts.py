"""Experts in place of an MLP: a router sends each token to a few of many small MLPs.

Shazeer et al., Outrageously Large Neural Networks, 2017. With N = 3 tokens, E = 4 experts and k = 2
selections a token:

    x_ND         router          sort by expert            experts            back, sum over slots
    token 0  ->  experts 2 0     expert 0: token 0 slot 1  rows 0-1 -> MLP 0  y_0 = w_00 row 2
    token 1  ->  experts 3 2               token 2 slot 0                         + w_01 row 0
    token 2  ->  experts 0 2     expert 2: token 0 slot 0  rows 2-4 -> MLP 2  ...
                                           token 1 slot 1
                 weights_Nk                token 2 slot 1
                                 expert 3: token 1 slot 0  row 5    -> MLP 3
                 [N, k]          rows_MD, counts_E 2 0 3 1 rows_MD            y_ND

The sort is stable, rows return to (token, slot), and a token sums over its slots in their order. So
the output has the same bits wherever an expert runs.

Dimensions in the suffixes of tensor names, beside the ones in decoder.py:

    N tokens    E experts    k selections of a token    M selections that no limit drops, <= N k
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from phalanx.models.kernels import device_type
from phalanx.models.layers import MLP, Linear, gated
from phalanx.models.shape import ExpertShape, ModelShape

_ALIGNMENT = 16
"""Bytes that divide the strides of a grouped product's matrices."""


@dataclass(eq=False)
class Load:
    """What one router counts in a training step, and the slopes of its auxiliary losses.

    The losses are over all tokens of the global batch, so a rank with some of the tokens only has
    sums. The slopes follow from the sums of all ranks, which must be known before the backward.

    Attributes:
        counts: float64 [2 E + 2], summed over tokens: selections of each expert, also dropped ones;
            part of each expert in the scores; squared log-sum-exp of the logits; and dropped
            selections.
        is_counting: whether forwards add to `counts`; not if backward runs a forward again.
        slopes: derivatives of the auxiliary losses by the sums of parts and of squares, [E + 1].
    """

    counts: Tensor
    is_counting: bool = False
    slopes: Tensor | None = None

    def count(self, experts_Nk: Tensor, counted_N: Tensor, sums: Tensor) -> None:
        """Add the selections of the tokens that count, and the sums of their parts and squares."""
        num_experts = len(sums) - 1
        ones_Nk = counted_N[:, None].expand(experts_Nk.shape).double()
        self.counts[:num_experts].scatter_add_(0, experts_Nk.flatten(), ones_Nk.flatten())
        self.counts[num_experts:-1] += sums


class Router(nn.Module):
    """Selects the experts of each token, and weights them.

    Attributes:
        weight: [E, D].
        bias: [E], added to scores only for the selection, in at least float32 whatever the dtype of
            the model; None without one. No gradient changes it.
        layer: number of the block in the full decoder.
        load: counts of the training step that runs; None outside of one.
        gives_losses: whether the gradient of the auxiliary losses starts on this rank; of ranks
            that route the same tokens, as of tp, one gives it.
    """

    bias: Tensor | None

    def __init__(self, hidden: int, experts: ExpertShape, layer: int) -> None:
        super().__init__()
        self.experts = experts
        self.layer = layer
        self.load: Load | None = None
        self.gives_losses = True
        self.weight = nn.Parameter(torch.empty(experts.num_experts, hidden))
        self.register_buffer("bias", torch.empty(len(self.weight)) if experts.has_bias else None)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Biases grow far beyond the differences of scores, which a narrower dtype would round away.
        bias = self.bias
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        if bias is not None and self.bias is not None and self.bias.dtype.itemsize < 4:
            self.bias = bias.to(self.bias.device)
        return self

    def forward(self, x_ND: Tensor, counted_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return experts_Nk, int64, best first, and their weights_Nk in at least float32.

        `counted_N` is whether each token counts toward the load; None if none does.
        """
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        with torch.autocast("cpu" if x_ND.is_meta else x_ND.device.type, enabled=False):
            logits_NE = F.linear(x_ND.to(wide), self.weight.to(wide))
        is_softmax = self.experts.score == "softmax"
        scores_NE = logits_NE.softmax(-1) if is_softmax else logits_NE.sigmoid()
        experts_Nk = self._select(scores_NE.detach())
        weights_Nk = scores_NE.gather(1, experts_Nk)
        if self.experts.renormalizes:
            # Sigmoids of all selected logits may round to 0; a softmax's largest is at least 1 / E.
            weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + 1e-20)
        weights_Nk = weights_Nk * self.experts.scaling
        if self.load is not None and counted_N is not None:
            parts_NE = scores_NE if is_softmax else scores_NE / scores_NE.sum(-1, keepdim=True)
            squares_N1 = logits_NE.logsumexp(-1, keepdim=True).square()
            sums = (torch.cat([parts_NE, squares_N1], 1) * counted_N[:, None]).sum(0)
            if self.load.is_counting:
                self.load.count(experts_Nk, counted_N, sums.detach())
            if self.experts.has_losses and self.gives_losses:
                weights_Nk = cast(Tensor, _WithLosses.apply(weights_Nk, sums, self.load))
        return experts_Nk, weights_Nk

    def _select(self, scores_NE: Tensor) -> Tensor:
        """Return the experts with the best scores; of equal ones, those with lower numbers."""
        shape = self.experts
        if self.bias is not None:
            scores_NE = scores_NE + self.bias
        if shape.top_groups < shape.num_groups:
            scores_NGe = scores_NE.unflatten(-1, (shape.num_groups, -1))
            best = 1 if shape.group_score == "max" else 2
            groups_NG = _best(scores_NGe.topk(best).values.sum(-1), shape.top_groups)
            is_closed_NG = torch.ones_like(scores_NGe[:, :, 0], dtype=torch.bool)
            is_closed_NG.scatter_(1, groups_NG, False)
            scores_NE = scores_NGe.masked_fill(is_closed_NG[:, :, None], -math.inf).flatten(1)
        return _best(scores_NE, shape.top_k)


def _best(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest of the last dimension; `topk` breaks ties at random."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


class _WithLosses(Function):
    """The weights, to whose backward the auxiliary losses add their own gradient.

    The losses' value is known only after the forwards of all tokens of the global batch. Their
    gradient needs no value: it starts from the slopes by this forward's sums.
    """

    @staticmethod
    def forward(ctx: Any, weights_Nk: Tensor, score_sums: Tensor, load: Load) -> Tensor:
        ctx.load, ctx.dtype = load, score_sums.dtype
        return weights_Nk.view_as(weights_Nk)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return grad_outputs[0], ctx.load.slopes.to(ctx.dtype), None


class Experts(nn.Module):
    """Gated MLPs without biases, of one shape; each projection is one stacked parameter.

    A split of the experts over ranks replaces `start` and `forward`.

    Attributes:
        gate, up: [E, F, D].
        down: [E, D, F].
    """

    def __init__(self, shape: ModelShape, experts: ExpertShape) -> None:
        super().__init__()
        self.kind = shape.mlp
        inner = experts.num_experts, experts.ffn, shape.hidden
        self.gate = nn.Parameter(torch.empty(inner))
        self.up = nn.Parameter(torch.empty(inner))
        self.down = nn.Parameter(torch.empty(inner).mT.contiguous())

    def start(self, rows_MD: Tensor, counts_E: Tensor) -> Any:
        """Return what `forward` takes with these rows: the counts. A split may send rows here.

        Args:
            rows_MD: the rows of expert 0, then of expert 1, and so on.
            counts_E: number of rows of each expert, int64; the sum is M.
        """
        del rows_MD
        return counts_E

    def forward(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply each expert to its rows, given what `start` has returned for them."""
        product = _ExpertProducts(rows_MD, counts_E, self.gate.shape[1])
        inner_MF = gated(self.kind, product(rows_MD, self.gate), product(rows_MD, self.up))
        return product(inner_MF, self.down)


class _ExpertProducts:
    """Products of rows, sorted by expert, with the matrix of their expert.

    One grouped product where its kernel takes the dtype, and a product for each expert elsewhere.
    """

    def __init__(self, rows_MD: Tensor, counts_E: Tensor, ffn: int) -> None:
        size, width = rows_MD.element_size(), rows_MD.shape[1]
        is_aligned = not (width * size % _ALIGNMENT or ffn * size % _ALIGNMENT)
        self.ends_E: Tensor | None = None
        self.sizes: list[int] = []
        if is_aligned and rows_MD.dtype != torch.float64 and device_type(rows_MD) != "meta":
            self.ends_E = counts_E.cumsum(0).to(torch.int32)
        elif rows_MD.is_meta:  # without values, every expert stands for the mean
            num_rows, num_experts = len(rows_MD), len(counts_E)
            self.sizes = [(num_rows + e) // num_experts for e in range(num_experts)]
        else:
            self.sizes = counts_E.tolist()

    def __call__(self, x_MI: Tensor, weight_EOI: Tensor) -> Tensor:
        weight_EOI = weight_EOI.to(x_MI.dtype)
        if self.ends_E is not None:
            return F.grouped_mm(x_MI, weight_EOI.mT, offs=self.ends_E)
        # Not `weight_EOI[e]`: its backward writes a gradient of all experts for each.
        matrices = zip(x_MI.split(self.sizes), weight_EOI.unbind(), strict=True)
        return torch.cat([F.linear(x, weight_OI) for x, weight_OI in matrices])


eagerly: Any = torch.compiler.disable


class MoE(nn.Module):
    """The branch of a block with experts: y = sum over slots of weight * expert(x) + shared(x).

    Attributes:
        router: selects the experts of each token.
        experts: the MLPs.
        shared: the expert that every token visits; None without one.
        shared_gate: map whose sigmoid scales the output of `shared`; None without one.
        places: `places_in_rows`; replaced where each rank has a part of the positions of a row.
    """

    def __init__(self, shape: ModelShape, experts: ExpertShape, layer: int) -> None:
        super().__init__()
        self.places = places_in_rows
        self.router = Router(shape.hidden, experts, layer)
        self.experts = Experts(shape, experts)
        self.shared = MLP(shape, experts.shared_ffn) if experts.shared_ffn else None
        self.shared_gate = Linear(shape.hidden, 1, False) if experts.has_shared_gate else None

    # Numbers of rows depend on data: each would compile anew.
    @eagerly
    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None = None) -> Tensor:
        """Return the output of the branch, a tensor like x_BTD.

        `counted_BT` is whether each token counts toward the load; None if none does.
        """
        x_ND = x_BTD.flatten(0, -2)
        counted_N = None if counted_BT is None else counted_BT.flatten()
        num_experts = self.router.experts.num_experts
        experts_Nk, weights_Nk = self.router(x_ND, counted_N)
        is_kept_Nk = None
        if self.training and self.router.experts.capacity is not None:
            experts_BTk = experts_Nk.view(*x_BTD.shape[:2], experts_Nk.shape[1])
            places_BTk, length = self.places(experts_BTk, num_experts)
            is_kept_Nk = places_BTk.view_as(experts_Nk) < self.router.experts.limit(length)
            load = self.router.load
            if counted_N is not None and load is not None and load.is_counting:
                load.counts[-1] += (~is_kept_Nk & counted_N[:, None]).sum()
        routed = Dispatched(x_ND, experts_Nk, num_experts, is_kept_Nk)
        started = self.experts.start(routed.rows_MD, routed.counts_E)
        shared_ND = None if self.shared is None else self.shared(x_ND)  # while rows travel
        if shared_ND is not None and self.shared_gate is not None:
            shared_ND = self.shared_gate(x_ND).sigmoid() * shared_ND
        y_ND = routed.combined(self.experts(routed.rows_MD, started), weights_Nk)
        return (y_ND if shared_ND is None else y_ND + shared_ND).view_as(x_BTD)


def places_in_rows(experts_BTk: Tensor, num_experts: int) -> tuple[Tensor, int]:
    """Return how many earlier positions of its row selected the expert of each selection, and T.

    With experts 2 0, 2 1 and 0 2 at the three positions of a row: places 0 0, 1 0 and 1 2.
    """
    num_rows, length, _ = experts_BTk.shape
    rows_B11 = torch.arange(num_rows, device=experts_BTk.device)[:, None, None]
    groups_M = (rows_B11 * num_experts + experts_BTk).flatten()
    order_M = groups_M.argsort(stable=True)
    counts = count(groups_M, num_rows * num_experts)
    firsts_M = (counts.cumsum(0) - counts)[groups_M[order_M]]
    places_M = torch.arange(len(order_M), device=order_M.device) - firsts_M
    return torch.empty_like(places_M).scatter_(0, order_M, places_M).view_as(experts_BTk), length


def count(experts: Tensor, num_experts: int) -> Tensor:
    """Return the number of occurrences of each expert, int64."""
    flat = experts.flatten()
    # Not `bincount`, which waits for a GPU.
    return flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))


class Dispatched:
    """Tokens as the rows that their experts compute, and the way back.

    Attributes:
        rows_MD: the rows of expert 0, then of expert 1, and so on; of one expert by token.
        counts_E: number of rows of each expert, int64.
    """

    def __init__(
        self, x_ND: Tensor, experts_Nk: Tensor, num_experts: int, is_kept_Nk: Tensor | None = None
    ) -> None:
        """Sort the selections by expert; drop the ones that are not kept."""
        order_M = experts_Nk.flatten().argsort(stable=True)
        if is_kept_Nk is not None and not x_ND.is_meta:  # without values, all are kept
            order_M = order_M[is_kept_Nk.flatten()[order_M]]
        self.counts_E = count(experts_Nk.flatten()[order_M], num_experts)
        self._order_M, self._rows_at_Nk = order_M, _inverse(order_M, experts_Nk)
        self.rows_MD = cast(Tensor, _Dispatch.apply(x_ND, order_M, self._rows_at_Nk))

    def combined(self, rows_MD: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return the output of each token, y_ND, from the outputs of the experts."""
        y_ND = _Combine.apply(rows_MD, weights_Nk, self._order_M, self._rows_at_Nk)
        return cast(Tensor, y_ND)


def _inverse(order_M: Tensor, experts_Nk: Tensor) -> Tensor:
    """Return the row of each selection, and M for a selection that is dropped."""
    rows_M = torch.arange(len(order_M), device=order_M.device)
    nowhere = torch.full_like(experts_Nk.flatten(), len(order_M))
    return nowhere.scatter_(0, order_M, rows_M).view_as(experts_Nk)


class _Dispatch(Function):
    """Rows of the experts: row m is the token of selection order_M[m]."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, rows_at_Nk: Tensor) -> Tensor:
        ctx.save_for_backward(rows_at_Nk)
        return x_ND.index_select(0, order_M // rows_at_Nk.shape[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_of_slots(grad_outputs[0], *ctx.saved_tensors), None, None


class _Combine(Function):
    """Output of each token: the sum of its rows, times their weights, in the order of its slots."""

    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, weights_Nk: Tensor, order_M: Tensor, rows_at_Nk: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_MD, weights_Nk, order_M, rows_at_Nk)
        return _sum_of_slots(rows_MD, rows_at_Nk, weights_Nk)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, weights_Nk, order_M, rows_at_Nk = ctx.saved_tensors
        grad_MD = grad_outputs[0].index_select(0, order_M // weights_Nk.shape[1])
        products_M = F.pad(torch.linalg.vecdot(rows_MD, grad_MD), (0, 1))
        weights_M1 = weights_Nk.flatten().index_select(0, order_M)[:, None]
        grad_Nk = products_M[rows_at_Nk].to(weights_Nk.dtype)
        return grad_MD * weights_M1.to(grad_MD.dtype), grad_Nk, None, None


def _sum_of_slots(rows_MD: Tensor, rows_at_Nk: Tensor, weights_Nk: Tensor | None = None) -> Tensor:
    """Return for each token the sum of its rows, in at least float32, times their weights.

    A slot at a time: `sum` over a middle dimension is ten times slower in bfloat16 on a CPU.
    """
    wide = torch.promote_types(rows_MD.dtype, torch.float32)
    if len(rows_MD) < rows_at_Nk.numel():  # dropped selections read the row of zeros
        rows_MD = F.pad(rows_MD, (0, 0, 0, 1))
    y_ND = rows_MD.new_zeros(len(rows_at_Nk), rows_MD.shape[1], dtype=wide)
    for slot, rows_at_N in enumerate(rows_at_Nk.unbind(1)):
        rows_ND = rows_MD.index_select(0, rows_at_N)
        if weights_Nk is None:
            y_ND += rows_ND
        else:
            y_ND.addcmul_(rows_ND.to(wide), weights_Nk[:, slot, None])
    return y_ND.to(rows_MD.dtype)
