"""Checkpoints of a user's loop or a trainer: tensors, and the position in the data."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.checkpoint import manifest, state
from phalanx.checkpoint.encoding import encoded
from phalanx.checkpoint.files import find_whole
from phalanx.checkpoint.manifest import Checkpoint, Manifest
from phalanx.checkpoint.moments import CombinedOptimizer
from phalanx.checkpoint.position import ScriptPosition
from phalanx.checkpoint.registered import Registered, SplitState, unchanged_on_error
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.untrusted import brief
from phalanx.comm.together import all_or_none, on_first_rank
from phalanx.errors import CheckpointError
from phalanx.script.order import JobGenerator
from phalanx.script.states import load_scheduler, load_settings, settings_of

if TYPE_CHECKING:
    from phalanx.script.loader import RankLoader


@dataclass(frozen=True)
class LoopObjects:
    """The objects of a training loop that a checkpoint stores."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any]
    loaders: Sequence[RankLoader]
    generator: JobGenerator
    registered: Registered


def begin(saver: Saver, loop: LoopObjects, strategy: str, steps_done: int, **more: Any) -> Path:
    """Start saving, and return the folder of the checkpoint; every rank calls this together.

    It replaces a checkpoint of the same step. If the state of an optimizer, a schedule or a
    registered object cannot be stored, only the weights are saved, in a folder that no resume
    reads. `more` are manifest fields.

    Raises:
        CheckpointError: the previous save failed, or only the weights are saved.
    """
    final = manifest.folder_of(saver.run, steps_done)
    together = CombinedOptimizer(loop.optimizers)

    def collect() -> tuple[ScriptPosition, SplitState]:
        state.state_of(loop.model, together)
        parts = loop.registered.parts()
        script = ScriptPosition(
            draws=to_text(loop.generator.state),
            loaders=tuple(loader.state() for loader in loop.loaders),
            schedulers=tuple(
                encoded(each.state_dict(), type(each).__name__) for each in loop.schedulers
            ),
            groups=tuple(
                tuple(settings_of(group, type(each).__name__) for group in each.param_groups)
                for each in loop.optimizers
            ),
        )
        return script, parts

    about = Manifest(
        steps_done=steps_done,
        num_steps=more.pop("num_steps", 0) or steps_done,  # 0: a script does not give its total
        consumed=0,
        num_ranks=dist.get_world_size(),
        strategy=strategy,
        shape={},
        stream={},
        **more,
    )
    try:
        script, parts = all_or_none(collect, f"cannot save all of {final}")
    except CheckpointError as error:
        alone = ScriptPosition(draws="", loaders=(), schedulers=(), groups=())
        about = dataclasses.replace(about, script=alone, has_optimizer=False)
        saver.begin(loop.model, CombinedOptimizer([]), about, replaces=True)
        saver.finish()
        raise CheckpointError(
            f"{error}; only the weights are saved, and run.load_state_dict loads them from "
            f"{manifest.folder_of(saver.run, steps_done, 'weights')}"
            f"{manifest.older_checkpoints_hint(final)}"
        ) from error
    loop.registered.warn_if_ranks_differ(parts)
    whole = dataclasses.replace(about, script=script, registered=parts.plain)
    saver.begin(loop.model, together, whole, parts.tensors, replaces=True)
    return final


def free_folder(folder: Path) -> Path:
    """Return a folder without checkpoints, `folder` or `folder`-N; all ranks call this.

    A new run must not mix its checkpoints with another run's, and must not fail because of them.
    """

    def find() -> Path:
        names = itertools.chain([folder], (Path(f"{folder}-{n}") for n in itertools.count(2)))
        return next(
            name
            for name in names
            if not manifest.complete_checkpoints(name) and not (name / manifest.NAME).exists()
        )

    return on_first_rank(find, f"cannot save in {folder}")


def load(folder: Path, loop: LoopObjects) -> Checkpoint | None:
    """Load the checkpoint that `folder` names into `loop`; every rank calls this together.

    Returns:
        The checkpoint; None if there is none.

    Raises:
        CheckpointError: it is damaged, or from another model, optimizer or script.
    """
    found = on_first_rank(lambda: _latest(folder), f"cannot resume from {folder}")
    if found is None:
        return None
    where, about, _ = found
    script = about.script
    assert script is not None, "it has been found"
    registered = about.registered or script.registered
    _check_counts(where, script, loop)
    draws = from_text(script.draws)
    together, objects = CombinedOptimizer(loop.optimizers), loop.registered
    with unchanged_on_error([*loop.schedulers, *objects.objects], together.param_groups):
        for optimizer, groups in zip(loop.optimizers, script.groups, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                load_settings(optimizer, group, settings)

        def take(tensors: Mapping[str, Tensor]) -> None:
            for scheduler, saved in zip(loop.schedulers, script.schedulers, strict=True):
                load_scheduler(scheduler, saved)
            objects.load(registered, tensors)

        room = functools.partial(objects.empty_tensors, registered)
        state.load(where, loop.model, together, room, take)
    for optimizer in loop.optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter in together.state:
                optimizer.state[parameter] = together.state[parameter]
    loop.generator.state = draws
    for loader, stood in zip(loop.loaders, script.loaders, strict=True):
        loader.set_state(stood)
    return found


def _latest(folder: Path) -> Checkpoint | None:
    """Return the checkpoint that `folder` names, or the latest of the run; None in a new run."""
    is_new = manifest.run_folder(folder) == folder and not (folder / manifest.NAME).exists()
    if is_new and not manifest.complete_checkpoints(folder):
        return None
    found = find_whole(folder, compares=True)
    where, about, _ = found
    if not about.has_optimizer:
        raise CheckpointError(
            f"{where} contains only the weights; start a new run and load them by "
            f"run.load_state_dict{manifest.older_checkpoints_hint(where)}"
        )
    if about.script is None:
        raise CheckpointError(f"{where} was saved by `phalanx train`; resume it by --resume")
    return found


def _check_counts(where: Path, script: ScriptPosition, loop: LoopObjects) -> None:
    for what in ("loaders", "schedulers"):
        was, is_now = len(getattr(script, what)), len(getattr(loop, what))
        if was != is_now:
            raise CheckpointError(
                f"{where} was saved by a script that prepared {was} {what}, but this script "
                f"prepared {is_now}; prepare the same {what}"
            )
    was = [len(each) for each in script.groups]
    is_now = [len(each.param_groups) for each in loop.optimizers]
    if was != is_now:
        raise CheckpointError(
            f"{where} was saved with optimizers of {was} parameter groups, but this script's have "
            f"{is_now}; make the same optimizers"
        )


def to_text(generator: Tensor | None) -> str:
    """Return a generator state as hexadecimal text; empty for None."""
    return "" if generator is None else generator.numpy().tobytes().hex()


def from_text(text: str) -> Tensor | None:
    """Return the generator state that `to_text` encoded; None for empty text."""
    if not text:
        return None
    try:
        state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"a generator state of the checkpoint, {brief(text)}, is not valid: {brief(error)}"
        ) from error
    return state
