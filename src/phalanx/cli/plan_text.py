"""The JSON document of `phalanx plan` as text."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from phalanx.planner.explain import Figures
from phalanx.planner.several import BestPlan
from phalanx.report.tabular import Line, Number, Part, Table
from phalanx.report.terminal import WIDTH
from phalanx.report.units import GIB, MIB, count_text, time_text

BAR: Final = 8
"""Width of a memory bar, in characters."""

_MFU: Final = "MFU, %\ncausal / full"
"""Heading of the MFU column: FLOPs of causal attention / of full attention."""

_ACTIVE_MFU: Final = "active MFU, %\ncausal / full"
"""Heading for a model with experts: FLOPs of the experts that a token visits."""

_BATCH: Final = "batch: sequences or rows per microbatch x microbatches per rank and step"
"""Explanation of the column `batch`."""


def answer(document: dict[str, Any]) -> Iterator[Part]:
    """Yield the document of one search, one strategy or one script as text."""
    candidates = document["candidates"]
    yield _question(document["question"])
    if candidates:
        is_module = document["question"]["sequence"] is None
        unit = "rows" if is_module else "tokens"
        yield from _best(candidates, unit, is_sparse=_is_sparse(document["question"]))
    else:
        yield Line("no strategy fits", "bold")
        if (larger := document.get("fits_on")) is not None:
            best = larger.figures
            yield (
                f"  {larger.num_devices:,} devices hold the job: {best.strategy}, "
                f"{time_text(best.step_time_s)} a step"
            )
    if rate := document.get("loader_rows_per_s"):
        yield f"  the job's loader yields {_rate(rate)} rows a second here, in one process"
    if document["rejected"]:
        yield Line("\nrejected, the nearest first:" if candidates else "\nrejected:", "bold")
        yield from (f"  {each['text']}" for each in document["rejected"])
    if document["advice"]:
        yield Line("\nadvice", "bold")
        yield from (f"  {line}" for line in document["advice"])


def arithmetic(sizes: dict[str, int], rows: Sequence[tuple[str, str, int]]) -> Iterator[Part]:
    """Yield what memory holds without any split: formula, GB (10^9 bytes) and GiB (2^30 bytes)."""
    yield Line("\narithmetic of memory, without any split", "bold")
    yield f"  {', '.join(f'{name} = {size:,}' for name, size in sizes.items())}\n"
    heads = ("bytes of", "formula", Number("GB", ",.1f", 1e9), Number("GiB", ",.1f", GIB))
    yield Table("", heads, [(*row, row[-1]) for row in rows])


def _best(candidates: Sequence[Figures], unit: str, *, is_sparse: bool) -> Iterator[Part]:
    best = candidates[0]
    flops = "FLOPs of active parameters" if is_sparse else "model FLOPs"
    yield (
        f"t_theoretical {time_text(best.t_theoretical_s)} a step: {flops} / peak of all "
        "devices, for every strategy"
    )
    yield f"{_BATCH}\n"
    yield table(candidates, unit, is_sparse=is_sparse)
    yield Line(f"\n{best.strategy}: {best.mesh}", "bold")
    causes = (
        f"{name} {time_text(s)} ({s / best.step_time_s:.0%})"
        for name, s in best.causes_s.items()
        if s > 0.005 * best.step_time_s
    )
    yield f"  time: {', '.join(causes)}"
    yield (
        f"  peak memory of stage {best.stage}, the heaviest, {best.memory_moment}: {_memory(best)}"
    )
    if of := best.exchanged:
        least, expected, most = (f"{of[name] / GIB:,.2f}" for name in ("least", "expected", "most"))
        yield (
            f"  ep: a rank sends {expected} GiB of rows a step if tokens are spread evenly over "
            f"experts, and {least} to {most} GiB however they are; priced at --imbalance x even"
        )
    read = "rows" if unit == "rows" else "sequences"
    yield f"  reads {_rate(best.samples_per_s)} {read} a second on all data ranks together"
    devices = [f"{number:,}" for number in best.devices]
    if len(devices) > 9:
        devices[4:-4] = ["..."]
    yield f"  can resume on {', '.join(devices)} devices"


def _memory(of: Figures) -> str:
    """Return the memory by cause, rounded so that the tenths of a unit add up to the total."""
    unit, size = ("GiB", GIB) if of.memory_bytes >= GIB else ("MiB", MIB)
    tenth = size / 10
    ends = [round(end / tenth) for end in itertools.accumulate(of.memory.values(), initial=0)]
    tenths = zip(of.memory, map(operator.sub, ends[1:], ends), strict=True)
    held = [f"{name} {num / 10:,.1f}" for name, num in tenths if num]
    total = f"{' + '.join(held)} = {ends[-1] / 10:,.1f}" if held else "less than 0.1"
    return f"{total} of {of.usable_bytes / tenth / 10:,.1f} {unit}"


def table(rows: Iterable[Figures], unit: str = "tokens", *, is_sparse: bool = False) -> Table:
    """Return a table of strategies, at most WIDTH columns wide."""
    mfu = _ACTIVE_MFU if is_sparse else _MFU
    heads = ("strategy", "batch", "step", f"{unit}/s\na device", mfu, "memory")
    return _table(heads, [(each.strategy, *cells(each)) for each in rows])


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


def _question(asked: dict[str, Any], devices: str = "") -> Line:
    of_module = asked["sequence"] is None
    unit = "rows" if of_module else f"sequences of {asked['sequence']:,} tokens"
    batch = f"{asked['global_batch']:,} {unit}"
    of = "" if asked["cluster"] == asked["device"] else f" ({asked['cluster']})"
    active = f" ({count_text(asked['active_parameters'])} active)" if _is_sparse(asked) else ""
    return Line(
        f"{asked['model']}, {count_text(asked['parameters'])} parameters{active}, on "
        f"{devices or format(asked['num_devices'], ',')} x {asked['device']}{of}, {batch} a step, "
        f"by {asked['software']}",
        "bold",
    )


def _is_sparse(asked: dict[str, Any]) -> bool:
    """Return whether a token meets only some of the parameters."""
    return asked["active_parameters"] < asked["parameters"]


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def several(document: dict[str, Any]) -> Iterator[Part]:
    """Yield the best strategies of several clusters, or of several numbers of devices."""
    plans: list[BestPlan] = document.get("compare") or document["scale"]
    is_scale = "scale" in document
    ends = f"{plans[0].num_devices:,} to {plans[-1].num_devices:,}"
    yield _question(document["question"], ends if is_scale else "")
    heads = ["devices"] if is_scale else ["cluster"]
    mfu = _ACTIVE_MFU if _is_sparse(document["question"]) else _MFU
    heads += ["strategy", "batch", "step", "tokens/s\na device", mfu]
    heads += ["speed-up /\nefficiency" if is_scale else "memory"]
    rows: list[Sequence[str]] = []
    for each in plans:
        if each.figures is None:
            continue
        first = f"{each.num_devices:,}" if is_scale else each.cluster
        *values, memory = cells(each.figures)
        last = memory.split()[-1]
        if is_scale:
            last = f"{each.speed_up:.2f} / {each.efficiency:.0%}"
        rows.append((first, each.figures.strategy, *values, last))
    yield f"{_BATCH}\n"
    yield _table(heads, rows)
    for each in plans:
        if each.figures is None:
            yield f"{each.cluster}:{each.num_devices}: {each.why_not}"
    for each in [] if is_scale else plans:
        if each.figures is not None:
            yield f"t_theoretical on {each.cluster}: {time_text(each.figures.t_theoretical_s)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table; break the strategies to the width that the other columns leave."""
    at, gaps = heads.index("strategy"), 2 * (len(heads) - 1)
    widths = [max(map(len, "\n".join(of).split("\n"))) for of in zip(heads, *rows, strict=True)]
    widest = WIDTH - gaps - sum(widths) + widths[at]
    broken = [(*row[:at], _in_lines(row[at], widest), *row[at + 1 :]) for row in rows]
    left = ("cluster", "strategy", "memory")
    return Table("", heads, broken, [head for head in heads if head not in left])
