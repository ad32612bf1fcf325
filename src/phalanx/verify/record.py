"""A case: a model, its batches and an optimizer, and the steps of a case on the ranks of a job."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.comm.row_counts import RowCounts, noted
from phalanx.config import OptimizerConfig
from phalanx.data.rows import cast_batch, count_rows
from phalanx.errors import ConfigError
from phalanx.parallel.batch_norm import Statistics
from phalanx.parallel.dropout import MaskPosition, Masks
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.train.loop import Watcher
from phalanx.train.objective import Objective
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import rows_of, split
from phalanx.verify.reference import Training, in_training


class Observer(Watcher):
    """Watcher of a run's steps; a run of a case ends early if it `is_over`."""

    is_over = False


def loss_of(objective: Objective, model: nn.Module, batch: Any) -> Tensor:
    """Return the sum of the losses of a batch, as in an evaluation."""
    return objective.loss_sum(model, batch, 0)


@dataclass(frozen=True)
class Case:
    """A case to run, with the arguments of `harness.verify`; every field can be pickled.

    Attributes:
        dropout_seed: seed of masks keyed by sample, which nn.Dropout draws on both sides; if None,
            it draws from the process's generator.
        reference: other build function and objective for the reference, with equal parameter names;
            if None, the case's own.
        infer: function of (objective, model, batch) whose result in `eval()` after the last step is
            compared: a sum over the rows, or a tensor with the rows as first dimension.
        training: optimizer of the reference, in place of `optimizer`; if None, AdamW.
    """

    build: Callable[[], nn.Module]
    objective: Objective
    batches: Sequence[Any]
    accumulation: int = 1
    dtype: str = "float64"
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    roles: Mapping[str, str] | None = None
    reference: tuple[Callable[[], nn.Module], Objective] | None = None
    device: str = "cpu"
    batch_norm: Statistics | None = None
    dropout_seed: int | None = None
    infer: Callable[[Objective, nn.Module, Any], Tensor] = loss_of
    training: Training | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The data type as a torch.dtype."""
        return getattr(torch, self.dtype)


class CaseRun:
    """The steps of a case on this rank, under a strategy.

    Attributes:
        comm: communicator of the job's ranks.
        step: the training step, over parameter servers if the strategy has them.
        ledger: bytes of the last step up to its gradients.
        routed: rows that ranks sent each other's experts in that step.
    """

    def __init__(self, case: Case, strategy: Strategy, comm: Ranks) -> None:
        """Build and split the model; every rank calls this together."""
        # DTensor warns, once per layout, that it gathers a weight axis by axis: no problem here.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self.comm, self.ledger = comm, Ledger(comm)
        self.routed: list[RowCounts] = []
        self._case, self._open = case, ExitStack()
        self._dropout_calls: dict[int, dict[str, int]] = {}
        model = in_training(case.build()).to(comm.device, case.torch_dtype)
        seed = case.dropout_seed
        plan = Plan(
            strategy.of_worker,
            model,
            roles=case.roles,
            batch_norm=case.batch_norm,
            masks=None if seed is None else Masks(seed, self._place),
            pp_rank=comm.coord("pp"),
        )
        runner = plan.build(comm)  # before the optimizer is built, because it replaces parameters
        # Newton-Schulz steps in a narrower type would enlarge a difference in the last digit.
        own: Any = {} if case.dtype == "float64" else {"ns_dtype": case.dtype}
        settings = dataclasses.replace(case.optimizer, **own)
        num_steps, optimizer = len(case.batches), build_optimizer(model, settings, comm)
        arguments = (model, optimizer, case.objective, case.optimizer)
        # A step that is not finite is skipped, so that it is compared and reported.
        more: dict[str, Any] = {"num_steps": num_steps, "run": runner, "nonfinite": "skip"}
        if strategy.is_served:
            from phalanx.verify.served_case import served_step  # it needs pyzmq

            served = served_step(strategy, comm.rank, *arguments, **more)
            self.step = self._open.enter_context(served)
        else:
            self.step = Step(*arguments, comm=comm, **more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop the parameter servers, if any; every rank calls this together."""
        self._open.__exit__(*error)

    def take(self, observer: Observer) -> None:
        """Take the steps until the observer has seen enough; all ranks do so together."""
        for number, batch in enumerate(self._case.batches):
            if observer.is_over:
                return
            moved = cast_batch(batch, self._case.torch_dtype, self.step.comm.device)
            microbatches = split(moved, *self._shard)
            self._dropout_calls.clear()
            is_last = number == len(self._case.batches) - 1
            with observer.watching(microbatches):
                with (
                    self.ledger if is_last else nullcontext(),
                    noted() as self.routed,
                    self.step.watched(self.ledger.phase),
                ):
                    gradients = self.step.compute_gradients(microbatches)
                observer.keep(self.step.apply_gradients(*gradients))

    def rows(self, _microbatches: Sequence[Any]) -> list[Tensor]:
        """Return the positions of each microbatch's rows in the rows of all steps."""
        step, batches = self.step.steps_done, self._case.batches
        first = sum(count_rows(batch) for batch in batches[:step])
        return [first + rows for rows in rows_of(batches[step], *self._shard)]

    @property
    def _shard(self) -> tuple[int, int, int]:
        return self.comm.coord("data"), self.comm.size("data"), self._case.accumulation

    def _place(self) -> MaskPosition:
        """Return the step, the rows and the call counts of the current forward, to key masks."""
        number, step = self.step.run.microbatch, self.step.steps_done
        calls = self._dropout_calls.setdefault(number, {})
        return MaskPosition(step, rows_of(self._case.batches[step], *self._shard)[number], calls)


def check_rows(case: Case, num_data_ranks: int) -> None:
    """Raise ConfigError if a batch has fewer rows than microbatches."""
    for step, batch in enumerate(case.batches):
        num_rows, least = count_rows(batch), num_data_ranks * case.accumulation
        if num_rows < least:
            raise ConfigError(
                f"batch {step} has {num_rows} rows, which cannot be cut into {case.accumulation} "
                f"microbatches on each of {num_data_ranks} data ranks; give at least {least} rows"
            )
