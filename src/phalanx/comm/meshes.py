"""Arrange the ranks of a job in a device mesh of named axes, and create a process group per axis.

The mesh has one axis for each degree above 1, in the order of `Strategy.axes`, outer to inner, so
that the innermost axis uses the fastest link; tp has one axis for each of its sub-axes
(`Strategy.grid`). A strategy of one rank has the axis `dp` of size 1.

[Note: One-way groups] NCCL runs the calls of a group one after another, and a send completes only
when its receive runs. If two neighboring pipeline ranks shared one group and both sent first (one
an activation, the other a gradient), they would deadlock. So each pair of neighbors has one group
per direction: one rank only sends there, the other only receives, in the same order, and no
schedule deadlocks. The first and the last rank are neighbors too, because interleaved chunks and
tied weights send between them. gloo does not need one-way groups, but gets the same groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.comm import same_host
from phalanx.comm.axes import DENSE, flattened, single_axis
from phalanx.comm.exchange import ProcessGroupEngine
from phalanx.comm.join import check_files, connect, job_timeout, lazily_connected, set_timeout
from phalanx.comm.slow_link import SlowEngine, SlowLink
from phalanx.comm.transfer import CommEngine

OneWayGroups = dict[tuple[int, int], dist.ProcessGroup]
"""(Coordinate on pp of the sender, coordinate on pp of the receiver) -> their group."""


class JobMesh:
    """The device meshes and process groups of a job's axes, each created once.

    All ranks of the job construct it together, and first access each lazily created mesh or group
    together, because creating a group is itself a collective.

    Attributes:
        whole: device mesh of all axes.
        groups: this rank's process group of each axis and of each flattened axis (comm.axes).
        engines: engine that runs the collectives of each of `groups`.
        num_checks: number of active checks that compare the calls of ranks, see debug.check.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        device: str,
        shares_memory: bool,
        bytes_per_s: float | None = None,
    ) -> None:
        """Create the meshes and groups, and connect the ranks of each group.

        With `shares_memory`, gloo groups whose ranks are all on one host use shared memory. With
        `bytes_per_s`, this rank sends at most so fast.

        Raises:
            ConfigError: a rank may not open as many files as the mesh needs.
        """
        check_files(axes, dist.get_world_size(), device)
        self.num_checks = 0
        self._shares_memory = shares_memory and bytes_per_s is None
        self._link = None if bytes_per_s is None else SlowLink(bytes_per_s)
        self._apart: dict[str, CommEngine] = {}
        with lazily_connected():
            self.whole = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
            # Private, but the way to flatten axes into one; tests/comm/test_comm.py pins it.
            self._flat = {
                name: self.whole[members]._flatten(name)  # pyright: ignore[reportPrivateUsage]
                for name, members in flattened(axes).items()
            }
            self.groups = {axis: self.whole.get_group(axis) for axis in axes}
            self.groups |= {name: mesh.get_group() for name, mesh in self._flat.items()}
        # DeviceMesh creates its groups with torch's default timeout.
        set_timeout(job_timeout().total_seconds())
        for axis, group in self.groups.items():
            connect(group, fully=axis != "dp")
        self.engines = {axis: self._engine(axis, group) for axis, group in self.groups.items()}

    def _engine(self, axis: str, group: dist.ProcessGroup) -> CommEngine:
        shared = None
        if self._shares_memory and dist.get_backend(group) == "gloo":
            shared = same_host.connect(group, lambda: job_timeout().total_seconds())
        return self.over(group, axis, shared)

    def over(
        self, group: dist.ProcessGroup, axis: str, shared: CommEngine | None = None
    ) -> CommEngine:
        """Return an engine of a group, `shared` or torch's, that sends over this rank's link."""
        engine = shared or ProcessGroupEngine(group)
        engine.axis = axis
        return engine if self._link is None else SlowEngine(engine, self._link)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, outer to inner."""
        return self.whole.mesh_dim_names or ()

    @functools.cached_property
    def stage_mesh(self) -> DeviceMesh:
        """The mesh of this rank's pipeline stage: all axes except pp, or `whole` if pp is alone."""
        names = tuple(name for name in self.axes if name != "pp")
        return self.whole if names in ((), self.axes) else self.whole[names]

    @functools.cached_property
    def sharding(self) -> DeviceMesh:
        """The mesh of dp, if the job has dp, and of the axis over which fsdp shards parameters.

        Experts are split over `stage_mesh`, because ep splits them before fsdp does.
        """
        shards = self._flat.get(single_axis(DENSE.shards, self.axes))
        if "dp" not in self.axes:
            return self.whole["fsdp"] if shards is None else shards
        if shards is None:
            return self.whole["dp", "fsdp"]
        return DeviceMesh._concatenate([self.whole["dp"], shards])  # pyright: ignore[reportPrivateUsage]

    @functools.cached_property
    def one_way(self) -> OneWayGroups:
        """The one-way groups in which this rank sends to or receives from its pp neighbors."""
        size = dict(zip(self.axes, self.whole.shape, strict=True)).get("pp", 1)
        return one_way_groups(self.whole) if size > 1 else {}

    def separate_engines(self, axes: Iterable[str]) -> dict[str, CommEngine]:
        """Return the engine of a second group of each of `axes`, created on first use.

        Its calls are not ordered with calls of the axis's first group. An axis has only one second
        group, so all its calls must come in one order on all ranks.
        """
        axes, mesh = list(axes), self.whole
        for axis in axes:
            if axis not in self._apart:
                number = self.axes.index(axis)
                ranks = mesh.mesh.movedim(number, -1).reshape(-1, mesh.size(number)).tolist()
                with lazily_connected():
                    group = _split_job(ranks, mesh.device_type)
                assert group is not None, "every rank is on every axis of its mesh"
                connect(group, fully=False)
                self._apart[axis] = self._engine(axis, group)
        return {axis: self._apart[axis] for axis in axes}


_made: dict[tuple[Any, ...], JobMesh] = {}
"""(Default process group, arguments of `job_mesh`) -> mesh; each job has its own default group."""


def job_mesh(
    axes: Mapping[str, int],
    device: str = "cpu",
    shares_memory: bool = True,
    bytes_per_s: float | None = None,
) -> JobMesh:
    """Return the job's mesh of `axes`, created by the first call; every rank calls this.

    Later calls return the same object, because FSDP2 requires it, and PyTorch caches layouts under
    meshes that compare equal. Meshes of two jobs of one process compare equal too, so the cache key
    contains the job's default group, and a job never gets the mesh of another job.

    Raises:
        ConfigError: a rank may not open as many files as the mesh needs.
    """
    asked = (dist.group.WORLD, tuple(axes.items()), device, shares_memory, bytes_per_s)
    if asked not in _made:
        _made[asked] = JobMesh(axes, device, shares_memory, bytes_per_s)
    return _made[asked]


def one_way_groups(mesh: DeviceMesh) -> OneWayGroups:
    """Create one group per direction between neighbors on pp; return this rank's groups.

    Every rank of a job that has pp calls this; see [Note: One-way groups].
    """
    axis = (mesh.mesh_dim_names or ()).index("pp")
    ranks = mesh.mesh.movedim(axis, 0).reshape(mesh.size(axis), -1).tolist()
    coord = mesh.get_local_rank("pp")
    groups: OneWayGroups = {}
    for pairs in neighbor_rounds(mesh.size(axis)):
        split = [list(both) for a, b in pairs for both in zip(ranks[a], ranks[b], strict=True)]
        forward, backward = (_split_job(split, mesh.device_type) for _ in range(2))
        for a, b in pairs:
            if coord in (a, b):
                assert forward is not None and backward is not None, "this rank is in a pair"
                groups |= {(a, b): forward, (b, a): backward}
    return groups


def neighbor_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of neighbors on a ring, in rounds in which each rank occurs at most once."""
    #   size 4    (0 1) (2 3)  |  (1 2) (3 0)
    #   size 5    (0 1) (2 3)  |  (1 2) (3 4)  |  (4 0)
    #
    # The groups of a round are created by one collective, which needs disjoint ranks.
    pairs = [(at, (at + 1) % size) for at in range(size if size > 2 else size - 1)]
    odd = [[pairs.pop()]] if size > 2 and size % 2 else []
    return [each for each in (pairs[::2], pairs[1::2]) if each] + odd


def _split_job(parts: list[list[int]], device: str) -> dist.ProcessGroup | None:
    """Create a group for each of the disjoint rank lists `parts`; return this rank's group.

    The group has the job's timeout. With gloo, a rank that is in no part gets None.
    """
    # Private, and the only way; tests/comm/test_one_way_groups.py pins it.
    job: Any = dist.distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
    timeout = job_timeout()
    if job.bound_device_id is None:
        groups = [dist.new_group(part, timeout) for part in parts]
        return next((group for group in groups if isinstance(group, dist.ProcessGroup)), None)
    # One split for all parts, as DeviceMesh does. A rank in no part gets a group of one rank: torch
    # names a group by the number of groups its rank has, and all ranks of a group need one name.
    split = {rank for part in parts for rank in part}
    alone = [[rank] for rank in range(dist.get_world_size()) if rank not in split]
    return dist.split_group(split_ranks=[*parts, *alone], timeout=timeout)
