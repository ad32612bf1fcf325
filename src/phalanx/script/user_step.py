"""A step of a user's loop: its calls of `run.backward`, and the optimizer steps that follow.

The last backward of a step is the call that completes `accumulation`, or uses the last batch of a
pass over the data. Module `step_state` defines the states of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from phalanx.comm.comm import Comm, local_shard
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.launch.attach import at_end
from phalanx.launch.heartbeat import PULSE
from phalanx.models.attention import to_device
from phalanx.parallel.accumulate import Runner
from phalanx.script.as_prepared import PreparedModelCheck, RecordedGradients, warn_of_buffers
from phalanx.script.draws import DrawWatch
from phalanx.script.drift import AHEAD, BATCHES, STEPS
from phalanx.script.hooks import ReducedGradientHooks
from phalanx.script.loss import check_sum
from phalanx.script.mean_loss import MeanLoss
from phalanx.script.optimizer import warn_of_state
from phalanx.script.reading import BatchTracker
from phalanx.script.replicas import Replicas
from phalanx.script.step_state import State, StepState
from phalanx.train.clip import gradient_norm, scale_to


class UserStep(StepState):
    """The current step of a prepared model.

    Attributes:
        draw_watch: detects draws of the loop from torch's generators within the step.
        replicas: compares the state that must be equal on all ranks.
        parameters: parameters that optimizers update, by name; during a step, modules of FSDP2
            have gathered parameters instead.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        comm: Comm,
        accumulation: int,
        reading: BatchTracker,
        optimizers: Sequence[torch.optim.Optimizer],
        name: str,
    ) -> None:
        super().__init__(accumulation)
        self._model = model
        self._reducer = runner.reducer
        self._comm = comm
        self._reading = reading
        self.parameters = dict(model.named_parameters())
        self._as_prepared = PreparedModelCheck(model, self.parameters, self._reducer)
        self._name = name
        self.draw_watch = DrawWatch(comm, lambda: 0)
        self.replicas = Replicas(comm, self.parameters, optimizers)
        self._hooks = ReducedGradientHooks(self.parameters, comm)
        self._totals = torch.zeros(2, dtype=torch.float64, device=comm.device)
        self._divisor = self._totals[1]
        self._num_begun = 0
        self._are_batches_compared = False
        self._has_unused = self._is_skipped = False
        self._made = RecordedGradients()

    def backward(self, loss_sum: Tensor, count: float | Tensor | None) -> MeanLoss:
        """Compute and reduce the gradients of the global batch's loss, see `Run.backward`."""
        check_sum(loss_sum, count)
        is_pass_over = self._reading.is_pass_over()
        self.draw_watch.look()
        if self.state is not State.ACCUMULATING:
            self._begin(loss_sum.detach())
        found = self._add_up(loss_sum.detach(), cast("float | Tensor", count))
        if self.num_backwards == 0:
            # In most steps each call has the same count, and `_end` has nothing to correct.
            self._divisor = _nonzero(found[1] * self._accumulation)
        self.num_backwards += 1
        is_last = is_pass_over or self.is_full
        own = self._own_counts(cast("float | Tensor", count))
        if own and self.steps_done < 2:
            self._reading.warn_of_count(float(own[0]), float(found[1]), self._comm)
        reducer = self._reducer
        wide = torch.promote_types(loss_sum.dtype, torch.float32)
        try:
            if reducer is not None:
                reducer.before_backward(reducer.parameters if is_last else ())
            (loss_sum.to(wide) / self._divisor.to(wide)).backward()
        except BaseException:  # a script may catch it, and repeat the step
            self.reset()
            if reducer is not None:
                reducer.reset_step()
            self._clear()
            raise
        self._reading.use(is_last)
        if is_last:
            if reducer is not None:
                reducer.finish()
            self._end()
        self.draw_watch.mark()
        mean, of_step = (each[0] / _nonzero(each[1]) for each in (found, self._totals))
        return MeanLoss.of(mean, of_step, found[1], own)

    @override
    def reset(self) -> None:
        """Abandon the current step; the next backward starts a new step."""
        super().reset()
        self._reading.forget()

    def gradients(self) -> list[Tensor]:
        """Return the gradients that are not None."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def clip(self, max_norm: float, p: float) -> Tensor:
        """Scale the gradients to a norm, see `Run.clip`."""
        self.refuse_clip()
        gradients = self.gradients()
        norm = gradient_norm(gradients, self._comm, p)
        self.replicas.count_clip(max_norm, p)
        if (value := float(norm)) > max_norm:
            scale_to(gradients, value, max_norm)
        return norm

    def refuse_unused(self) -> None:
        """Refuse a save with unused gradients, or with parameters replaced after `prepare`."""
        self._as_prepared.check("save")
        is_open = self.state is State.REDUCED and not self.is_used
        self.refuse_save(is_skipped=is_open and not self._is_finite())

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Register hooks on an optimizer that check each of its steps."""

        def before(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if any(callable(each) for each in (*args[1:], *kwargs.values())):
                return  # a closure calls run.backward within the step
            if self.state is not State.ACCUMULATING:
                self.draw_watch.look()
            gradients = self.gradients()
            self.refuse_step(own, has_gradients=bool(gradients))
            self.replicas.gradient_writes += self._made.num_changed(gradients)

        def after(own: torch.optim.Optimizer, *_: Any) -> None:
            self._after_step(own)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the step, and prepare the checks that follow it."""
        self.note_step(optimizer)
        if self.steps_done == 1:  # now, because the first save may come hours later
            warn_of_state(optimizer)
        PULSE.stepping(self.steps_done)
        self.replicas.note_step()
        at_end(self._name, self._check_end)
        if self._reducer is not None:
            self._reducer.after_step()

    def _begin(self, loss: Tensor) -> None:
        """Start a step: make the checks between steps, and clear the old gradients."""
        self._reading.check_stream(self.replicas.check_last_step())
        if not self._are_batches_compared and self._reading.trained is None:
            self._check_own_batches(float(loss))
        self._as_prepared.check("backward")
        self._hooks.take(self._accumulation)
        self._num_begun += 1
        if self._num_begun == 2:  # not steps_done, which may differ between ranks
            warn_of_buffers(self._model, self._comm)
            self._reading.warn_of_others(self._comm)
        self._look_at_unused()
        self._clear()
        self._totals = torch.zeros_like(self._totals)
        self.begin()
        at_end(self._name, self._check_end)
        PULSE.stepping(self.steps_done)

    def _check_end(self, where: str) -> None:
        self.replicas.check_end(where, self._name, self.steps_done)

    def _add_up(self, loss: Tensor, count: float | Tensor) -> Tensor:
        """Return the loss and count of this microbatch, summed over the data ranks."""
        reading = self._reading
        num_ahead = reading.num_ahead if self._accumulation > 1 else 0
        counts = {STEPS: self.steps_done, BATCHES: reading.num_batches, AHEAD: num_ahead}
        words = self.replicas.words(counts, reading.seen)
        found = torch.cat([words.new_zeros(3), words])
        found[1] = to_device(count, found.device) if isinstance(count, Tensor) else count
        # A mean over 0 rows, times 0 rows, is NaN.
        found[0] = torch.where(found[1] > 0, loss.double(), 0.0)
        if self._is_skipped:
            found[2] = 1.0
        self._comm.all_reduce(found, "data")
        self._comm.all_reduce(found[2:], "tp")
        self._totals += found[:2]
        self.replicas.store_sums(found[3:])
        self._refuse_unused(found[2])
        return found[:2]

    def _own_counts(self, count: float | Tensor) -> tuple[float | Tensor, ...]:
        """Return this rank's counts that a script may mistake for the count of all ranks."""
        if self._comm.size("data") == 1:
            return ()
        batch = self._reading.current
        return (count,) if batch is None else (count, len(batch.rows))

    def _end(self) -> None:
        """Rescale the gradients to the step's total count, and call the script's hooks."""
        if self._accumulation > 1:
            factor = self._divisor / _nonzero(self._totals[1])
            for gradient in self.gradients():
                local_shard(gradient).mul_(factor)
        self._hooks.call()
        self.complete()
        self._made.note(self.gradients())

    def _is_finite(self) -> bool:
        """Return whether there are gradients and all are finite; else a GradScaler skips."""
        gradients = self.gradients()
        numbers = [len(gradients), not _are_finite(gradients)]
        if any(isinstance(gradient, DTensor) for gradient in gradients):
            found = torch.tensor(numbers, device=self._comm.device)
            numbers = self._comm.all_reduce(found, "job", "max").tolist()
        num_gradients, is_odd = numbers
        return num_gradients > 0 and not is_odd

    def _clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _look_at_unused(self) -> None:
        """Look for gradients that no optimizer step has used, before they are cleared.

        A GradScaler skips a step on all ranks if a gradient of any rank is not finite. So whether
        this is a mistake shows after the next sum over the ranks: only a rank whose optimizer has
        not stepped looks here, and a collective would lack the others.
        """
        left = self.gradients()
        if self.is_used:
            left = self._made.unrecorded(left)
        is_open = self.state is State.REDUCED and not self.is_used
        self._is_skipped = is_open and not _are_finite(left)
        self._has_unused = any(bool(local_shard(gradient).any()) for gradient in left)

    def _refuse_unused(self, num_skipped: Tensor) -> None:
        """Refuse unused gradients of this rank, unless `num_skipped` ranks have non-finite ones."""
        has_unused, self._has_unused, self._is_skipped = self._has_unused, False, False
        if has_unused and not num_skipped:
            self.reset()
            raise ScriptError(
                "backward: there are gradients from an earlier run.backward or loss.backward() "
                "that no optimizer.step() has used; give accumulation=N to phalanx.init for N "
                "calls a step, sum the losses before one call, or call zero_grad() to discard the "
                "gradients"
            )

    def _check_own_batches(self, loss: float) -> None:
        """Refuse equal losses on all ranks if no prepared loader is read: batches are equal.

        The first losses may be equal, if initial outputs are zeros, so the losses after the first
        step decide. A rank may have skipped that step.
        """
        losses, steps = zip(*gather_objects((repr(loss), self.steps_done)), strict=True)
        self._are_batches_compared = max(steps) > 0
        if max(steps) == 1 and self._comm.size("data") > 1 and len({*losses}) == 1:
            raise ScriptError(
                f"backward: the loss is {loss:g} on every rank, to the last bit, so all ranks have "
                "the same samples; give the DataLoader to run.prepare, which splits the batches "
                "over the ranks"
            )


def _are_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether the shards of this rank are finite."""
    sums = [local_shard(gradient).sum(dtype=torch.float64) for gradient in gradients]
    return all(bool(each.isfinite()) for each in sums)


def _nonzero(total: Tensor) -> Tensor:
    """Return `total` as a divisor: 1 if it is 0."""
    return torch.where(total > 0, total, 1.0)
