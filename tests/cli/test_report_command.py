"""`phalanx report`: the screen, --json and the page say the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.cli.report import trace
from phalanx.errors import ConfigError
from phalanx.measure.spans import ComputeSpan, StepSpans
from recorded_run import config, ranks, step, whole_run, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """The texts of a page with the attributes of their element, and all elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._open.append(self.elements[-1])

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if data.strip() and self._open[-1][0] != "style":
            self.texts.append((data.strip(), {"tag": self._open[-1][0], **self._open[-1][1]}))


def at(document: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer."""
    for name in pointer.split("/")[1:]:
        document = document[int(name) if isinstance(document, list) else name]
    return document


def reported(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[str, Any]:
    """Return the screen of a report and its JSON document."""
    assert main(["report", *map(str, words), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def check_page(file: Path, document: Any) -> int:
    """Require each number and text of a page to be of the document; return how many."""
    page, num_values = Page(file.read_text()), 0
    for text, attributes in page.texts:
        if key := attributes.get("data-key"):
            value, num_values = at(document, key), num_values + 1
            if isinstance(value, str):
                assert text == value.strip()
                continue
            shown = float(text.replace(",", ""))
            half_a_digit = 0.5 * 10.0 ** -len(text.partition(".")[2])
            unit = float(attributes.get("data-unit") or 1)
            assert abs(shown - value / unit) <= half_a_digit * 1.0001, (key, text, value)
        else:  # labels of axes, and names of ranks and runs
            is_label = attributes["tag"] in ("text", "title", "li", "figcaption", "h1")
            assert is_label or not re.search(r"\d", text.replace("rank 0", "")), (text, attributes)
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert name not in ("src", "srcset") and "http" not in (value or "")
        if key := attributes.get("data-points"):
            path = attributes["d"] or ""
            assert path.count("L") + path.count("H") + 1 == len(at(document, key))
    return num_values


def table(parts: list[Any], title: str) -> dict[str, list[Any]]:
    """Return the rows of a table by their first cell."""
    rows = next(part for part in parts if isinstance(part, dict) and part["title"] == title)["rows"]
    return {row[0]: row[1:] for row in rows}


def test_every_number_of_the_page_is_in_the_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = whole_run(tmp_path / "runs & more")
    screen, document = reported(capsys, folder)
    assert check_page(folder / "report.html", document) > 100
    run = document["runs"][0]
    assert screen.splitlines()[:3] == run["In short"]
    assert run["In short"][2] == (
        "The plan errs most on the memory, activations: predicted 2.00 MiB, measured 3.00 MiB "
        "(-33%)."
    )
    table_lines = (line for line in screen.splitlines() if str(tmp_path) not in line)
    assert all(len(line) <= 100 for line in table_lines if "  " in line.strip())
    terms = table(run["Where the time of a step went"], "By term")
    assert terms["step"][:2] == [0.07, 1.0]
    assert terms["forward"][2:] == [0.01, 0.015, 0.02]
    peaks = table(run["Memory"], "The peak of each rank")
    assert peaks[1] == [0, 2**22, 3 * 2**20, -0.25, "backward", 0.01]
    published = table(run["MFU and HFU"], "Published runs, the nearest by parameters")
    assert 1 < len(published) <= 5 and run["MFU and HFU"][-1]["note"].startswith("This run is on C")
    assert run["Bytes by axis"][0] == (
        "dp: each rank sends 2.00 MiB a step: 2 all_reduce of 2.00 MiB together in backward, "
        "because every replica needs the gradient of the whole batch. Small calls: metrics."
    )
    lanes = run["A profiled step"][1]["lanes"]
    kinds = ["forward", "backward", "wait: communication", "optimizer"]
    assert [kind for _, _, kind in lanes["rank 1"]] == kinds
    assert lanes["rank 1 dp"][0][:2] == pytest.approx([0.03, 0.06])


def test_several_runs_stand_beside_one_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = whole_run(tmp_path / "one"), whole_run(tmp_path / "two", "fsdp2")
    killed = write_run(tmp_path / "three", config("dp4", seed=3), step(1, 0.14))
    screen, document = reported(capsys, one, other, killed, "--html", tmp_path / "all.html")
    assert check_page(tmp_path / "all.html", document) > 50
    compared = document["comparison"]
    settings = compared["What differs in settings"][0]
    assert settings["heads"] == ["setting", "dp2", "fsdp2", "dp4"]
    assert settings["rows"] == [["strategy", "dp2", "fsdp2", "dp4"], ["seed", None, None, 3]]
    times = table(compared["Time of a step, median ms"], "")
    assert times["step"] == pytest.approx([0.07, 0.07, 0.14, 1, 2])
    assert screen.startswith("dp2 beside fsdp2, dp4: strategy, seed differ\n")


def test_a_killed_run_is_reported_as_far_as_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest run in runs/ is reported, without importing torch."""
    monkeypatch.chdir(tmp_path)
    file = write_run(Path("runs/killed"), config("dp2"), step(1), step(2), ranks(1, 2))
    screen, document = reported(capsys)
    assert "no summary after step 2" in screen.splitlines()[0]
    assert "Memory" not in document["runs"][0] and "Memory" not in screen
    check_page(file / "report.html", document)
    code = "import sys; from phalanx.cli.main import main; main(['report']); print(*sys.modules)"
    words = [sys.executable, "-c", code]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "phalanx.review.sections" in shown and " torch " not in shown


def test_wrong_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole_run(tmp_path / "runs/demo-dp2")
    for words, answer in (
        ([tmp_path / "runs/demo-dp"], f"does not exist; expected the folder of a run (did you "
         f"mean '{tmp_path}/runs/demo-dp2'?)"),
        ([tmp_path], "has no metrics.jsonl; expected the folder of a run"),
        ([tmp_path / "runs/demo-dp2", "--html", tmp_path / "x.svg"], "is not the name of an HTML"),
    ):  # fmt: skip
        assert main(["report", *map(str, words)]) == 2
        shown = capsys.readouterr()
        assert answer in shown.err and not shown.out


def profiled(run: Path) -> Path:
    for number in (3, 4):
        StepSpans(
            step=number, rank=0, num_ranks=1, host="a", strategy="", axes={}, coords={},
            begin_s=float(number), end_s=number + 1.0, unix_s=1e9 + number,
            terms_s={"forward": 1.0},
            spans=[ComputeSpan(number, number + 1.0, "forward", "forward")],
        ).write(run)  # fmt: skip
    return run


def test_it_writes_a_file_for_perfetto_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = profiled(tmp_path / "run"), tmp_path / "two.json"
    assert main(["report", "trace", str(run), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "one process; ranks: 1; steps: 3, 4; spans: 2" in lines
    assert lines[-1].startswith(f"wrote {run}/trace/merged.json (")
    document = json.loads(last)
    assert document["steps"] == [3, 4] and document["num_spans"] == 2
    assert main(["report", "trace", str(run), "--steps", "4", "--out", str(out)]) == 0
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


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_opens_without_a_network_and_without_a_message(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert CHROMIUM is not None
    words = [CHROMIUM, "--headless=new", "--no-sandbox", f"--user-data-dir={tmp_path / 'home'}"]
    words += ["--enable-logging=stderr", "--v=0", "--host-resolver-rules=MAP * ~NOTFOUND"]
    words += ["--dump-dom", (folder / "report.html").as_uri()]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert "Where the time of a step went" in shown.stdout
    assert "CONSOLE" not in shown.stderr
