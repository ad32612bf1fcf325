"""What is judged of a request before torch is loaded."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from model_folder import SHAPE, model_folder
from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Manifest
from phalanx.config import BatchConfig, CorpusConfig, ShapeConfig, TrainConfig
from phalanx.errors import BatchError, CheckpointError, ConfigError
from phalanx.models.registry import shape_of
from phalanx.train.job.request import checkpoint_of, settle
from phalanx.train.job.resume import as_before, published_folder

OF_A_RUN = {"model": "demo", "batch.global_size": 8, "batch.microbatch": 4}


def write(folder: Path, settings: dict[str, Any]) -> Manifest:
    about = Manifest(
        steps_done=1, num_steps=2, consumed=8, num_ranks=2, strategy="dp2",
        shape=dataclasses.asdict(shape_of("demo")), stream={}, settings=settings,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    manifest.write(folder, about)
    return about


@pytest.mark.parametrize("key", ["batch.global_size", "batch.microbatch"])
@pytest.mark.parametrize("value", ["x", 0, -1, 1.5, [1], {"a": 1}, True])
def test_settings_that_no_run_was_told_are_refused(tmp_path: Path, key: str, value: object) -> None:
    write(tmp_path, {**OF_A_RUN, key: value})
    with pytest.raises(CheckpointError, match=rf"manifest.json: {key} is .*; expected"):
        checkpoint_of(str(tmp_path), "resume")


def test_settings_that_are_missing_are_left_to_the_run(tmp_path: Path) -> None:
    write(tmp_path, OF_A_RUN)
    assert checkpoint_of(str(tmp_path), "resume") is not None
    half = write(tmp_path, {**OF_A_RUN, "batch.microbatch": None})
    assert as_before(TrainConfig(), half, 2).batch == TrainConfig().batch


def test_the_ranks_settle_what_is_open() -> None:
    batch = BatchConfig(global_size=24, microbatch=4)
    settled = settle(TrainConfig(device="cpu", nproc=3, batch=batch)).settings()
    assert settled.batch == BatchConfig(global_size=24, microbatch=4, accumulation=2)
    assert (settled.strategy, settled.nproc, settled.model) == ("dp3", 3, "demo")
    with pytest.raises(BatchError, match="4 and 8 are the nearest"):
        settle(TrainConfig(device="cpu", nproc=4, batch=BatchConfig(global_size=7)))


def test_a_folder_as_model_is_refused_beside_other_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    config = TrainConfig(device="cpu", model=str(folder), corpus=CorpusConfig(seq_len=16))
    settled = settle(config)
    assert (settled.name, settled.shape, settled.published) == ("tiny", SHAPE, folder)
    write(tmp_path / "run", {"model": "other"})
    for words, changes in {
        "both set the initial weights": {"init": str(tmp_path / "run")},
        "whose hidden is 16, but the given shape has 32": {"shape": ShapeConfig(hidden=32)},
        "no/folder, which does not exist": {"model": "no/folder"},
        "a folder without config.json": {"model": str(tmp_path)},
        "no preset 'dmeo' \\(did you mean 'demo'": {"model": "dmeo"},
    }.items():
        with pytest.raises(ConfigError, match=words):
            settle(dataclasses.replace(config, **changes))
    with pytest.raises(ConfigError, match="the model of the run to resume is other"):
        published_folder(config, checkpoint_of(str(tmp_path / "run"), "resume"))
    with pytest.raises(ConfigError, match="by --init"):
        settle(dataclasses.replace(config, model=str(tmp_path / "run")))
