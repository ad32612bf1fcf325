r"""Updates that need a whole matrix: each matrix has an owner among the ranks that hold its shards.

Muon, Shampoo and SOAP multiply the whole gradient of a matrix, so a step on a shard is not the
shard of a step. Liu et al., Muon is Scalable for LLM Training, 2025, section 2.3, gather every
matrix on every rank of ZeRO; here one rank does so for each.

    W [4, 6] over fsdp2, owner rank 1              V [4, 6], owner rank 0

    rank 0    rows 0-1 of W ---\    /--- rows 0-3 of V ----> update of V ---> rows 0-1
                                 \  /                                 \
                         all_to_all  gather                            all_to_all  scatter
                                 /  \                                 /
    rank 1    rows 2-3 of V ---/    \--- rows 0-3 of W ----> update of W ---> rows 2-3

A matrix is cut by one axis after another, as tp and then fsdp cut it. Its pieces return in the
opposite order, one all-to-all an axis, until the owner has the whole matrix:

    parameter [F, D]       cut by tp_row      cut by fsdp
    whole at its owner <-- a row of tp    <-- a shard           gather, the innermost axis first
    whole at its owner --> a row of tp    --> a shard           scatter, the outermost first

An axis that replicates a matrix, such as dp, counts as a last cut whose pieces are copies: only the
owner's coordinate gathers and computes, and the scatter sends its shards to all. A shard that is
whole by itself, such as an expert of a stack that ep splits, never moves.

Owners are chosen greedily (Graham, Bounds on Multiprocessing Timing Anomalies, 1969): in order of
falling cost, each matrix goes to the rank with the least work. Matrices move in rounds, so that an
owner holds about ROUND_BYTES of whole matrices at a time.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import (
    Placement,
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from phalanx.comm.axes import is_of_shards
from phalanx.comm.comm import Comm
from phalanx.comm.ledger import Entry, Tally, sent_in_pieces
from phalanx.comm.row_counts import RowCounts

ROUND_BYTES = 256 * 1024 * 1024
"""Bytes of whole matrices that an owner holds at once, or one matrix if that is larger."""


@dataclass(frozen=True)
class Cut:
    """How one axis, possibly a flattened one, cuts a tensor along a dimension.

    Attributes:
        indices: indices of the piece of each coordinate along `dim`; None if all pieces are copies.
    """

    axis: str
    dim: int = 0
    indices: tuple[Tensor, ...] | None = None

    def shape(self, whole: Sequence[int], coord: int) -> tuple[int, ...]:
        """Return the shape of the piece of a coordinate, of a tensor of shape `whole`."""
        if self.indices is None:
            return tuple(whole)
        return (*whole[: self.dim], len(self.indices[coord]), *whole[self.dim + 1 :])


@dataclass(frozen=True, eq=False)
class Matrix:
    """Rows of a parameter that are updated as one matrix, by one rank.

    Attributes:
        parameter: index of the parameter.
        shape: shape of the rows, with all dimensions of the parameter.
        rows: their range in this rank's shard of the parameter.
        cuts: axes that cut or copy the rows, in order; each cuts this rank's piece of before.
        fixed: coordinates, by axis, of the ranks that hold the rows if an axis cuts beside them.
        owner: coordinates of the owner, by axis.
    """

    parameter: int
    shape: tuple[int, ...]
    rows: tuple[int, int]
    cuts: tuple[Cut, ...]
    fixed: Mapping[str, int]
    owner: Mapping[str, int] = field(default_factory=dict[str, int])

    def local(self, shard: Tensor) -> Tensor:
        """Return the view of the rows in this rank's shard of the parameter."""
        first, end = self.rows
        return (shard if shard.ndim else shard.view(1))[first:end]


_Piece = tuple[Matrix, Cut, tuple[int, ...], int]
"""Matrix, its cut by an axis, its shape here before the cut, and the owner's coordinate."""


@dataclass(frozen=True)
class _Move:
    """An all-to-all over an axis; `counts` belong to a scatter."""

    axis: str
    is_copy: bool
    pieces: Sequence[_Piece]
    counts: RowCounts


@dataclass(frozen=True)
class Round:
    """Matrices that move together: those with a piece on this rank, and the moves of a scatter."""

    matrices: Sequence[Matrix]
    moves: Sequence[_Move]


class Owners:
    """The owners of the matrices of some parameters, and the transport of matrices.

    Every rank of a pipeline stage makes it from the same parameters, and calls its methods together
    with all ranks of the stage.
    """

    def __init__(
        self,
        comm: Comm,
        parameters: Sequence[Tensor],
        rows: Sequence[Sequence[range]],
        cost: Callable[[tuple[int, ...]], float] = math.prod,
    ) -> None:
        """Choose the owners.

        Args:
            comm: communicator of the job.
            parameters: DTensors, or plain tensors that all ranks of the stage replicate.
            rows: for each parameter, the rows of its matrices along the first dimension.
            cost: work of the owner of a matrix of a shape.
        """
        self._comm = comm
        self._axes = [axis for axis in comm.axes if axis != "pp"]
        self.parameters = list(parameters)
        matrices: list[Matrix] = []
        known: dict[Any, list[Matrix]] = {}  # equal blocks have equal matrices
        for number, parameter in enumerate(self.parameters):
            key = tuple(parameter.shape), tuple(rows[number]), _axes_that_cut(parameter)
            if key not in known:
                known[key] = [_matrix(key[0], each, key[2], comm) for each in key[1]]
            matrices += [replace(each, parameter=number) for each in known[key]]
        loads = np.zeros([comm.axes[axis] for axis in self._axes])
        self._queues: dict[tuple[int, ...], list[Matrix]] = defaultdict(list)
        for matrix in sorted(matrices, key=lambda each: -cost(each.shape)):
            starts = [matrix.fixed.get(axis, 0) for axis in self._axes]
            free = loads[
                tuple(
                    slice(start, start + 1 if axis in matrix.fixed else None)
                    for axis, start in zip(self._axes, starts, strict=True)
                )
            ]
            least = np.unravel_index(int(free.argmin()), free.shape)
            at = tuple(int(n) + start for n, start in zip(least, starts, strict=True))
            loads[at] += cost(matrix.shape)
            owner = dict(zip(self._axes, at, strict=True))
            self._queues[at].append(replace(matrix, owner=owner))
        self.matrices = [matrix for queue in self._queues.values() for matrix in queue]
        self._rounds: dict[tuple[frozenset[int], int], list[Round]] = {}

    def rounds(self, used: Iterable[int], itemsize: int) -> list[Round]:
        """Return the rounds that move the parameters of the indices `used`.

        Args:
            used: the same on all ranks of the stage.
            itemsize: bytes of an element while it moves.
        """
        key = (frozenset(used), itemsize)
        if key not in self._rounds:
            rounds: dict[int, list[Matrix]] = defaultdict(list)
            for queue in self._queues.values():
                size, number = 0, 0
                for matrix in (each for each in queue if each.parameter in key[0]):
                    own = math.prod(matrix.shape) * itemsize
                    if size and size + own > ROUND_BYTES:
                        size, number = 0, number + 1
                    size += own
                    rounds[number].append(matrix)
            self._rounds[key] = [self._round(rounds[number]) for number in sorted(rounds)]
        return self._rounds[key]

    def gather(
        self, each: Round, piece_of: Callable[[Matrix], Tensor], dtype: torch.dtype
    ) -> dict[Matrix, Tensor]:
        """Return the matrices of a round that this rank owns, whole, in `dtype`.

        Args:
            each: the round.
            piece_of: returns this rank's piece of a matrix.
            dtype: data type in which the pieces are sent.
        """
        copied = {m: [cut.axis for cut in m.cuts if cut.indices is None] for m in each.matrices}
        held = {m: piece_of(m) for m, axes in copied.items() if self._owns(m, axes)}
        for move in reversed(each.moves):
            if not move.is_copy:
                held |= self._move(move, held, dtype, to_owner=True)
        return {m: tensor.to(dtype) for m, tensor in held.items() if self._owns(m, self._axes)}

    def scatter(
        self, each: Round, wholes: Mapping[Matrix, Tensor], dtype: torch.dtype
    ) -> dict[Matrix, Tensor]:
        """Return this rank's pieces of all matrices of a round, given `wholes` at their owners."""
        held = dict(wholes)
        for move in each.moves:
            held |= self._move(move, held, dtype, to_owner=False)
        return held

    def traffic(self, used: Iterable[int], itemsize: int) -> list[Entry]:
        """Return the communication of a step on this rank, in the phase "optimizer".

        Args:
            used: indices of the parameters that have a gradient.
            itemsize: bytes of an element while it moves.
        """
        tally = Tally()
        for move in (move for each in self.rounds(used, itemsize) for move in each.moves):
            me = self._comm.coord(move.axis)
            for counts in [move.counts] if move.is_copy else [move.counts, move.counts.reversed]:
                sizes = counts.sent(me)
                payload = sum(sizes) * itemsize
                sent = sent_in_pieces(payload, sizes, me)
                tally.add(Entry("optimizer", move.axis, "all_to_all", 1, payload, sent))
        return tally.entries()

    def _coord(self, matrix: Matrix, name: str) -> int:
        """Return the owner's row-major index among the ranks of an axis or a flattened axis."""
        axes = self._comm.axes_of(name)
        sizes = [self._comm.axes[axis] for axis in axes]
        return int(np.ravel_multi_index([matrix.owner[axis] for axis in axes], sizes))

    def _owns(self, matrix: Matrix, names: Iterable[str]) -> bool:
        """Return whether this rank has the owner's coordinates on the axes `names`."""
        return all(self._comm.coord(name) == self._coord(matrix, name) for name in names)

    def _round(self, matrices: Sequence[Matrix]) -> Round:
        comm = self._comm
        mine = [m for m in matrices if all(comm.coord(a) == at for a, at in m.fixed.items())]
        moving: dict[tuple[int, int, str], list[_Piece]] = defaultdict(list)
        for matrix in mine:
            whole = matrix.shape
            for number, cut in enumerate(matrix.cuts):
                # A piece crosses a cut between ranks that have the owner's coordinates on the axes
                # of all later cuts. The order of the moves is the order of the cuts.
                if self._owns(matrix, [each.axis for each in matrix.cuts[number + 1 :]]):
                    first = self._axes.index(comm.axes_of(cut.axis)[0])
                    kind = 2 if cut.indices is None else int(is_of_shards(cut.axis))
                    piece = matrix, cut, whole, self._coord(matrix, cut.axis)
                    moving[kind, first, cut.axis].append(piece)
                whole = cut.shape(whole, comm.coord(cut.axis))
        moves: list[_Move] = []
        for (kind, _, axis), some in sorted(moving.items(), key=lambda item: item[0]):
            num_ranks = comm.size(axis)
            counts = [[0] * num_ranks for _ in range(num_ranks)]
            for _, cut, whole, owner in some:
                for coord in range(num_ranks):
                    counts[owner][coord] += math.prod(cut.shape(whole, coord))
            moves.append(_Move(axis, kind == 2, some, RowCounts(tuple(map(tuple, counts)))))
        return Round(mine, moves)

    def _move(
        self, move: _Move, held: Mapping[Matrix, Tensor], dtype: torch.dtype, *, to_owner: bool
    ) -> dict[Matrix, Tensor]:
        """Send pieces to the owners on an axis, or owners' tensors to the holders of pieces.

        Returns:
            To owners, the matrices that this rank owns, joined over the axis; else all pieces.
        """
        comm, axis = self._comm, move.axis
        me, coords = comm.coord(axis), range(comm.size(axis))
        counts = move.counts.reversed if to_owner else move.counts
        like = torch.empty(0, dtype=dtype, device=comm.device)
        sent = comm.empty((sum(counts.sent(me)),), like, axis)

        def next_part(messages: list[Tensor], peer: int, shape: Sequence[int]) -> Tensor:
            size = math.prod(shape)
            part, messages[peer] = messages[peer][:size], messages[peer][size:]
            return part.view(*shape)

        outgoing = [*sent.split(counts.sent(me))]
        for matrix, cut, whole, owner in move.pieces:
            if to_owner:
                next_part(outgoing, owner, cut.shape(whole, me)).copy_(held[matrix])
            elif owner == me:
                for coord in coords:
                    piece = held[matrix]
                    if cut.indices is not None:
                        at = cut.indices[coord].to(piece.device)
                        piece = piece.index_select(cut.dim, at)
                    next_part(outgoing, coord, piece.shape).copy_(piece)
        incoming = [*comm.exchange_rows(sent, axis, counts).split(counts.received(me))]
        moved: dict[Matrix, Tensor] = {}
        for matrix, cut, whole, owner in move.pieces:
            if not to_owner:
                moved[matrix] = next_part(incoming, owner, cut.shape(whole, me))
            elif owner == me and cut.indices is not None:
                moved[matrix] = joined = sent.new_empty(whole)
                for coord, at in zip(coords, cut.indices, strict=True):
                    part = next_part(incoming, coord, cut.shape(whole, coord))
                    joined.index_copy_(cut.dim, at.to(part.device), part)
        return moved


AxisCut = tuple[str, int, Placement | None]
"""Axis, dimension, and the placement on an axis of tp; None for rows in equal chunks."""


def _axes_that_cut(parameter: Tensor) -> tuple[AxisCut, ...]:
    """Return the axes that cut a parameter, in the order of the cuts: tp and ep, then fsdp."""
    if not isinstance(parameter, DTensor):
        return ()
    names, placements = parameter.device_mesh.mesh_dim_names or (), parameter.placements
    each = zip(names, cast(Any, placements), strict=True)
    cutting = [(name, placement) for name, placement in each if not placement.is_replicate()]
    cutting.sort(key=lambda cut: is_of_shards(cut[0]))
    # FSDP2 cuts the piece of the others into equal chunks, whatever its own placement says.
    return tuple((name, at.dim, None if is_of_shards(name) else at) for name, at in cutting)


@functools.lru_cache(1024)
def _indices(length: int, dim: int, placement: Placement | None, num: int) -> tuple[Tensor, ...]:
    """Return the indices of each coordinate's piece of a dimension of `length`."""
    every = torch.arange(length)
    if isinstance(placement, _StridedShard):  # fused weights: a piece of each map
        strided: Any = placement
        split = strided._split_tensor(every.view(*(1,) * dim, -1), num, with_padding=False)
        return tuple(each.flatten() for each in split[0])
    chunks = every.chunk(num)
    return (*chunks, *[every[:0]] * (num - len(chunks)))


def _matrix(shape: Sequence[int], rows: range, axes: Sequence[AxisCut], comm: Comm) -> Matrix:
    """Follow the rows of a matrix through the cuts of its parameter."""
    sizes, first, end = list(shape), rows.start, rows.stop
    cuts: list[Cut] = []
    fixed: dict[str, int] = {}
    for axis, dim, placement in axes:
        pieces = _indices(sizes[dim], dim, placement, comm.size(axis))
        at = comm.coord(axis)
        if dim:
            cuts.append(Cut(axis, dim, pieces))
        else:
            inside = [((each >= first) & (each < end)).nonzero().flatten() for each in pieces]
            whole_at = [n for n, each in enumerate(inside) if len(each) == end - first]
            if whole_at and not any(cut.dim == 0 for cut in cuts):
                at, members = whole_at[0], comm.axes_of(axis)
                coords = np.unravel_index(at, [comm.axes[each] for each in members])
                fixed |= {each: int(n) for each, n in zip(members, coords, strict=True)}
            else:
                pairs = zip(pieces, inside, strict=True)
                cuts.append(Cut(axis, 0, tuple(each[here] - first for each, here in pairs)))
            here = inside[at].tolist()
            first, end = (here[0], here[-1] + 1) if here else (0, 0)
        sizes[dim] = len(pieces[at])
    done = {"pp", *fixed, *(each for cut in cuts for each in comm.axes_of(cut.axis))}
    cuts += [Cut(axis) for axis, size in comm.axes.items() if size > 1 and axis not in done]
    return Matrix(0, (len(rows), *shape[1:]), (first, end), tuple(cuts), fixed)
