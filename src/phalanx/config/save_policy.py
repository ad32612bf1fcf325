"""When a run saves and what it keeps, and the text form: `every=500,minutes=10,keep=3`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from phalanx.config.fields import Parts, Range
from phalanx.errors import ConfigError

RETIRED: Final[Mapping[str, str]] = {
    **{"save_every": "every", "save_every_minutes": "minutes"},
    **{"keep_checkpoints": "keep", "best": "best"},
}
"""Setting of earlier runs -> the part of `save` that replaces it."""


@dataclass(frozen=True, kw_only=True)
class SavePolicy(Parts):
    """When a run saves, and which checkpoints stay.

    Attributes:
        every: steps between two checkpoints that stay; 0: only the one at the end.
        minutes: most minutes between two; one made for this stays until the next. 0: none.
        keep: of those by `every` and at the end, how many stay, the latest; None: all.
        best: measure of the evaluations whose best checkpoint stays too: min:loss, or min: or max:
            and the name of a metric; None: no measure.
    """

    KEY: ClassVar = "save"
    every: Annotated[int, Range(0)] = 0
    minutes: Annotated[float, Range(0, 10**6, "[]")] = 10.0
    keep: Annotated[int | None, Range(1)] = None
    best: str | None = None

    def __post_init__(self) -> None:
        if self.best is not None and re.fullmatch("(min|max):.+", self.best) is None:
            raise ConfigError(
                f"save: best is {self.best!r}; expected min: or max: and a measure, such as "
                "min:loss or max:accuracy"
            )

    def __str__(self) -> str:
        named = {**vars(self), "minutes": f"{self.minutes:.15g}"}
        return ",".join(f"{name}={value}" for name, value in named.items() if value)

    def num_due(self, saved: int, done: int, last: int) -> int:
        """Return how many checkpoints that stay a run of `last` steps makes in steps saved+1..done.

        There is one after each `every` steps, and one after the last step.
        """
        every = self.every or max(1, last)
        at_end = saved < done == last and last % every > 0
        return max(0, done // every - saved // every) + at_end

    def is_late(self, elapsed_s: float) -> bool:
        """Return whether a save is due by time, if the last one began `elapsed_s` ago."""
        return self.minutes > 0 and elapsed_s >= 60 * self.minutes


def renewed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by key in which `save` has the values of those that are `RETIRED`."""
    new = {key: value for key, value in values.items() if key not in RETIRED}
    parts = [f"{RETIRED[key]}={value}" for key, value in values.items() if key in RETIRED]
    if parts:
        parts += [f"{new['save']}"] if "save" in new else []  # which may have the other parts
        new["save"] = str(SavePolicy.parse(",".join(parts)))
    return new
