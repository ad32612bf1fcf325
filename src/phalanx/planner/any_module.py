"""Price and memory of a module that is not a decoder, under dp, fsdp and pp.

The plan gives the trained state and the traffic of a rank, as for a decoder. Operations and saved
bytes of each link are counted by a run of the module on the meta device (account/module.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from phalanx.account.activations import peak_in_flight
from phalanx.account.module import CountedLink, count_module
from phalanx.errors import ConfigError, StrategyError
from phalanx.parallel.pipeline.cut import check_schedule, num_stages
from phalanx.parallel.pipeline.links import cut_links, links_of
from phalanx.parallel.plan import Plan
from phalanx.planner import network, roofline
from phalanx.planner.held import StageMemory, early_bytes, margin, memory
from phalanx.planner.machine import Cluster, Device
from phalanx.planner.price import Costs, Price, StageCost, price, priced
from phalanx.planner.search import (
    Candidate,
    Found,
    Inequality,
    Question,
    fits,
    of_data,
)
from phalanx.planner.software import DEFAULT, Software
from phalanx.planner.stages import StageTimes, microbatches_for_peak
from phalanx.strategy import Axis, Recompute, Strategy


@dataclass(frozen=True, eq=False)
class AnyModule:
    """A module with its objective, samples and optimizer; compared by identity.

    Attributes:
        name: name of the job, for error messages.
        model: the whole model, on any device; it is not changed.
        objective: see `Trainer`.
        rows: function that returns a microbatch of a given number of rows.
        optimizer: function that creates the optimizer from parameters.
        options: arguments of `Plan` other than strategy and model.
    """

    name: str
    model: nn.Module
    objective: Any
    rows: Callable[[int], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @functools.cached_property
    def num_parameters(self) -> int:
        """Number of distinct parameters, trained or not."""
        return sum(p.numel() for p in self.model.parameters())

    @functools.cached_property
    def precision(self) -> str:
        """Data type of the module's first parameter."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @functools.cached_property
    def moments(self) -> float:
        """Optimizer state bytes per parameter byte; 2, as for AdamW, if it cannot be measured."""
        parameter = nn.Parameter(torch.zeros(64, 64))
        parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer = self.optimizer([parameter])
            optimizer.step()
        except Exception:  # the optimizer needs more than this one parameter
            return 2.0
        states = itertools.chain.from_iterable(s.values() for s in optimizer.state.values())
        held = sum(x.nbytes for x in states if isinstance(x, torch.Tensor) and x.ndim)
        return held / parameter.nbytes

    @functools.lru_cache(maxsize=64)  # noqa: B019 - one for each job
    def links(self, num_rows: int) -> tuple[CountedLink, ...]:
        """Return the counts of the module's links for a microbatch of `num_rows`.

        Raises:
            ConfigError: the module does not run on the meta device.
        """
        return tuple(count_module(self.model, self.objective, self.rows(num_rows), self.name))

    @functools.lru_cache(maxsize=256)  # noqa: B019 - one for each job
    def plan(self, strategy: Strategy, num_rows: int) -> Plan[Any]:
        """Return the plan of `strategy`; unless it has a cut, stages are balanced by FLOPs.

        Raises:
            StrategyError: the strategy cannot split the module.
        """
        if strategy.pp.degree > 1 and not strategy.cut:
            costs = [float(link.flops) for link in self.links(num_rows)]
            cut = cut_links(strategy, self.model, links_of(self.model), costs)
            strategy = dataclasses.replace(strategy, cut=tuple(map(len, cut)))
        return Plan(strategy, self.model, **self.options)


@dataclass(frozen=True)
class PlannedModule:
    """A step of a module, with the interface of `PlannedStep`; its sequences are batch rows."""

    module: AnyModule
    strategy: Strategy
    microbatch: int
    accumulation: int
    seq_len: int = 1

    @property
    def precision(self) -> str:
        """Data type of the arithmetic."""
        return self.module.precision

    @property
    def num_parameters(self) -> int:
        """Number of distinct parameters of the module."""
        return self.module.num_parameters

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter: its value, its gradient and its optimizer state."""
        return 4 * (2 + self.module.moments)

    @property
    def num_sequences(self) -> int:
        """Rows of one step over all ranks."""
        replicas = self.strategy.dp.degree * self.strategy.fsdp.degree
        return self.microbatch * self.accumulation * replicas

    @property
    def plan(self) -> Plan[Any]:
        """The plan that `train` would build."""
        return self.module.plan(self.strategy, self.microbatch)

    @property
    def links(self) -> tuple[CountedLink, ...]:
        """Operations and bytes of the links for one microbatch."""
        return self.module.links(self.microbatch)

    @property
    def recomputed(self) -> bool:
        """Whether blocks are recomputed; segments and selective recomputation are not supported.

        Raises:
            StrategyError: the kind of recomputation is neither `none` nor `full`.
        """
        kind = self.strategy.recompute.kind
        if kind not in ("none", "full"):
            raise StrategyError(
                f"the planner cannot price recompute:{kind} of a module; the nearest is "
                "recompute:full"
            )
        return kind == "full"


class _ModuleCosts(Costs):
    """Times of a module's stages, and of its communication."""

    def __init__(self, planned: PlannedModule, job: Cluster, software: Software) -> None:
        super().__init__(cast(Any, planned), job, software, planned.plan)
        self._module = planned

    @override
    def of_stages(self) -> list[StageCost]:
        planned, links = self._module, self._module.links
        device, software, precision = self.job.device, self.software, planned.precision

        def alone(operations: Sequence[Any]) -> float:
            return max(roofline.seconds(operations, device, software, precision))

        forward = [alone(link.forward) for link in links]
        again = [planned.recomputed and link.is_block for link in links]
        backward = [
            alone(link.backward) + (forward[at] if again[at] else 0.0)
            for at, link in enumerate(links)
        ]
        found: list[StageCost] = []
        for stage in self.plan.cut or [range(len(links))]:
            sent = links[stage[-1]].output if self.plan.cut else 0
            group = network.group_of(planned.strategy.mesh_axes(), ("pp",))
            message_s = network.seconds("send", group, sent, 1, self.job, software)
            forward_s, backward_s = (sum(of[at] for at in stage) for of in (forward, backward))
            found.append(StageCost(StageTimes(forward_s, backward_s, message_s), 0.0, 0.0))
        return found


@price.register
def _(planned: PlannedModule, cluster: Cluster, software: Software) -> Price:
    job = cluster.of(planned.strategy.num_ranks)
    replicas = planned.num_sequences / planned.microbatch
    flops = replicas * sum(link.flops for link in planned.links)
    return priced(_ModuleCosts(planned, job, software), flops, flops)


@memory.register
def _(planned: PlannedModule, device: Device, software: Software = DEFAULT) -> list[StageMemory]:
    plan, links, again = planned.plan, planned.links, planned.recomputed
    schedule = plan.schedule(microbatches_for_peak(planned.strategy, planned.accumulation))
    kept = [link.output if again and link.is_block else link.kept for link in links]
    at_work = [link.peak for link in links]
    cut = plan.cut or [range(len(links))]
    most = [max(sum(kept[stage.start : at]) + at_work[at] for at in stage) for stage in cut]
    of_stage = [sum(kept[at] for at in stage) for stage in cut]
    found: list[StageMemory] = []
    for pp_rank in range(planned.strategy.pp.degree):
        held = plan.for_pp_rank(pp_rank).holds(planned.accumulation)
        causes = {
            "weights": held.parameter_bytes,
            "gathered": held.gathered_bytes,
            "gradients": held.gradient_bytes + held.unreduced_bytes,
            "optimizer": int(planned.module.moments * held.parameter_bytes),
            "casts": 0,
            "activations": peak_in_flight(of_stage, most, schedule, pp_rank),
            "logits": 0,
        }
        beside = margin(planned.strategy, sum(causes.values())) if device.kind == "gpu" else 0
        early = early_bytes(planned.strategy, planned.accumulation, causes["gradients"])
        found.append(StageMemory(stage=pp_rank, margin=beside, early_gradients=early, **causes))
    return found


def search_module(question: Question, module: AnyModule, accumulation: int) -> Found:
    """Return the fastest strategies of a module that fit, and the rejected strategies.

    The batch has `question.num_sequences` rows, in `accumulation` microbatches per rank.

    Raises:
        ConfigError: no strategy divides the batch, or the module cannot be counted.
    """
    found: list[Candidate] = []
    rejected: dict[str, Inequality] = {}
    num_legal = 0
    for planned in _steps(question, module, accumulation):
        try:
            check_schedule(planned.strategy, planned.accumulation)
            held = fits(question, cast(Any, planned))
            num_legal += 1
            if isinstance(held, Inequality):
                rejected.setdefault(str(planned.strategy), held)
                continue
            cost = price(planned, question.cluster, question.software)
        except StrategyError:  # the strategy cannot split this module
            continue
        found.append(Candidate(cast(Any, planned), cost, held))
    if not num_legal:
        raise ConfigError(
            f"no strategy splits the batch of {question.num_sequences} rows at accumulation "
            f"{accumulation} over {question.cluster.num_devices} devices; take a batch that is a "
            "multiple of both"
        )
    found.sort(key=lambda each: each.price.step_s)
    return Found(tuple(found[:10]), tuple(rejected.values()), num_legal, len(found))


def _steps(question: Question, module: AnyModule, accumulation: int) -> Iterator[PlannedModule]:
    """Yield the steps that use all devices of the cluster and divide the batch evenly."""
    num_devices = question.cluster.num_devices
    links = module.links(1 if question.num_sequences < num_devices else 2)
    policies = ["none", *(["full"] if any(link.is_block for link in links) else [])]
    for pp in range(1, min(num_devices, len(links)) + 1):
        replicas, rest = divmod(num_devices, pp)
        microbatch, uneven = divmod(question.num_sequences, replicas * accumulation)
        if rest or uneven or not microbatch:
            continue
        stages = Strategy(pp=Axis(pp, Strategy.pp.kind)) if pp > 1 else Strategy()
        if pp > 1 and num_stages(stages) > len(links):
            continue
        for (dp, fsdp), policy in itertools.product(of_data(replicas), policies):
            recompute = Recompute(cast(Any, policy))
            strategy = dataclasses.replace(stages, dp=dp, fsdp=fsdp, recompute=recompute)
            yield PlannedModule(module, strategy, microbatch, accumulation)
