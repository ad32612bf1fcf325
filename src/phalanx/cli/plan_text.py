"""Print the JSON document of `phalanx plan` as text."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.screen import WIDTH
from phalanx.errors import time_text, wrapped
from phalanx.planner.explain import Figures
from phalanx.planner.several import BestPlan

BAR: Final = 8
"""Width of a memory bar, in characters."""

_MFU: Final = "MFU, %\ncausal / full"
"""Heading of the MFU column: FLOPs of causal attention / of full attention."""

_BATCH: Final = "batch: sequences or rows per microbatch x microbatches per rank and step"
"""Explanation of the column `batch`."""


def show_answer(console: Console, document: dict[str, Any]) -> None:
    """Print the document of one search, one strategy or one script."""
    candidates = document["candidates"]
    _show_question(console, document["question"])
    if candidates:
        is_module = document["question"]["sequence"] is None
        _show_best(console, candidates, "rows" if is_module else "tokens")
    else:
        _say(console, "no strategy fits", "bold")
        if (larger := document.get("fits_on")) is not None:
            best = larger.figures
            _say(
                console,
                f"  {larger.num_devices:,} devices hold the job: {best.strategy}, "
                f"{time_text(best.step_time_s)} a step",
            )
    if rate := document.get("loader_rows_per_s"):
        _say(console, f"  the job's loader yields {_rate(rate)} rows a second here, in one process")
    if document["rejected"]:
        _say(console, "\nrejected, the nearest first:" if candidates else "\nrejected:", "bold")
        for each in document["rejected"]:
            _say(console, f"  {each['text']}")
    if document["advice"]:
        _say(console, "\nadvice", "bold")
        for line in document["advice"]:
            _say(console, f"  {line}")


def show_arithmetic(
    console: Console, sizes: dict[str, int], rows: Sequence[tuple[str, str, int]]
) -> None:
    """Print what memory holds without any split: formula, GB (10^9 bytes) and GiB (2^30 bytes)."""
    named = ", ".join(f"{name} = {size:,}" for name, size in sizes.items())
    _say(console, "\narithmetic of memory, without any split", "bold")
    _say(console, f"  {named}\n")
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("bytes of", "formula", "GB", "GiB"):
        drawn.add_column(head, justify="right" if head.startswith("G") else "left")
    for what, formula, num_bytes in rows:
        drawn.add_row(what, formula, f"{num_bytes / 1e9:,.1f}", f"{num_bytes / 2**30:,.1f}")
    console.print(drawn)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(wrapped(text, console.width), style), soft_wrap=True)


def _show_best(console: Console, candidates: Sequence[Figures], unit: str) -> None:
    best = candidates[0]
    _say(
        console,
        f"t_theoretical {time_text(best.t_theoretical_s)} a step: model FLOPs / peak of all "
        "devices, for every strategy",
    )
    _say(console, f"{_BATCH}\n")
    console.print(table(candidates, unit))
    _say(console, f"\n{best.strategy}: {best.mesh}", "bold")
    causes = (
        f"{name} {time_text(s)} ({s / best.step_time_s:.0%})"
        for name, s in best.causes_s.items()
        if s > 0.005 * best.step_time_s
    )
    _say(console, f"  time: {', '.join(causes)}")
    _say(
        console,
        f"  peak memory of stage {best.stage}, the heaviest, {best.memory_moment}: {_memory(best)}",
    )
    read = "rows" if unit == "rows" else "sequences"
    _say(console, f"  reads {_rate(best.samples_per_s)} {read} a second on all data ranks together")
    devices = [f"{number:,}" for number in best.devices]
    if len(devices) > 9:
        devices[4:-4] = ["..."]
    _say(console, f"  can resume on {', '.join(devices)} devices")


def _memory(of: Figures) -> str:
    """Return the memory by cause, rounded so that the tenths of a unit add up to the total."""
    unit = "GiB" if of.memory_bytes >= 2**30 else "MiB"
    tenth = (2**30 if unit == "GiB" else 2**20) / 10
    ends = [round(end / tenth) for end in itertools.accumulate(of.memory.values(), initial=0)]
    tenths = zip(of.memory, map(operator.sub, ends[1:], ends), strict=True)
    held = [f"{name} {num / 10:,.1f}" for name, num in tenths if num]
    total = f"{' + '.join(held)} = {ends[-1] / 10:,.1f}" if held else "less than 0.1"
    return f"{total} of {of.usable_bytes / tenth / 10:,.1f} {unit}"


def table(rows: Iterable[Figures], unit: str = "tokens") -> Table:
    """Return a table of strategies, at most WIDTH columns wide."""
    rate = f"{unit}/s\na device"
    heads = ("strategy", "batch", "step", rate, _MFU, "memory")
    return _drawn(heads, [(each.strategy, *cells(each)) for each in rows])


def cells(of: Figures) -> tuple[str, ...]:
    """Return the cells of a strategy: batch, step time, rate, MFU and memory."""
    part = of.memory_bytes / of.usable_bytes
    full = round(BAR * part)
    return (
        f"{of.microbatch} x {of.accumulation}",
        time_text(of.step_time_s),
        f"{of.tokens_per_s_per_device:,.0f}",
        f"{100 * of.mfu_causal:.1f} / {100 * of.mfu_full:.1f}",
        f"{'#' * full}{'.' * (BAR - full)} {part:.0%}",
    )


def _in_lines(strategy: str, widest: int) -> str:
    """Break a strategy after commas into lines of at most `widest` characters."""
    lines = [""]
    for part in strategy.split(","):
        joined = f"{lines[-1]},{part}" if lines[-1] else part
        if len(joined) < widest or not lines[-1]:  # keep a column for a comma
            lines[-1] = joined
        else:
            lines[-1] += ","
            lines.append(part)
    return "\n".join(lines)


def _show_question(console: Console, asked: dict[str, Any], devices: str = "") -> None:
    of_module = asked["sequence"] is None
    unit = "rows" if of_module else f"sequences of {asked['sequence']:,} tokens"
    batch = f"{asked['global_batch']:,} {unit}"
    number = asked["parameters"]
    scale, letter = (1e9, "B") if number >= 1e9 else (1e6, "M") if number >= 1e6 else (1e3, "k")
    of = "" if asked["cluster"] == asked["device"] else f" ({asked['cluster']})"
    _say(
        console,
        f"{asked['model']}, {number / scale:.3g} {letter} parameters, on "
        f"{devices or format(asked['num_devices'], ',')} x {asked['device']}{of}, {batch} a step, "
        f"by {asked['software']}",
        "bold",
    )


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def show_several(console: Console, document: dict[str, Any]) -> None:
    """Print the best strategies of several clusters, or of several numbers of devices."""
    several: list[BestPlan] = document.get("compare") or document["scale"]
    is_scale = "scale" in document
    ends = f"{several[0].num_devices:,} to {several[-1].num_devices:,}"
    _show_question(console, document["question"], ends if is_scale else "")
    heads = ["devices"] if is_scale else ["cluster"]
    heads += ["strategy", "batch", "step", "tokens/s\na device", _MFU]
    heads += ["speed-up /\nefficiency" if is_scale else "memory"]
    rows: list[Sequence[str]] = []
    for each in several:
        if each.figures is None:
            continue
        first = f"{each.num_devices:,}" if is_scale else each.cluster
        *values, memory = cells(each.figures)
        last = memory.split()[-1]
        if is_scale:
            last = f"{each.speed_up:.2f} / {each.efficiency:.0%}"
        rows.append((first, each.figures.strategy, *values, last))
    _say(console, f"{_BATCH}\n")
    console.print(_drawn(heads, rows))
    for each in several:
        if each.figures is None:
            _say(console, f"{each.cluster}:{each.num_devices}: {each.why_not}")
    if not is_scale:
        for each in several:
            if each.figures is not None:
                seconds = time_text(each.figures.t_theoretical_s)
                _say(console, f"t_theoretical on {each.cluster}: {seconds}")


def _drawn(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table; break the strategies to the width that the other columns leave."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        is_left = head in ("cluster", "strategy", "memory")
        drawn.add_column(head, justify="left" if is_left else "right", no_wrap=True)
    at, gaps = heads.index("strategy"), 2 * (len(heads) - 1)
    widths = [max(map(len, "\n".join(of).split("\n"))) for of in zip(heads, *rows, strict=True)]
    widest = WIDTH - gaps - sum(widths) + widths[at]
    for row in rows:
        in_lines = [_in_lines(cell, widest) if n == at else cell for n, cell in enumerate(row)]
        drawn.add_row(*map(Text, in_lines))
    return drawn
