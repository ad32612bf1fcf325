"""A strategy: how the work of one model is split over ranks. One frozen value with a text form.

    pp2:1f1b,dp2,fsdp2,cp2:ring,tp4:2d,recompute:sqrt

The text is a comma-separated list of `AXIS DEGREE [":" KIND ["/" OPTION]]`, in any order, and of
the settings `recompute:KIND[/OPTION]`, `cut:LAYERS+LAYERS...` and `schedule:FILE`, which have no
degree. The canonical order is outer to inner, the slowest link first: pp dp fsdp cp tp. An axis
that is not named has degree 1. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from phalanx.errors import StrategyError, nearest
from phalanx.strategy.kinds import AXES, KINDS, SERVED

_PART: Final = re.compile(r"([a-z_]+)([0-9]{1,9})?(?::([^/:]+)(?:/([0-9]{1,9}))?)?")
_CUT: Final = re.compile(r"[0-9]{1,9}(\+[0-9]{1,9})*")


@dataclass(frozen=True)
class Axis:
    """One axis of a strategy: its degree, how it splits, and the number that this kind may take."""

    degree: int
    kind: str
    option: int | None = None


@dataclass(frozen=True)
class Recompute:
    """Which activations are dropped after the forward pass and computed again in the backward."""

    kind: str = "none"
    option: int | None = None

    def segment_size(self, num_blocks: int) -> int | None:
        """Return how many consecutive blocks are run again as one, of which only the input is kept.

        `full` is 1, `every/K` is K, and `sqrt` the root of the number of blocks, rounded up (Chen
        et al. 2016, section 4.1); None where no block is run again whole.

        Raises:
            StrategyError: K is above the number of blocks.
        """
        if self.kind == "every":
            assert self.option is not None
            if self.option > num_blocks:
                raise StrategyError(
                    f"recompute:every/{self.option}: the model has {num_blocks} blocks; the "
                    f"nearest is recompute:every/{num_blocks}"
                )
            return self.option
        if self.kind == "sqrt":
            return math.isqrt(num_blocks - 1) + 1
        return 1 if self.kind == "full" else None


@dataclass(frozen=True)
class Strategy:
    """How the work is split: a degree and a kind for each axis.

    `cut` has the layers of each stage of a pipeline, where they are not to be found by their cost,
    and `schedule` the file of its schedule, where that is not of a kind.
    `Strategy.parse(text)` reads the text form and `str()` gives the canonical one;
    `Strategy.parse(str(strategy)) == strategy` always holds.

    Raises:
        StrategyError: an unknown kind, a degree below 1 or one that the kind cannot arrange.
    """

    pp: Axis = Axis(1, "1f1b")
    dp: Axis = Axis(1, "bucketed")
    fsdp: Axis = Axis(1, "zero3")
    cp: Axis = Axis(1, "ring")
    tp: Axis = Axis(1, "1d")
    recompute: Recompute = Recompute()
    cut: tuple[int, ...] = ()
    schedule: str = ""

    def __post_init__(self) -> None:
        for name, axis in self.axes():
            if axis.degree < 1:
                raise StrategyError(f"{name}{axis.degree}: a degree must be at least 1, as {name}1")
            _check_kind(name, axis.kind, axis.option)
            _check_arrangement(name, axis)
        _check_kind("recompute", self.recompute.kind, self.recompute.option)
        if self.cut and self.pp.degree == 1:
            raise StrategyError(
                f"{_cut_text(self.cut)} has the stages of a pipeline, and there is none; write "
                f"pp{max(2, len(self.cut))} beside it, or leave it out"
            )
        if self.schedule and (self.pp.degree == 1 or self.pp.kind != Strategy.pp.kind):
            pp = f"pp{max(2, self.pp.degree)}"
            raise StrategyError(
                f"schedule:{self.schedule} needs pp without a kind, but pp is "
                f"{text_of('pp', self.pp)}; write {pp},schedule:{self.schedule}"
            )
        if 0 in self.cut:
            raise StrategyError(f"{_cut_text(self.cut)}: a stage has at least 1 layer")

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read the text form.

        Raises:
            StrategyError: the text cannot be read; the message names the nearest legal text.
        """
        try:
            values: dict[str, Any] = {}
            for part in text.split(","):
                name, value = _parse_part(part.strip(" "))
                if name in values:
                    raise StrategyError(f"{name} is named twice; each axis at most once")
                values[name] = value
            return cls(**values)
        except StrategyError as error:
            reason = str(error).removeprefix(f"{text}: ")
            raise StrategyError(f"strategy {_shown(text)}: {reason}") from None

    def axes(self) -> Iterator[tuple[str, Axis]]:
        """Yield (name, axis), outer to inner."""
        for name in AXES:
            yield name, getattr(self, name)

    def with_degree(self, name: str, degree: int) -> Strategy:
        """Return it with another degree of an axis; another of pp has stages of its own."""
        changed = dataclasses.replace(getattr(self, name), degree=degree)
        of_stages: dict[str, Any] = {"cut": (), "schedule": ""} if name == "pp" else {}
        return dataclasses.replace(self, **{name: changed}, **of_stages)

    def named(self) -> Iterator[tuple[str, Axis | Recompute]]:
        """Yield (name, part) of each part that its text names, outer to inner, recompute last."""
        for name in KINDS:
            if (part := getattr(self, name)) != getattr(Strategy, name):
                yield name, part

    def grid(self) -> dict[str, int]:
        """Return the sub-axes that the ranks of tp stand in, outer to inner, and their sizes.

        `tp`; `tp_row, tp_col` for 2d; `tp_depth, tp_row, tp_col` for 2.5d; `tp_y, tp_z, tp_x` for
        3d.
        """
        return KINDS["tp"][self.tp.kind].sizes("tp", self.tp.degree, self.tp.option)

    def mesh_axes(self) -> dict[str, int]:
        """Return the sizes of the axes of the mesh: those above 1, outer to inner; else `dp`."""
        axes: dict[str, int] = {}
        for name, axis in self.axes():
            if axis.degree > 1:
                axes |= KINDS[name][axis.kind].sizes(name, axis.degree, axis.option)
        return axes or {"dp": 1}

    @property
    def num_ranks(self) -> int:
        """Processes that the strategy needs."""
        return math.prod(axis.degree for _, axis in self.axes())

    @property
    def is_served(self) -> bool:
        """Whether workers exchange gradients by parameter servers."""
        return self.dp.kind in SERVED

    @property
    def of_worker(self) -> Strategy:
        """How the job of one worker splits the work; all of it where there are no servers."""
        return dataclasses.replace(self, dp=Strategy.dp) if self.is_served else self

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that see different samples: dp times fsdp."""
        return self.dp.degree * self.fsdp.degree

    @property
    def has_whole_samples(self) -> bool:
        """Whether each rank computes whole samples: tp splits features, cp positions."""
        return self.tp.degree * self.cp.degree == 1

    @property
    def sample_shards(self) -> int:
        """In how many shards the positions of a sample are split."""
        return self.cp.degree

    @property
    def of_block(self) -> Strategy:
        """The axes that split the tensors of one block, and what of it is run again."""
        return Strategy(cp=self.cp, tp=self.tp, recompute=self.recompute)

    def with_whole_positions(self) -> Strategy:
        """Return it without the axis that splits positions."""
        return dataclasses.replace(self, cp=Strategy.cp)

    @property
    def num_shards(self) -> int:
        """Shards of the trained state under fsdp, which splits it over cp too; 1 without fsdp."""
        return self.fsdp.degree * self.cp.degree if self.fsdp.degree > 1 else 1

    def __str__(self) -> str:
        parts = [text_of(name, part) for name, part in self.named()]
        parts += [_cut_text(self.cut)] if self.cut else []
        parts += [f"schedule:{self.schedule}"] if self.schedule else []
        return ",".join(parts) or "dp1"


_LONGEST_SHOWN: Final = 60


def _shown(text: str) -> str:
    """Return a text in quotes, cut where it is too long for a message."""
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}...")


def _parse_part(part: str) -> tuple[str, Axis | Recompute | tuple[int, ...] | str]:
    """Read one part between two commas into (name, value)."""
    name, _, path = part.partition(":")
    if name == "schedule":
        if not path:
            raise StrategyError("schedule has a file, such as schedule:mine.csv")
        return name, path
    match = _PART.fullmatch(part)
    if match is None:
        raise StrategyError(
            f"cannot read {_shown(part)}; expected AXIS DEGREE[:KIND[/OPTION]], such as dp2 or "
            "pp4:interleaved/2, separated by commas"
        )
    name, degree, kind, option = match.groups()
    if name == "cut":
        if degree is not None or option is not None or not _CUT.fullmatch(kind or ""):
            raise StrategyError(
                f"cannot read {_shown(part)}; expected the layers of each stage, such as cut:4+5"
            )
        return name, tuple(map(int, kind.split("+")))
    if name not in KINDS:
        raise StrategyError(
            f"axis {_shown(name)} is unknown{nearest(name[:_LONGEST_SHOWN], KINDS)}; the axes are "
            f"{', '.join(AXES)}, and recompute, cut and schedule are settings"
        )
    number = None if option is None else int(option)
    if name == "recompute":
        if degree is not None or kind is None:
            raise StrategyError(
                f"'{part}': recompute has a kind and no degree, such as "
                f"recompute:{kind or 'full'}; the kinds are {', '.join(KINDS[name])}"
            )
        return name, Recompute(kind, number)
    if degree is None:
        raise StrategyError(f"'{part}' lacks its degree; write {name}2, say")
    return name, Axis(int(degree), kind or next(iter(KINDS[name])), number)


def _check_kind(name: str, kind: str, option: int | None) -> None:
    """Raise StrategyError unless `kind` is one of the axis's and takes this option."""
    kinds = KINDS[name]
    if kind not in kinds:
        raise StrategyError(
            f"kind {_shown(kind)} of {name} is unknown{nearest(kind[:_LONGEST_SHOWN], kinds)}; "
            f"the kinds are {', '.join(kinds)}"
        )
    name_of_option, least = kinds[kind].option, kinds[kind].least
    if name_of_option is None and option is not None:
        raise StrategyError(f"{name}:{kind}/{option}: {kind} takes no option; write {name}:{kind}")
    if name_of_option is not None and option is None:
        raise StrategyError(
            f"{name}:{kind} lacks its option {name_of_option}; write {kind}/{least}, say"
        )
    if option is not None and option < least:
        raise StrategyError(
            f"{name}:{kind}/{option}: {name_of_option} must be at least {least}; write "
            f"{kind}/{least}"
        )


def _check_arrangement(name: str, axis: Axis) -> None:
    """Raise StrategyError unless the ranks of an axis can stand in the grid of its kind."""
    kind = KINDS[name][axis.kind]
    best = kind.nearest_degree(axis.degree, axis.option)
    if best != axis.degree:
        raise StrategyError(
            f"{text_of(name, axis)}: the degree must be "
            f"{kind.degrees.format(axis.option)}; the nearest is "
            f"{text_of(name, dataclasses.replace(axis, degree=best))}"
        )


def text_of(name: str, part: Axis | Recompute) -> str:
    """Return NAME DEGREE[:KIND[/OPTION]], of which the end is left out where it is the default."""
    text = f"{name}{part.degree}" if isinstance(part, Axis) else name
    if part.option is not None:
        return f"{text}:{part.kind}/{part.option}"
    return text if part.kind == next(iter(KINDS[name])) else f"{text}:{part.kind}"


def _cut_text(cut: tuple[int, ...]) -> str:
    return f"cut:{'+'.join(map(str, cut))}"
