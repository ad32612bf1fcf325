"""What a checkpoint has of a run, and how it is saved and loaded, for every kind of run.

    model, optimizers    tensors, by the names in state.py
    parts                name -> object of the run: settings, schedules, loaders, scaler, best, ...
    registered           name -> object of the user, see registered.py

The states of `parts` are JSON values in the manifest. A part that the checkpoint lacks keeps its
present state, as a measure that a resumed run tracks first; so does a part without a state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.checkpoint import manifest, state
from phalanx.checkpoint.frozen import FrozenWeights
from phalanx.checkpoint.manifest import Checkpoint, Manifest
from phalanx.checkpoint.optimizer_state import CombinedOptimizer
from phalanx.checkpoint.registered import Registered, SplitState, unchanged_on_error
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.untrusted import brief, decode
from phalanx.comm.together import all_or_none
from phalanx.errors import CheckpointError


class Stateful(Protocol):
    """An object with a state of JSON values."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state, or raise a CheckpointError."""


class Several:
    """Objects of one kind as one part: the state is the list of their states."""

    def __init__(self, kind: str, items: Sequence[Stateful]) -> None:
        """Keep `items`, of which there may be more later; `kind` names them in messages."""
        self._kind, self._items = kind, items

    def state_dict(self) -> list[Any]:
        """Return the states of the objects."""
        return [each.state_dict() for each in self._items]

    def load_state_dict(self, states: list[Any]) -> None:
        """Load a state into each object.

        Raises:
            CheckpointError: there are other numbers of states and objects.
        """
        if len(states) != len(self._items):
            raise CheckpointError(
                f"it was saved by a script that prepared {len(states)} {self._kind}, but this "
                f"script prepared {len(self._items)}; prepare the same {self._kind}"
            )
        for each, saved in zip(self._items, states, strict=True):
            each.load_state_dict(saved)


@dataclass(frozen=True)
class RunState:
    """The objects of a run that a checkpoint has; see the module."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    parts: Mapping[str, Stateful]
    registered: Registered
    frozen: FrozenWeights

    def begin_save(self, saver: Saver, about: Manifest, *, replaces: bool = False) -> None:
        """Start to save; every rank calls this together.

        If a state cannot be stored, only the weights are saved, in a folder that no resume reads.

        Args:
            saver: saver of the run.
            about: the manifest without states.
            replaces: whether a checkpoint after the same step may exist, which is replaced.

        Raises:
            CheckpointError: the previous save failed, or only the weights are saved.
        """
        together = CombinedOptimizer(self.optimizers)

        def collect() -> tuple[dict[str, Any], SplitState]:
            state.state_of(self.model, together)
            states = {name: each.state_dict() for name, each in self.parts.items()}
            states = {name: each for name, each in states.items() if each != {}}
            return states, self.registered.parts()

        final = manifest.folder_of(saver.run, about.steps_done)
        try:
            states, registered = all_or_none(collect, f"cannot save all of {final}")
        except CheckpointError as error:
            about = dataclasses.replace(about, has_optimizer=False)
            saver.begin(self.model, CombinedOptimizer([]), about, replaces=True)
            saver.finish()
            raise CheckpointError(
                f"{error}; only the weights are saved, and run.load_state_dict loads them from "
                f"{manifest.folder_of(saver.run, about.steps_done, 'weights')}"
                f"{manifest.older_checkpoints_hint(final)}"
            ) from error
        self.registered.warn_if_ranks_differ(registered)
        frozen = self.frozen.checksums(state.weights_of(self.model))
        about = dataclasses.replace(about, state=states, registered=registered.plain, frozen=frozen)
        saver.begin(self.model, together, about, registered.tensors, replaces=replaces)

    def load(self, start: Checkpoint) -> None:
        """Load a checkpoint; every rank calls this together.

        Raises:
            CheckpointError: it is damaged, or from another model, optimizer or script. Then all
                objects have their states of before; see `state.load` for the weights.
        """
        folder, about = start.folder, start.about
        if start.is_in_memory:  # which rank 0 has found
            folder = manifest.RECOVERED[manifest.run_of(folder) or folder]
        together = CombinedOptimizer(self.optimizers)
        objects = [*self.parts.values(), *self.registered.objects]
        with unchanged_on_error(objects, together.param_groups):
            # First, because settings decide which state an optimizer keeps.
            all_or_none(lambda: self._load_parts(about.state), f"cannot load {folder}")
            state.load(
                *(folder, self.model, together),
                functools.partial(self.registered.empty_tensors, about.registered),
                functools.partial(self.registered.load, about.registered),
            )
        for optimizer in self.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter in together.state:
                    optimizer.state[parameter] = together.state[parameter]

    def _load_parts(self, states: Mapping[str, Any]) -> None:
        for name, each in self.parts.items():
            if name not in states:
                continue
            try:
                saved = states[name]
                if isinstance(each, torch.amp.GradScaler):  # which takes any values
                    saved = decode(dict[str, float], saved)
                each.load_state_dict(saved)
            except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
                raise CheckpointError(
                    f"its state of the {name} is not valid: {brief(error, 200)}"
                ) from error
