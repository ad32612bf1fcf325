"""Operations and saved bytes of any module, by link of its chain, counted on the meta device.

A copy of the module runs one microbatch forward and backward on the meta device. Each operation
counts for the link (parallel/pipeline/links.py) whose modules run it; a module that is no chain is
one link. The backward of a link begins when the gradient of its output is available; the loss is a
part of the last link. The parts of the recorded run are numbered as they follow:

    forward   0 -> 1 -> ... -> L - 1                L links
    backward  2L - 1 <- ... <- L + 1 <- L
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx.account.activations import microbatches_for_peak, peak_in_flight
from phalanx.account.planned import InFlight, PlannedStep
from phalanx.account.recorder import MetaRecorder, Operation, storage_id
from phalanx.errors import ConfigError, StrategyError, text_of
from phalanx.parallel.pipeline.links import Links, cut_links, links_of
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import blocks_of, copied_on_meta
from phalanx.parallel.split import StateBytes
from phalanx.strategy import Strategy


@dataclass(frozen=True)
class CountedLink:
    """Operations and bytes of one link for one microbatch.

    Attributes:
        modules: names of its modules.
        forward, backward: its operations, without recomputation.
        kept: bytes saved for backward, its output included.
        output: bytes of its output.
        peak: peak bytes in its backward, in addition to bytes that earlier links saved.
        is_block: whether recomputation can run it again.
    """

    modules: tuple[str, ...]
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    kept: int
    output: int
    peak: int
    is_block: bool

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward."""
        return sum(each.flops for each in (*self.forward, *self.backward))


def count_module(model: nn.Module, objective: Any, microbatch: Any, name: str) -> list[CountedLink]:
    """Count one microbatch by link, on a copy of `model`, which may be on any device.

    Args:
        model: the whole model, not split.
        objective: an object with `loss_sum(model, microbatch, step)`.
        microbatch: the samples, on the meta device.
        name: name of the job, for error messages.

    Raises:
        ConfigError: the module does not run on the meta device; the message has the cause.
    """
    try:
        links: Links = links_of(model)
    except StrategyError:  # it is no chain
        links = [[""]]
    recorder, outputs, last = MetaRecorder(), [0] * len(links), len(links) - 1
    recorder.enter(0)

    def advance(part: int, *_: Any) -> None:
        if part > recorder.part:
            recorder.enter(part)

    def leave(number: int, _module: Any, _args: Any, out: Any) -> None:
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        sizes = {storage_id(x): x.untyped_storage().nbytes() for x in results}
        outputs[number] = sum(sizes.values())
        for x in results:
            if x.requires_grad and number < last:
                x.register_hook(functools.partial(advance, 2 * last + 1 - number))

    try:
        shapes, of_shapes = copied_on_meta((model, objective))
        for number, names in enumerate(links):
            for module in map(shapes.get_submodule, names):
                module.register_forward_pre_hook(functools.partial(advance, number))
                module.register_forward_hook(functools.partial(leave, number))
        with recorder:
            loss = of_shapes.loss_sum(shapes, microbatch, 0)
            recorder.enter(last + 1)
            loss.backward()
    except Exception as error:
        lines = text_of(error).strip().splitlines() or [""]
        raise ConfigError(
            f"{name} cannot be counted on the meta device, where tensors have shapes and no "
            f"numbers: {type(error).__name__}: {lines[0][:200]}"
        ) from error
    # Parts and the level of live bytes at each begin, for two links:
    #
    #     part     0        1        2        3
    #              forward 0         backward 1
    #                       forward 1         backward 0
    #     kept of link 0 = level at begin of 1 - level at begin of 0
    #     peak of link 0 = highest level within part 3, above the level at begin of 0
    levels = recorder.levels([p.grad for p in shapes.parameters() if p.grad is not None])
    begins: dict[Any, int] = recorder.begins
    # A part that was not entered is empty: it begins with the next.
    begin_of = [
        next((begins[later] for later in range(part, 2 * last + 2) if later in begins), -1)
        for part in range(2 * last + 2)
    ]
    blocks = {path for path, _ in blocks_of(model)}
    counted: list[CountedLink] = []
    for number, names in enumerate(links):
        back = 2 * last + 1 - number
        before, kept = levels[begin_of[number]], levels[begin_of[number + 1]]
        end = begin_of[back + 1] if number else -1
        peak = max(levels[begin_of[back] : end + 1 or None]) if back in begins else kept
        counted.append(
            CountedLink(
                modules=tuple(names),
                forward=tuple(recorder.operations[number]),
                backward=tuple(recorder.operations[back]),
                kept=kept - before,
                output=outputs[number],
                peak=max(peak, kept) - before,
                is_block=set(names) <= blocks,
            )
        )
    return counted


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

    @property
    def num_active(self) -> int:
        """Number of parameters that a sample meets; all of them, as experts are not known."""
        return self.num_parameters

    @functools.cached_property
    def num_trained(self) -> int:
        """Number of distinct parameters that are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

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

    @property
    def seq_len(self) -> int:
        """1, because sequences of the planner are rows of the batch."""
        return 1

    @property
    def tied_bytes(self) -> int:
        """0, because the gradient of a tied weight is counted where backward adds to it."""
        return 0

    def held(self, step: PlannedStep[Any], pp_rank: int) -> StateBytes:
        """Return the trained state's bytes on a rank of a pp coordinate."""
        return step.plan.for_pp_rank(pp_rank).holds(step.accumulation)

    def recomputes(self, strategy: Strategy) -> bool:
        """Return whether blocks are recomputed; segments and selective are not supported.

        Raises:
            StrategyError: the kind of recomputation is neither `none` nor `full`.
        """
        kind = strategy.recompute.kind
        if kind not in ("none", "full"):
            raise StrategyError(
                f"the planner cannot price recompute:{kind} of a module; the nearest is "
                "recompute:full"
            )
        return kind == "full"

    def in_flight(
        self, step: PlannedStep[Any], device: str, kept: float, logit_bytes: int
    ) -> list[InFlight]:
        """Return the bytes in flight at each pp coordinate, as counted on the meta device."""
        plan, links, again = step.plan, self.links(step.microbatch), self.recomputes(step.strategy)
        schedule = plan.schedule(microbatches_for_peak(step.strategy, step.accumulation))
        saved = [link.output if again and link.is_block else link.kept for link in links]
        cut = plan.cut or [range(len(links))]
        most = [max(sum(saved[of.start : at]) + links[at].peak for at in of) for of in cut]
        of_stage = [sum(saved[at] for at in of) for of in cut]
        return [
            InFlight(0, peak_in_flight(of_stage, most, schedule, pp_rank), 0, pp_rank)
            for pp_rank in range(step.strategy.pp.degree)
        ]

    def flops(self, step: PlannedStep[Any]) -> tuple[float, float]:
        """Return the FLOPs of a step over all ranks, twice."""
        replicas = step.num_sequences / step.microbatch
        flops = replicas * sum(link.flops for link in self.links(step.microbatch))
        return flops, flops
