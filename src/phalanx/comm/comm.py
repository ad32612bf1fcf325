"""The communicator: a job's named axes as one object, and the collectives over them.

Notation (Austin et al., How to Scale Your Model, 2025): `A[I_x]` is split over axis x, `{sum x}` is
a sum still owed over x. N is the size of the axis; a rank sends, for a byte of the full tensor,

    all_reduce       A{sum x} -> A          2 (N - 1)/N, as in a ring
    all_gather       A[I_x] -> A            (N - 1)/N
    reduce_scatter   A{sum x} -> A[I_x]     (N - 1)/N
    all_to_all       A[I_x, J] -> A[I, J_x] (N - 1)/N
    broadcast        A on one -> A          (N - 1)/N
    reduce           A{sum x} -> A on one   (N - 1)/N
    swap             A to a partner, its A back   counted as an all_to_all, perhaps with itself
    send, recv       A on one -> A on another     1, by the one that sends

`Ranks` runs them over the process groups of a job; `dry_run.Counting` only counts them.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from phalanx.comm.axes import axes_of, flattened
from phalanx.comm.exchange import ProcessGroupEngine
from phalanx.comm.meshes import job_mesh
from phalanx.comm.pending import Pending
from phalanx.comm.ranges import named
from phalanx.comm.transfer import CommEngine
from phalanx.errors import ScriptError
from phalanx.strategy import Strategy, check_ranks

Reduction = Literal["sum", "max", "min"]


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Comm(ABC):
    """The named axes of a job, and this rank's coordinates on them.

    A `name` is an axis or a set of axes, see comm.axes; an `axis` is one. Where the job has none,
    or one rank on it, a collective sends nothing and returns what it was given. Those named
    `_start` return at once; their tensors must be left alone until `wait`.

    Attributes:
        axes: sizes of the axes of the mesh, outer to inner.
        device: what this rank computes on.
    """

    def __init__(
        self, axes: Mapping[str, int], coords: Mapping[str, int], device: torch.device
    ) -> None:
        self.axes = dict(axes)
        self.device = device
        self._coords = dict(coords)
        self._axes_of: dict[str, tuple[str, ...]] = {}

    def __deepcopy__(self, memo: Any) -> Comm:
        return self  # a copy of a module that holds it speaks to the same ranks

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Return the axes of the mesh that `name` means, outer to inner; perhaps none."""
        if name not in self._axes_of:
            self._axes_of[name] = axes_of(name, self.axes)
        return self._axes_of[name]

    def size(self, name: str) -> int:
        """Return the number of ranks of an axis or a set; 1 where the job has none."""
        return math.prod(self.axes[axis] for axis in self.axes_of(name))

    def coord(self, name: str) -> int:
        """Return this rank's number among the ranks of an axis or a set, the outer axis first."""
        return self._number(self.axes_of(name))

    @property
    def rank(self) -> int:
        """This rank's number in the job."""
        return self._number(self.axes)

    @property
    def is_first(self) -> bool:
        """Whether this rank is rank 0 of the job, which reports for it."""
        return self.rank == 0

    def _number(self, axes: Iterable[str]) -> int:
        number = 0
        for axis in axes:
            number = number * self.axes[axis] + self._coords[axis]
        return number

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the numbers in the job of the ranks of an axis or a set that this rank is of."""
        members, ranks = self.axes_of(name), [0]
        for axis, size in self.axes.items():
            coords = range(size) if axis in members else (self._coords[axis],)
            ranks = [rank * size + coord for rank in ranks for coord in coords]
        return tuple(ranks)

    def axis_by_ranks(self) -> dict[tuple[int, ...], str]:
        """Map the ranks of this rank's groups to the names of their axes.

        A flattened axis has its own name, two neighbours on pp are the axis "pp", and all ranks
        are the names of all axes, joined by "_".
        """
        names = {self.ranks(axis): axis for axis in self.axes}
        if "pp" in self.axes:
            of_pp, here = self.ranks("pp"), self.coord("pp")
            for side in (here - 1, (here + 1) % len(of_pp)):
                names.setdefault(tuple(sorted((of_pp[here], of_pp[side]))), "pp")
        for name in flattened(self.axes):
            names.setdefault(self.ranks(name), name)
        if len(self.axes) > 1:
            names.setdefault(tuple(range(math.prod(self.axes.values()))), "_".join(self.axes))
        return names

    @property
    def is_compared(self) -> bool:
        """Whether the ranks meet at each call, see debug.check."""
        return False

    def apart(self, name: str) -> Comm:
        """Return these ranks with calls over `name` that keep no order with those made here.

        Every rank of the job calls this. Collectives of one group must come in one order on all
        ranks, which those within a layer's backward and those that start when gradients are made
        do not.
        """
        del name
        return self

    def all_reduce(self, tensor: Tensor, name: str, reduction: Reduction = "sum") -> Tensor:
        """Reduce `tensor` in place; every rank of `name` then holds the result."""
        return self._all_reduce_start(tensor, name, reduction).wait()

    def all_reduce_start(self, tensor: Tensor, name: str, reduction: Reduction = "sum") -> Pending:
        """Begin `all_reduce`; of several axes, only the last is still under way at return.

        Under the check of calls it begins when it is waited for, where all ranks can meet.
        """
        begin = functools.partial(self._all_reduce_start, tensor, name, reduction)
        return Pending(tensor, begin=begin) if self.is_compared else begin()

    def _all_reduce_start(self, tensor: Tensor, name: str, reduction: Reduction) -> Pending:
        pending = Pending(tensor)
        for axis in self._speaking(name):
            pending.wait()
            pending = self._run("all_reduce", axis, tensor, tensor, reduction)
        return pending

    def all_gather(self, shard: Tensor, axis: str, dim: int) -> Tensor:
        """Return the shards of all ranks, of equal shape, one after another along `dim`."""
        if self.size(axis) == 1:
            return shard
        full = shard.new_empty(*shard.shape[:dim], self.size(axis), *shard.shape[dim:])
        self._run("all_gather", axis, full.movedim(dim, 0), shard.contiguous()).wait()
        return full.flatten(dim, dim + 1)

    def reduce_scatter(
        self, full: Tensor, axis: str, dim: int, *, is_spent: bool = False
    ) -> Tensor:
        """Return this rank's shard, along `dim`, of the sum; the axis's size divides it.

        `is_spent` says that `empty` has made `full`, and that nobody writes to it again: others
        read its pieces where they lie.
        """
        if self.size(axis) == 1:
            return full
        shards, is_spent = self._cut(full, axis, dim, is_spent=is_spent)
        out = full.new_empty(shards.shape[1:])
        return self._run("reduce_scatter", axis, out, shards, is_spent=is_spent).wait()

    def all_to_all(self, tensor: Tensor, axis: str, split_dim: int, join_dim: int) -> Tensor:
        """Cut `tensor` along `split_dim`, a piece for each rank; join what comes on `join_dim`."""
        if self.size(axis) == 1:
            return tensor
        pieces, is_spent = self._cut(tensor, axis, split_dim)
        received = tensor.new_empty(pieces.shape)
        self._run("all_to_all", axis, received, pieces, is_spent=is_spent).wait()
        return received.movedim(0, join_dim).flatten(join_dim, join_dim + 1)

    def exchange_start(self, out: Tensor, pieces: Tensor, axis: str) -> Pending:
        """Begin to fill `out` with a piece of each rank; both are contiguous, pieces in a row.

        Under the check of calls it begins when it is waited for.
        """
        begin = functools.partial(self._run, "all_to_all", axis, out, pieces)
        return Pending(out, begin=begin) if self.is_compared else begin()

    def broadcast(self, tensor: Tensor, name: str) -> Tensor:
        """Overwrite `tensor` on every rank with the first rank's tensor."""
        for axis in self._speaking(name) if tensor.numel() else ():
            # As bytes: gloo does not know every data type. A copy where it is not contiguous.
            flat = tensor.detach().reshape(-1)
            self.broadcast_start(flat.view(torch.uint8), axis, 0).wait()
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view_as(tensor))
        return tensor

    def broadcast_start(self, tensor: Tensor, axis: str, source: int) -> Pending:
        """Begin to overwrite `tensor`, contiguous, with the tensor of coordinate `source`."""
        if self.size(axis) == 1:
            return Pending(tensor)
        return self._run("broadcast", axis, tensor, tensor, source)

    def reduce_start(self, tensor: Tensor, axis: str, target: int) -> Pending:
        """Begin to sum `tensor`, contiguous, into the tensor of coordinate `target`.

        The tensors of the other ranks hold nothing of use afterwards.
        """
        if self.size(axis) == 1:
            return Pending(tensor)
        return self._run("reduce", axis, tensor, tensor, target)

    def send_start(self, tensor: Tensor, axis: str, target: int) -> Pending:
        """Begin to send `tensor`, contiguous, to the rank at coordinate `target`.

        What one rank sends another arrives in the order in which it is sent.
        """
        return self._run("send", axis, tensor, tensor, target)

    def recv_start(self, tensor: Tensor, axis: str, source: int) -> Pending:
        """Begin to overwrite `tensor`, contiguous, with the next that `source` sends this rank."""
        return self._run("recv", axis, tensor, tensor, source)

    def swap(self, tensor: Tensor, name: str, partner: int) -> Tensor:
        """Return the tensor of the rank at coordinate `partner`, which gets this one, of its shape.

        Every rank makes this call, also one that is its own partner.
        """
        if self.size(name) == 1:
            return tensor
        tensor = tensor.contiguous()
        return self._run("swap", name, torch.empty_like(tensor), tensor, partner).wait()

    def _speaking(self, name: str) -> list[str]:
        """Return the axes of `name` that have more than one rank."""
        return [axis for axis in self.axes_of(name) if self.axes[axis] > 1]

    def _cut(
        self, full: Tensor, axis: str, dim: int, *, is_spent: bool = False
    ) -> tuple[Tensor, bool]:
        """Return the pieces of `full` along `dim`, one a rank; and whether they are spent.

        They are contiguous, if need be by a copy; of a tensor that is spent they stay as they lie.
        """
        pieces = full.unflatten(dim, (self.size(axis), -1)).movedim(dim, 0)
        if is_spent or pieces.is_contiguous():
            return pieces, is_spent
        return self.empty(pieces.shape, full, axis).copy_(pieces), True

    def empty(self, size: Sequence[int], like: Tensor, axis: str = "") -> Tensor:
        """Return an empty tensor, of the kind of `like`, that collectives use without a copy.

        They go over an axis, or over the outermost that has several ranks.
        """
        return like.new_empty(size)

    @abstractmethod
    def _run(
        self, op: str, axis: str, out: Tensor, given: Tensor, option: Any = None, *,
        is_spent: bool = False,
    ) -> Pending:  # fmt: skip
        """Begin a collective over one axis of more than one rank.

        Args:
            op: its name, as in the table above.
            axis: over which; a swap may go over all of a set.
            out: what it fills, contiguous; of an all_gather [N, *given.shape] of any strides.
            given: what it reads, contiguous; perhaps `out` itself. Of a reduce_scatter
                [N, *out.shape] of any strides without gaps, the same on all ranks.
            option: the reduction of an all_reduce, the partner of a swap, a send or a recv, or the
                coordinate where a broadcast starts or a reduce ends.
            is_spent: nobody writes to `given` again, before it is freed.
        """


class Ranks(Comm):
    """The ranks of a job, which have joined, over process groups.

    Attributes:
        mesh: of all ranks, for FSDP2 and DTensor; all else names axes.
    """

    def __init__(
        self, split: Strategy | Mapping[str, int], device: str = "cpu", *,
        shares_memory: bool = True,
    ) -> None:  # fmt: skip
        """Lay out as many ranks as the job has; every rank calls this.

        "cuda" is the device of `torch.cuda.set_device`. Ranks of one host that compute on CPUs
        share memory unless that is switched off.

        Raises:
            StrategyError: the degrees do not multiply to the number of ranks.
            ConfigError: a rank may not open as many files as the mesh needs.
        """
        if isinstance(split, Strategy):
            check_ranks(split, dist.get_world_size())
            split = split.mesh_axes()
        self._job = job_mesh(split, device, shares_memory)
        self.mesh = self._job.whole
        coords = {axis: self.mesh.get_local_rank(axis) for axis in split}
        here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else "cpu"
        super().__init__(split, coords, torch.device(here))
        self._process = os.getpid()
        self._engines = self._job.engines
        self._one_way = self._job.one_way

    @property
    def model_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that split each tensor: the ranks of one stage."""
        return self._job.inner

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The mesh over which fsdp alone splits and replicates a model."""
        return self._job.sharding

    @property
    @override
    def is_compared(self) -> bool:
        return self._job.num_checks > 0

    @contextmanager
    def compared(self) -> Generator[None]:
        """Have the ranks meet at each call inside the block."""
        self._job.num_checks += 1
        try:
            yield
        finally:
            self._job.num_checks -= 1

    @override
    def apart(self, name: str) -> Comm:
        other = copy.copy(self)
        other._engines = self._engines | self._job.apart(self._speaking(name))
        return other

    @override
    def _run(
        self, op: str, axis: str, out: Tensor, given: Tensor, option: Any = None, *,
        is_spent: bool = False,
    ) -> Pending:  # fmt: skip
        if os.getpid() != self._process:  # its messages would pass for the rank's own
            raise ScriptError(
                f"{op}: this process is a fork of a rank, such as a worker of a DataLoader, and "
                "no rank itself; call what sends to other ranks in the script's own process"
            )
        name, engine = f"{op} {axis}", self._engines[axis]
        if op in ("send", "recv"):
            engine, option = self._message_engine(axis, option, is_send=op == "send")
        with named(name):
            work = engine.begin(op, out, given, option, is_spent=is_spent)
            return Pending(out, work, name=name)

    def _message_engine(self, axis: str, peer: int, *, is_send: bool) -> tuple[CommEngine, int]:
        """Return what runs a message to or from a coordinate, and the peer's number in it."""
        ends = (self.coord(axis), peer) if is_send else (peer, self.coord(axis))
        if axis != "pp" or ends not in self._one_way:
            return self._engines[axis], peer
        group = self._one_way[ends]
        return ProcessGroupEngine(group), 1 - group.rank()

    @override
    def empty(self, size: Sequence[int], like: Tensor, axis: str = "") -> Tensor:
        axes = (axis for axis in self._engines if self.size(axis) > 1)
        engine = self.engine(axis or next(axes, next(iter(self.axes))))
        return engine.empty(size, like.dtype, like.device)

    def engine(self, axis: str) -> CommEngine:
        """Return what runs the collectives over one axis."""
        return self._engines[axis]
