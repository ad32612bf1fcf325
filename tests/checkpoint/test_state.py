"""Save and load on two ranks: what comes back, and how each failure is told."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.checkpoint import manifest, state
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.saver import Saver
from phalanx.config import OptimizerConfig
from phalanx.errors import CheckpointError
from phalanx.launch.local import run_ranks
from phalanx.train.optimizer import build_optimizer

ABOUT = Manifest(
    steps_done=2, num_steps=9, consumed=16, num_ranks=2, strategy="dp2", shape={}, stream={}
)


def build(config: OptimizerConfig | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    return model, build_optimizer(model, config or OptimizerConfig(lr=0.1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def about(steps_done: int) -> Manifest:
    return dataclasses.replace(ABOUT, steps_done=steps_done, num_ranks=dist.get_world_size())


def save_after(run: Path, num_steps: int, limit_bytes: int | None = None) -> None:
    """Save after some steps, rank 0 under a limit on the size of its files."""
    model, optimizer = build()
    for _ in range(num_steps):
        step(model, optimizer)
    torch.manual_seed(7 + dist.get_rank())
    if limit_bytes is not None and dist.get_rank() == 0:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    with Saver(run) as saver:
        saver.begin(model, optimizer, about(num_steps))


def words_of_save(run: Path, num_steps: int, limit_bytes: int | None = None) -> str:
    try:
        save_after(run, num_steps, limit_bytes)
    except CheckpointError as error:
        return str(error)
    return ""


def words_of_load(folder: Path) -> str:
    try:
        state.load(folder, *build())
    except CheckpointError as error:
        return str(error)
    return ""


def resume(run: Path, config: OptimizerConfig) -> dict[str, Any]:
    """Load, and say what came back."""
    model, optimizer = build(config)
    torch.manual_seed(1000)
    state.load(manifest.find(run), model, optimizer)
    draw = torch.rand(1).item()
    torch.manual_seed(7 + dist.get_rank())
    expected_draw = torch.rand(1).item()
    expected, expected_optimizer = build()
    for _ in range(2):
        step(expected, expected_optimizer)
    same = torch.equal(weights(model), weights(expected))
    step(model, optimizer)
    step(expected, expected_optimizer)
    return {
        "weights": same,
        "next weights": torch.equal(weights(model), weights(expected)),
        "draw": draw == expected_draw,
        "groups": [
            {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            for group in optimizer.param_groups
        ],
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("run")
    run_ranks(save_after, 2, folder, 2, threads=1)
    return folder


def test_a_run_comes_back_to_the_bit_with_its_generators(run: Path) -> None:
    for outcome in run_ranks(resume, 2, run, OptimizerConfig(lr=0.1), threads=1):
        assert outcome["weights"] and outcome["next weights"] and outcome["draw"]


def test_the_settings_of_the_run_that_goes_on_hold(run: Path) -> None:
    config = OptimizerConfig(lr=0.3, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.7)
    for outcome in run_ranks(resume, 1, run, config, threads=1):
        assert outcome["weights"] and not outcome["next weights"] and not outcome["draw"]
        expected = {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-3}
        assert outcome["groups"] == [
            {**expected, "weight_decay": 0.7},
            {**expected, "weight_decay": 0.0},
        ]


def skipped_steps_alone(run: Path) -> tuple[bool, bool]:
    """Save after a step that left gradients but was skipped; go on from there and without."""
    ours, optimizer = build()
    ours(torch.ones(1, 64)).sum().backward()
    with Saver(run) as saver:
        saver.begin(ours, optimizer, about(1))
    loaded, loaded_optimizer = build()
    state.load(manifest.find(run), loaded, loaded_optimizer)
    expected, expected_optimizer = build()
    for pair in ((ours, optimizer), (loaded, loaded_optimizer), (expected, expected_optimizer)):
        step(*pair)
        step(*pair)
    return (
        torch.equal(weights(ours), weights(expected)),
        torch.equal(weights(loaded), weights(expected)),
    )


def test_a_run_that_has_skipped_every_step_goes_on_as_if_it_were_fresh(tmp_path: Path) -> None:
    assert run_ranks(skipped_steps_alone, 1, tmp_path, threads=1) == [(True, True)]


@pytest.mark.parametrize("limit_bytes", [2000, 0], ids=["tensors", "everything"])
def test_a_full_disk_is_one_error_on_every_rank(tmp_path: Path, limit_bytes: int) -> None:
    run_ranks(save_after, 2, tmp_path, 1, threads=1)
    for words in run_ranks(words_of_save, 2, tmp_path, 2, limit_bytes, threads=1, timeout_s=30):
        assert words.startswith(f"cannot save {manifest.folder_of(tmp_path, 2)}")
        assert "older checkpoints stand" in words
        assert len(words.splitlines()) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert run_ranks(words_of_load, 2, manifest.find(tmp_path), threads=1) == ["", ""]


def fail_at_the_end(run: Path) -> str:
    """Find that there is no room for the manifest, after the tensors."""

    def write(folder: Path, about: Manifest) -> None:
        raise OSError(28, "No space left on device", str(folder))

    manifest.write = write
    return words_of_save(run, 2)


def test_a_disk_that_is_full_at_the_manifest_fails_on_every_rank(tmp_path: Path) -> None:
    for words in run_ranks(fail_at_the_end, 2, tmp_path, threads=1, timeout_s=30):
        assert "No space left" in words
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_folder_that_cannot_be_made_fails_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    for words in run_ranks(words_of_save, 2, tmp_path, 1, threads=1, timeout_s=30):
        assert words.startswith("cannot save") and "File exists" in words


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    folder = tmp_path / "step-00000002"
    folder.mkdir()
    for path in manifest.find(run).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("left", [0.5, 0.0, None], ids=["truncated", "empty", "missing"])
def test_a_damaged_file_is_one_error_on_every_rank(
    copy: Path, name: str, left: float | None
) -> None:
    raw = (copy / name).read_bytes()
    if left is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(raw[: int(left * len(raw))])
    for words in run_ranks(words_of_load, 2, copy, threads=1, timeout_s=30):
        assert words.startswith(f"cannot load {copy}: ")
        assert len(words.splitlines()) == 1


def edited(folder: Path, **values: Any) -> Path:
    """Change values of the manifest; None takes one out."""
    whole = json.loads((folder / manifest.NAME).read_text()) | values
    kept = {name: value for name, value in whole.items() if value is not None}
    (folder / manifest.NAME).write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"format": 1}, "is of format 1; this version reads format 2"),
        ({"format": None}, "it has no 'format'"),
        ({"steps_done": "2"}, "steps_done is '2', expected a whole number"),
        ({"consumed": -1}, "consumed is -1"),
        ({"consumed": None}, "consumed"),
        ({"shape": [1]}, "shape is not an object"),
        ({"stept": 2}, "stept"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(
    copy: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        manifest.read(edited(copy, **values))


@pytest.mark.parametrize("byte", [b"\xff", b"\0", b"["])
def test_a_manifest_with_a_flipped_byte_is_refused(copy: Path, byte: bytes) -> None:
    raw = (copy / manifest.NAME).read_bytes()
    (copy / manifest.NAME).write_bytes(byte + raw[1:])
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest.json"):
        manifest.read(copy)
    (copy / manifest.NAME).write_text("[1]")
    with pytest.raises(CheckpointError, match="cannot read"):
        manifest.read(copy)


def test_only_whole_checkpoints_are_found_and_the_last_by_number(tmp_path: Path) -> None:
    for name in ("step-9", "step-00000010", "step-00000011.partial", "step-00000012", "other"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        if name != "step-00000012":
            manifest.write(folder, ABOUT)
    assert list(manifest.whole(tmp_path)) == [9, 10]
    assert manifest.find(tmp_path).name == "step-00000010"
