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
Limits    The model is a chain: our decoder, or see modules.py. At least as many layers (blocks,
          embedding, head) as stages. The backward is made in two passes (zb, zbv, dualpipev) where
          no fsdp, cp, tp or recomputation is beside: their operators make both gradients at once,
          so there B stands for I and W.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn
from typing_extensions import override

from phalanx.comm.comm import Comm, Ranks, local_shard
from phalanx.comm.ledger import Entry, Phase, no_phase, sent_bytes
from phalanx.errors import StrategyError
from phalanx.models.decoder import Decoder
from phalanx.parallel.accumulate import Runner
from phalanx.parallel.pipeline.cut import cut_chain, cut_of, schedule_of
from phalanx.parallel.pipeline.links import cost_of, links_of
from phalanx.parallel.pipeline.lowering import lower
from phalanx.parallel.pipeline.modules import ModuleStages
from phalanx.parallel.pipeline.runtime import Pipeline
from phalanx.parallel.pipeline.sizes import HEADER_BYTES
from phalanx.parallel.pipeline.stage import DecoderStages, Stages
from phalanx.parallel.reduce import GradientReducer, OuterReducer
from phalanx.parallel.split import Split, Target
from phalanx.strategy import Strategy


class PipelineSplit(Split):
    """The axis pp. Its constructor cuts the model, so that other axes see what is left of it."""

    axis = "pp"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        model = target.model
        here = schedule_of(target.strategy, 1).stages_of(target.pp_rank)
        self._width: int | None = None
        self._itemsize = (target.compute or next(model.parameters()).dtype).itemsize
        if isinstance(model, Decoder):
            self._width = model.shape.hidden
            self.stages: Stages = DecoderStages(model, cut_of(target.strategy, model.shape), here)
        else:
            self.stages = _module_stages(model, target.strategy, here)

    @override
    def remaining(self) -> Target:
        stages = self.stages
        return dataclasses.replace(
            self.target, num_stages=len(stages.here), num_ends=stages.num_ends
        )

    @override
    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        strategy, rank = self.target.strategy, self.target.pp_rank
        schedule = schedule_of(strategy, len(microbatches))
        sizes = {"forward": list[int](), "backward": list[int]()}
        phases = {"SEND_F": "forward", "SEND_B": "backward"}
        # What a stage of any module sends is known once it runs.
        for action in lower(schedule, rank) if self._width is not None else ():
            if action.op in phases:
                size = self._message_bytes(*microbatches[action.microbatch])
                sizes[phases[action.op]].append(size)
        if (copy := self._tied()) is not None:
            sizes["reduce"] = [self._shard_bytes(copy)]
        return [
            Entry(phase, "pp", "send", len(each), sum(each), sent_bytes("send", sum(each), 2))
            for phase, each in sizes.items()
            if each
        ]

    @override
    def announces(
        self, microbatches: Sequence[tuple[int, int]], before: Sequence[tuple[int, int]]
    ) -> list[Entry]:
        rank, stages = self.target.pp_rank, self.stages
        rank_of = schedule_of(self.target.strategy, 1).rank_of
        following = [stage + 1 for stage in stages.here if stage + 1 < stages.num_stages]
        num_receivers = sum(rank_of[stage] != rank for stage in following)
        calls = num_receivers * len(set(microbatches).difference(before))
        if not stages.has_fixed_sizes or not calls:
            return []
        payload = calls * HEADER_BYTES
        return [Entry("sizes", "pp", "send", calls, payload, sent_bytes("send", payload, 2))]

    def _message_bytes(self, num_rows: int, length: int) -> int:
        width = self._width
        assert width is not None, "only what a decoder sends is known"
        held = self.target.left_by_later("residual", (num_rows, length, width))
        return math.prod(held) * self._itemsize

    def _shard_bytes(self, table: nn.Parameter) -> int:
        """Return the bytes of the first rank's shard of an embedding."""
        held = self.target.left_by_later("table", tuple(table.shape))
        return math.prod(held) * table.itemsize

    def _tied(self) -> nn.Parameter | None:
        """Return the weight of which another rank has a copy, if there is one here."""
        return self.stages.tied if self.stages.num_ends == 1 else None

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


def _module_stages(model: nn.Module, strategy: Strategy, here: Sequence[int]) -> ModuleStages:
    """Return the stages of a module that is not our decoder, cut by its parameters."""
    if strategy.tp.degree > 1:
        raise StrategyError(
            f"strategy '{strategy}': tp beside pp is for phalanx's Decoder, and the model is a "
            f"{type(model).__name__}; use fsdp beside pp"
        )
    links = links_of(model)
    costs = [float(cost_of([model.get_submodule(name) for name in link])) for link in links]
    cut = cut_chain(strategy, costs, ", ".join(" + ".join(link) for link in links))
    rank_of = schedule_of(strategy, 1).rank_of
    for rank in range(strategy.pp.degree):
        names = [
            n for s, part in enumerate(cut) if rank_of[s] == rank for at in part for n in links[at]
        ]
        if not any(p.requires_grad for n in names for p in model.get_submodule(n).parameters()):
            raise StrategyError(
                f"pp: rank {rank} of pp has no trained parameter in its layers, "
                f"{', '.join(names)}; choose another cut"
            )
    return ModuleStages(model, links, cut, here)


class TiedReducer(OuterReducer):
    """Reduces as `inner` does, then adds up the gradients of the two copies of a tied weight."""

    def __init__(
        self, weight: nn.Parameter, comm: Comm, other: int, inner: GradientReducer | None
    ) -> None:
        """Exchange with the rank at coordinate `other` of pp."""
        super().__init__([weight], comm, inner)
        self._other = other

    @override
    @torch.no_grad()
    def finish(self, phase: Phase = no_phase) -> None:
        super().finish(phase)
        (weight,) = self.parameters
        assert weight.grad is not None, "both ends of a pipeline read the tied weight"
        mine = local_shard(weight.grad)
        other = self._other
        received, given = torch.empty_like(mine), mine.contiguous().clone()
        with phase("reduce"):
            # NCCL connects two ranks when they first speak: if both received first, it never would.
            if self.comm.coord("pp") < other:
                sent = self.comm.send_start(given, "pp", other)
                theirs = self.comm.recv_start(received, "pp", other)
            else:
                theirs = self.comm.recv_start(received, "pp", other)
                sent = self.comm.send_start(given, "pp", other)
            mine.add_(theirs.wait())
            sent.wait()
