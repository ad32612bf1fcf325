"""Dropout whose masks belong to the sample, not to the rank that computes it.

`nn.Dropout` draws from each process's own generator, so that a job on two ranks trains with other
masks than one process. Here an element's mask is a function of (seed, step, position of its row in
the order of the samples, name of the module, how often it has run on the batch, place in the row),
so any number of ranks draws the same (models/random.py). What draws in another way is named in a
warning.
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
    """Where a forward stands.

    Attributes:
        step: the step under way.
        rows: positions of the batch's rows in the order of the samples; best where the forward
            is, since each dropout reads them.
        calls: number of the last run of each dropout on this batch, by its name; this module
            counts here.
    """

    step: int
    rows: Tensor
    calls: dict[str, int]


Where = Callable[[], MaskPosition | None]
"""Returns the place, None without a batch of a loader."""


class Masks:
    """The masks of the nn.Dropouts of a model, which belong to the samples."""

    def __init__(self, seed: int, where: Where) -> None:
        """Draw them by a seed, and by `where` a forward stands."""
        self._seed = seed
        self._where = where
        self._uses = _Uses()

    @property
    def num_tickets(self) -> int:
        """How many int64 were drawn for them so far from torch's own generator of the CPU."""
        return self._uses.num_tickets

    def key(self, model: nn.Module) -> None:
        """Have the nn.Dropouts of a model, which is split already, draw by position."""
        for name, module in model.named_modules():
            if type(module) is nn.Dropout:
                of = _Keyed(name, key(self._seed, name), self._where, self._uses)
                module.forward = functools.partial(_forward, module, of)


class DropoutSplit(Split):
    """The masks of a model whose ranks hold whole rows; it splits no parameter."""

    axis = "dropout"

    @classmethod
    def is_asked(cls, target: Target) -> bool:
        """Return whether masks are to belong to the samples, and can."""
        return target.masks is not None and target.strategy.has_whole_samples

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Have each nn.Dropout draw by position."""
        assert self.target.masks is not None
        self.target.masks.key(model)


class _Drawn(NamedTuple):
    """By what a dropout draws: a key for each row, and how often it ran on the batch before."""

    keys: Tensor
    call: int


class _Keyed(NamedTuple):
    """What a dropout draws by: its name, the seed of its masks, and what all of a model share."""

    name: str
    seed: int
    where: Where
    uses: _Uses


def _forward(module: nn.Dropout, of: _Keyed, input: Tensor) -> Tensor:
    by = _drawn(of, input) if module.training and module.p > 0 else None
    if by is None:
        return nn.Dropout.forward(module, input)
    if not input.numel() or module.p == 1:
        return input * 0
    rows = input.reshape(len(input), -1, input.shape[-1])
    return dropout(rows, module.p, by.keys, salt=by.call).view_as(input)


def _draw(of: _Keyed, input: Tensor) -> _Drawn | None:
    """Return by what a dropout draws here; None if by torch's own generator."""
    # Activation checkpointing restores torch's generator before it runs a part again, so that the
    # number drawn here is the number of the first run, whatever ran in between.
    ticket = int(torch.empty((), dtype=torch.int64).random_())
    of.uses.num_tickets += 1
    place = of.where()
    if place is None:
        return None  # and nothing is kept: no step would end that
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
        return of.uses.again(ticket, of.name)
    by = None
    if len(place.rows) == len(input) and input.ndim > 1:
        call = place.calls[of.name] = place.calls.get(of.name, -1) + 1
        rows = to_device(place.rows, input.device)
        by = _Drawn(row_keys(of.seed, place.step, rows), call)
    of.uses.note(ticket, by, place.step)
    return by


# Dynamo would compile it again for each step.
_drawn = cast(Callable[[_Keyed, Tensor], _Drawn | None], torch.compiler.disable(_draw))


class _Uses:
    """By what the dropouts of a model drew, for the backwards that run them again.

    Attributes:
        num_tickets: numbers that they have drawn from torch's own generator.
    """

    def __init__(self) -> None:
        self.num_tickets = 0
        self._step: int | None = None
        self._now: dict[int, _Drawn | None] = {}
        self._before: dict[int, _Drawn | None] = {}

    def __deepcopy__(self, _memo: object) -> _Uses:
        return self  # tickets are drawn once, and all that are drawn are counted

    def note(self, ticket: int, by: _Drawn | None, step: int) -> None:
        """Keep a use of a step until the end of the next, in which its backward may be."""
        if step != self._step:
            self._step, self._now, self._before = step, {}, self._now
        self._now[ticket] = by

    def again(self, ticket: int, name: str) -> _Drawn | None:
        """Return by what the dropout `name` drew when it ran first."""
        for uses in (self._now, self._before):
            if ticket in uses:
                return uses[ticket]
        raise ScriptError(
            f"the dropout '{name}' is recomputed in backward, and torch's generator is not as it "
            "was in its first run, so its mask would be another; leave torch.utils.checkpoint its "
            "preserve_rng_state=True"
        )


class _DrawWatch(TorchDispatchMode):
    """Notes which operations draw; those within compiled code are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile inside, as outside; else it would skip the code that it meets here."""
        return True

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Be on in the phase "forward" of a step."""
        with self if name == "forward" else nullcontext():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags and name != "random_"  # ours
        if "attention" in name:  # has the tag without dropout, too
            is_drawn = any(isinstance(arg, float) and 0 < arg < 1 for arg in args[3:])
        if is_drawn:
            self.found.add(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def naming_draws(model: nn.Module, on_found: Callable[[], None] = lambda: None) -> Generator[Phase]:
    """Warn, at the end, of what drew from this process's generator in training.

    It yields a `Phase`, to be called with the phases of a step; those in "forward" are meant.
    """
    watch = _DrawWatch()
    try:
        yield watch.phase
    finally:
        if watch.found:
            on_found()
            warnings.warn(
                f"{type(model).__name__} draws from each rank's own generator in training "
                f"({', '.join(sorted(watch.found))}), so that its numbers depend on the number of "
                "ranks: a dropout within attention, a functional one, or an nn.Dropout under tp or "
                "on what has other rows than the batch",
                stacklevel=2,
            )


def name_draws(model: nn.Module, on_found: Callable[[], None] = lambda: None) -> None:
    """Name, see `naming_draws`, the draws of the first forward in training, whoever calls it.

    `on_found` is called if there are some. No hook runs after a forward that is left by a
    BaseException, as stages of a pipeline are.
    """
    hooks = _FirstForward(model, on_found)
    hooks.handles = [
        model.register_forward_pre_hook(hooks.before),
        model.register_forward_hook(hooks.after, always_call=True),
    ]


class _FirstForward:
    """Watches the first forward in training of one model, and of no copy of it."""

    def __init__(self, model: nn.Module, on_found: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._on_found = on_found
        self._watching: ExitStack | None = None
        self.handles: list[RemovableHandle] = []

    def before(self, model: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # compiled code is not seen, and Dynamo could not enter the mode
        is_watched = self._watching is not None  # still: an interrupt runs no hook
        if model is self._model() and model.training and torch.is_grad_enabled() and not is_watched:
            self._watching = ExitStack()
            phase = self._watching.enter_context(naming_draws(model, self._on_found))
            self._watching.enter_context(phase("forward"))

    def after(self, model: nn.Module, *_: Any) -> None:
        if self._watching is None or model is not self._model():
            return
        for handle in self.handles:
            handle.remove()
        watching, self._watching = self._watching, None
        watching.close()

    def __deepcopy__(self, _memo: object) -> _FirstForward:
        return self  # its model is not the copy
