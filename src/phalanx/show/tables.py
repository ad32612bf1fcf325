"""Print the result of a topic as lines and tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from phalanx.report.tabular import Line, Number, Part, Table
from phalanx.report.units import percent
from phalanx.show.shown import Frame, Lanes, Outcome, ServedJob, Shown, Sketch, Strip


def printed(shown: Shown) -> Iterator[Part]:
    """Yield the printed parts of a topic, in order."""
    yield Line(shown.title, "bold")
    yield from shown.about
    if shown.in_torch:
        yield f"in torch: {shown.in_torch}"
    for part in shown.parts:
        yield ""
        if isinstance(part, Strip):
            if part.title:
                yield Line(part.title, "bold")
            for frame in part.frames:
                yield Line(frame.title, "" if part.title else "bold")
                yield _table_of(part.heads, frame)
        elif isinstance(part, Lanes):
            yield from _lanes(part)
        elif isinstance(part, Sketch):
            yield Line(part.title, "bold")
            yield from (Line(line, wraps=False) for line in part.lines)
        elif isinstance(part, ServedJob):
            yield from _roles(part)
        else:
            yield part


def _table_of(heads: Sequence[str], frame: Frame) -> Table:
    """Return a table with a row for each rank: its cells, and the messages it sent in the step."""
    rows = list[list[str]]()
    for rank, cells in enumerate(frame.cells):
        sent = [each for each in frame.sent if each.source == rank]
        total = sum(each.num_bytes for each in sent)
        row = [str(rank), *cells]
        if frame.sent:
            row += [sent_text(sent), str(total) if sent else ""]
        rows.append(row)
    columns = ["rank", *heads, *(["has sent", "bytes"] if frame.sent else [])]
    return Table("", columns, rows, ["rank", *heads, "bytes"])


def sent_text(sent: Iterable[tuple[int, int, str, int]]) -> str:
    """Describe the messages that one rank sends, by target rank, such as "chunk 2 to 1"."""
    by_target: dict[int, list[str]] = {}
    for _, target, what, _ in sent:
        by_target.setdefault(target, []).append(what)
    texts = {target: " ".join(whats) for target, whats in by_target.items()}
    if len(texts) > 2 and len(set(texts.values())) == 1:  # the same message to several ranks
        return f"{next(iter(texts.values()))} to {', '.join(map(str, texts))}"
    return ", ".join(f"{what} to {target}" for target, what in texts.items())


def _lanes(lanes: Lanes) -> Iterator[Table]:
    schedule, outcomes = lanes.schedule, lanes.outcomes
    names = [outcome.name for outcome in outcomes]
    chunks = len(schedule.stages_of(0))
    heads = (
        "",
        Number("step ms", ".1f", 1e-3),
        *(Number(name, percent) for name in ("bubble", "highest MFU")),
        Number("most in flight", ".3g"),
    )
    rows = [
        (of.name, of.timeline.length, of.timeline.bubble, of.highest_mfu, max(of.held) / chunks)
        for of in outcomes
    ]
    yield Table("", heads, rows)
    busy = (Number(f"busy, {name}", percent) for name in names)
    held = (Number(f"in flight, {name}", ".3g") for name in names)
    rows = [
        (
            str(rank),
            ", ".join(map(str, schedule.stages_of(rank))),
            *(outcome.busy[rank] for outcome in outcomes),
            *(outcome.held[rank] / chunks for outcome in outcomes),
        )
        for rank in range(len(schedule.orders))
    ]
    yield Table("", ["rank", "stages", *busy, *held], rows)


def _roles(roles: ServedJob) -> Iterator[Table]:
    group_of = {each: str(at) for at, group in enumerate(roles.groups) for each in group}
    rows = [
        (name, group_of.get(name, ""), shape, ", ".join(roles.connected.get(name, ())))
        for name, shape in roles.shapes.items()
    ]
    yield Table(roles.title, ("process", "group", "stores or sends", "has connected to"), rows)
    workers = [each for group in roles.groups for each in group[1:]]
    rows = [
        (name, group_of[name], *(" ".join(of[name]) for of in roles.tasks.values()))
        for name in workers
    ]
    title = "each task, as step@version of the weights; the last worker is 5 times slower"
    yield Table(title, ("process", "group", *roles.tasks), rows)


def figures_text(outcome: Outcome) -> str:
    """Return the figures of a timeline as one line."""
    return (
        f"{outcome.name}: step {1e3 * outcome.timeline.length:.1f} ms, bubble "
        f"{percent(outcome.timeline.bubble)}, highest MFU {percent(outcome.highest_mfu)}"
    )
