"""Descriptions of hardware: chips, devices, links, and clusters of nested levels.

Bandwidths are bytes/s of one device in one direction. A cluster is a tree of units: devices form a
server, servers form a pod, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from phalanx.errors import ConfigError

Kind = Literal["gpu", "tpu", "cpu"]
Unit = Literal["server", "rack", "pod", "cluster"]

ARITHMETICS: Final = ("bfloat16", "float16", "tf32", "float32", "float64")
"""Data types of matrix products, fastest first."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The compute and memory units of a GPU; an SM of AMD is a compute unit (CU).

    Attributes:
        sms_built: SMs of the full chip.
        sms: enabled SMs.
        clock_hz: clock at which the data sheet states the peak of matrix products.
        flops_per_clock: 16-bit matrix FLOPs of one SM per clock cycle.
        fp32_cores_per_sm: FP32 lanes of one SM.
        tensor_cores_per_sm: matrix units of one SM.
        registers_bytes_per_sm: register file of one SM.
        shared_bytes_per_sm: largest shared memory of one SM.
        l2_bytes: cache that all SMs share.
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
        """16-bit matrix FLOP/s of all enabled SMs."""
        return self.sms * self.flops_per_clock * self.clock_hz


@dataclass(frozen=True, kw_only=True)
class Core:
    """Measured rates of one CPU core in training.

    Attributes:
        products: FLOP/s of a layer's products, forward and backward, by data type.
        attention: FLOP/s of attention, forward and backward, by data type.
        operator_s: fixed time of one operator, for tensors of any size.
        in_step: time of operators in a step / time alone; above 1 because caches are cold.
        crowd: exponent of the slowdown with the number of ranks that share the core and its caches.
    """

    products: Mapping[str, float] = field(hash=False)
    attention: Mapping[str, float] = field(hash=False)
    operator_s: float
    in_step: float = 1.2
    crowd: float = 0.25


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of one rank: an accelerator, or some cores of a CPU.

    Attributes:
        peak_flops: dense FLOP/s by data type; `tf32` is float32 data on matrix units, `float32` the
            rate of vector units.
        memory_bytes: memory by the data sheet.
        usable_bytes: memory that torch reports; `memory_bytes` if no report was found.
        bandwidth: memory bandwidth, bytes/s.
        matmul_efficiency: attainable fraction of the 16-bit peak in large matrix products.
        efficiency_source: source of the efficiency, or the device from which it is assumed.
        driver: device name that the driver reports.
        core: on CPU, rates of each core of the rank; None for other devices.
        cores: CPU cores of the rank; below 1, ranks take turns on a core.
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
        """Peak FLOP/s of the fastest data type in `ARITHMETICS` that has a peak."""
        return next(self.peak_flops[name] for name in ARITHMETICS if name in self.peak_flops)

    def has_peak(self, precision: str) -> bool:
        """Return whether the data type has a peak; always true for 16 bits and for a CPU."""
        is_half = precision in ("bfloat16", "float16")
        return is_half or precision in self.peak_flops or self.core is not None

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s of products in a data type, or `flops` for one without a peak.

        Raises:
            ConfigError: `has_peak` is false.
        """
        if self.has_peak(precision):
            return self.peak_flops.get(precision, self.flops)
        of_models = [name for name in ("bfloat16", "float32", "float64") if name in self.peak_flops]
        raise ConfigError(
            f"the peak FLOP/s of {self.name} in {precision} are unknown; expected a model in "
            f"{' or '.join(of_models)}"
        )

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity, FLOPs per byte, above which compute is the bottleneck."""
        return self.flops / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class OpCost:
    """Cost of a collective: `hops * latency_s + bytes / bandwidth`, see `ring`."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Congestion:
    """Degradation of a fabric for a group that spans many servers.

    Attributes:
        units: number of servers from which the degradation applies.
        bandwidth: remaining fraction of the bandwidth.
        late_s: added delay of a message to another pipeline stage.
    """

    units: int
    bandwidth: float
    late_s: float = 0.0


_UNSTRAINED: Final = Congestion(units=1, bandwidth=1.0)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The interconnect between devices at one level of a cluster.

    Attributes:
        bandwidth: bytes/s of one device in one direction.
        latency_s: latency of one hop.
        measured: collective -> its measured latency and bandwidth.
        turn_s: added time of a hop for each further rank on the same core.
        in_step: on CPU, time of a collective in a step / time alone; above 1 because it copies
            buffers through caches that compute uses.
        strains: degradation by number of servers, in rising order; empty if unknown.
        peers: in a full mesh, number of devices to which a device has a direct link; else None.
    """

    name: str
    bandwidth: float
    latency_s: float
    source: str
    date: str
    measured: Mapping[str, OpCost] = field(default_factory=dict, hash=False)
    turn_s: float = 4e-4
    in_step: float = 2.2
    strains: tuple[Congestion, ...] = ()
    peers: int | None = None

    def among(self, num_members: int) -> float:
        """Return a device's bandwidth to `num_members - 1` others; a mesh uses only their links."""
        return self.bandwidth * (min(1.0, (num_members - 1) / self.peers) if self.peers else 1.0)

    def congestion_at(self, num_units: int) -> Congestion:
        """Return the degradation for a group that spans `num_units` servers."""
        strained = [each for each in self.strains if each.units <= num_units]
        return strained[-1] if strained else _UNSTRAINED


def ring(op: str, num_ranks: int, num_bytes: float) -> tuple[int, float]:
    """Return the number of hops and the bytes that a rank sends in a ring collective.

    Args:
        op: all_reduce, all_gather, reduce_scatter or send.
        num_ranks: number of ranks in the ring.
        num_bytes: bytes of the full tensor, which every rank holds before or after the collective.
    """
    if op == "send":
        return 1, num_bytes
    rounds = 2 if op == "all_reduce" else 1
    return rounds * (num_ranks - 1), rounds * (num_ranks - 1) / num_ranks * num_bytes


@dataclass(frozen=True, kw_only=True)
class Level:
    """Units of `devices` devices; `link` joins the next smaller units, or devices, within one."""

    name: Unit
    devices: int
    link: Link


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over all devices of a cluster; core counts are 0 for a device without a `Chip`."""

    flops: float
    fp32_cores: int
    tensor_cores: int
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices of one kind, and the levels that join them, innermost first."""

    name: str
    title: str
    device: Device
    levels: tuple[Level, ...]
    num_devices: int

    def of(self, num_devices: int) -> Cluster:
        """Return the cluster of the first `num_devices` devices, with the levels that join them.

        Raises:
            ConfigError: `num_devices` is below 1, or above the number of devices.
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
