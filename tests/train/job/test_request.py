"""What is judged of a request before torch is loaded."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Manifest
from phalanx.config import BatchConfig, TrainConfig
from phalanx.errors import BatchError, CheckpointError
from phalanx.models.registry import shape_of
from phalanx.train.job.request import checkpoint_of, settle
from phalanx.train.job.resume import as_before

OF_A_RUN = {"model": "demo", "batch.global_size": 8, "batch.microbatch": 4}


def write(folder: Path, settings: dict[str, Any]) -> Manifest:
    about = Manifest(
        steps_done=1, num_steps=2, consumed=8, num_ranks=2, strategy="dp2",
        shape=dataclasses.asdict(shape_of("demo")), stream={}, settings=settings,
    )  # fmt: skip
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
