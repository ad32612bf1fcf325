"""The jobs of the examples: what the trainer runs in stages is what one process computes."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import phalanx
from marks import by_hand
from phalanx.script.trainer import trainer_of

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest.importorskip("sklearn")
pytest.importorskip("transformers")

Job = Callable[[str], phalanx.Trainer]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """What reads a job, such as `llama:ours`, of which all have files of the same names."""

    def read(text: str) -> phalanx.Trainer:
        example, _, function = text.partition(":")
        monkeypatch.syspath_prepend(EXAMPLES / example)
        return trainer_of(f"{EXAMPLES / example}/job.py:{function}")

    yield read
    for name in ("job", "plain"):
        sys.modules.pop(name, None)


def outcome(trainer: phalanx.Trainer, strategy: str, out: Path) -> tuple[list[float], float]:
    """Return the loss of each step, and that of the data at the end if it is measured."""
    fitted = trainer.train(strategy, phalanx.Options(out=out / strategy, threads=1))
    return fitted.losses, fitted.evaluations[-1].loss if fitted.evaluations else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pp2", by_hand("pp2:gpipe"), by_hand("pp4")])
def test_batch_norm_in_stages_moves_as_in_one_process(
    job: Job, tmp_path: Path, strategy: str
) -> None:
    """The last loss is that of the running statistics, which each microbatch has moved."""
    trainer = job("resnet:small")
    expected, last = outcome(trainer, "dp1", tmp_path)
    losses, found = outcome(trainer, strategy, tmp_path)
    assert len(losses) == 5
    assert losses == pytest.approx(expected, rel=1e-6)
    assert found == pytest.approx(last, rel=1e-6)


@pytest.mark.slow
def test_a_network_in_two_stages_is_proven(job: Job) -> None:
    trainer = dataclasses.replace(job("resnet:small"), accumulation=1)
    verdict = trainer.verify("pp2:naive")
    assert verdict.is_equal, str(verdict)


@pytest.mark.slow
def test_microbatches_of_a_pipeline_are_those_of_one_process_that_accumulates(job: Job) -> None:
    verdict = job("resnet:small").verify("pp2", steps=1)
    assert verdict.is_equal, str(verdict)


def test_stages_are_cut_by_the_flops_of_their_layers(job: Job, tmp_path: Path) -> None:
    """The convolution that comes first has 2 % of the parameters."""
    trainer = dataclasses.replace(job("resnet:small"), steps=1, validation=None)
    outcome(trainer, "pp2", tmp_path)
    records = map(json.loads, (tmp_path / "pp2" / "metrics.jsonl").read_text().splitlines())
    (config,) = (record for record in records if record["kind"] == "config")
    assert config["stages"] == [
        "stage 0, rank 0 of pp: resnet.embedder, 77.9 % of the FLOPs",
        "stage 1, rank 1 of pp: resnet.encoder.stages.0 to classifier, 22.1 % of the FLOPs",
        "slowest stage / mean: 1.56",
    ]


@pytest.mark.slow
def test_our_decoder_takes_the_steps_of_transformers(job: Job, tmp_path: Path) -> None:
    theirs, ours = (job(f"llama:{name}") for name in ("of_transformers", "ours"))
    expected, _ = outcome(dataclasses.replace(theirs, steps=5), "dp1", tmp_path / "theirs")
    losses, _ = outcome(dataclasses.replace(ours, steps=5), "dp1", tmp_path / "ours")
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [
    ("of_transformers", "pp2"), ("ours", "pp2"),
    ("of_transformers", "pp2,dp2"), ("ours", "fsdp2,tp2"),
])  # fmt: skip
def test_a_decoder_in_two_stages_is_proven(job: Job, name: str, strategy: str) -> None:
    verdict = job(f"llama:{name}").verify(strategy, steps=2)
    assert verdict.is_equal, str(verdict)
