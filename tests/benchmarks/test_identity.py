"""The net under a change that is meant to change no number."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.strategy import KINDS, Strategy
from phalanx.strategy.kinds import SERVED

MAIN = Path(__file__).parents[2] / "benchmarks/identity/main.py"
IDENTITY: dict[str, Any] = runpy.run_path(str(MAIN))


def test_every_built_kind_is_recorded() -> None:
    recorded = {
        (axis, part.kind)
        for text in IDENTITY["TRAIN"]
        for axis, part in Strategy.parse(text).named()
    }
    built = {(axis, name) for axis, kinds in KINDS.items() for name in kinds if kinds[name].about}
    served = {("dp", kind) for kind in SERVED}  # their bits depend on the order of messages
    assert built - recorded - served <= {("recompute", "none")}


@pytest.mark.parametrize(
    ("after", "code"), [({}, 0), ({"loss": [2.0, 1.0000000000000002]}, 1), ({"sent": []}, 1)]
)
def test_one_bit_that_differs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: dict[str, Any], code: int
) -> None:
    record = {"loss": [2.0, 1.0], "norm": [1.0, 1.0], "sent": [{"calls": 1}], "weights": {"w": "a"}}
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, run in zip(paths, (record, {**record, **after}), strict=True):
        path.write_text(json.dumps({"train dp2 float32": run}))
    monkeypatch.setattr(sys, "argv", ["main.py", "compare", *map(str, paths)])
    with pytest.raises(SystemExit) as ended:
        IDENTITY["main"]()
    assert ended.value.code == code


@pytest.mark.slow
@pytest.mark.parametrize("name", ["script pp2 resumed", "loop fsdp2 resumed", "train cp2 float32"])
def test_two_records_of_one_tree_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path in paths:
        monkeypatch.setattr(sys, "argv", ["main.py", "record", str(path), "--only", name])
        IDENTITY["main"]()
    assert json.loads(paths[0].read_text())[name]["loss"]
    monkeypatch.setattr(sys, "argv", ["main.py", "compare", *map(str, paths)])
    with pytest.raises(SystemExit) as ended:
        IDENTITY["main"]()
    assert ended.value.code == 0
