"""Find the fastest strategy that fits: all degrees, kinds, microbatches and policies.

    candidates   every legal text, in the order of a bound that no price is below
    pruned       by divisibility, and by memory, each with the inequality that failed
    priced       the others, until the bound of the next is above the price of the last wanted

The bound is of products at the best efficiency, with recomputation, the bubble of the schedule and
the largest messages. So the best that is found is the best there is among the candidates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from phalanx.account.parameters import num_parameters
from phalanx.comm.axes import AXIS_SETS, SHARDS
from phalanx.errors import ConfigError, StrategyError
from phalanx.models.shape import ModelShape
from phalanx.planner import network
from phalanx.planner.held import Memory, heaviest, memory
from phalanx.planner.machine import Cluster, Device
from phalanx.planner.parts import model_spent
from phalanx.planner.planned import PlannedStep
from phalanx.planner.price import Price, price
from phalanx.planner.recipe import STATE_BYTES, shard_groups, units_of
from phalanx.planner.software import Software
from phalanx.strategy import AXES, Axis, Recompute, Strategy

MICROBATCHES: Final = (1, 2, 4, 8)
RECOMPUTE: Final = ("none", "selective", "full")
_PIPELINES: Final = (("1f1b", None), ("interleaved", 2), ("interleaved", 4))
_MOST_TP: Final = 64
_MOST_PP: Final = 64
_LEAST_TOKENS: Final = 1024
"""Of a sequence on a rank: with fewer, a ring waits for its messages."""


@dataclass(frozen=True)
class Question:
    """A question to the search.

    Attributes:
        num_sequences: of the global batch.
        microbatches: those that may be chosen.
        without: axes that may not.
        has_documents: several documents stand in a row.
    """

    shape: ModelShape
    cluster: Cluster
    software: Software
    seq_len: int
    num_sequences: int
    precision: str = "bfloat16"
    microbatches: tuple[int, ...] = MICROBATCHES
    without: tuple[str, ...] = ()
    has_documents: bool = False

    def step(self, strategy: Strategy, microbatch: int, accumulation: int) -> PlannedStep:
        """Return the step that a strategy takes."""
        return PlannedStep(
            *(self.shape, strategy, self.seq_len, microbatch, accumulation, self.precision),
            has_documents=self.has_documents,
        )


@dataclass(frozen=True)
class Inequality:
    """Why a strategy is rejected: `left`, of which `what` says what it is, is above `right`."""

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
    """A strategy that fits, with its price and what its heaviest stage holds."""

    planned: PlannedStep
    price: Price
    memory: Memory


@dataclass(frozen=True)
class Found:
    """What the search has found.

    Attributes:
        candidates: that fit, the fastest first.
        rejected: the neighbours that do not fit, by strategy.
        num_legal: legal strategies altogether.
        num_priced: those that were priced.
    """

    candidates: tuple[Candidate, ...]
    rejected: tuple[Inequality, ...]
    num_legal: int
    num_priced: int


def search(question: Question, wanted: int = 10) -> Found:
    """Return the `wanted` fastest strategies that fit, and what was rejected.

    Raises:
        ConfigError: the batch is smaller than one sequence, or no strategy is legal.
    """
    check(question)
    steps = _by_bound(question)
    if not steps:
        raise ConfigError(
            f"no strategy splits {question.num_sequences} sequences of {question.seq_len} tokens "
            f"over {question.cluster.num_devices} devices; take a batch that is a multiple of them"
        )
    found: list[Candidate] = []
    rejected: dict[str, Inequality] = {}
    num_priced = 0
    for least_s, planned in steps:
        limit_s = found[wanted - 1].price.step_s if len(found) >= wanted else math.inf
        name = str(planned.strategy)
        if (failed := too_large(planned, question.cluster.device)) is not None:
            rejected.setdefault(name, failed)
            continue
        if least_s > limit_s:
            break
        try:
            num_priced += 1
            cost = price(planned, question.cluster, question.software)
            if cost.step_s > limit_s:  # whether it fits does not matter
                continue
            if (failed := fails(planned, question.cluster)) is not None:
                rejected.setdefault(name, failed)
                continue
        except StrategyError:  # the model has parts that the strategy does not split
            continue
        held = heaviest(memory(planned, question.cluster.device))
        found.append(Candidate(planned, cost, held))
        found.sort(key=lambda each: each.price.step_s)
    names = {str(each.planned.strategy) for each in found}
    kept = tuple(each for name, each in rejected.items() if name not in names)
    return Found(tuple(found[:wanted]), kept, len(steps), num_priced)


def _by_bound(question: Question) -> list[tuple[float, PlannedStep]]:
    """Return the legal steps by their bounds; the bound is 0 where the state is too large."""
    found: list[tuple[float, PlannedStep]] = []
    for planned in _legal_steps(question):
        try:
            is_large = too_large(planned, question.cluster.device) is not None
            found.append((0.0 if is_large else bound_s(question, planned), planned))
        except StrategyError:  # the model has parts that the strategy does not split
            continue
    return sorted(found, key=lambda each: each[0])


def check(question: Question) -> None:
    """Refuse what no strategy can do.

    Raises:
        ConfigError: a size below 1, or a sequence longer than the model has positions.
    """
    for what, size in (("batch", question.num_sequences), ("sequence", question.seq_len)):
        if size < 1:
            raise ConfigError(f"plan: the {what} is {size}; it must be at least 1")


def fails(planned: PlannedStep, cluster: Cluster) -> Inequality | None:
    """Return why a planned does not fit; None if it does.

    Raises:
        StrategyError: the strategy does not split the model.
    """
    if (failed := too_large(planned, cluster.device)) is not None:
        return failed
    room, name = cluster.device.usable_bytes, str(planned.strategy)
    stages = memory(planned, cluster.device)
    most = heaviest(stages)
    if most.total > room:
        where = f"on stage {most.stage}" if len(stages) > 1 else "on each device"
        where = f"{where}, with {planned.microbatch} x {planned.seq_len} tokens"
        return Inequality(name, where, most.total, room)
    return None


def too_large(planned: PlannedStep, device: Device) -> Inequality | None:
    """Return why the trained state alone does not fit; None if it does."""
    least, room = least_bytes(planned), device.usable_bytes
    if least <= room:
        return None
    what = "of weights, gradients and moments alone"
    return Inequality(str(planned.strategy), what, least, room)


def least_bytes(planned: PlannedStep) -> float:
    """Return what a rank holds of the trained state at least: of a stage of average size.

    A shard of weights, gradients and moments, or all of what a stage of ZeRO leaves whole: weights
    in 16 bits, and of zero1 gradients in 32, where they are added up.
    """
    strategy = planned.strategy
    split = num_parameters(planned.shape).total / strategy.tp.degree / strategy.pp.degree
    if strategy.fsdp.degree == 1:
        return STATE_BYTES * split
    shard = split / strategy.num_shards
    whole = {"zero1": 2 + (4 if planned.accumulation > 1 else 0), "zero2": 2}
    return STATE_BYTES * shard + whole.get(strategy.fsdp.kind, 0) * 0.9 * (split - shard)


def bound_s(question: Question, planned: PlannedStep) -> float:
    """Return a time that no step is below: of its operations and its large messages.

    The stage that computes longest takes at least as long as a stage of average size, with a
    bubble of such stages. Sent are at least the weights of a stage's blocks, in 16 bits.
    """
    strategy, software = planned.strategy, question.software
    spent = model_spent(planned, question.cluster.device, software)
    of_stage = planned.accumulation / strategy.pp.degree
    bubble = (strategy.pp.degree - 1) / planned.accumulation / (strategy.pp.option or 1)
    with_tensor_s = spent.device * of_stage + _tensor_s(question, planned)
    pipeline_s = max(with_tensor_s, spent.host * of_stage) * (1 + bubble)
    sent_s, overlap = _sent_s(question, planned), software.overlap
    return pipeline_s + max(sent_s - overlap * pipeline_s, 0.5 * (1 - overlap) * sent_s)


def _tensor_s(question: Question, planned: PlannedStep) -> float:
    """Return the least time in which tp gathers and scatters around the blocks of a stage."""
    strategy = planned.strategy
    tokens = planned.microbatch * planned.accumulation * planned.seq_len / strategy.sample_shards
    blocks = question.shape.num_layers / strategy.pp.degree
    sent = 8 * 2 * tokens * question.shape.hidden * blocks * (1 - 1 / strategy.tp.degree)
    return _least_s(question, strategy, ("tp",), sent)


def _sent_s(question: Question, planned: PlannedStep) -> float:
    """Return the least time in which dp and fsdp send weights and gradients.

    zero3 gathers twice and reduces once for each microbatch, zero2 gathers once.
    """
    strategy, count = planned.strategy, num_parameters(question.shape)
    blocks = question.shape.num_layers // strategy.pp.degree
    of_block = (count.attention + count.mlp) / question.shape.num_layers
    weights = 2 * of_block * blocks / strategy.tp.degree
    times = {"zero3": 3 * planned.accumulation, "zero2": 1 + planned.accumulation}
    sent_s = 0.0
    if strategy.fsdp.degree > 1:
        sent = times.get(strategy.fsdp.kind, 2) * (weights - weights / strategy.num_shards)
        sent_s = _least_s(question, strategy, AXIS_SETS[SHARDS], sent)
    replicated = 2 * weights / strategy.num_shards * (1 - 1 / strategy.dp.degree)
    return sent_s + _least_s(question, strategy, ("dp",), replicated)


def _least_s(
    question: Question, strategy: Strategy, names: tuple[str, ...], sent_bytes: float
) -> float:
    group = network.group_of(strategy.mesh_axes(), names)
    if group.size == 1:
        return 0.0
    return sent_bytes / network.reach(group, question.cluster, question.software).bandwidth


def _legal_steps(question: Question) -> Iterator[PlannedStep]:
    """Yield every legal step over all devices of the cluster."""
    num_devices = question.cluster.num_devices
    for base in _splits(question):
        replicas = num_devices // base.num_ranks
        if num_devices % base.num_ranks or question.num_sequences % replicas:
            continue
        rows = question.num_sequences // replicas
        for microbatch in question.microbatches:
            if rows % microbatch == 0:
                batch = microbatch, rows // microbatch
                yield from _strategies(question, base, replicas, batch)


def _splits(question: Question) -> Iterator[Strategy]:
    """Yield the legal degrees of the axes that split the model and its samples."""
    shape, num_devices = question.shape, question.cluster.num_devices
    most = {
        "pp": min(_MOST_PP, shape.num_layers),
        "tp": min(_MOST_TP, question.cluster.levels[0].devices),
    }
    of_samples = max(1, question.seq_len // _LEAST_TOKENS)
    axes = [name for name in AXES if name not in ("dp", "fsdp")]
    most |= dict.fromkeys(question.without, 1)
    choices = [_divisors(num_devices, most.get(name, of_samples)) for name in axes]
    for degrees in itertools.product(*choices):
        strategy = Strategy()
        for name, degree in zip(axes, degrees, strict=True):
            strategy = strategy.with_degree(name, degree)
        tp = strategy.tp.degree
        if shape.num_heads % tp or shape.num_kv_heads % tp:
            continue
        if question.seq_len % (2 * strategy.sample_shards * tp) == 0:
            yield strategy


def _strategies(
    question: Question, base: Strategy, replicas: int, batch: tuple[int, int]
) -> Iterator[PlannedStep]:
    microbatch, accumulation = batch
    pp = base.pp.degree
    kinds = _PIPELINES if pp > 1 else ((Strategy.pp.kind, None),)
    for (kind, chunks), (dp, fsdp), policy in itertools.product(
        kinds, _of_data(question, replicas, base.num_ranks // pp), RECOMPUTE
    ):
        if chunks is not None and (pp * chunks > question.shape.num_layers or accumulation % pp):
            continue
        axis, recompute = Axis(pp, kind, chunks), Recompute(policy)
        strategy = dataclasses.replace(base, pp=axis, dp=dp, fsdp=fsdp, recompute=recompute)
        yield question.step(strategy, microbatch, accumulation)


def _of_data(question: Question, replicas: int, inner: int) -> Iterator[tuple[Axis, Axis]]:
    """Yield dp and fsdp: one of them, or fsdp within a unit of the cluster and dp between."""
    dp, fsdp = Strategy.dp, Strategy.fsdp
    if replicas == 1:
        yield dp, fsdp
        return
    yield dataclasses.replace(dp, degree=replicas), fsdp
    for kind in ("zero1", "zero2", "zero3"):
        yield dp, Axis(replicas, kind)
    for size in shard_groups(units_of(question.cluster), inner, replicas):
        yield dataclasses.replace(dp, degree=replicas // size), Axis(size, "zero3")


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]
