"""`phalanx report trace RUN` merges traces, prints what they say, and refuses what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.report_trace import trace
from phalanx.errors import ConfigError
from phalanx.measure.spans import ComputeSpan, StepSpans


def profiled(run: Path) -> Path:
    for step in (3, 4):
        StepSpans(
            step=step, rank=0, num_ranks=1, host="a", strategy="", axes={}, coords={},
            begin_s=float(step), end_s=step + 1.0, unix_s=1e9 + step, terms_s={"forward": 1.0},
            spans=[ComputeSpan(step, step + 1.0, "forward", "forward")],
        ).write(run)  # fmt: skip
    return run


def test_it_writes_a_file_for_perfetto_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = profiled(tmp_path / "run"), tmp_path / "two.json"
    assert trace([str(run), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "one process; ranks: 1; steps: 3, 4; spans: 2" in lines
    assert lines[-1].startswith(f"wrote {run}/trace/merged.json (")
    document = json.loads(last)
    assert document["steps"] == [3, 4] and document["num_spans"] == 2
    assert trace([str(run), "--steps", "4", "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert [e["ts"] for e in events if e["name"] == "step 4"] == [0]
    assert "steps: 4; spans: 1" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "two.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "RUN is missing"),
        (["rum"], "did you mean"),
        (["run", "--steps", "4,5"], "expected A-B"),
        (["run", "--steps", "4-"], "expected A-B"),
        (["run", "--steps", "9-12"], "no spans of these steps"),
        (["run", "--out", "missing/two.json"], "there is no folder missing"),
    ],
)
def test_a_wrong_request_is_one_message(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profiled(Path("run"))
    with pytest.raises(ConfigError, match=message):
        trace(words)
