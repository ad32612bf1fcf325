"""Checkpoints of scripts that are damaged or made to do harm: refused in one sentence."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from loops import Numbers
from torch import nn
from torch.utils.data import DataLoader

import phalanx
from phalanx.checkpoint import index, manifest
from phalanx.errors import PhalanxError
from phalanx.launch.local import run_ranks
from phalanx.storage import checksum

STEPS = 3
"""Taken before the checkpoint, of the 5 of a pass."""


class _Loop:
    """A loop with two groups, schedules within a schedule, and a generator of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.run = phalanx.init()
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5)).double()
        groups: Any = [
            {"params": list(model[0].parameters()), "name": "first"},
            {"params": list(model[2].parameters()), "amsgrad": True},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        lrs = torch.optim.lr_scheduler
        within = lrs.SequentialLR(
            optimizer, [lrs.LinearLR(optimizer), lrs.MultiStepLR(optimizer, [2, 9])], [2]
        )
        generator = torch.Generator().manual_seed(1)
        loader = DataLoader(Numbers(), 8, shuffle=True, generator=generator)
        self.model, self.optimizer, self.scheduler, self.loader = self.run.prepare(
            model, optimizer, within, loader
        )

    def steps(self, num_steps: int) -> float:
        loss = torch.tensor(0.0)
        while num_steps:
            for x, y in self.loader:
                summed = nn.functional.cross_entropy(self.model(x), y, reduction="sum")
                loss = self.run.backward(sum_of_rows=summed, count=len(y))
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                num_steps -= 1
                if not num_steps:
                    break
        return float(loss)


def save(folder: Path) -> str:
    loop = _Loop()
    loop.steps(STEPS)
    return str(loop.run.save(folder))


def outcomes_of(folders: list[Path]) -> list[str]:
    """Resume each and take some steps; return what is said, or the number that the loss is."""
    said: list[str] = []
    for folder in folders:
        loop = _Loop()
        try:
            loop.run.resume(folder)
            said.append(f"loss {loop.steps(5)}")
        except PhalanxError as error:
            said.append(str(error))
        except Exception as error:
            said.append(f"TRACEBACK {type(error).__name__}: {error}")
    return said


def signed(folder: Path, change: Callable[[dict[str, Any]], object], about: Any = None) -> None:
    """Change the manifest, and have its checksums agree with what there is, as anyone can."""
    values = about or json.loads((folder / manifest.NAME).read_text())
    del values["sha256"]
    change(values)
    values["files"] = {name: checksum(folder / name) for name in values["files"]}
    text = json.dumps(values, sort_keys=True)
    values = json.loads(text)
    values["sha256"] = manifest._sha256(values)  # pyright: ignore[reportPrivateUsage]
    (folder / manifest.NAME).write_text(json.dumps(values))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return Path(run_ranks(save, 1, folder, threads=1)[0])


def copy_of(saved: Path, run: Path) -> Path:
    folder = run / "checkpoints" / saved.name
    shutil.copytree(saved, folder)
    return folder


def at(values: Any, path: str) -> tuple[Any, Any]:
    """Return what holds the value of a dotted path, and its key there."""
    *outer, last = path.split(".")
    for name in outer:
        values = values[int(name)] if isinstance(values, list) else values[name]
    return values, int(last) if isinstance(values, list) else last


def put(path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(values: dict[str, Any]) -> None:
        holder, key = at(values["state"], path)
        holder[key] = value

    return change


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def attack(folder: Path) -> None:
        content = json.loads((folder / index.NAME).read_text())
        change(content["tensors"])
        (folder / index.NAME).write_text(json.dumps(content))
        signed(folder, lambda _: None)

    return attack


def renamed(old: str, new: str) -> Callable[[Path], object]:
    return tensors(lambda named: named.__setitem__(new, named.pop(old)))


def section(path: str, value: Any) -> Callable[[Path], object]:
    return lambda folder: signed(folder, put(path, value))


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "draws of no digits": (section("draws", "zz"), "state of the checkpoint, 'zz', is not"),
    "draws of few digits": (section("draws", "00"), "state of the checkpoint, '00', is not"),
    "draws 3": (section("draws", 3), "state of the checkpoint, 3, is not valid"),
    "loaders 3": (section("loaders", 3), "its state of the loaders is not valid"),
    "loaders [3]": (section("loaders", [3]), "a loader's position is 3, expected"),
    "loaders [{}]": (section("loaders", [{}]), "a loader's position has no 'epoch'"),
    "epoch -1": (section("loaders.0.epoch", -1), "epoch is -1, expected a whole number"),
    "epoch text": (section("loaders.0.epoch", "x"), "epoch is 'x', expected a whole number"),
    "batches -1": (section("loaders.0.batches", -1), "batches is -1, expected a whole number"),
    "batches 99": (section("loaders.0.batches", 99), "is after batch 99 of a pass, but"),
    "row -1": (section("loaders.0.row", -1), "row is -1, expected a whole number"),
    "no generators": (section("loaders.0.generators", {}), "drawn from generators []"),
    "generator text": (section("loaders.0.generators.draws", "q"), "the checkpoint, 'q', is not"),
    "schedulers [3]": (section("schedulers", [3]), "saved state does not fit this schedule"),
    "pairs 3": (section("schedulers.0", {"pairs": 3}), "saved state does not fit this schedule"),
    "a method": (section("schedulers.0.step", 3), "it has the unknown entry 'step'"),
    "an optimizer": (section("schedulers.0.optimizer", 3), "has the unknown entry 'optimizer'"),
    "last_epoch text": (section("schedulers.0.last_epoch", "x"), "last_epoch is 'x', expected a"),
    "last_epoch 1.5": (section("schedulers.0.last_epoch", 1.5), "last_epoch is 1.5, expected a"),
    "rates of text": (section("schedulers.0._last_lr", ["x", "y"]), "'_last_lr'[0] is 'x', and"),
    "a schedule less": (section("schedulers.0._schedulers", []), "'_schedulers' is [], and this"),
    "within": (section("schedulers.0._schedulers.1.get_lr", 3), "the unknown entry 'get_lr'"),
    "a counter": (
        section("schedulers.0._schedulers.1.milestones", {"counter": [[[], 1]]}),
        "saved state does not fit this schedule",
    ),
    "groups [[3]]": (section("settings", [[3]]), "with an optimizer of 1 parameter groups"),
    "betas 2": (section("settings.0.0.betas", [2.0, 0.9]), "Invalid beta parameter at index 0"),
    "betas None": (section("settings.0.0.betas", None), "the saved settings do not fit AdamW"),
    "params": (section("settings.0.0.params", [1, 2]), "it has the unknown setting 'params'"),
    "a setting": (section("settings.0.0.other", 1), "it has the unknown setting 'other'"),
    "lr text": (section("settings.0.0.lr", "x"), "'lr' is 'x', and this run has 0.0"),
    "lr -1": (section("settings.0.0.lr", -1), "lr is -1, expected at least 0"),
    "lr inf": (section("settings.0.0.lr", float("inf")), "'lr' is inf, and this run has"),
    "betas": (section("settings.0.0.betas", [0.9]), "'betas' is [0.9], and this run has (0.9, "),
    "amsgrad": (section("settings.0.1.amsgrad", 1), "'amsgrad' is 1, and this run has True"),
    "a moment renamed": (
        renamed("optimizer.0.weight.exp_avg", "optimizer.0.weight.momentum"),
        "its state of 0.weight lacks the 'exp_avg', and this run's AdamW keeps",
    ),
    "a moment less": (
        tensors(lambda named: named.pop("optimizer.2.weight.max_exp_avg_sq")),
        "its state of 2.weight lacks the 'max_exp_avg_sq'",
    ),
    "a foreign tensor": (
        renamed("generators.cpu", "mine"), "it is not the state of a run: it has the tensor 'mine'"
    ),
    "a foreign generator": (
        renamed("generators.cpu", "generators.disk"), "it has the tensor 'generators.disk'"
    ),
    "a tensor of a number": (
        tensors(lambda named: named.__setitem__("model.0.bias", ["F64", True])),
        "tensor 'model.0.bias' is ['F64', True], expected a data type",
    ),
}  # fmt: skip


def test_what_is_made_to_do_harm_is_refused_in_one_sentence(saved: Path, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(ATTACKS))]
    for (attack, _), folder in zip(ATTACKS.values(), folders, strict=True):
        attack(copy_of(saved, folder))
    outcomes = run_ranks(outcomes_of, 1, [*folders, saved.parent.parent], threads=1)[0]
    assert outcomes.pop().startswith("loss ")
    for (name, (_, words)), said in zip(ATTACKS.items(), outcomes, strict=True):
        assert words in said, (name, said)
        assert said.isprintable() and "TRACEBACK" not in said, (name, said)


VALUES: list[Any] = [
    None, True, -5, 0, 10**30, 1e300, float("nan"), "", "x", [], [3], {}, {"pairs": 3},
    {"counter": [[1]]}, [[[[]]]],
]  # fmt: skip


def paths_in(values: Any, before: str = "") -> list[str]:
    entries = enumerate(values) if isinstance(values, list) else values.items()
    found: list[str] = []
    for name, value in entries:
        found.append(f"{before}{name}")
        if isinstance(value, list | dict):
            found += paths_in(value, f"{before}{name}.")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_any_value_anywhere_is_read_or_refused(saved: Path, tmp_path: Path, part: int) -> None:
    """Each value of the script's section replaced, removed, or doubled by a stranger."""
    script = json.loads((saved / manifest.NAME).read_text())["state"]
    cases = [(path, value) for path in paths_in(script) for value in VALUES]
    cases = random.Random(part).sample(cases, 100)
    folders = [tmp_path / str(number) for number in range(len(cases))]
    for (path, value), folder in zip(cases, folders, strict=True):
        section(path, copy.deepcopy(value))(copy_of(saved, folder))
    outcomes = run_ranks(outcomes_of, 1, folders, threads=1)[0]
    taken = [(case, said) for case, said in zip(cases, outcomes, strict=True) if "loss" in said]
    bad = [(case, said) for case, said in zip(cases, outcomes, strict=True) if "TRACEB" in said]
    assert not bad
    assert all(said.isprintable() for said in outcomes)
    (tmp_path / "taken.txt").write_text(f"{len(taken)} of {len(cases)}: {taken}")
    assert 0 < len(taken) < len(cases) / 3


@pytest.mark.slow
@pytest.mark.parametrize("content", [
    '{"tensors": {"a": [' + "[]," * 33_000_000 + "[]]}}",
    '{"tensors": [' + "1," * 60_000_000 + "1]}",
], ids=["lists", "numbers"])  # fmt: skip
def test_a_large_index_is_refused_before_it_is_read(
    saved: Path, tmp_path: Path, content: str
) -> None:
    folder = copy_of(saved, tmp_path / "run")
    (folder / index.NAME).write_text(content)
    signed(folder, lambda _: None)
    (said,) = run_ranks(outcomes_of, 1, [tmp_path / "run"], threads=1)[0]
    assert "it has more than 16,777,216 values" in said


@pytest.mark.slow
def test_a_million_foreign_tensors_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path / "run")
    tensors(lambda named: named.update({f"x{n}": ["F64", 0] for n in range(10**6)}))(folder)
    (said,) = cast("list[str]", run_ranks(outcomes_of, 1, [tmp_path / "run"], threads=1)[0])
    assert "it is not the state of a run: it has the tensor 'x0'" in said
