"""A dry run: one rank of a hypothetical job counts collectives instead of running them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from phalanx.comm.comm import Comm
from phalanx.comm.ledger import WITHOUT_PAYLOAD, Entry, Tally, sent_bytes, sent_in_pieces
from phalanx.comm.pending import Pending
from phalanx.comm.row_counts import RowCounts
from phalanx.comm.watch import Phases


class CountingComm(Comm, Phases):
    """One rank of a hypothetical job: it counts each collective and sends nothing.

    Use tensors on the meta device; the contents of other tensors are undefined after a collective.
    `entries` equals the entries that a `Ledger` counts when the same calls run over `Ranks`.
    """

    def __init__(
        self, axes: Mapping[str, int], coords: Mapping[str, int] | None = None,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        """Create the rank at `coords`, 0 on omitted axes, of axes as `Strategy.mesh_axes` returns.

        Unless `device` is "cpu", where ranks share memory, a strided tensor is copied before or
        after a collective, because NCCL needs contiguous tensors.
        """
        super().__init__(axes, dict.fromkeys(axes, 0) | dict(coords or {}), torch.device("meta"))
        self._tally, self._takes_strides = Tally(), device == "cpu"

    def entries(self) -> list[Entry]:
        """Return one entry per phase, axis and op, in the order of their first calls."""
        return self._tally.entries()

    @property
    @override
    def model_mesh(self) -> DeviceMesh:
        """A mesh of all axes without process groups."""
        sizes, names = tuple(self.axes.values()), tuple(self.axes)
        ranks = torch.arange(math.prod(sizes)).view(sizes)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=self.rank)
        # DTensor caches the meshes of results, and meshes of the same ranks are equal whatever rank
        # they are of: a job's DTensor would get this mesh, and the coordinates of this rank.
        mesh._thread_id = -1 - self.rank  # pyright: ignore[reportPrivateUsage]
        return mesh

    @override
    def gather_counts(self, counts_G: Tensor, axis: str, num_rows: int) -> RowCounts:
        """Return the counts of ranks that have `num_rows` rows each, evenly over the groups."""
        self.all_gather(counts_G[None], axis, 0)
        return RowCounts.even(self.size(axis), len(counts_G), num_rows)

    @override
    def _run(
        self, op: str, axis: str, out: Tensor, given: Tensor, option: Any = None, *,
        is_spent: bool = False,
    ) -> Pending:  # fmt: skip
        name, payload = "all_to_all" if op == "swap" else op, max(out.nbytes, given.nbytes)
        sent = sent_bytes(name, payload, self.size(axis))
        if isinstance(option, RowCounts):
            coord, payload = self.coord(axis), given.nbytes
            sent = sent_in_pieces(payload, option.sent(coord), coord)
        if op not in WITHOUT_PAYLOAD:
            self._tally.add(Entry(self.phase_name, axis, name, 1, payload, sent))
        if not self._takes_strides:
            given.contiguous()
            if not out.is_contiguous():
                out.copy_(torch.empty_like(out, memory_format=torch.contiguous_format))
        return Pending(out)
