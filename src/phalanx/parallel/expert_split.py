"""Expert parallelism: each rank holds some of the experts, and rows travel to them and back.

Idea      A token visits k of E experts, so a rank that holds E/N of them needs only the rows that
          selected these. An all-to-all of uneven sizes brings each row to its expert, and a second
          one returns the results (Lepikhin et al., GShard, 2020, arXiv 2006.16668, section 3.2).
          Ranks of ep have different samples; all other parameters are split as if ep were dp.
Layout    gate, up[E_ep, F, D]  down[E_ep, D, F];  rows[M, D] of this rank's own tokens
Forward   counts[E] -> all_gather -> [N, E];  rows[M, D] -> all_to_all -> [R, D], sorted by expert,
          then source rank, then place there;  experts;  the inverse order;  all_to_all -> [M, D]
Backward  The same two exchanges for dy and drows, with the counts of forward. Gradients of experts
          are summed over all axes of data but ep: each row of all ranks of ep has been here.
Cost      A rank sends the rows whose experts are elsewhere, (N-1)/N of M D elements under even
          routing, and returns as many, in both directions; with recomputation once more forward.
          The counts are 8 E bytes a rank, for which the host waits. Imbalance makes the rank with
          the most rows the slowest. Under tp every rank of tp exchanges the same rows.
Same rows In generation all ranks of ep have the same rows[M, D] (`Target.same_rows`). Each computes
          the rows of its own experts, and sends the results to all others by one all-to-all, whose
          sizes all know without an all_gather: a rank receives (N-1)/N of M D elements.
Limits    N must divide E. tp must be 1d or megatron. Modules of transformers keep their router and
          the forward of their experts, which then gets the received rows.

N = 2 ranks, E = 4 experts. Rank 0 receives the rows of experts 0 and 1 (a row is written as the
expert and the rank of its token):

    rank 0   00 00 10 | 20 30 30      rank 0   00 00 10 01 11    by expert ->  00 00 01 10 11
    rank 1   01 11    | 21 21         rank 1   20 30 30 21 21                  20 21 21 30 30
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from phalanx.comm.axes import EXPERT
from phalanx.comm.comm import Comm, Ranks
from phalanx.comm.ledger import Entry
from phalanx.comm.pending import Pending
from phalanx.comm.row_counts import RowCounts
from phalanx.errors import StrategyError
from phalanx.models.experts import Dispatched, Experts, eagerly
from phalanx.models.shape import ExpertShape
from phalanx.parallel.composite import mapped
from phalanx.parallel.local_parameters import local_parameters
from phalanx.parallel.skeleton import Skeleton, experts_of
from phalanx.parallel.split import Split, Target, phases_of
from phalanx.strategy import Axis, Strategy


class ExpertSplit(Split):
    """Expert parallelism.

    Raises:
        StrategyError: the model has no experts, or the degree does not divide their number.
    """

    axis = "ep"
    compiles = False  # rows are exchanged in the middle of a block

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        _check(target.skeleton, target.strategy)
        self._num_ranks = target.strategy.ep.degree

    def next_target(self) -> Target:
        """Return the target in which a rank has E/N experts."""
        shapes = dict(self.target.shapes)
        for weight in self.target.skeleton.weights:
            if weight.is_expert:
                num_experts, *others = self.target.shape(weight)
                shapes[weight] = num_experts // self._num_ranks, *others
        return dataclasses.replace(self.target, shapes=shapes)

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        """Return the expected communication of a rank: each expert gets as many rows.

        The bytes of a step depend on its tokens: `traffic_of` has them, `bounds` their limits.
        """
        shape, layers, rows = self._experts, self._num_layers, 0
        for num, length in microbatches:
            most = shape.num_experts * shape.limit(length)
            rows += 2 * layers * num * min(shape.top_k * length, most)
        away = rows * (self._num_ranks - 1) / self._num_ranks
        return self._entries(layers * len(microbatches), rows, away)

    def traffic_of(self, counts: Sequence[RowCounts], coord: int = 0) -> list[Entry]:
        """Return the communication of the rank at `coord` of ep in a step of known `counts`.

        There is one for each microbatch and block with experts, in any order, as `noted`.
        """
        there = [(each.sent(coord), each.received(coord)) for each in counts]
        rows = sum(sum(sent) + sum(received) for sent, received in there)
        away = rows - sum(sent[coord] + received[coord] for sent, received in there)
        return self._entries(len(counts), rows, away)

    def bounds(self, microbatches: Sequence[tuple[int, int]]) -> tuple[list[Entry], list[Entry]]:
        """Return the least and the most that a rank has and sends, each, whatever the routing.

        The k experts of a token differ, so at most E/N of them are on one rank.
        """
        k, number = self._experts.top_k, self._num_layers * len(microbatches)
        tokens = self._num_layers * sum(num * length for num, length in microbatches)
        most = min(k, self._experts.num_experts // self._num_ranks)  # rows of a token on one rank
        fewest = max(0, k - (self._num_ranks - 1) * most)
        of_others = (self._num_ranks - 1) * tokens * most
        low = (tokens * (k + fewest), tokens * (k - most))
        if self._experts.capacity is not None:  # others may fill the experts of all tokens here
            low = (0, 0)
        high = (tokens * (k + most) + of_others, tokens * (k - fewest) + of_others)
        return self._entries(number, *low), self._entries(number, *high)

    @property
    def _experts(self) -> ExpertShape:
        shape = self.target.skeleton.shape
        assert shape is not None and shape.experts is not None, "only a decoder's k is known"
        return shape.experts

    @property
    def _num_layers(self) -> int:
        """Number of blocks with experts on this rank."""
        skeleton = self.target.skeleton
        return sum(len(skeleton.named(name)) for name in experts_of(skeleton.model))

    def _entries(self, number: int, rows: int, away: float) -> list[Entry]:
        """Return the entries of a step.

        Args:
            number: dispatches in forward: one a layer and microbatch.
            rows: rows that a rank has for them, and for the same number of returns.
            away: rows among them that it sends to other ranks.
        """
        shape, gathered = self.target.skeleton.shape, 8 * self._experts.num_experts * number
        assert shape is not None, "ep splits a decoder"
        size = shape.hidden * self.target.compute_dtype.itemsize
        counts = number, self._num_ranks * gathered, float((self._num_ranks - 1) * gathered)
        exchanged = 2 * number, rows * size, away * size
        recompute = self.target.strategy.recompute.kind
        forward = phases_of("forward", recompute, is_kept=False)
        of_ops = {
            "all_gather": (forward, counts),
            "all_to_all": ((*forward, "backward"), exchanged),
        }
        return [
            Entry(phase, "ep", op, calls * times, num_bytes * times, sent * times)
            for op, (phases, (calls, num_bytes, sent)) in of_ops.items()
            for phase, times in Counter(phases).items()
            if calls
        ]

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Keep E/N experts of each block, and exchange rows in the forward of the experts."""
        apply(model, comm, same_rows=self.target.same_rows)


def _check(skeleton: Skeleton, strategy: Strategy) -> None:
    """Refuse a model that ep cannot split.

    Raises:
        StrategyError: it has no stacked experts, they have adapters, or the degree does not divide
            their number.
    """
    name, degree = str(Strategy(ep=strategy.ep)), strategy.ep.degree
    stacks = experts_of(skeleton.model)  # of the full model: a stage may have none
    if not stacks:
        what = f"the model is a {type(skeleton.model).__name__} without experts"
        for place, module in skeleton.model.named_modules():
            is_stack = any(p.ndim == 3 for p in module.parameters(recurse=False))
            if is_stack or place.endswith("experts"):
                what = f"'{place}' of the model is a {type(module).__name__}"
                break
        raise StrategyError(
            f"{name}: ep splits the experts of phalanx's Decoder, and modules of `num_experts` "
            "stacked matrices that are called with (hidden_states, top_k_index, top_k_weights); "
            f"{what}; the nearest is dp{degree}"
        )
    for place, module in stacks.items():
        number = next(module.parameters(recurse=False)).shape[0]
        if "base_layer" in place.split("."):
            raise StrategyError(
                f"{name}: '{place}' has an adapter of PEFT, which ep does not split; the "
                f"nearest is fsdp{degree}"
            )
        if number % degree:
            legal = [n for n in range(2, number + 1) if number % n == 0]
            nearest = Axis(min(legal, key=lambda n: (abs(n - degree), n)), strategy.ep.kind)
            raise StrategyError(
                f"{name}: the model has {number} experts, which is not a multiple of {degree}; the "
                f"nearest is {Strategy(ep=nearest)}"
            )


def apply(model: nn.Module, comm: Comm, *, same_rows: bool = False) -> None:
    """Split the experts of a model over ep in place; for `same_rows` see `Target`."""
    for module in experts_of(model).values():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, _own_experts(parameter, comm))
        (_bind_same_rows if same_rows else _bind)(module, comm)


def _own_experts(parameter: nn.Parameter, comm: Comm) -> nn.Parameter:
    """Return the part of a stacked parameter that has this rank's experts, as a DTensor.

    tp may have split it before, along another dimension.
    """
    full = parameter.detach()
    if isinstance(full, DTensor):
        mesh, placements, local = full.device_mesh, list(full.placements), full.to_local()
    else:
        mesh, local = comm.model_mesh, full
        placements = [Replicate()] * mesh.ndim
    if not local.is_meta:  # every rank has all experts: the first one's values count
        comm.broadcast(local, "ep")
    placements[(mesh.mesh_dim_names or ()).index(EXPERT.split)] = Shard(0)
    own = local.chunk(comm.size("ep"))[comm.coord("ep")].clone()
    shard = DTensor.from_local(
        own, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _bind(module: nn.Module, comm: Comm) -> None:
    """Exchange rows before and after the own experts of this rank in the forward of `module`."""
    is_decoder, whole = isinstance(module, Experts), cast(Callable[..., Tensor], module.forward)
    own = whole if is_decoder else functools.partial(_of_rows, module, whole)

    def start(rows_MD: Tensor, counts_E: Tensor) -> tuple[Pending, RowCounts]:
        counts = comm.gather_counts(counts_E, "ep", len(rows_MD))
        return comm.exchange_rows_start(rows_MD.detach(), "ep", counts), counts

    def forward(rows_MD: Tensor, started: tuple[Pending, RowCounts]) -> Tensor:
        pending, counts = started
        order_R, counts_e = _by_expert(counts.received_groups(comm.coord("ep")), rows_MD.device)

        def there(rows_MD: Tensor) -> Tensor:
            return comm.exchange_rows(rows_MD, "ep", counts).index_select(0, order_R)

        def back(rows_RD: Tensor) -> Tensor:
            by_source_RD = torch.empty_like(rows_RD).index_copy_(0, order_R, rows_RD)
            return comm.exchange_rows(by_source_RD, "ep", counts.reversed)

        rows_RD = mapped(rows_MD, lambda _: pending.wait().index_select(0, order_R), back)
        with local_parameters(module):
            results_RD = own(rows_RD, counts_e)
        return mapped(results_RD, back, there)

    @eagerly
    def of_tokens(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x_ND = hidden_states.reshape(-1, hidden_states.shape[-1])
        routed = Dispatched(x_ND, top_k_index, cast(int, module.num_experts))
        rows_MD = forward(routed.rows_MD, start(routed.rows_MD, routed.counts_E))
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        return routed.combined(rows_MD, top_k_weights.to(wide)).view_as(hidden_states)

    replaced: Any = module
    replaced.forward = forward if is_decoder else of_tokens
    if is_decoder:
        replaced.start = start


def _of_rows(
    module: nn.Module, forward: Callable[..., Tensor], rows_RD: Tensor, counts_e: Tensor
) -> Tensor:
    """Apply the own experts of a module of transformers to rows, each a token of one slot."""
    experts_R = torch.arange(len(counts_e), device=rows_RD.device)
    experts_R = experts_R.repeat_interleave(counts_e, output_size=len(rows_RD))
    rows = rows_RD
    if not len(rows_RD):  # a loop over the experts with rows would use no parameter
        rows, experts_R = F.pad(rows_RD, (0, 0, 0, 1)), F.pad(experts_R, (0, 1))
    stack: Any = module
    num_experts, stack.num_experts = stack.num_experts, len(counts_e)
    try:
        y = forward(rows, experts_R[:, None], rows.new_ones(len(rows), 1))
    finally:
        stack.num_experts = num_experts
    return y[: len(rows_RD)]


def _bind_same_rows(module: nn.Module, comm: Comm) -> None:
    """Let each rank compute the rows of its own experts, and gather the results of all ranks."""
    # Rows of experts 0 0 1 | 2 2 3: sorted by expert, they are sorted by rank too.
    own: Callable[..., Tensor] = module.forward
    num_ranks, coord = comm.size("ep"), comm.coord("ep")

    def forward(rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        counts_Ne = counts_E.view(num_ranks, -1)
        sizes: list[int] = counts_Ne.sum(1).tolist()
        with local_parameters(module):
            results_RD = own(rows_MD.split(sizes)[coord], counts_Ne[coord])
        to_all = RowCounts(tuple((size,) * num_ranks for size in sizes))
        return comm.exchange_rows(results_RD.repeat(num_ranks, 1), "ep", to_all)

    replaced: Any = module
    replaced.forward = forward


def _by_expert(groups: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the order of received rows by expert, and the number of rows of each expert.

    Args:
        groups: rows of each own expert that each source has sent; rows lie by source, then expert.
        device: of the results.
    """
    counts_Ne = torch.tensor([[*group] for group in groups], device=device)
    num_rows = sum(map(sum, groups))
    experts_n = torch.arange(counts_Ne.shape[1], device=device).repeat(len(groups))
    experts_R = experts_n.repeat_interleave(counts_Ne.flatten(), output_size=num_rows)
    return experts_R.argsort(stable=True), counts_Ne.sum(0)
