"""A step of a user's loop: its calls of `run.backward`, and the optimizer steps that follow.

The last backward of a step is the call that completes `accumulation`, or uses the last batch of a
pass over the data. Module `step_state` defines the states of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from phalanx.comm.comm import Comm, local_shard
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError, TrainingError
from phalanx.launch.attach import at_end
from phalanx.launch.heartbeat import PULSE
from phalanx.models.attention import to_device
from phalanx.parallel.accumulate import Runner
from phalanx.script.as_prepared import PreparedModelCheck, warn_of_buffers
from phalanx.script.draws import DrawWatch
from phalanx.script.drift import AHEAD, BATCHES, STEPS
from phalanx.script.gather import Gathers, OwnTerms, own_terms
from phalanx.script.hooks import ReducedGradientHooks
from phalanx.script.loss import FORMS, RowsLoss
from phalanx.script.optimizer import warn_of_state
from phalanx.script.reading import BatchTracker
from phalanx.script.replicas import STEPS_APART, AsyncHostCopy, Replicas, is_compared
from phalanx.script.step_state import State, StepState
from phalanx.train.clip import gradient_norm, scale_to

_NUM_SHARED: Final = 8
"""Numbers of a call that the data ranks add up, see `UserStep._check`."""

_REDUCED: Final = "is_reduced_by_phalanx"
"""Attribute of the gradients that a step has reduced, which loss.backward() does not set."""

_MOST_SPREAD: Final = 1e-6
"""Largest relative spread of a whole-batch loss over the ranks: rounding on unlike processors."""

_LEAST_LOSS: Final = 1e-9
"""Loss below which rounding may exceed `_MOST_SPREAD`."""


class UserStep(StepState):
    """The current step of a prepared model.

    Attributes:
        draw_watch: detects draws of the loop from torch's generators within the step.
        replicas: compares the state that must be equal on all ranks.
        parameters: parameters that optimizers update, by name; during a step, modules of FSDP2
            have gathered parameters instead.
        loss_of_step: the step's loss so far, over all its calls.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        comm: Comm,
        gathers: Gathers,
        accumulation: int,
        reading: BatchTracker,
        optimizers: Sequence[torch.optim.Optimizer],
        name: str,
        nonfinite: Literal["stop", "skip"],
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
        self._num_begun = 0
        self._nonfinite = nonfinite
        self._num_data = comm.size("data")
        self._gathers = gathers
        self.loss_of_step = torch.zeros((), dtype=torch.float64, device=comm.device)
        self._is_gathered = self._has_odd_mean = False
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._terms = OwnTerms([], num_gathers=0, is_hidden=False, num_nodes=0)
        self._known = {*map(id, self.parameters.values())}
        self._checked: set[tuple[frozenset[int], int]] = set()
        self._odd_loss: Tensor | None = None

    def backward(self, loss: Tensor | RowsLoss, retain_graph: bool) -> Tensor:
        """Compute and reduce the gradients of the global batch's loss, see `Run.backward`."""
        is_pass_over = self._reading.is_pass_over()
        self.draw_watch.look()
        if self.state is not State.ACCUMULATING:
            self._begin()
        given = loss.sum if isinstance(loss, RowsLoss) else loss
        sums = self._exchange(loss)
        found = AsyncHostCopy(sums)
        # A GPU has computed the loss when its copy arrives. So after the first steps the host first
        # launches the backward, which needs no answer of another rank.
        is_first = self._is_early or not given.is_cuda
        strangers = self._strangers(given) if self._is_early and self._num_data > 1 else []
        if is_first:
            self._check(loss, found.tolist())
        scale, mean = 1.0, given.detach()
        divisor = torch.ones((), device=given.device)
        if isinstance(loss, RowsLoss):
            divisor = torch.where(sums[1] > 0, sums[1], 1.0)
            mean = sums[0] / divisor
        elif self._terms.parameters or self._terms.is_hidden:
            # Each rank adds the whole gradient of these parameters, and the gathers 1 / R of it.
            scale = self._num_data
            divisor *= scale
        self.loss_of_step = mean + (self.loss_of_step if self.num_backwards else 0.0)
        self.num_backwards += 1
        is_last = is_pass_over or self.is_full
        reducer = self._reducer
        wide = torch.promote_types(given.dtype, torch.float32)
        try:
            if reducer is not None:
                reducer.before_backward(reducer.parameters if is_last else ())
            with self._gathers.passing(scale, is_summed=isinstance(loss, RowsLoss)):
                (given.to(wide) / divisor.to(wide)).backward(retain_graph=retain_graph)
            if lost := next((each for each in strangers if each.grad is not None), None):
                raise ScriptError(
                    f"backward: the loss reaches a parameter of shape {tuple(lost.shape)} that is "
                    "not in the prepared model, so no rank would add up its gradient; put both "
                    "into one module, as nn.ModuleDict, before run.prepare"
                )
            if not is_first:
                self._check(loss, found.tolist())
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
        return mean

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
            if self._odd_loss is not None:
                self._refuse_odd_loss(float(self._odd_loss.detach()))
            self.refuse_step(own, has_gradients=bool(self.gradients()))
            if self._num_data > 1 and not self._is_gathered:
                raise ScriptError(
                    "optimizer.step(): no loss since the last step is computed from rows that "
                    f"run.gather returned, so ranks used their own rows or the same; {FORMS}"
                )

        def after(own: torch.optim.Optimizer, *_: Any) -> None:
            self._after_step(own)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _refuse_odd_loss(self, loss: float) -> None:
        """Refuse a step with a loss that is not finite, or drop its gradients."""
        if self._nonfinite == "stop":
            raise TrainingError(
                f"step {self.steps_done + 1}: the loss is not finite ({loss:g} on rank "
                f"{self._comm.rank}); this step has not changed the weights. Lower the learning "
                "rate, or skip such steps: phalanx.init(nonfinite='skip')"
            )
        self._clear()

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

    def _begin(self) -> None:
        """Start a step: make the checks between steps, and set earlier gradients aside."""
        self._reading.check_stream(self.replicas.check_last_step())
        self._num_begun += 1
        self._as_prepared.check("backward", is_quick=not is_compared(self._num_begun))
        self._hooks.take(self._accumulation)
        if self._num_begun == 2:  # not steps_done, which may differ between ranks
            warn_of_buffers(self._model, self._comm)
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
        if self.is_used or self.steps_done == 0:
            self._is_gathered = False
        self.begin()
        at_end(self._name, self._check_end)
        PULSE.stepping(self.steps_done)

    def _check_end(self, where: str) -> None:
        self.replicas.check_end(where, self._name, self.steps_done)

    def _exchange(self, loss: Tensor | RowsLoss) -> Tensor:
        """Return numbers of this call, summed over the data ranks, see `_check`."""
        reading = self._reading
        num_ahead = reading.num_ahead if self._accumulation > 1 else 0
        counts = {STEPS: self.steps_done, BATCHES: reading.num_batches, AHEAD: num_ahead}
        words = self.replicas.words(counts, reading.seen)
        found = torch.cat([words.new_zeros(_NUM_SHARED), words])
        if isinstance(loss, RowsLoss):
            self._is_gathered, count = True, loss.count
            if isinstance(count, Tensor):
                count = to_device(count, found.device).double()
                found[3] = (~((count >= 0) & count.isfinite())).double()
            found[1] = count
            # A mean over 0 rows, times 0 rows, is NaN, and its gradient may be.
            total = loss.sum.detach().double()
            found[5] = (~total.isfinite() & (found[1] == 0)).double()
            found[0] = torch.where(found[1] > 0, total, 0.0)
            if self._gathers.has_graph and self._num_data > 1:
                num_gathers = own_terms(loss.sum).num_gathers
                found[6], found[7] = num_gathers, num_gathers**2
        else:
            value = loss.detach().double()
            found[0], found[1], found[2] = value, value**2, 1.0
            if self._num_data > 1:
                self._terms = own_terms(loss)
                self._is_gathered |= self._terms.num_gathers > 0
                # The number of nodes shows a new term of parameters that were reached before.
                reached = (frozenset(map(id, self._terms.parameters)), self._terms.num_nodes)
                # Only on a GPU a check after the backward would come too late.
                is_due = self._is_early or not found.is_cuda
                is_due = is_due and (self._num_begun <= 2 or reached not in self._checked)
                self._checked.add(reached)
                found[4] = bool(self._terms.parameters) and is_due
        self._comm.all_reduce(found, "data")
        self._comm.all_reduce(found[_NUM_SHARED:], "tp")
        self.replicas.store_sums(found[_NUM_SHARED:])
        return found[:_NUM_SHARED]

    def _check(self, loss: Tensor | RowsLoss, found: Sequence[float]) -> None:
        """Refuse losses that are no loss of the whole batch; all ranks decide alike.

        It prevents gradients of a part of the batch, and of terms that ranks compute differently.

        Args:
            loss: this rank's loss.
            found: sums over the data ranks: of losses and their squares, or of sums of losses and
                counts; of ranks that give a whole-batch loss, an illegal count, terms that reach
                parameters without passing a gather, and a mean over 0 rows that is not finite; of
                the gathers that a loss of own rows reaches, and their squares.
        """
        first, second, num_whole, num_illegal, num_own, num_empty, gathers, squares = found
        value = loss.sum if isinstance(loss, RowsLoss) else loss
        self._has_odd_mean |= num_empty > 0
        num_ranks = self._num_data
        if 0 < num_whole < num_ranks:
            raise ScriptError(
                f"backward: {num_whole:g} of {num_ranks} data ranks give a loss of the whole batch "
                "and the others a loss of their rows; write the same call on every rank"
            )
        if gathers**2 != squares * num_ranks:
            raise ScriptError(
                "backward: the losses of rows reach other gathers on some ranks, so that gradients "
                "would wait for one another; use what run.gather returns on every rank, with "
                "weight 0 where it does not count"
            )
        if num_illegal or (isinstance(loss, RowsLoss) and second == 0):
            counts = [*map(float, gather_objects(loss.count if isinstance(loss, RowsLoss) else 0))]
            raise ScriptError(
                f"backward: the counts of the ranks are {', '.join(f'{n:g}' for n in counts)}; "
                "expected numbers of rows or tokens, finite and not negative, and one above 0"
            )
        if not (math.isfinite(first) and math.isfinite(second)):
            self._odd_loss = value  # a GradScaler may skip the step
        elif not isinstance(loss, RowsLoss) and num_ranks > 1:
            mean = first / num_ranks
            spread = math.sqrt(max(second / num_ranks - mean**2, 0.0))
            eps = torch.finfo(loss.dtype).eps
            if spread > max(_MOST_SPREAD, 2 * eps) * abs(mean) + _LEAST_LOSS:
                self._refuse_unequal(loss)
            if num_own:
                self._check_own_terms(loss)

    def _strangers(self, loss: Tensor) -> list[nn.Parameter]:
        """Return parameters that a loss reaches outside the model: each rank has its own gradient.

        Of the parameters that FSDP2 gathers, those that it has freed again are among them; their
        gradients are removed in the backward.
        """
        known = self._known.union(map(id, self._model.parameters()))
        reached = own_terms(loss, stops_at_gathers=False).parameters
        return [each for each in reached if id(each) not in known]

    def _refuse_unequal(self, loss: Tensor) -> None:
        """Refuse a loss that differs between ranks, and name the cause; all ranks call this."""
        values = gather_objects((float(loss.detach()), own_terms(loss).num_gathers > 0))
        other = max(range(len(values)), key=lambda rank: abs(values[rank][0] - values[0][0]))
        (first, _), (last, _) = values[0], values[other]
        what = (
            f"backward: the loss is {first:.8g} on rank 0 and {last:.8g} on rank {other}; expected "
            "the loss of the whole batch, equal on every rank"
        )
        if all(is_gathered for _, is_gathered in values):
            raise ScriptError(
                f"{what}: a part of it is computed from this rank's own rows, or from random "
                "numbers that differ; compute every term from what run.gather returned, and draw "
                "random numbers by run.draw, or from a torch.Generator with a seed"
            )
        raise ScriptError(f"{what}; {FORMS}")

    @property
    def _is_early(self) -> bool:
        """Whether all ranks make every check, before the backward."""
        return self._num_begun <= 2 or self._num_begun % STEPS_APART == 0

    def _check_own_terms(self, loss: Tensor) -> None:
        """Refuse gradients from terms of a rank's own rows; all ranks call this together.

        Terms of parameters alone, as a penalty, and of gathered rows have equal gradients on all
        ranks. Such a loss may be equal on all ranks though a term is not, as `(p - p.detach())`.
        """
        comm = self._comm
        place = tuple(comm.coord(axis) for axis in comm.axes if axis not in comm.axes_of("data"))
        gradients: dict[str, tuple[float, float]] = {}
        of: dict[Tensor, str] = {p: name for name, p in self._model.named_parameters()}
        reached = {
            of.get(each, f"parameter {number}, of shape {tuple(each.shape)},"): each
            for number, each in enumerate(self._terms.parameters)
        }
        names = gather_objects((self._terms.is_hidden, *reached))
        if any(is_hidden for is_hidden, *_ in names):
            raise ScriptError(
                "backward: the loss reaches parameters through a reentrant checkpoint, within "
                "which no gather shows; give torch.utils.checkpoint use_reentrant=False, or call "
                "run.gather on its result"
            )
        if all(each == names[0] for each in names):  # else backwards would not match
            if self._reducer is not None:
                self._reducer.keep()
            with self._gathers.passing(is_cut=True):
                found: Any = torch.autograd.grad(
                    loss, [*reached.values()], retain_graph=True, allow_unused=True
                )
            for name, gradient in zip(reached, found, strict=True):
                if gradient is not None:
                    flat = local_shard(gradient).double().reshape(-1)
                    signs = torch.arange(len(flat), device=flat.device).double().cos()
                    gradients[name] = float(flat.norm()), float(flat.real @ signs)
        else:
            gradients = dict.fromkeys(reached, (math.nan, 0.0))
        first: dict[Any, tuple[int, dict[str, tuple[float, float]]]] = {}
        for rank, (where, theirs) in enumerate(gather_objects((place, gradients))):
            root, mine = first.setdefault(where, (rank, theirs))
            for name in mine | theirs:
                (a, b), (c, d) = (each.get(name, (0.0, 0.0)) for each in (mine, theirs))
                if not abs(a - c) + abs(b - d) <= 1e-4 * max(a, c):
                    raise ScriptError(
                        "backward: a term of the loss is computed from this rank's own rows: "
                        f"without gathered rows the gradient of {name} has the norm {a:.4g} on "
                        f"rank {root} and {c:.4g} on rank {rank}; compute the term from rows that "
                        "run.gather returned"
                    )

    def _end(self) -> None:
        """Call the script's hooks, and add the gradients of earlier calls."""
        if self._has_odd_mean and not self._is_finite():
            self._odd_loss = torch.tensor(math.nan)
        self._has_odd_mean = False
        self._hooks.call()
        for parameter, kept in self._kept.items():
            grad = parameter.grad
            parameter.grad = kept if grad is None else grad + kept
        self._kept = {}
        self._gathers.has_graph = False
        self.complete()
        for gradient in self.gradients():
            setattr(gradient, _REDUCED, True)

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


def _are_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether the shards of this rank are finite."""
    sums = [local_shard(gradient).sum(dtype=torch.float64) for gradient in gradients]
    return all(bool(each.isfinite()) for each in sums)
