"""A strategy: how the work of one model is split over ranks. One frozen value with a text form.

    pp2:1f1b,dp2,fsdp2,cp2:ring,tp4:2d,recompute:sqrt

The text is a comma-separated list of `AXIS DEGREE [":" KIND ["/" OPTION]]`, in any order, and of
the settings `recompute:KIND[/OPTION]` and `cut:LAYERS+LAYERS...`, which have no degree. The
canonical order is outer to inner, the slowest link first: pp dp fsdp cp tp. An axis that is not
named has degree 1. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from phalanx.errors import StrategyError, nearest


@dataclass(frozen=True)
class Kind:
    """One way to split the work of an axis, or to recompute.

    Attributes:
        about: what it does, in a line; None while it is not built.
        option: what the whole number after the slash is called; None where there is none.
        least: the lowest such number.
    """

    about: str | None = None
    option: str | None = None
    least: int = 0


KINDS: Final = {
    "pp": {
        "1f1b": Kind("each process has some layers; a backward as soon as there is one"),
        "gpipe": Kind("the same, all forwards first"),
        "naive": Kind("the same, one microbatch at a time"),
        "interleaved": Kind("1f1b over CHUNKS stages a process", "CHUNKS", 2),
        "zb": Kind("zero bubble: gradients of weights wait", "CHUNKS", 1),
        "zbv": Kind("zero bubble, two stages a process in a V"),
        "dualpipev": Kind("as zbv, forwards and backwards in pairs"),
    },
    "dp": {
        "bucketed": Kind("each process takes a share of the batch; all hold the model"),
        "naive": Kind("the same, one all-reduce a gradient after backward"),
        "ps": Kind(),
        "async": Kind(),
        "ssp": Kind(option="STALENESS", least=0),
        "local": Kind(option="STEPS", least=1),
    },
    "fsdp": {
        "zero3": Kind("parameters, gradients and optimizer state are sharded too"),
        "zero2": Kind("parameters stay full, the rest is sharded"),
        "zero1": Kind("only the optimizer state is sharded"),
    },
    "cp": {
        "ring": Kind("each sample is split by positions; keys and values go round"),
        "ulysses": Kind("the same; heads are split where they attend"),
    },
    "tp": {
        "1d": Kind("each layer is split, with sequence parallelism"),
        "megatron": Kind("each layer is split, activations stay full"),
        "2d": Kind("on a square of processes (SUMMA); N = 4, 9, 16 ..."),
        "2.5d": Kind("on DEPTH squares; N = 8 and DEPTH 2, ...", "DEPTH", 1),
        "3d": Kind("on a cube of processes; N = 8, 27 ..."),
    },
    "recompute": {
        "none": Kind(),
        "full": Kind("backward runs each block again"),
        "every": Kind("BLOCKS blocks are run again as one", "BLOCKS", 1),
        "sqrt": Kind("segments of sqrt(L) of the L blocks"),
        "selective": Kind("runs again all but matrix products and attention"),
    },
}
"""The kinds of each axis, outer to inner, and of recompute last; the first kind is the default."""

AXES: Final = ("pp", "dp", "fsdp", "cp", "tp")
"""The axes, outer to inner."""


def built() -> dict[str, str]:
    """Return the text form of all that runs today, N for a degree, and what it does."""
    forms: dict[str, str] = {}
    for axis, kinds in KINDS.items():
        for at, (name, kind) in enumerate(kinds.items()):
            form = axis if axis == "recompute" else f"{axis}N"
            form += f":{name}" if at > 0 else ""
            if kind.about is not None:
                forms[form + (f"/{kind.option}" if kind.option else "")] = kind.about
    return forms


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

    `cut` has the layers of each stage of a pipeline, where they are not to be found by their cost.
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

    def __post_init__(self) -> None:
        for name, axis in self.axes():
            if axis.degree < 1:
                raise StrategyError(f"{name}{axis.degree}: a degree must be at least 1, as {name}1")
            _check_kind(name, axis.kind, axis.option)
        _check_kind("recompute", self.recompute.kind, self.recompute.option)
        _check_arrangement(self.tp)
        if self.cut and self.pp.degree == 1:
            raise StrategyError(
                f"{_cut_text(self.cut)} has the stages of a pipeline, and there is none; write "
                f"pp{max(2, len(self.cut))} beside it, or leave it out"
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
        """Return it with another degree of an axis; another of pp has other stages, and no cut."""
        changed = dataclasses.replace(getattr(self, name), degree=degree)
        cut = () if name == "pp" else self.cut
        return dataclasses.replace(self, **{name: changed, "cut": cut})

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
        degree, depth = self.tp.degree, self.tp.option or 1
        if self.tp.kind in ("1d", "megatron"):
            return {"tp": degree}
        if self.tp.kind == "3d":
            side = round(degree ** (1 / 3))
            return {"tp_y": side, "tp_z": side, "tp_x": side}
        side = math.isqrt(degree // depth)
        square = {"tp_row": side, "tp_col": side}
        return square if self.tp.kind == "2d" else {"tp_depth": depth, **square}

    def mesh_axes(self) -> dict[str, int]:
        """Return the sizes of the axes of the mesh: those above 1, outer to inner; else `dp`."""
        axes: dict[str, int] = {}
        for name, axis in self.axes():
            if axis.degree > 1:
                axes |= self.grid() if name == "tp" else {name: axis.degree}
        return axes or {"dp": 1}

    @property
    def num_ranks(self) -> int:
        """Processes that the strategy needs."""
        return math.prod(axis.degree for _, axis in self.axes())

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that see different samples: dp times fsdp."""
        return self.dp.degree * self.fsdp.degree

    @property
    def num_shards(self) -> int:
        """Shards of the trained state under fsdp, which splits it over cp too; 1 without fsdp."""
        return self.fsdp.degree * self.cp.degree if self.fsdp.degree > 1 else 1

    def __str__(self) -> str:
        parts = [_text(name, part) for name, part in self.named()]
        return ",".join(parts + ([_cut_text(self.cut)] if self.cut else [])) or "dp1"


def require_built(strategy: Strategy) -> None:
    """Refuse a strategy that the grammar knows and the code does not run yet.

    Raises:
        StrategyError: names the part that is not built and what is.
    """
    missing = [
        _text(*each) for each in strategy.named() if KINDS[each[0]][each[1].kind].about is None
    ]
    if missing:
        raise StrategyError(
            f"strategy '{strategy}': {', '.join(missing)} is not built yet; built: "
            f"{', '.join(built())}"
        )
    for name, part in strategy.named():
        if isinstance(part, Axis) and part.degree == 1:
            wider = dataclasses.replace(part, degree=2)
            raise StrategyError(
                f"strategy '{strategy}': {_text(name, part)} splits nothing, so its kind would be "
                f"ignored; leave it out, or write {_text(name, wider)}"
            )
    dp = strategy.dp
    if strategy.fsdp.degree > 1 and dp.degree > 1 and dp.kind != "bucketed":
        plain = dataclasses.replace(strategy, dp=Axis(dp.degree, "bucketed"))
        raise StrategyError(
            f"strategy '{strategy}': beside fsdp, dp adds up the shares as they come, and dp:"
            f"{dp.kind} would be ignored; write '{plain}'"
        )


def check_ranks(strategy: Strategy, num_ranks: int) -> None:
    """Refuse a strategy that needs another number of ranks than there are.

    Raises:
        StrategyError: names both numbers and a strategy that fits.
    """
    if strategy.num_ranks == num_ranks:
        return
    raise StrategyError(
        f"strategy '{strategy}' needs {strategy.num_ranks} ranks, but there are {num_ranks}; "
        f"'{_fitting(strategy, num_ranks)}' would use them all, or start {strategy.num_ranks}"
    )


def _fitting(strategy: Strategy, num_ranks: int) -> Strategy:
    """Return a strategy for `num_ranks` ranks that changes one axis of `strategy`, or else dp."""
    if num_ranks == 1:
        return Strategy(recompute=strategy.recompute)
    for name in ("dp", "fsdp", "cp", "tp", "pp"):
        axis: Axis = getattr(strategy, name)
        others = strategy.num_ranks // axis.degree
        if num_ranks % others or (axis.degree == 1 and name != "dp"):
            continue
        try:
            return strategy.with_degree(name, num_ranks // others)
        except StrategyError:  # a tensor-parallel degree that its kind cannot arrange: try the next
            continue
    return Strategy(dp=Axis(num_ranks, strategy.dp.kind, strategy.dp.option))


_LONGEST_SHOWN: Final = 60


def _shown(text: str) -> str:
    """Return a text in quotes, cut where it is too long for a message."""
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}...")


def _parse_part(part: str) -> tuple[str, Axis | Recompute | tuple[int, ...]]:
    """Read one part between two commas into (name, value)."""
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
            f"{', '.join(AXES)}, and recompute and cut are settings"
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


def _check_arrangement(tp: Axis) -> None:
    """Raise StrategyError unless the ranks of tp can stand in the grid that its kind asks for."""
    depth, power, form = {
        "1d": (1, 1, ""),
        "megatron": (1, 1, ""),
        "2d": (1, 2, "a square, q x q"),
        "2.5d": (tp.option or 1, 2, f"q x q x {tp.option}"),
        "3d": (1, 3, "a cube, q x q x q"),
    }[tp.kind]
    # A whole root of the degree lies next to the rounded one; of the two, the nearer grid wins.
    root = max(1, round((tp.degree / depth) ** (1 / power)))
    legal = [depth * q**power for q in range(max(1, root - 1), root + 2)]
    if tp.degree not in legal:
        best = min(legal, key=lambda degree: (abs(degree - tp.degree), degree))
        raise StrategyError(
            f"{_text('tp', tp)}: the degree must be {form}; the nearest is "
            f"{_text('tp', dataclasses.replace(tp, degree=best))}"
        )


def _text(name: str, part: Axis | Recompute) -> str:
    """Return NAME DEGREE[:KIND[/OPTION]], of which the end is left out where it is the default."""
    text = f"{name}{part.degree}" if isinstance(part, Axis) else name
    if part.option is not None:
        return f"{text}:{part.kind}/{part.option}"
    return text if part.kind == next(iter(KINDS[name])) else f"{text}:{part.kind}"


def _cut_text(cut: tuple[int, ...]) -> str:
    return f"cut:{'+'.join(map(str, cut))}"
