"""Who is where: host, process, address, device and coordinates of each rank; link of each axis."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from phalanx.launch import interface
from phalanx.launch.rank_env import read_rank_env
from phalanx.measure.rank_times import groups_of
from phalanx.report.tabular import Table

if TYPE_CHECKING:
    from phalanx.comm.comm import Comm

MOST_RANKS: Final = 32
"""Most ranks of which the table has a row each; of more, it has a row for each host."""


@dataclass(frozen=True)
class Placement:
    """The places of all ranks of a job: a record `placement` of metrics.jsonl.

    Attributes:
        axes: mesh axis -> size, outer to inner.
        ranks: of each rank `local_rank`, `process`, `host`, `address`, `interface` and `device`; a
            new host begins at local rank 0. On several hosts address and interface are gloo's; of
            NCCL, the interface is the one that NCCL_SOCKET_IFNAME sets.
    """

    axes: Mapping[str, int]
    ranks: Sequence[Mapping[str, Any]]

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host."""
        begins = [number for number, rank in enumerate(self.ranks) if rank["local_rank"] == 0]
        ends = [*begins[1:], len(self.ranks)]
        return [[*range(begin, end)] for begin, end in zip(begins, ends, strict=True)]

    @property
    def links(self) -> dict[str, str]:
        """Axis -> the link that its ranks use: "inside a host", or "between hosts, by eth0"."""
        host_of = [number for number, host in enumerate(self.hosts) for _ in host]
        links: dict[str, str] = {}
        for axis in self.axes:
            groups = groups_of(self.axes, axis)
            crossing = [group for group in groups if len({host_of[rank] for rank in group}) > 1]
            names = {self.ranks[rank]["interface"] for group in crossing for rank in group} - {""}
            between = "between hosts" + (f", by {', '.join(sorted(names))}" if names else "")
            links[axis] = between if crossing else "inside a host"
        return links

    def table(self) -> Table:
        """Return a table with a row for each rank, or of many ranks for each host."""
        number = range(len(self.ranks))
        coords = np.array(np.unravel_index(number, [*self.axes.values()]))
        rows: list[list[str]] = []
        for ranks in [[rank] for rank in number] if len(number) <= MOST_RANKS else self.hosts:
            first, devices = self.ranks[ranks[0]], {self.ranks[rank]["device"] for rank in ranks}
            kind = first["device"].partition(":")[0]
            ranges = [ranks, [self.ranks[rank]["local_rank"] for rank in ranks], *coords[:, ranks]]
            words = [f"{min(of)}" if len({*of}) == 1 else f"{min(of)}-{max(of)}" for of in ranges]
            process = str(first["process"]) if len(ranks) == 1 else ""
            places = [first[name] for name in ("host", "address", "interface")]
            device = first["device"] if len(devices) == 1 else f"{len(devices)} x {kind}"
            rows.append([*words[:2], process, *places, device, *words[2:]])
        heads = ("rank", "local", "process", "host", "address", "interface", "device", *self.axes)
        links = self.links
        note = "; ".join(
            f"{', '.join(axis for axis in links if links[axis] == link)}: {link}"
            for link in dict.fromkeys(links.values())
        )
        return Table("Who is where", heads, rows, ("rank", "local", "process", *self.axes), note)


def gathered(comm: Comm) -> Placement | None:
    """Return the places of all ranks on rank 0, None elsewhere; every rank calls this together."""
    from phalanx.comm.together import gather_on_first  # imports torch

    name = os.environ.get(interface.VARIABLE, "").partition(",")[0]
    is_gloo = comm.device.type == "cpu"
    ranks = gather_on_first(
        {
            "local_rank": read_rank_env().local_rank,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "address": interface.address_of(name),
            "interface": name if is_gloo else os.environ.get("NCCL_SOCKET_IFNAME", ""),
            "device": str(comm.device),
        }
    )
    return Placement(comm.axes, ranks) if ranks else None
