"""A training run against plain PyTorch without a break, and faults planted in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import SLOW, Patch, planted

from marks import by_hand
from phalanx.checkpoint import sharding, state
from phalanx.checkpoint.sharding import Read
from phalanx.comm.comm import Ranks, local_shard
from phalanx.config import BatchConfig, CorpusConfig, OptimizerConfig, ShapeConfig, TrainConfig
from phalanx.data.samples import Samples
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.strategy import Strategy
from phalanx.train import loop, text
from phalanx.train.job.resolve import Job
from phalanx.verify import training
from phalanx.verify.prover import once
from phalanx.verify.settings import VerifyTrainConfig
from phalanx.verify.training import first_run
from phalanx.verify.verdict import Verdict


def _first_rows_everywhere(right: Any) -> Any:
    """A rank's shard begins with the first rows of the full tensor."""
    return lambda shape, seed, shard, name, full, offset: right(
        shape, seed, shard, name, full, (0,) * len(offset)
    )


def _without_moments(right: Any) -> Any:
    def wrong(folder: Any, model: Any, optimizer: Any, *more: Any) -> Any:
        beside = right(folder, model, optimizer, *more)
        optimizer.state.clear()
        return beside

    return wrong


def _rounded(right: Any) -> Any:
    def wrong(folder: Any, model: Any, optimizer: Any, *more: Any) -> Any:
        beside = right(folder, model, optimizer, *more)
        for parameter in model.parameters():
            local = local_shard(parameter.detach())
            local.copy_(local.float())
        return beside

    return wrong


def _rows_of_rank_0(right: Any) -> Any:
    return lambda job, data_rank: right(job, 0)


def _from_step_0(right: Any) -> Any:
    """A run that goes on begins its schedule and its masks anew."""

    def wrong(job: Job) -> Any:
        opened = right(job)
        opened.step.steps_done = 0
        return opened

    return wrong


def _position_by_steps(right: Any) -> Any:
    """The position in the data is taken for steps times the present global batch."""

    def wrong(job: Job, data_rank: int) -> Any:
        loader = right(job, data_rank)
        loader.consumed = job.done[0] * job.batch.global_size
        return loader

    return wrong


def _stays_in_eval(right: Any) -> Any:
    return lambda opened: (right(opened), opened.model.eval())[0]


def _another_eps(right: Any) -> Any:
    """A norm of the run is not that of the shape."""

    def wrong(job: Job) -> Any:
        opened = right(job)
        opened.model.blocks[1].mlp_norm.eps = 1e-2
        return opened

    return wrong


def _without_a_step(right: Any) -> Any:
    """The optimizer never sees one of the parameters."""

    def wrong(model: Any, config: Any) -> Any:
        optimizer = right(model, config)
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not model.norm.weight]
        return optimizer

    return wrong


def _first_slice_of_each_shard(right: Any) -> Any:
    """A read begins at a shard's first element, which differs if the reader has smaller shards."""

    def wrong(layout: Any, box: Any) -> Any:
        reads: list[Read] = right(layout, box)
        first = [tuple(slice(0, s.stop - s.start) for s in read.source) for read in reads]
        return [read._replace(source=s) for read, s in zip(reads, first, strict=True)]

    return wrong


def _stays_in_training(right: Any) -> Any:
    return lambda self: self


def _narrow_masters(right: Any) -> Any:
    def wrong(name: str, device: str) -> Any:
        precision = right(name, device)
        if name == "bfloat16":
            precision = dataclasses.replace(precision, master=torch.bfloat16)
        return precision

    return wrong


def _wide_on_rank_1(right: Any) -> Any:
    """A block of rank 1 returns float32 in a run in bfloat16."""

    def wrong(job: Job) -> Any:
        opened = right(job)
        if job.config.precision == "bfloat16" and opened.comm.rank == 1:
            opened.model.blocks[0].register_forward_hook(lambda _, __, y: y.float())
        return opened

    return wrong


def _unshifted_labels(right: Any) -> Any:
    def wrong(self: Any, samples: Any, rows: Any) -> Any:
        batch = right(self, samples, rows)
        return dataclasses.replace(batch, labels_BT=batch.tokens_BT)

    return wrong


OF_FLOAT64: dict[str, tuple[list[Patch], str | None, str]] = {
    "first weights that begin anew on each rank": (
        [(text, "fill_initial", _first_rows_everywhere)],
        "embedding", "weight of embedding.weight",
    ),
    "moments that are not restored": (
        [(state, "load", _without_moments)], "embedding", "first moment of embedding.weight",
    ),
    "weights read as float32": (
        [(state, "load", _rounded)], "embedding", "weight of embedding.weight",
    ),
    "rank 1 with the rows of rank 0": (
        [(text, "loader_of", _rows_of_rank_0)], None, "its 4 rows are 0 to 6",
    ),
    "reads that begin at the first element of a shard": (
        [(sharding, "reads_of", _first_slice_of_each_shard)],
        "embedding", "training fsdp2, resumed from dp2 differs",
    ),
    "a schedule that begins anew": (
        [(training, "TextSession", _from_step_0)],
        None, "it takes the steps [1, 2, 3, 4, 5, 6]; expected [3, 4, 5, 6]",
    ),
    "a position in the data by the present batch": (
        [(text, "loader_of", _position_by_steps)],
        None, "its 12 rows are 24 to 35; expected 16 to 27",
    ),
    "evaluation that leaves the model in eval mode": (
        [(loop, "evaluate", _stays_in_eval)], "", "evaluation leaves the model in eval mode",
    ),
    "evaluation with dropout": (
        [(Decoder, "eval", _stays_in_training)],
        "dropout", "dropout (Dropout): its output differs though its inputs agree",
    ),
    "a norm that only the run changes": (
        [(training, "TextSession", _another_eps)],
        "blocks.1.mlp_norm", "its output differs though its inputs agree",
    ),
    "an optimizer without the last norm": (
        [(text, "build_optimizer", _without_a_step)], "norm", "first moment of norm.weight",
    ),
    "labels that are not shifted": (
        [(Samples, "batch", _unshifted_labels)], None, "the caller of the model: its input",
    ),
}  # fmt: skip

OF_NARROW: dict[str, tuple[list[Patch], str | None, str]] = {
    "masters in bfloat16": (
        [(text, "resolve", _narrow_masters)], "", "the weights are in torch.bfloat16",
    ),
    "a block that computes in another type on rank 1": (
        [(training, "TextSession", _wide_on_rank_1)],
        "blocks.0", "rank 1: the outputs of blocks are in torch.float32",
    ),
}  # fmt: skip


def verdicts_on_ranks(folder: str, is_slow: bool) -> dict[str, list[Verdict]]:
    """Verify a run once for each mutant, and once without a fault, in one job."""
    mutants = {**OF_FLOAT64, **OF_NARROW}
    planned = {name: mutant[0] for name, mutant in mutants.items() if (name in SLOW) == is_slow}
    found: dict[str, list[Verdict]] = {}
    for name, patches in {"": list[Patch](), **planned}.items():
        out = Path(folder) / name.replace(" ", "-")
        out.mkdir(exist_ok=True)
        with planted(*patches):
            found[name] = training.verify_training(
                Strategy.parse("fsdp2"), VerifyTrainConfig(), out
            )
    return found


# One test: pytest-xdist may give two tests to two processes, and each would run the job.
@pytest.mark.slow
@pytest.mark.parametrize("is_slow", [False, by_hand(True)])
def test_a_planted_fault_is_found_and_named(
    is_slow: bool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    found = run_ranks(verdicts_on_ranks, 2, str(tmp_path), is_slow)[0]
    planned = {name for name in {**OF_FLOAT64, **OF_NARROW} if (name in SLOW) == is_slow}
    assert set(found) == {"", *planned}
    with subtests.test("no fault"):
        check_what_has_no_fault(*found.pop(""))
    for name, (*before, verdict) in found.items():
        _, module, words = {**OF_FLOAT64, **OF_NARROW}[name]
        with subtests.test(name):
            assert all(each.is_equal for each in before)
            assert not verdict.is_equal
            assert verdict.place is not None
            assert verdict.place.module == module, str(verdict)
            assert words in str(verdict)


def check_what_has_no_fault(
    first: Verdict, second: Verdict, third: Verdict, narrow: Verdict
) -> None:
    """It is that of plain PyTorch."""
    for verdict in (first, second, third, narrow):
        assert verdict.is_equal, str(verdict)
    assert second.strategy == "training dp2, resumed from fsdp2"
    assert third.strategy == "training fsdp2, resumed from dp2"
    assert {d.step for d in first.differences} == {0, 1, 2, 3, 4, 5, 6}  # the last: an evaluation
    assert {d.step for d in second.differences} == {2, 3, 4, 5, 6}
    assert {d.step for d in third.differences} == {4, 5, 6}
    assert narrow.strategy == "training fsdp2 in bfloat16"


def test_settings_hold_and_what_is_not_given_is_small(tmp_path: Path) -> None:
    given = TrainConfig(
        model="gpt2-124m", precision="float32", data="mine.txt", steps=900, out="runs/mine",
        shape=ShapeConfig(dropout=0.3, num_layers=1), batch=BatchConfig(global_size=6),
        corpus=CorpusConfig(seq_len=40, document_mask=False),
        optimizer=OptimizerConfig(beta2=0.99, clip_p=1.0),
    )  # fmt: skip
    config = first_run(given, Strategy.parse("dp2"), tmp_path)
    assert config.corpus.seq_len == 40 and not config.corpus.document_mask
    assert (config.model, config.optimizer, config.batch) == (
        given.model, given.optimizer, given.batch,
    )  # fmt: skip
    assert (config.shape.dropout, config.shape.num_layers, config.shape.hidden) == (0.3, 1, 18)
    assert (config.shape.tied, config.shape.num_kv_heads, config.shape.max_seq_len) == (
        None, None, 40,
    )  # fmt: skip
    assert (config.precision, config.steps) == ("float64", 6)
    assert str(tmp_path) in str(config.data) and str(tmp_path) in str(config.out)


def names_of_failures() -> list[str]:
    """Return what this rank raises where rank 0 fails by the program's fault, and by a user's."""
    Ranks(Strategy.parse("dp2"))
    found: list[str] = []
    for failure in (AssertionError("no"), ConfigError("no")):

        def fail(failure: Exception = failure) -> None:
            raise failure

        try:
            once(fail)
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_a_fault_of_the_program_on_rank_0_keeps_its_traceback() -> None:
    first, second = run_ranks(names_of_failures, 2)
    assert first == ["AssertionError", "CheckpointError"]
    assert second == ["CheckpointError", "CheckpointError"]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp2", "tp2", "fsdp2,tp2"])
def test_a_run_on_processes_of_its_own(text: str, tmp_path: Path) -> None:
    for verdict in training.verify_training(Strategy.parse(text), VerifyTrainConfig(), tmp_path):
        assert verdict.is_equal, str(verdict)
