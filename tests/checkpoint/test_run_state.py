"""Parts of a run in a checkpoint, and manifests of earlier versions that have a field for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ABOUT
from torch import nn

from phalanx.checkpoint import manifest
from phalanx.checkpoint.frozen import FrozenWeights
from phalanx.checkpoint.registered import Registered
from phalanx.checkpoint.run_state import RunState, Several
from phalanx.checkpoint.untrusted import write_json
from phalanx.errors import CheckpointError
from phalanx.train.evaluate import BestTracker

LOADER = {"epoch": 1, "row": 8, "batches": 2, "order": "a", "generators": {"draws": "00"}}


def test_states_of_an_earlier_manifest_are_read_as_parts(tmp_path: Path) -> None:
    manifest.write(tmp_path, ABOUT)
    values = json.loads((tmp_path / manifest.NAME).read_text())
    del values["state"], values["sha256"]
    values |= {
        "scaler": {"scale": 2.0},
        "best": None,
        "registered": {},
        "script": {
            "draws": "01",
            "loaders": [LOADER],
            "schedulers": [{"last_epoch": 3}],
            "groups": [[{"lr": 0.1}], []],
            "registered": {"mine": {"state": 5, "tensors": []}},
        },
    }
    values["sha256"] = manifest._sha256(values)
    write_json(tmp_path / manifest.NAME, values)
    about = manifest.read(tmp_path)
    assert about.registered == {"mine": {"state": 5, "tensors": []}}
    assert about.state == {
        "scaler": {"scale": 2.0},
        "draws": "01",
        "loaders": [LOADER],
        "schedulers": [{"last_epoch": 3}],
        "settings": [[{"lr": 0.1}], []],
    }


class Number:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> int:
        return self.value

    def load_state_dict(self, value: int) -> None:
        self.value = value


def load(parts: dict[str, Any], states: dict[str, Any]) -> None:
    model = nn.Linear(1, 1)
    RunState(model, [], parts, Registered(), FrozenWeights(model))._load_parts(states)


def test_a_part_takes_its_own_state_and_a_new_one_keeps_what_it_has() -> None:
    numbers, best = [Number(1), Number(2)], BestTracker("min:loss", value=0.5)
    load({"numbers": Several("numbers", numbers), "best": best}, {"numbers": [3, 4], "gone": 5})
    assert [each.value for each in numbers] == [3, 4]
    assert best.value == 0.5
    with pytest.raises(CheckpointError, match="prepared 1 numbers, but this script prepared 2"):
        load({"numbers": Several("numbers", numbers)}, {"numbers": [3]})


def test_a_scaler_takes_numbers_alone() -> None:
    scaler = torch.amp.GradScaler("cpu")
    state = {**scaler.state_dict(), "scale": 3.0}
    load({"scaler": scaler}, {"scaler": state})
    assert scaler.get_scale() == 3.0
    with pytest.raises(CheckpointError, match="state of the scaler is not valid"):
        load({"scaler": scaler}, {"scaler": state | {"scale": "x"}})
