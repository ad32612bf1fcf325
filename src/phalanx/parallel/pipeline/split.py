"""Pipeline parallelism: each rank has some of the layers, and microbatches pass through them.

Idea      A model that does not fit one device is cut into stages, and while one stage computes a
          microbatch, the others compute others. When which is computed is a schedule: schedule.py
          (Huang et al. 2019, GPipe; Narayanan et al. 2021, section 2).
Layout    W of stage s on rank s alone; with v chunks a rank has v stages. Where the embedding is
          the output projection too, the first and the last stage hold a copy each.
Forward   x[B, T, D] of a microbatch travels from each stage to the next
Backward  dx[B, T, D] travels back. The gradients of a tied weight are summed over its two copies.
Cost      A rank sends B T D elements a microbatch and border forward, and as much backward. It
          waits (p - 1) / (m + p - 1) of a step of m microbatches under 1F1B.
Limits    Our decoder alone. At least as many layers (blocks, embedding, head) as stages. The
          backward is made in two passes (zb, zbv, dualpipev) where no fsdp, cp, tp or recomputation
          is beside: their operators make both gradients at once, so there B stands for I and W.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn
from typing_extensions import override

from phalanx.comm.comm import Comm, Ranks, local_shard
from phalanx.comm.ledger import Entry, Phase, no_phase, sent_bytes
from phalanx.errors import StrategyError
from phalanx.models.decoder import Decoder
from phalanx.parallel.accumulate import Runner
from phalanx.parallel.pipeline.cut import cut_of, schedule_of
from phalanx.parallel.pipeline.runtime import Pipeline, sent_after
from phalanx.parallel.pipeline.stage import Stages
from phalanx.parallel.reduce import GradientReducer, Parameters
from phalanx.parallel.split import Split, Target
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.spec import BatchShape


class PipelineSplit(Split):
    """The axis pp. Its constructor cuts the model, so that other axes see what is left of it."""

    axis = "pp"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        model, strategy = target.model, target.strategy
        if not isinstance(model, Decoder):
            raise StrategyError(
                f"pp: {type(model).__name__} cannot be cut into stages, only phalanx's Decoder "
                "can; use fsdp"
            )
        schedule = schedule_of(strategy, 1)
        self._width = model.shape.hidden
        self._itemsize = (target.compute or next(model.parameters()).dtype).itemsize
        cut = cut_of(strategy, model.shape)
        self.stages = Stages(model, cut, schedule.stages_of(target.pp_rank))

    @override
    def remaining(self) -> Target:
        here, ends = self.stages.here, {0, self.stages.num_stages - 1}
        return dataclasses.replace(
            self.target, num_stages=len(here), num_ends=len(ends.intersection(here))
        )

    @override
    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        strategy, rank = self.target.strategy, self.target.pp_rank
        schedule = schedule_of(strategy, len(microbatches))
        sizes = {"forward": list[int](), "backward": list[int]()}
        for action in schedule.orders[rank]:
            message = sent_after(action, schedule.num_stages - 1)
            if message is not None and schedule.rank_of[message.stage] != rank:
                phase = "backward" if message.is_gradient else "forward"
                sizes[phase].append(self._message_bytes(*microbatches[action.microbatch]))
        if (copy := self._tied()) is not None:
            sizes["reduce"] = [self._shard_bytes(copy)]
        return [
            Entry(phase, "pp", "send", len(each), sum(each), sent_bytes("send", sum(each), 2))
            for phase, each in sizes.items()
            if each
        ]

    def _message_bytes(self, num_rows: int, length: int) -> int:
        if self.target.strategy.tp.degree == 1:
            return num_rows * length * self._width * self._itemsize
        layout = layout_of(self.target.strategy)
        held = layout.held(layout.residual, BatchShape(num_rows, length), self._width)
        return len(held[0]) * len(held[1]) * len(held[2]) * self._itemsize

    def _shard_bytes(self, table: nn.Parameter) -> int:
        """Return the bytes of the first rank's shard of an embedding."""
        strategy, (num_rows, width) = self.target.strategy, table.shape
        if strategy.tp.degree > 1:
            layout = layout_of(strategy)
            num_rows, width = layout.column.shard_shape(table.shape, layout.comm)
        return -(-num_rows // strategy.fsdp.degree) * width * table.itemsize

    def _tied(self) -> nn.Parameter | None:
        """Return the weight of which another rank has a copy, if there is one here."""
        stages = self.stages
        if not stages.is_tied or self.remaining().num_ends != 1:
            return None
        return stages.model.embedding.weight

    @override
    def reducer(self, comm: Ranks, inner: GradientReducer | None) -> GradientReducer | None:
        weight = self._tied()
        if weight is None or not weight.requires_grad:
            return inner
        rank_of = schedule_of(self.target.strategy, 1).rank_of
        other = rank_of[-1] if 0 in self.stages.here else rank_of[0]
        return TiedReducer(weight, comm, other, inner)

    @override
    def runner(self, comm: Ranks, runner: Runner) -> Runner:
        weight = self._tied()
        copies = [weight] if weight is not None and 0 not in self.stages.here else []
        strategy = self.target.strategy
        return Pipeline(
            self.stages, comm, lambda m: schedule_of(strategy, m), runner.reducer, copies
        )


class TiedReducer(GradientReducer):
    """Reduces as `inner` does, then adds up the gradients of the two copies of a tied weight."""

    def __init__(
        self, weight: nn.Parameter, comm: Comm, other: int, inner: GradientReducer | None
    ) -> None:
        """Exchange with the rank at coordinate `other` of pp."""
        super().__init__([weight], comm)
        self._other = other
        self._inner = inner

    @override
    def before_backward(self, last: Parameters, reached: Parameters | None = None) -> None:
        if self._inner is not None:
            self._inner.before_backward(last, reached)

    @override
    @torch.no_grad()
    def finish(self, phase: Phase = no_phase) -> None:
        if self._inner is not None:
            self._inner.finish(phase)
        (weight,) = self.parameters
        assert weight.grad is not None, "both ends of a pipeline read the tied weight"
        mine = local_shard(weight.grad)
        with phase("reduce"):
            theirs = self.comm.recv_start(torch.empty_like(mine), "pp", self._other)
            sent = self.comm.send_start(mine.contiguous().clone(), "pp", self._other)
            mine.add_(theirs.wait())
            sent.wait()
