"""The communicator: one object for a job's named mesh axes and the collectives over them.

Notation (Austin et al., How to Scale Your Model, 2025): `A[I_x]` is split over axis x, `{sum x}` is
a partial sum, not yet reduced over x. N is the size of the axis. Bytes a rank sends for each byte
of the full tensor:

    all_reduce       A{sum x} -> A          2 (N - 1)/N, as in a ring
    all_gather       A[I_x] -> A            (N - 1)/N
    reduce_scatter   A{sum x} -> A[I_x]     (N - 1)/N
    all_to_all       A[I_x, J] -> A[I, J_x] (N - 1)/N; in uneven pieces, those for other ranks
    broadcast        A on one -> A          (N - 1)/N
    reduce           A{sum x} -> A on one   (N - 1)/N
    swap             exchange A with a partner    counted as an all_to_all, also with itself
    send, recv       A on one -> A on another     1, on the sender

`Ranks` runs them over the process groups of a job; `dry_run.CountingComm` only counts them.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from phalanx.comm.axes import axes_of, flattened
from phalanx.comm.fork import refuse_in_fork
from phalanx.comm.meshes import job_mesh
from phalanx.comm.pending import Pending
from phalanx.comm.ranges import named
from phalanx.comm.row_counts import RowCounts, note
from phalanx.comm.transfer import CommEngine
from phalanx.strategy import Strategy, check_ranks

Reduction = Literal["sum", "max", "min"]


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill_shard(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, which all ranks have, into a tensor; of a DTensor into the own shard."""
    if isinstance(tensor, DTensor):
        how = (tensor.device_mesh, tensor.placements)
        whole = distribute_tensor(whole.to(tensor.device), *how, src_data_rank=None)
    local_shard(tensor.detach()).copy_(local_shard(whole))


class Comm(ABC):
    """The named axes of a job, this rank's coordinates on them, and collectives over them.

    A parameter `name` is an axis or a set of axes, see comm.axes; a parameter `axis` is one axis.
    If the job lacks the axis, or the axis has one rank, a collective sends nothing and returns its
    input. Methods named `_start` return at once; do not use their tensors before `wait`.

    Attributes:
        axes: axis name -> size, outer to inner.
        device: device on which this rank computes.
    """

    def __init__(
        self, axes: Mapping[str, int], coords: Mapping[str, int], device: torch.device
    ) -> None:
        self.axes = dict(axes)
        self.device = device
        self._coords = dict(coords)
        self._axes_of: dict[str, tuple[str, ...]] = {}

    def __deepcopy__(self, memo: Any) -> Comm:
        return self  # a deep copy of a module communicates with the same ranks

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that `name` stands for, outer to inner; possibly none."""
        if name not in self._axes_of:
            self._axes_of[name] = axes_of(name, self.axes)
        return self._axes_of[name]

    def size(self, name: str) -> int:
        """Return the number of ranks of an axis or a set; 1 if the job has none of the axes."""
        return math.prod(self.axes[axis] for axis in self.axes_of(name))

    def coord(self, name: str) -> int:
        """Return this rank's row-major index among the ranks of an axis or a set."""
        return self._number(self.axes_of(name))

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._number(self.axes)

    @property
    def is_first(self) -> bool:
        """Whether this rank is rank 0, which reports for the job."""
        return self.rank == 0

    def _number(self, axes: Iterable[str]) -> int:
        number = 0
        for axis in axes:
            number = number * self.axes[axis] + self._coords[axis]
        return number

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the global ranks of this rank's group over an axis or a set."""
        # Row-major. Of pp 2 x tp 2, the rank at pp 1, tp 0 has after each axis:
        #   over tp    [1]       [2, 3]
        #   over pp    [0, 1]    [0, 2]
        members, ranks = self.axes_of(name), [0]
        for axis, size in self.axes.items():
            coords = range(size) if axis in members else (self._coords[axis],)
            ranks = [rank * size + coord for rank in ranks for coord in coords]
        return tuple(ranks)

    def axis_by_ranks(self) -> dict[tuple[int, ...], str]:
        """Return a map from the global ranks of each group of this rank to the name of its axis.

        A flattened axis has its own name, a pair of neighbors on pp maps to "pp", and the group of
        all ranks maps to the names of all axes joined by "_".
        """
        names = {self.ranks(axis): axis for axis in self.axes}
        if "pp" in self.axes:
            of_pp, stage = self.ranks("pp"), self.coord("pp")
            for side in (stage - 1, (stage + 1) % len(of_pp)):
                names.setdefault(tuple(sorted((of_pp[stage], of_pp[side]))), "pp")
        for name in flattened(self.axes):
            names.setdefault(self.ranks(name), name)
        if len(self.axes) > 1:
            names.setdefault(tuple(range(math.prod(self.axes.values()))), "_".join(self.axes))
        return names

    @property
    def model_mesh(self) -> DeviceMesh:
        """The mesh over which tensors are split: the ranks of this rank's pipeline stage."""
        raise AssertionError(f"{type(self).__name__} has no mesh")

    @property
    def is_compared(self) -> bool:
        """Whether ranks synchronize at each call to compare the calls, see debug.check."""
        return False

    def with_separate_groups(self, name: str) -> Comm:
        """Return a communicator of the same ranks that uses separate groups over `name`.

        Every rank of the job calls this. Collectives of one group must be called in one order on
        all ranks. Collectives inside a layer's backward have no fixed order relative to gradient
        reductions, which start when gradients are ready, so one of the two needs separate groups.
        """
        del name
        return self

    def all_reduce(self, tensor: Tensor, name: str, reduction: Reduction = "sum") -> Tensor:
        """Reduce `tensor` in place on every rank of `name`, and return it."""
        return self._all_reduce_start(tensor, name, reduction).wait()

    def all_reduce_start(self, tensor: Tensor, name: str, reduction: Reduction = "sum") -> Pending:
        """Start `all_reduce`; over several axes, only the last reduction is asynchronous.

        While calls are compared (`is_compared`), it starts in `wait`, where all ranks synchronize.
        """
        begin = functools.partial(self._all_reduce_start, tensor, name, reduction)
        return Pending(tensor, begin=begin) if self.is_compared else begin()

    def _all_reduce_start(self, tensor: Tensor, name: str, reduction: Reduction) -> Pending:
        pending = Pending(tensor)
        for axis in self._axes_with_peers(name):
            pending.wait()
            pending = self._run("all_reduce", axis, tensor, tensor, reduction)
        return pending

    def all_gather(self, shard: Tensor, axis: str, dim: int) -> Tensor:
        """Return the shards of all ranks, which have equal shapes, concatenated along `dim`."""
        if self.size(axis) == 1:
            return shard
        # shard [.., L, ..] -> full [.., N, L, ..], filled with N as first -> [.., N L, ..]
        full = shard.new_empty(*shard.shape[:dim], self.size(axis), *shard.shape[dim:])
        self._run("all_gather", axis, full.movedim(dim, 0), shard.contiguous()).wait()
        return full.flatten(dim, dim + 1)

    def reduce_scatter(
        self, full: Tensor, axis: str, dim: int, *, is_spent: bool = False
    ) -> Tensor:
        """Return this rank's shard along `dim` of the sum; the axis size must divide the length.

        `is_spent` asserts that `empty` allocated `full` and that it is not written again, so that
        peers may read its pieces in place, also after this call returns.
        """
        if self.size(axis) == 1:
            return full
        shards, is_spent = self._cut(full, axis, dim, is_spent=is_spent)
        out = full.new_empty(shards.shape[1:])
        return self._run("reduce_scatter", axis, out, shards, is_spent=is_spent).wait()

    def all_to_all(self, tensor: Tensor, axis: str, split_dim: int, join_dim: int) -> Tensor:
        """Send each rank a piece of `tensor`, cut along `split_dim`; return the received pieces.

        The received pieces are concatenated along `join_dim`.
        """
        if self.size(axis) == 1:
            return tensor
        # With split_dim = 2 and join_dim = 1, from positions to heads:
        #   [B, S/N, H] -> pieces [N, B, S/N, H/N] -> received, row r from rank r -> [B, S, H/N]
        pieces, is_spent = self._cut(tensor, axis, split_dim)
        received = tensor.new_empty(pieces.shape)
        self._run("all_to_all", axis, received, pieces, is_spent=is_spent).wait()
        return received.movedim(0, join_dim).flatten(join_dim, join_dim + 1)

    def exchange_start(self, out: Tensor, pieces: Tensor, axis: str) -> Pending:
        """Start an all-to-all from `pieces` to `out`, both contiguous with one row per rank.

        While calls are compared (`is_compared`), it starts in `wait`.
        """
        begin = functools.partial(self._run, "all_to_all", axis, out, pieces)
        return Pending(out, begin=begin) if self.is_compared else begin()

    def gather_counts(self, counts_G: Tensor, axis: str, num_rows: int) -> RowCounts:
        """Return the rows of each group that each rank has; the host waits for them.

        Args:
            counts_G: rows of each of G groups on this rank; N divides G, and group g belongs to the
                rank g // (G/N) of the axis.
            axis: the axis.
            num_rows: their sum.
        """
        del num_rows
        counts_NG = self.all_gather(counts_G[None], axis, 0)
        return note(RowCounts(tuple(map(tuple, counts_NG.tolist()))))

    def exchange_rows(self, rows: Tensor, axis: str, counts: RowCounts) -> Tensor:
        """Send each rank its rows, and return the received rows; both are sorted by rank.

        Args:
            rows: [M, ...], the rows of this rank in the order of `counts.groups`.
            axis: the axis.
            counts: rows that all ranks send, equal on all ranks, as from `gather_counts`.
        """
        return self.exchange_rows_start(rows, axis, counts).wait()

    def exchange_rows_start(self, rows: Tensor, axis: str, counts: RowCounts) -> Pending:
        """Start `exchange_rows`; while calls are compared (`is_compared`), it starts in `wait`."""
        if self.size(axis) == 1:
            return Pending(rows)
        coord = self.coord(axis)
        num_sent, num_received = sum(counts.sent(coord)), sum(counts.received(coord))
        # A peer would write more rows than expected beyond the end of its buffer.
        assert len(rows) == num_sent, f"{len(rows)} rows, and the counts announce {num_sent}"
        out = rows.new_empty(num_received, *rows.shape[1:])
        begin = functools.partial(self._run, "all_to_all", axis, out, rows.contiguous(), counts)
        return Pending(out, begin=begin) if self.is_compared else begin()

    def broadcast(self, tensor: Tensor, name: str) -> Tensor:
        """Overwrite `tensor` on every rank with the first rank's tensor."""
        # Axis by axis: over dp rank (d, t) gets the tensor of (0, t); then over tp (d, 0) sends,
        # which by now has the tensor of (0, 0).
        for axis in self._axes_with_peers(name) if tensor.numel() else ():
            # Sent as bytes because gloo lacks some dtypes. A non-contiguous tensor is copied.
            flat = tensor.detach().contiguous().view(-1)
            self.broadcast_start(flat.view(torch.uint8), axis, 0).wait()
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view_as(tensor))
        return tensor

    def broadcast_start(self, tensor: Tensor, axis: str, source: int) -> Pending:
        """Start to overwrite the contiguous `tensor` with the tensor of coordinate `source`."""
        if self.size(axis) == 1:
            return Pending(tensor)
        return self._run("broadcast", axis, tensor, tensor, source)

    def reduce_start(self, tensor: Tensor, axis: str, target: int) -> Pending:
        """Start to sum the contiguous `tensor` of all ranks on coordinate `target`.

        Afterwards the contents of `tensor` are undefined on all other ranks.
        """
        if self.size(axis) == 1:
            return Pending(tensor)
        return self._run("reduce", axis, tensor, tensor, target)

    def send_start(self, tensor: Tensor, axis: str, target: int) -> Pending:
        """Start to send the contiguous `tensor` to the rank at coordinate `target`.

        Messages between two ranks arrive in the order in which they were sent.
        """
        return self._run("send", axis, tensor, tensor, target)

    def recv_start(self, tensor: Tensor, axis: str, source: int) -> Pending:
        """Start to receive the next message from coordinate `source` into contiguous `tensor`."""
        return self._run("recv", axis, tensor, tensor, source)

    def swap(self, tensor: Tensor, name: str, partner: int) -> Tensor:
        """Exchange tensors of equal shape with the rank at coordinate `partner`; return its tensor.

        Every rank must call this, also a rank that is its own partner.
        """
        if self.size(name) == 1:
            return tensor
        tensor = tensor.contiguous()
        return self._run("swap", name, torch.empty_like(tensor), tensor, partner).wait()

    def _axes_with_peers(self, name: str) -> list[str]:
        """Return the axes of `name` that have more than one rank."""
        return [axis for axis in self.axes_of(name) if self.axes[axis] > 1]

    def _cut(
        self, full: Tensor, axis: str, dim: int, *, is_spent: bool = False
    ) -> tuple[Tensor, bool]:
        """Return the pieces of `full` along `dim`, one per rank, and whether they are spent.

        The pieces of a spent tensor are a view. Other pieces are contiguous; if that needs a copy,
        the copy is spent.
        """
        pieces = full.unflatten(dim, (self.size(axis), -1)).movedim(dim, 0)
        if is_spent or pieces.is_contiguous():
            return pieces, is_spent
        return self.empty(pieces.shape, full, axis).copy_(pieces), True

    def empty(self, size: Sequence[int], like: Tensor, axis: str = "") -> Tensor:
        """Return an uninitialized tensor that collectives over `axis` use without a copy.

        Its dtype and device are the same as `like`'s. The default axis is the outermost axis with
        several ranks.
        """
        return like.new_empty(size)

    @abstractmethod
    def _run(
        self, op: str, axis: str, out: Tensor, given: Tensor, option: Any = None, *,
        is_spent: bool = False,
    ) -> Pending:  # fmt: skip
        """Start a collective over one axis of more than one rank.

        Args:
            op: name of the collective, as in the table above.
            axis: name of the axis; for a swap also of a flattened set of axes.
            out: output, contiguous; for all_gather [N, *given.shape] with any strides.
            given: input, contiguous, possibly `out` itself; for reduce_scatter [N, *out.shape] with
                any strides without gaps that are equal on all ranks.
            option: reduction of an all_reduce; coordinate of the peer of a swap, send or recv, or
                of the root of a broadcast or reduce; `RowCounts` of an uneven all_to_all.
            is_spent: whether `given` is not written again until it is freed.
        """


class SingleRankComm(Comm):
    """A communicator of one rank, for work that does not communicate with the process's job.

    Every collective returns its input and sends nothing.
    """

    def __init__(self) -> None:
        super().__init__({"dp": 1}, {"dp": 0}, torch.device("cpu"))

    @override
    def _run(
        self, op: str, axis: str, out: Tensor, given: Tensor, option: Any = None, *,
        is_spent: bool = False,
    ) -> Pending:  # fmt: skip
        raise AssertionError(f"{op}: there is no other rank on {axis}")


class Ranks(Comm):
    """The communicator of a job whose ranks have joined, over its process groups.

    Attributes:
        mesh: device mesh of all ranks, for FSDP2 and DTensor; other callers use axis names.
    """

    def __init__(
        self, split: Strategy | Mapping[str, int], device: str = "cpu", *,
        shares_memory: bool = True, bytes_per_s: float | None = None,
    ) -> None:  # fmt: skip
        """Arrange all ranks of the job by the degrees of `split`; every rank calls this.

        "cuda" is the device set by `torch.cuda.set_device`. With `shares_memory`, CPU groups whose
        ranks are all on one host communicate through shared memory. With `bytes_per_s`, messages
        of CPU groups pass a link of this rate, one for each rank (comm.slow_link).

        Raises:
            StrategyError: the degrees do not multiply to the number of ranks.
            ConfigError: a rank may not open as many files as the mesh needs.
        """
        if isinstance(split, Strategy):
            check_ranks(split, dist.get_world_size())
            split = split.mesh_axes()
        self._job = job_mesh(split, device, shares_memory, bytes_per_s)
        self.mesh = self._job.whole
        coords = {axis: self.mesh.get_local_rank(axis) for axis in split}
        local = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else "cpu"
        super().__init__(split, coords, torch.device(local))
        self._engines = self._job.engines
        self._one_way = self._job.one_way

    @property
    @override
    def model_mesh(self) -> DeviceMesh:
        return self._job.stage_mesh

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The mesh for FSDP2: dp, which replicates, if any, and the axis that shards."""
        return self._job.sharding

    @property
    @override
    def is_compared(self) -> bool:
        return self._job.num_checks > 0

    @contextmanager
    def compared(self) -> Generator[None]:
        """Set `is_compared` inside the block."""
        self._job.num_checks += 1
        try:
            yield
        finally:
            self._job.num_checks -= 1

    @override
    def with_separate_groups(self, name: str) -> Comm:
        other = copy.copy(self)
        other._engines = self._engines | self._job.separate_engines(self._axes_with_peers(name))
        return other

    @override
    def _run(
        self, op: str, axis: str, out: Tensor, given: Tensor, option: Any = None, *,
        is_spent: bool = False,
    ) -> Pending:  # fmt: skip
        refuse_in_fork(op)
        engine = self._engines[axis]
        if op in ("send", "recv"):
            engine, option = self._message_engine(axis, option, is_send=op == "send")
        with named(f"{op} {axis}", out, given):
            work = engine.begin(op, out, given, option, is_spent=is_spent)
            return Pending(out, work, op=op, axis=axis)

    def _message_engine(self, axis: str, peer: int, *, is_send: bool) -> tuple[CommEngine, int]:
        """Return the engine for a message to or from coordinate `peer`, and the peer's group rank.

        A message between neighbors on pp uses their one-way group.
        """
        ends = (self.coord(axis), peer) if is_send else (peer, self.coord(axis))
        if axis != "pp" or ends not in self._one_way:
            return self._engines[axis], peer
        group = self._one_way[ends]
        return self._job.over(group, axis), 1 - group.rank()

    @override
    def empty(self, size: Sequence[int], like: Tensor, axis: str = "") -> Tensor:
        axes = (axis for axis in self._engines if self.size(axis) > 1)
        engine = self.engine(axis or next(axes, next(iter(self.axes))))
        return engine.empty(size, like.dtype, like.device)

    def engine(self, axis: str) -> CommEngine:
        """Return the engine that runs the collectives over one axis."""
        return self._engines[axis]
