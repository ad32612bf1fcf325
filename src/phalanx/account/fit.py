"""A lower bound of training memory, to refuse a run that cannot fit on this host.

torch is imported only to count activations.

[Note: Memory that must be there]
The bound counts only bytes that are in memory at the same time, so that no run that fits is
refused. On each rank, as the strategy shards them and with the exact number of parameters:

    weights + moments of AdamW + the larger of gradients and activations

With accumulation over microbatches, gradients and activations both count. Not counted are gathered
weights, buckets, and memory of libraries beyond the minimum of a process. On CPU, the ranks of this
host share its free memory and swap, and each pipeline stage counts with its own need. On GPU, the
fullest rank must fit on the largest GPU of this host.

A request is checked twice: first for weights, moments and gradients, which have closed forms; later
with activations, whose count needs torch, after the job has imported torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from phalanx.account import host
from phalanx.account.parameters import num_parameters, parameters_of
from phalanx.errors import ConfigError, StrategyError
from phalanx.models.registry import PRESETS
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import cut_of, schedule_of
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.strategy import Axis, Recompute, Strategy

_SMALLEST_GPU_BYTES = 4 << 30
"""Smallest memory of a GPU for training; a smaller need fits, without a query of the GPUs."""


@dataclass(frozen=True)
class MemoryInputs:
    """The model, layout and sizes that determine the memory of a rank.

    Attributes:
        microbatch: sequences in one forward pass of one rank.
        accumulation: microbatches of one step.
        precision: data type of the arithmetic; "auto" (not resolved) counts as the smallest.
        device: "cpu" or "cuda".
        has_activations: whether activations count; False for compiled blocks, where the compiler
            chooses the saved tensors.
        has_moments: whether optimizer moments count.
    """

    shape: ModelShape
    strategy: Strategy
    microbatch: int
    accumulation: int
    seq_len: int
    precision: str
    device: Literal["cpu", "cuda"] = "cpu"
    has_activations: bool = True
    has_moments: bool = True

    @property
    def arithmetic(self) -> str:
        """Data type of the arithmetic; the smallest one while `precision` is "auto"."""
        return "bfloat16" if self.precision == "auto" else self.precision


@dataclass(frozen=True)
class Need:
    """Bytes that one rank must hold at once; see [Note: Memory that must be there]."""

    weights: int
    moments: int
    gradients: int
    activations: int
    is_accumulated: bool

    @property
    def total(self) -> int:
        """Bytes that must be in memory at the same time."""
        last = (self.gradients, self.activations)
        return self.weights + self.moments + (sum(last) if self.is_accumulated else max(last))


def need_of(load: MemoryInputs) -> Need:
    """Return the need of one rank; in a pipeline, the largest need of any rank."""
    needs = (_need_of_rank(load, pp_rank) for pp_rank in range(load.strategy.pp.degree))
    return max(needs, key=lambda need: need.total)


def _need_of_host(load: MemoryInputs, num_here: int) -> int:
    """Return the least bytes that this host's ranks need in total; on GPU, the fullest rank's.

    If the host runs only some of the ranks, each counts as the pipeline stage of the least need.
    """
    if load.device == "cuda":
        return need_of(load).total
    needs = [_need_of_rank(load, pp_rank).total for pp_rank in range(load.strategy.pp.degree)]
    each = num_here * host.RANK_BYTES
    if num_here < load.strategy.num_ranks:
        return num_here * min(needs) + each
    return num_here * sum(needs) // len(needs) + each


def _need_of_rank(load: MemoryInputs, pp_rank: int) -> Need:
    strategy, shape = load.strategy, load.shape
    num_here, cut, schedule = num_parameters(shape).total, None, None
    if strategy.pp.degree > 1:
        cut, schedule = cut_of(strategy, shape), schedule_of(strategy, load.accumulation)
        num_here = parameters_of(shape, cut, schedule.stages_of(pp_rank))
    split = num_here // strategy.tp.degree * (8 if load.arithmetic == "float64" else 4)
    shard = split // strategy.num_shards
    # ZeRO-1 accumulates unsharded gradients; with one microbatch it reduces each as it is computed.
    adds_whole = strategy.fsdp.kind == "zero1" and load.accumulation > 1
    return Need(
        weights=shard,
        moments=2 * shard if load.has_moments else 0,
        gradients=split if adds_whole else shard,
        activations=_activations(load, cut, schedule, pp_rank) if load.has_activations else 0,
        is_accumulated=load.accumulation > 1,
    )


def _activations(
    load: MemoryInputs, cut: Sequence[range] | None, schedule: Schedule | None, pp_rank: int
) -> int:
    from phalanx.account.activations import activations, peak_on_rank

    strategy, shape = load.strategy, load.shape
    sizes = (load.seq_len, load.microbatch, load.arithmetic)
    of_one = activations(shape, strategy, *sizes, device=load.device)
    return peak_on_rank(of_one, shape.num_layers, cut, schedule, pp_rank)


def check_memory_for(num_ranks: int) -> None:
    """Check that this host has memory for `num_ranks` processes, whatever model they train.

    Raises:
        ConfigError: it has not; the message gives the number that would fit.
    """
    free_bytes = host.free_memory_bytes()
    need_bytes = num_ranks * host.RANK_BYTES
    if need_bytes > free_bytes:
        raise ConfigError(
            f"{num_ranks} processes take at least {need_bytes / 2**30:.1f} GiB, but this host has "
            f"{free_bytes / 2**30:.1f} GiB of free memory, enough for "
            f"{free_bytes // host.RANK_BYTES}; start fewer, or spread them over hosts with torchrun"
        )


def check_fit(load: MemoryInputs, name: str, num_here: int) -> None:
    """Check that the model `name` can fit in the memory of the `num_here` ranks of this host.

    Raises:
        ConfigError: it cannot; the message has the arithmetic, and alternatives that fit.
    """
    if load.device == "cuda":
        num_here, room = 1, None
        if need_of(load).total > _SMALLEST_GPU_BYTES:
            room = host.largest_gpu_bytes()
    else:
        room = host.free_memory_bytes() + host.free_swap_bytes()
        if num_here * host.RANK_BYTES > room:
            return  # too many processes for any model: `check_memory_for` reports that
    if room is None or (whole := _need_of_host(load, num_here)) <= room:
        return
    # The need is a lower bound: suggest only alternatives that leave a fifth of the memory free.
    advice = _advice(load, num_here, 4 * room // 5)
    ranks = f"{num_here} ranks need" if num_here > 1 else "a rank needs"
    has = f"has {_gib(room)} GiB"
    room_text = (
        f"the largest GPU of this host {has}" if load.device == "cuda" else f"this host {has} left"
    )
    raise ConfigError(
        f"{name} ({num_parameters(load.shape).total:,} parameters) does not fit: under "
        f"{load.strategy}, {ranks} at least {_gib(whole)} GiB ({_parts(load)}), but {room_text}; "
        + (f"try {', or '.join(advice)}" if advice else "spread it over more hosts or GPUs")
    )


def _parts(load: MemoryInputs) -> str:
    """Return the need of one rank as text, by weights, moments, gradients and activations."""
    need = need_of(load)
    parts = [f"{_gib(need.weights)} of weights", f"{_gib(need.gradients)} of gradients"]
    if load.has_moments:
        parts.insert(1, f"{_gib(need.moments)} of AdamW's moments")
    if load.has_activations:
        tokens = f"{load.microbatch} x {load.seq_len} tokens"
        parts.append(f"{_gib(need.activations)} of activations for {tokens}")
    which = "the fullest" if load.strategy.pp.degree > 1 else "each"
    return f"{which} {', '.join(parts)}"


def _advice(load: MemoryInputs, num_here: int, room: int) -> list[str]:
    """Return up to two options under which the model fits in `room`, and the largest preset."""

    def fitting(ways: Iterable[tuple[str, MemoryInputs]]) -> Iterator[tuple[str, int]]:
        for words, other in ways:
            states = dataclasses.replace(other, has_activations=False)
            with suppress(StrategyError):  # another model may have fewer layers than stages
                if _need_of_host(states, num_here) <= room:  # a cheap check first
                    if (size := _need_of_host(other, num_here)) <= room:
                        yield words, size

    found = itertools.islice(fitting(_other_splits(load)), 2)
    advice = [f"{words} (at least {_gib(size)} GiB)" for words, size in found]
    models = itertools.islice(fitting(_smaller_models(load)), 1)
    return advice + [f"{words} ({_gib(size)} GiB)" for words, size in models]


def _other_splits(load: MemoryInputs) -> Iterator[tuple[str, MemoryInputs]]:
    """Yield alternatives for the same model, the least change first: options, and their load."""
    strategy = load.strategy
    degree = strategy.dp.degree * strategy.fsdp.degree
    sharded = dataclasses.replace(strategy, dp=Axis(1, "bucketed"), fsdp=Axis(degree, "zero3"))
    again = [dataclasses.replace(s, recompute=Recompute("full")) for s in (strategy, sharded)]
    small = {"microbatch": 1, "accumulation": load.microbatch * load.accumulation}
    for other in dict.fromkeys((sharded, *again)):
        if other != strategy:
            yield f"--strategy {other}", dataclasses.replace(load, strategy=other)
    if load.microbatch > 1:
        for other in dict.fromkeys((strategy, sharded, again[1])):
            words = "" if other == strategy else f" --strategy {other}"
            tiny = dataclasses.replace(load, strategy=other, **small)
            yield f"--batch.microbatch 1{words}", tiny


def _smaller_models(load: MemoryInputs) -> Iterator[tuple[str, MemoryInputs]]:
    """Yield presets that allow the sequence length, the largest first: option, and its load."""
    largest_first = sorted(PRESETS.items(), key=lambda row: -num_parameters(row[1]).total)
    for name, shape in largest_first:
        if shape.max_seq_len >= load.seq_len:
            yield f"--model {name}", dataclasses.replace(load, shape=shape)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}" if num_bytes < 1000 << 30 else f"{num_bytes / 2**30:,.0f}"
