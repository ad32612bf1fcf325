"""How a dimension is cut: beside DTensor's own arithmetic, for any sizes, without a process."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from phalanx.comm.dry_run import CountingComm
from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.tensor.apply import LAYOUTS, layout_of
from phalanx.parallel.tensor.spec import Spec, pad_to
from phalanx.strategy import Strategy

AXES = st.dictionaries(
    st.sampled_from(["tp_a", "tp_b", "tp_c"]), st.integers(1, 4), min_size=1, max_size=3
)
LAYOUT_TEXTS = [
    "tp3", "tp4", "tp2:megatron", "tp4:2d", "tp9:2d", "tp12:2.5d/3", "tp8:3d", "tp27:3d",
]  # fmt: skip


def ranks(axes: dict[str, int]) -> list[CountingComm]:
    """Return every rank of a grid, the outer axis first."""
    sizes = itertools.product(*map(range, axes.values()))
    return [CountingComm(axes, dict(zip(axes, coords, strict=True))) for coords in sizes]


def drawn_spec(axes: dict[str, int], dims: list[int | None]) -> Spec:
    """Return a spec of two dimensions, each axis on that of its number, or on none."""
    pairs = list(zip(axes, dims, strict=False))
    return Spec.of(*(tuple(axis for axis, on in pairs if on == dim) for dim in (0, 1)))


DIMS = st.lists(st.sampled_from([0, 1, None]), min_size=3, max_size=3)


@given(AXES, DIMS, st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_shards_are_those_of_dtensor(
    axes: dict[str, int], dims: list[int | None], shape: tuple[int, int]
) -> None:
    spec = drawn_spec(axes, dims)
    for rank in ranks(axes):
        coords = [rank.coord(axis) for axis in axes]
        size, first = _compute_local_shape_and_global_offset(
            shape, tuple(axes.values()), coords, spec.placements(axes)
        )
        assert spec.shard_shape(shape, rank) == tuple(size)
        held = [spec.shard(dim, shape[dim], rank) for dim in (0, 1)]
        assert all(not one or one.start == at for one, at in zip(held, first, strict=True))


@given(AXES, DIMS, st.integers(0, 40))
def test_the_shards_of_a_dimension_are_all_of_it_in_order(
    axes: dict[str, int], dims: list[int | None], size: int
) -> None:
    spec = drawn_spec(axes, dims)
    shards = {tuple(rank.coord(a) for a in spec.axes[0]): spec.shard(0, size, rank)
              for rank in ranks(axes)}  # fmt: skip
    assert len(shards) == spec.num_shards(0, CountingComm(axes))
    assert [index for _, one in sorted(shards.items()) for index in one] == list(range(size))
    padded = pad_to(size, spec.num_shards(0, CountingComm(axes)))
    assert 0 <= padded - size < spec.num_shards(0, CountingComm(axes))
    each = {len(spec.shard(0, padded, rank)) for rank in ranks(axes)}
    assert each == {padded // spec.num_shards(0, CountingComm(axes))}


@given(st.sampled_from(LAYOUT_TEXTS), st.integers(1, 20), st.integers(1, 20))
def test_ranks_hold_each_element_as_often_as_the_spec_says(
    text: str, num_rows: int, length: int
) -> None:
    """Rows and positions are padded, so that all ranks hold as many."""
    strategy, batch, width = Strategy.parse(text), BatchShape(num_rows, length), 36
    for spec_of in ("residual", "inner"):
        held: dict[tuple[int, int, int], int] = {}
        shapes = set()
        for rank in ranks(strategy.grid()):
            layout = LAYOUTS[strategy.tp.kind](rank)
            spec = getattr(layout, spec_of)
            indices = layout.shard_ranges(spec, batch, width)
            shapes.add(tuple(map(len, indices)))
            for element in itertools.product(*indices):
                held[element] = held.get(element, 0) + 1
        assert len(shapes) == 1
        layout = layout_of(strategy)
        padded = layout.padded(batch)
        padded_length = length if spec.positions is None else padded.length
        assert len(held) == padded.num_rows * padded_length * width
        num_shards = math.prod(spec.num_shards(dim, layout.comm) for dim in range(3))
        assert set(held.values()) == {strategy.tp.degree // num_shards}


def test_a_spec_is_read_as_it_is_drawn() -> None:
    spec = Spec("B[depth row] T D[col]")
    assert spec.axes == (("tp_depth", "tp_row"), (), ("tp_col",))
    assert (spec.rows, spec.positions, spec.features) == (("tp_depth", "tp_row"), None, "tp_col")
    assert Spec("B T[tp] D").positions == "tp"
    assert Spec("B T D").is_replicated and not spec.is_replicated
    assert spec == Spec.of(("tp_depth", "tp_row"), (), ("tp_col",)) != Spec("B T D")
    assert Spec("F[y] D[z x]").placements(["dp", "tp_y", "tp_z", "tp_x"]) == (
        Replicate(), Shard(0), Shard(1), Shard(1),
    )  # fmt: skip


@pytest.mark.parametrize("text", ["b", "B[", "B[]", "B[row", "B T[row,col]", "B  T", "B T D[col] "])
def test_what_is_no_spec(text: str) -> None:
    with pytest.raises(ValueError, match="expected one such as"):
        Spec(text)
