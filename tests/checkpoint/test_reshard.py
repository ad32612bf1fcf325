"""What one split saved, any other loads: whole tensors and shards, on 1 to 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
import torch

from phalanx.checkpoint import manifest
from phalanx.launch.local import run_ranks

State = dict[str, torch.Tensor]

SPLITS = [("whole", 1), ("whole", 3), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4)]

IDS = [f"{split}{num_ranks}" for split, num_ranks in SPLITS]


@pytest.fixture(scope="module", params=SPLITS, ids=IDS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, State]:
    """A run folder with a checkpoint, and what was saved."""
    split, num_ranks = request.param
    run = tmp_path_factory.mktemp(split)
    return run, run_ranks(runs.save_after, num_ranks, run, 2, split, threads=1)[0]


def assert_same(loaded: State, saved: State) -> None:
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name


def test_the_names_are_the_models_own(saved: tuple[Path, State]) -> None:
    trained = ["embedding.weight", "middle.weight", "middle.bias"]
    assert sorted(saved[1]) == sorted(
        [f"model.{name}" for name in [*trained, "frozen.weight", "frozen.bias", "scale"]]
        + [f"optimizer.{n}.{key}" for n in trained for key in ("step", "exp_avg", "exp_avg_sq")]
    )
    assert saved[1]["optimizer.middle.bias.step"] == 2
    assert saved[1]["optimizer.embedding.weight.exp_avg"].shape == (7, 5)


@pytest.mark.parametrize(("split", "num_ranks"), SPLITS, ids=IDS)
def test_any_split_loads_it(saved: tuple[Path, State], split: str, num_ranks: int) -> None:
    for loaded in run_ranks(runs.load_into, num_ranks, saved[0], split, threads=1):
        assert_same(loaded, saved[1])


def test_each_part_is_written_once_and_the_work_is_shared(saved: tuple[Path, State]) -> None:
    about = manifest.read(manifest.find(saved[0]))
    sizes = [size for name, (size, _) in about.files.items() if name.endswith(".distcp")]
    assert len(sizes) == about.num_ranks
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("split", ["whole", "fsdp"])
def test_weights_come_alone(saved: tuple[Path, State], split: str) -> None:
    expected = {name: t for name, t in saved[1].items() if name.startswith("model.")}
    for loaded in run_ranks(runs.load_weights_into, 2, saved[0], split, threads=1):
        assert_same(loaded, expected)


def test_an_optimizer_that_counts_steps_on_the_cpu_loads_it(saved: tuple[Path, State]) -> None:
    (loaded,) = run_ranks(runs.load_into, 1, saved[0], "whole", False, threads=1)
    assert_same(loaded, saved[1])
