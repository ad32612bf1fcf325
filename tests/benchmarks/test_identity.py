"""The net under a change that is meant to change no number."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.strategy import KINDS, Strategy

MAIN = Path(__file__).parents[2] / "benchmarks/identity/main.py"
IDENTITY: dict[str, Any] = runpy.run_path(str(MAIN))


def test_every_built_kind_is_recorded() -> None:
    recorded = {
        (axis, part.kind)
        for name in IDENTITY["all_runs"]()
        for axis, part in Strategy.parse(name.split()[1]).named()
    }
    built = {(axis, name) for axis, kinds in KINDS.items() for name in kinds if kinds[name].about}
    # Workers that do not wait for each other push in any order.
    assert built - recorded == {("dp", "async"), ("dp", "quorum")}


def test_a_name_is_a_command_and_each_kind_is_resumed() -> None:
    names = IDENTITY["all_runs"]()
    assert len({*names}) == len(names)
    resumed = {name.split()[0] for name in names if name.endswith(" resumed")}
    assert resumed == {"train", "script", "loop"}
    assert all(name.removesuffix(" resumed") in names for name in names)


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
@pytest.mark.parametrize(
    "name",
    [
        "script pp2 resumed",
        "loop fsdp2 loss=whole resumed",
        "train cp2 float32",
        "train dp2:ps float32 eval-every=4",
    ],
)
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
