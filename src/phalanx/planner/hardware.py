"""The hardware catalog: devices, and the clusters that their links form.

Every figure is from its `source` as of `date`. Peaks of GPUs are in `phalanx.measure.peaks`.

[Note: A torus as levels] A chip of a torus has two links on each axis, to neighbor chips only. A
group within a host uses one axis in both directions, and a larger group uses the other axes, so
that no link counts for both levels. In a 3-D torus, a host level has two links and the pod four.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from phalanx.errors import ConfigError, nearest
from phalanx.measure.peaks import sheet_of
from phalanx.planner.calibration import as_cluster, this_machine
from phalanx.planner.calibration_file import THIS, path_of, read
from phalanx.planner.machine import Chip, Cluster, Congestion, Device, Level, Link, Unit

_MIB, _GIB = 2**20, 2**30
_KIB = 2**10

_NCCL: Final = "latency: NCCL tuning.cc, a hop of a ring in the Simple protocol"
_HOP_S: Final = 3.4e-6
_NETWORK_HOP_S: Final = 14e-6


def _chip(
    source: str, sms: str, clock_ghz: float, flops: int, lanes: str, kib: str, l2_mib: float
) -> Chip:
    """Parse `ENABLED/BUILT` SMs, and per SM `FP32/TENSOR` cores and `REGISTERS/SHARED` KiB."""
    num, built = map(int, sms.split("/"))
    fp32, tensor = map(int, lanes.split("/"))
    registers, shared = map(int, kib.split("/"))
    return Chip(
        sms_built=built,
        sms=num,
        clock_hz=clock_ghz * 1e9,
        flops_per_clock=flops,
        fp32_cores_per_sm=fp32,
        tensor_cores_per_sm=tensor,
        registers_bytes_per_sm=registers * _KIB,
        shared_bytes_per_sm=shared * _KIB,
        l2_bytes=int(l2_mib * _MIB),
        source=source,
    )


_GV100 = _chip(
    "NVIDIA Tesla V100 architecture paper, 2017", "80/84", 1.53, 1024, "64/8", "256/96", 6
)
_GA100 = _chip("NVIDIA A100 architecture paper, 2020", "108/128", 1.41, 2048, "64/4", "256/164", 40)
_GH100 = _chip(
    "NVIDIA H100 architecture paper, 2022", "132/144", 1.83, 4096, "128/4", "256/228", 50
)
_BLACKWELL = (
    "NVIDIA Blackwell tuning guide, 2025; the clock is the one that gives the data sheet's peak"
)
_GB100 = _chip(_BLACKWELL, "148/160", 1.8558, 8192, "128/4", "256/228", 126)
_GB100_FAST = _chip(_BLACKWELL, "148/160", 2.062, 8192, "128/4", "256/228", 126)
_CDNA = _chip("AMD CDNA 3 white paper, 2023", "304/320", 2.1, 2048, "64/4", "512/64", 32)
_CDNA4 = _chip("AMD CDNA 4 white paper, 2025", "256/288", 2.4, 4096, "64/4", "512/160", 32)

_MAMF: Final = "Machine Learning Engineering, maximum achievable matmul FLOPS, 2025"
_TPU_BOOK: Final = "How To Scale Your Model, part 2, TPUs"


def _gpu(
    name: str,
    title: str,
    year: int,
    driver: str,
    gigabytes: float,
    mebibytes: float,
    terabytes_per_s: float,
    efficiency: float,
    measured: str,
    date: str,
    chip: Chip,
) -> Device:
    """Return a GPU with the data-sheet peaks of the device whose driver name is `driver`."""
    sheet = sheet_of(driver)
    assert sheet is not None, f"the peaks of {driver} are known"
    return Device(
        name=name,
        title=title,
        kind="gpu",
        year=year,
        peak_flops=sheet.peaks(),
        memory_bytes=gigabytes * 1e9,
        usable_bytes=mebibytes * _MIB,
        bandwidth=terabytes_per_s * 1e12,
        matmul_efficiency=efficiency,
        efficiency_source=measured,
        source=f"{sheet.source}; memory found as nvidia-smi or amd-smi lists it",
        date=date,
        driver=driver,
        chip=chip,
    )


def _tpu(
    name: str, title: str, year: int, tera: float, gib: float, bandwidth: float, note: str = ""
) -> Device:
    return Device(
        name=name,
        title=title,
        kind="tpu",
        year=year,
        peak_flops={"bfloat16": tera * 1e12},
        memory_bytes=gib * 1e9,
        usable_bytes=gib * _GIB,
        bandwidth=bandwidth,
        matmul_efficiency=0.9,
        efficiency_source="assumed: no published measurement of large products was found",
        source=f"Google Cloud TPU documentation, {title}{note}; {_TPU_BOOK}",
        date="2025-08",
    )


_DEVICES = (
    _gpu("v100", "NVIDIA V100 SXM2 32GB", 2017, "Tesla V100-SXM2-32GB", 32, 32510, 0.9, 0.87,
         "assumed: as A100", "2020-01", _GV100),
    _gpu("a100-40", "NVIDIA A100 SXM 40GB", 2020, "NVIDIA A100-SXM4-40GB", 40, 40960, 1.555, 0.87,
         _MAMF, "2021-06", _GA100),
    _gpu("a100", "NVIDIA A100 SXM 80GB", 2020, "NVIDIA A100-SXM4-80GB", 80, 81920, 2.039, 0.87,
         _MAMF, "2021-06", _GA100),
    _gpu("h100", "NVIDIA H100 SXM 80GB", 2022, "NVIDIA H100 80GB HBM3", 80, 81559, 3.35, 0.80,
         _MAMF, "2023-09", _GH100),
    _gpu("h200", "NVIDIA H200 SXM 141GB", 2024, "NVIDIA H200", 141, 143771, 4.8, 0.80,
         _MAMF, "2024-11", _GH100),
    _gpu("b200", "NVIDIA B200 SXM 180GB", 2025, "NVIDIA B200", 180, 183359, 7.7, 0.78,
         _MAMF, "2025-08", _GB100),
    _gpu("gb200", "NVIDIA GB200 NVL72 186GB", 2025, "NVIDIA GB200", 186, 189471, 8.0, 0.73,
         _MAMF, "2025-08", _GB100_FAST),
    _gpu("b300", "NVIDIA B300 SXM 288GB", 2025, "NVIDIA B300 SXM6 AC", 288, 275040, 8.0, 0.78,
         "assumed: as B200", "2025-08", _GB100),
    _gpu("gb300", "NVIDIA GB300 NVL72 288GB", 2025, "NVIDIA GB300", 288, 284208, 8.0, 0.73,
         "assumed: as GB200", "2025-08", _GB100_FAST),
    _gpu("mi300x", "AMD Instinct MI300X 192GB", 2023, "AMD Instinct MI300X", 192, 196592, 5.3, 0.51,
         _MAMF, "2023-12", _CDNA),
    _gpu("mi325x", "AMD Instinct MI325X 256GB", 2024, "AMD Instinct MI325X", 256, 262128, 6.0, 0.60,
         _MAMF, "2024-10", _CDNA),
    _gpu("mi355x", "AMD Instinct MI355X 288GB", 2025, "AMD Instinct MI355X", 288, 294896, 8.0, 0.62,
         _MAMF, "2025-06", _CDNA4),
    _tpu("tpu-v4", "TPU v4", 2021, 275, 32, 1.2e12),
    _tpu("tpu-v5e", "TPU v5e", 2023, 197, 16, 0.82e12),
    _tpu("tpu-v5p", "TPU v5p", 2023, 459, 95, 2.765e12, ", 95 GB (the book and courses: 96)"),
    _tpu("tpu-v6e", "TPU v6e", 2024, 918, 32, 1.64e12),
    Device(
        name="trainium2",
        title="AWS Trainium2",
        kind="tpu",
        year=2024,
        peak_flops={"bfloat16": 667e12, "float16": 667e12, "tf32": 667e12, "float32": 181e12,
                    "fp8": 1299e12},
        memory_bytes=96e9,
        usable_bytes=96 * _GIB,
        bandwidth=2.9e12,
        matmul_efficiency=0.8,
        efficiency_source="assumed: no published measurement of large products was found",
        source="AWS Neuron documentation, Trainium2 architecture",
        date="2025-12",
    ),
)  # fmt: skip

DEVICES: Final[Mapping[str, Device]] = MappingProxyType({one.name: one for one in _DEVICES})
"""Name -> device."""


def _link(name: str, gigabytes_per_s: float, latency_s: float, source: str, date: str) -> Link:
    source = f"{source}; {_NCCL}" if latency_s in (_HOP_S, _NETWORK_HOP_S) else source
    return Link(
        name=name,
        bandwidth=gigabytes_per_s * 1e9,
        latency_s=latency_s,
        source=source,
        date=date,
    )


def _network(name: str, gigabytes_per_s: float, source: str, date: str) -> Link:
    return _link(name, gigabytes_per_s, _NETWORK_HOP_S, source, date)


_NVLINK2 = _link("NVLink 2", 150, _HOP_S, "NVIDIA V100 data sheet: 300 GB/s both ways", "2020-01")
_NVLINK3 = _link("NVLink 3", 300, _HOP_S, "NVIDIA A100 data sheet: 600 GB/s both ways", "2021-06")
_NVLINK4 = _link("NVLink 4", 450, _HOP_S, "NVIDIA H100 data sheet: 900 GB/s both ways", "2023-09")
_NVLINK5 = _link("NVLink 5", 900, _HOP_S, "NVIDIA GB200 data sheet: 1.8 TB/s both ways", "2025-08")
_XGMI = dataclasses.replace(
    _link("Infinity Fabric", 448, _HOP_S,
          "AMD MI300X data sheet: 7 links of 64 GB/s, one to each peer", "2023-12"),
    peers=7,
)  # fmt: skip
_EDR = _network("4x InfiniBand EDR a server", 6.25, "NVIDIA DGX-1 user guide", "2020-01")
_HDR = _network("8x InfiniBand HDR a server", 25, "NVIDIA DGX A100 user guide", "2021-06")
_EFA = _network("4x EFA 100 Gb/s a server", 6.25, "AWS EC2 P4d instances", "2020-11")
_NDR = _network("8x InfiniBand NDR a server", 50, "NVIDIA DGX H100 user guide", "2023-09")
_ROCE = _network(
    "8x 400 Gb/s Ethernet a server", 50, "AMD Instinct MI300X platform brief", "2023-12"
)
_XDR = _network("8x InfiniBand XDR a server", 100, "NVIDIA DGX B300 user guide", "2025-08")
_LLAMA: Final = "The Llama 3 Herd of Models, section 3.3.1"
_META = _network("RoCE 400 Gb/s", 50, _LLAMA, "2024-07")
_META_TOP = _network("RoCE 400 Gb/s, 1:7", 50 / 7, _LLAMA, "2024-07")
_DCN = _network("data centre network", 6.25, f"{_TPU_BOOK}: 25 GB/s a host of 4", "2025-08")


def _ici(num_links: int, gigabytes_per_s: float) -> Link:
    """Return `num_links` torus links of a TPU chip as one link with their total bandwidth."""
    source = f"{_TPU_BOOK}: {gigabytes_per_s:g} GB/s a link, about 1 us a hop"
    return _link(f"{num_links} ICI links", num_links * gigabytes_per_s, 1e-6, source, "2025-08")


_TRN2: Final = "AWS Neuron documentation, Trn2 architecture"
_NEURONLINK = _link("NeuronLink v3 in an instance", 512, _HOP_S,
                    f"{_TRN2}: 1,024 GB/s a chip both ways", "2025-12")  # fmt: skip
_NEURONLINK_OUT = _link("NeuronLink v3 between instances", 128, _HOP_S,
                        f"{_TRN2}: 256 GB/s a chip both ways", "2025-12")  # fmt: skip
_EFA_P5 = dataclasses.replace(
    _network("32x EFA 100 Gb/s a server", 50, "AWS EC2 P5 instances", "2023-07"),
    latency_s=45e-6,
    strains=tuple(
        Congestion(
            units=units, bandwidth=gigabytes_per_s / 361.7, late_s=0.5 if units > 32 else 0.0
        )
        for units, gigabytes_per_s in ((4, 160.1), (8, 99.6), (16, 84.7), (32, 64.9), (64, 32.9))
    ),
    source="AWS EC2 P5 instances; a hop, and bandwidth over nodes: the Ultra-Scale Playbook, "
    "all-gathers and all-reduces on 1 to 64 nodes; late messages: its pipelines on 64 nodes",
)
_EFA3 = _network("16x EFA v3 200 Gb/s an instance", 25, "AWS EC2 Trn2 instances", "2024-12")

FABRIC: Final = 65_536
"""Ports of a fat tree of three tiers of 64-port switches without oversubscription, 64^3 / 4."""


def _cluster(name: str, title: str, of: str, *levels: tuple[Unit, int, Link]) -> Cluster:
    return Cluster(
        name=name,
        title=title,
        device=DEVICES[of],
        levels=tuple(Level(name=kind, devices=num, link=link) for kind, num, link in levels),
        num_devices=levels[-1][1],
    )


def _servers(of: str, inside: Link, between: Link, num: int = 8, unit: Unit = "server") -> Cluster:
    """Return a cluster of the usual servers of a device, under the device's name."""
    title = f"{DEVICES[of].title} in {unit}s of {num}"
    return _cluster(of, title, of, (unit, num, inside), ("cluster", FABRIC, between))


def _pods(of: str, host: int, pod: int, num_links: int, gigabytes_per_s: float) -> Cluster:
    """Return a cluster of TPU pods; see [Note: A torus as levels]."""
    title = f"{DEVICES[of].title} in pods of {pod:,}"
    return _cluster(of, title, of, ("server", host, _ici(2, gigabytes_per_s)),
                    ("pod", pod, _ici(num_links - 2, gigabytes_per_s)),
                    ("cluster", FABRIC, _DCN))  # fmt: skip


_CLUSTERS = (
    _servers("v100", _NVLINK2, _EDR),
    _servers("a100-40", _NVLINK3, _HDR),
    _servers("a100", _NVLINK3, _HDR),
    _servers("h100", _NVLINK4, _NDR),
    _servers("h200", _NVLINK4, _NDR),
    _servers("b200", _NVLINK5, _NDR),
    _servers("gb200", _NVLINK5, _NDR, 72, "rack"),
    _servers("b300", _NVLINK5, _XDR),
    _servers("gb300", _NVLINK5, _XDR, 72, "rack"),
    _servers("mi300x", _XGMI, _ROCE),
    _servers("mi325x", _XGMI, _ROCE),
    _servers("mi355x", _XGMI, _ROCE),
    _pods("tpu-v4", 4, 4096, 6, 45),
    _pods("tpu-v5e", 8, 256, 4, 45),
    _pods("tpu-v5p", 4, 8960, 6, 90),
    _pods("tpu-v6e", 8, 256, 4, 90),
    _cluster("trainium2", "AWS Trainium2 in UltraServers of 64", "trainium2",
             ("server", 16, _NEURONLINK), ("rack", 64, _NEURONLINK_OUT),
             ("cluster", FABRIC, _EFA3)),
    _cluster("h100-llama3", "NVIDIA H100 SXM 80GB, the cluster of Llama 3", "h100",
             ("server", 8, _NVLINK4), ("rack", 16, _META), ("pod", 3072, _META),
             ("cluster", 24576, _META_TOP)),
    _cluster("a100-p4d", "NVIDIA A100 SXM 40GB, an EC2 P4d UltraCluster", "a100-40",
             ("server", 8, _NVLINK3), ("cluster", 4096, _EFA)),
    _cluster("h100-p5", "NVIDIA H100 SXM 80GB, EC2 P5 instances", "h100",
             ("server", 8, _NVLINK4), ("cluster", FABRIC, _EFA_P5)),
    _cluster("gb200-nvl72", "NVIDIA GB200 in one NVL72 rack", "gb200", ("rack", 72, _NVLINK5)),
    _cluster("tpu-v5p-pod", "TPU v5p, a pod that is a torus of 16 x 20 x 28", "tpu-v5p",
             ("server", 4, _ici(2, 90)), ("pod", 8960, _ici(4, 90))),
    _cluster("trainium2-ultraserver", "AWS Trainium2, an UltraServer", "trainium2",
             ("server", 16, _NEURONLINK), ("rack", 64, _NEURONLINK_OUT)),
)  # fmt: skip

CLUSTERS: Final[Mapping[str, Cluster]] = MappingProxyType({one.name: one for one in _CLUSTERS})
"""Name -> cluster; the name of a device is a cluster of its usual servers."""


def device(name: str) -> Device:
    """Return a device of the catalog by name, or for `this` the device of this machine.

    Raises:
        ConfigError: the catalog has no such device.
    """
    if name == THIS:
        return cluster(THIS).device
    if name not in DEVICES:
        raise ConfigError(
            f"{name!r} is not a device of the catalogue{nearest(name.lower(), DEVICES)}; it has "
            f"{', '.join(DEVICES)}"
        )
    return DEVICES[name]


def cluster(text: str) -> Cluster:
    """Parse a cluster and its size: `h100-llama3`, `h100-llama3:16384`, `h100:8`, `this`.

    A device's name means a cluster of its usual servers, and the name of a calibration file means
    the machine on which the file was written.

    Raises:
        ConfigError: there is no such cluster, its size is no number, or it has fewer devices.
    """
    name, colon, count = text.partition(":")
    num_devices: int | None = None
    if colon:
        try:
            num_devices = int(count.replace(",", "").replace("_", ""))
        except ValueError:
            raise ConfigError(
                f"{text!r}: {count!r} is not a number of devices; expected {name}:N, such as "
                f"{name}:8"
            ) from None
    if name == THIS:
        return this_machine(num_devices)
    if name.endswith(".json"):
        return as_cluster(name, read(path_of(name)), num_devices)
    if name not in CLUSTERS:
        raise ConfigError(
            f"{name!r} is not a cluster of the catalogue"
            f"{nearest(name.lower(), [*CLUSTERS, THIS])}; it has {', '.join([*CLUSTERS, THIS])}"
        )
    return CLUSTERS[name] if num_devices is None else CLUSTERS[name].of(num_devices)
