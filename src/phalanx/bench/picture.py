"""Pictures of the matmul ceiling, of the times of collectives (extra `plot`), and of speed-ups."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from phalanx.report.figure import log2_ticks, picture
from phalanx.strategy import AXES

if TYPE_CHECKING:
    from phalanx.bench.ceiling import Ceiling
    from phalanx.bench.collectives import Fit, Sample
    from phalanx.bench.scaling import ScalingPoint

COLOURS = ("#1f5a99", "#b04a2f", "#3b7d4f")


def draw_ceiling(ceiling: Ceiling, path: Path) -> None:
    """Plot median and best rate against size, with lines for the ceiling and any data sheet."""
    sizes = [point.num_rows for point in ceiling.points]
    best = [point.best_flops_per_s / 1e12 for point in ceiling.points]
    median = [point.median_flops_per_s / 1e12 for point in ceiling.points]
    top = ceiling.flops_per_s / 1e12
    lines = [(f"ceiling {top:.3g} TFLOP/s", top, "#b04a2f", "--")]
    if ceiling.peak is not None:
        peak = ceiling.peak.flops_per_s / 1e12
        lines.append((f"data sheet {peak:.4g} TFLOP/s", peak, "#555555", "-"))
    with picture(path, (7, 4.2), 1, 1) as [[axes]]:
        for text, height, colour, style in lines:
            axes.axhline(height, color=colour, linewidth=1, linestyle=style)
            axes.annotate(
                text,
                (1.0, height),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 4),
                textcoords="offset points",
                ha="right",
                color=colour,
            )
        axes.plot(sizes, best, marker="o", markersize=4, color="#8fb8de", label="best repeat")
        axes.plot(sizes, median, marker="o", markersize=5, color="#1f5a99", label="median")
        log2_ticks(axes, sizes)
        axes.set_ylim(0, 1.18 * max(height for _, height, _, _ in lines))
        axes.set_xlabel("n, product of two n x n matrices")
        axes.set_ylabel("TFLOP/s")
        axes.set_title(f"Matrix products in {ceiling.arithmetic}, {ceiling.machine}")
        axes.legend(loc="lower right", frameon=False)


def draw_fits(samples: Sequence[Sample], fits: Sequence[Fit], path: Path) -> None:
    """Plot time against size: a mark for each measurement, a line for the fitted model.

    Each panel has one collective at one level of the cluster; each engine has its own color.
    """
    ops = list(dict.fromkeys(fit.op for fit in fits))
    units = list(dict.fromkeys(fit.unit for fit in fits))
    engines = list(dict.fromkeys(fit.engine for fit in fits))
    size = (2.6 * len(ops) + 0.6, 2.8 * len(units) + 0.5)
    with picture(path, size, len(units), len(ops), shares=True) as panels:
        for fit in fits:
            axes = panels[units.index(fit.unit)][ops.index(fit.op)]
            colour = COLOURS[engines.index(fit.engine) % len(COLOURS)]
            own = [
                sample
                for sample in samples
                if (sample.op, sample.engine) == (fit.op, fit.engine)
                and fit.unit == ("server" if sample.axis == "tp" else "cluster")
            ]
            sizes = [one.num_bytes / 1024 for one in own]
            axes.plot(sizes, [1e6 * one.time_s for one in own], "o", markersize=4, color=colour)
            line = [1e6 * fit.time_s(one.num_bytes) for one in own]
            axes.plot(sizes, line, linewidth=1, color=colour, label=fit.engine)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{fit.op}, {fit.num_ranks} ranks", fontsize=9)
        for row in panels:
            row[0].set_ylabel("us")
        for axes in panels[-1]:
            axes.set_xlabel("KiB")
        panels[0][0].legend(loc="upper left", frameon=False, title="line: model", fontsize=8)


_STYLE: Final = """<style>
svg{--ink:#1d2430;--paper:#fff;--grid:#e3e7ec;--soft:#6b7683;--c0:#7c4dbd;--c1:#1f5a99;
--c2:#2f7d4f;--c3:#b8730a;--c4:#b53a2f;--c5:#0f8a93}
@media (prefers-color-scheme:dark){svg{--ink:#e6e9ee;--paper:#14181e;--grid:#2b323b;--soft:#93a0ae;
--c0:#b794f0;--c1:#6aa9ea;--c2:#62c088;--c3:#e6a84a;--c4:#f0837a;--c5:#4cc4cc}}
text{fill:var(--ink);font:12px Helvetica,Arial,sans-serif}.soft{fill:var(--soft)}
.title{font-weight:bold;font-size:13px}
</style>"""

_DASHES: Final = ("", "7 3", "2 3")
"""Line styles of the methods of one axis."""

_PANEL: Final = (330.0, 300.0)
"""Width and height of a panel, pixels."""


def draw_speed_ups(points: Sequence[ScalingPoint], path: Path) -> None:
    """Draw a curve for each method over the ranks, with the ideal line, as SVG of our own.

    A bar spans the rounds, up to the ideal line: a round above it was disturbed. A hollow mark is a
    point whose operators are timed waits.
    """
    left, top, (width, height) = 50.0, 44.0, _PANEL
    numbers = sorted({1, *(point.num_ranks for point in points)})
    methods = dict.fromkeys(point.method for point in points if point.num_ranks > 1)
    colours, dashes, used = dict[str, str](), dict[str, str](), Counter[str]()
    for method in methods:
        axes = [name for name in AXES if re.search(rf"(^|,){name}", method)]
        colour = f"c{AXES.index(axes[0]) if len(axes) == 1 else len(AXES)}"
        colours[method], dashes[method] = colour, _DASHES[used[colour] % len(_DASHES)]
        used[colour] += 1
    kinds = list(dict.fromkeys(point.batch_of for point in points))
    right = left + len(kinds) * (width + 60)
    size = f"{right + 130:g}", f"{top + height + 64:g}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'width="{size[0]}" height="{size[1]}">{_STYLE}',
        f'<rect width="{size[0]}" height="{size[1]}" style="fill:var(--paper)"/>',
    ]
    lows = [min(p.speed_ups) for p in points if p.speed_up is not None] or [1.0]
    ticks = [2.0**at for at in range(math.floor(math.log2(min(lows))), 12) if 2**at <= numbers[-1]]
    span = math.log2(ticks[-1] / ticks[0]) or 1.0

    def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "") -> None:
        about = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"'
        lines.append(f"<text {about}>{escape(words)}</text>")

    def line(d: str, colour: str, dash: str = "", wide: float = 1.0) -> None:
        about = f'fill="none" stroke-width="{wide:g}" stroke-dasharray="{dash}"'
        lines.append(f'<path d="{d}" {about} style="stroke:var(--{colour})"/>')

    for kind in kinds:
        own = [point for point in points if point.batch_of == kind and point.speed_up is not None]

        def at(num_ranks: float, value: float, begin: float = left) -> tuple[float, float]:
            x = begin + 18 + (width - 36) * math.log2(num_ranks) / (math.log2(numbers[-1]) or 1)
            return x, top + height * (1 - math.log2(value / ticks[0]) / span)

        fixed = "global batch" if kind == "global" else "batch a rank"
        text(left, top - 20, f"Speed-up over one rank, fixed {fixed}", "start", "title")
        for tick in ticks:
            y = at(1, tick)[1]
            line(f"M{left} {y:.1f}h{width}", "grid")
            text(left - 6, y + 4, f"{tick:g}", "end", "soft")
        for number in numbers:
            text(at(number, 1)[0], top + height + 18, f"{number}", kind="soft")
        text(left + width / 2, top + height + 38, "ranks", kind="soft")
        first, last = at(1, max(1, ticks[0])), at(numbers[-1], numbers[-1])
        line(f"M{first[0]:.1f} {first[1]:.1f}L{last[0]:.1f} {last[1]:.1f}", "soft", "5 4")
        text(last[0] - 42, last[1] + 8, "ideal", "end", "soft")
        room = min(point.room for point in points)
        if room < numbers[-1]:
            x = at(room * 2**0.36, 1)[0]
            line(f"M{x:.1f} {top}v{height}", "soft", "1 3")
            text(x + 4, top + height - 6, "more ranks than cores", "start", "soft")
        for index, method in enumerate(methods):
            shift = 2.5 * index  # bars stand side by side, and none left of the ideal line
            of = {point.num_ranks: point for point in own if point.method == method}
            curve, colour = [at(1, 1)], colours[method]
            for number in sorted(of):
                point = of[number]
                x, y = at(number, point.speed_up or 1)
                ends = [
                    at(number, value)[1]
                    for value in (min(point.speed_ups), min(number, max(point.speed_ups)))
                ]
                curve.append((x + shift, y))
                line(f"M{x + shift:.1f} {ends[0]:.1f}V{ends[1]:.1f}", colour, wide=2)
                fill = "paper" if point.is_timed else colour
                lines.append(
                    f'<circle cx="{x + shift:.1f}" cy="{y:.1f}" r="3.4" stroke-width="1.6" '
                    f'style="fill:var(--{fill});stroke:var(--{colour})"><title>{escape(point.strategy)}'
                    f": {point.speed_up:.2f}; {escape(point.reason)}</title></circle>"
                )
            line("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in curve), colour, dashes[method], 1.6)
        left += width + 60
    for index, method in enumerate(methods):
        y = top + 12 + 20 * index
        line(f"M{right} {y:.1f}h26", colours[method], dashes[method], 2)
        text(right + 32, y + 4, method, "start")
    if any(point.is_timed for point in points):
        y = top + 24 + 20 * len(methods)
        lines.append(
            f'<circle cx="{right + 13:g}" cy="{y:g}" r="3.4" stroke-width="1.6" '
            'style="fill:var(--paper);stroke:var(--soft)"/>'
        )
        text(right + 32, y + 4, "timed layers", "start", "soft")
    text(right, top + height + 38, "bar: all rounds", "start", "soft")
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")
