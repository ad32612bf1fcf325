"""`phalanx show`: run a method step by step; or show the hardware catalogue."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from rich.table import Table
from rich.text import Text

from phalanx.cli.screen import print_json, say, screen
from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Positional
from phalanx.errors import ConfigError, nearest
from phalanx.launch.local import prepare_server
from phalanx.planner import hardware
from phalanx.planner.chart import check_svg, draw_devices
from phalanx.planner.machine import Chip, Cluster, Device, Level
from phalanx.show import topics

if TYPE_CHECKING:
    from phalanx.show.shown import Shown, ShowTopic

BESIDE: Final = ("v100", "a100-40", "a100", "h100", "h200", "b200", "mi300x", "tpu-v5p")
"""Devices in the comparison table of `phalanx show device`."""


@dataclass(frozen=True, kw_only=True)
class ShowCluster:
    """Show a cluster: the totals of its devices, and which link joins which of them."""

    name: Annotated[str | None, Positional("NAME[:DEVICES]")] = None
    """A cluster of the catalogue, as h100-llama3; a device for its usual servers, as h100:64; or
    this, the machine at hand."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


@dataclass(frozen=True, kw_only=True)
class ShowDevice:
    """Show a device: from the SM to the peak, and the FLOPs for a byte beside other devices."""

    name: Annotated[str | None, Positional("NAME")] = None
    """A device of the catalogue, as h100; or this, the one at hand."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


@dataclass(frozen=True, kw_only=True)
class ShowDevices:
    """Show all devices of the catalogue."""

    svg: str | None = None
    """Draw peak, bandwidth and memory over the years into this file."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


def run(argv: list[str]) -> int:
    """Show the topic that the first word names; without a word, list the topics.

    Raises:
        ConfigError: the topic or the name is unknown, or a file cannot be written.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        _list_topics()
        return 0
    topic, *words = argv
    known = [*topics.RUN, *CATALOGUE]
    if topic not in known:
        raise ConfigError(
            f"{topic!r} is not a topic of show{nearest(topic, known)}; the topics are "
            f"{', '.join(known)}"
        )
    is_run = topic in topics.RUN
    words = ["--help"] if words[:1] == ["help"] else words
    if is_run and not {"-h", "--help"}.intersection(words):
        prepare_server()  # imports torch in parallel to this process
    schema, show = topics.RUN[topic].load() if is_run else CATALOGUE[topic]
    config = read_command_line(words, schema, prog=f"phalanx show {topic}")
    document = (_show_run if is_run else show)(config, *([show] if is_run else []))
    if config.json:
        print_json(document)
    return 0


def _show_run(config: ShowTopic, show: Callable[[Any], Shown]) -> Any:
    """Run a method, print it, and draw it if --svg is given; return its JSON document."""
    from phalanx.show.animation import draw
    from phalanx.show.tables import printed

    path = None if config.svg is None else Path(config.svg)
    if path is not None:
        check_svg(path)
    shown, console = show(config), screen()
    for what, style in printed(shown):
        if isinstance(what, str):
            say(console, what, style)
        else:
            console.print(what)
    if path is not None:
        try:
            draw(shown, path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        say(console, f"wrote {path}")
    return dataclasses.asdict(shown)


def show_cluster(config: ShowCluster) -> Any:
    """Print the totals and levels of a cluster; return the cluster for JSON."""
    found = hardware.cluster(_named(config.name, "cluster NAME[:DEVICES]", "h100-llama3"))
    console, totals = screen(), found.totals
    say(console, f"{found.name}: {found.num_devices:,} x {found.title}", "bold")
    sums = [f"{si(totals.flops, 'FLOP/s')} dense"]
    if totals.fp32_cores:
        sums += [si(totals.fp32_cores, "FP32 cores"), si(totals.tensor_cores, "tensor cores")]
    sums += [f"{si(totals.memory_bytes, 'B')} of memory"]
    say(console, f"totals: {', '.join(sums)}\n")
    heads = ("level", "devices", "consists of", "joined by", "a device, one way", "a hop")
    console.print(_table(heads, _levels(found), numbers=(1, 4, 5)))
    for link in dict.fromkeys(level.link for level in found.levels):
        say(console, f"{link.name}: {link.source} ({link.date})", "dim")
    return found


def show_device(config: ShowDevice) -> Any:
    """Print the parts of a device, and a comparison with other devices; return it for JSON."""
    one = hardware.device(_named(config.name, "device NAME", "h100"))
    console = screen()
    say(console, f"{one.name}: {one.title}, {one.year}", "bold")
    chain = Table(box=None, pad_edge=False, show_header=False)
    for name, text in [*(_chip_rows(one.chip) if one.chip else []), *_device_rows(one)]:
        chain.add_row(Text(name, "bold"), Text(text))
    console.print(chain)
    console.print()
    before = predecessor(one)
    beside = {name: hardware.DEVICES[name] for name in BESIDE} | {one.name: one}
    others = sorted(beside.values(), key=lambda other: (other.year, other.flops))
    console.print(_device_table(others, marked=one.name))
    if before is not None:
        say(console, f"\n{compared(before, one)}")
    return one


def show_devices(config: ShowDevices) -> Any:
    """Print all devices, and draw them if --svg is given; return them for JSON."""
    console, devices = screen(), list(hardware.DEVICES.values())
    if config.svg is not None:
        try:
            draw_devices(devices, Path(config.svg))
        except OSError as error:
            raise ConfigError(f"cannot write {config.svg}: {error.strerror}") from None
    console.print(_device_table(devices))
    if config.svg is not None:
        say(console, f"wrote {config.svg}")
    return hardware.DEVICES


def predecessor(one: Device) -> Device | None:
    """Return the vendor's latest device of an earlier year, the first of several; or None."""
    if one.name not in hardware.DEVICES:
        return None
    maker = one.title.split()[0]
    older = [
        other
        for other in hardware.DEVICES.values()
        if other.year < one.year and other.title.split()[0] == maker
    ]
    return max(older, key=lambda other: other.year, default=None)


def compared(before: Device, one: Device) -> str:
    """Return a text on the ratios of FLOP/s and bandwidth, and their effect on the MFU."""
    flops, bandwidth = one.flops / before.flops, one.bandwidth / before.bandwidth
    text = (
        f"From {before.title} to {one.title}: {flops:.1f}x the FLOP/s, {bandwidth:.1f}x the memory "
        f"bandwidth; compute-bound work needs {one.flops_per_byte:.0f} FLOPs per byte instead of "
        f"{before.flops_per_byte:.0f}."
    )
    if flops > bandwidth:
        return (
            f"{text} Memory-bound work takes a larger part of a step, so the MFU of one model "
            "falls although the step is shorter."
        )
    return f"{text} Memory-bound work takes a smaller part of a step, so the MFU can rise."


def si(value: float, unit: str) -> str:
    """Return a value with three digits and an SI prefix, such as 24.3 EFLOP/s."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    gap = " " if " " in unit else ""
    return f"{value:.3g} {prefixes[0]}{gap}{unit}".replace("  ", " ")


def _levels(found: Cluster) -> Iterable[Sequence[str]]:
    """Yield a row of the table for each level of a cluster, innermost first."""
    inner: Level | None = None
    for level in found.levels:
        num = min(level.devices, found.num_devices)
        if inner is None:
            parts = "devices"
        else:
            count = math.ceil(num / inner.devices)
            parts = f"{count:,} {inner.name}s"
        speed = si(level.link.bandwidth, "B/s")
        hop = f"{1e6 * level.link.latency_s:.3g} us"
        yield level.name, f"{num:,}", parts, level.link.name, speed, hop
        inner = level


def _chip_rows(chip: Chip) -> list[tuple[str, str]]:
    """Return rows on the chip, from one SM to the peak FLOP/s."""
    kib, mib = 1024, 1024**2
    fp32, tensor = chip.fp32_cores_per_sm, chip.tensor_cores_per_sm
    registers = chip.registers_bytes_per_sm
    return [
        (
            "an SM",
            f"{fp32} FP32 cores, {tensor} tensor cores, {registers // kib} KiB of registers, "
            f"{chip.shared_bytes_per_sm // kib} KiB of shared memory",
        ),
        ("SMs", f"{chip.sms_built} built, {chip.sms} enabled"),
        (
            "all SMs",
            f"{chip.sms * fp32:,} FP32 cores, {chip.sms * tensor:,} tensor cores, "
            f"{chip.sms * registers / mib:.3g} MiB of registers",
        ),
        ("L2 cache", f"{chip.l2_bytes // mib} MiB"),
        (
            "16-bit products",
            f"{chip.sms} SMs x {chip.flops_per_clock:,} FLOPs a clock x "
            f"{chip.clock_hz / 1e9:.4g} GHz = {si(chip.flops, 'FLOP/s')}",
        ),
        ("chip source", chip.source),
    ]


def _device_rows(one: Device) -> list[tuple[str, str]]:
    """Return rows on the peaks, memory and FLOPs per byte of a device."""
    peaks = ", ".join(f"{name} {si(rate, 'FLOP/s')}" for name, rate in one.peak_flops.items())
    attained = si(one.matmul_efficiency * one.flops, "FLOP/s")
    return [
        ("dense peaks", peaks),
        ("attainable", f"{one.matmul_efficiency:.0%} = {attained} ({one.efficiency_source})"),
        (
            "memory",
            f"{si(one.memory_bytes, 'B')} ({one.usable_bytes / 2**30:.1f} GiB found), "
            f"{si(one.bandwidth, 'B/s')}",
        ),
        ("balance", f"{one.flops_per_byte:.0f} FLOPs a byte of memory"),
        ("source", f"{one.source} ({one.date})"),
    ]


def _device_table(devices: Iterable[Device], marked: str = "") -> Table:
    """Return a table of devices; the row of the device named `marked` is bold."""
    heads = ("device", "", "year", "TFLOP/s", "attainable", "GB", "TB/s", "FLOPs a byte")
    rows = [
        (
            one.name,
            one.title,
            str(one.year),
            _tera(one.flops),
            _tera(one.matmul_efficiency * one.flops),
            f"{one.memory_bytes / 1e9:.3g}",
            f"{one.bandwidth / 1e12:.4g}",
            f"{one.flops_per_byte:.0f}",
        )
        for one in devices
    ]
    return _table(heads, rows, numbers=range(2, 8), marked=marked)


def _tera(rate: float) -> str:
    tera = rate / 1e12
    return f"{tera:,.0f}" if tera >= 100 else f"{tera:.3g}"


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int],
    marked: str = "",
) -> Table:
    drawn, right = Table(), set(numbers)
    for number, head in enumerate(heads):
        drawn.add_column(head, justify="right" if number in right else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(Text, row), style="bold" if row[0] == marked else "")
    return drawn


def _named(name: str | None, form: str, example: str) -> str:
    """Return the name; if it is None, raise ConfigError with the expected command."""
    if name is None:
        kind = form.split()[0]
        raise ConfigError(
            f"the name of a {kind} is missing; expected: phalanx show {form}, such as {example}"
        )
    return name


CATALOGUE: Final[Mapping[str, tuple[type[Any], Callable[[Any], Any]]]] = {
    "cluster": (ShowCluster, show_cluster),
    "device": (ShowDevice, show_device),
    "devices": (ShowDevices, show_devices),
}
"""Topic of the catalogue -> its settings class, and a function that prints and returns it."""


def _list_topics() -> None:
    """Print the list of topics: first the methods, then the catalogue."""
    console = screen()
    say(console, "usage: phalanx show TOPIC [OPTIONS]\n")
    say(console, "Run a method on 4 ranks of this host, step by step (--ranks N, --svg FILE):\n")
    rows = [(name, topic.about) for name, topic in topics.RUN.items()]
    console.print(_table(("topic", "shows"), rows, numbers=()))
    say(console, "\nShow the hardware catalogue:\n")
    rows = [
        (name, (schema.__doc__ or "").partition(".")[0].removeprefix("Show "))
        for name, (schema, _) in CATALOGUE.items()
    ]
    console.print(_table(("topic", "shows"), rows, numbers=()))
    say(console, f"\nclusters: {', '.join([*hardware.CLUSTERS, hardware.THIS])}")
    say(console, "phalanx show TOPIC --help lists a topic's options.")
