"""Verify a training run: initial weights, data, evaluation, saving and resuming.

The first run takes its steps in the loop of `phalanx train`, and saves after each third of them. A
second run resumes from the first third, with another strategy and another global batch size, and a
third run resumes the second with the first strategy: each strategy writes a checkpoint that the
other reads. Plain PyTorch takes the same steps on one process. A last run uses a narrow data type.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
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
from phalanx.errors import RankFailed, StrategyError
from phalanx.launch.local import run_ranks
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Axis, Strategy
from phalanx.train.evaluate import Evaluation
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.step import StepResult
from phalanx.train.text import TextSession
from phalanx.verify.cases import awkward_shapes, decoder_case, initial_decoder
from phalanx.verify.compare import Difference, compare_values
from phalanx.verify.harness import small_pieces
from phalanx.verify.judge import judge, located, once
from phalanx.verify.plain import PlainNextToken, plain_batch
from phalanx.verify.record import Case, gradients_of, loss_of, state_of
from phalanx.verify.reference import MOMENTS, History, evaluating, reference_history
from phalanx.verify.settings import SEQ_LEN
from phalanx.verify.verdict import Place, Verdict, failed
from phalanx.verify.witness import SessionWitness, find, take_down

STEPS = 2
"""Steps between saves; a run resumes after each, and all runs end after 3 * STEPS steps."""

NARROW = ("float32", "bfloat16")
"""Precisions that the last run may have; bfloat16 replaces any other."""

NARROW_ERROR = 5e-3
"""Largest relative error of the losses of the narrow run, compared with float64."""


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
    jobs = [once(lambda: resolve(config))]
    verdicts = [_judged(jobs)]
    for split in (other_strategy(strategy), strategy):
        if verdicts[-1].is_equal:
            at = manifest.complete_checkpoints(jobs[-1].out)[STEPS * len(jobs)]
            resumed = resumed_run(config, split, at, len(jobs))
            jobs.append(once(functools.partial(resolve, resumed)))
            verdicts.append(_judged(jobs))
    if verdicts[-1].is_equal:
        narrow = once(lambda: resolve(narrow_run(config, given.precision)))
        title = f"training {narrow.strategy} in {narrow.config.precision}"
        try:
            ranks = _on_ranks(train_rank, narrow)
        except RankFailed as failure:
            return [*verdicts, failed(title, failure)]
        verdicts.append(once(lambda: _compare_narrow(title, narrow, ranks[0])))
    return verdicts


def train_rank(job: Job) -> History:
    """Train on this rank, and return the recorded history."""
    with small_pieces():
        return take_down(functools.partial(TextSession, job), _TextWitness)


def find_on_rank(job: Job, case: Case, first: Difference) -> Place:
    """Repeat the run on this rank, and return the place at which a step goes wrong."""
    with small_pieces():
        return find(functools.partial(TextSession, job), _rows, case, first)


def _rows(session: TextSession, microbatches: Sequence[Batch]) -> list[Tensor]:
    del session
    return [microbatch.rows_B for microbatch in microbatches]


class _TextWitness(SessionWitness):
    """Session recorder that also records positions in the text and data types."""

    session: TextSession

    def __init__(self, session: TextSession) -> None:
        super().__init__(session, _rows)
        for block in session.model.blocks:  # blocks of other pipeline stages are never called
            block.register_forward_hook(self._note_output)

    def keep(self, result: StepResult) -> None:
        """Record the step that has ended."""
        super().keep(result)
        state = state_of(self.session.model, self.step.optimizer)
        kept = {
            "weights": state["weight"],
            "gradients": gradients_of(self.session.model),
            "moments": {(w, n): t for w in MOMENTS for n, t in state.get(w, {}).items()},
        }
        for what, tensors in kept.items():
            self.history.dtypes[what] = {str(tensor.dtype) for tensor in tensors.values()}

    def evaluation(self, evaluation: Evaluation | None) -> None:
        """Record an evaluation, its effects on the model, and the position in the text."""
        super().evaluation(evaluation)
        self.history.consumed[self.step.steps_done] = self.session.loader.consumed

    def _note_output(self, module: nn.Module, args: object, output: Tensor) -> None:
        del module, args
        self.history.dtypes.setdefault("output of a block", set()).add(str(output.dtype))


def _on_ranks(function: Any, job: Job, *args: Any) -> list[Any]:
    """Return the results of `function(job, *args)` on all ranks."""
    return run_ranks(
        function, job.strategy.num_ranks, job, *args, device=job.device,
        threads=job.config.threads, timeout_s=job.config.timeout_s,
    )  # fmt: skip


def _judged(jobs: Sequence[Job]) -> Verdict:
    """Perform the run of the last job, compare it, and locate the module at fault if possible."""
    job = jobs[-1]
    before = "".join(f", resumed from {job.strategy}" for job in jobs[-2:-1])
    title = f"training {job.strategy}{before}"
    try:
        ranks = _on_ranks(train_rank, job)
    except RankFailed as failure:
        return failed(title, failure)
    case = case_of(jobs)

    def compared() -> Verdict:
        validate = functools.partial(_validation_loss, job)
        expected = reference_history(case, STEPS * (len(jobs) - 1), STEPS, validate)
        return judge(title, ranks, expected)

    def found(first: Difference) -> Place:
        again = dataclasses.replace(job.config, out=f"{job.out}-again")
        return _on_ranks(find_on_rank, once(lambda: resolve(again)), case, first)[0]

    verdict = once(compared)
    return verdict if job.config.compile else located(verdict, found)


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


@torch.no_grad()
def _validation_loss(job: Job, model: nn.Module) -> float | None:
    corpus = job.config.corpus
    count = len(Samples(job.tokens.validation, corpus.seq_len))
    rows = evaluation_rows(count, job.config.eval_samples)
    if not len(rows):
        return None
    batch = plain_batch(job.tokens.validation, rows, rows, corpus)
    objective = PlainNextToken(job.config.seed, 0.0)
    with evaluating(model):
        return float(objective.loss_sum(model, batch, 0)) / objective.num_valid(batch)


def _compare_narrow(title: str, job: Job, ours: History) -> Verdict:
    """Check the data types of a narrow run, and compare its losses with float64's."""
    wrong: list[Place] = []
    for what, found in ours.dtypes.items():
        is_output = what == "output of a block"
        due = f"torch.{job.config.precision}" if is_output else "torch.float32"
        if found != {due}:
            text = f"the {what} are in {', '.join(sorted(found))}; expected {due}"
            wrong.append(Place("blocks.0" if is_output else "", text))
    expected = reference_history(case_of([job]), 0, STEPS, lambda _: None).records
    differences = [
        dataclasses.replace(difference, limit=NARROW_ERROR)
        for step, record in ours.records.items()
        for difference in compare_values(step, "loss", record["loss"], expected[step]["loss"])
    ]
    verdict = Verdict(title, differences, [each.what for each in wrong])
    place = next(iter(wrong), None)
    if place is None and (first := verdict.first) is not None:
        place = Place(None, f"{first.what} is the first quantity that differs", first.step)
    return dataclasses.replace(verdict, place=place)


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
        "save_every": STEPS,
        "save_every_minutes": 0.0,
        "keep_checkpoints": None,
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


def resumed_run(
    config: TrainConfig, strategy: Strategy, checkpoint: Path, number: int
) -> TrainConfig:
    """Return the settings of the resumed run of this number, from 1, after the run of `config`.

    Runs with an odd number have another global batch size.
    """
    own = BatchConfig(microbatch=2, accumulation=3) if number % 2 else config.batch
    out = str(Path(config.out or "").with_name(f"resumed-{number}"))
    given = {"resume": str(checkpoint), "out": out, "strategy": str(strategy), "batch": own}
    return dataclasses.replace(config, **given)


def other_strategy(strategy: Strategy, *, has_sparse: bool = False) -> Strategy:
    """Return a strategy with as many ranks but another split, for the run that resumes.

    With `has_sparse`, a gradient of the model is sparse, which fsdp does not reduce.
    """
    if has_sparse:
        return Strategy(dp=Axis(strategy.num_ranks, "naive"))
    if strategy.fsdp.degree > 1:
        return Strategy(dp=Axis(strategy.num_ranks, "bucketed"))
    return Strategy(fsdp=Axis(strategy.num_ranks, "zero3"))


def narrow_run(config: TrainConfig, precision: str) -> TrainConfig:
    """Return the settings of the first run in `precision`, or in bfloat16 if it is not narrow."""
    chosen: Any = precision if precision in NARROW else "bfloat16"
    return dataclasses.replace(
        config, precision=chosen, out=str(Path(config.out or "").with_name("narrow"))
    )
