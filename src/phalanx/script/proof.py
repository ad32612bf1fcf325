"""Prove a job of one's own: the trainer's loop beside one process of plain PyTorch.

A first run takes its steps in the very loop that `train` takes them in, with the job's own
optimizer, schedule and clipping, and saves in the middle. A second run resumes from there under
another strategy. Plain PyTorch takes the same steps on one process without a break: its own
DataLoader, its own masks of dropout, and the optimizer (verify/reference.py). All are in float64.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from phalanx.checkpoint import manifest
from phalanx.comm.together import on_first_rank
from phalanx.data.rows import map_tensors
from phalanx.errors import DataError, RankFailed
from phalanx.launch.local import run_ranks
from phalanx.parallel.batch_norm import batch_norms
from phalanx.script.witness import Witnessed, locate_rank, witness
from phalanx.strategy import Axis, Strategy
from phalanx.verify.causes import likely_causes
from phalanx.verify.compare import compare_step, compare_values
from phalanx.verify.record import Case, unequal_ranks
from phalanx.verify.reference import ReferenceRun, StepRecord, Training
from phalanx.verify.settings import EVALUATION, STATE
from phalanx.verify.verdict import Place, Verdict
from phalanx.verify.whereabouts import failed

if TYPE_CHECKING:
    from phalanx.script.trainer import Trainer

WAIT_S = 600.0
"""Longest wait for another rank in one collective, in seconds."""


def prove(trainer: Trainer, strategy: Strategy, steps: int) -> Verdict:
    """Compare the job's own steps with plain PyTorch, and those of a run that resumes.

    In a job that others have started, its ranks take the runs, and all call this together.

    Returns:
        The verdict on what differs first, or on both runs.
    """
    wide = _widened(trainer, steps)
    case = case_of(wide)
    expected = Expected.of(wide, case)
    with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as name:
        folder, middle = Path(name), (steps + 1) // 2
        job = _Job(wide, case, expected, folder, middle)
        first = job.judged("first", strategy)
        if not first.is_equal or middle == steps:
            return first
        other = Strategy(fsdp=Axis(strategy.num_ranks, "zero3"))
        if strategy.fsdp.degree > 1:
            other = Strategy(dp=Axis(strategy.num_ranks, "bucketed"))
        second = job.judged("second", other, resumed_from=strategy)
    if not second.is_equal:
        return second
    return dataclasses.replace(first, differences=[*first.differences, *second.differences])


def case_of(trainer: Trainer) -> Case:
    """Return the job's steps as the reference takes them."""
    pieces = 1
    torch.manual_seed(trainer.seed)
    model = trainer.build()
    if trainer.batch_norm == "global" and batch_norms(model):
        pieces = trainer.accumulation
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
class Expected:
    """What plain PyTorch computes; keys are numbers of steps done, or of steps.

    Attributes:
        begin: weights, buffers and what the optimizer keeps, before each step.
        records: of each step.
        validation: mean loss of the validation data, after each number of steps.
        evaluated: sum of the losses of the last batch in eval mode.
    """

    begin: dict[int, StepRecord]
    records: dict[int, StepRecord]
    validation: dict[int, float]
    evaluated: float

    @staticmethod
    def of(trainer: Trainer, case: Case) -> Expected:
        """Take the steps."""
        run = ReferenceRun(case, torch.device("cpu"))
        begin, records, validation = {0: run.state()}, dict[int, StepRecord](), dict[int, float]()
        steps = run.steps()
        for number in range(len(case.batches) + 1):
            if (loss := _validation_loss(run.model, trainer)) is not None:
                validation[number] = loss
            if number < len(case.batches):
                records[number] = made = next(steps)
                kept = {q: v for q, v in made.items() if q in _STATES or q.startswith(STATE)}
                begin[number + 1] = kept
        return Expected(begin, records, validation, float(run.evaluate()))


_STATES = ("buffer", "first moment", "second moment", "weight")


@dataclasses.dataclass(frozen=True)
class _Job:
    """A job, what is expected of it, and where its runs are written."""

    trainer: Trainer
    case: Case
    expected: Expected
    folder: Path
    middle: int

    def judged(
        self, name: str, strategy: Strategy, resumed_from: Strategy | None = None
    ) -> Verdict:
        """Take a run, compare it, and find the module at fault."""
        title = (
            f"{strategy}" if resumed_from is None else f"{strategy}, resumed from {resumed_from}"
        )
        try:
            ranks: list[Witnessed] = self._on_ranks(witness, name, strategy, resumed_from)
        except RankFailed as failure:
            return failed(title, failure)
        start = 0 if resumed_from is None else self.middle
        verdict, unequal = self._compared(title, ranks, start)
        if verdict.is_equal:
            return verdict
        # A fault of the model shows in an evaluation first, and its step tells the module.
        wrong = [d for d in verdict.differences if not d.passes]
        found = [d for d in wrong if d.quantity != "validation loss"]
        place = verdict.place or (unequal[0] if unequal and not found else None)
        if place is None and found:
            again = f"{name}-again"
            args = (self.case, found[0])
            place = self._on_ranks(locate_rank, again, strategy, resumed_from, *args)[0]
        place = place or Place(None, f"{wrong[0].what} is the first that differs", wrong[0].step)
        facts = [rank.facts[max(rank.facts)] for rank in ranks]
        causes = likely_causes(self.case, strategy, verdict.differences, facts)
        return dataclasses.replace(verdict, place=place, causes=causes)

    def _on_ranks(
        self,
        function: Any,
        name: str,
        strategy: Strategy,
        resumed_from: Strategy | None,
        *args: Any,
    ) -> list[Any]:
        from phalanx.script.trainer import Options

        out = self.folder / name
        if resumed_from is not None:
            there = manifest.folder_of(self.folder / "first", self.middle)
            here = manifest.folder_of(out, self.middle)
            self._once(lambda: shutil.copytree(there, here))
        options = Options(
            out=out,
            resume=resumed_from is not None,
            save_every=self.middle,
            save_every_minutes=0,
            eval_every=self.middle,
            device="cpu",
        )
        return run_ranks(
            function, strategy.num_ranks, self.trainer, strategy, options, *args, timeout_s=WAIT_S
        )

    def _once(self, function: Callable[[], Any]) -> None:
        """Call a function, in a job on its first rank, whose folder all ranks use."""
        if dist.is_initialized():
            on_first_rank(function, "cannot verify the job")
        else:
            function()

    def _compared(
        self, title: str, ranks: Sequence[Witnessed], start: int
    ) -> tuple[Verdict, list[Place]]:
        """Compare up to the end of the first step that differs; return unequal ranks apart too."""
        ours, expected = ranks[0], self.expected
        differences = compare_step(start, ours.begin, expected.begin[start])
        unequal: list[Place] = []
        last = len(self.case.batches)
        for number in range(start, last + 1):
            if number in ours.evaluations and number in expected.validation:
                left, right = (
                    {"": each[number]} for each in (ours.evaluations, expected.validation)
                )
                differences += compare_values(number, "validation loss", left, right)
            if number == last or number not in ours.records:
                continue
            differences += compare_step(number, ours.records[number], expected.records[number])
            unequal += unequal_ranks(number, [rank.facts[number] for rank in ranks])
            wrong = {d.quantity for d in differences if not d.passes}
            if unequal or wrong - {"validation loss"}:
                break
        else:
            differences += compare_values(
                last - 1, EVALUATION, {"": ours.evaluated}, {"": expected.evaluated}
            )
        place = next(self._problems(title, ranks, start), None)
        replicas = [place.what] if place else [f"step {each.step}: {each.what}" for each in unequal]
        return Verdict(title, differences, replicas, place=place), unequal

    def _problems(self, title: str, ranks: Sequence[Witnessed], start: int) -> Iterator[Place]:
        """Yield what is wrong and needs no arithmetic to be judged."""
        due = list(range(start, len(self.case.batches)))
        for rank, seen in enumerate(ranks):
            if seen.idle:
                what = f"an evaluation leaves {seen.idle[0] or 'the model'} in eval mode"
                yield Place(seen.idle[0], f"{title}, rank {rank}: {what}", None, rank)
            if list(seen.facts) != due:
                what = f"it takes the steps {list(seen.facts)}, where {due} are due"
                yield Place(None, f"{title}, rank {rank}: {what}", None, rank)


def _seeded(trainer: Trainer) -> nn.Module:
    torch.manual_seed(trainer.seed)
    return trainer.build()


def _widened(trainer: Trainer, steps: int) -> Trainer:
    """Return the job in float64, for so many steps."""
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
    """Yield the global batches of pass after pass, in the order of the plain DataLoader."""
    data = trainer.data
    if isinstance(data, IterableDataset):
        data = copy.deepcopy(data)  # it may have one pass
    loader: DataLoader[Any] = trainer.loader(
        data, shuffle=trainer.shuffle, drop_last=trainer.drop_last
    )
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise DataError("the data ends before the steps to be verified; ask for fewer --steps")


@torch.no_grad()
def _validation_loss(model: nn.Module, trainer: Trainer) -> float | None:
    if trainer.validation is None:
        return None
    state, modes = torch.get_rng_state(), {m: m.training for m in model.modules()}
    model.eval()
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for batch in trainer.loader(trainer.validation):
        made: Tensor = trainer.objective.loss_sum(model, batch, 0)
        loss += made
        count += int(trainer.objective.num_valid(batch))
    for module, is_training in modes.items():
        module.training = is_training
    torch.set_rng_state(state)
    return float(loss) / max(1, count)
