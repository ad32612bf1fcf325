"""The checkpoints of a loop of one's own: the tensors of any run, and where the loop stands."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.checkpoint import manifest, state
from phalanx.checkpoint.encoding import encoded
from phalanx.checkpoint.foreign import brief
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.registered import Parts, Registered
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.standing import LoaderStanding, ScriptStanding
from phalanx.checkpoint.state import Together
from phalanx.comm.together import all_or_none, on_first_rank
from phalanx.errors import CheckpointError
from phalanx.script.states import load_scheduler, load_settings, settings_of


@dataclass(frozen=True)
class Standing:
    """Where a loop stands, apart from tensors.

    Attributes:
        strategy: text of it.
        steps_done: steps taken.
        draws: state of the generator that the loaders share, or None.
        loaders: `RankLoader.state` of each.
        schedulers: the schedules themselves.
        scaler: state of the scaler of the loss; None if there is none.
        best: as the manifest's.
        num_steps: steps that the run was to take; None if only its script knows.
        is_passing: whether the next checkpoint replaces this one.
    """

    strategy: str
    steps_done: int
    draws: Tensor | None
    loaders: Sequence[LoaderStanding]
    schedulers: Sequence[Any]
    scaler: dict[str, float] | None = None
    best: dict[str, Any] | None = None
    num_steps: int | None = None
    is_passing: bool = False


def begin(
    saver: Saver,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    standing: Standing,
    registered: Registered | None = None,
) -> Path:
    """Begin to save, and return the folder of the checkpoint; every rank calls this together.

    It takes the place of a checkpoint after the same step. Where no file can hold the state of an
    optimizer, a schedule or a registered object, the weights are saved alone.

    Raises:
        CheckpointError: the one before could not be written, or this holds the weights alone.
    """
    final = manifest.folder_of(saver.run, standing.steps_done)
    together, objects = Together(optimizers), registered or Registered()

    def collect() -> tuple[ScriptStanding, Parts]:
        state.state_of(model, together)
        parts = objects.parts()
        script = ScriptStanding(
            draws=to_text(standing.draws),
            loaders=tuple(standing.loaders),
            schedulers=tuple(
                encoded(each.state_dict(), type(each).__name__) for each in standing.schedulers
            ),
            groups=tuple(
                tuple(settings_of(group, type(each).__name__) for group in each.param_groups)
                for each in optimizers
            ),
        )
        return script, parts

    about = _manifest_of(standing)
    try:
        script, parts = all_or_none(collect, f"cannot save all of {final}")
    except CheckpointError as error:
        alone = ScriptStanding(draws="", loaders=(), schedulers=(), groups=())
        about = dataclasses.replace(about, script=alone, has_optimizer=False)
        saver.begin(model, Together([]), about, replaces=True)
        saver.finish()
        raise CheckpointError(
            f"{error}; the weights alone are saved there, and run.load_state_dict takes them"
        ) from error
    objects.warn_of_others(parts)
    whole = dataclasses.replace(about, script=script, registered=parts.plain)
    saver.begin(model, together, whole, parts.tensors, replaces=True)
    return final


def _manifest_of(standing: Standing) -> Manifest:
    return Manifest(
        steps_done=standing.steps_done,
        num_steps=standing.steps_done if standing.num_steps is None else standing.num_steps,
        consumed=0,
        num_ranks=dist.get_world_size(),
        strategy=standing.strategy,
        shape={},
        stream={},
        best=standing.best,
        scaler=standing.scaler,
        is_passing=standing.is_passing,
    )


def free_folder(folder: Path) -> Path:
    """Return a folder without checkpoints: `folder`, or its name and a number; all ranks call this.

    A run that is begun anew must not mix its checkpoints with those of another, nor end over it.
    """

    def find() -> Path:
        names = itertools.chain([folder], (Path(f"{folder}-{n}") for n in itertools.count(2)))
        return next(name for name in names if not manifest.whole(name))

    return on_first_rank(find, f"cannot save in {folder}")


def check_unused(folder: Path) -> None:
    """Refuse to begin a run in a folder that has checkpoints of another; all ranks call this.

    Raises:
        CheckpointError: it has some.
    """

    def check() -> None:
        if found := manifest.whole(folder):
            raise CheckpointError(
                f"it holds checkpoints of another run, the last after step {max(found)}; give "
                "another folder, or go on with that run by --resume"
            )

    on_first_rank(check, f"cannot begin a run in {folder}")


def load(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    standing: Standing,
    objects: Registered | None = None,
) -> tuple[Path, Standing] | None:
    """Load the latest checkpoint, if there is one; every rank calls this together.

    The model, the optimizers, the schedules of `standing` and the registered objects are then as
    they were.

    Returns:
        Where it is, and where the loop stood.

    Raises:
        CheckpointError: it is damaged, or of another model, optimizer or script.
    """
    found = on_first_rank(lambda: _latest(folder), f"cannot go on from {folder}")
    if found is None:
        return None
    where, about = found
    script = about.script
    assert script is not None, "it has been found"
    registered = about.registered or script.registered
    _check_counts(where, script, standing)
    _check_groups(where, script.groups, optimizers)
    stood = dataclasses.replace(
        standing,
        steps_done=about.steps_done,
        draws=from_text(script.draws),
        loaders=script.loaders,
        scaler=about.scaler,
        best=about.best,
    )
    for optimizer, groups in zip(optimizers, script.groups, strict=True):
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            load_settings(optimizer, group, settings)
    together, objects = Together(optimizers), objects or Registered()
    tensors = state.load(where, model, together, lambda index: objects.room(registered, index))
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter in together.state:
                optimizer.state[parameter] = together.state[parameter]
    for scheduler, saved in zip(standing.schedulers, script.schedulers, strict=True):
        load_scheduler(scheduler, saved)
    objects.load(registered, tensors)
    return where, stood


def _latest(folder: Path) -> tuple[Path, Manifest] | None:
    """Return the latest checkpoint that a script can resume, or None."""
    found = manifest.whole(folder)
    if not found:
        return None
    where = found[max(found)]
    about = manifest.read(where)
    if about.script is None:
        raise CheckpointError(f"{where} is of `phalanx train`, which goes on by --resume")
    if not about.has_optimizer:
        raise CheckpointError(
            f"{where} holds the weights alone; run.load_state_dict takes them, to begin anew"
        )
    return where, about


def _check_counts(where: Path, script: ScriptStanding, standing: Standing) -> None:
    for what in ("loaders", "schedulers"):
        was, is_now = len(getattr(script, what)), len(getattr(standing, what))
        if was != is_now:
            raise CheckpointError(
                f"{where} is of a script that prepared {was} {what}, and this one prepared "
                f"{is_now}; prepare the same"
            )


def to_text(generator: Tensor | None) -> str:
    """Return the state of a generator as text."""
    return "" if generator is None else generator.numpy().tobytes().hex()


def from_text(text: str) -> Tensor | None:
    """Return the state of a generator from what `to_text` made of it.

    Raises:
        CheckpointError: it is no state of a generator.
    """
    if not text:
        return None
    try:
        state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"its state of a generator, {brief(text)}, is none: {brief(error)}"
        ) from error
    return state


def _check_groups(
    where: Path, groups: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    was = [len(each) for each in groups]
    now = [len(each.param_groups) for each in optimizers]
    if was != now:
        raise CheckpointError(
            f"{where} is of optimizers with {was} parameter groups, and this script's have {now}; "
            "make the same optimizers"
        )
