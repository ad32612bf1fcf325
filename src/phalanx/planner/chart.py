"""SVG charts of the hardware catalog, and of plans over numbers of devices; needs extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from phalanx.planner.machine import Device
from phalanx.report.figure import log2_ticks, picture

if TYPE_CHECKING:
    from phalanx.planner.several import BestPlan

COLOURS = {"NVIDIA": "#4d7c0f", "AMD": "#b04a2f", "TPU": "#1f5a99", "AWS": "#8a6d1a"}

NEAR = 1.06
"""Ratio of two values below which their labels overlap."""

PEAK_TICKS = (100, 200, 500, 1000, 2000)
SPEED_TICKS = (1, 2, 5, 10)
MEMORY_TICKS = (10, 20, 50, 100, 200, 500)


class _Label(NamedTuple):
    text: str
    year: int
    value: float
    colour: str
    is_left: bool


def draw_devices(devices: Sequence[Device], path: Path) -> None:
    """Draw peak, bandwidth and memory of devices by year, one panel each."""
    panels = [
        ("dense 16-bit peak, TFLOP/s", [one.flops / 1e12 for one in devices], PEAK_TICKS),
        ("memory bandwidth, TB/s", [one.bandwidth / 1e12 for one in devices], SPEED_TICKS),
        ("memory, GB", [one.memory_bytes / 1e9 for one in devices], MEMORY_TICKS),
    ]
    years = [one.year for one in devices]
    with picture(path, (11, 5.2), 1, 3) as [row]:
        for axes, (title, values, ticks) in zip(row, panels, strict=True):
            axes.set_yscale("log")
            for one, x, y in zip(devices, years, values, strict=True):
                colour = COLOURS[one.title.split()[0]]
                axes.plot(x, y, marker="o", markersize=5, color=colour)
            for label in _labels(devices, values):
                axes.annotate(
                    label.text,
                    (label.year, label.value),
                    xytext=(-5 if label.is_left else 5, 0),
                    textcoords="offset points",
                    ha="right" if label.is_left else "left",
                    va="center",
                    color=label.colour,
                    fontsize=7,
                )
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_title(title, fontsize=10)
            axes.set_xlim(min(years) - 0.5, max(years) + 4.5)
            axes.set_xticks(range(min(years), max(years) + 1, 2))


def draw_scaling(several: Sequence[BestPlan], path: Path) -> None:
    """Draw speed-up and efficiency over the number of devices, one panel each."""
    points = [each for each in several if each.figures is not None]
    numbers = [each.num_devices for each in points]
    ideal = [number / numbers[0] for number in numbers] if numbers else []
    efficiency = [100 * (each.efficiency or 0) for each in points]
    with picture(path, (10, 4.4), 1, 2) as [[left, right]]:
        left.plot(numbers, ideal, color="#888888", linestyle="--", linewidth=1, label="linear")
        left.plot(numbers, [each.speed_up or 0 for each in points], marker="o", color="#1f5a99",
                  label="best strategy")  # fmt: skip
        left.set_yscale("log", base=2)
        left.set_ylabel(f"speed-up over {numbers[0] if numbers else 0:,} devices")
        left.yaxis.set_major_formatter("{x:g}")
        left.legend(loc="upper left", frameon=False)
        right.plot(numbers, efficiency, marker="o", color="#1f5a99")
        for each, height in zip(points, efficiency, strict=True):
            assert each.figures is not None, "only these are drawn"
            text = each.figures.strategy.replace(",", ",\n")
            right.annotate(text, (each.num_devices, height), xytext=(0, -8), fontsize=6, va="top",
                           ha="center", textcoords="offset points")  # fmt: skip
        right.set_ylim(0, 1.1 * max([100.0, *efficiency]))
        right.set_ylabel("efficiency, %")
        for axes in (left, right):
            axes.margins(x=0.12)
            log2_ticks(axes, numbers, fontsize=8)
            axes.set_xlabel("devices")


def _labels(devices: Sequence[Device], values: Sequence[float]) -> list[_Label]:
    """Return the labels of a panel; devices of one year and nearly equal value share a label.

    A label is on the left of its point where it would overlap a later device on the right.
    """
    points = sorted(zip(devices, values, strict=True), key=lambda point: (point[0].year, point[1]))
    spots: list[list[tuple[Device, float]]] = []
    for one, value in points:
        last = spots[-1] if spots else []
        if last and last[0][0].year == one.year and value <= NEAR * last[0][1]:
            last.append((one, value))
        else:
            spots.append([(one, value)])
    labels: list[_Label] = []
    for spot in spots:
        (first, value), colours = spot[0], {COLOURS[one.title.split()[0]] for one, _ in spot}
        is_taken = any(
            0 < one.year - first.year <= 2 and 1 / NEAR < other / value < NEAR
            for one, other in points
        )
        names = [one.name for one, _ in spot]
        lines = [", ".join(names[at : at + 3]) for at in range(0, len(names), 3)]
        colour = colours.pop() if len(colours) == 1 else "#333333"
        labels.append(_Label("\n".join(lines), first.year, value, colour, is_left=is_taken))
    return labels
