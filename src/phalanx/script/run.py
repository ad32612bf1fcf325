"""The run that `phalanx.init` returns: a user's own training loop on many ranks.

    run = phalanx.init()                                   join the job, or run on one process
    model, optimizer, loader = run.prepare(...)            split the model and the batches
    for inputs, labels in loader:                          this rank's rows of the global batch
        outputs, labels = run.gather(model(inputs), labels)      the rows of all ranks
        loss = cross_entropy(outputs, labels)              the loss of the whole batch, as it stood
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

Every rank computes the loss of the whole batch from the gathered rows, so a loss of any form has
the gradient that it has on one process. Gradients are averages over the ranks, so a penalty on
parameters counts once. When the last `backward` of a step returns, the gradients are reduced, so
code that reads them (clipping, a scheduler, any optimizer) needs no change. A loss of outputs that
are too large to gather is named: `backward(mean_of_rows=loss, count=len(labels))`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from phalanx.comm.comm import Ranks
from phalanx.comm.together import broadcast_object
from phalanx.config.profile_options import ProfileOptions
from phalanx.errors import ScriptError
from phalanx.launch.attach import at_end
from phalanx.launch.heartbeat import PULSE
from phalanx.parallel.batch_norm import Statistics
from phalanx.script.checks import check_arguments
from phalanx.script.draws import draw_rows
from phalanx.script.gather import add_up, own_number
from phalanx.script.loop_step import JobSettings, State
from phalanx.script.loss import loss_of_call
from phalanx.script.prepare import Prepared
from phalanx.script.saves import Saves
from phalanx.script.weight_average import WeightAverage
from phalanx.script.whole_weights import load_whole, whole_state
from phalanx.strategy import Strategy
from phalanx.train.job.run_folder import new_folder

PROFILE: Final = "PHALANX_PROFILE"
"""Environment variable by which `phalanx run --profile` passes its options to the script."""


class Run:
    """Distributed training for a user's own loop: split model, gradients, sums and checkpoints.

    Attributes:
        comm: process groups of the job.
        strategy: parallelism strategy.
        accumulation: calls of `backward` per optimizer step.
    """

    # Set by `loop_proof`: whether this process only checks the ranks of a job, and a function that
    # `save` and `state_dict` call, which returns whether `save` writes a checkpoint.
    _is_mute = False
    _may_save: Callable[[], bool] = staticmethod(lambda: True)

    def __init__(
        self,
        comm: Ranks,
        strategy: Strategy,
        accumulation: int,
        seed: int,
        name: str,
        nonfinite: Literal["stop", "skip"] = "stop",
        memory_every: int | None = None,
    ) -> None:
        self.comm = comm
        self.strategy = strategy
        self.accumulation = accumulation
        self._is_profiled = False  # by the command line
        plain = (accumulation, seed, name, nonfinite, memory_every)
        self._prepared = Prepared(JobSettings(comm, strategy, *plain))
        self._saves = Saves(self._prepared, str(strategy), self.print)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the job, which prints and writes for all ranks."""
        return self.comm.is_first and not self._is_mute

    @property
    def rank(self) -> int:
        """Number of this rank in the job, from 0."""
        return self.comm.coord("job")

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        return self.comm.size("job")

    @property
    def device(self) -> torch.device:
        """Device that this rank computes on."""
        return self.comm.device

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps taken, including the steps before `resume`."""
        return self._prepared.steps_done

    @property
    def is_step_end(self) -> bool:
        """Whether the gradients of the step are complete, so that optimizers may step."""
        step = self._prepared.step
        return step is not None and step.state is State.REDUCED

    @property
    def loss_of_step(self) -> Tensor:
        """The loss of the step so far, over all its calls of `backward`; 0-d, without a graph."""
        return self._prepared.require_model("loss_of_step")[1].loss_of_step

    @property
    def should_stop(self) -> bool:
        """Whether a signal asks the job to stop; all ranks must read this together.

        If it is True, save and leave the loop. A script that reads it is not killed by SIGTERM,
        SIGHUP or Ctrl-C, and exits with the signal's exit code; a second signal ends it at once.
        It is False between the backwards of a step, where nothing can be saved.
        """
        PULSE.heed()
        step = self._prepared.step
        is_within = step is not None and step.state is State.ACCUMULATING
        own = torch.tensor(0 if is_within else PULSE.stop_signal, device=self.device)
        stop = int(self.comm.all_reduce(own, "job", "max"))
        PULSE.handled_signal = stop or PULSE.handled_signal
        return stop > 0

    def print(
        self, *values: object, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = True
    ) -> None:
        """Print on the first rank only."""
        if self.is_first:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def prepare(
        self,
        *objects: Any,
        batch_norm: Statistics | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> Any:
        """Split a model, and fit optimizers, schedulers and loaders to it; all ranks call this.

        The model is split in place and moved to this rank's device. Optimizers keep their groups,
        settings and schedulers, and update this rank's shards. A DataLoader is replaced by one that
        yields this rank's rows of each batch on this device. Returns the objects in the given
        order, or a single object by itself.

        Args:
            *objects: one nn.Module, any number of optimizers, schedulers and DataLoaders, and None.
            batch_norm: rows over which BatchNorm computes mean and variance in training: "global",
                the rows of all ranks, as on one process, or "local", this rank's rows. Required if
                the model has a BatchNorm.
            roles: patterns of module names -> roles for tp, see docs/strategies.md.

        Raises:
            ScriptError: an object has an unsupported type, is prepared already, or belongs to
                another model.
            ConfigError: the strategy cannot split the model or a loader's batches.
        """
        prepared = self._prepared.take(objects, batch_norm, roles)
        if (asked := os.environ.get(PROFILE)) and self._prepared.step and not self._is_profiled:
            self._is_profiled, stack = True, ExitStack()
            options = dataclasses.asdict(ProfileOptions.parse(asked))
            stack.enter_context(self.profile(**options))
            at_end(f"profile of {self._prepared.job.name}", lambda _: stack.close())
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def backward(
        self,
        loss: Tensor | None = None,
        *former: Any,
        weights: Tensor | None = None,
        mean_of_rows: Tensor | None = None,
        sum_of_rows: Tensor | None = None,
        count: float | Tensor | None = None,
        retain_graph: bool = False,
    ) -> Tensor:
        """Add the gradients of the global batch's loss to each `.grad`; all ranks call this.

            run.backward(loss)                              of the whole batch, after run.gather
            run.backward(mean_of_rows=loss, count=len(y))   of this rank's rows, mean or sum
            run.backward(losses, weights=mask)              of this rank's rows, not reduced

        The sums of own rows are added up over the ranks, and divided by the sum of the counts.
        Calls of a step add up, as calls of `loss.backward()` do. After the last call of a step
        gradients are reduced; under fsdp a `.grad` is this rank's shard.

        Args:
            loss: loss of the whole batch, 0-d, equal on every rank; or the losses of this rank's
                rows or tokens, any shape.
            *former: refused; a loss and its count must be given by name.
            weights: weight of each of the losses, of their shape; 1 if None.
            mean_of_rows: mean loss of `count` rows or tokens of this rank; 0-d.
            sum_of_rows: sum of their losses; 0-d.
            count: what divides the sum on one process: the number of rows or tokens, or the sum of
                their weights; in an accumulated step it may be the number of the whole step.
            retain_graph: whether another backward uses the same graph.

        Returns:
            The loss of the whole batch, 0-d, without a graph.

        Raises:
            ScriptError: the loss is of another form, is no loss of the whole batch, or has no
                graph; a count is negative or not finite; or the model has been changed.
            TrainingError: the loss is not finite and `nonfinite` is "stop".
        """
        step = self._prepared.require_model("backward")[1]
        self._prepared.refuse_average("backward")
        if not self._prepared.optimizers:
            raise ScriptError(
                "backward: no optimizer is prepared, so an optimizer of the script may update "
                "parameters that are not split, and its steps would not be checked; give the "
                "optimizer to run.prepare too"
            )
        checked = loss_of_call(loss, former, weights, mean_of_rows, sum_of_rows, count)
        return step.add(checked, retain_graph)

    @contextmanager
    def profile(self, *, folder: str | Path | None = None, **options: int) -> Generator[None]:
        """Profile optimizer steps inside, by torch.profiler; all ranks enter and leave together.

            with run.profile(wait=1, warmup=1, active=2):  # the third and the fourth step
                for inputs, labels in loader: ...

        The run itself steps the profile. Each rank writes a trace below `folder`/trace, by default
        of a new folder in runs/. `options` are wait, warmup, active, repeat, record_shapes,
        profile_memory, with_stack and with_flops, see `ProfileOptions`.

        Raises:
            ScriptError: no model is prepared, or a profile is open already.
            ConfigError: there is no such option, or its value is not legal.
        """
        model, step = self._prepared.require_model("profile")
        text = ",".join(f"{name}={value}" for name, value in options.items())
        parsed = ProfileOptions.parse(text) if options else ProfileOptions()
        if step.profile is not None:
            raise ScriptError("profile: another profile of this run is open; close it first")
        if self._is_mute:  # a proof's process writes nothing
            yield
            return
        from phalanx.script.loop_profile import LoopProfile

        name = Path(sys.argv[0]).stem or "script"
        new = broadcast_object(Path(folder or new_folder(name, self.strategy)))
        self.print(f"phalanx: profiles steps into {new / 'trace'}", file=sys.stderr)
        with LoopProfile(new, self._prepared, parsed, model, step).observing(model):
            yield

    def clip(self, max_norm: float, p: float = 2.0) -> Tensor:
        """Scale the gradients so that their p-norm is at most `max_norm`; all ranks call this.

        Call it between the last `backward` of a step and `optimizer.step()`. It returns the norm
        of the whole gradient before scaling, each element counted once; 0-d, float64.

        Raises:
            PhalanxError: the step is not complete, or an argument is not a number above 0.
        """
        check_arguments("clip", max_norm=max_norm, p=p)
        return self._prepared.require_model("clip")[1].clip(max_norm, p)

    def sum(self, value: float | Tensor) -> Tensor:
        """Return the sum of `value` over the ranks with different samples; all ranks call this.

        It is float64, or int64 if all ranks give integers or bools. Raises errors as `mean` does.
        """
        return self._add_up("sum", own_number("sum", value, self.comm))[0]

    def mean(self, value_sum: float | Tensor, count: float | Tensor) -> Tensor:
        """Return sum over the ranks / count over the ranks; every rank calls this together.

        It has the shape of `value_sum`, in float64, and is NaN where no rank has a sample.

        Args:
            value_sum: sum of a quantity over the samples of this rank; any shape.
            count: number of these samples, or one number for each element of `value_sum`.

        Raises:
            ScriptError: an argument is not a number, has a graph, or has different shapes on
                different ranks.
        """
        own = [own_number("mean", each, self.comm).double() for each in (value_sum, count)]
        total, counted = self._add_up("mean", *own)
        return total / counted

    def _add_up(self, call: str, *numbers: Tensor) -> Tensor:
        total, is_due = add_up(call, numbers, self.comm, self._prepared.is_check_due)
        if is_due:
            self._prepared.check_replicas(call)
        return total

    def gather(
        self, *batch: Any, dim: int | None = None, pad: float | None = None, per_row: int = 1
    ) -> Any:
        """Return the rows of all ranks, in the order of one process; all ranks call this.

            out, y = run.gather(model(x), y)

        Gradients flow back to the rank that each row came from. Indices of rows within a batch
        must be drawn for the gathered rows: gathering does not renumber them.

        Args:
            *batch: tensors, or mappings, lists, tuples and dataclasses of them, such as an output
                of transformers. The dimension of the rows has the rows of a prepared loader's
                batch; their numbers may differ between ranks. Numbers, text and None pass through;
                other objects, such as key-value caches, become None.
            dim: dimension of the rows; the first if None.
            per_row: consecutive entries that belong to one row in tensors that have more entries
                than rows, such as logits of shape [rows x tokens, vocabulary].
            pad: value that fills shorter rows at their end, up to the longest of all ranks.

        Returns:
            The same structure with the rows of all ranks, on the device of its tensors.

        Raises:
            ScriptError: a tensor has no rows or not the batch's number of rows, or rows have
                different shapes.
        """
        return self._prepared.gather(batch[0] if len(batch) == 1 else batch, dim, pad, per_row)

    def draw(self, make: Callable[[int], Any], *, rows: int | None = None) -> Any:
        """Draw random numbers as one process does; return this rank's rows on `device`.

            noise = run.draw(lambda rows: torch.randn(rows, 8))  # all ranks call this

        Args:
            make: function of the global number of rows, which draws on the CPU and returns a
                tensor, or mappings, lists or tuples of tensors. Each rank calls it with torch's
                generator in the state that it has on one process.
            rows: global number of rows, for a loop that chooses its samples without a DataLoader;
                if None, the number in the last batch of a prepared loader.

        Raises:
            ScriptError: no batch has been read and `rows` is None, or a tensor has another number
                of rows.
        """
        reading = self._prepared.reading
        return draw_rows(make, self._prepared.generator, reading.last, self.comm, rows)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the unsharded weights and buffers of the model on the CPU; all ranks call this.

        Every rank gets them, and the first may `torch.save` them. Call it between steps.

        Raises:
            ScriptError: no model is prepared, or replicas differ.
        """
        self._may_save()
        model = self._prepared.require_model("state_dict")[0]
        self._prepared.check_replicas("state_dict")
        return whole_state(model)

    def load_state_dict(self, state: Mapping[str, Any] | str | Path | None) -> None:
        """Load unsharded weights and buffers into the model; every rank calls this together.

        Args:
            state: result of `state_dict`, or of the plain model's; all ranks use the first rank's.
                Or the folder of a checkpoint, or of a run, whose latest checkpoint is read.

        Raises:
            ScriptError: the weights are not of this model.
            CheckpointError: there is no such checkpoint, or it is from another model.
        """
        load_whole(self._prepared.require_model("load_state_dict")[0], state, self.comm)

    def average(
        self,
        decay: float | None = 0.999,
        *,
        warmup: bool = False,
        buffers: bool = False,
        name: str = "average",
    ) -> WeightAverage:
        """Return an average of the weights, which `save` and `resume` include under `name`.

        Args:
            decay: of an exponential average (EMA); None is the mean of all updates (SWA).
            warmup: whether the decay is at most (1 + t) / (10 + t) after t updates, so that the
                first weights soon count little.
            buffers: whether floating-point buffers are averaged too, such as statistics of
                BatchNorm; else the model keeps its current buffers.
            name: name in checkpoints.

        Raises:
            PhalanxError: no model is prepared, `decay` is not in [0, 1), or as for `register`.
        """
        model, step = self._prepared.require_model("average")
        average = WeightAverage(model, step.parameters, decay, warmup=warmup, buffers=buffers)
        self._prepared.averages.append(average)
        self.register(name, average)
        return average

    def register(self, name: str, each: Any) -> None:
        """Include an object with `state_dict` and `load_state_dict` in `save` and `resume`.

        Its state must be mappings and lists of numbers, text and tensors, equal on all ranks.

        Raises:
            ScriptError: the name is taken, the state cannot be stored, or `resume` was called.
        """
        self._saves.registered.add(name, each)

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Save a checkpoint that any strategy on any number of ranks can resume; all call this.

        It contains weights, optimizers, schedulers, the positions of the loaders, and registered
        objects, and is complete in `folder`/checkpoints/step-N on return. The latest `keep`
        checkpoints are kept, all if None. If `folder` has checkpoints of another run, this run
        saves to `folder`-2.

        Raises:
            CheckpointError: it cannot be written, or contains only the weights.
            PhalanxError: the call is within a step, or an argument is out of range.
        """
        return self._saves.save(folder, keep) if self._may_save() else Path(folder)

    def resume(self, folder: str | Path) -> bool:
        """Resume the latest checkpoint in `folder`, or return False; all ranks call this.

        Call it after `prepare` and `register`, before the first batch. A loader that was saved
        within a pass yields the rest of that pass next; its `epoch` is the number of ended passes.

        Raises:
            CheckpointError: it is damaged, or from another model, optimizer or script.
            ScriptError: the folder is a file or not a path, or no model is prepared.
        """
        return self._saves.resume(folder)

    def __deepcopy__(self, memo: Any) -> Run:
        return self  # a copy of the model, such as an average, belongs to the same run
