"""Whether a model can be trained on this host at all. No torch.

[Note: What is counted]
Only what must be in memory at once, so that no run is refused that would fit: on each rank

    weights + moments of AdamW + the larger of gradients and activations

as its strategy shards them, with the exact count of parameters; both of the last, where
microbatches are accumulated. Not counted are gathered copies, buckets, buffers that pass, and the
libraries but for the least a process takes. On a CPU the ranks of this host share what is free,
swap included, the stages of a pipeline each with its own; on a GPU each must fit into the largest
there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from phalanx.errors import ConfigError, StrategyError
from phalanx.models.registry import PRESETS
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import chain_flops, num_stages
from phalanx.parallel.pipeline.partition import partition
from phalanx.planner import host
from phalanx.planner.activations import activations
from phalanx.planner.model_shape import num_parameters
from phalanx.planner.stages import held_of, parameters_of
from phalanx.strategy import Axis, Recompute, Strategy

_SMALLEST_GPU_BYTES = 4 << 30
"""No GPU to train on has less: what needs no more is not looked at."""


@dataclass(frozen=True)
class Load:
    """What decides how much memory a rank needs.

    Attributes:
        microbatch: sequences in one forward pass of one rank.
        accumulation: microbatches of a step.
        precision: data type of the arithmetic; "auto", not known yet, counts as the smallest.
        is_compiled: blocks are, so that what they keep is the compiler's choice.
    """

    shape: ModelShape
    strategy: Strategy
    microbatch: int
    accumulation: int
    seq_len: int
    precision: str
    is_compiled: bool = False


@dataclass(frozen=True)
class Need:
    """Bytes that one rank must have at once, see [Note: What is counted]."""

    weights: int
    moments: int
    gradients: int
    activations: int
    is_accumulated: bool

    @property
    def total(self) -> int:
        """All of it."""
        last = (self.gradients, self.activations)
        return self.weights + self.moments + (sum(last) if self.is_accumulated else max(last))


def need_of(load: Load) -> Need:
    """Count what one rank must hold; of a pipeline, the one that must hold the most."""
    needs = (_need_of_rank(load, pp_rank) for pp_rank in range(load.strategy.pp.degree))
    return max(needs, key=lambda need: need.total)


def _need_of_host(load: Load, num_here: int) -> int:
    """Return what the ranks of a host must hold together, at least.

    Where they are some of all ranks, they may be of the stages of a pipeline that hold the least.
    """
    needs = [_need_of_rank(load, pp_rank).total for pp_rank in range(load.strategy.pp.degree)]
    if num_here < load.strategy.num_ranks:
        return num_here * min(needs)
    return num_here * sum(needs) // len(needs)


def _need_of_rank(load: Load, pp_rank: int, cut: Sequence[range] | None = None) -> Need:
    strategy, shape = load.strategy, load.shape
    precision = "bfloat16" if load.precision == "auto" else load.precision
    master_bytes = 8 if precision == "float64" else 4
    of_one = activations(shape, strategy, load.seq_len, load.microbatch, precision)
    split = parameters_of(strategy, shape, pp_rank, cut) // strategy.tp.degree * master_bytes
    share = split // strategy.num_shards
    kept = 0
    if not load.is_compiled:
        kept = held_of(strategy, shape, of_one, load.accumulation, pp_rank, cut)
    # Stage 1 adds whole gradients up; those of one microbatch it reduces as they come.
    adds_whole = strategy.fsdp.kind == "zero1" and load.accumulation > 1
    return Need(
        weights=share,
        moments=2 * share,
        gradients=split if adds_whole else share,
        activations=kept,
        is_accumulated=load.accumulation > 1,
    )


def with_cut_that_fits(load: Load, room_bytes: float) -> Load | None:
    """Return the load with the fastest cut of which no rank needs more than some room.

    None if there is no such cut, the one at hand is given by hand, or ranks have several stages.
    """
    strategy, shape = load.strategy, load.shape
    degree, last = strategy.pp.degree, shape.num_layers + 1
    if degree == 1 or strategy.cut or num_stages(strategy) != degree:
        return None
    known: dict[tuple[int, int, bool, bool], bool] = {}  # blocks are alike

    def fits(links: range, stage: int) -> bool:
        is_alike = stage, len(links), 0 in links, last in links
        if is_alike not in known:
            cut = [links] * degree  # those of the other stages are not looked at
            known[is_alike] = _need_of_rank(load, stage, cut).total <= room_bytes
        return known[is_alike]

    try:
        best = partition(chain_flops(shape), degree, fits)
    except StrategyError:
        return None
    cut = tuple(len(links) for links in best)
    return dataclasses.replace(load, strategy=dataclasses.replace(strategy, cut=cut))


def check_memory_for(num_ranks: int) -> None:
    """Refuse more ranks of a training job than this host could hold, whatever they train.

    Raises:
        ConfigError: says how many it could.
    """
    free_bytes = host.free_memory_bytes()
    need_bytes = num_ranks * host.RANK_BYTES
    if need_bytes > free_bytes:
        raise ConfigError(
            f"{num_ranks} processes take at least {need_bytes / 2**30:.1f} GiB, and this "
            f"host has {free_bytes / 2**30:.1f} GiB of memory left, enough for "
            f"{free_bytes // host.RANK_BYTES}; take fewer, or spread them over hosts by torchrun"
        )


def check_fit(load: Load, name: str, device: str, num_here: int) -> None:
    """Refuse a model, called `name`, that the `num_here` ranks of this host cannot hold.

    Raises:
        ConfigError: the arithmetic, and what would fit.
    """
    if device == "cuda":
        room, where, each = None, "the largest GPU of this host has", 0
        if need_of(load).total > _SMALLEST_GPU_BYTES:
            room = host.largest_gpu_bytes()
        num_here = 1
    else:
        room, each = host.free_memory_bytes() + host.free_swap_bytes(), host.RANK_BYTES
        where = "this host has left"

    def whole(other: Load) -> int:
        if device == "cuda":
            return need_of(other).total
        return _need_of_host(other, num_here) + num_here * each

    if room is None or whole(load) <= room:
        return
    if num_here * each > room:
        return  # too many processes for any model, which is said elsewhere
    ways = [*_ways_out(load)]
    if device == "cuda" and (other_cut := with_cut_that_fits(load, 4 / 5 * room)) is not None:
        ways.insert(0, (f"--strategy {other_cut.strategy}", other_cut))
    # What is counted is not all: only what leaves a fifth of the room is worth an advice.
    fitting: list[tuple[str, int]] = []
    for words, other in ways:
        with suppress(StrategyError):  # another model may have fewer layers than stages
            size = whole(other)
            if 5 * size <= 4 * room:
                fitting.append((words, size))
    splits = [way for way in fitting if not way[0].startswith("--model")]
    advice = [f"{words} (at least {_gib(size)} GiB)" for words, size in splits[:2]]
    advice += [f"{words} ({_gib(size)} GiB)" for words, size in fitting[len(splits) :][:1]]
    ranks = f"{num_here} ranks hold" if num_here > 1 else "a rank holds"
    need = need_of(load)
    each_words = "the fullest" if load.strategy.pp.degree > 1 else "each"
    raise ConfigError(
        f"{name} ({num_parameters(load.shape).total:,} parameters) does not fit: under "
        f"{load.strategy}, {ranks} at least {_gib(whole(load))} GiB ({each_words} "
        f"{_gib(need.weights)} of weights, {_gib(need.moments)} of AdamW's moments, "
        f"{_gib(need.gradients)} of gradients, {_gib(need.activations)} of activations for "
        f"{load.microbatch} x {load.seq_len} tokens), and {where} {_gib(room)}; "
        + (f"try {', or '.join(advice)}" if advice else "spread it over more hosts or GPUs")
    )


def _ways_out(load: Load) -> Iterator[tuple[str, Load]]:
    """Yield other ways to train this, the nearest first: as options, and as what they come to."""
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
    largest_first = sorted(PRESETS.items(), key=lambda row: -num_parameters(row[1]).total)
    for name, shape in largest_first:
        if shape.max_seq_len >= load.seq_len:
            yield f"--model {name}", dataclasses.replace(load, shape=shape)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}" if num_bytes < 1000 << 30 else f"{num_bytes / 2**30:,.0f}"
