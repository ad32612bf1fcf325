"""The prepared objects of a script: the split model, its optimizers, schedulers and loaders."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from phalanx.checkpoint.frozen import FrozenWeights
from phalanx.errors import ScriptError
from phalanx.parallel.batch_norm import Statistics, batch_norms, require_statistics
from phalanx.parallel.dropout import Masks, warn_of_first_draws
from phalanx.parallel.plan import Plan
from phalanx.script.gather import Gathers
from phalanx.script.guards.at_prepare import refuse_model
from phalanx.script.loader import RankLoader, compute_spare_row
from phalanx.script.loop_step import JobSettings, LoopStep, Reading
from phalanx.script.optimizer import Names, check_schedules, rebind
from phalanx.script.order import JobGenerator
from phalanx.script.weight_average import WeightAverage
from phalanx.script.whole_weights import guard_shards


class Prepared:
    """The prepared objects of a run, each kind in the order of preparation."""

    def __init__(self, job: JobSettings) -> None:
        self.generator = JobGenerator()
        self.deals_unevenly = False  # set by `loop_proof`
        self.reading = Reading()
        self.loaders: list[RankLoader] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.averages: list[WeightAverage] = []
        self.frozen: FrozenWeights  # of the prepared model
        self.between_steps: Callable[[], None] = lambda: None  # set by `Saves.resume`
        self.job = job
        self._gathers = Gathers(job.comm)
        # A compiled loss may call it.
        self.gather = cast(Callable[..., Any], torch.compiler.disable(self._gather))
        self._model: tuple[nn.Module, LoopStep, Names] | None = None
        self._is_warned = self._has_spares = False

    @property
    def steps_done(self) -> int:
        """Optimizer steps taken, including the steps before a resume."""
        return 0 if self.step is None else self.step.steps_done

    @property
    def step(self) -> LoopStep | None:
        """The current step of the prepared model; None if no model is prepared."""
        return None if self._model is None else self._model[1]

    def require_model(self, call: str) -> tuple[nn.Module, LoopStep]:
        """Return the prepared model and its step; refuse `call` if no model is prepared."""
        if self._model is None:
            raise ScriptError(
                f"{call}: no model is prepared; call model, optimizer, loader = "
                "run.prepare(model, optimizer, loader) first, with the model among them"
            )
        return self._model[:2]

    def __deepcopy__(self, memo: Any) -> Prepared:
        return self  # a copy of a loader belongs to the same run

    def take(
        self,
        objects: Sequence[Any],
        batch_norm: Statistics | None,
        roles: Mapping[str, str] | None,
    ) -> list[Any]:
        """Prepare objects, the model first; see `Run.prepare`."""
        for model in [each for each in objects if isinstance(each, nn.Module)]:
            self._take_model(model, batch_norm, roles)
        is_first_loader = not self.loaders
        prepared = [self._take(each) for each in objects]
        check_schedules(self.schedulers, self.optimizers)
        if is_first_loader and self.loaders:
            self._announce(self.loaders[0].plain)
        return prepared

    def check_replicas(self, call: str) -> None:
        """Refuse replicas that differ between ranks; every rank calls this together."""
        step = self.require_model(call)[1]
        step.guards.replicas.check(call, step.steps_done)

    def _gather(self, batch: Any, dim: int | None, pad: float | None, per_row: int) -> Any:
        """Return the rows of all ranks, see `Run.gather`; every rank calls this together."""
        if self.step is not None:
            self.step.guards.draws.look()  # draws for gathered rows are equal on all ranks
        rows, is_due = self._gathers.gather(
            batch,
            {len(each.rows) for each in self.loaders if each.num_begun} | self.reading.waiting_rows,
            dim=dim,
            pad=pad,
            per_row=per_row,
            is_check_due=self.is_check_due,
        )
        if is_due:
            self.check_replicas("gather")
        return rows

    @property
    def is_check_due(self) -> bool:
        """Whether to compare replicas: once in an evaluation between two steps."""
        step = self.step
        return (
            step is not None and self.reading.is_evaluation and not step.guards.replicas.is_checked
        )

    def refuse_average(self, call: str) -> None:
        """Refuse to train or save while averaged weights are applied."""
        if any(average.is_applied for average in self.averages):
            raise ScriptError(
                f"{call}: called within applied() of an average, where the model has averaged "
                "weights; call it outside applied()"
            )

    def warn_of_schedules(self, registered: Sequence[Any]) -> None:
        """Warn once if an optimizer has a schedule that checkpoints will not contain."""
        known = {id(getattr(each, "optimizer", None)) for each in (*self.schedulers, *registered)}
        # Set by torch's schedulers on their optimizer; tests/script/test_mistakes.py pins it.
        left = [o for o in self.optimizers if hasattr(o, "_opt_called") and id(o) not in known]
        if left and self.job.comm.is_first and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"save: a schedule moves the learning rate of {type(left[0]).__name__} and is not "
                "prepared, so no checkpoint has it; give it to run.prepare too",
                stacklevel=4,
            )

    def _take_model(
        self, model: nn.Module, batch_norm: Statistics | None, roles: Mapping[str, str] | None
    ) -> None:
        job = self.job
        if self._model is not None:
            known = self._model[0]
            again = "it again" if model is known else f"a {type(model).__name__} too"
            raise ScriptError(
                f"prepare: {type(known).__name__} is prepared already, and this call prepares "
                f"{again}; call run.prepare once, with several models as parts of one nn.Module"
            )
        refuse_model(model, job.comm)
        before = {p: name for name, p in model.named_parameters()}
        require_statistics(model, job.strategy, batch_norm)
        masks = Masks(job.seed, lambda: self.reading.position(self.steps_done))
        model.to(job.comm.device)
        plan = Plan(job.strategy, model, roles=roles, batch_norm=batch_norm, masks=masks)
        runner = plan.build(job.comm)
        known = (self._gathers, self.reading, self.optimizers, lambda: masks.num_tickets)
        step = LoopStep(job, model, runner, *known)
        self._model, self.frozen = (model, step, before), FrozenWeights(model)
        guard_shards(model, str(job.strategy))
        warn_of_first_draws(model, step.guards.draws.stop)

    def _take(self, each: Any) -> Any:
        if isinstance(each, torch.optim.Optimizer):
            model, step = self.require_model("prepare")
            if any(each is known for known in self.optimizers):
                raise ScriptError(
                    f"prepare: this {type(each).__name__} is prepared already; give it once"
                )
            step.guard(each)
            rebind(each, self._model[2] if self._model else {}, model, self.job.comm)
            self.optimizers.append(each)
        elif isinstance(each, DataLoader):
            is_uneven = self._model is not None and self.deals_unevenly
            comm = self.job.comm
            self.loaders.append(
                RankLoader(each, comm, self.generator, self._note, deals_unevenly=is_uneven)
            )
            self.loaders[-1].before_batch = self._before_batch
            self.loaders[-1].between_batches = self._between_batches
            return self.loaders[-1]
        elif isinstance(each, nn.Module) or each is None:
            pass
        elif all(hasattr(each, name) for name in ("step", "state_dict", "load_state_dict")):
            self.schedulers.append(each)
        else:
            raise ScriptError(
                f"prepare: cannot prepare a {type(each).__name__}; expected an nn.Module, "
                "optimizers, schedulers and DataLoaders"
            )
        return each

    def _announce(self, plain: DataLoader[Any]) -> None:
        """Print to standard error how the job is split."""
        comm, rows = self.job.comm, ""
        if not comm.is_first or comm.size("job") == 1:
            return
        if isinstance(plain.sampler, DistributedSampler):
            rows = f"; {plain.batch_size} rows of a batch a rank"
        elif plain.batch_size is not None:
            most = -(-plain.batch_size // comm.size("data"))
            rows = f"; {most} of the {plain.batch_size} rows of a batch a rank"
        split = f"{comm.size('job')} ranks, {self.job.strategy} on {comm.device.type}"
        sys.stderr.write(f"phalanx: {split}{rows}\n")
        sys.stderr.flush()

    def _before_batch(self) -> None:
        if self.step is not None and self.step.profile is not None and torch.is_grad_enabled():
            self.step.profile.enter("data")

    def _between_batches(self) -> None:
        if self.step is not None and torch.is_grad_enabled() and self.step.is_over:
            self.between_steps()

    def _note(self, loader: RankLoader, batch: Any) -> None:
        self.reading.note(loader, batch)
        if self._model is None:
            return
        model, step, _ = self._model
        if loader.spares and not self._has_spares:
            self._has_spares = True
            if not batch_norms(model):  # its statistics would count the row
                compute_spare_row(model, lambda: self.reading.last)
        if not self.reading.is_evaluation:
            step.guards.draws.mark()
            if step.profile is not None:
                step.profile.enter("forward")
