"""Compare several runs: settings that differ, steps, bytes and memory beside one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from phalanx.report.units import time_text
from phalanx.review.run_values import Values

_NAMED: Final = 6
"""Most settings that the first line names."""


def comparison(runs: Sequence[Values]) -> Values:
    """Return the values of a comparison of runs; ratios are relative to the first of them."""
    settings = [{"what": key, "values": values} for key, values in _union(runs, "settings")]
    settings = [
        row
        for row in settings
        if row["what"] != "out" and any(v != row["values"][0] for v in row["values"])
    ]
    strategies = [run["settings"].get("strategy", "") for run in runs]
    folders = [run["folder"].rpartition("/")[2] for run in runs]
    names = strategies if len({*strategies}) == len(runs) else folders
    names = names if len({*names}) == len(runs) else [run["folder"] for run in runs]
    found: Values = {"names": names, "settings": settings}
    figures = [_figures(run) for run in runs]
    for part in figures[0]:
        found[part] = list[Values]()
        for what, values in _union(figures, part):
            first, *_ = values
            ratios = [each / first if first and each is not None else None for each in values]
            if any(values):
                found[part].append({"what": what, "values": values, "ratios": ratios})
    return found | {"lines": [*_lines(found)]}


def _figures(run: Values) -> Values:
    """Return name -> value of a run's times, bytes and memory."""
    ledger, sent, memory = run["ledger"], run["bytes"], run["memory"]
    times = {} if ledger is None else {row["term"]: row["median_s"] for row in ledger["terms"]}
    held = {} if memory is None else {row["kind"]: row["at_peak_bytes"] for row in memory["kinds"]}
    if memory is not None:
        held = {"highest peak of any rank": memory["largest_bytes"], **held}
    return {
        "time_s": times if ledger is None else {"step": ledger["step_s"], **times},
        "sent": {} if sent is None else {row["axis"]: row["sent_bytes"] for row in sent["axes"]},
        "memory": held,
    }


def _union(of: Sequence[Values], part: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield each name in a part of any run, with its value in each run, or None."""
    for name in dict.fromkeys(name for each in of for name in each[part]):
        yield name, [each[part].get(name) for each in of]


def _lines(found: Values) -> Iterator[str]:
    """Yield what differs, how the steps compare, and the term that differs most."""
    first, *others = found["names"]
    keys = [row["what"] for row in found["settings"] if row["what"] != "nproc"]
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    differ = "no setting differs" if not keys else f"{', '.join(keys[:_NAMED])}{more} differ"
    yield f"{first} beside {', '.join(others)}: {differ if len(keys) != 1 else f'{differ}s'}"
    named = [
        [(name, s, ratio) for name, s, ratio in zip(found["names"], *both, strict=True) if s]
        for both in ((row["values"], row["ratios"]) for row in found["time_s"])
    ]
    if not named:
        return
    yield "; ".join(
        f"{name} takes {time_text(s)} a step"
        + ("" if ratio is None or name == first else f", {ratio:.2f} times the step of {first}")
        for name, s, ratio in named[0]
    )
    times = [[s for _, s, _ in row] for row in named]
    most = max(range(1, len(named)), key=lambda at: max(times[at]) - min(times[at]))
    yield f"The term that differs most is {found['time_s'][most]['what']}: " + ", ".join(
        f"{name} {time_text(s)}" for name, s, _ in named[most]
    )
