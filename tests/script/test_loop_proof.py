"""A script with a loop of its own is verified: on one rank and on all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.errors import ScriptError
from phalanx.script import loop_proof

SCRIPT = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx

statistics, folder = sys.argv[1:]
run = phalanx.init()
torch.manual_seed(0)
x = torch.randn(45, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 9, shuffle=True)
model = nn.Sequential(
    nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = run.prepare(model, optimizer, loader, batch_norm=statistics)
if run.resume(folder):
    raise SystemExit("resumed")
for _ in range(9):
    for x, y in loader:
        loss = run.backward(sum_of_rows=(model(x) - y).square().sum(), count=len(y))
        run.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        run.save(folder)
        run.print(float(loss))
"""


def verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statistics: str
) -> tuple[int, dict[str, Any]]:
    script, folder = tmp_path / "own.py", tmp_path / "runs"
    script.write_text(SCRIPT)
    words = ["fsdp2", "--script", str(script), "--steps", "3", "--json", "--"]
    code = main(["verify", *words, statistics, str(folder)])
    assert not folder.exists()
    printed = capsys.readouterr().out
    assert "against the script in one process" in printed
    return code, json.loads(printed.splitlines()[-1])["verdicts"][0]


def test_a_loop_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = verified(tmp_path, capsys, "global")
    assert code == 0 and verdict["is_equal"]
    assert set(verdict["largest_errors"]) == {
        "loss", "buffer", "gradient", "learning rate", "first moment", "second moment", "weight",
    }  # fmt: skip
    assert max(verdict["largest_errors"].values()) < 1e-10
    assert verdict["num_compared"] > 3 * 20


def test_a_loop_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = verified(tmp_path, capsys, "local")
    assert code == 1
    assert verdict["first_difference"].startswith("step 0, the loss: relative error")
    assert verdict["place"]["step"] == 0


def test_a_script_that_is_refused_on_several_ranks_alone_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(*_: Any, **_options: Any) -> list[Any]:
        raise ScriptError("0.weight differs on rank 1")

    script = tmp_path / "own.py"
    script.write_text("")
    monkeypatch.setattr(loop_proof, "run_ranks", run_ranks)
    assert main(["verify", "dp2", "--no-three", "--script", str(script)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == "dp2 does not finish, but one process does 0.weight differs on rank 1"


def test_a_narrow_type_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    assert main(["verify", "dp2", "--script", str(script), "--dtype", "float32"]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "has a loop of its own, which is verified in float64" in printed
