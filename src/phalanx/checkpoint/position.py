"""The data position of a training script, stored as JSON values in the checkpoint's manifest.

The manifest also stores the steps done and the strategy; large values are in tensor files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LoaderPosition:
    """The position of a data loader: its epoch, and the batches yielded in that epoch.

    Attributes:
        epoch: completed passes over the loader.
        row: rows of all previous passes together.
        batches: batches yielded in the current pass.
        order: digest of the samples of each batch of the current pass; for a stream, number and
            digest of the last digested batch.
        generators: states from which that order was drawn, or the next order if `batches` is 0, by
            generator, in hexadecimal digits.
    """

    epoch: int
    row: int
    batches: int
    order: str
    generators: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ScriptPosition:
    """The position of a training script, without its tensors.

    Attributes:
        draws: state of the generator that the loaders share, in hexadecimal digits, or empty.
        loaders: position of each loader.
        schedulers: state of each learning-rate scheduler, see phalanx.script.states.
        groups: settings of each parameter group, for each optimizer, see phalanx.script.states.
        registered: as `Manifest.registered`, in checkpoints of earlier versions; otherwise empty.
    """

    draws: str
    loaders: tuple[LoaderPosition, ...]
    schedulers: tuple[dict[str, Any], ...]
    groups: tuple[tuple[dict[str, Any], ...], ...]
    registered: dict[str, Any] = field(default_factory=dict[str, Any])
