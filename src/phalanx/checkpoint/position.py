"""The position of a training script in its data, as its manifest holds it: plain values for JSON.

The manifest itself has the steps done and the strategy; files of tensors have all that is large.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LoaderPosition:
    """The position of a loader in its passes.

    Attributes:
        epoch: passes that have ended.
        row: rows of the passes before.
        batches: batches yielded in the pass under way.
        order: digest of the samples of each batch of that pass.
        generators: states of the generators that it drew that order from, in hexadecimal digits.
    """

    epoch: int
    row: int
    batches: int
    order: str
    generators: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ScriptPosition:
    """The position of a training script, apart from tensors.

    Attributes:
        draws: state of the generator that the loaders share, in hexadecimal digits, or empty.
        loaders: of each loader.
        schedulers: state of each schedule, see phalanx.script.states.
        groups: of each optimizer the settings of each of its parameter groups, likewise.
        registered: as the manifest's, of a checkpoint of an earlier version; else empty.
    """

    draws: str
    loaders: tuple[LoaderPosition, ...]
    schedulers: tuple[dict[str, Any], ...]
    groups: tuple[tuple[dict[str, Any], ...], ...]
    registered: dict[str, Any] = field(default_factory=dict[str, Any])
