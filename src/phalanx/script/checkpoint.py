"""The checkpoints of a loop of one's own: the tensors of any run, and where the loop stands."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.checkpoint import manifest, state
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.saver import Saver
from phalanx.comm.together import on_first_rank
from phalanx.errors import CheckpointError


@dataclass(frozen=True)
class Standing:
    """Where a loop stands, apart from tensors; plain values for JSON but for `draws`.

    Attributes:
        strategy: text of it.
        steps_done: steps taken.
        draws: state of the generator that the loaders share, or None.
        loaders: `RankLoader.state` of each.
        schedulers: `state_dict` of each.
    """

    strategy: str
    steps_done: int
    draws: Tensor | None
    loaders: Sequence[Mapping[str, Any]]
    schedulers: Sequence[Mapping[str, Any]]


class _Together:
    """Several optimizers as one, as far as a checkpoint looks at one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.state = {p: held for each in optimizers for p, held in each.state.items()}


def save(
    saver: Saver,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    standing: Standing,
) -> Path:
    """Save and wait until the checkpoint is whole; every rank calls this together.

    Raises:
        CheckpointError: it cannot be written.
    """
    final = manifest.folder_of(saver.run, standing.steps_done)
    if on_first_rank((final / manifest.NAME).exists, f"cannot save in {saver.run}"):
        return final  # by this run, which has taken no step since
    values = vars(standing) | {
        "schedulers": [_encoded(each) for each in standing.schedulers],
        "draws": to_text(standing.draws),
        "groups": [[_settings(group) for group in each.param_groups] for each in optimizers],
    }
    about = Manifest(
        steps_done=standing.steps_done,
        num_steps=standing.steps_done,
        consumed=0,
        num_ranks=dist.get_world_size(),
        strategy=standing.strategy,
        shape={},
        stream={},
        script=_plain(values),
    )
    together = cast(torch.optim.Optimizer, _Together(optimizers))
    saver.begin(model, together, about)
    saver.finish()
    return final


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
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], standing: Standing
) -> tuple[Path, dict[str, Any]] | None:
    """Load the latest checkpoint, if there is one; every rank calls this together.

    Returns:
        Where it is, and what `save` was told of the loop.

    Raises:
        CheckpointError: it is damaged, or of another model, optimizer or script.
    """

    def find() -> tuple[Path, dict[str, Any]] | None:
        found = manifest.whole(folder)
        if not found:
            return None
        where = found[max(found)]
        script = manifest.read(where).script
        if script is None:
            raise CheckpointError(f"{where} is of `phalanx train`, which goes on by --resume")
        return where, script

    found = on_first_rank(find, f"cannot go on from {folder}")
    if found is None:
        return None
    where, script = found
    for what in ("loaders", "schedulers"):
        was, is_now = len(script[what]), len(getattr(standing, what))
        if was != is_now:
            raise CheckpointError(
                f"{where} is of a script that prepared {was} {what}, and this one prepared "
                f"{is_now}; prepare the same"
            )
    _check_groups(where, script["groups"], optimizers)
    together = _Together(optimizers)
    state.load(where, model, cast(torch.optim.Optimizer, together))
    for optimizer, groups in zip(optimizers, script["groups"], strict=True):
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})
            for parameter in group["params"]:
                if parameter in together.state:
                    optimizer.state[parameter] = together.state[parameter]
    script["schedulers"] = [_decoded(each) for each in script["schedulers"]]
    return where, script


def to_text(generator: Tensor | None) -> str:
    """Return the state of a generator as text."""
    return "" if generator is None else generator.numpy().tobytes().hex()


def from_text(text: str) -> Tensor | None:
    """Return the state of a generator from what `to_text` made of it."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) if text else None


def _encoded(value: Any) -> Any:
    """Return a value as JSON has it, with what it has not: keys that are no text, and counts."""
    if isinstance(value, Mapping):
        pairs = [[key, _encoded(each)] for key, each in cast("Mapping[Any, Any]", value).items()]
        return {"counter" if isinstance(value, Counter) else "pairs": pairs}
    if isinstance(value, list | tuple):
        return [_encoded(each) for each in cast("Sequence[Any]", value)]
    return float(value) if isinstance(value, Tensor) and value.ndim == 0 else value


def _decoded(value: Any) -> Any:
    """Return what `_encoded` was given, tuples as lists."""
    if isinstance(value, dict):
        ((kind, pairs),) = cast("dict[str, Any]", value).items()
        found = {key: _decoded(each) for key, each in pairs}
        return Counter(found) if kind == "counter" else found
    if isinstance(value, list):
        return [_decoded(each) for each in cast("list[Any]", value)]
    return value


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


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group."""
    return {
        name: float(value) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as JSON has them.

    Raises:
        CheckpointError: one is nothing for JSON.
    """
    try:
        return json.loads(json.dumps(values))
    except TypeError as error:
        raise CheckpointError(
            f"cannot save the state of a scheduler or optimizer: {error}; expected numbers and text"
        ) from error
