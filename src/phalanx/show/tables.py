"""Print the result of a topic as lines and tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from phalanx.measure.utilization import percent
from phalanx.show.shown import Frame, Grid, Lanes, Outcome, Shown, Strip

Printed = str | Table


def printed(shown: Shown) -> Iterator[tuple[Printed, str]]:
    """Yield lines and tables in order, each with the style of a line."""
    yield shown.title, "bold"
    for sentence in shown.about:
        yield sentence, ""
    if shown.in_torch:
        yield f"in torch: {shown.in_torch}", ""
    for part in shown.parts:
        yield "", ""
        if isinstance(part, str):
            yield part, ""
        elif isinstance(part, Strip):
            if part.title:
                yield part.title, "bold"
            for frame in part.frames:
                yield frame.title, "bold" if not part.title else ""
                yield table_of(_grid_of(part.heads, frame)), ""
        elif isinstance(part, Grid):
            if part.title:
                yield part.title, "bold"
            yield table_of(part), ""
        else:
            yield from ((each, "") for each in _lanes(part))


def table_of(grid: Grid) -> Table:
    """Return a rich table for a grid."""
    drawn = Table()
    for head in grid.heads:
        drawn.add_column(head, justify="right" if head in grid.numbers else "left")
    for row in grid.rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _grid_of(heads: Sequence[str], frame: Frame) -> Grid:
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
    return Grid("", columns, rows, ["rank", *heads, "bytes"])


def sent_text(sent: Iterable[tuple[int, int, str, int]]) -> str:
    """Describe the messages that one rank sends, by target rank, such as "chunk 2 to 1"."""
    by_target: dict[int, list[str]] = {}
    for _, target, what, _ in sent:
        by_target.setdefault(target, []).append(what)
    texts = {target: " ".join(whats) for target, whats in by_target.items()}
    if len(texts) > 2 and len(set(texts.values())) == 1:  # the same message to several ranks
        return f"{next(iter(texts.values()))} to {', '.join(map(str, texts))}"
    return ", ".join(f"{what} to {target}" for target, what in texts.items())


def _lanes(lanes: Lanes) -> Iterator[Printed]:
    schedule, outcomes = lanes.schedule, lanes.outcomes
    names = [outcome.name for outcome in outcomes]
    chunks = len(schedule.stages_of(0))
    rows = [
        (
            outcome.name,
            f"{1e3 * outcome.timeline.length:.1f}",
            percent(outcome.timeline.bubble),
            percent(outcome.highest_mfu),
            f"{max(outcome.held) / chunks:.3g}",
        )
        for outcome in outcomes
    ]
    heads = ("", "step ms", "bubble", "highest MFU", "most in flight")
    yield table_of(Grid("", heads, rows, heads[1:]))
    rows = [
        (
            str(rank),
            ", ".join(map(str, schedule.stages_of(rank))),
            *(percent(outcome.busy[rank]) for outcome in outcomes),
            *(f"{outcome.held[rank] / chunks:.3g}" for outcome in outcomes),
        )
        for rank in range(len(schedule.orders))
    ]
    numbers = [*(f"busy, {name}" for name in names), *(f"in flight, {name}" for name in names)]
    yield table_of(Grid("", ["rank", "stages", *numbers], rows, numbers))


def figures_text(outcome: Outcome) -> str:
    """Return the figures of a timeline as one line."""
    return (
        f"{outcome.name}: step {1e3 * outcome.timeline.length:.1f} ms, bubble "
        f"{percent(outcome.timeline.bubble)}, highest MFU {percent(outcome.highest_mfu)}"
    )
