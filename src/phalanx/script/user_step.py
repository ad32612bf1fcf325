"""A step that a script drives: its calls of `run.backward`, and the optimizers' steps that follow.

    IDLE --backward--> ACCUMULATING --last backward--> WHOLE --first backward of the next step--+
      ^                     ^                                                                   |
      |                     +-------------------------------------------------------------------+
      +--- a backward that failed: its gradients are cleared

The last backward of a step is the one that completes `accumulation`, or that ends a pass over the
data. Optimizers step while the gradients are WHOLE, each of them once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Comm, local_shard
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.launch.attach import at_end
from phalanx.launch.heartbeat import PULSE
from phalanx.models.attention import to_device
from phalanx.parallel.accumulate import Runner
from phalanx.script.buffers import warn_of_buffers
from phalanx.script.draws import DrawWatch
from phalanx.script.drift import AHEAD, BATCHES, STEPS
from phalanx.script.hooks import WholeHooks
from phalanx.script.loss import check_sum
from phalanx.script.made_gradients import MadeGradients
from phalanx.script.mean_loss import MeanLoss
from phalanx.script.optimizer import warn_of_state
from phalanx.script.reading import Reading
from phalanx.script.replicas import Replicas


class State(enum.Enum):
    """Of which batches the gradients are."""

    IDLE = "of none: no backward has begun a step"
    ACCUMULATING = "of some microbatches of a step, and not added up over the ranks yet"
    WHOLE = "of a whole global batch"


class UserStep:
    """The step under way of a prepared model.

    Attributes:
        state: of which batches the gradients are.
        steps_done: steps that an optimizer has taken, those before a resume too.
        draws: notices what the loop draws within the step.
        replicas: compares what must be alike on all ranks.
        parameters: those that optimizers know, by name; FSDP2 has gathered ones in the model while
            a step is under way.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        comm: Comm,
        accumulation: int,
        reading: Reading,
        optimizers: Sequence[torch.optim.Optimizer],
        name: str,
    ) -> None:
        self.state = State.IDLE
        self.steps_done = 0
        self._model = model
        self._reducer = runner.reducer
        self._comm = comm
        self._accumulation = accumulation
        self._reading = reading
        self.parameters = dict(model.named_parameters())
        self._kept = _kept(self.parameters)
        self._held = _held(model)
        self._name = name
        self.draws = DrawWatch(comm, lambda: 0)
        self.replicas = Replicas(comm, self.parameters, optimizers)
        self._hooks = WholeHooks(self.parameters, comm)
        self._trained = [name for name, p in self.parameters.items() if p.requires_grad]
        self._totals = torch.zeros(2, dtype=torch.float64, device=comm.device)
        self._divisor = self._totals[1]
        self._num_begun = self._num_backwards = 0
        self._stepped: set[int] = set()
        self._made = MadeGradients()

    def backward(self, loss_sum: Tensor, count: float | Tensor | None) -> MeanLoss:
        """Add up the gradients of the global batch's loss, see `Run.backward`."""
        check_sum(loss_sum, count)
        is_pass_over = self._reading.is_pass_over()
        self.draws.look()
        if self.state is not State.ACCUMULATING:
            self._begin(loss_sum.detach())
        found = self._add_up(loss_sum.detach(), cast("float | Tensor", count))
        if self._num_backwards == 0:
            # Most steps have as many samples in each call, so that nothing is left to correct.
            self._divisor = _nonzero(found[1] * self._accumulation)
        self._num_backwards += 1
        is_last = is_pass_over or self._num_backwards == self._accumulation
        own = self._own_counts(cast("float | Tensor", count))
        if own and self.steps_done < 2:
            self._reading.warn_of_count(float(own[0]), float(found[1]), self._comm)
        reducer = self._reducer
        wide = torch.promote_types(loss_sum.dtype, torch.float32)
        try:
            if reducer is not None:
                reducer.before_backward(reducer.parameters if is_last else ())
            (loss_sum.to(wide) / self._divisor.to(wide)).backward()
        except BaseException as error:  # a script may catch it, and begin the step again
            self.reset()
            if reducer is not None and isinstance(error, Exception):
                reducer.abandon()
            self._clear()
            raise
        self._reading.use(is_last)
        if is_last:
            if reducer is not None:
                reducer.finish()
            self._end()
        self.draws.mark()
        mean, of_step = (each[0] / _nonzero(each[1]) for each in (found, self._totals))
        return MeanLoss.of(mean, of_step, found[1], own)

    def reset(self) -> None:
        """Forget the step under way; the next backward begins one."""
        self._num_backwards, self.state = 0, State.IDLE
        self._reading.forget()

    def gradients(self) -> list[Tensor]:
        """Return the gradients that there are."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def refuse_unused(self) -> None:
        """Refuse to save gradients, which no checkpoint keeps, and weights that no step reaches.

        Raises:
            ScriptError: there are gradients that no optimizer has used, or replaced parameters.
        """
        self._check_kept("save")
        is_unused = self.state is State.WHOLE and not self._stepped and self._is_finite()
        if self.state is State.ACCUMULATING or is_unused:
            raise ScriptError(
                "save: between run.backward and optimizer.step(), whose gradients no checkpoint "
                "keeps, while their batches count as taken; save after the step"
            )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step whose gradients are not those of the global batch."""
        if self.state is State.ACCUMULATING:
            raise ScriptError(
                f"optimizer.step() after {self._num_backwards} of {self._accumulation} calls of "
                "run.backward: the gradients are not added up over the ranks yet; step when all "
                f"are made, or say accumulation={self._num_backwards} to phalanx.init"
            )
        is_whole = self.state is State.WHOLE
        self.draws.look()
        if is_whole and id(optimizer) not in self._stepped:
            self.replicas.gradient_writes += self._made.num_changed(self.gradients())
            if not self.gradients():
                raise ScriptError(
                    "optimizer.step() without a gradient: zero_grad() came between run.backward "
                    "and the step; call it after the step, or before run.backward"
                )
            return
        if is_whole or not self.gradients():
            raise ScriptError(
                "optimizer.step() without a run.backward since its last step; call "
                "run.backward(loss_sum, count) before it"
            )
        raise ScriptError(
            "optimizer.step() with gradients of this rank alone: loss.backward() was called, which "
            "adds nothing up over the ranks; call run.backward(loss_sum, count) in its place"
        )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the step."""
        self.steps_done += not self._stepped
        self._stepped.add(id(optimizer))
        if self.steps_done == 1:  # and not at the first save, which may come hours later
            warn_of_state(optimizer)
        PULSE.stepping(self.steps_done)
        self.replicas.note_step()
        at_end(self._name, self._check_end)
        if self._reducer is not None:
            self._reducer.after_step()

    def _begin(self, loss: Tensor) -> None:
        """Clear what the step before has left, and see that all is as it was prepared."""
        self._reading.check_stream(self.replicas.judge())
        if self.steps_done < 2 and self._reading.trained is None:
            self._check_own_batches(float(loss))
        self._check_kept("backward")
        self._hooks.take(self._accumulation)
        self._num_begun += 1
        if self._num_begun == 2:  # and not by the steps, of which a rank may have taken another
            warn_of_buffers(self._model, self._comm)
            self._reading.warn_of_others(self._comm)
        self._check_gradients()
        self._clear()
        self._totals = torch.zeros_like(self._totals)
        self.state = State.ACCUMULATING
        self._stepped.clear()
        at_end(self._name, self._check_end)
        PULSE.stepping(self.steps_done)

    def _check_end(self, where: str) -> None:
        self.replicas.check_end(where, self._name, self.steps_done)

    def _add_up(self, loss: Tensor, count: float | Tensor) -> Tensor:
        """Return the loss and count of this microbatch, summed over the ranks."""
        reading = self._reading
        num_ahead = reading.num_ahead if self._accumulation > 1 else 0
        counts = {STEPS: self.steps_done, BATCHES: reading.num_batches, AHEAD: num_ahead}
        words = self.replicas.words(counts, reading.seen)
        found = torch.cat([torch.zeros_like(self._totals), words])
        found[1] = to_device(count, found.device) if isinstance(count, Tensor) else count
        # The mean over no row, times 0 rows, is not a number.
        found[0] = torch.where(found[1] > 0, loss.double(), 0.0)
        self._comm.all_reduce(found, "data")
        self._totals += found[:2]
        self.replicas.take(found[2:])
        return found[:2]

    def _own_counts(self, count: float | Tensor) -> tuple[float | Tensor, ...]:
        """Return what a script may take for the count of all ranks, and is not."""
        if self._comm.size("data") == 1:
            return ()
        batch = self._reading.current
        return (count,) if batch is None else (count, len(batch.rows))

    def _end(self) -> None:
        """Scale the gradients by what was not known when backward began."""
        if self._accumulation > 1:
            factor = self._divisor / _nonzero(self._totals[1])
            for gradient in self.gradients():
                local_shard(gradient).mul_(factor)
        self._hooks.call()
        self._num_backwards, self.state = 0, State.WHOLE
        self._made.note(self.gradients())

    def _is_finite(self) -> bool:
        """Return whether there are gradients, all finite; else a scaler has left the step out."""
        gradients = [local_shard(gradient) for gradient in self.gradients()]
        sums = [gradient.sum(dtype=torch.float64).isfinite() for gradient in gradients]
        numbers = [len(sums), len(sums) - sum(map(bool, sums))]
        if any(isinstance(gradient, DTensor) for gradient in self.gradients()):
            found = torch.tensor(numbers, device=self._comm.device)
            numbers = self._comm.all_reduce(found, "job", "max").tolist()
        num_gradients, num_odd = numbers
        return num_gradients > 0 and num_odd == 0

    def _clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _check_kept(self, call: str) -> None:
        """Refuse parameters that are not as they were prepared."""
        now = _kept(dict(self._model.named_parameters()))
        if now != self._kept:
            name = next(name for name in now | self._kept if now.get(name) != self._kept.get(name))
            was, is_now = (kept.get(name, "not in the model") for kept in (self._kept, now))
            raise ScriptError(
                f"{call}: {name} was {was} when the model was prepared, and is {is_now}; move, "
                "cast or extend the model before run.prepare"
            )
        held = _held(self._model)
        if name := next((name for name in held if held[name] is not self._held[name]), None):
            raise ScriptError(
                f"{call}: {name} was replaced after run.prepare by a tensor that the optimizers "
                "and the other ranks do not have; replace parameters and modules before "
                "run.prepare, or write into the prepared ones (run.load_state_dict, or copy_ "
                "under torch.no_grad)"
            )
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        if self._trained != list(trained):
            if self._reducer is not None and not self._reducer.retrain(list(trained.values())):
                name = next(n for n in self.parameters if (n in self._trained) != (n in trained))
                was, is_now = ("trained", "frozen")[:: 1 if name in self._trained else -1]
                raise ScriptError(
                    f"{call}: {name} was {was} when the model was prepared, and is {is_now}, "
                    "which shards do not follow; freeze for good before run.prepare, and for a "
                    "while not at all: gradients that no optimizer steps change nothing; or use dp"
                )
            self._trained = list(trained)

    def _check_gradients(self) -> None:
        """Refuse to clear gradients that no step has used."""
        left = self.gradients()
        if self._stepped:
            left = self._made.others(left)
        elif left and self.state is State.WHOLE and not self._is_finite():
            return
        if any(bool(local_shard(gradient).any()) for gradient in left):
            raise ScriptError(
                "backward: there are gradients already that no optimizer.step() has used, of "
                "another run.backward or of loss.backward(); say accumulation=N to phalanx.init "
                "for N calls a step, add losses up before one call, or call zero_grad() to leave "
                "them out"
            )

    def _check_own_batches(self, loss: float) -> None:
        """Refuse batches of no prepared loader that are the same on all ranks."""
        losses = gather_objects(loss)
        if self._comm.size("data") == 1 or len({repr(each) for each in losses}) > 1:
            return
        if self.steps_done:  # the first may be alike: an output that begins with zeros
            raise ScriptError(
                f"backward: the loss is {loss:g} on every rank, to the last bit, so each has the "
                "same samples; give the DataLoader to run.prepare, which deals them out"
            )


def _nonzero(total: Tensor) -> Tensor:
    """Return a divisor: 1 where there is nothing to divide."""
    return torch.where(total > 0, total, 1.0)


def _kept(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return in words what must not change of each parameter once the model is prepared."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}"
        for name, p in parameters.items()
    }


def _held(model: nn.Module) -> dict[str, object]:
    """Return by name what must stay the same object: each parameter, or the module that has it.

    FSDP2 puts gathered parameters into its modules, and refuses others there.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return dict(model.named_parameters())
    return {
        f"{prefix}.{name}".lstrip("."): module
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
