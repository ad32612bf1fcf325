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

Over an axis that replicates a matrix, such as dp, only the owner's coordinate gathers and computes,
and an all-gather of shards follows the scatter. A shard that is whole by itself, such as an expert
of a stack that ep splits, never moves.

Owners are chosen greedily (Graham, Bounds on Multiprocessing Timing Anomalies, 1969): in order of
falling cost, each matrix goes to the rank with the least work. Matrices move in rounds, so that an
owner holds about ROUND_BYTES of whole matrices at a time.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from phalanx.comm.axes import EXPERT, axes_of, flattened
from phalanx.comm.comm import Comm
from phalanx.comm.ledger import Entry, Tally, sent_bytes, sent_in_pieces
from phalanx.comm.row_counts import RowCounts

ROUND_BYTES = 256 * 1024 * 1024
"""Bytes of whole matrices that an owner holds at once, or one matrix if that is larger."""

Run = tuple[int, int, int]
"""Consecutive indices of a piece: first index in the piece, first index in the tensor, length."""


@dataclass(frozen=True)
class Cut:
    """How one axis cuts a tensor along a dimension.

    Attributes:
        axis: name of the axis, possibly a flattened one.
        dim: dimension of the tensor.
        runs: indices of the piece of each coordinate.
    """

    axis: str
    dim: int
    runs: tuple[tuple[Run, ...], ...]

    def length(self, coord: int) -> int:
        """Return the length of the piece of a coordinate along `dim`."""
        return sum(length for *_, length in self.runs[coord])

    def shape(self, whole: Sequence[int], coord: int) -> tuple[int, ...]:
        """Return the shape of the piece of a coordinate, of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.length(coord), *whole[self.dim + 1 :])

    def pairs(self, whole: Tensor, piece: Tensor, coord: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of equal elements of a tensor and of the piece of a coordinate."""
        for first, at, length in self.runs[coord]:
            yield whole.narrow(self.dim, at, length), piece.narrow(self.dim, first, length)


@dataclass(frozen=True, eq=False)
class Matrix:
    """Rows of a parameter that are updated as one matrix, by one rank.

    Attributes:
        parameter: index of the parameter.
        shape: shape of the rows, all dimensions of the parameter.
        rows: their range in this rank's shard of the parameter.
        cuts: axes that cut the rows, in the order of the cuts; on this rank's path of pieces.
        fixed: coordinates, by axis, of the ranks that hold the rows: an axis cuts between matrices.
        owner: coordinates of the owner, by axis.
    """

    parameter: int
    shape: tuple[int, ...]
    rows: tuple[int, int]
    cuts: tuple[Cut, ...]
    fixed: Mapping[str, int]
    owner: Mapping[str, int] = field(default_factory=dict[str, int])

    def shape_before(self, number: int, comm: Comm) -> tuple[int, ...]:
        """Return the shape of this rank's piece before cut `number`."""
        shape = self.shape
        for cut in self.cuts[:number]:
            shape = cut.shape(shape, comm.coord(cut.axis))
        return shape

    def local(self, shard: Tensor) -> Tensor:
        """Return the view of the rows in this rank's shard of the parameter."""
        first, end = self.rows
        return (shard if shard.ndim else shard.view(1))[first:end]


@dataclass(frozen=True)
class _Move:
    """A collective that moves matrices over an axis.

    Attributes:
        axis: the axis.
        matrices: (matrix, number of its cuts that remain), in one order on all ranks of the axis.
        counts: elements that each rank sends to each owner in the all-to-all of a gather.
    """

    axis: str
    matrices: tuple[tuple[Matrix, int], ...]
    counts: RowCounts

    @property
    def width(self) -> int:
        """Elements of the longest shard of an all-gather, to which the others are padded."""
        return max(self.counts.matrix[0])


@dataclass(frozen=True)
class Round:
    """Matrices that move together.

    Attributes:
        matrices: the matrices of which this rank has a piece.
        moves: the gather's all-to-alls; the scatter runs them backwards.
        copies: all-gathers over the axes that replicate, after the scatter.
    """

    matrices: tuple[Matrix, ...]
    moves: tuple[_Move, ...]
    copies: tuple[_Move, ...]


class Owners:
    """The owners of the matrices of some parameters, and the transport of matrices.

    Every rank of a pipeline stage makes it from the same parameters, and calls its methods together
    with all ranks of the stage.
    """

    def __init__(
        self,
        comm: Comm,
        parameters: Sequence[Tensor],
        rows_of: Callable[[int], Sequence[range]],
        cost: Callable[[tuple[int, ...]], float] = math.prod,
    ) -> None:
        """Choose the owners.

        Args:
            comm: communicator of the job.
            parameters: DTensors, or plain tensors that all ranks of the stage replicate.
            rows_of: returns the rows, along the first dimension, of each matrix of the parameter of
                an index.
            cost: work of the owner of a matrix of a shape.
        """
        self._comm = comm
        self._axes = [axis for axis in comm.axes if axis != "pp"]
        self.parameters = list(parameters)
        self.matrices: list[Matrix] = []
        known: dict[Any, list[Matrix]] = {}  # equal blocks have equal matrices
        for number, parameter in enumerate(self.parameters):
            rows, axes = tuple(rows_of(number)), _axes_that_cut(parameter, comm)
            key = (tuple(parameter.shape), rows, axes)
            if key not in known:
                known[key] = [_matrix(parameter.shape, each, axes, comm) for each in rows]
            self.matrices += [replace(each, parameter=number) for each in known[key]]
        loads = np.zeros([comm.axes[axis] for axis in self._axes])
        by_cost = sorted(range(len(self.matrices)), key=lambda n: -cost(self.matrices[n].shape))
        self._queues: dict[tuple[int, ...], list[Matrix]] = defaultdict(list)
        for number in by_cost:
            matrix = self.matrices[number]
            free = tuple(
                slice(matrix.fixed[axis], matrix.fixed[axis] + 1)
                if axis in matrix.fixed
                else slice(None)
                for axis in self._axes
            )
            least = np.unravel_index(int(loads[free].argmin()), loads[free].shape)
            at = tuple(int(n) + (each.start or 0) for n, each in zip(least, free, strict=True))
            loads[at] += cost(matrix.shape)
            owned = replace(matrix, owner=dict(zip(self._axes, at, strict=True)))
            self.matrices[number] = owned
            self._queues[at].append(owned)
        self._rounds: dict[tuple[frozenset[int], int], list[Round]] = {}

    def rounds(self, used: Iterable[int], itemsize: int) -> list[Round]:
        """Return the rounds that move the parameters of the indices `used`.

        Args:
            used: the same on all ranks of the stage.
            itemsize: bytes of an element while it moves.
        """
        key = (frozenset(used), itemsize)
        if key not in self._rounds:
            number_of: dict[Matrix, int] = {}
            for queue in self._queues.values():
                size, number = 0, 0
                for matrix in (each for each in queue if each.parameter in key[0]):
                    own = math.prod(matrix.shape) * itemsize
                    if size and size + own > ROUND_BYTES:
                        size, number = 0, number + 1
                    size += own
                    number_of[matrix] = number
            chosen = [m for m in self.matrices if m in number_of]
            self._rounds[key] = [
                self._round([m for m in chosen if number_of[m] == number])
                for number in range(1 + max(number_of.values(), default=-1))
            ]
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
        held = {
            matrix: piece_of(matrix)
            for matrix in each.matrices
            if self._owns(matrix, self._replicas(matrix))
        }
        for move in each.moves:
            held |= self._move(move, held, dtype, to_owner=True)
        return {m: tensor.to(dtype) for m, tensor in held.items() if self._owns(m, self._axes)}

    def scatter(
        self, each: Round, wholes: Mapping[Matrix, Tensor], dtype: torch.dtype
    ) -> dict[Matrix, Tensor]:
        """Return this rank's pieces of all matrices of a round, given `wholes` at their owners."""
        held = dict(wholes)
        for move in reversed(each.moves):
            held |= self._move(move, held, dtype, to_owner=False)
        comm = self._comm
        for copy in each.copies:
            mine = self._empty((copy.width,), dtype, copy.axis)
            sizes = [math.prod(m.shape_before(n, comm)) for m, n in copy.matrices]
            ends, firsts = [0] * comm.size(copy.axis), list[int]()
            for (matrix, _), size in zip(copy.matrices, sizes, strict=True):
                source = matrix.owner[copy.axis]
                firsts.append(ends[source])
                ends[source] += size
            mine_at = comm.coord(copy.axis)
            for (matrix, _), first, size in zip(copy.matrices, firsts, sizes, strict=True):
                if matrix.owner[copy.axis] == mine_at:
                    part = mine[first : first + size]
                    part.view(held[matrix].shape).copy_(held[matrix])
            every = comm.all_gather(mine, copy.axis, 0).view(-1, copy.width)
            for (matrix, number), first, size in zip(copy.matrices, firsts, sizes, strict=True):
                part = every[matrix.owner[copy.axis], first : first + size]
                held[matrix] = part.view(matrix.shape_before(number, comm))
        return held

    def traffic(self, used: Iterable[int], itemsize: int, back: int | None = None) -> list[Entry]:
        """Return the communication of a step on this rank, in the phase "optimizer".

        Args:
            used: indices of the parameters that have a gradient.
            itemsize: bytes of an element on the way to the owner.
            back: bytes of an element on the way back; `itemsize` if None.
        """
        tally, phase = Tally(), "optimizer"
        for each in self.rounds(used, itemsize):
            for move in each.moves:
                me = self._comm.coord(move.axis)
                for counts, size in (
                    (move.counts, itemsize),
                    (move.counts.reversed, back or itemsize),
                ):
                    sizes = counts.sent(me)
                    num_bytes = sum(sizes) * size
                    sent = sent_in_pieces(num_bytes, sizes, me)
                    tally.add(phase, move.axis, "all_to_all", num_bytes, sent)
            for copy in each.copies:
                num_ranks = self._comm.size(copy.axis)
                num_bytes = num_ranks * copy.width * (back or itemsize)
                sent = sent_bytes("all_gather", num_bytes, num_ranks)
                tally.add(phase, copy.axis, "all_gather", num_bytes, sent)
        return tally.entries()

    def _coord(self, matrix: Matrix, name: str) -> int:
        """Return the owner's row-major index among the ranks of an axis or a flattened axis."""
        number = 0
        for axis in self._comm.axes_of(name):
            number = number * self._comm.axes[axis] + matrix.owner[axis]
        return number

    def _owns(self, matrix: Matrix, names: Iterable[str]) -> bool:
        """Return whether this rank has the owner's coordinates on the axes `names`."""
        return all(self._comm.coord(name) == self._coord(matrix, name) for name in names)

    def _replicas(self, matrix: Matrix) -> list[str]:
        """Return the axes of several ranks that replicate a matrix, outer to inner."""
        cutting = {axis for cut in matrix.cuts for axis in self._comm.axes_of(cut.axis)}
        return [
            axis
            for axis in self._axes
            if axis not in cutting and axis not in matrix.fixed and self._comm.axes[axis] > 1
        ]

    def _round(self, matrices: Sequence[Matrix]) -> Round:
        comm = self._comm
        mine = [m for m in matrices if all(comm.coord(a) == at for a, at in m.fixed.items())]
        by_axis: dict[str, list[tuple[Matrix, int]]] = defaultdict(list)
        copies: dict[str, list[tuple[Matrix, int]]] = defaultdict(list)
        for matrix in mine:
            replicas = self._replicas(matrix)
            for number, cut in enumerate(matrix.cuts):
                # A piece moves over a cut once the cuts inside have been undone, between ranks that
                # have the owner's coordinates there.
                inner = [each.axis for each in matrix.cuts[number + 1 :]]
                if self._owns(matrix, [*replicas, *inner]):
                    by_axis[cut.axis].append((matrix, number))
            for number, axis in enumerate(replicas):
                if self._owns(matrix, replicas[number + 1 :]):
                    copies[axis].append((matrix, len(matrix.cuts)))
        order = sorted(by_axis, key=self._order)
        return Round(
            tuple(mine),
            tuple(self._sized(axis, by_axis[axis], self._piece_sizes) for axis in order),
            tuple(
                self._sized(axis, copies[axis], self._shard_sizes)
                for axis in self._axes
                if axis in copies
            ),
        )

    def _order(self, axis: str) -> tuple[bool, int]:
        """Return the place of an axis in the order in which cuts are undone, the last cut first."""
        first = self._comm.axes_of(axis)[0]
        return first.split("_")[0] in ("tp", "ep"), -self._axes.index(first)

    def _sized(
        self,
        axis: str,
        matrices: list[tuple[Matrix, int]],
        sizes_of: Callable[[Matrix, int], Iterable[tuple[int, int]]],
    ) -> _Move:
        """Return a move; `sizes_of` returns the elements at each coordinate of the axis."""
        num_ranks = self._comm.size(axis)
        counts = [[0] * num_ranks for _ in range(num_ranks)]
        for matrix, number in matrices:
            for coord, size in sizes_of(matrix, number):
                counts[coord][self._coord(matrix, axis)] += size
        return _Move(axis, tuple(matrices), RowCounts(tuple(map(tuple, counts))))

    def _piece_sizes(self, matrix: Matrix, number: int) -> Iterable[tuple[int, int]]:
        cut, whole = matrix.cuts[number], matrix.shape_before(number, self._comm)
        for coord in range(self._comm.size(cut.axis)):
            yield coord, math.prod(cut.shape(whole, coord))

    def _shard_sizes(self, matrix: Matrix, number: int) -> Iterable[tuple[int, int]]:
        yield 0, math.prod(matrix.shape_before(number, self._comm))

    def _move(
        self, move: _Move, held: dict[Matrix, Tensor], dtype: torch.dtype, *, to_owner: bool
    ) -> dict[Matrix, Tensor]:
        """Send pieces to the owners on an axis, or owners' tensors to the holders of pieces.

        Returns:
            To owners, the matrices that this rank owns, joined over the axis; else all pieces.
        """
        comm, axis = self._comm, move.axis
        me, counts = comm.coord(axis), move.counts if to_owner else move.counts.reversed
        sent = self._empty((sum(counts.sent(me)),), dtype, axis)
        outgoing = [*sent.split(counts.sent(me))]

        def next_part(messages: list[Tensor], peer: int, shape: Sequence[int]) -> Tensor:
            size = math.prod(shape)
            part, messages[peer] = messages[peer][:size], messages[peer][size:]
            return part.view(*shape)

        for matrix, number in move.matrices:
            cut, owner = matrix.cuts[number], self._coord(matrix, axis)
            whole = matrix.shape_before(number, comm)
            if to_owner:
                next_part(outgoing, owner, cut.shape(whole, me)).copy_(held[matrix])
            elif owner == me:
                for coord in range(comm.size(axis)):
                    piece = next_part(outgoing, coord, cut.shape(whole, coord))
                    for source, target in cut.pairs(held[matrix], piece, coord):
                        target.copy_(source)
        incoming = [*comm.exchange_rows(sent, axis, counts).split(counts.received(me))]
        moved: dict[Matrix, Tensor] = {}
        for matrix, number in move.matrices:
            cut, owner = matrix.cuts[number], self._coord(matrix, axis)
            whole = matrix.shape_before(number, comm)
            if not to_owner:
                moved[matrix] = next_part(incoming, owner, cut.shape(whole, me))
            elif owner == me:
                moved[matrix] = joined = sent.new_empty(whole)
                for coord in range(comm.size(axis)):
                    piece = next_part(incoming, coord, cut.shape(whole, coord))
                    for target, source in cut.pairs(joined, piece, coord):
                        target.copy_(source)
        return moved

    def _empty(self, size: Sequence[int], dtype: torch.dtype, axis: str) -> Tensor:
        """Return a buffer that collectives over `axis` send without a copy."""
        like = torch.empty(0, dtype=dtype, device=self._comm.device)
        return self._comm.empty(size, like, axis)


AxisCut = tuple[str, int, Placement | None]
"""Axis, dimension, and the placement on an axis of tp; None for rows in equal chunks."""


def _axes_that_cut(parameter: Tensor, comm: Comm) -> tuple[AxisCut, ...]:
    """Return the axes that cut a parameter, in the order of the cuts: tp and ep, then fsdp."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    found: list[AxisCut] = []
    shards: list[tuple[str, int]] = []
    for name, size, placement in zip(names, mesh.shape, parameter.placements, strict=True):
        if placement.is_replicate() or size == 1:
            continue
        dim = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
        if name in axes_of("tp", names) or (name == EXPERT.split and parameter.ndim == 3):
            found.append((name, dim, placement))
        else:
            shards.append((name, dim))
    if shards:  # FSDP2 cuts the shard of tp into equal chunks, whatever its placements say
        members = tuple(axis for name, _ in shards for axis in comm.axes_of(name))
        flat = next((n for n, of in flattened(comm.axes).items() if of == members), members[0])
        found.append((flat, shards[0][1], None))
    return tuple(found)


@functools.lru_cache(1024)
def _runs(
    length: int, dim: int, placement: Placement | None, num: int
) -> tuple[tuple[Run, ...], ...]:
    """Return the indices of each coordinate's piece of a dimension of `length`."""
    every = torch.arange(length).view(*(1,) * dim, length)
    if placement is None or type(placement).__name__ == "Shard":
        chunks = [*every.flatten().chunk(num)]
        chunks += [chunks[0][:0]] * (num - len(chunks))
    else:  # fused weights: a piece of each map
        split: Any = placement
        chunks = [each.flatten() for each in split._split_tensor(every, num, with_padding=False)[0]]
    pieces: list[tuple[Run, ...]] = []
    for chunk in chunks:
        runs: list[Run] = []
        for first, at in enumerate(chunk.tolist()):
            if runs and runs[-1][1] + runs[-1][2] == at:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((first, at, 1))
        pieces.append(tuple(runs))
    return tuple(pieces)


def _matrix(shape: Sequence[int], rows: range, axes: Sequence[AxisCut], comm: Comm) -> Matrix:
    """Follow the rows of a matrix through the cuts of its parameter."""
    sizes, first, end = list(shape), rows.start, rows.stop
    cuts: list[Cut] = []
    fixed: dict[str, int] = {}
    for axis, dim, placement in axes:
        pieces = _runs(sizes[dim], dim, placement, comm.size(axis))
        at = comm.coord(axis)
        if dim == 0:
            # The rows in each piece, counted from the first row of the matrix there and here.
            inside = [
                [
                    (a + max(0, first - b), max(b, first) - first, min(b + n, end) - max(b, first))
                    for a, b, n in piece
                    if min(b + n, end) > max(b, first)
                ]
                for piece in pieces
            ]
            starts = [piece[0][0] if piece else 0 for piece in inside]
            cut = Cut(
                axis, 0,
                tuple(
                    tuple((a - start, b, n) for a, b, n in piece)
                    for start, piece in zip(starts, inside, strict=True)
                ),
            )  # fmt: skip
            whole_at = [n for n in range(len(pieces)) if cut.length(n) == end - first]
            if whole_at and not any(each.dim == 0 for each in cuts):
                at = whole_at[0]
                members = comm.axes_of(axis)
                coords = np.unravel_index(at, [comm.axes[each] for each in members])
                fixed |= {each: int(n) for each, n in zip(members, coords, strict=True)}
            else:
                cuts.append(cut)
            first, end = starts[at], starts[at] + cut.length(at)
        else:
            cuts.append(Cut(axis, dim, pieces))
        sizes[dim] = sum(n for *_, n in pieces[at])
    kept = (len(rows), *shape[1:])
    return Matrix(0, tuple(kept), (first, end), tuple(cuts), fixed)
