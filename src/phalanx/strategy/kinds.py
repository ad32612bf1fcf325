"""The catalogue: each kind of each axis, with its option, its grid and its line of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Kind:
    """One way to split the work of an axis, or to recompute.

    Attributes:
        about: what it does, in a line; None while it is not built.
        option: what the whole number after the slash is called; None where there is none.
        least: the lowest such number.
        grid: the sub-axes that its ranks stand in, outer to inner, all of one size but the first
            of a kind with an option, which has the option's; empty where they stand in a row.
        degrees: the degrees that make such a grid, in words, with braces for the option.
    """

    about: str | None = None
    option: str | None = None
    least: int = 0
    grid: tuple[str, ...] = ()
    degrees: str = ""

    def sizes(self, axis: str, degree: int, option: int | None) -> dict[str, int]:
        """Return the sub-axes of an axis of this kind, outer to inner, and their sizes."""
        if not self.grid:
            return {axis: degree}
        depth, num_sides = self._depth(option)
        side = round((degree / depth) ** (1 / num_sides))
        return {name: side for name in self.grid} | ({self.grid[0]: depth} if self.option else {})

    def nearest_degree(self, degree: int, option: int | None) -> int:
        """Return the degree that makes a grid nearest to `degree`, the smaller of two."""
        if not self.grid:
            return degree
        depth, num_sides = self._depth(option)
        # A whole root of the degree lies next to the rounded one; of the two, the nearer grid wins.
        root = max(1, round((degree / depth) ** (1 / num_sides)))
        legal = [depth * side**num_sides for side in range(max(1, root - 1), root + 2)]
        return min(legal, key=lambda each: (abs(each - degree), each))

    def _depth(self, option: int | None) -> tuple[int, int]:
        """Return the size of the sub-axis that the option gives, else 1, and how many others."""
        return (option or 1, len(self.grid) - 1) if self.option else (1, len(self.grid))


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
        "bucketed": Kind("each process takes a part of the batch; all hold the model"),
        "naive": Kind("the same, one all-reduce a gradient after backward"),
        "ps": Kind("workers push gradients to parameter servers, which update the weights"),
        "ssp": Kind("the same; no worker is over STALENESS clocks ahead", "STALENESS", 0),
        "async": Kind("the same; no worker waits for another"),
        "quorum": Kind("the same; an update waits for UPDATES workers", "UPDATES", 1),
        "local": Kind("workers push what STEPS steps of their own changed", "STEPS", 1),
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
        "2d": Kind(
            "on a square of processes (SUMMA); N = 4, 9, 16 ...",
            grid=("tp_row", "tp_col"),
            degrees="a square, q x q",
        ),
        "2.5d": Kind(
            "on DEPTH squares; N = 8 and DEPTH 2, ...",
            "DEPTH",
            1,
            grid=("tp_depth", "tp_row", "tp_col"),
            degrees="q x q x {}",
        ),
        "3d": Kind(
            "on a cube of processes; N = 8, 27 ...",
            grid=("tp_y", "tp_z", "tp_x"),
            degrees="a cube, q x q x q",
        ),
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

SERVED: Final = ("ps", "ssp", "async", "quorum", "local")
"""Kinds of dp whose processes exchange by parameter servers, each a job of one process."""

AXES: Final = ("pp", "dp", "fsdp", "cp", "tp")
"""The axes, outer to inner."""

PARALLEL: Final = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}
"""Axis -> the word by which the field names its parallelism."""


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
