"""Common rules to choose a strategy: by thumb, from sizes only; and by fit, from memory.

    of thumb   data parallelism up to 128 devices and 1 B parameters; FSDP above; HSDP above 256
               devices; rings, pipelines and tensor parallelism above 1,000 devices, 50 B
               parameters or 16 K tokens
    by fit     one device holds the model            data parallelism
               one device holds its largest layer    FSDP, in the smallest unit that holds the rest
               none holds the largest layer          tensor parallelism on the fast links of a host,
                                                     and pipelines over the slow ones between hosts
               none holds a sequence                 a ring of ranks that split its positions
               fewer sequences than devices          tensor parallelism and pipelines, as above

Both rules take the largest microbatch that fits, and recompute if none fits without
(departure.py). HSDP shards within a unit of the cluster whose links are faster than the links
between units. The rules use no predicted times: `search` departs from them where its price is
lower.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from phalanx.account.parameters import num_parameters
from phalanx.models.shape import ModelShape
from phalanx.planner.machine import Cluster
from phalanx.strategy import AXES, Axis, Strategy
from phalanx.strategy.kinds import PARALLEL

RING: Final = next(name for name in AXES if name not in ("pp", "dp", "fsdp", "tp"))
"""The axis that splits positions, whose ranks form a ring."""

MOST_REPLICAS, MOST_REPLICATED = 128, 1e9
"""Most devices and parameters for data parallelism alone."""

MOST_SHARDS: Final = 256
"""Number of devices above which FSDP shards within units only (HSDP)."""

MOST_DEVICES, MOST_PARAMETERS, MOST_TOKENS = 1000, 50e9, 16_384
"""Devices, parameters and sequence length above which samples and layers are split too."""

_TOKENS_OF_RANK: Final = 8192
"""Least tokens of a sequence on one rank of a ring."""

STATE_BYTES: Final = 16
"""Bytes per parameter: value, gradient and the two moments of AdamW, 32 bits each."""

PURE, PURE_BYTES = "pure-bfloat16", 8
"""A precision that `train` does not support, and its bytes per parameter: all four in 16 bits."""

_GATHERED_BYTES: Final = 2
"""Bytes per gathered parameter, in 16 bits."""

_PART: Final = {"pp": 0.25}
"""By thumb, largest fraction of a device for a stage's 16-bit weights and 32-bit gradients."""


@dataclass(frozen=True, kw_only=True)
class JobSizes:
    """Sizes of a job and its cluster, the input of the rules.

    Attributes:
        layers: parameters of each layer, embedding and head included.
        activation_bytes: activation bytes of one sequence when each block saves only its input.
        heads: largest tp degree that the heads allow: gcd of query and key-value heads.
        num_sequences: sequences of one step, which data ranks divide.
        host: devices of one host, which fast links join.
        units: devices of each unit whose links are faster than the links outside, innermost first.
    """

    layers: tuple[int, ...]
    activation_bytes: float
    heads: int
    num_sequences: int
    seq_len: int
    num_devices: int
    device_bytes: float
    host: int
    units: tuple[int, ...]

    @property
    def parameters(self) -> int:
        """Parameters of all layers."""
        return sum(self.layers)


class Rule(NamedTuple):
    """A rule, why it applies to the job, and the strategy that it chooses."""

    name: str
    why: str
    strategy: Strategy


def sizes_of(shape: ModelShape, cluster: Cluster, seq_len: int, num_sequences: int) -> JobSizes:
    """Return the sizes of a job on a cluster."""
    of = num_parameters(shape)
    block = (of.attention + of.mlp + of.norm) // shape.num_layers
    layers = [of.embedding + of.position, *[block] * shape.num_layers, of.output]
    # Korthikanti et al. 2022, section 4, 16 bits: all block inputs, and activations of one block.
    of_block = 34 * shape.hidden if shape.mlp == "gelu" else 18 * shape.hidden + 8 * shape.ffn
    return JobSizes(
        layers=tuple(layers),
        activation_bytes=seq_len * (2 * shape.hidden * shape.num_layers + of_block),
        heads=math.gcd(shape.num_heads, shape.num_kv_heads),
        num_sequences=num_sequences,
        seq_len=seq_len,
        num_devices=cluster.num_devices,
        device_bytes=cluster.device.usable_bytes,
        host=cluster.levels[0].devices,
        units=units_of(cluster),
    )


def units_of(cluster: Cluster) -> tuple[int, ...]:
    """Return the number of devices of each unit whose links are faster than the links outside."""
    joined = zip(cluster.levels, cluster.levels[1:], strict=False)
    return tuple(
        inner.devices
        for inner, outer in joined
        if inner.link.bandwidth > outer.link.bandwidth and inner.devices < cluster.num_devices
    )


def of_thumb(of: JobSizes) -> Rule:
    """Return the rule of thumb that applies to a job, with its strategy."""
    num, parameters = of.num_devices, of.parameters
    if num == 1:
        return Rule("one device", "the job has no second device", Strategy())
    above = [
        text
        for text, is_above in (
            (f"{num:,} devices > {MOST_DEVICES:,}", num > MOST_DEVICES),
            (f"{_billions(parameters)} parameters > {_billions(MOST_PARAMETERS)}",
             parameters > MOST_PARAMETERS),
            (f"{of.seq_len:,} tokens > {MOST_TOKENS:,}", of.seq_len > MOST_TOKENS),
        )
        if is_above
    ]  # fmt: skip
    if above:
        is_large = num > MOST_DEVICES or parameters > MOST_PARAMETERS
        names = [PARALLEL[RING], *([f"{PARALLEL['pp']} and {PARALLEL['tp']}"] if is_large else [])]
        name = f"{', '.join(names)} parallelism"
        return Rule(name, ", ".join(above), _with_data(of, _by_thumb(of, is_large=is_large)))
    if parameters <= MOST_REPLICATED and num <= MOST_REPLICAS:
        why = f"{_billions(parameters)} parameters <= {_billions(MOST_REPLICATED)}"
        why = f"{why}, {num:,} devices <= {MOST_REPLICAS}"
        return Rule("data parallelism", why, _replicated(num))
    if num > MOST_SHARDS:
        return Rule("HSDP", f"{num:,} devices > {MOST_SHARDS}", _with_data(of, Strategy()))
    is_many = parameters <= MOST_REPLICATED
    why = f"{num:,} devices > {MOST_REPLICAS}" if is_many else (
        f"{_billions(parameters)} parameters > {_billions(MOST_REPLICATED)}"
    )  # fmt: skip
    return Rule("FSDP", why, Strategy().with_degree("fsdp", num))


def by_fit(of: JobSizes) -> Rule:
    """Return the rule by fit that applies to a job, with its strategy."""
    room, num = of.device_bytes, of.num_devices
    if num == 1 or (held(of, Strategy()) <= room and _divides_batch(of, Strategy())):
        name = "one device holds the model" if held(of, Strategy()) <= room else "nothing fits"
        return Rule(name, inequality(of, Strategy()), _replicated(num))
    sharded = _sharded(of, Strategy())
    least = held(of, sharded)
    if least <= room and _divides_batch(of, Strategy()):
        strategy = _with_data(of, Strategy())
        why = f"{inequality(of, Strategy())}, {inequality(of, strategy)}"
        return Rule("one device holds the largest layer", why, strategy)
    name, why = "no device holds the largest layer", inequality(of, sharded)
    if least <= room:
        name = "fewer sequences than devices"
        why = f"{of.num_sequences:,} sequences do not divide evenly over {num:,} devices"
    is_long = least > room >= least - of.activation_bytes
    name = "no device holds a sequence" if is_long else name
    split = Strategy()
    for split in _splits(of, is_long=is_long):
        if held(of, _sharded(of, split)) <= room and _divides_batch(of, split):
            return Rule(name, why, _with_data(of, split))
    return Rule("nothing fits", why, _with_data(of, split))


def held(of: JobSizes, strategy: Strategy) -> float:
    """Return the bytes of a rank: its shard of the state, a gathered layer, and one sequence.

    A pipeline stage has as many sequences in flight as there are stages, each with the activations
    of one stage, so pp does not divide activation bytes.
    """
    tp, shards = strategy.tp.degree, strategy.num_shards
    state = STATE_BYTES * of.parameters / (tp * strategy.pp.degree * shards)
    gathered = _GATHERED_BYTES * max(of.layers) / tp if shards > 1 else 0.0
    return state + gathered + of.activation_bytes / (tp * strategy.sample_shards)


def inequality(of: JobSizes, strategy: Strategy) -> str:
    """Return text: bytes of a strategy <= or > bytes of a device."""
    sign = "<=" if held(of, strategy) <= of.device_bytes else ">"
    name = "one device" if strategy.num_ranks == 1 else str(strategy)
    return f"{name} {_gib(held(of, strategy))} {sign} {_gib(of.device_bytes)}"


def _sharded(of: JobSizes, split: Strategy) -> Strategy:
    """Return `split` with FSDP over the remaining devices."""
    return split.with_degree("fsdp", of.num_devices // split.num_ranks)


def _divides_batch(of: JobSizes, split: Strategy) -> bool:
    """Return whether the data ranks that remain after `split` divide the sequences evenly."""
    return of.num_sequences % (of.num_devices // split.num_ranks) == 0


def _splits(of: JobSizes, *, is_long: bool) -> Iterator[Strategy]:
    """Yield splits of rising degree: rings if `is_long`, then tp within a host, then pipelines."""
    num, split = of.num_devices, Strategy()
    if is_long:
        for ring in _rings(of, num)[1:]:
            split = Strategy().with_degree(RING, ring)
            yield split
    for tp in _divisors(math.gcd(num // split.num_ranks, of.host)):
        if of.heads % tp == 0:
            split = split.with_degree("tp", tp)
            yield split
    for pp in _divisors(num // split.num_ranks)[1:]:
        if pp <= len(of.layers) - 2:
            yield split.with_degree("pp", pp)


def _rings(of: JobSizes, num_devices: int) -> list[int]:
    """Return 1, and the ring degrees that leave each rank enough tokens in two equal chunks."""
    most = max(1, of.seq_len // _TOKENS_OF_RANK)
    return [
        n for n in _divisors(num_devices) if (n <= most and of.seq_len % (2 * n) == 0) or n == 1
    ]


def _by_thumb(of: JobSizes, *, is_large: bool) -> Strategy:
    """Return the strategy by thumb without data axes.

    A large job has tp within a host, and the fewest stages that hold at most `_PART` of a device.
    A long sequence has the largest ring.
    """
    left, strategy = of.num_devices, Strategy()
    if is_large:
        tp = max(n for n in _divisors(math.gcd(left, of.host)) if of.heads % n == 0)
        strategy, left = strategy.with_degree("tp", tp), left // tp
    if of.seq_len > MOST_TOKENS:
        ring = _rings(of, left)[-1]
        strategy, left = strategy.with_degree(RING, ring), left // ring
    if is_large:
        least = 6 * of.parameters / strategy.tp.degree / (_PART["pp"] * of.device_bytes)
        stages = [n for n in _divisors(left) if n <= len(of.layers) - 2]
        strategy = strategy.with_degree("pp", next((n for n in stages if n >= least), stages[-1]))
    return strategy


def _with_data(of: JobSizes, split: Strategy) -> Strategy:
    """Return `split` with FSDP over the remaining devices.

    A job above `MOST_SHARDS` devices shards within the smallest unit whose devices hold the state
    in half of their memory.
    """
    replicas = of.num_devices // split.num_ranks
    inner = split.tp.degree * split.sample_shards
    state = STATE_BYTES * of.parameters / split.num_ranks
    groups = shard_groups(of.units, inner, replicas) if of.num_devices > MOST_SHARDS else []
    holding = [size for size in groups if state / size <= of.device_bytes / 2]
    size = (holding or [replicas])[0]
    return split.with_degree("fsdp", size).with_degree("dp", replicas // size)


def shard_groups(units: tuple[int, ...], inner: int, replicas: int) -> list[int]:
    """Return the fsdp degrees, below `replicas`, whose groups stay within a unit.

    In a unit that the job does not fill evenly, this is the largest degree that divides both.

    Args:
        units: devices of each unit.
        inner: ranks of the axes inside fsdp.
        replicas: product of the degrees of dp and fsdp.
    """
    sizes = {math.gcd(unit // inner, replicas) for unit in units if unit % inner == 0}
    return sorted(size for size in sizes if 1 < size < replicas)


def _replicated(num_devices: int) -> Strategy:
    return dataclasses.replace(Strategy(), dp=Axis(num_devices, Strategy.dp.kind))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _billions(parameters: float) -> str:
    return f"{parameters / 1e9:.3g} B"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
