"""What hardware is described by: chips, devices, links, and clusters of levels.

Bandwidths are bytes/s of one device in one direction. A cluster is a tree of units: the devices of
a server, the servers of a pod, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from phalanx.errors import ConfigError

Kind = Literal["gpu", "tpu", "cpu"]
Unit = Literal["server", "rack", "pod", "cluster"]

ARITHMETICS: Final = ("bfloat16", "float16", "tf32", "float32", "float64")
"""Data types of products, the fastest first."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What a GPU is built of; of AMD an SM is a compute unit.

    Attributes:
        sms_built: SMs of the full chip.
        sms: those that are switched on.
        clock_hz: the clock at which the data sheet states the peak of matrix products.
        flops_per_clock: 16-bit matrix FLOPs of an SM in a clock.
        fp32_cores_per_sm: lanes of 32-bit floats.
        tensor_cores_per_sm: matrix units.
        registers_bytes_per_sm: register file.
        shared_bytes_per_sm: the most of it that is addressable as shared memory.
        l2_bytes: cache that all SMs use.
    """

    sms_built: int
    sms: int
    clock_hz: float
    flops_per_clock: int
    fp32_cores_per_sm: int
    tensor_cores_per_sm: int
    registers_bytes_per_sm: int
    shared_bytes_per_sm: int
    l2_bytes: int
    source: str

    @property
    def flops(self) -> float:
        """16-bit matrix FLOP/s of all SMs that are switched on."""
        return self.sms * self.flops_per_clock * self.clock_hz


@dataclass(frozen=True, kw_only=True)
class Core:
    """What a core of a processor does in training, as measured.

    Attributes:
        products: FLOP/s in the products of a layer and of its gradients, by data type.
        attention: FLOP/s of attention, forward and backward, by data type.
        operator_s: of an operator, however small its tensors.
        in_step: time of operators in a step beside the same alone: tensors are not in caches.
        crowd: exponent by which it slows down with the ranks that share it, and its caches.
    """

    products: Mapping[str, float] = field(hash=False)
    attention: Mapping[str, float] = field(hash=False)
    operator_s: float
    in_step: float = 1.2
    crowd: float = 0.25


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one processor core.

    Attributes:
        peak_flops: dense FLOP/s by data type; `tf32` is float32 data on matrix units, `float32` the
            rate of vector units.
        memory_bytes: as the data sheet counts.
        usable_bytes: what torch finds on it; the data sheet's where no listing was found.
        bandwidth: of its memory, bytes/s.
        matmul_efficiency: attainable part of the 16-bit peak in large matrix products.
        efficiency_source: where that was measured, or from which device it is assumed.
        driver: the name that the driver gives.
        core: of a processor, what each of a rank's cores does; None of other devices.
        cores: of a rank; of less than one it has its turns.
    """

    name: str
    title: str
    kind: Kind
    year: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: float
    bandwidth: float
    matmul_efficiency: float
    efficiency_source: str
    source: str
    date: str
    usable_bytes: float = 0.0
    driver: str = ""
    chip: Chip | None = None
    core: Core | None = None
    cores: float = 1.0

    def __post_init__(self) -> None:
        if not self.usable_bytes:
            object.__setattr__(self, "usable_bytes", self.memory_bytes)

    @property
    def flops(self) -> float:
        """Peak of 16-bit matrix products; of 32-bit ones where it has no others."""
        return next(self.peak_flops[name] for name in ARITHMETICS if name in self.peak_flops)

    def has_peak(self, precision: str) -> bool:
        """Return whether the peak of products in a data type is known, or of a core its rates."""
        is_half = precision in ("bfloat16", "float16")
        return is_half or precision in self.peak_flops or self.core is not None

    def peak(self, precision: str) -> float:
        """Return the peak of products in a data type; both of 16 bits have the same.

        Raises:
            ConfigError: none is known, and the device is no processor.
        """
        if self.has_peak(precision):
            return self.peak_flops.get(precision, self.flops)
        of_models = [name for name in ("bfloat16", "float32", "float64") if name in self.peak_flops]
        raise ConfigError(
            f"no peak of {self.name} in {precision} is known; expected a model in "
            f"{' or '.join(of_models)}"
        )

    @property
    def flops_per_byte(self) -> float:
        """FLOPs that must be done with each byte of memory for the peak to be the limit."""
        return self.flops / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class OpCost:
    """What a collective takes: `hops * latency_s + bytes / bandwidth`, see `ring`."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Strain:
    """What a fabric does between ranks that lie far apart.

    Attributes:
        units: how far, in servers, from which on it does.
        bandwidth: part of the bandwidth that is left.
        late_s: by which a message to another stage of a pipeline comes late.
    """

    units: int
    bandwidth: float
    late_s: float = 0.0


_UNSTRAINED: Final = Strain(units=1, bandwidth=1.0)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins devices.

    Attributes:
        bandwidth: bytes/s of one device in one direction.
        latency_s: of one hop.
        measured: collective -> its own latency and bandwidth, where they were measured.
        turn_s: by which a hop is longer for each further rank on a core.
        in_step: on processors, time of a collective in a step beside the same alone: it copies what
            it sends and receives, out of caches that others use.
        strains: how it does over more and more units; none where nothing is known.
        peers: of a full mesh, the devices to each of which a link of its own leads; else None.
    """

    name: str
    bandwidth: float
    latency_s: float
    source: str
    date: str
    measured: Mapping[str, OpCost] = field(default_factory=dict, hash=False)
    turn_s: float = 4e-4
    in_step: float = 2.2
    strains: tuple[Strain, ...] = ()
    peers: int | None = None

    def among(self, num_members: int) -> float:
        """Return the bandwidth of a device to `num_members - 1` others: of the links to them."""
        return self.bandwidth * (min(1.0, (num_members - 1) / self.peers) if self.peers else 1.0)

    def over(self, num_units: int) -> Strain:
        """Return how it does between ranks that lie `num_units` apart."""
        strained = [each for each in self.strains if each.units <= num_units]
        return strained[-1] if strained else _UNSTRAINED


def ring(op: str, num_ranks: int, num_bytes: float) -> tuple[int, float]:
    """Return hops, and bytes that a rank sends, of a collective over a ring.

    Args:
        op: all_reduce, all_gather, reduce_scatter or send.
        num_ranks: of the ring.
        num_bytes: of the whole tensor, as every rank holds it before or after.
    """
    if op == "send":
        return 1, num_bytes
    rounds = 2 if op == "all_reduce" else 1
    return rounds * (num_ranks - 1), rounds * (num_ranks - 1) / num_ranks * num_bytes


@dataclass(frozen=True, kw_only=True)
class Level:
    """Units of a cluster: `link` joins devices of one unit that no smaller unit joins."""

    name: Unit
    devices: int
    link: Link


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What all devices of a cluster have together; cores are 0 where the chip is not a GPU."""

    flops: float
    fp32_cores: int
    tensor_cores: int
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices of one kind and the levels that join them, innermost first."""

    name: str
    title: str
    device: Device
    levels: tuple[Level, ...]
    num_devices: int

    def of(self, num_devices: int) -> Cluster:
        """Return the cluster of its first `num_devices` devices, with the levels that join them.

        Raises:
            ConfigError: it has fewer, or none are asked for.
        """
        if not 1 <= num_devices <= self.num_devices:
            legal = min(max(num_devices, 1), self.num_devices)
            raise ConfigError(
                f"{self.name} has 1 to {self.num_devices:,} devices, not {num_devices:,}; the "
                f"nearest is {self.name}:{legal}"
            )
        inner = [level.devices < num_devices for level in self.levels]
        return replace(self, num_devices=num_devices, levels=self.levels[: sum(inner) + 1])

    @property
    def totals(self) -> Totals:
        """The sums over all devices."""
        num, chip = self.num_devices, self.device.chip
        sms = num * chip.sms if chip else 0
        return Totals(
            flops=num * self.device.flops,
            fp32_cores=sms * chip.fp32_cores_per_sm if chip else 0,
            tensor_cores=sms * chip.tensor_cores_per_sm if chip else 0,
            memory_bytes=num * self.device.memory_bytes,
        )
