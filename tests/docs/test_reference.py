"""The reference pages hold what the code holds: every setting, every preset."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.account.parameters import num_parameters
from phalanx.config import TrainConfig
from phalanx.config.fields import settings
from phalanx.config.load import load_config
from phalanx.models.registry import PRESETS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_configuration_file_has_every_setting_and_the_defaults(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (DOCS / "quick_start.md").read_text(), re.DOTALL)
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert load_config(["--config", str(path)]).config == TrainConfig()
    # A resumed run takes its settings from its own file, which this one is not.
    path.write_text(re.sub(r"(?m)^# (?!resume)(\w+ = )", r"\1", text))
    loaded = load_config(["--config", str(path)])
    unset = [key for key, source in loaded.sources.items() if source == "default"]
    assert unset == ["resume"] and "\n# resume = " in text
    assert list(loaded.sources) == [setting.key for setting in settings(TrainConfig)]


def test_the_table_of_presets_is_that_of_the_registry() -> None:
    rows = [
        "| preset | blocks | hidden | vocabulary | parameters | active |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, of in PRESETS.items():
        sizes = (of.num_layers, of.hidden, of.vocab_size)
        cells = [f"{size:,}" for size in sizes]
        count = num_parameters(of)
        active = f"{count.active:,} " if of.experts is not None else ""
        rows.append(f"| `{name}` | {' | '.join(cells)} | {count.total:,} | {active}|")
    table = "\n".join(rows)
    assert table in (DOCS / "quick_start.md").read_text(), (
        f"docs/quick_start.md should hold\n{table}"
    )


def results_of(path: str) -> list[dict[str, Any]]:
    return json.loads((DOCS.parent / "benchmarks" / path).read_text())["rows"]


def test_the_tables_of_counted_bytes_are_those_of_the_results() -> None:
    page = (ROOT / "benchmarks/recompute/README.md").read_text()
    of: dict[int, list[str]] = {16: [], 64: []}
    for row in results_of("recompute/results/four-ways-cpu.json"):
        sizes = [f"{row[name] / 2**20:.2f}" for name in ("kept_bytes", "peak_bytes")]
        of[row["blocks"]].append(" | ".join([f"{row['runs']:,}", *sizes]))
    for cells in zip(*of.values(), strict=True):
        assert f"| {' | '.join(cells)} |" in page


PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("benchmarks/*/README.md")]
ROOMS = ("src", "tests", "benchmarks", "examples")
FILES = [f"/{path}" for room in ROOMS for path in ROOT.glob(f"{room}/**/*.py")]
SAMPLES = (
    "script.py",
    "cost.py",
    "VERB.py",
    "NAME.py",
    "FILE.py",
    "context.py",
    "my.py",
    "train.py",
)
"""Files of a reader's own in examples, and those that CONTRIBUTING.md says how to add."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    if page.name == "decisions.md":
        pytest.skip("the log speaks of files as they were")
    named = {name.lstrip("/") for name in re.findall(r"[\w/]+\.py\b", page.read_text())}
    real = {name for name in named if not name.endswith(SAMPLES)}
    assert [name for name in real if not any(path.endswith(f"/{name}") for path in FILES)] == []


def test_the_page_of_loops_has_every_call_of_a_run() -> None:
    from phalanx.script.run import Run

    page = (DOCS / "your_model.md").read_text()
    table = page[page.index("### All of a run") : page.index("### What differs")]
    attributes = {"comm", "strategy", "accumulation"}  # set when it is made
    for name in [*attributes, *vars(Run)]:
        assert name.startswith("_") or f"`run.{name}" in table, name
