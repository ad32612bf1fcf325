"""`phalanx.init` and the run that it returns: a training loop of one's own, on many ranks.

    run = phalanx.init()                                   join the job, or be one process
    model, optimizer, loader = run.prepare(...)            split the model, deal the batches out
    for inputs, labels in loader:                          this rank's rows of the global batch
        loss = cross_entropy(model(inputs), labels, reduction="sum")
        run.backward(loss, len(labels))                    gradients of the global batch's mean
        optimizer.step()
        optimizer.zero_grad()

Loss law: the sum of the losses over the global batch / the samples (or tokens) in it. `backward`
adds counts and losses up over the ranks before it divides, so neither uneven batches nor the number
of ranks change a gradient. The gradients are whole when the last `backward` of a step returns, so
all that reads them (clipping, a scheduler, an optimizer of any kind) stays as it was.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx.checkpoint.registered import Registered
from phalanx.checkpoint.saver import Saver
from phalanx.comm.comm import Ranks
from phalanx.comm.together import gather_objects
from phalanx.debug.check import CollectiveCheck
from phalanx.errors import ScriptError, StrategyError
from phalanx.launch.attach import attach, check_end, tell_in_one_message
from phalanx.launch.heartbeat import PULSE
from phalanx.parallel.batch_norm import Statistics, require_statistics
from phalanx.parallel.dropout import Masks, Place, name_draws
from phalanx.parallel.plan import Plan
from phalanx.script import checkpoint
from phalanx.script.arguments import check_clip, check_keep, folder_of
from phalanx.script.checks import check_init
from phalanx.script.draws import DrawWatch, draw_rows
from phalanx.script.gather import gather_rows, gather_with_gradient
from phalanx.script.loader import RankLoader
from phalanx.script.mean_loss import MeanLoss, own_number
from phalanx.script.optimizer import Names, check_schedules, guard, rebind
from phalanx.script.order import Draws
from phalanx.script.own_rows import OwnRows
from phalanx.script.prepare import check_model
from phalanx.script.reading import Reading
from phalanx.script.user_step import State, UserStep
from phalanx.script.weight_average import WeightAverage
from phalanx.script.whole_weights import (
    guard_shards,
    load_checkpoint,
    load_whole,
    of_shards,
    whole_state,
)
from phalanx.strategy import Strategy
from phalanx.train.clip import gradient_norm, scale_to

STRATEGY: Final = "PHALANX_STRATEGY"
"""Variable in which `phalanx run --strategy` hands the strategy to the script."""

_NUMBERS = itertools.count()

IN_PLACE: Final[list[tuple[Strategy, Callable[[Run], None]]]] = []
"""While `phalanx verify` runs the script: a strategy in place of its own, and what watches runs."""


def init(
    strategy: str | Strategy | None = None,
    *,
    accumulation: int = 1,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout_s: float | None = None,
    debug_comm: bool = False,
) -> Run:
    """Join the job of `phalanx run`, torchrun or Slurm; without one, be a job of one process.

    Args:
        strategy: how to split the work, such as "dp2,fsdp2"; that of `phalanx run --strategy` if
            None, else dp over all ranks that there are.
        accumulation: how many times `backward` is called for each step of the optimizer. The last
            step of a pass over the data may have fewer.
        seed: of the masks of dropout.
        device: what to compute on, "cuda" where there is a GPU if "auto".
        timeout_s: longest wait for another rank in one collective, in seconds; that of
            `phalanx run --timeout-s` if None, else 600.
        debug_comm: compare each collective of all ranks before it runs, see docs/debugging.md.

    Raises:
        ConfigError: the strategy cannot be read, or needs another number of ranks, or is for
            pipelines or context parallelism, which need a trainer's loop; or the job is incomplete.
    """
    tell_in_one_message(of_shards)
    parsed = IN_PLACE[-1][0] if IN_PLACE else _strategy(strategy)
    check_init(accumulation, seed, device, timeout_s)
    facts = {"strategy": parsed and str(parsed), "accumulation": accumulation, "seed": seed}
    kind = attach(facts, device=device, timeout_s=timeout_s)
    num_ranks = dist.get_world_size()
    if parsed is None:
        parsed = Strategy.parse(f"dp{num_ranks}")
    if parsed.num_ranks != num_ranks == 1:
        raise StrategyError(
            f"init: strategy '{parsed}' needs {parsed.num_ranks} ranks, but this is one process; "
            f"start the script by: phalanx run {Path(sys.argv[0]).name} --nproc {parsed.num_ranks}"
        )
    name = f"run {next(_NUMBERS)}"
    check_end(f"{name} of the script begins")  # of the runs before, which may not last any longer
    run = Run(Ranks(parsed, kind), parsed, accumulation, seed, name)
    if debug_comm:
        CollectiveCheck(run.comm).__enter__()  # for as long as the process lasts
    if IN_PLACE:
        IN_PLACE[-1][1](run)
    return run


def _strategy(given: str | Strategy | None) -> Strategy | None:
    """Return the strategy of the script, or of its command line."""
    told = os.environ.get(STRATEGY)
    strategy = Strategy.parse(given) if isinstance(given, str) else given
    if not isinstance(strategy, Strategy | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StrategyError(f"init: strategy is {strategy!r}; expected text such as 'dp2,fsdp2'")
    if told and strategy is not None and str(strategy) != str(Strategy.parse(told)):
        raise StrategyError(
            f"init: the script asks for strategy '{strategy}' and its command line for '{told}'; "
            "leave one of them out"
        )
    strategy = Strategy.parse(told) if told and strategy is None else strategy
    for axis, what in (("pp", "a pipeline"), ("cp", "context parallelism")):
        if strategy is not None and getattr(strategy, axis).degree > 1:
            raise StrategyError(
                f"init: strategy '{strategy}' has {axis}: {what} runs the forward itself, which a "
                "loop of one's own calls; use dp, fsdp and tp here"
            )
    return strategy


class Run:
    """A training loop's part in a job: what is split, and the step under way.

    Attributes:
        comm: the ranks.
        strategy: how the work is split.
        accumulation: calls of `backward` for each step.
    """

    def __init__(
        self, comm: Ranks, strategy: Strategy, accumulation: int, seed: int, name: str
    ) -> None:
        self.comm = comm
        self.strategy = strategy
        self.accumulation = accumulation
        self._name = name
        self._seed = seed
        self._draws = Draws()
        self._reading = Reading()
        self._own_rows = OwnRows(comm)
        self._loaders: list[RankLoader] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[Any] = []
        self._registered = Registered()
        self._averages: list[WeightAverage] = []
        self._folders: dict[Path, Path] = {}
        self._savers: dict[Path, Saver] = {}
        self._model: nn.Module | None = None
        self._step: UserStep | None = None
        self._before: Names = {}
        self._is_warned = False
        self._is_announced = False
        # What torch.save has of a loss is a float by name, which torch.load else does not know.
        torch.serialization.add_safe_globals([float])

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        self._own_rows.warn()
        return self.comm.is_first

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self.comm.device

    @property
    def steps_done(self) -> int:
        """Steps that an optimizer has taken, those before `resume` too."""
        return 0 if self._step is None else self._step.steps_done

    @property
    def is_step_end(self) -> bool:
        """Whether the gradients are those of a whole step, so that optimizers may step."""
        return self._step is not None and self._step.state is State.WHOLE

    @property
    def should_stop(self) -> bool:
        """Whether a signal asks the job to end: save, and leave the loop; all ranks read this.

        A script that reads it is left to end by itself when SIGTERM, SIGHUP or Ctrl-C comes, and
        any other ends at once; so does a second signal. The exit code is the signal's. Between two
        calls of `backward` of one step, where nothing can be saved, no script is asked to stop.
        """
        PULSE.heed()
        is_within_step = self._step is not None and self._step.state is State.ACCUMULATING
        told = 0 if is_within_step else PULSE.stop_signal
        told = torch.tensor(told, device=self.comm.device)
        stop = int(self.comm.all_reduce(told, "job", "max"))
        PULSE.obeyed = stop or PULSE.obeyed
        return stop > 0

    def print(
        self, *values: object, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = True
    ) -> None:
        """Print on the first rank alone."""
        if self.is_first:  # which looks after the rows that are counted
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def prepare(
        self,
        *objects: Any,
        batch_norm: Statistics | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> Any:
        """Split a model, and fit optimizers, schedulers and loaders to it; all ranks call this.

        The model is split in place, on this rank's device; optimizers keep their groups, settings
        and schedulers, and update this rank's shards. A DataLoader comes back as one that yields
        this rank's rows of each of its batches, on this rank's device.

        Args:
            *objects: one nn.Module, and any number of optimizers, schedulers and DataLoaders; None
                stays None.
            batch_norm: over what BatchNorm takes its mean and variance in training: "global", the
                rows of all ranks, as one process does, or "local", each rank's own. A model that
                has a BatchNorm must say.
            roles: patterns of module names to roles for tp, see docs/strategies.md.

        Returns:
            The objects, in their order; one by itself.

        Raises:
            ScriptError: an object is none of those, or was prepared, or is of another model.
            ConfigError: the strategy does not split the model, or a loader's batches.
        """
        for model in [each for each in objects if isinstance(each, nn.Module)]:
            self._take_model(model, batch_norm, roles)
        prepared = [self._take(each) for each in objects]
        check_schedules(self._schedulers, self._optimizers)
        self._announce()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def backward(self, loss_sum: Tensor, count: float | Tensor | None = None) -> MeanLoss:
        """Add up the gradients of the global batch's loss; every rank calls this together.

        After the last call of a step each `.grad` is the gradient of the mean over the global
        batch, or this rank's shard of it. The first call of a step clears the gradients.

        Args:
            loss_sum: sum of the losses of this rank's samples, a number with its graph; 0-d.
            count: samples (or tokens) of this rank that it is a sum over; it has to be given.

        Returns:
            The mean loss of this call over all ranks, 0-d, float64, without a graph. Its `count`
            has the samples (or tokens) of all ranks that it is over, its `of_step` the mean over
            the step so far.

        Raises:
            ScriptError: the loss is a mean or has no graph, or the model has been changed.
        """
        step = self._prepared("backward")[1]
        self._refuse_average("backward")
        if not self._optimizers:
            raise ScriptError(
                "backward: no optimizer is prepared, so that it may update parameters that are not "
                "split, and its steps would not be checked; give it to run.prepare too"
            )
        self._own_rows.warn()
        loss = step.backward(loss_sum, count)
        loss.on_count = self._own_rows.add_up
        return loss

    def clip(self, max_norm: float, p: float = 2.0) -> Tensor:
        """Scale the gradients so that their p-norm is at most `max_norm`; all ranks call this.

        Between the last `backward` of a step and `optimizer.step()`. Returns the norm of the whole
        gradient before, each element counted once however the model is split; 0-d, float64.

        Raises:
            ScriptError: the gradients are not whole, or an argument is no number above 0.
        """
        check_clip(max_norm, p)
        step = self._prepared("clip")[1]
        if step.state is not State.WHOLE:
            raise ScriptError(
                "clip: there are no gradients of a whole step; call it after the last run.backward "
                "of a step and before optimizer.step()"
            )
        gradients = step.gradients()
        norm = gradient_norm(gradients, self.comm, p)
        step.replicas.count_clip(max_norm, p)
        if (value := float(norm)) > max_norm:
            scale_to(gradients, value, max_norm)
        return norm

    def sum(self, value: float | Tensor) -> Tensor:
        """Return the sum of `value` over the ranks that have different samples; all call this.

        It is float64, or int64 where all ranks give whole numbers or truth values.

        Raises:
            ScriptError: as `mean`.
        """
        self._own_rows.add_up()
        return self._add_up("sum", [own_number("sum", value, self.comm)])[0]

    def mean(self, value_sum: float | Tensor, count: float | Tensor) -> Tensor:
        """Return a mean over the samples of all ranks; every rank calls this together.

        Args:
            value_sum: sum of what is averaged over the samples of this rank; of any shape.
            count: these samples, or for each number of `value_sum` its own.

        Returns:
            The sum over the ranks / the count over the ranks, in the shape of `value_sum`,
            float64; not a number where no rank has a sample.

        Raises:
            ScriptError: one of them is no number, or is of all ranks already, or has another shape
                on another rank.
        """
        self._own_rows.add_up()
        own = [own_number("mean", each, self.comm).double() for each in (value_sum, count)]
        total, counted = self._add_up("mean", own)
        return total / counted

    def gather(self, batch: Any, *, grad: bool = False) -> Any:
        """Return the rows of all ranks, in the order of one process; all ranks call this.

        Args:
            batch: a tensor, or mappings, lists or tuples of tensors, with this rank's rows of a
                batch of a prepared loader first; their numbers may differ between ranks.
            grad: whether gradients flow back to the rank that each row came from, for a loss over
                the rows of the whole batch, such as a contrastive one.

        Returns:
            The same with all rows, on the CPU, so that metrics count each sample once; with `grad`
            on the device of each tensor.

        Raises:
            ScriptError: a tensor has no rows, or others than the batch.
        """
        self._own_rows.add_up()
        num_rows = {len(each.rows) for each in self._loaders if each.num_begun}
        if grad:
            self._reading.gather()
            return gather_with_gradient(batch, self.comm, num_rows)
        rows, is_due = gather_rows(batch, self.comm, num_rows, self._is_check_due())
        if is_due:
            self._check_replicas("gather")
        return rows

    def draw(self, make: Callable[[int], Any]) -> Any:
        """Return this rank's rows of what one process draws; every rank calls this together.

            noise = run.draw(lambda rows: torch.randn(rows, 8))

        Args:
            make: draws on the CPU for a number of rows, those of the batch on all ranks that was
                read last; a tensor, or mappings, lists or tuples of tensors. Every rank calls it,
                with torch's own generator as it is on one process.

        Returns:
            The same with this rank's rows alone, on `device`.

        Raises:
            ScriptError: no batch has been read, or a tensor has other rows than the batch.
        """
        last = self._reading.last
        if last is None:
            raise ScriptError(
                "draw: no batch of a prepared DataLoader has been read, which says how many rows "
                "there are; call it within the loop"
            )
        return draw_rows(make, self._draws, last.num_batch_rows, last.own_rows, self.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights and buffers on the CPU; every rank calls this together.

        They are those of the plain model, for `torch.save` on the first rank, say; the other ranks
        get them too.

        Raises:
            ScriptError: no model is prepared.
        """
        model = self._prepared("state_dict")[0]
        self._check_replicas("state_dict")
        return whole_state(model)

    def load_state_dict(self, state: Mapping[str, Any] | str | Path | None) -> None:
        """Give the model whole weights and buffers; every rank calls this together.

        Args:
            state: what `state_dict`, or that of the plain model, has returned; the first rank's is
                taken on all. Or a folder, the same on all ranks: a checkpoint, as `save` returns
                it, or a run, whose latest it is; the weights alone are read.

        Raises:
            ScriptError: the weights are not those of this model.
            CheckpointError: there is no such checkpoint, or it is of another model.
        """
        model = self._prepared("load_state_dict")[0]
        if isinstance(state, str | Path):
            load_checkpoint(Path(state), model)
        else:
            load_whole(model, state, self.comm)

    def average(self, decay: float | None = 0.999, *, name: str = "average") -> WeightAverage:
        """Return an average of the weights, which `save` and `resume` know under `name`.

        Args:
            decay: of the exponential average (EMA), which keeps this share of itself at each
                update; None for the mean of all updates (SWA).
            name: as in `register`.

        Raises:
            ScriptError: no model is prepared, or the decay is no number from 0 up to 1.
        """
        model, step = self._prepared("average")
        average = WeightAverage(model, step.parameters, decay)
        self.register(name, average)
        self._averages.append(average)
        return average

    def register(self, name: str, each: Any) -> None:
        """Have `save` and `resume` know an object, with `state_dict` and `load_state_dict`.

        Its state is mappings and lists of numbers, text and tensors, alike on all ranks; no pickle
        is written.

        Raises:
            ScriptError: the name is taken, no file can hold the object's state, or `resume` has
                been called.
        """
        self._registered.add(name, each)

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Save a checkpoint that any strategy on any number of ranks goes on from; all call this.

        It has weights, the state and settings of the optimizers, the schedulers, where the loaders
        stand, and what is registered. It lies in `folder`/checkpoints/step-N and is whole when this
        returns. The latest `keep` stay, all if None. A folder that has checkpoints of another run
        is left as it is: then `folder`-2 is taken, and the first rank says so.

        Raises:
            CheckpointError: it cannot be written, or holds the weights alone.
            ScriptError: it is called within a step, or an argument is out of range.
        """
        check_keep(keep)
        (model, step), wanted = self._prepared("save"), folder_of("save", folder)
        # First: what follows asks all ranks, of which one may have left a step out.
        self._check_replicas("save")
        step.refuse_unused()
        self._refuse_average("save")
        self._own_rows.warn()
        self._warn_of_schedules()
        if wanted not in self._folders:
            self._folders[wanted] = checkpoint.free_folder(wanted)
            if self._folders[wanted] != wanted:
                self.print(
                    f"{folder} holds checkpoints of another run, and this one saves in "
                    f"{self._folders[wanted]}; run.resume would have gone on from them"
                )
        saver = self._saver(self._folders[wanted])
        saver.keep = keep
        with PULSE.doing(f"the checkpoint after step {self.steps_done}"):
            saved = checkpoint.save(
                saver, model, self._optimizers, self._standing(), self._registered
            )
        self._tell_standing(self._folders[wanted], saved)
        return saved

    def resume(self, folder: str | Path) -> bool:
        """Go on from the latest checkpoint in `folder`, if there is one; all ranks call this.

        The next pass over a loader that stood within one yields the rest of it, and
        `loader.epoch` says how many passes have ended.

        Returns:
            Whether there was one; the first rank prints which.

        Raises:
            CheckpointError: it is damaged, or of another model, optimizer or script.
            ScriptError: the folder is none.
        """
        model, step = self._prepared("resume")
        found = checkpoint.load(
            folder_of("resume", folder), model, self._optimizers, self._standing(), self._registered
        )
        self._registered.is_closed = True
        if found is None:
            self.print(f"no checkpoint in {folder} yet: begins anew")
            return False
        self._folders[Path(folder)] = Path(folder)
        where, stood = found
        step.steps_done, self._draws.state = stood.steps_done, stood.draws
        for loader, state in zip(self._loaders, stood.loaders, strict=True):
            loader.set_state(state)
        step.reset()
        self._tell_standing(Path(folder), where)
        self.print(f"goes on from {where}, after step {self.steps_done}")
        return True

    # Parts of the above.

    def _take_model(
        self, model: nn.Module, batch_norm: Statistics | None, roles: Mapping[str, str] | None
    ) -> None:
        if self._model is not None:
            again = "it again" if model is self._model else f"a {type(model).__name__} too"
            raise ScriptError(
                f"prepare: {type(self._model).__name__} is prepared already, and this prepares "
                f"{again}; call it once, with several models as parts of one nn.Module"
            )
        check_model(model, self.comm)
        self._before = {p: name for name, p in model.named_parameters()}
        require_statistics(model, self.strategy, batch_norm)
        masks = Masks(self._seed, self._place)
        model.to(self.comm.device)
        plan = Plan(self.strategy, model, roles=roles, batch_norm=batch_norm, masks=masks)
        runner = plan.build(self.comm)
        self._step = UserStep(
            model,
            runner,
            self.comm,
            self.accumulation,
            self._reading,
            self._optimizers,
            self._name,
        )
        self._model = model
        guard_shards(model, str(self.strategy))
        self._step.draws = DrawWatch(self.comm, lambda: masks.num_tickets)
        name_draws(model, self._step.draws.stop)

    def _take(self, each: Any) -> Any:
        if isinstance(each, nn.Module) or each is None:
            return each
        if isinstance(each, torch.optim.Optimizer):
            model, step = self._prepared("prepare")
            if any(each is known for known in self._optimizers):
                raise ScriptError(
                    f"prepare: this {type(each).__name__} is prepared already; give it once"
                )
            rebind(each, self._before, model)
            guard(each, step)
            self._optimizers.append(each)
            return each
        if isinstance(each, DataLoader):
            self._loaders.append(RankLoader(each, self.comm, self._draws, self._note))
            return self._loaders[-1]
        if all(hasattr(each, name) for name in ("step", "state_dict", "load_state_dict")):
            self._schedulers.append(each)
            return each
        raise ScriptError(
            f"prepare: cannot prepare a {type(each).__name__}; expected an nn.Module, optimizers, "
            "schedulers and DataLoaders"
        )

    def _add_up(self, call: str, numbers: list[Tensor]) -> Tensor:
        """Return the sums of numbers over the data ranks, in one shape; every rank calls this."""
        own = torch.stack(torch.broadcast_tensors(*numbers))
        shape = tuple(own.shape[1:])
        form = zlib.crc32(repr(shape).encode())
        # A rank without rows may have the integer 0 where others have a number.
        asks = [own.is_floating_point(), self._is_check_due(), form, -form]
        asks = self.comm.all_reduce(torch.tensor(asks, device=own.device), "job", "max")
        is_float, is_due, largest, smallest = asks.tolist()
        if largest != -smallest:
            shapes = gather_objects(shape)
            odd = next(rank for rank, each in enumerate(shapes) if each != shapes[0])
            raise ScriptError(
                f"{call}: the numbers have the shape {shapes[odd]} on rank {odd} and {shapes[0]} "
                "on rank 0; give numbers of one shape on every rank"
            )
        total = own.to(torch.float64 if is_float else torch.int64)  # stack has copied them
        total = self.comm.all_reduce(total, "data")
        if is_due:
            self._check_replicas(call)
        return total

    def _is_check_due(self) -> bool:
        """Return whether the ranks are to be compared in an evaluation."""
        step = self._step
        return step is not None and self._reading.is_evaluation and not step.replicas.is_checked

    def _check_replicas(self, call: str) -> None:
        step = self._prepared(call)[1]
        step.replicas.check(call, step.steps_done)

    def _prepared(self, call: str) -> tuple[nn.Module, UserStep]:
        if self._model is None or self._step is None:
            raise ScriptError(
                f"{call}: no model is prepared; call model, optimizer, loader = "
                "run.prepare(model, optimizer, loader) first, with the model among them"
            )
        return self._model, self._step

    def _tell_standing(self, folder: Path, where: Path) -> None:
        """Have whoever ends the job say how to resume."""
        PULSE.saved(f"{where} stands; run.resume({str(folder)!r}) resumes from it")

    def _refuse_average(self, call: str) -> None:
        if any(average.is_applied for average in self._averages):
            raise ScriptError(
                f"{call}: within applied() of an average, where the model has averaged weights; "
                "call it outside"
            )

    def _announce(self) -> None:
        """Say once on standard error how the job is split, when a loader is prepared."""
        num_ranks = self.comm.size("job")
        if self._is_announced or num_ranks == 1 or not self._loaders:
            return
        self._is_announced = True
        plain = self._loaders[0].plain
        rows = ""
        if plain.batch_size is not None:
            most = -(-plain.batch_size // self.comm.size("data"))
            rows = f"; {most} of the {plain.batch_size} rows of a batch a rank"
        words = f"phalanx: {num_ranks} ranks, {self.strategy} on {self.device.type}{rows}"
        self.print(words, file=sys.stderr, flush=True)

    def _warn_of_schedules(self) -> None:
        """Say once that a checkpoint lacks a schedule that moves the rate of an optimizer."""
        saved = [*self._schedulers, *self._registered.objects]
        known = {id(getattr(each, "optimizer", None)) for each in saved}
        # Set by torch's schedulers on their optimizer; tests/script/test_mistakes.py pins it.
        left = [o for o in self._optimizers if hasattr(o, "_opt_called") and id(o) not in known]
        if left and self.is_first and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"save: a schedule moves the learning rate of {type(left[0]).__name__} and is not "
                "prepared, so no checkpoint has it; give it to run.prepare too",
                stacklevel=3,
            )

    def _saver(self, folder: Path) -> Saver:
        """Return the saver of a folder, whose lock this process has until it ends."""
        if folder not in self._savers:
            self._savers[folder] = Saver(folder)
        return self._savers[folder]

    def __deepcopy__(self, memo: Any) -> Run:
        return self  # a copy of the model, such as an average, belongs to the same run

    def _note(self, loader: RankLoader, batch: Any) -> None:
        self._reading.note(loader, batch)
        self._own_rows.note(loader)
        if self._step is not None and not self._reading.is_evaluation:
            self._step.draws.mark()

    def _place(self) -> Place | None:
        return self._reading.position(self.steps_done)

    def _standing(self) -> checkpoint.Standing:
        return checkpoint.Standing(
            strategy=str(self.strategy),
            steps_done=self.steps_done,
            draws=self._draws.state,
            loaders=[loader.state() for loader in self._loaders],
            schedulers=self._schedulers,
        )
