"""The run that `phalanx.init` returns: a training loop of one's own, on many ranks.

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

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.comm import Ranks
from phalanx.parallel.batch_norm import Statistics
from phalanx.script.checks import check_arguments
from phalanx.script.draws import draw_rows
from phalanx.script.gather import own_number
from phalanx.script.mean_loss import MeanLoss
from phalanx.script.prepare import Prepared
from phalanx.script.saves import Saves
from phalanx.script.step_state import State
from phalanx.script.weight_average import WeightAverage
from phalanx.script.whole_weights import load_whole, whole_state
from phalanx.strategy import Strategy


class Run:
    """A training loop's part in a job: the model that is split, and the step under way.

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
        self._prepared = Prepared(comm, strategy, accumulation, seed, name)
        self._saves = Saves(self._prepared, str(strategy), self.print)
        # What torch.save has of a loss is a float by name, which torch.load else does not know.
        torch.serialization.add_safe_globals([float])

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        self._prepared.own_rows.warn()
        return self.comm.is_first

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self.comm.device

    @property
    def steps_done(self) -> int:
        """Steps that an optimizer has taken, those before `resume` too."""
        return self._prepared.steps_done

    @property
    def is_step_end(self) -> bool:
        """Whether the gradients are of a whole step, so that optimizers may step."""
        return self._prepared.state is State.WHOLE

    @property
    def should_stop(self) -> bool:
        """Whether a signal asks the job to end: save, and leave the loop; all ranks read this.

        A script that reads it ends by itself after SIGTERM, SIGHUP or Ctrl-C, with the signal's
        exit code; a second signal ends it at once. Within a step, where nothing can be saved, no
        script is asked to stop.
        """
        return self._prepared.should_stop()

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
        this rank's rows of each batch there. Returns the objects in their order; one by itself.

        Args:
            *objects: one nn.Module, any number of optimizers, schedulers and DataLoaders, and None.
            batch_norm: over what BatchNorm takes its mean and variance in training: "global", the
                rows of all ranks, as one process does, or "local", each rank's own. A model that
                has a BatchNorm must say.
            roles: patterns of module names to roles for tp, see docs/strategies.md.

        Raises:
            ScriptError: an object is none of those, or was prepared, or is of another model.
            ConfigError: the strategy does not split the model, or a loader's batches.
        """
        prepared = self._prepared.take(objects, batch_norm, roles)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def backward(self, loss_sum: Tensor, count: float | Tensor | None = None) -> MeanLoss:
        """Add up the gradients of the global batch's loss; every rank calls this together.

        After the last call of a step each `.grad` is the gradient of the mean over the global
        batch, or this rank's shard of it. The first call of a step clears the gradients.

        Args:
            loss_sum: sum of the losses of this rank's samples, a number with its graph; 0-d.
            count: samples (or tokens) of this rank that it is a sum over; it has to be given.

        Returns:
            The mean loss of this call over all ranks, 0-d, float64, without a graph; of its
            `count` samples (or tokens). Its `of_step` is the mean over the step so far.

        Raises:
            ScriptError: the loss is a mean or has no graph, or the model has been changed.
        """
        step = self._prepared.trained_step()
        loss = step.backward(loss_sum, count)
        loss.on_count = self._prepared.own_rows.add_up
        return loss

    def clip(self, max_norm: float, p: float = 2.0) -> Tensor:
        """Scale the gradients so that their p-norm is at most `max_norm`; all ranks call this.

        Call it between the last `backward` of a step and `optimizer.step()`. It returns the norm
        of the whole gradient before, each element counted once; 0-d, float64.

        Raises:
            PhalanxError: the gradients are not whole, or an argument is no number above 0.
        """
        check_arguments("clip", max_norm=max_norm, p=p)
        return self._prepared.need("clip")[1].clip(max_norm, p)

    def sum(self, value: float | Tensor) -> Tensor:
        """Return the sum of `value` over the ranks that have different samples; all call this.

        It is float64, or int64 where all ranks give whole numbers or truth values.

        Raises:
            ScriptError: as `mean`.
        """
        return self._prepared.add_up("sum", own_number("sum", value, self.comm))[0]

    def mean(self, value_sum: float | Tensor, count: float | Tensor) -> Tensor:
        """Return sum over the ranks / count over the ranks; every rank calls this together.

        It has the shape of `value_sum`, in float64, and is NaN where no rank has a sample.

        Args:
            value_sum: sum of a quantity over the samples of this rank; of any shape.
            count: these samples, or for each number of `value_sum` its own.

        Raises:
            ScriptError: one is no number, or of all ranks already, or of unlike shapes on ranks.
        """
        own = [own_number("mean", each, self.comm).double() for each in (value_sum, count)]
        total, counted = self._prepared.add_up("mean", *own)
        return total / counted

    def gather(self, batch: Any, *, grad: bool = False) -> Any:
        """Return the rows of all ranks, in the order of one process; all ranks call this.

        Args:
            batch: a tensor, or mappings, lists or tuples of tensors, with this rank's rows of a
                batch of a prepared loader first; their numbers may differ between ranks.
            grad: whether gradients flow back to the rank that each row came from, for a loss over
                the rows of the whole batch, such as a contrastive one. The result is then on the
                device of each tensor, else on the CPU.

        Raises:
            ScriptError: a tensor has no rows, or others than the batch.
        """
        return self._prepared.gather(batch, grad)

    def draw(self, make: Callable[[int], Any]) -> Any:
        """Return this rank's rows, on `device`, of what one process draws; all ranks call this.

            noise = run.draw(lambda rows: torch.randn(rows, 8))

        Args:
            make: draws on the CPU for a number of rows, all ranks' rows of the batch that was
                read last; a tensor, or mappings, lists or tuples of tensors. Every rank calls it,
                with torch's own generator as it is on one process.

        Raises:
            ScriptError: no batch has been read, or a tensor has other rows than the batch.
        """
        return draw_rows(make, self._prepared.generator, self._prepared.reading.last, self.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights and buffers of the plain model on the CPU; all ranks call this.

        Every rank gets them, and the first may `torch.save` them. Call it between steps.

        Raises:
            ScriptError: no model is prepared, or replicas differ.
        """
        model = self._prepared.need("state_dict")[0]
        self._prepared.check_replicas("state_dict")
        return whole_state(model)

    def load_state_dict(self, state: Mapping[str, Any] | str | Path | None) -> None:
        """Give the model whole weights and buffers; every rank calls this together.

        Args:
            state: what `state_dict`, or the plain model's, has returned; the first rank's is
                taken on all. Or the folder of a checkpoint, or of a run, whose latest is read.

        Raises:
            ScriptError: the weights are not of this model.
            CheckpointError: there is no such checkpoint, or it is of another model.
        """
        load_whole(self._prepared.need("load_state_dict")[0], state, self.comm)

    def average(self, decay: float | None = 0.999, *, name: str = "average") -> WeightAverage:
        """Return an average of the weights, which `save` and `resume` know under `name`.

        Args:
            decay: of an exponential average (EMA); None for the mean of all updates (SWA).
            name: as in `register`.

        Raises:
            PhalanxError: no model is prepared, the decay is none from 0 up to 1, or as `register`.
        """
        average = self._prepared.average(decay)
        self.register(name, average)
        return average

    def register(self, name: str, each: Any) -> None:
        """Have `save` and `resume` know an object, with `state_dict` and `load_state_dict`.

        Its state is mappings and lists of numbers, text and tensors, alike on all ranks.

        Raises:
            ScriptError: the name is taken, no file holds the state, or `resume` came before.
        """
        self._saves.registered.add(name, each)

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Save a checkpoint that any strategy on any number of ranks resumes; all call this.

        It has weights, optimizers, schedulers, the positions of the loaders, and the registered
        objects, and is whole in `folder`/checkpoints/step-N on return. The latest `keep` stay, all
        if None. Where `folder` has checkpoints of another run, it goes to `folder`-2.

        Raises:
            CheckpointError: it cannot be written, or holds the weights alone.
            PhalanxError: it is called within a step, or an argument is out of range.
        """
        return self._saves.save(folder, keep)

    def resume(self, folder: str | Path) -> bool:
        """Resume the latest checkpoint in `folder`; all ranks call this. False if there is none.

        Call it after `prepare` and `register`, before the first batch. A loader that stood within
        a pass yields the rest of it next; its `epoch` counts the passes that have ended.

        Raises:
            CheckpointError: it is damaged, or of another model, optimizer or script.
            ScriptError: the folder is a file or no path, or no model is prepared.
        """
        return self._saves.resume(folder)

    def __deepcopy__(self, memo: Any) -> Run:
        return self  # a copy of the model, such as an average, belongs to the same run
