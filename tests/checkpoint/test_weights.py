"""Reading the latest checkpoint of a run that saves meanwhile, and removes what was being read."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist

from phalanx.checkpoint import files, index, manifest, state, weights
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.weights import load_decoder, open_checkpoint
from phalanx.errors import CheckpointError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.storage import checksum

SHAPE = ModelShape(
    vocab_size=11,
    num_layers=1,
    hidden=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    ffn=8,
    max_seq_len=4,
)


def save_decoder(run: Path) -> None:
    """Save a decoder after 10 steps."""
    model = Decoder(SHAPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    about = dataclasses.replace(runs.about(10), shape=dataclasses.asdict(SHAPE))
    with Saver(run) as saver:
        saver.begin(model, torch.optim.SGD(model.parameters(), 0.1), about)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved")
    run_ranks(save_decoder, 1, run, threads=1)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def save_next(run: Path, num_steps: int = 10) -> None:
    """Have the run save other values some steps later, and remove the checkpoint before."""
    latest = manifest.find(run)
    about = manifest.read(latest)
    final = manifest.folder_of(run, about.steps_done + num_steps)
    partial = files.make_partial(final, replaces=True)
    for name in about.files:
        content = (latest / name).read_bytes()
        is_index = name == index.NAME
        (partial / name).write_bytes(content if is_index else content[:-1] + b"\x3f")
    sums = {name: checksum(partial / name) for name in about.files}
    steps_done = about.steps_done + num_steps
    files.publish(partial, final, dataclasses.replace(about, steps_done=steps_done, files=sums))
    files.remove_older(run, 1)


def save_before(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, save: Callable[[], None], times: int = 1
) -> None:
    """Have a function call `save` before it does its work, for some calls."""
    whole = getattr(where, name)
    left = [save] * times

    def late(*args: Any) -> Any:
        if left:
            left.pop()()
        return whole(*args)

    monkeypatch.setattr(where, name, late)


@pytest.mark.parametrize(
    ("where", "name"), [(manifest, "read"), (files, "verify"), (weights, "open_regular")]
)
def test_the_next_checkpoint_is_read_instead_of_one_removed_meanwhile(
    run: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    save_before(monkeypatch, where, name, lambda: save_next(run))
    assert open_checkpoint(run).folder == manifest.folder_of(run, 20)


def test_one_that_is_replaced_while_it_is_read_is_read_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_before(monkeypatch, files, "verify", lambda: save_next(run, num_steps=0))
    assert open_checkpoint(run).folder == manifest.folder_of(run, 10)


def test_a_run_that_removes_each_while_it_is_read_is_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_before(monkeypatch, files, "verify", lambda: save_next(run), times=manifest.NUM_TRIES)
    with pytest.raises(CheckpointError, match="removed 3 checkpoints, each while it was read; "):
        open_checkpoint(run)


def test_a_checkpoint_that_is_named_and_has_gone_names_the_latest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = manifest.folder_of(run, 10)
    save_before(monkeypatch, files, "verify", lambda: save_next(run))
    latest = manifest.folder_of(run, 20)
    with pytest.raises(CheckpointError, match=f"in {named}: it does not exist; .* is {latest}$"):
        open_checkpoint(named)


def test_one_that_is_damaged_is_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (manifest.find(run) / "rank-00000.safetensors").unlink()
    calls: list[None] = []
    save_before(monkeypatch, files, "verify", lambda: calls.append(None), times=9)
    with pytest.raises(CheckpointError, match=r"its file rank-00000.safetensors is missing"):
        open_checkpoint(run)
    assert len(calls) == 1


def test_weights_are_read_after_their_checkpoint_has_gone(run: Path) -> None:
    opened = open_checkpoint(run)
    expected = load_decoder(open_checkpoint(run), torch.float32, "cpu")
    save_next(run)
    assert not opened.folder.exists()
    read = load_decoder(opened, torch.float32, "cpu").state_dict()
    assert all(torch.equal(read[name], value) for name, value in expected.state_dict().items())
    opened.close()
    with pytest.raises(CheckpointError, match="No such file"):
        opened.read("norm.weight")


def load_late(run: Path) -> str:
    """Load the latest weights, while the run saves the next after the ranks have found one."""
    model, _ = runs.build()
    if dist.get_rank() == 0:
        verify, calls = state.verify, [None]

        def late(*args: Any) -> None:
            if calls:
                calls.pop()
                save_next(run)
            verify(*args)

        state.verify = late
    return state.load_weights(run, model).name


def test_ranks_find_the_next_checkpoint_together(tmp_path: Path) -> None:
    run_ranks(runs.save_value, 1, tmp_path, 10, 1, threads=1)
    assert run_ranks(load_late, 2, tmp_path, threads=1) == 2 * ["step-00000020"]
