"""A strategy: how the work of one model is split over ranks, a frozen value with a text form.

    pp2:1f1b,dp2,fsdp2,cp2:ring,tp4:2d,recompute:sqrt

The text is a comma-separated list of `AXIS DEGREE [":" KIND ["/" OPTION]]`, in any order, and of
the settings `recompute:KIND[/OPTION]`, `cut:LAYERS+LAYERS...` and `schedule:FILE`, which have no
degree. The canonical order is outer to inner, the slowest link first: pp dp fsdp cp ep tp. An
axis that is not named has degree 1. This module does not import torch.
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
    """An axis of a strategy: degree, kind, and the integer option of the kind, if it has one."""

    degree: int
    kind: str
    option: int | None = None


@dataclass(frozen=True)
class Recompute:
    """Policy for activations that are dropped after the forward and recomputed in the backward."""

    kind: str = "none"
    option: int | None = None

    def segment_size(self, num_blocks: int) -> int | None:
        """Return the number of consecutive blocks that are recomputed from one stored input.

        1 for `full`, K for `every/K`, and for `sqrt` the square root of the number of blocks,
        rounded up (Chen et al. 2016, section 4.1); None if no whole block is recomputed.

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
    """A parallelism strategy: a degree and a kind for each axis.

    `cut` is the number of layers of each pipeline stage; if empty, stages are balanced by cost.
    `schedule` is the file of a pipeline schedule; if empty, the kind of pp determines the schedule.
    `Strategy.parse(text)` reads the text form and `str()` returns the canonical one;
    `Strategy.parse(str(strategy)) == strategy` always holds.

    Raises:
        StrategyError: a kind is unknown, a degree is below 1 or does not form the grid of its
            kind, or `cut` or `schedule` does not match pp.
    """

    pp: Axis = Axis(1, "1f1b")
    dp: Axis = Axis(1, "bucketed")
    fsdp: Axis = Axis(1, "zero3")
    cp: Axis = Axis(1, "ring")
    ep: Axis = Axis(1, "all_to_all")
    tp: Axis = Axis(1, "1d")
    recompute: Recompute = Recompute()
    cut: tuple[int, ...] = ()
    schedule: str = ""

    def __post_init__(self) -> None:
        for name, axis in self.axes():
            if axis.degree < 1:
                raise StrategyError(f"{name}{axis.degree}: a degree must be at least 1, as {name}1")
            _check_kind(name, axis.kind, axis.option)
            kind = KINDS[name][axis.kind]
            best = kind.nearest_degree(axis.degree, axis.option)
            if best != axis.degree:
                raise StrategyError(
                    f"{text_of(name, axis)}: the degree must be "
                    f"{kind.degrees.format(axis.option)}; the nearest is "
                    f"{text_of(name, dataclasses.replace(axis, degree=best))}"
                )
        _check_kind("recompute", self.recompute.kind, self.recompute.option)
        if self.cut and self.pp.degree == 1:
            raise StrategyError(
                f"{_cut_text(self.cut)} lists stages of a pipeline, but the strategy has no pp; "
                f"add pp{max(2, len(self.cut))}, or leave the cut out"
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
        """Parse the text form.

        Raises:
            StrategyError: the text is invalid; the message suggests a valid one.
        """
        try:
            values: dict[str, Any] = {}
            for part in text.split(","):
                name, value = _parse_part(part.strip(" "))
                if name in values:
                    raise StrategyError(f"{name} is named twice; name each axis at most once")
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
        """Return a copy with another degree of an axis; for pp, drop `cut` and `schedule` too."""
        changed = dataclasses.replace(getattr(self, name), degree=degree)
        of_stages: dict[str, Any] = {"cut": (), "schedule": ""} if name == "pp" else {}
        return dataclasses.replace(self, **{name: changed}, **of_stages)

    def named(self) -> Iterator[tuple[str, Axis | Recompute]]:
        """Yield (name, part) of each non-default part: axes, outer to inner, and then recompute."""
        for name in KINDS:
            if (part := getattr(self, name)) != getattr(Strategy, name):
                yield name, part

    def grid(self) -> dict[str, int]:
        """Return the sub-axes of tp, outer to inner: name -> size.

        The names are `tp_row, tp_col` for 2d, `tp_depth, tp_row, tp_col` for 2.5d, `tp_y, tp_z,
        tp_x` for 3d, and else `tp`.
        """
        return KINDS["tp"][self.tp.kind].sizes("tp", self.tp.degree, self.tp.option)

    def mesh_axes(self) -> dict[str, int]:
        """Return mesh axis -> size, outer to inner, of axes with a degree above 1; else `dp`: 1."""
        axes: dict[str, int] = {}
        for name, axis in self.axes():
            if axis.degree > 1:
                axes |= KINDS[name][axis.kind].sizes(name, axis.degree, axis.option)
        return axes or {"dp": 1}

    @property
    def num_ranks(self) -> int:
        """Number of processes that the strategy needs."""
        return math.prod(axis.degree for _, axis in self.axes())

    @property
    def is_served(self) -> bool:
        """Whether dp exchanges gradients through parameter servers."""
        return self.dp.kind in SERVED

    @property
    def of_worker(self) -> Strategy:
        """Strategy of one worker's job with parameter servers; without servers, this strategy."""
        return dataclasses.replace(self, dp=Strategy.dp) if self.is_served else self

    @property
    def data_ranks(self) -> int:
        """Number of groups of ranks that process different samples: dp times fsdp times ep."""
        return self.dp.degree * self.fsdp.degree * self.ep.degree

    @property
    def splits_rows(self) -> bool:
        """Whether ranks have different positions of the same row."""
        return self.cp.degree > 1

    @property
    def has_whole_samples(self) -> bool:
        """Whether each rank processes whole samples; tp splits their features, cp positions."""
        return self.tp.degree * self.cp.degree == 1

    @property
    def sample_shards(self) -> int:
        """Number of shards into which the positions of a sample are split."""
        return self.cp.degree

    @property
    def ring_ranks(self) -> int:
        """Number of ranks that pass keys and values in a ring; 1 without a ring."""
        return self.cp.degree if self.cp.kind == "ring" else 1

    @property
    def length_unit(self) -> int:
        """Unit of the sequence length: all chunks of positions, and the tp ranks' shards of one."""
        chunks = KINDS["cp"][self.cp.kind].chunks if self.cp.degree > 1 else 1
        return self.sample_shards * math.lcm(chunks, self.tp.degree)

    @property
    def of_block(self) -> Strategy:
        """The axes that split the tensors of one block, cp, ep and tp, and its recomputation."""
        return Strategy(cp=self.cp, ep=self.ep, tp=self.tp, recompute=self.recompute)

    def with_whole_positions(self) -> Strategy:
        """Return a copy without cp, the axis that splits positions."""
        return dataclasses.replace(self, cp=Strategy.cp)

    @property
    def num_shards(self) -> int:
        """Number of shards of training state under fsdp, which shards over cp and ep too; else 1.

        An expert has as many: its rank of ep has one shard of it for each rank of fsdp and cp.
        """
        num = self.fsdp.degree * self.cp.degree * self.ep.degree
        return num if self.fsdp.degree > 1 else 1

    @property
    def num_expert_shards(self) -> int:
        """Number of parts of the experts' training state: shards under fsdp, else ranks of ep."""
        return self.num_shards if self.fsdp.degree > 1 else self.ep.degree

    def __str__(self) -> str:
        parts = [text_of(name, part) for name, part in self.named()]
        parts += [_cut_text(self.cut)] if self.cut else []
        parts += [f"schedule:{self.schedule}"] if self.schedule else []
        return ",".join(parts) or "dp1"


_LONGEST_SHOWN: Final = 60


def _shown(text: str) -> str:
    """Return a text in quotes, truncated to _LONGEST_SHOWN characters for a message."""
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}...")


def _parse_part(part: str) -> tuple[str, Axis | Recompute | tuple[int, ...] | str]:
    """Parse one part between commas into (name, value)."""
    name, _, path = part.partition(":")
    if name == "schedule":
        if not path:
            raise StrategyError("schedule needs a file, such as schedule:mine.csv")
        return name, path
    #   pp4:interleaved/2     name pp, degree 4, kind interleaved, option 2
    #   recompute:every/3     name recompute, no degree, kind every, option 3
    #   cut:4+5               name cut, no degree, kind 4+5
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
        raise StrategyError(f"'{part}' lacks its degree; write {name}2, for example")
    return name, Axis(int(degree), kind or next(iter(KINDS[name])), number)


def _check_kind(name: str, kind: str, option: int | None) -> None:
    """Raise StrategyError unless axis `name` has the kind, and the kind accepts the option."""
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
            f"{name}:{kind} lacks its option {name_of_option}; write {kind}/{least}, for example"
        )
    if option is not None and option < least:
        raise StrategyError(
            f"{name}:{kind}/{option}: {name_of_option} must be at least {least}; write "
            f"{kind}/{least}"
        )


def text_of(name: str, part: Axis | Recompute) -> str:
    """Return the text NAME DEGREE[:KIND[/OPTION]] of a part, without a kind that is the default."""
    text = f"{name}{part.degree}" if isinstance(part, Axis) else name
    if part.option is not None:
        return f"{text}:{part.kind}/{part.option}"
    return text if part.kind == next(iter(KINDS[name])) else f"{text}:{part.kind}"


def _cut_text(cut: tuple[int, ...]) -> str:
    return f"cut:{'+'.join(map(str, cut))}"
