"""Verify a trainer's job: compare its loop with one process of plain PyTorch.

A first run takes its steps in the same loop as `train`, with the job's own optimizer, schedule and
clipping, and saves. A second run resumes from the first checkpoint under another strategy, and a
third from the second run's under the first strategy, so each writes what the other reads.
Plain PyTorch takes the same steps on one process without interruption, with its own DataLoader, its
own dropout masks, and the optimizer (verify/reference.py). All of them run in float64.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from phalanx.checkpoint import manifest
from phalanx.data.rows import map_tensors
from phalanx.errors import DataError, RankFailed
from phalanx.launch.local import run_ranks
from phalanx.parallel.batch_norm import batch_norms
from phalanx.parallel.sparse import sparse_tables
from phalanx.script.session import ModuleSession
from phalanx.strategy import Strategy
from phalanx.verify.causes import likely_causes
from phalanx.verify.compare import Difference
from phalanx.verify.judge import judge, located, once
from phalanx.verify.record import Case
from phalanx.verify.reference import History, Training, evaluating, reference_history
from phalanx.verify.training import other_strategy
from phalanx.verify.verdict import Place, Verdict, failed
from phalanx.verify.witness import SessionWitness, find, take_down

if TYPE_CHECKING:
    from phalanx.script.trainer import Options, Trainer

WAIT_S = 600.0
"""Longest wait for another rank in one collective, in seconds."""


def prove(trainer: Trainer, strategy: Strategy, steps: int) -> Verdict:
    """Compare the steps of a job, and of runs that resume it, with plain PyTorch.

    Under torchrun the ranks of the job take all runs, and all ranks call this together.

    Returns:
        The verdict on the first run that differs; if none does, the first run's verdict with the
        differences of all runs.
    """
    wide = _widened(trainer, steps)
    with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as name:
        job = _Job(wide, case_of(wide), Path(name), max(1, steps // 2))
        other = other_strategy(strategy, has_sparse=bool(sparse_tables(_seeded(wide))))
        verdicts = [job.judged([strategy])]
        for runs in ([strategy, other], [strategy, other, strategy]):
            if verdicts[-1].is_equal and job.middle * (len(runs) - 1) < steps:
                verdicts.append(job.judged(runs))
    if not verdicts[-1].is_equal:
        return verdicts[-1]
    of_all = [row for verdict in verdicts for row in verdict.differences]
    return dataclasses.replace(verdicts[0], differences=of_all)


def case_of(trainer: Trainer) -> Case:
    """Return the job's steps as input for the reference run."""
    model = _seeded(trainer)  # seeds torch; the sampler draws next, as in the session
    is_cut = trainer.batch_norm == "global" and bool(batch_norms(model))
    pieces = trainer.accumulation if is_cut else 1
    batches = list(itertools.islice(_passes(trainer), trainer.steps))
    return Case(
        functools.partial(_seeded, trainer),
        trainer.objective,
        batches,
        trainer.accumulation,
        roles=trainer.roles,
        batch_norm=trainer.batch_norm,
        dropout_seed=trainer.seed,
        training=Training(trainer.optimizer, trainer.scheduler, trainer.max_norm or 0.0, pieces),
    )


@dataclasses.dataclass(frozen=True)
class _Job:
    """A job to verify, its reference case, the folder of its runs, and the steps between saves."""

    trainer: Trainer
    case: Case
    folder: Path
    middle: int

    def judged(self, runs: Sequence[Strategy]) -> Verdict:
        """Compare the last of `runs`, each of which resumes the one before, with the reference.

        If the run differs, find the module that differs first.
        """
        *_, strategy = runs
        before = "".join(f", resumed from {each}" for each in runs[-2:-1])
        title, name = f"{strategy}{before}", f"run-{len(runs)}"
        try:
            ranks: list[History] = self._on_ranks(train_rank, name, runs)
        except RankFailed as failure:
            return failed(title, failure)

        def compared() -> Verdict:
            start = self.middle * (len(runs) - 1)
            validate = functools.partial(_validation_loss, self.trainer)
            expected = reference_history(self.case, start, self.middle, validate)
            return judge(title, ranks, expected)

        def found(first: Difference) -> Place:
            again, args = f"{name}-again", (self.case, first)
            return self._on_ranks(find_on_rank, again, runs, *args)[0]

        verdict = located(once(compared), found)
        if verdict.is_equal:
            return verdict
        step = max((row.step for row in verdict.differences), default=0)
        facts = [rank.facts[step] for rank in ranks if step in rank.facts]
        causes = likely_causes(self.case, strategy, verdict.differences, facts)
        return dataclasses.replace(verdict, causes=causes)

    def _on_ranks(
        self, function: Any, name: str, runs: Sequence[Strategy], *args: Any
    ) -> list[Any]:
        from phalanx.script.trainer import Options

        out, strategy, number = self.folder / name, runs[-1], len(runs) - 1
        if number:
            there = manifest.folder_of(self.folder / f"run-{number}", self.middle * number)
            here = manifest.folder_of(out, self.middle * number)
            once(lambda: str(shutil.copytree(there, here)))
        options = Options(
            out=out,
            resume=number > 0,
            save_every=self.middle,
            save_every_minutes=0,
            eval_every=self.middle,
            device="cpu",
            nonfinite="skip",  # so that a step that is not finite is compared
        )
        return run_ranks(
            function, strategy.num_ranks, self.trainer, strategy, options, *args, timeout_s=WAIT_S
        )


def train_rank(trainer: Trainer, strategy: Strategy, options: Options) -> History:
    """Train on this rank of the job, and return the record of its steps."""
    session = functools.partial(ModuleSession, trainer, strategy, options)
    return take_down(session, lambda session: SessionWitness(session, _rows))


def find_on_rank(
    trainer: Trainer, strategy: Strategy, options: Options, case: Case, first: Difference
) -> Place:
    """Train again on this rank, and find the module where the `first` difference arises."""
    return find(functools.partial(ModuleSession, trainer, strategy, options), _rows, case, first)


def _rows(session: ModuleSession, microbatches: Sequence[Any]) -> Sequence[Tensor]:
    del microbatches
    return session.microbatches.rows()


def _seeded(trainer: Trainer) -> nn.Module:
    torch.manual_seed(trainer.seed)
    return trainer.build()


def _widened(trainer: Trainer, steps: int) -> Trainer:
    """Return the job with its model and batches in float64, for `steps` steps."""
    return dataclasses.replace(
        trainer,
        build=functools.partial(_wide_model, trainer),
        collate=functools.partial(_wide_batch, trainer),
        steps=steps,
    )


def _wide_model(trainer: Trainer) -> nn.Module:
    return trainer.build().double()


def _wide_batch(trainer: Trainer, samples: Any) -> Any:
    batch = (trainer.collate or default_collate)(samples)
    return map_tensors(batch, lambda t: t.double() if t.is_floating_point() else t)


def _passes(trainer: Trainer) -> Iterator[Any]:
    """Yield the global batches of repeated passes, in the order of the plain DataLoader."""
    data = trainer.data
    if isinstance(data, IterableDataset):
        data = copy.deepcopy(data)  # its iterator may be used up by one pass
    loader: DataLoader[Any] = trainer.loader(
        data, shuffle=trainer.shuffle, drop_last=trainer.drop_last
    )
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise DataError("the data ends before the last step to be verified; give fewer --steps")


@torch.no_grad()
def _validation_loss(trainer: Trainer, model: nn.Module) -> float | None:
    if trainer.validation is None:
        return None
    state = torch.get_rng_state()
    loss, count = torch.zeros((), dtype=torch.float64), 0
    with evaluating(model):
        for batch in trainer.loader(trainer.validation):
            made: Tensor = trainer.objective.loss_sum(model, batch, 0)
            loss += made
            count += int(trainer.objective.num_valid(batch))
    torch.set_rng_state(state)
    return float(loss) / max(1, count)
