"""The prepared objects of a script: the split model, its optimizers, schedulers and loaders."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from phalanx.comm.comm import Comm, Ranks
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.launch.heartbeat import PULSE
from phalanx.parallel.batch_norm import Statistics, batch_norms, require_statistics
from phalanx.parallel.dropout import Masks, warn_of_first_draws
from phalanx.parallel.plan import Plan
from phalanx.script.as_prepared import refuse_max_norm
from phalanx.script.draws import DrawWatch
from phalanx.script.drift import first_unequal_rank
from phalanx.script.gather import Gathers, add_up
from phalanx.script.hooks import refuse_lost_hooks
from phalanx.script.loader import RankLoader, compute_spare_row
from phalanx.script.optimizer import Names, check_schedules, rebind
from phalanx.script.order import JobGenerator
from phalanx.script.reading import BatchTracker
from phalanx.script.step_state import State
from phalanx.script.user_step import UserStep
from phalanx.script.weight_average import WeightAverage
from phalanx.script.whole_weights import guard_shards
from phalanx.strategy import Strategy


class Prepared:
    """The prepared objects of a run, each kind in the order of preparation."""

    def __init__(
        self,
        comm: Ranks,
        strategy: Strategy,
        accumulation: int,
        seed: int,
        name: str,
        nonfinite: Literal["stop", "skip"],
    ) -> None:
        self.generator = JobGenerator()
        self.deals_unevenly = False  # set by `loop_proof`
        self.reading = BatchTracker()
        self.loaders: list[RankLoader] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.averages: list[WeightAverage] = []
        self._comm, self._strategy = comm, strategy
        self._accumulation, self._seed, self._name = accumulation, seed, name
        self._nonfinite: Literal["stop", "skip"] = nonfinite
        self._gathers = Gathers(comm)
        # A compiled loss may call it.
        self.gather = cast(Callable[..., Any], torch.compiler.disable(self._gather))
        self._model: nn.Module | None = None
        self._step: UserStep | None = None
        self._before: Names = {}
        self._is_announced = self._is_warned = self._has_spares = False

    @property
    def state(self) -> State:
        """State of the current step's gradients, see `State`."""
        return State.IDLE if self._step is None else self._step.state

    @property
    def steps_done(self) -> int:
        """Optimizer steps taken, including the steps before a resume."""
        return 0 if self._step is None else self._step.steps_done

    def require_model(self, call: str) -> tuple[nn.Module, UserStep]:
        """Return the prepared model and its step; refuse `call` if no model is prepared."""
        if self._model is None or self._step is None:
            raise ScriptError(
                f"{call}: no model is prepared; call model, optimizer, loader = "
                "run.prepare(model, optimizer, loader) first, with the model among them"
            )
        return self._model, self._step

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
        prepared = [self._take(each) for each in objects]
        check_schedules(self.schedulers, self.optimizers)
        self._announce()
        return prepared

    def trained_step(self) -> UserStep:
        """Return the step for a backward, after checks that a backward is allowed."""
        step = self.require_model("backward")[1]
        self.refuse_average("backward")
        if not self.optimizers:
            raise ScriptError(
                "backward: no optimizer is prepared, so an optimizer of the script may update "
                "parameters that are not split, and its steps would not be checked; give the "
                "optimizer to run.prepare too"
            )
        return step

    def check_replicas(self, call: str) -> None:
        """Refuse replicas that differ between ranks; every rank calls this together."""
        step = self.require_model(call)[1]
        step.replicas.check(call, step.steps_done)

    def add_up(self, call: str, *numbers: Tensor) -> Tensor:
        """Return sums over the ranks, see `gather.add_up`; every rank calls this together."""
        total, is_due = add_up(call, numbers, self._comm, self._is_check_due())
        if is_due:
            self.check_replicas(call)
        return total

    def _gather(self, batch: Any, dim: int | None, pad: float | None, per_row: int) -> Any:
        """Return the rows of all ranks, see `Run.gather`; every rank calls this together."""
        if self._step is not None:
            self._step.draw_watch.look()  # draws for gathered rows are equal on all ranks
        rows, is_due = self._gathers.gather(
            batch,
            {len(each.rows) for each in self.loaders if each.num_begun} | self.reading.waiting_rows,
            dim=dim,
            pad=pad,
            per_row=per_row,
            is_check_due=self._is_check_due(),
        )
        if is_due:
            self.check_replicas("gather")
        return rows

    def _is_check_due(self) -> bool:
        """Return whether to compare replicas: once in an evaluation between two steps."""
        step = self._step
        return step is not None and self.reading.is_evaluation and not step.replicas.is_checked

    def should_stop(self) -> bool:
        """Return whether a signal has asked the job to stop; every rank calls this together."""
        PULSE.heed()
        asked = 0 if self.state is State.ACCUMULATING else PULSE.stop_signal
        own = torch.tensor(asked, device=self._comm.device)
        stop = int(self._comm.all_reduce(own, "job", "max"))
        PULSE.handled_signal = stop or PULSE.handled_signal
        return stop > 0

    def average(self, decay: float | None, **options: bool) -> WeightAverage:
        """Return an average of the weights, see `Run.average`."""
        model, step = self.require_model("average")
        self.averages.append(WeightAverage(model, step.parameters, decay, **options))
        return self.averages[-1]

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
        if left and self._comm.is_first and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"save: a schedule moves the learning rate of {type(left[0]).__name__} and is not "
                "prepared, so no checkpoint has it; give it to run.prepare too",
                stacklevel=4,
            )

    def _take_model(
        self, model: nn.Module, batch_norm: Statistics | None, roles: Mapping[str, str] | None
    ) -> None:
        if self._model is not None:
            again = "it again" if model is self._model else f"a {type(model).__name__} too"
            raise ScriptError(
                f"prepare: {type(self._model).__name__} is prepared already, and this call "
                f"prepares {again}; call run.prepare once, with several models as parts of one "
                "nn.Module"
            )
        check_model(model, self._comm)
        self._before = {p: name for name, p in model.named_parameters()}
        require_statistics(model, self._strategy, batch_norm)
        masks = Masks(self._seed, lambda: self.reading.position(self.steps_done))
        model.to(self._comm.device)
        plan = Plan(self._strategy, model, roles=roles, batch_norm=batch_norm, masks=masks)
        runner = plan.build(self._comm)
        known = (self._accumulation, self.reading, self.optimizers, self._name, self._nonfinite)
        self._model = model
        self._step = UserStep(model, runner, self._comm, self._gathers, *known)
        guard_shards(model, str(self._strategy))
        self._step.draw_watch = DrawWatch(self._comm, lambda: masks.num_tickets)
        warn_of_first_draws(model, self._step.draw_watch.stop)

    def _take(self, each: Any) -> Any:
        if isinstance(each, torch.optim.Optimizer):
            model, step = self.require_model("prepare")
            if any(each is known for known in self.optimizers):
                raise ScriptError(
                    f"prepare: this {type(each).__name__} is prepared already; give it once"
                )
            rebind(each, self._before, model)
            step.guard(each)
            self.optimizers.append(each)
        elif isinstance(each, DataLoader):
            is_uneven = self._model is not None and self.deals_unevenly
            self.loaders.append(
                RankLoader(each, self._comm, self.generator, self._note, deals_unevenly=is_uneven)
            )
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

    def _announce(self) -> None:
        """Print once to standard error how the job is split, after a loader was prepared."""
        num_ranks = self._comm.size("job")
        if self._is_announced or num_ranks == 1 or not self.loaders:
            return
        self._is_announced = True
        plain = self.loaders[0].plain
        rows = ""
        if isinstance(plain.sampler, DistributedSampler):
            rows = f"; {plain.batch_size} rows of a batch a rank"
        elif plain.batch_size is not None:
            most = -(-plain.batch_size // self._comm.size("data"))
            rows = f"; {most} of the {plain.batch_size} rows of a batch a rank"
        if self._comm.is_first:
            kind = self._comm.device.type
            sys.stderr.write(f"phalanx: {num_ranks} ranks, {self._strategy} on {kind}{rows}\n")
            sys.stderr.flush()

    def _note(self, loader: RankLoader, batch: Any) -> None:
        self.reading.note(loader, batch)
        if loader.spares and self._model is not None and not self._has_spares:
            self._has_spares = True
            if not batch_norms(self._model):  # its statistics would count the row
                compute_spare_row(self._model, lambda: self.reading.last)
        if self._step is not None and not self.reading.is_evaluation:
            self._step.draw_watch.mark()


def check_model(model: nn.Module, comm: Comm) -> None:
    """Refuse a model that cannot be split or differs between ranks; all ranks call this."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ScriptError(
            f"prepare: the model is a {type(model).__name__}, which reduces gradients itself; give "
            "the module that it wraps, model.module"
        )
    meta = next((n for n, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ScriptError(
            f"prepare: {meta} is on the meta device, without initial weights; build the model on "
            "the CPU, or give it to phalanx.Trainer"
        )
    # If names or shapes differed, collectives would not match.
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    all_of = gather_objects(own)
    if (rank := first_unequal_rank(all_of)) is not None:
        theirs = all_of[rank]
        name = next(n for n in {**all_of[0], **theirs} if all_of[0].get(n) != theirs.get(n))
        there, here = theirs.get(name, "not there"), all_of[0].get(name, "not there")
        raise ScriptError(
            f"prepare: the model of rank {rank} differs from rank 0's: {name} is {there} on rank "
            f"{rank} and {here} on rank 0; build the same model on every rank"
        )
    refuse_max_norm(model)
    refuse_lost_hooks(model, comm)
