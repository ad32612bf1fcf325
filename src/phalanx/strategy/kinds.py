"""Catalogue of the kinds of each axis, with option, grid and the line that `--help` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Kind:
    """A variant of the parallelism of an axis, or of recomputation.

    Attributes:
        about: description in one line; None for recompute:none, and if it is not implemented.
        option: name of the integer option after the slash; None if it has no option.
        least: smallest value of the option.
        grid: names of the sub-axes of its ranks, outer to inner; empty for one dimension. All have
            the same size, but if the kind has an option, the first has the option's value.
        degrees: description of the degrees that form such a grid, with braces for the option.
        chunks: chunks of each sample that a rank holds, for an axis that splits positions.
    """

    about: str | None = None
    option: str | None = None
    least: int = 0
    grid: tuple[str, ...] = ()
    degrees: str = ""
    chunks: int = 1

    def sizes(self, axis: str, degree: int, option: int | None) -> dict[str, int]:
        """Return the sub-axes of `axis` for this kind, outer to inner: name -> size."""
        if not self.grid:
            return {axis: degree}
        # 2.5d of 18 ranks with depth 2: 18 / 2 = 9, two sides, so tp_depth 2, tp_row 3, tp_col 3.
        depth, num_sides = self._depth(option)
        side = round((degree / depth) ** (1 / num_sides))
        return {name: side for name in self.grid} | ({self.grid[0]: depth} if self.option else {})

    def nearest_degree(self, degree: int, option: int | None) -> int:
        """Return the degree nearest to `degree` that forms a grid; the smaller one in a tie."""
        if not self.grid:
            return degree
        depth, num_sides = self._depth(option)
        # The best side is the rounded root or an integer next to it.
        root = max(1, round((degree / depth) ** (1 / num_sides)))
        legal = [depth * side**num_sides for side in range(max(1, root - 1), root + 2)]
        return min(legal, key=lambda each: (abs(each - degree), each))

    def _depth(self, option: int | None) -> tuple[int, int]:
        """Return (size of the sub-axis that the option sets, else 1; number of other sub-axes)."""
        return (option or 1, len(self.grid) - 1) if self.option else (1, len(self.grid))


KINDS: Final = {
    "pp": {
        "1f1b": Kind("each process has some layers; forwards and backwards alternate"),
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
        # Two chunks, an early and a late one: equal work for all ranks under the causal mask.
        "ring": Kind("each sample is split by positions; keys and values circulate", chunks=2),
        "ulysses": Kind("the same; heads are split where they attend"),
    },
    "ep": {
        "all_to_all": Kind("each process has some experts; tokens travel to their experts"),
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
"""Kinds of each axis, outer to inner, and of recompute; the first kind of each is the default."""

WHY_SENT: Final = {
    "pp": "activations go to the next stage, and their gradients back",
    "dp": "every replica needs the gradient of the whole batch",
    "fsdp": "a rank holds shards of the parameters, gathers them for the arithmetic, and reduces "
    "gradients to shards",
    "cp": "attention needs keys and values of the positions on the other ranks",
    "ep": "tokens go to the ranks of their experts, and the results return",
    "tp": "each product is split over these ranks: inputs are gathered, or parts of it summed",
}
"""Axis -> why its ranks send."""

SERVED: Final = ("ps", "ssp", "async", "quorum", "local")
"""Kinds of dp with parameter servers; each worker is a separate job of one process."""

AXES: Final = ("pp", "dp", "fsdp", "cp", "ep", "tp")
"""Names of the axes, outer to inner."""

POSITIONS: Final = "cp"
"""The axis that splits the positions of a sample."""


def built() -> dict[str, str]:
    """Return all implemented kinds: text form, with N for the degree -> description."""
    forms: dict[str, str] = {}
    for axis, kinds in KINDS.items():
        for at, (name, kind) in enumerate(kinds.items()):
            form = axis if axis == "recompute" else f"{axis}N"
            form += f":{name}" if at > 0 else ""
            if kind.about is not None:
                forms[form + (f"/{kind.option}" if kind.option else "")] = kind.about
    return forms
