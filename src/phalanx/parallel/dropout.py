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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from phalanx.comm.ledger import Phase
from phalanx.errors import ScriptError
from phalanx.models.random import dropout, key, row_keys
from phalanx.strategy import Strategy


class Place(NamedTuple):
    """Where a forward stands.

    Attributes:
        step: the step under way.
        rows: positions of the batch's rows in the order of the samples.
        calls: how often each dropout has run on this batch, by its name; this module counts here.
    """

    step: int
    rows: Tensor
    calls: dict[str, int]


Where = Callable[[], Place | None]
"""Returns the place, None without a batch of a loader."""

_DRAWS = frozenset(
    "native_dropout bernoulli bernoulli_ rand randn randint rand_like randn_like randint_like "
    "normal_ uniform_ exponential_ rrelu_with_noise".split()
)
"""Operations of torch that draw from the process's own generator."""


def can_be_keyed(strategy: Strategy) -> bool:
    """Return whether every rank has whole rows of its samples; under tp and cp it has not."""
    return strategy.tp.degree * strategy.cp.degree == 1


def key_dropouts(model: nn.Module, seed: int, where: Where) -> None:
    """Have the nn.Dropouts of a model draw by position.

    Args:
        model: split already.
        seed: of the masks.
        where: says where a forward stands.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Dropout:
            module.forward = functools.partial(_forward, module, name, key(seed, name), where)


def _forward(module: nn.Dropout, name: str, seed: int, where: Where, input: Tensor) -> Tensor:
    place = where() if module.training and module.p > 0 else None
    if place is None or len(place.rows) != len(input) or input.ndim < 2:
        return nn.Dropout.forward(module, input)
    call = _count(name, place.calls)
    if not input.numel() or module.p == 1:
        return input * 0
    keys = row_keys(seed, place.step, place.rows.to(input.device))
    kept = dropout(input.reshape(len(input), -1, input.shape[-1]), module.p, keys, salt=call)
    return kept.view_as(input)


def _count(name: str, calls: dict[str, int]) -> int:
    """Return how often a dropout has run on the batch before.

    What is recomputed in backward has the number of its first run.
    """
    is_recomputed = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
    if not is_recomputed:
        calls[name] = calls.get(name, 0) + 1
    elif calls.get(name, 0) > 1:
        raise ScriptError(
            f"the dropout '{name}' ran {calls[name]} times on this batch, and one of them is "
            "recomputed: which, nothing says; give each use an nn.Dropout of its own"
        )
    return calls[name] - 1


class _DrawWatch(TorchDispatchMode):
    """Notes which operations draw."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Be on in the phase "forward" of a step."""
        with self if name == "forward" else nullcontext():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_attention = "attention" in name and any(
            isinstance(arg, float) and 0 < arg < 1 for arg in args[3:]
        )
        if name in _DRAWS or is_attention:
            self.found.add(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def naming_draws(model: nn.Module) -> Generator[Phase]:
    """Warn, at the end, of what drew from this process's generator in training.

    What is yielded is to be told the phases of a step; the draws of "forward" are meant.
    """
    watch = _DrawWatch()
    try:
        yield watch.phase
    finally:
        if watch.found:
            warnings.warn(
                f"{type(model).__name__} draws from each rank's own generator in training "
                f"({', '.join(sorted(watch.found))}), so that its numbers depend on the number of "
                "ranks: a dropout within attention, a functional one, or an nn.Dropout under tp or "
                "on what has other rows than the batch",
                stacklevel=2,
            )


def name_draws(model: nn.Module) -> None:
    """Name, see `naming_draws`, the draws of the first forward in training, whoever calls it.

    No hook runs after a forward that is left by a BaseException, as stages of a pipeline are.
    """
    hooks = _FirstForward(model)
    hooks.handles = [
        model.register_forward_pre_hook(hooks.before),
        model.register_forward_hook(hooks.after, always_call=True),
    ]


class _FirstForward:
    """Watches the first forward in training of one model; that of a copy of it is let be."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._watching: ExitStack | None = None
        self.handles: list[RemovableHandle] = []

    def before(self, model: nn.Module, _inputs: Any) -> None:
        is_watched = self._watching is not None  # still: an interrupt runs no hook
        if model is self._model() and model.training and torch.is_grad_enabled() and not is_watched:
            self._watching = ExitStack()
            phase = self._watching.enter_context(naming_draws(model))
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
