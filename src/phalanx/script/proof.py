"""Prove a trainer's job: compare its loop with one process of plain PyTorch.

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
from phalanx.comm.together import on_first_rank
from phalanx.data.rows import map_tensors
from phalanx.errors import DataError
from phalanx.parallel.batch_norm import batch_norms
from phalanx.parallel.sparse import sparse_tables
from phalanx.script.session import ModuleSession
from phalanx.strategy import Strategy
from phalanx.verify.prover import Proof, prove_in_order
from phalanx.verify.record import Case
from phalanx.verify.reference import Training
from phalanx.verify.training import other_strategy
from phalanx.verify.verdict import Verdict

if TYPE_CHECKING:
    from phalanx.script.trainer import Trainer


def prove(trainer: Trainer, strategy: Strategy, steps: int) -> Verdict:
    """Compare the steps of a job, and of runs that resume it, with plain PyTorch.

    Under torchrun the ranks of the job take all runs, and all ranks call this together.

    Returns:
        The verdict on the first run that differs; if none does, the first run's verdict with the
        differences of all runs.
    """
    wide = dataclasses.replace(
        trainer,
        build=functools.partial(_wide_model, trainer),
        collate=functools.partial(wide_batch, trainer.collate or default_collate),
        steps=steps,
    )
    with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as folder:
        verdicts = prove_in_order(_proofs(wide, strategy, steps, Path(folder)), timeout_s=600.0)
    if not verdicts[-1].is_equal:
        return verdicts[-1]
    of_all = [row for verdict in verdicts for row in verdict.differences]
    return dataclasses.replace(verdicts[0], differences=of_all)


def _proofs(trainer: Trainer, strategy: Strategy, steps: int, folder: Path) -> Iterator[Proof]:
    """Yield the proofs of the first run, and of the runs that resume it."""
    case, middle = case_of(trainer), max(1, steps // 2)
    other = other_strategy(strategy, has_sparse=bool(sparse_tables(_seeded(trainer))))
    for number, each in enumerate((strategy, other, strategy)):
        start = middle * number
        if start >= steps:
            return
        before = f", resumed from {(strategy, other)[number - 1]}" if number else ""
        yield Proof(
            f"{each}{before}",
            each,
            case,
            functools.partial(_opened, trainer, each, folder, number, middle),
            _rows,
            start=start,
            every=middle,
            validate=None if trainer.validation is None else functools.partial(_loss, trainer),
        )


def _opened(
    trainer: Trainer, strategy: Strategy, folder: Path, number: int, middle: int, is_again: bool
) -> ModuleSession:
    """Open a run on this rank, with the checkpoint of the run before; if again, in a new folder."""
    from phalanx.script.trainer import Options

    out = folder / f"run-{number}{'-again' if is_again else ''}"
    if number:
        there = manifest.folder_of(folder / f"run-{number - 1}", middle * number)
        here = manifest.folder_of(out, middle * number)
        on_first_rank(lambda: str(shutil.copytree(there, here)), "cannot verify the run")
    options = Options(
        out=out,
        resume=number > 0,
        save=f"every={middle},minutes=0",
        eval_every=middle,
        device="cpu",
        nonfinite="skip",  # so that a step that is not finite is compared
    )
    return ModuleSession(trainer, strategy, options)


def case_of(trainer: Trainer) -> Case:
    """Return the job's steps as input for the reference run.

    Raises:
        DataError: the data end before the last step.
    """
    model = _seeded(trainer)  # seeds torch; the sampler draws next, as in the session
    is_cut = trainer.batch_norm == "global" and bool(batch_norms(model))
    data = trainer.data
    if isinstance(data, IterableDataset):
        data = copy.deepcopy(data)  # its iterator may be used up by one pass
    loader: DataLoader[Any] = trainer.loader(
        data, shuffle=trainer.shuffle, drop_last=trainer.drop_last
    )
    batches: list[Any] = []
    while len(batches) < (trainer.steps or 0):
        one_pass = [*itertools.islice(loader, (trainer.steps or 0) - len(batches))]
        if not one_pass:
            raise DataError("the data ends before the last step to be verified; give fewer --steps")
        batches += one_pass
    return Case(
        functools.partial(_seeded, trainer),
        trainer.objective,
        batches,
        trainer.accumulation,
        roles=trainer.roles,
        batch_norm=trainer.batch_norm,
        dropout_seed=trainer.seed,
        training=Training(
            trainer.optimizer,
            trainer.scheduler,
            trainer.max_norm or 0.0,
            pieces=trainer.accumulation if is_cut else 1,
        ),
    )


def _rows(session: ModuleSession, _microbatches: Sequence[Any]) -> Sequence[Tensor]:
    return session.microbatches.rows()


def _seeded(trainer: Trainer) -> nn.Module:
    torch.manual_seed(trainer.seed)
    return trainer.build()


def _wide_model(trainer: Trainer) -> nn.Module:
    return trainer.build().double()


def wide_batch(collate: Any, samples: Any) -> Any:
    """Return a batch with its floating-point tensors in float64."""
    return map_tensors(collate(samples), lambda t: t.double() if t.is_floating_point() else t)


def _loss(trainer: Trainer, model: nn.Module) -> float:
    """Return the mean loss of a model on the validation data."""
    assert trainer.validation is not None
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for batch in trainer.loader(trainer.validation):
        loss += trainer.objective.loss_sum(model, batch, 0)
        count += int(trainer.objective.num_valid(batch))
    return float(loss) / max(1, count)
