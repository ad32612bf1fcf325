"""What a verb shows while it prepares: a bar for the part at work, or lines where there is none."""

from __future__ import annotations

import io
import re

import pytest

from phalanx.report import terminal
from phalanx.report.tabular import Table
from phalanx.report.terminal import Preparation, Terminal


@pytest.mark.parametrize(("first_line_s", "num_lines"), [(0.0, 3), (60.0, 0)])
def test_a_long_part_has_a_line_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, first_line_s: float, num_lines: int
) -> None:
    monkeypatch.setattr(terminal, "FIRST_LINE_S", first_line_s)
    output = io.StringIO()
    with Preparation(Terminal(output)) as preparation:
        for part, all_bytes in (("read the text", 0), ("merge", 0), ("encode", 4_000_000)):
            for done_bytes in (1_000_000, 2_000_000, 4_000_000):
                preparation.report(part, 0 if part == "merge" else done_bytes, all_bytes)
    lines = output.getvalue().splitlines()
    assert len(lines) == num_lines
    if lines:
        assert lines == [
            "preparing the data: read the text: 1.0 MB ...",
            "preparing the data: merge ...",
            "preparing the data: encode: 1.0 of 4.0 MB ...",
        ]


def test_only_the_part_at_work_is_shown_on_a_terminal() -> None:
    """A bar that is full would seem to be what is waited for."""
    output = io.StringIO()
    with Preparation(Terminal(output, is_terminal=True, width=100)) as preparation:
        preparation.report("count the words", 10, 10)
        preparation.report("merge", 0, 0)
        (task,) = preparation._bar.tasks
        assert (task.fields["head"], task.total) == ("merge", None)


def test_prose_is_broken_between_words_on_a_terminal_alone() -> None:
    prose = "global batch 8 = microbatch 4 x accumulation 1, of runs/a-path-that-is-long/and-whole"
    for is_terminal in (True, False):
        file = io.StringIO()
        console = Terminal(file, width=30, is_terminal=is_terminal)
        console.say(f"{prose}\n  indented words are indented on")
        lines = file.getvalue().splitlines()
        words = [word for line in lines for word in line.split()]
        assert words == [*prose.split(), *"indented words are indented on".split()]
        assert (len(lines) > 2) == is_terminal
        assert not is_terminal or lines[-1].startswith("  ")


def test_a_narrow_table_folds_its_numbers_and_cuts_none() -> None:
    numbers = ("1.23e-07", "1.23e-06", "1.23e-05", "1.23e-04", "1.23e-03", "1.23e-02")
    heads = ("", "loss", "norm", "weights", "gradients", "moments", "rate")
    table = Table("", heads, [("dp2,fsdp4,tp2 a decoder with ties", *numbers)], heads[1:])
    file = io.StringIO()
    Terminal(file, width=60, is_terminal=True).show(table)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    shown = "".join(plain.split())
    assert sorted(shown) == sorted("".join((*heads, *table.rows[0])).replace(" ", ""))
