"""Verify a training run: initial weights, data, evaluation, saving and resuming.

The first run takes its steps in the loop of `phalanx train`, and saves after each third of them. A
second run resumes from the first third, with another strategy and another global batch size, and a
third run resumes the second with the first strategy: each strategy writes a checkpoint that the
other reads. Plain PyTorch takes the same steps on one process. A last run uses a narrow data type.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.checkpoint import manifest
from phalanx.config import BatchConfig, ShapeConfig, TrainConfig
from phalanx.data.loader import evaluation_rows
from phalanx.data.order import Order
from phalanx.data.samples import Batch, Samples
from phalanx.errors import StrategyError
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Axis, Strategy
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.text import TextSession
from phalanx.verify.cases import awkward_shapes, decoder_case, initial_decoder
from phalanx.verify.plain import PlainNextToken, plain_batch
from phalanx.verify.prover import Proof, once, prove_in_order
from phalanx.verify.record import Case, loss_of
from phalanx.verify.settings import SEQ_LEN
from phalanx.verify.verdict import Verdict

STEPS = 2
"""Steps between saves; a run resumes after each, and all runs end after 3 * STEPS steps."""

NARROW = ("float32", "bfloat16")
"""Precisions that the last run may have; bfloat16 replaces any other."""


def verify_training(strategy: Strategy, given: TrainConfig, folder: Path) -> list[Verdict]:
    """Perform the runs in order, each on new processes, until one differs; return their verdicts.

    In an existing job, its ranks perform the runs, and all of them call this together.
    """
    if strategy.is_served:
        raise StrategyError(
            f"verify --train {strategy}: the workers of a parameter-server run are not ranks of "
            "one job, so their states cannot be gathered; leave --train out"
        )
    folder = once(lambda: folder)
    config = first_run(given, strategy, folder)
    precision: Any = given.precision if given.precision in NARROW else "bfloat16"
    optimizer = dataclasses.replace(config.optimizer, ns_dtype="float32")  # as of the weights
    narrow = dataclasses.replace(
        config, precision=precision, out=str(folder / "narrow"), optimizer=optimizer
    )
    options: dict[str, Any] = {
        "device": config.device,
        "threads": config.threads,
        "timeout_s": config.timeout_s,
    }
    return prove_in_order(_proofs(config, narrow, strategy), **options)


def _proofs(config: TrainConfig, narrow: TrainConfig, strategy: Strategy) -> Iterator[Proof]:
    """Yield each run's proof when the run before has ended."""
    jobs = [once(lambda: resolve(config))]
    yield _proof(jobs)
    for number, split in enumerate((other_strategy(strategy), strategy), 1):
        at = manifest.complete_checkpoints(jobs[-1].out)[STEPS * number]
        out = str(Path(config.out or "").with_name(f"resumed-{number}"))
        # The second run has another global batch.
        batch = BatchConfig(microbatch=2, accumulation=3) if number == 1 else config.batch
        changes: dict[str, Any] = {"strategy": str(split), "batch": batch}
        resumed = dataclasses.replace(config, resume=str(at), out=out, **changes)
        jobs.append(once(functools.partial(resolve, resumed)))
        yield _proof(jobs)
    job = once(lambda: resolve(narrow))
    title = f"training {job.strategy} in {job.config.precision}"
    precision = getattr(torch, job.config.precision)
    yield dataclasses.replace(_proof([job]), title=title, precision=precision)


def _proof(jobs: Sequence[Job]) -> Proof:
    """Return the proof of the last job, which resumes the one before."""
    job, before = jobs[-1], "".join(f", resumed from {job.strategy}" for job in jobs[-2:-1])
    return Proof(
        f"training {job.strategy}{before}",
        job.strategy,
        case_of(jobs),
        functools.partial(_opened, job),
        _rows,
        start=STEPS * (len(jobs) - 1),
        every=STEPS,
        validate=functools.partial(_validation_loss, job) if len(_validation_rows(job)) else None,
        is_repeatable=not job.config.compile,
    )


def _opened(job: Job, is_again: bool) -> TextSession:
    """Open the run on a rank; if again, in another folder."""
    if is_again:
        again = dataclasses.replace(job.config, out=f"{job.out}-again")
        job = once(lambda: resolve(again))
    return TextSession(job)


def _rows(_session: TextSession, microbatches: Sequence[Batch]) -> list[Tensor]:
    return [microbatch.rows_B for microbatch in microbatches]


def case_of(jobs: Sequence[Job]) -> Case:
    """Return a case with the steps of the last job, after the steps of the job that it resumes."""
    shape, config = jobs[0].shape, jobs[0].config
    batches, position = list[Batch](), 0
    for step in range(3 * STEPS):  # consecutive positions of the data order
        job = jobs[min(step // STEPS, len(jobs) - 1)]
        corpus, size = job.config.corpus, job.batch.global_size
        count = len(Samples(job.tokens.train, corpus.seq_len))
        order = Order(count, job.config.seed, corpus.shuffle)
        rows = np.arange(position, position + size, dtype=np.int64)
        batches.append(plain_batch(job.tokens.train, order.samples(rows), rows, corpus))
        position += size
    case = decoder_case(shape, batches, config.seed, config.optimizer, initial_decoder)
    return dataclasses.replace(case, infer=loss_of)


def _validation_rows(job: Job) -> Any:
    count = len(Samples(job.tokens.validation, job.config.corpus.seq_len))
    return evaluation_rows(count, job.config.eval_samples)


def _validation_loss(job: Job, model: nn.Module) -> float:
    rows = _validation_rows(job)
    batch = plain_batch(job.tokens.validation, rows, rows, job.config.corpus)
    objective = PlainNextToken(job.config.seed, 0.0)
    return float(objective.loss_sum(model, batch, 0)) / objective.num_valid(batch)


def first_run(given: TrainConfig, strategy: Strategy, folder: Path) -> TrainConfig:
    """Return the settings of the first run, and write its text into `folder`.

    Given settings are kept, except for precision, the length of the run, its data, and what it
    loads and saves. Model sizes default to small values.
    """
    num_lines = max(300, 4 * given.corpus.seq_len)
    lines = (f"The square of {n} is {n * n}, its cube {n**3}.\n" for n in range(num_lines))
    (folder / "squares.txt").write_text("".join(lines))
    plan = plan_decoder(strategy, awkward_shapes(strategy)["llama"])
    seq_len, shards = given.corpus.seq_len, plan.position_shards
    if seq_len == SEQ_LEN:
        seq_len = -(-seq_len // shards) * shards
    own: dict[str, Any] = {
        "data": str(folder / "squares.txt"),
        "tokenizer": None,
        "strategy": str(strategy),
        "nproc": None,
        "steps": 3 * STEPS,
        "epochs": None,
        "precision": "float64",
        "nonfinite": "skip",  # so that a step that is not finite is compared and reported
        "out": str(folder / "first"),
        "resume": None,
        "init": None,
        "eval_every": STEPS,
        "save": str(dataclasses.replace(given.save_policy, every=STEPS, minutes=0, keep=None)),
        "shape": _sizes(given, strategy),
        "corpus": dataclasses.replace(
            given.corpus,
            seq_len=seq_len,
            vocab_size=300,
            max_bytes=None,
            cache=str(folder / "cache"),
        ),
    }
    if given.batch == BatchConfig():
        own["batch"] = BatchConfig(
            microbatch=max(2, plan.row_shards), accumulation=max(2, strategy.pp.degree + 1)
        )
    given_values = {field.name: getattr(given, field.name) for field in fields(TrainConfig)}
    return TrainConfig(**(given_values | own))


def _sizes(given: TrainConfig, strategy: Strategy) -> ShapeConfig:
    """Return the given model sizes, with small and awkward sizes for those not given."""
    shape, sizes = awkward_shapes(strategy)["llama"], dataclasses.asdict(given.shape)
    small = ["num_layers", "hidden", "num_heads", "ffn"]
    if given.shape.hidden is None or given.shape.num_heads is None:
        small.append("head_dim")
    if given.model is None:  # otherwise the preset sets the number of key-value heads
        small += ["tied", "dropout"]
        small += ["num_kv_heads"] if given.shape.num_heads is None else []
    for name in small:
        if sizes[name] is None:
            sizes[name] = getattr(shape, name)
    sizes["vocab_size"] = 307
    sizes["max_seq_len"] = sizes["max_seq_len"] or max(32, given.corpus.seq_len)
    return ShapeConfig(**sizes)


def other_strategy(strategy: Strategy, *, has_sparse: bool = False) -> Strategy:
    """Return a strategy with as many ranks but another split, for the run that resumes.

    With `has_sparse`, a gradient of the model is sparse, which fsdp does not reduce.
    """
    if has_sparse:
        return Strategy(dp=Axis(strategy.num_ranks, "naive"))
    if strategy.fsdp.degree > 1:
        return Strategy(dp=Axis(strategy.num_ranks, "bucketed"))
    return Strategy(fsdp=Axis(strategy.num_ranks, "zero3"))
