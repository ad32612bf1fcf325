"""A folder that another job uses before this run saves to it, and has the lock."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from loops import Case
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from launched_ranks import start_on
from phalanx.checkpoint import index, manifest
from phalanx.checkpoint.frozen import FrozenWeights, checksums_of
from phalanx.checkpoint.in_memory import recover
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.saver import Saver
from phalanx.errors import CheckpointError
from phalanx.launch.local import run_ranks
from phalanx.script import saves

ABOUT = Manifest(
    steps_done=5, num_steps=9, consumed=0, num_ranks=1, strategy="dp1", shape={}, stream={}
)


def save_first(folder: Path) -> None:
    loop = loops.Distributed(Case(), "dp2")
    loop.train(1)
    loop.run.save(folder)


def save_late(folder: Path, is_resumed: bool) -> str:
    """Save, while another job saves step 5 to the folder and ends just before it is locked."""
    loop = loops.Distributed(Case(), "dp2")
    if is_resumed:
        assert loop.run.resume(folder)
    loop.train(2)

    def late(here: Path) -> Saver:
        saves.Saver = Saver
        if loop.run.is_first:
            for step in manifest.complete_checkpoints(folder).values():  # keep is 1
                shutil.rmtree(step)
            final = manifest.folder_of(folder, 5)
            final.mkdir(parents=True)
            manifest.write(final, ABOUT)
        return Saver(here)

    saves.Saver = late
    words: list[str] = []
    for _ in range(2):
        try:
            words.append(str(loop.run.save(folder, keep=1)))
        except CheckpointError as error:
            words.append(str(error))
    assert words[0] == words[1]
    return words[0]


def test_a_new_run_takes_another_folder_if_one_is_used_before_it_is_locked(tmp_path: Path) -> None:
    own = manifest.folder_of(tmp_path / "run-2", 2)
    assert run_ranks(save_late, 2, tmp_path / "run", False, threads=1) == 2 * [str(own)]
    assert list(manifest.complete_checkpoints(tmp_path / "run")) == [5]


def test_a_resumed_run_does_not_save_beside_later_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(save_first, 2, run, threads=1)
    gone, latest = manifest.folder_of(run, 1), manifest.folder_of(run, 5)
    assert run_ranks(save_late, 2, run, True, threads=1) == 2 * [
        f"cannot save in {run}: {gone}, the checkpoint to resume from, no longer exists; a run "
        f"removes older checkpoints, and the latest of this run is {latest}; start again"
    ]
    assert list(manifest.complete_checkpoints(run)) == [5]


def save_two(folder: Path) -> None:
    loop = loops.Distributed(Case(), "dp2")
    for num_steps in (1, 2):
        loop.train(num_steps)
        loop.run.save(folder)


def resume_and_save(folder: Path) -> int:
    loop = loops.Distributed(Case(), "dp2")
    assert loop.run.resume(folder)
    begun = loop.run.steps_done
    loop.train(1)
    loop.run.save(folder)
    return begun


def test_a_loop_resumes_from_its_last_whole_checkpoint(tmp_path: Path) -> None:
    run_ranks(save_two, 2, tmp_path, threads=1)
    for name, named in (("rank-00000.safetensors", ""), (manifest.NAME, "checkpoints")):
        (manifest.folder_of(tmp_path, 2) / name).write_bytes(b"{}")
        assert run_ranks(resume_and_save, 2, tmp_path / named, threads=1) == [1, 1]
        assert list(manifest.complete_checkpoints(tmp_path)) == [1, 2]
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000002.damaged")


def loop_of(hosts: list[tuple[Path, int]], folder: Path, num_steps: int, generation: int) -> Any:
    """Take steps of a loop of one's own; return the steps done when it began, and the losses."""
    start_on(hosts, generation=generation)
    recover.cache_clear()
    loop = loops.Distributed(Case(schedules=True), "dp2")
    loop.run._prepared.job = loop.run._prepared.job._replace(memory_every=1)
    loop.run.resume(folder)
    begun = loop.run.steps_done
    loop.train(num_steps)
    return begun, loop.losses


def test_a_loop_of_ones_own_resumes_between_two_batches(tmp_path: Path) -> None:
    hosts = [(tmp_path / name, 1) for name in "ab"]
    _, expected = run_ranks(loop_of, 2, hosts, tmp_path / "0", 10, 0, threads=1)[0]
    run_ranks(loop_of, 2, hosts, tmp_path / "1", 4, 0, threads=1)
    begun, after = run_ranks(loop_of, 2, hosts, tmp_path / "1", 7, 1, threads=1)[0]
    assert begun == 3
    assert after == expected[3:]


class Adapted(nn.Module):
    """A frozen map with an adapter beside it, and a frozen average of the adapter."""

    def __init__(self, base: int) -> None:
        super().__init__()
        torch.manual_seed(base)
        self.base = nn.Linear(7, 5, dtype=torch.float64).requires_grad_(False)
        self.up = nn.Parameter(torch.full((5, 7), 0.1, dtype=torch.float64))
        self.average = nn.Parameter(self.up.detach().clone(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ (self.up + self.average).T


def adapted(strategy: str, folder: Path, num_steps: int, base: int = 0) -> list[float] | str:
    """Resume, take steps and save; return the losses, or the message of a refusal."""
    run = phalanx.init(strategy)
    rows = torch.arange(84.0, dtype=torch.float64).view(12, 7).sin()
    loader: Any = DataLoader(TensorDataset(rows), batch_size=6)
    model = Adapted(base)
    model, optimizer, loader = run.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    try:
        run.resume(folder)
    except CheckpointError as error:
        return str(error)
    losses: list[float] = []
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for (x,) in itertools.islice(batches, num_steps):
        losses.append(run.backward(run.gather(model(x)).square().mean()).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.average.lerp_(model.up, 0.5)
    run.save(folder)
    return losses


def checksums_around_a_change() -> None:
    run, model = phalanx.init("fsdp2"), Adapted(0)
    model, _ = run.prepare(model, torch.optim.AdamW([model.up]))
    frozen, weights = FrozenWeights(model), {**dict(model.named_parameters())}
    expected = checksums_of({n: w for n, w in weights.items() if n != "up"})
    before = weights["base.weight"].detach().clone()
    with torch.no_grad():
        weights["base.weight"].mul_(2)
        assert sorted(frozen.checksums(weights)) == ["average", "base.bias"]
        weights["base.weight"].copy_(before)
    assert frozen.checksums(weights) == expected


def test_a_frozen_weight_that_is_changed_for_a_while_keeps_its_checksum() -> None:
    run_ranks(checksums_around_a_change, 2, threads=1)


def test_frozen_weights_are_left_out_and_compared_at_a_resume(tmp_path: Path) -> None:
    """Under another split too; one that the script itself changes is no frozen weight."""
    ((*_, third, fourth),) = run_ranks(adapted, 1, "dp1", tmp_path / "whole", 4, threads=1)
    run = tmp_path / "run"
    run_ranks(adapted, 2, "fsdp2", run, 2, threads=1)
    folder = manifest.folder_of(run, 2)
    about = manifest.read(folder)
    assert sorted(about.frozen) == ["base.bias", "base.weight"]
    stored = {name for name in index.read(folder, about.files) if name.startswith("model.")}
    assert stored == {"model.up", "model.average"}
    (other,) = run_ranks(adapted, 1, "dp1", run, 1, 1, threads=1)
    assert "trained on other frozen weights, which it does not contain: 'base.weight'" in other
    for strategy, num_ranks, expected in (("dp3", 3, third), ("dp1", 1, fourth)):
        for losses in run_ranks(adapted, num_ranks, strategy, run, 1, threads=1):
            assert losses == pytest.approx([expected], rel=1e-12)
