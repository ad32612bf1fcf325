"""The search for the fastest strategy that fits, over degrees, kinds, microbatches and policies.

`search` is of decoders, `search_module` of any module, `price_microbatches` of a given strategy.

    candidates   every legal strategy, in families that differ only in the kind of pp, dp and fsdp
    opened       a family in rising order of a lower bound of all its prices: first by kind of pp,
                 then by dp and fsdp
    pruned       by divisibility, and by memory, with the inequality that failed
    priced       the others, until the next bound exceeds the price of the last wanted candidate

Microbatches are the divisors of a rank's rows, up to the largest that fits. The bound includes
products, recomputation, the pipeline bubble and the largest messages. Because the bound is never
above a price of the family, the search finds the fastest of all candidates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, NamedTuple, cast

from phalanx.account.module import AnyModule
from phalanx.account.planned import AnyModel, DecoderModel, PlannedStep
from phalanx.account.rank_memory import StageMemory, heaviest, least_bytes, memory
from phalanx.errors import BatchError, ConfigError, StrategyError
from phalanx.parallel.pipeline.cut import check_schedule, num_stages, splits_backward
from phalanx.planner.bound import balanced_s, bound_s, pipeline_s
from phalanx.planner.machine import Cluster, Device
from phalanx.planner.price import Price, price
from phalanx.planner.software import Software
from phalanx.strategy import AXES, POSITIONS, Axis, Recompute, Strategy, require_built
from phalanx.strategy.kinds import KINDS

RECOMPUTE: Final = ("none", "selective", "full")
_MOST_CHUNKS: Final = 8
"""Most stages of a rank; more shorten the bubble little, and send more messages."""
_MOST_TP: Final = 64
_MOST_PP: Final = 64
_MOST_RING: Final = 64
_MOST_EP: Final = 64
_LEAST_TOKENS: Final = 2048
"""Least tokens of a sequence on one rank; with fewer, a ring waits for its messages."""


@dataclass(frozen=True)
class Question(Generic[AnyModel]):
    """The input of the search: a job and a cluster.

    Attributes:
        num_sequences: sequences of the global batch; of a module, rows.
        microbatch: the only microbatch size allowed; None for all divisors of a rank's rows.
        without: axes that must not be used.
    """

    model: AnyModel
    cluster: Cluster
    software: Software
    num_sequences: int
    microbatch: int | None = None
    without: tuple[str, ...] = ()

    def step(self, strategy: Strategy, microbatch: int, accumulation: int) -> PlannedStep[AnyModel]:
        """Return the planned step of a strategy."""
        return PlannedStep(self.model, strategy, microbatch, accumulation)


@dataclass(frozen=True)
class Inequality:
    """Why a strategy is rejected: `left` exceeds `right`; `what` describes `left`."""

    strategy: str
    what: str
    left: float
    right: float
    unit: Literal["GiB", "ms", ""] = "GiB"

    def __str__(self) -> str:
        scale, digits = {"GiB": (2**30, ".1f"), "ms": (1e-3, ",.1f"), "": (1, "g")}[self.unit]
        left, right = self.left / scale, self.right / scale
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.strategy}: {left:{digits}}{unit} > {right:{digits}}{unit} {self.what}"


@dataclass(frozen=True)
class Candidate:
    """A strategy that fits, with its price and the memory of its heaviest stage."""

    planned: PlannedStep[Any]
    price: Price
    memory: StageMemory


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        candidates: strategies that fit, each at its fastest microbatch, fastest first.
        rejected: strategies that fit with no microbatch, each with one inequality that failed.
        num_legal: number of legal combinations of strategy and microbatch.
        num_priced: number of combinations that were priced.
    """

    candidates: tuple[Candidate, ...]
    rejected: tuple[Inequality, ...]
    num_legal: int
    num_priced: int


Step = PlannedStep[DecoderModel]
OfDecoder = Question[DecoderModel]


def search(question: OfDecoder, wanted: int = 10) -> Found:
    """Return the `wanted` fastest strategies that fit, and the rejected strategies.

    Raises:
        ConfigError: the batch or the sequence is below 1, or no strategy is legal.
    """
    check(question)
    result = _search(question, wanted, is_wide=False)
    if not result.candidates:
        result = _search(question, wanted, is_wide=True)
    if not (result.candidates or result.rejected):
        num, num_devices = question.num_sequences, question.cluster.num_devices
        legal = max(1, round(num / num_devices)) * num_devices
        raise ConfigError(
            f"no strategy splits {num} sequences of {question.model.seq_len} tokens over "
            f"{num_devices} devices; the nearest batch that data parallelism splits is {legal}"
        )
    return result


def _search(question: OfDecoder, wanted: int, *, is_wide: bool) -> Found:
    """Search the degrees of `splits_with_data`."""
    cluster, software = question.cluster, question.software
    rejected: dict[str, Inequality] = {}
    # `opened` is a heap by lower bound. A family that is taken from it is either divided or, as a
    # single step, priced:
    #
    #     1. all legal splits enter as families, whose bound has no bubble (`balanced_s`)
    #     2. a family is divided by kind of pp, its parts enter with the bubble (`pipeline_s`),
    #        then by dp and fsdp, and the single steps enter with their communication (`bound_s`)
    #        unless the one of the most shards does not fit, and so none does
    #     3. a single step is priced, if it fits
    #     4. the search ends when the least bound exceeds the price of the last wanted candidate
    #
    # Each bound is at most the bounds of the family's parts, and these at most their prices.
    opened: list[tuple[float, int, StepFamily]] = []
    numbers = itertools.count()

    def add(family: StepFamily) -> None:
        with contextlib.suppress(StrategyError):  # it cannot split a block, or has a long schedule
            heapq.heappush(opened, (family.least_s(cluster, software), next(numbers), family))

    num_legal = num_priced = 0
    for base, data in splits_with_data(question, is_wide=is_wide):
        num_legal += sum(family.num_steps for family in families(question, base, data))
        rows = question.num_sequences // (cluster.num_devices * base.data_ranks // base.num_ranks)
        left: list[tuple[Axis, Axis]] = []
        # Weights, gradients and moments alone decide for most strategies, without a meta run.
        for size in microbatches(question, base, rows)[-1:]:  # the largest has the fewest gradients
            for dp, fsdp in data:
                strategy = dataclasses.replace(base, dp=dp, fsdp=fsdp)
                failed = too_large(question.step(strategy, size, rows // size), cluster.device)
                if failed is None:
                    left.append((dp, fsdp))
                else:
                    rejected[failed.strategy] = failed
        for family in families(question, base, left):
            add(family)
    asked: set[str] = set()
    fastest: dict[str, tuple[Step, Price]] = {}
    limit_s = math.inf
    while opened and opened[0][0] <= limit_s:
        family = heapq.heappop(opened)[-1]
        if len(family.stages) > 1:
            for part in family.parts():
                add(part)
            continue
        planned = family.smallest
        name = str(planned.strategy)
        try:
            if isinstance(fits(question, planned), Inequality):
                if name not in asked:
                    asked.add(name)
                    first, *others = steps_of(question, planned.strategy)
                    alone = [each for each in others if each.accumulation == 1]
                    steps, failed = that_fit(question, [first, *alone])
                    if failed is not None and not steps:
                        rejected[name] = failed
                continue
            if family.num_steps > 1:
                for part in family.parts():
                    add(part)
                continue
            num_priced += 1
            priced = planned, price(planned, cluster, software)
        except StrategyError:  # the strategy cannot split a part of the model
            continue
        fastest[name] = min(fastest.get(name, priced), priced, key=lambda each: order(*each))
        if len(fastest) >= wanted:
            limit_s = sorted(cost.step_s for _, cost in fastest.values())[wanted - 1]
    candidates: list[Candidate] = []
    for each, cost in sorted(fastest.values(), key=lambda each: order(*each))[:wanted]:
        held = fits(question, each)
        assert not isinstance(held, Inequality), "what does not fit is not priced"
        candidates.append(Candidate(each, cost, held))
    return Found(tuple(candidates), tuple(rejected.values()), num_legal, num_priced)


def that_fit(
    question: OfDecoder, steps: Sequence[Step]
) -> tuple[Sequence[Step], Inequality | None]:
    """Return the steps that fit, and why the smallest of the others does not.

    Memory rises with the microbatch. Only a single microbatch may hold fewer gradients, because
    backward reduces them at once, so it is tried even where a smaller one does not fit.

    Args:
        question: the job and the cluster.
        steps: steps of one strategy, in rising order of their microbatches.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    failed: list[Inequality] = []

    def is_rejected(planned: Step) -> bool:
        held = fits(question, planned)
        failed.extend([held] if isinstance(held, Inequality) else [])
        return isinstance(held, Inequality)

    # microbatch 1, 2, 4, 8 of 8 rows:  gradients are kept from the first microbatch to the last ...
    #
    #     1 x 8   weights  gradients  |a|
    #     2 x 4   weights  gradients  |aa|
    #     4 x 2   weights  gradients  |aaaa|
    #     8 x 1   weights  |aaaaaaaa|            ... but of a single microbatch reduced at once
    alone = [each for each in steps if each.accumulation == 1]
    several = steps[: len(steps) - len(alone)]
    # Upward, because small microbatches are counted for many strategies at once.
    fit = [*itertools.takewhile(lambda each: not is_rejected(each), several)]
    fit += [each for each in alone if not is_rejected(each)]
    return fit, min(failed, key=lambda each: each.left, default=None)


def order(planned: PlannedStep[Any], cost: Price) -> tuple[float, float, int, str]:
    """Return the sort key of a priced step: step time, then simplicity of the strategy."""
    strategy = planned.strategy
    parts = [(name, axis) for name, axis in strategy.axes() if axis.degree > 1]
    kinds = sum(axis.kind != getattr(Strategy, name).kind for name, axis in parts)
    num = len(parts) + kinds + (strategy.recompute != Recompute())
    return float(f"{cost.step_s:.9g}"), num, -planned.microbatch, str(strategy)


class StepFamily(NamedTuple):
    """Steps that differ only in the kind of pp and in dp and fsdp.

    All have fsdp, or none has, so the operations of a block are the same.

    Attributes:
        planned: the step with the first of `stages` and of `data`.
        stages: the pp axes to choose from.
        data: the (dp, fsdp) axes to choose from.
    """

    planned: Step
    stages: Sequence[Axis]
    data: Sequence[tuple[Axis, Axis]]

    @property
    def smallest(self) -> Step:
        """The step that holds the least on a rank: of the most shards, and of the highest stage."""
        dp, fsdp = max(self.data, key=lambda each: (each[1].degree, each[1].kind))
        strategy = dataclasses.replace(self.planned.strategy, dp=dp, fsdp=fsdp)
        return dataclasses.replace(self.planned, strategy=strategy)

    @property
    def num_steps(self) -> int:
        """Number of steps of the family."""
        return len(self.stages) * len(self.data)

    def least_s(self, cluster: Cluster, software: Software) -> float:
        """Return a lower bound of the seconds of each step.

        Raises:
            StrategyError: the strategies cannot split the model, or their schedule is too long.
        """
        if len(self.stages) > 1:
            return balanced_s(self.planned, cluster, software)
        check_schedule(self.planned.strategy, self.planned.accumulation)
        least_s = pipeline_s if len(self.data) > 1 else bound_s
        return least_s(self.planned, cluster, software)

    def parts(self) -> Iterator[StepFamily]:
        """Yield the families of one kind of pp each; of one kind, the single steps."""
        chosen = self.stages if len(self.stages) > 1 else self.data
        for each in chosen:
            of: dict[str, Axis] = (
                {"pp": each} if isinstance(each, Axis) else {"dp": each[0], "fsdp": each[1]}
            )
            strategy = dataclasses.replace(self.planned.strategy, **of)
            planned = dataclasses.replace(self.planned, strategy=strategy)
            if isinstance(each, Axis):
                yield StepFamily(planned, [each], self.data)
            else:
                yield StepFamily(planned, self.stages, [each])


def check(question: Question[Any]) -> None:
    """Check the sizes of a question.

    Raises:
        ConfigError: the batch or the sequence length is below 1.
    """
    for what, size in (("batch", question.num_sequences), ("sequence", question.model.seq_len)):
        if size < 1:
            raise ConfigError(f"plan: the {what} is {size}; it must be at least 1")


def fits(question: Question[Any], planned: PlannedStep[Any]) -> StageMemory | Inequality:
    """Return the memory of the heaviest stage, or why the step does not fit.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    device = question.cluster.device
    # A module may have frozen parameters, or parameters of 16 bits, which `least_bytes` leaves out.
    if isinstance(planned.model, DecoderModel) and (failed := too_large(planned, device)):
        return failed
    of = question.software
    stages = memory(planned, device.kind, kept=of.kept, logit_bytes=of.logit_bytes)
    most = heaviest(stages)
    if most.total <= device.usable_bytes:
        return most
    where = f"on stage {most.stage}" if len(stages) > 1 else "on each device"
    where = f"{where}, with {planned.microbatch} x {planned.seq_len} tokens"
    return Inequality(str(planned.strategy), where, most.total, device.usable_bytes)


def too_large(planned: PlannedStep[Any], device: Device) -> Inequality | None:
    """Return why the trained state alone does not fit; None if it fits."""
    least, room = least_bytes(planned), device.usable_bytes
    if least <= room:
        return None
    what = "for weights, gradients and moments alone"
    return Inequality(str(planned.strategy), what, least, room)


def microbatches(question: OfDecoder, strategy: Strategy, rows: int) -> Sequence[int]:
    """Return the rising microbatch sizes that divide the `rows` of a data rank.

    Larger ones are left out if the inputs of the blocks, 16 bits each, fill a device.
    """
    if question.microbatch is not None:
        return [] if rows % question.microbatch else [question.microbatch]
    model = question.model
    inputs = 2 * model.seq_len * model.shape.hidden * model.shape.num_layers
    shards = strategy.pp.degree * strategy.sample_shards * strategy.tp.degree
    most = question.cluster.device.usable_bytes * shards // inputs
    return [size for size in _divisors(rows) if size <= max(1, most)]


def steps_of(question: OfDecoder, strategy: Strategy) -> list[Step]:
    """Return the steps of a strategy in rising order of their microbatches."""
    rows = question.num_sequences // strategy.data_ranks
    steps: list[Step] = []
    for size in microbatches(question, strategy, rows):
        with contextlib.suppress(StrategyError):  # the schedule would be too long
            check_schedule(strategy, rows // size)
            steps.append(question.step(strategy, size, rows // size))
    return steps


def splits_with_data(
    question: OfDecoder, *, is_wide: bool = False
) -> Iterator[tuple[Strategy, Sequence[tuple[Axis, Axis]]]]:
    """Yield each legal split without dp and fsdp, and the (dp, fsdp) axes of the other devices.

    A wide split may have tp between hosts, and shards of a sequence below `_LEAST_TOKENS`.
    """
    num_devices = question.cluster.num_devices
    for base in _splits(question, is_wide=is_wide):
        replicas, rest = divmod(num_devices, base.num_ranks)
        if not rest and question.num_sequences % (replicas * base.data_ranks) == 0:
            yield base, [*of_data(replicas)]


def families(
    question: OfDecoder, base: Strategy, data: Sequence[tuple[Axis, Axis]]
) -> Iterator[StepFamily]:
    """Yield the families of a split, by microbatch and recomputation, without fsdp and with."""
    num_layers = question.model.shape.num_layers
    for has_fsdp in (False, True):
        group = [each for each in data if (each[1].degree > 1) == has_fsdp]
        if not group:
            continue
        dp, fsdp = group[0]
        rows = question.num_sequences // dataclasses.replace(base, dp=dp, fsdp=fsdp).data_ranks
        for size, policy in itertools.product(microbatches(question, base, rows), RECOMPUTE):
            recompute = Recompute(policy)
            strategy = dataclasses.replace(base, dp=dp, fsdp=fsdp, recompute=recompute)
            split = dataclasses.replace(strategy, pp=Axis(base.pp.degree, "zbv"))
            stages = _stages(base.pp.degree, num_layers, is_split=splits_backward(split))
            yield StepFamily(question.step(strategy, size, rows // size), stages, group)


@functools.lru_cache(maxsize=256)
def _stages(degree: int, num_layers: int, *, is_split: bool) -> list[Axis]:
    """Return the pp axes of a degree, with the numbers of chunks that the layers fill.

    Without a divided backward, zb has the schedule of 1f1b or interleaved, and dualpipev has the
    schedule of zbv.
    """
    if degree == 1:
        return [Strategy.pp]
    most = num_layers // degree
    several = range(2, min(_MOST_CHUNKS, most) + 1)
    kinds = [("1f1b", None), *(("interleaved", chunks) for chunks in several)]
    kinds += [("zbv", None)] if most > 1 else []
    if is_split:
        kinds += [("zb", 1), *(("zb", chunks) for chunks in several)]
        kinds += [("dualpipev", None)] if most > 1 else []
    return [Axis(degree, kind, chunks) for kind, chunks in kinds]


def _splits(question: OfDecoder, *, is_wide: bool) -> Iterator[Strategy]:
    """Yield the legal combinations of degrees of all axes except dp and fsdp."""
    shape, num_devices = question.model.shape, question.cluster.num_devices
    most = {
        "pp": min(_MOST_PP, shape.num_layers),
        "tp": _MOST_TP if is_wide else min(_MOST_TP, question.cluster.levels[0].devices),
        POSITIONS: _MOST_RING if is_wide else max(1, question.model.seq_len // _LEAST_TOKENS),
        "ep": 1 if shape.experts is None else min(_MOST_EP, shape.experts.num_experts),
    }
    axes = [name for name in AXES if name in most]
    most |= dict.fromkeys(question.without, 1)
    choices = [[size for size in _divisors(num_devices) if size <= most[name]] for name in axes]
    for degrees in itertools.product(*choices):
        strategy = Strategy()
        for name, degree in zip(axes, degrees, strict=True):
            strategy = strategy.with_degree(name, degree)
        tp = strategy.tp.degree
        if shape.num_heads % tp or shape.num_kv_heads % tp:
            continue
        if shape.experts is not None and shape.experts.num_experts % strategy.ep.degree:
            continue
        degree = strategy.sample_shards
        for kind in KINDS[POSITIONS] if degree > 1 else [getattr(strategy, POSITIONS).kind]:
            split = dataclasses.replace(strategy, **{POSITIONS: Axis(degree, kind)})
            if question.model.seq_len % split.length_unit == 0:
                yield split


def of_data(replicas: int) -> Iterator[tuple[Axis, Axis]]:
    """Yield (dp, fsdp) axes of `replicas` data ranks: dp alone, and each degree of fsdp."""
    dp, fsdp = Strategy.dp, Strategy.fsdp
    yield dataclasses.replace(dp, degree=replicas), fsdp
    for size, kind in itertools.product(_divisors(replicas)[1:], KINDS["fsdp"]):
        yield dataclasses.replace(dp, degree=replicas // size), Axis(size, kind)


@functools.lru_cache(maxsize=1 << 10)
def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def priced_strategy(
    question: OfDecoder, strategy: Strategy, microbatch: int | None = None
) -> Candidate | Inequality:
    """Return a priced strategy, or why it does not fit; if `microbatch` is None, at the fastest.

    Raises:
        PhalanxError: see `price_microbatches`.
    """
    priced = price_microbatches(question, strategy, microbatch)
    return min(
        priced, key=lambda each: each.price.step_s if isinstance(each, Candidate) else math.inf
    )


def price_microbatches(
    question: OfDecoder, strategy: Strategy, microbatch: int | None = None
) -> list[Candidate | Inequality]:
    """Return the priced strategy for each microbatch that fits, and why the next does not.

    Raises:
        ConfigError: the batch or the sequence length is below 1.
        StrategyError: the strategy is not built, or cannot split the model or the sequence.
        BatchError: the data ranks, or the microbatch, do not divide the batch.
    """
    check(question)
    require_built(strategy)
    _ = question.step(strategy, 1, 1).plan  # raises if no other length or batch would help
    seq_len, unit = question.model.seq_len, strategy.length_unit
    if seq_len % unit:
        legal = max(1, round(seq_len / unit)) * unit
        raise StrategyError(
            f"{strategy} needs a sequence length that is a multiple of {unit} tokens, not "
            f"{seq_len}; the nearest is {legal}"
        )
    unit = strategy.data_ranks * (microbatch or 1)
    rows, rest = divmod(question.num_sequences, strategy.data_ranks)
    if question.num_sequences % unit:
        legal = max(1, round(question.num_sequences / unit)) * unit
        each = f"microbatch {microbatch} x " if microbatch else ""
        raise BatchError(
            f"the batch of {question.num_sequences} sequences is not a multiple of {each}"
            f"{strategy.data_ranks} data ranks = {unit}; the nearest batch is {legal}"
        )
    assert not rest, "the unit is a multiple of the data ranks"
    asked = dataclasses.replace(question, microbatch=microbatch or question.microbatch)
    check_schedule(strategy, rows // max(microbatches(asked, strategy, rows), default=rows))
    fitting, failed = that_fit(question, steps_of(asked, strategy))
    priced: list[Candidate | Inequality] = [] if failed is None else [failed]
    for planned in fitting:
        held = fits(question, planned)
        assert not isinstance(held, Inequality), "what does not fit is not priced"
        cost = price(planned, question.cluster, question.software)
        priced.append(Candidate(planned, cost, held))
    return priced


def search_module(question: Question[AnyModule], accumulation: int) -> Found:
    """Return the fastest strategies of a module that fit, and the rejected strategies.

    The batch has `question.num_sequences` rows, in `accumulation` microbatches per rank.

    Raises:
        ConfigError: no strategy divides the batch, or the module cannot be counted.
    """
    fitting: list[Candidate] = []
    rejected: dict[str, Inequality] = {}
    num_legal = 0
    for planned in _steps_of_module(question, accumulation):
        try:
            check_schedule(planned.strategy, planned.accumulation)
            held = fits(question, planned)
            num_legal += 1
            if isinstance(held, Inequality):
                rejected.setdefault(str(planned.strategy), held)
                continue
            cost = price(planned, question.cluster, question.software)
        except StrategyError:  # the strategy cannot split this module
            continue
        fitting.append(Candidate(planned, cost, held))
    if not num_legal:
        raise ConfigError(
            f"no strategy splits the batch of {question.num_sequences} rows at accumulation "
            f"{accumulation} over {question.cluster.num_devices} devices; take a batch that is a "
            "multiple of both"
        )
    fitting.sort(key=lambda each: each.price.step_s)
    return Found(tuple(fitting[:10]), tuple(rejected.values()), num_legal, len(fitting))


def _steps_of_module(
    question: Question[AnyModule], accumulation: int
) -> Iterator[PlannedStep[AnyModule]]:
    """Yield the steps that use all devices of the cluster and divide the batch evenly."""
    num_devices = question.cluster.num_devices
    links = question.model.links(1 if question.num_sequences < num_devices else 2)
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
            yield question.step(strategy, microbatch, accumulation)
