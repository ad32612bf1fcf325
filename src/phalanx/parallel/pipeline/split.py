"""Pipeline parallelism: each rank has some of the layers, and microbatches pass through the ranks.

Idea      A model that does not fit one device is cut into stages. While one stage computes a
          microbatch, the other stages compute other microbatches. A schedule (schedule.py) sets the
          order (Huang et al. 2019, GPipe; Narayanan et al. 2021, section 2).
Layout    W of stage s is on rank s only; with v chunks a rank has v stages. If the output
          projection is tied to the embedding, the first and the last stage each hold a replica.
Forward   x[B, T, D] of a microbatch is sent from each stage to the next
Backward  dx[B, T, D] is sent back. The gradients of a tied weight are summed over its two replicas.
Cost      A rank sends B T D elements a microbatch and stage border in forward, and the same number
          in backward. The bubble under 1F1B is (p - 1) / (m + p - 1) of a step of m microbatches.
Limits    The model is a chain: `Decoder`, or see modules.py. At least as many layers (blocks,
          embedding, head) as stages. Backward runs in two passes (zb, zbv, dualpipev) only without
          recomputation and without axes other than pp and dp: the operators of those compute both
          gradients at once, so B replaces I and W.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from typing_extensions import override

from phalanx.comm.comm import Comm, Ranks, local_shard
from phalanx.comm.ledger import Entry, Phase, no_phase
from phalanx.models.decoder import Decoder
from phalanx.parallel.accumulate import Runner
from phalanx.parallel.pipeline.borders import Border, Borders
from phalanx.parallel.pipeline.cut import schedule_of
from phalanx.parallel.pipeline.links import chain_of
from phalanx.parallel.pipeline.lowering import SENDS, messages_of, other_stage
from phalanx.parallel.pipeline.modules import ModuleStages
from phalanx.parallel.pipeline.runtime import Pipeline
from phalanx.parallel.pipeline.schedule import Action, Schedule
from phalanx.parallel.pipeline.sizes import HEADER_BYTES
from phalanx.parallel.pipeline.stage import DecoderStages, Stages
from phalanx.parallel.reduce import GradientReducer, WrappingReducer
from phalanx.parallel.skeleton import Weight
from phalanx.parallel.split import Split, Target, entries_of


class PipelineSplit(Split):
    """The axis pp: a rank has some links of the chain, and later axes split only these links."""

    axis = "pp"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.chain = chain_of(target.strategy, target.skeleton)
        self._borders: Borders | None = None
        if target.run_on_shapes is not None and target.skeleton.shape is None:
            self._borders = Borders(target.skeleton.model, self.chain, target.run_on_shapes)
        self._stage(target)

    def _stage(self, target: Target) -> None:
        """Set the stages of the rank at `target.pp_rank`."""
        self.target = target
        self.here = self.schedule(1).stages_of(target.pp_rank)
        self._num_ends = len({0, len(self.chain.cut) - 1}.intersection(self.here))
        self._stages: Stages | None = None

    @override
    def for_stage(self, target: Target) -> PipelineSplit:
        other = copy.copy(self)
        other._stage(target)
        return other

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the schedule of a step of `num_microbatches`."""
        return schedule_of(self.target.strategy, num_microbatches)

    @override
    def next_target(self) -> Target:
        chain, here = self.chain, frozenset(self.here)
        names_here, names_gone = (
            {
                name
                for stage in range(len(chain.cut))
                if (stage in here) == is_here
                for name in chain.names(stage)
            }
            for is_here in (True, False)
        )
        return dataclasses.replace(
            self.target,
            skeleton=self.target.skeleton.part(names_here, names_gone),
            num_stages=len(self.here),
            num_end_stages=self._num_ends,
        )

    @override
    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        sent = {op: Counter[tuple[int, tuple[int, int]]]() for op in SENDS}
        for send in self._sends(len(microbatches)):
            border = min(send.stage, other_stage(send))
            sent[send.op][border, microbatches[send.microbatch]] += 1
        rows: list[tuple[str, int, int]] = []
        for phase, of in zip(("forward", "backward"), sent.values(), strict=True):
            sizes = [(self._border(*at), number) for at, number in of.items()]
            if all(border is not None for border, _ in sizes):
                payload = sum(number * border.nbytes for border, number in sizes if border)
                rows.append((phase, of.total(), payload))
        if self.target.skeleton.shape is None:
            num_headers = sent["SEND_F"].total()
            rows.append(("sizes", num_headers, num_headers * HEADER_BYTES))
        if (weight := self._tied) is not None:
            held = self.target.shard_shape_after_later("table", weight.shape)
            rows.append(("reduce", 1, math.prod(held) * weight.dtype.itemsize))
        return _entries(rows)

    @override
    def header_traffic(
        self, microbatches: Sequence[tuple[int, int]], before: Sequence[tuple[int, int]]
    ) -> list[Entry]:
        senders = {send.stage for send in self._sends(1) if send.op == "SEND_F"}
        if self.target.skeleton.shape is not None:
            calls = len(senders) * len(set(microbatches).difference(before))
            return _entries([("sizes", calls, calls * HEADER_BYTES)])
        # Stages of a module send an outline only if it differs from the previous microbatch's.
        calls, num_numbers, last = 0, 0, before[-1:]
        for microbatch in microbatches:
            for stage in senders:
                new = self._border(stage, microbatch)
                known = self._border(stage, last[0]) if last else None
                if new is not None and (known is None or known.outline != new.outline):
                    calls, num_numbers = calls + 1, num_numbers + len(new.outline)
            last = [microbatch]
        return _entries([("sizes", calls, num_numbers * torch.int64.itemsize)])

    def _sends(self, num_microbatches: int) -> list[Action]:
        """Return the rank's sends in a step of `num_microbatches`, in order."""
        schedule = self.schedule(num_microbatches)
        computes = schedule.orders[self.target.pp_rank]
        messages = (message for each in computes for message in messages_of(schedule, each))
        return [message for message in messages if message.op in SENDS]

    def _border(self, stage: int, microbatch: tuple[int, int]) -> Border | None:
        """Return the bytes and the outline that a stage sends to the next; None if unknown."""
        target, shape = self.target, self.target.skeleton.shape
        if shape is not None:
            held = target.shard_shape_after_later("residual", (*microbatch, shape.hidden))
            return Border(math.prod(held) * target.compute_dtype.itemsize, ())
        borders = self._borders and self._borders.after(microbatch)
        return borders[stage] if borders else None

    @property
    def _tied(self) -> Weight | None:
        """The tied weight, if this rank has one of its two replicas; else None."""
        return self.chain.tied if self._num_ends == 1 else None

    @override
    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Remove from `model` the modules outside of this rank's stages."""
        if isinstance(model, Decoder):
            self._stages = DecoderStages(model, self.chain.cut, self.here)
        else:
            self._stages = ModuleStages(model, self.chain, self.here)

    @override
    def reducer(
        self, model: nn.Module, comm: Ranks, inner: GradientReducer | None
    ) -> GradientReducer | None:
        if self._tied is None or not self._tied.is_trained:
            return inner
        rank_of = self.schedule(1).rank_of
        other = rank_of[-1] if 0 in self.here else rank_of[0]
        return TiedReducer(model.get_parameter(self._tied.name), comm, other, inner)

    @override
    def runner(self, model: nn.Module, comm: Ranks, runner: Runner) -> Runner:
        assert self._stages is not None, "applied first"
        is_copy = self._tied is not None and 0 not in self.here
        replicas = [model.get_parameter(self._tied.name)] if self._tied and is_copy else []
        return Pipeline(self._stages, comm, self.schedule, runner.reducer, replicas)


def _entries(rows: Sequence[tuple[str, int, int]]) -> list[Entry]:
    """Return the ledger entries of messages over pp, given phase, number and total bytes."""
    messages = ((phase, "pp", "send", calls, payload) for phase, calls, payload in rows)
    return entries_of(messages, lambda _: 2)


class TiedReducer(WrappingReducer):
    """Runs `inner`, then sums the gradients of the two replicas of a tied weight."""

    def __init__(
        self, weight: nn.Parameter, comm: Comm, other: int, inner: GradientReducer | None
    ) -> None:
        """Reduce with the rank at coordinate `other` of pp, which has the second replica."""
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
        received, copied = torch.empty_like(mine), mine.contiguous().clone()
        with phase("reduce"):
            # NCCL connects two ranks at their first message; if both received first, it would hang.
            if self.comm.coord("pp") < other:
                sent = self.comm.send_start(copied, "pp", other)
                theirs = self.comm.recv_start(received, "pp", other)
            else:
                theirs = self.comm.recv_start(received, "pp", other)
                sent = self.comm.send_start(copied, "pp", other)
            mine.add_(theirs.wait())
            sent.wait()
