"""The main job from end to end on a small model and a text of its own."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from forked_torchrun import run_two
from marks import by_hand
from phalanx.checkpoint import manifest
from phalanx.config import OptimizerConfig, TrainConfig
from phalanx.errors import CheckpointError
from phalanx.report.output import values_of
from phalanx.train.run import train
from small_run import losses, records, small_run

TERMS = (
    "data_s",
    "forward_s",
    "backward_s",
    "communication_s",
    "bubble_s",
    "optimizer_s",
    "other_s",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return small_run(
        tmp_path_factory.mktemp("job"),
        num_lines=600,
        steps=6,
        seed=5,
        save="every=3",
        optimizer=OptimizerConfig(lr=1e-2),
    )


@pytest.fixture(scope="module")
def whole(config: TrainConfig) -> dict[str, Any]:
    """The summary of an uninterrupted run over two ranks."""
    return values_of(train(config))


def test_a_run_learns_and_writes_what_it_says(config: TrainConfig, whole: dict[str, Any]) -> None:
    assert whole["bits_per_byte_last"] < whole["bits_per_byte_first"]
    assert all(Path(path).exists() for path in whole["paths"].values())
    # The validation text is the last documents' share, here the end of the one text there is.
    opening = whole["sample"][:10]
    assert opening.strip() and opening in Path(config.data or "").read_text()
    assert whole["tokens_per_s"] == pytest.approx(8 * 24 * whole["batches_per_s"])
    assert whole["seconds"] >= sum(record["wall_s"] for record in records(config.out, "step"))
    assert whole["resume"] == f"phalanx train --resume {config.out} --steps 12"
    assert whole["go_on"] == whole["resume"]  # deprecated, for one release
    (tensorboard,) = Path(whole["paths"]["tensorboard"]).iterdir()
    assert tensorboard.stat().st_size > 0
    assert len(losses(config.out)) == 6
    first, other = ((Path(config.out or "") / "logs" / f"rank-{r}.log").read_text() for r in (0, 1))
    assert "step 6/6" in first and len(other.splitlines()) == 1  # which says when it began


def test_the_terms_of_each_step_sum_to_its_wall_time(
    config: TrainConfig, whole: dict[str, Any]
) -> None:
    assert whole["steps"]["num_steps"] == 3
    steps = records(config.out, "step")
    shares = [sum(record[term] for term in TERMS) / record["wall_s"] for record in steps]
    assert max(shares) <= 1 + 1e-9  # no time is counted twice
    # The wall is read on its own; other work may come between the two readings of a step.
    assert statistics.median(shares) >= 0.98


def test_rank_0_records_the_times_of_every_rank(config: TrainConfig, whole: dict[str, Any]) -> None:
    windows, steps = records(config.out, "ranks"), records(config.out, "step")
    assert [step for window in windows for step in window["steps"]] == [1, 2, 3, 4, 5, 6]
    first = [record for window in windows for record in window["by_rank"]["wall"][:1]]
    assert first[0] == pytest.approx(steps[0]["wall_s"], abs=1e-6) and len(first) == len(windows)
    for window in windows:
        assert window["axes"] == {"dp": 2} and len(window["hosts"]) == 2
        for rank in (0, 1):
            terms = sum(of[rank] for name, of in window["by_rank"].items() if name != "wall")
            assert terms == pytest.approx(window["by_rank"]["wall"][rank], rel=0.02)
    assert windows[-1]["sent"]["dp"][0] == sum(entry["calls"] for entry in whole["sent"])


def test_the_summary_counts_the_bytes_of_a_step(whole: dict[str, Any]) -> None:
    parameters = 16 * 300  # the embedding alone
    sent = {entry["phase"]: entry for entry in whole["sent"]}
    assert set(sent) == {"count", "backward", "agree", "metrics"}
    # Two ranks: 2 (N - 1) / N P = P, of float64 gradients.
    assert sent["backward"]["sent_bytes"] == sent["backward"]["payload_bytes"] > 8 * parameters


def test_the_predicted_step_stands_beside_the_measured_one(whole: dict[str, Any]) -> None:
    time_s, errors = whole["predicted"]["time_s"], whole["predicted"]["errors"]
    step, *causes = time_s.values()
    assert step["measured"] == whole["steps"]["wall_s"] and list(time_s)[1:] == [
        "compute", "communication", "bubble", "optimizer",
    ]  # fmt: skip
    assert sum(of["predicted"] for of in causes) == pytest.approx(step["predicted"])
    assert all(of["predicted"] >= 0 for of in causes)
    assert errors["step"] == pytest.approx(step["predicted"] / step["measured"] - 1)


def test_the_summary_accounts_for_the_memory_of_a_step(whole: dict[str, Any]) -> None:
    memory, predicted = whole["memory"], whole["predicted"]
    for kind, of in predicted["bytes"].items():
        if kind != "peak":
            passing = memory["passing_bytes"]
            assert of["measured"] == (memory["at_most"][kind] if kind != "passing" else passing)
            assert 0.97 * of["measured"] <= of["predicted"] <= 1.1 * of["measured"], kind
    assert predicted["bytes"]["peak"]["measured"] == memory["peak_bytes"]
    parts = predicted["bytes_at_peak"]
    assert sum(of["predicted"] for of in parts.values()) == predicted["bytes"]["peak"]["predicted"]
    assert all(of["measured"] == memory["at_peak"][kind] for kind, of in parts.items())
    assert memory["largest_bytes"] >= memory["peak_bytes"] == sum(memory["at_peak"].values())
    assert memory["resident_bytes"] > memory["peak_bytes"]
    assert memory["allocated_bytes"] is None


def test_every_rank_has_the_curve_of_its_memory_beside_the_plan(
    config: TrainConfig, whole: dict[str, Any]
) -> None:
    both = records(config.out, "memory")
    assert [(of["rank"], of["stage"], of["step"]) for of in both] == [(0, 0, 3), (1, 0, 3)]
    first, memory = both[0], whole["memory"]
    held = first["curve"]["bytes"]
    assert {kind: of[first["peak"]] for kind, of in held.items()} == memory["at_peak"]
    assert {kind: max(of) for kind, of in held.items()} == memory["at_most"]
    predicted = whole["predicted"]["bytes_at_peak"]
    assert first["predicted"]["at_peak"] == {k: of["predicted"] for k, of in predicted.items()}
    assert first["curve"]["at_s"][-1] <= records(config.out, "step")[2]["wall_s"]


@pytest.mark.parametrize("strategy", ["dp2", by_hand("dp4"), by_hand("dp1")])
def test_a_run_goes_on_from_a_checkpoint(
    config: TrainConfig, whole: dict[str, Any], strategy: str, tmp_path: Path
) -> None:
    middle = Path(whole["paths"]["checkpoint"]).with_name("step-00000003")
    again = dataclasses.replace(
        config, resume=str(middle), out=str(tmp_path), strategy=strategy, save="every=0"
    )
    train(again)
    expected = losses(config.out)[3:]
    last = [records(folder, "evaluation")[-1]["loss"] for folder in (tmp_path, config.out)]
    assert last[0] == pytest.approx(last[1], rel=1e-10)  # uneven shares over 1, 2 and 4 ranks
    if strategy == "dp2":
        assert losses(tmp_path) == expected  # to the bit
    else:
        assert losses(tmp_path) == pytest.approx(expected, rel=1e-10)


def test_a_finished_run_that_is_resumed_takes_no_step(
    config: TrainConfig, whole: dict[str, Any], tmp_path: Path
) -> None:
    del whole
    summary = train(dataclasses.replace(config, resume=config.out, out=str(tmp_path)))
    assert summary.steps is None
    assert not records(tmp_path, "step")


def test_another_models_checkpoint_is_refused(config: TrainConfig, whole: dict[str, Any]) -> None:
    del whole
    wider = dataclasses.replace(config, shape=dataclasses.replace(config.shape, ffn=32))
    with pytest.raises(
        CheckpointError, match="another model: its ffn is 24, but --model or --shape sets 32"
    ):
        train(dataclasses.replace(wider, resume=config.out))
    with pytest.raises(CheckpointError, match="seed is 6, but this run was made with 5"):
        train(dataclasses.replace(config, seed=6, resume=config.out))


def test_an_epoch_takes_each_sample_once_with_an_uneven_end(
    config: TrainConfig, tmp_path: Path
) -> None:
    one_epoch = dataclasses.replace(
        config, steps=None, epochs=0.05, strategy="dp2", out=str(tmp_path), save="every=0"
    )
    train(one_epoch)
    taken = records(tmp_path, "step")
    train(dataclasses.replace(one_epoch, strategy="dp1", out=str(tmp_path / "alone")))
    assert losses(tmp_path / "alone") == pytest.approx(losses(tmp_path), rel=1e-10)
    assert len(taken) > 1


@pytest.mark.slow
def test_a_run_goes_on_under_torchrun_and_says_what_differs(
    config: TrainConfig, whole: dict[str, Any], tmp_path: Path
) -> None:
    del whole
    middle = manifest.folder_of(Path(config.out or ""), 3)
    out = f"--out={tmp_path / 'out'}"
    done = run_two(
        "-m", "phalanx", "train", f"--resume={middle}", out, "--corpus.tail=drop", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["run"].startswith("decoder-6.77k")
    assert losses(tmp_path / "out") == losses(config.out)[3:]
    assert done.stdout.count("resumes with changed settings: corpus.tail keep -> dr") == 1
    shown = (done.stdout.count("changed settings"), done.stdout.count("dp2 on cpu; global batch"))
    assert shown == (1, 1)


def test_a_run_whose_weights_blew_up_ends_with_its_report(
    config: TrainConfig, tmp_path: Path
) -> None:
    optimizer = OptimizerConfig(lr=1e15, warmup_steps=0)
    blown = dataclasses.replace(
        config, steps=3, precision="float32", nonfinite="skip", out=str(tmp_path / "run"),
        optimizer=optimizer,
    )  # fmt: skip
    summary = values_of(train(blown))
    assert [record["skipped"] for record in records(blown.out, "step")] == [False, True, True]
    assert summary["sample"] is not None
    # Of three steps the second and third are watched: only the first is timed as it was.
    assert summary["steps"]["num_steps"] == 1
    assert summary["tokens_per_s"] == records(blown.out, "step")[0]["tokens_per_s"]
