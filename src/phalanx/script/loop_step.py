"""A step of a user's loop: the batches that it reads, its calls of `run.backward`, and its end.

    IDLE --add--> ACCUMULATING --close--> REDUCED --add--> ACCUMULATING       of the next step
      ^                 |                    |
      +----- reset -----+--------------------+          after a failed backward, or a resume

    add    a call of run.backward: sums over the ranks, checks, backward of loss / divisor
    close  after the last call: gradients are reduced, hooks called, gradients of before added
    step   each optimizer may step once while the state is REDUCED

The last call completes `accumulation`, or uses the last batch of a pass over the data.

Law: a loss of own rows is divided by the sum of the counts over the data ranks, and gradients are
summed. A loss of the whole batch is equal on all ranks: each gather passes a rank the gradient of
its rows, so the sum over ranks is right. Parameters that such a loss reaches without a gather get
the whole gradient on each rank: then the loss is divided by the ranks, and gathers multiply by it.
"""

from __future__ import annotations

import enum
import gc
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Ranks, local_shard
from phalanx.data.rows import tensors_of
from phalanx.errors import ScriptError, TrainingError
from phalanx.launch.attach import at_end
from phalanx.launch.heartbeat import PULSE
from phalanx.parallel.accumulate import Runner
from phalanx.parallel.dropout import MaskPosition
from phalanx.script.gather import Gathers
from phalanx.script.guards import Guards
from phalanx.script.guards.loss import LossGuard, Sums
from phalanx.script.guards.model import ModelGuard, warn_of_buffers
from phalanx.script.guards.random_draws import DrawGuard
from phalanx.script.guards.replicas import (
    BATCHES,
    STEPS,
    STEPS_APART,
    AsyncHostCopy,
    Replicas,
    is_compared,
)
from phalanx.script.loader import RankLoader
from phalanx.script.loss import RowsLoss
from phalanx.script.optimizer import warn_of_state
from phalanx.strategy import Strategy
from phalanx.train.clip import gradient_norm, scale_to

if TYPE_CHECKING:
    from phalanx.script.loop_profile import LoopProfile

_REDUCED: Final = "is_reduced_by_phalanx"
"""Attribute of the gradients that a step has reduced, which loss.backward() does not set."""

_Hooks = dict[int, Callable[[Tensor], Tensor | None]]


class JobSettings(NamedTuple):
    """What `phalanx.init` has settled for the whole run, see there; `name` is of the run."""

    comm: Ranks
    strategy: Strategy
    accumulation: int
    seed: int
    name: str
    nonfinite: Literal["stop", "skip"]
    memory_every: int | None = None


class ReadBatch(NamedTuple):
    """A batch that the script has read with gradients enabled.

    Attributes:
        loader: loader that yielded the batch.
        number: number of its pass, from `RankLoader.num_begun`.
        is_last: whether it is the last batch of its pass.
        rows: see `RankLoader.rows`.
        calls: see `MaskPosition.calls`.
    """

    loader: RankLoader
    number: int
    is_last: bool
    rows: Tensor
    calls: dict[str, int]


class Reading:
    """The batches that a script has read off its prepared loaders: which of them a backward uses.

        read, backward, read, backward               1 may wait: a later batch replaces it
        read, read, read, backward, backward, ...    3 may wait: a step's batches are read together
        read, read, backward, read, backward, ...    2 may wait: one batch is read ahead

    A backward uses the oldest batch that waits. The first backwards show how many may wait; the
    oldest of more were left out by the script, as by `if is_bad(x): continue`. Reads and backwards
    are counted, so all ranks find the same batch. Before the first backward counts do not
    separate batches that were left out from batches that are read ahead: the script still has the
    tensors of the latter.

    Attributes:
        last: the loader of the last batch, of training or evaluation; None before the first.
        num_batches: batches read with gradients enabled.
        is_evaluation: whether the last batch was read with gradients disabled.
    """

    def __init__(self) -> None:
        self.last: RankLoader | None = None
        self.num_batches = 0
        self.is_evaluation = self._is_warned = False
        self._waiting: deque[ReadBatch] = deque()
        self._tensors: deque[list[weakref.ref[Tensor]]] = deque()  # of `_waiting`; see `_drop`
        self._most: int | None = None  # that may wait; None before the second backward or read
        self._used: ReadBatch | None = None
        self._step_start: ReadBatch | None = None
        self._unused: set[RankLoader] = set()

    def note(self, loader: RankLoader, batch: Any) -> None:
        """Record that `loader` has yielded `batch`."""
        self.last = loader
        self.is_evaluation = not torch.is_grad_enabled()
        if self.is_evaluation:  # an evaluation batch does not end a training pass
            return
        self._unused.add(loader)
        self.num_batches += 1
        num_first = len(self._waiting) + 1  # batches before the first backward, if it was the last
        tensors = tensors_of(batch) if self._used is None else ()
        if self._waiting:
            before = self._waiting[-1]
            if before.loader is not loader:
                if before.loader.batches_done:
                    return  # with alternating loaders, the first defines the end of a pass
                self._waiting.clear()  # they were a peek, or a validation
            elif before.number != loader.num_begun and not before.is_last:
                self._waiting.clear()  # they were a peek, or a pass that was left early
        if self._most is None and self._used is not None:
            self._most = num_first
        if self._used is None:
            while len(self._tensors) > len(self._waiting):  # a peek's
                self._tensors.popleft()
            self._tensors.append([weakref.ref(tensor) for tensor in tensors])
        self._waiting.append(ReadBatch(loader, loader.num_begun, loader.is_last, loader.rows, {}))
        while self._most is not None and len(self._waiting) > self._most:
            self._waiting.popleft()

    def _drop(self) -> None:
        """Before the first backward: drop the batches whose tensors nobody has, but the last."""
        if len(self._waiting) > 1 and self._tensors:
            gc.collect()  # else tensors in a cycle would live longer on some ranks
        while len(self._waiting) > 1 and self._tensors:
            if not self._tensors[0] or any(tensor() is not None for tensor in self._tensors[0]):
                return
            self._tensors.popleft()
            self._waiting.popleft()

    @property
    def current(self) -> ReadBatch | None:
        """ReadBatch of the current forward or backward: the oldest waiting, else the last used."""
        self._drop()
        return self._waiting[0] if self._waiting else self._used

    @property
    def waiting_rows(self) -> set[int]:
        """Numbers of rows of the batches that wait for a backward."""
        return {len(batch.rows) for batch in self._waiting}

    @property
    def seen(self) -> str:
        """Last digested batch of the training stream, see `RankLoader.stream_digest`."""
        return "" if self.current is None else self.current.loader.stream_digest

    def check_stream(self, is_same: bool) -> None:
        """Warn once if the ranks have seen different batches of a stream (not `is_same`)."""
        if self.current is not None and not (is_same or self._is_warned):
            self._is_warned = True
            self.current.loader.warn_of_streams()

    def is_pass_over(self) -> bool:
        """Return whether a backward that starts now uses the last batch of a pass.

        Raises:
            ScriptError: the batch belongs to a new pass, but the step started in the pass before.
        """
        batch, begun = self.current, self._step_start
        if batch is None or not self._waiting:
            return False
        if begun is not None and begun.loader is batch.loader and begun.number != batch.number:
            raise ScriptError(
                "a pass over the loader begins within a step: the previous pass ended after fewer "
                "calls of run.backward than accumulation, and its gradients would be added to the "
                "gradients of this pass; make the first loader of a zip the shortest, and break "
                "only where run.is_step_end"
            )
        return batch.is_last

    def use(self, *, is_step_end: bool) -> None:
        """Record that a backward has used the current batch."""
        for loader in self._unused:
            loader.is_used = loader.is_used or loader.batches_done > 0
        self._unused.clear()
        if self._most is None and self._used is not None:
            self._most = len(self._waiting) + 1
        self._used = self.current
        self._tensors.clear()
        if self._waiting:
            self._waiting.popleft()
        self._step_start = None if is_step_end else self._step_start or self._used

    def forget_step(self) -> None:
        """Record that the current step was abandoned."""
        self._step_start = None

    def position(self, steps_done: int) -> MaskPosition | None:
        """Return the mask position of the current forward; None if no prepared loader is read."""
        batch = self.current
        return None if batch is None else MaskPosition(steps_done, batch.rows, batch.calls)


class State(enum.Enum):
    """Which microbatches the current gradients include."""

    IDLE = "of none: no backward has begun a step"
    ACCUMULATING = "of some microbatches of a step, and not added up over the ranks yet"
    REDUCED = "of a whole global batch"


class LoopStep:
    """The current step of a prepared model.

    Attributes:
        state: which microbatches the current gradients include.
        steps_done: optimizer steps taken, including the steps before a resume.
        num_backwards: calls of `run.backward` in the current step; 0 unless it is ACCUMULATING.
        loss_of_step: the step's loss so far, over all its calls.
        parameters: parameters that optimizers update, by name; during a step, modules of FSDP2
            have gathered parameters instead.
        guards: observers of the step.
        profile: profile of the run; None while none is open.
    """

    def __init__(
        self,
        job: JobSettings,
        model: nn.Module,
        runner: Runner,
        gathers: Gathers,
        reading: Reading,
        optimizers: Sequence[torch.optim.Optimizer],
        num_tickets: Callable[[], int],
    ) -> None:
        """Begin in state IDLE; `num_tickets` is for `DrawGuard`."""
        comm, reducer = job.comm, runner.reducer
        self.state, self.steps_done, self.num_backwards = State.IDLE, 0, 0
        self.loss_of_step = torch.zeros((), dtype=torch.float64, device=comm.device)
        self.parameters = dict(model.named_parameters())
        self.guards = Guards(
            LossGuard(comm, model, gathers, reducer),
            ModelGuard(model, self.parameters, reducer),
            DrawGuard(comm, num_tickets),
            Replicas(comm, self.parameters, optimizers),
        )
        self.profile: LoopProfile | None = None
        self._job, self._model, self._runner = job, model, runner
        self._optimizers = optimizers
        self._gathers, self._reading = gathers, reading
        self._num_begun = 0  # steps, equal on all ranks; steps_done may differ
        self._stepped: set[int] = set()  # optimizers that have stepped in this step
        self._kept: dict[nn.Parameter, Tensor] = {}  # gradients of before the step
        self._hooks: dict[nn.Parameter, list[_Hooks]] = {}
        self._has_odd_mean = False  # see `Sums.num_empty`
        self._odd_loss: Tensor | None = None  # a loss of this step that is not finite

    # add: a call of run.backward.

    def add(self, loss: Tensor | RowsLoss, retain_graph: bool) -> Tensor:
        """Add the gradients of the global batch's loss, see `Run.backward`."""
        is_last = self._reading.is_pass_over()
        if self.profile is not None:
            some_stepped = 0 < len(self._stepped) < len(self._optimizers)
            if some_stepped and self.state is not State.ACCUMULATING:
                self.profile.end_step()  # the others, as of a GAN, step after this backward
            self.profile.enter("backward")
        self.guards.draws.look()
        if self.state is not State.ACCUMULATING:
            self._begin()
        is_last = is_last or self.num_backwards + 1 == self._job.accumulation
        value = loss.sum if isinstance(loss, RowsLoss) else loss
        # The first steps, and some later ones, check before the backward. On a GPU the others do
        # after its launch, because the host would wait for the loss; the copy is not delayed:
        #
        #     host    sums, copy | backward ... | wait for the copy, check
        #     GPU                  forward ... sums, copy, backward ....
        is_early = self._num_begun <= 2 or self._num_begun % STEPS_APART == 0
        is_first = is_early or not value.is_cuda
        sums = self._exchange(loss, is_first=is_first)
        on_host = AsyncHostCopy(sums)
        loss_guard = self.guards.loss
        has_others = self._job.comm.size("data") > 1
        strangers = loss_guard.strangers(value) if is_early and has_others else []
        if is_first:
            self._check(loss, on_host)
        scale, mean = 1.0, value.detach()
        divisor = torch.ones((), device=value.device)
        if isinstance(loss, RowsLoss):
            divisor = torch.where(sums[1] > 0, sums[1], 1.0)
            mean = sums[0] / divisor
        elif loss_guard.terms.parameters or loss_guard.terms.is_hidden:
            # Each rank adds the whole gradient of these parameters, and the gathers 1 / R of it.
            scale = self._job.comm.size("data")
            divisor *= scale
        self.loss_of_step = mean + (self.loss_of_step if self.num_backwards else 0.0)
        self.num_backwards += 1
        wide = torch.promote_types(value.dtype, torch.float32)
        try:
            part = value.to(wide) / divisor.to(wide)
            with self._gathers.passing(scale, is_summed=isinstance(loss, RowsLoss)):
                self._runner.backward(part, is_last=is_last, retain_graph=retain_graph)
            loss_guard.refuse_strangers(strangers)
            if not is_first:
                self._check(loss, on_host)
        except BaseException:  # a script may catch it, and repeat the step
            self.reset()
            if self._runner.reducer is not None:
                self._runner.reducer.reset_step()
            self._clear()
            raise
        self._reading.use(is_step_end=is_last)
        if is_last:
            if self._runner.reducer is not None:
                self._runner.reducer.finish()
            self.close()
        self.guards.draws.mark()
        if self.profile is not None:
            self.profile.enter("other")
        return mean

    def _begin(self) -> None:
        """Start a step: make the checks between steps, and set earlier gradients aside."""
        self._reading.check_stream(self.guards.replicas.check_last_step())
        self._num_begun += 1
        self.guards.model.before("backward", is_compared=is_compared(self._num_begun))
        self._take_hooks()
        if self._num_begun == 2:
            warn_of_buffers(self._model, self._job.comm)
        kept = {p: p.grad for p in self.parameters.values() if p.grad is not None}
        others = [gradient for gradient in kept.values() if not hasattr(gradient, _REDUCED)]
        # Under fsdp torch.autograd.grad leaves gradients of zeros.
        if any(bool(local_shard(gradient).any()) for gradient in others):
            raise ScriptError(
                "backward: there are gradients of this rank alone, as loss.backward() adds them; "
                "call run.backward(loss) in its place"
            )
        # As loss.backward() does, run.backward adds to the gradients that zero_grad() has left.
        self._kept = {p: gradient.clone() for p, gradient in kept.items()}
        self._clear()
        self._odd_loss = None
        if self._stepped or self.steps_done == 0:
            self.guards.loss.is_gathered = False
        self.state = State.ACCUMULATING
        self._stepped.clear()
        self._note_progress()

    def _exchange(self, loss: Tensor | RowsLoss, *, is_first: bool) -> Tensor:
        """Return the `Sums` of this call, and start the exchange of what replicas compare."""
        comm, reading = self._job.comm, self._reading
        own = self.guards.loss.numbers(loss, is_first=self._num_begun <= 2, is_early=is_first)
        counts = {STEPS: self.steps_done, BATCHES: reading.num_batches}
        numbers = torch.cat([own, self.guards.replicas.words(counts, reading.seen)])
        comm.all_reduce(numbers, "data")
        comm.all_reduce(numbers[len(own) :], "tp")
        self.guards.replicas.store_sums(numbers[len(own) :])
        return numbers[: len(own)]

    def _check(self, loss: Tensor | RowsLoss, on_host: AsyncHostCopy) -> None:
        sums = Sums(*on_host.tolist())
        self._has_odd_mean |= sums.num_empty > 0
        if not self.guards.loss.check(loss, sums):
            # Refused by the optimizer's step alone, because a GradScaler may skip it.
            self._odd_loss = loss.sum if isinstance(loss, RowsLoss) else loss

    # close: after the last call of a step.

    def close(self) -> None:
        """Call the script's hooks, and add the gradients of before the step."""
        if self._has_odd_mean and not self._is_finite():
            self._odd_loss = torch.tensor(math.nan)
        self._has_odd_mean = False
        for parameter, registered in self._hooks.items():
            for hook in [hook for hooks in registered for hook in hooks.values()]:
                if parameter.grad is not None:
                    changed = hook(parameter.grad)
                    parameter.grad = parameter.grad if changed is None else changed
        for parameter, kept in self._kept.items():
            grad = parameter.grad
            parameter.grad = kept if grad is None else grad + kept
        self._kept = {}
        self._gathers.has_graph = False
        self.num_backwards, self.state = 0, State.REDUCED
        for gradient in self.gradients():
            setattr(gradient, _REDUCED, True)

    def _take_hooks(self) -> None:
        """Move hooks of replicated parameters from the parameters to this step.

        autograd    hook(gradient of this rank's samples)    would clamp each rank's part
        close       hook(sum over ranks / count)             as on one process
        """
        if self._job.comm.size("data") == 1:  # autograd itself calls the hooks
            return
        for name, parameter in self.parameters.items():
            # Private, but torch has no other access; tests/script/test_plain_scripts.py pins it.
            hooks: Any = parameter._backward_hooks  # pyright: ignore[reportPrivateUsage]
            if not hooks:
                continue
            if self._job.accumulation > 1:
                raise ScriptError(
                    f"backward: {name} has a hook by register_hook, which receives the gradient of "
                    "each microbatch on one process, but only the gradient of the whole step on "
                    "several ranks; change parameter.grad between run.backward and "
                    "optimizer.step() instead"
                )
            self._hooks.setdefault(parameter, []).append(hooks)  # a handle's `remove` edits it
            parameter._backward_hooks = None  # pyright: ignore[reportPrivateUsage]

    # step: what follows.

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Register hooks on an optimizer that check each of its steps."""

        def before(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if any(callable(each) for each in (*args[1:], *kwargs.values())):
                return  # a closure calls run.backward within the step
            if self.state is not State.ACCUMULATING:
                self.guards.draws.look()
            if self._odd_loss is not None:
                if self._job.nonfinite == "stop":
                    raise TrainingError(
                        f"step {self.steps_done + 1}: the loss is not finite "
                        f"({float(self._odd_loss.detach()):g} on rank {self._job.comm.rank}); this "
                        "step has not changed the weights. Lower the learning rate, or skip such "
                        "steps: phalanx.init(nonfinite='skip')"
                    )
                self._clear()
            self._refuse_step(own)
            self.guards.loss.before_step()
            if self.profile is not None:
                self.profile.enter("optimizer")

        def after(own: torch.optim.Optimizer, *_: Any) -> None:
            self.steps_done += not self._stepped  # several optimizers count as one step
            self._stepped.add(id(own))
            if self.steps_done == 1:  # now, because the first save may come hours later
                warn_of_state(own)
            self.guards.replicas.note_step()
            self._note_progress()
            if self._runner.reducer is not None:
                self._runner.reducer.after_step()
            if self.profile is not None and len(self._stepped) == len(self._optimizers):
                self.profile.end_step()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _refuse_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer's step unless its gradients are new and of the global batch."""
        is_due = self.state is State.REDUCED and id(optimizer) not in self._stepped
        # nonfinite="skip" has dropped the gradients of a loss that is not finite.
        has_gradients = bool(self.gradients()) or self._odd_loss is not None
        if self.state is State.ACCUMULATING:
            raise ScriptError(
                f"optimizer.step() after {self.num_backwards} of {self._job.accumulation} calls of "
                "run.backward: the gradients are not summed over the ranks yet; step after the "
                f"last call, or give accumulation={self.num_backwards} to phalanx.init"
            )
        if is_due and not has_gradients:
            raise ScriptError(
                "optimizer.step() without a gradient: zero_grad() came between run.backward "
                "and the step; call it after the step, or before run.backward"
            )
        if not is_due and (self.state is State.REDUCED or not has_gradients):
            raise ScriptError(
                "optimizer.step() without a run.backward since its last step; call "
                "run.backward(loss) before it"
            )
        if not is_due:
            raise ScriptError(
                "optimizer.step() with gradients of this rank alone: loss.backward() was called, "
                "which adds nothing up over the ranks; call run.backward(loss) in its place"
            )

    def clip(self, max_norm: float, p: float) -> Tensor:
        """Scale the gradients to a norm, see `Run.clip`."""
        if self.state is not State.REDUCED:
            raise ScriptError(
                "clip: there are no gradients of a complete step; call run.clip after the last "
                "run.backward of a step and before optimizer.step()"
            )
        if self.profile is not None:
            self.profile.enter("clip")
        gradients = self.gradients()
        norm = gradient_norm(gradients, self._job.comm, p)
        self.guards.replicas.count_clip(max_norm, p)
        if (value := float(norm)) > max_norm:
            scale_to(gradients, value, max_norm)
        return norm

    def refuse_unused(self) -> None:
        """Refuse a save with unused gradients, or with parameters replaced after `prepare`.

        Only the gradients show that a GradScaler has skipped the step:

            state REDUCED, no optimizer has stepped, gradients are
                finite               the step is still due          refuse
                not finite           the scaler has skipped it      save
                None                 and they were cleared          save
        """
        self.guards.model.before("save")
        is_open = self.state is State.REDUCED and not self._stepped
        if self.state is State.ACCUMULATING or (is_open and self._is_finite()):
            raise ScriptError(
                "save: called between run.backward and optimizer.step(); a checkpoint does not "
                "store these gradients, but counts their batches as used; save after the step"
            )

    @property
    def is_over(self) -> bool:
        """Whether all optimizers have stepped since the last backward."""
        return self.state is State.REDUCED and len(self._stepped) == len(self._optimizers)

    def reset(self) -> None:
        """Abandon the current step; the next backward starts a new step."""
        self.num_backwards, self.state = 0, State.IDLE
        self._reading.forget_step()

    def gradients(self) -> list[Tensor]:
        """Return the gradients that are not None."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def _is_finite(self) -> bool:
        """Return whether there are gradients and all are finite; else a GradScaler skips."""
        gradients = self.gradients()
        sums = [local_shard(gradient).sum(dtype=torch.float64) for gradient in gradients]
        numbers = [len(gradients), not all(bool(each.isfinite()) for each in sums)]
        if any(isinstance(gradient, DTensor) for gradient in gradients):
            own = torch.tensor(numbers, device=self._job.comm.device)
            numbers = self._job.comm.all_reduce(own, "job", "max").tolist()
        num_gradients, is_odd = numbers
        return num_gradients > 0 and not is_odd

    def _clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _note_progress(self) -> None:
        """Report the step to the watcher of the job, and compare the ranks when the script ends."""
        PULSE.stepping(self.steps_done)
        name = self._job.name
        at_end(name, lambda where: self.guards.replicas.check_end(where, name, self.steps_done))
