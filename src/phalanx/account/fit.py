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
from collections.abc import Iterable, Iterator
from contextlib import suppress

from phalanx.account import host
from phalanx.account.parameters import num_parameters
from phalanx.account.planned import DecoderModel, PlannedStep
from phalanx.account.rank_memory import Detail, heaviest, memory
from phalanx.errors import ConfigError, StrategyError
from phalanx.models.registry import PRESETS
from phalanx.strategy import Axis, Recompute

_SMALLEST_GPU_BYTES = 4 << 30
"""Smallest memory of a GPU for training; a smaller need fits, without a query of the GPUs."""


Load = PlannedStep[DecoderModel]


def _need_of_host(load: Load, device: str, detail: Detail, num_here: int) -> int:
    """Return the least bytes that this host's ranks need in total; on GPU, the fullest rank's.

    If the host runs only some of the ranks, each counts as the pipeline stage of the least need.
    """
    needs = [of.total for of in memory(load, "gpu" if device == "cuda" else device, detail)]
    if device == "cuda":
        return max(needs)
    each = num_here * host.RANK_BYTES
    if num_here < load.strategy.num_ranks:
        return num_here * min(needs) + each
    return num_here * sum(needs) // len(needs) + each


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


def check_fit(
    load: Load, name: str, num_here: int, *, device: str = "cpu", has_activations: bool = True
) -> None:
    """Check that the model `name` can fit in the memory of the `num_here` ranks of this host.

    Args:
        load: the step to train; precision "auto" (not resolved) counts as the smallest.
        name: name of the model for the message.
        num_here: number of ranks on this host.
        device: "cpu" or "cuda".
        has_activations: whether activations count; False for compiled blocks, where the compiler
            chooses the saved tensors.

    Raises:
        ConfigError: it cannot; the message has the arithmetic, and alternatives that fit.
    """
    if load.precision == "auto":
        smallest = dataclasses.replace(load.model, precision="bfloat16")
        load = dataclasses.replace(load, model=smallest)
    detail: Detail = "activations" if has_activations else "state"
    if device == "cuda":
        num_here, room = 1, None
        if _need_of_host(load, device, detail, 1) > _SMALLEST_GPU_BYTES:
            room = host.largest_gpu_bytes()
    else:
        room = host.free_memory_bytes() + host.free_swap_bytes()
        if num_here * host.RANK_BYTES > room:
            return  # too many processes for any model: `check_memory_for` reports that
    if room is None or (whole := _need_of_host(load, device, detail, num_here)) <= room:
        return
    # The need is a lower bound: suggest only alternatives that leave a fifth of the memory free.
    advice = _advice(load, device, detail, num_here, 4 * room // 5)
    ranks = f"{num_here} ranks need" if num_here > 1 else "a rank needs"
    has = f"has {_gib(room)} GiB"
    room_text = (
        f"the largest GPU of this host {has}" if device == "cuda" else f"this host {has} left"
    )
    need = heaviest(memory(load, "gpu" if device == "cuda" else device, detail))
    parts = [f"{_gib(need.weights)} of weights", f"{_gib(need.gradients)} of gradients"]
    if load.model.moments:
        whose = "the moments" if load.model.is_muon else "AdamW's moments"
        parts.insert(1, f"{_gib(need.optimizer)} of {whose}")
    if has_activations:
        tokens = f"{load.microbatch} x {load.seq_len} tokens"
        parts.append(f"{_gib(need.activations)} of activations for {tokens}")
    which = "the fullest" if load.strategy.pp.degree > 1 else "each"
    raise ConfigError(
        f"{name} ({load.model.num_parameters:,} parameters) does not fit: under "
        f"{load.strategy}, {ranks} at least {_gib(whole)} GiB ({which} {', '.join(parts)}), "
        f"but {room_text}; "
        + (f"try {', or '.join(advice)}" if advice else "spread it over more hosts or GPUs")
    )


def _advice(load: Load, device: str, detail: Detail, num_here: int, room: int) -> list[str]:
    """Return up to two options under which the model fits in `room`, and the largest preset."""

    def fitting(ways: Iterable[tuple[str, Load]]) -> Iterator[tuple[str, int]]:
        for option, other in ways:
            with suppress(StrategyError):  # another model may have fewer layers than stages
                if _need_of_host(other, device, "state", num_here) <= room:  # a cheap check first
                    if (size := _need_of_host(other, device, detail, num_here)) <= room:
                        yield option, size

    # The state alone is a closed form: it rejects most alternatives before a meta run counts them.
    splits = itertools.islice(fitting(_other_splits(load)), 2)
    advice = [f"{option} (at least {_gib(size)} GiB)" for option, size in splits]
    # Presets that allow the sequence length, the largest first.
    shapes = sorted(PRESETS.items(), key=lambda row: -num_parameters(row[1]).total)
    presets = (
        (f"--model {preset}", dataclasses.replace(load, model=replaced))
        for preset, shape in shapes
        if shape.max_seq_len >= load.seq_len
        for replaced in [dataclasses.replace(load.model, shape=shape)]
    )
    models = itertools.islice(fitting(presets), 1)
    return advice + [f"{option} ({_gib(size)} GiB)" for option, size in models]


def _other_splits(load: Load) -> Iterator[tuple[str, Load]]:
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
            option = "" if other == strategy else f" --strategy {other}"
            tiny = dataclasses.replace(load, strategy=other, **small)
            yield f"--batch.microbatch 1{option}", tiny


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}" if num_bytes < 1000 << 30 else f"{num_bytes / 2**30:,.0f}"
