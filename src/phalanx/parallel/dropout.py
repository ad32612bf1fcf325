"""Dropout with masks keyed by sample, independent of the number of ranks.

`nn.Dropout` draws from the generator of its process, so a job on two ranks trains with other masks
than one process. Here the mask of an element is a function of (seed, step, position of its row in
the order of the samples, name of the module, number of the module's run on the batch, place in the
row), so any number of ranks draws equal masks (models/random.py). Other operators that draw random
numbers are listed in a warning.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Phase
from phalanx.errors import ScriptError
from phalanx.models.attention import to_device
from phalanx.models.random import dropout, key, row_keys
from phalanx.parallel.split import Split, Target


class MaskPosition(NamedTuple):
    """Step and samples of the current forward.

    Attributes:
        step: the current step.
        rows: positions of the batch's rows in the order of the samples; should be on the device of
            the forward, because each dropout reads them.
        calls: name of a dropout -> number of its last run on this batch, from 0; updated here.
    """

    step: int
    rows: Tensor
    calls: dict[str, int]


Where = Callable[[], MaskPosition | None]
"""Returns the position of the current forward; None if its batch is not from a loader."""


class Masks:
    """The masks of a model's nn.Dropouts, keyed by sample."""

    def __init__(self, seed: int, where: Where) -> None:
        """Key the masks by a seed and by the position that `where` returns."""
        self._seed = seed
        self._where = where
        self._uses = _MaskKeys()

    @property
    def num_tickets(self) -> int:
        """Number of int64 values drawn so far from torch's default CPU generator."""
        return self._uses.num_tickets

    def key(self, model: nn.Module) -> None:
        """Make the nn.Dropouts of a model, already split, draw masks keyed by sample."""
        for name, module in model.named_modules():
            if type(module) is nn.Dropout:
                of = _Keyed(name, key(self._seed, name), self._where, self._uses)
                module.forward = functools.partial(_forward, module, of)


class DropoutSplit(Split):
    """Dropout masks keyed by sample, for ranks that hold full rows; no parameter is split."""

    axis = "dropout"

    @classmethod
    def applies_to(cls, target: Target) -> bool:
        """Return whether masks keyed by sample are requested and possible."""
        return target.masks is not None and target.strategy.has_whole_samples

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Make each nn.Dropout draw masks keyed by sample."""
        assert self.target.masks is not None
        self.target.masks.key(model)


class _Drawn(NamedTuple):
    """The key of a mask: a key for each row, and the number of earlier runs on the batch."""

    keys: Tensor
    call: int


class _Keyed(NamedTuple):
    """A keyed dropout: its name and seed, and `where` and `uses`, common to all of the model."""

    name: str
    seed: int
    where: Where
    uses: _MaskKeys


def _forward(module: nn.Dropout, of: _Keyed, input: Tensor) -> Tensor:
    by = _drawn(of, input) if module.training and module.p > 0 else None
    if by is None:
        return nn.Dropout.forward(module, input)
    if not input.numel() or module.p == 1:
        return input * 0
    rows = input.reshape(len(input), -1, input.shape[-1])
    return dropout(rows, module.p, by.keys, salt=by.call).view_as(input)


def _draw(of: _Keyed, input: Tensor) -> _Drawn | None:
    """Return the key of a dropout's mask; None if the mask comes from torch's generator."""
    # Activation checkpointing restores torch's generator before it recomputes, so the number drawn
    # here, the ticket, equals the ticket of the first run, whatever ran in between.
    #
    #   forward     generator at s    ticket 17    `calls` says run 3    noted: 17 -> (keys, 3)
    #   ...         other forwards, other runs of this dropout
    #   backward    generator at s    ticket 17    found: (keys, 3)
    ticket = int(torch.empty((), dtype=torch.int64).random_())
    of.uses.num_tickets += 1
    position = of.where()
    if position is None:
        return None  # not stored in `uses`, because no later step would remove it
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
        return of.uses.again(ticket, of.name)
    by = None
    if len(position.rows) == len(input) and input.ndim > 1:
        call = position.calls[of.name] = position.calls.get(of.name, -1) + 1
        rows = to_device(position.rows, input.device)
        by = _Drawn(row_keys(of.seed, position.step, rows), call)
    of.uses.note(ticket, by, position.step)
    return by


# Not compiled, because Dynamo would compile it again for each step.
_drawn = cast(Callable[[_Keyed, Tensor], _Drawn | None], torch.compiler.disable(_draw))


class _MaskKeys:
    """The keys of the masks that a model's dropouts drew, for recomputation in backward.

    Attributes:
        num_tickets: number of tickets drawn from torch's generator; a ticket identifies a run.
    """

    def __init__(self) -> None:
        self.num_tickets = 0
        self._step: int | None = None
        self._now: dict[int, _Drawn | None] = {}
        self._before: dict[int, _Drawn | None] = {}

    def __deepcopy__(self, _memo: object) -> _MaskKeys:
        return self  # copies of a model count their tickets together

    def note(self, ticket: int, by: _Drawn | None, step: int) -> None:
        """Store a key until the end of the next step, which may contain the backward."""
        if step != self._step:
            self._step, self._now, self._before = step, {}, self._now
        self._now[ticket] = by

    def again(self, ticket: int, name: str) -> _Drawn | None:
        """Return the key that the dropout `name` used in its first run with this ticket."""
        for uses in (self._now, self._before):
            if ticket in uses:
                return uses[ticket]
        raise ScriptError(
            f"the dropout '{name}' is recomputed in backward, and the state of torch's generator "
            "differs from the first run, so the mask would differ; leave preserve_rng_state=True "
            "in torch.utils.checkpoint"
        )


class _DrawWatch(TorchDispatchMode):
    """Records the operators that draw random numbers, except operators in compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.drawing: set[str] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that Dynamo compiles code under this mode and does not skip it."""
        return True

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Enter the mode during the phase "forward" of a step, and in no other phase."""
        with self if name == "forward" else nullcontext():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # `random_` draws the tickets.
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags and name != "random_"
        if "attention" in name:  # has the tag even without dropout
            is_drawn = any(isinstance(arg, float) and 0 < arg < 1 for arg in args[3:])
        if is_drawn:
            self.drawing.add(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def warning_of_draws(
    model: nn.Module, on_found: Callable[[], None] = lambda: None
) -> Generator[Phase]:
    """Warn at exit of operators that drew from this process's generator in training.

    Yields a `Phase`, to be called with the phases of a step; operators in "forward" are recorded.
    """
    watch = _DrawWatch()
    try:
        yield watch.phase
    finally:
        if watch.drawing:
            on_found()
            warnings.warn(
                f"{type(model).__name__} draws from each rank's own generator in training "
                f"({', '.join(sorted(watch.drawing))}), so its results depend on the number of "
                "ranks; possible causes: a dropout within attention, a functional dropout, or an "
                "nn.Dropout under tp or on a tensor whose rows are not the rows of the batch",
                stacklevel=2,
            )


def warn_of_first_draws(model: nn.Module, on_found: Callable[[], None] = lambda: None) -> None:
    """Warn of draws in the first training forward of `model`, as `warning_of_draws` does.

    `on_found` is called if there are draws. Not for pipelines: their stages end a forward by a
    BaseException, after which no hook runs.
    """
    hooks = _FirstForward(model, on_found)
    hooks.handles = [
        model.register_forward_pre_hook(hooks.before),
        model.register_forward_hook(hooks.after, always_call=True),
    ]


class _FirstForward:
    """Forward hooks that watch the first training forward of one model, but not of its copies."""

    def __init__(self, model: nn.Module, on_found: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._on_found = on_found
        self._watching: ExitStack | None = None
        self.handles: list[RemovableHandle] = []

    def before(self, model: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the mode records nothing in compiled code, and Dynamo could not enter it
        is_watched = self._watching is not None  # true after an interrupt, which runs no hook
        if model is self._model() and model.training and torch.is_grad_enabled() and not is_watched:
            self._watching = ExitStack()
            phase = self._watching.enter_context(warning_of_draws(model, self._on_found))
            self._watching.enter_context(phase("forward"))

    def after(self, model: nn.Module, *_: Any) -> None:
        if self._watching is None or model is not self._model():
            return
        for handle in self.handles:
            handle.remove()
        watching, self._watching = self._watching, None
        watching.close()

    def __deepcopy__(self, _memo: object) -> _FirstForward:
        return self  # refers to the original model, so hooks of the copy do nothing
