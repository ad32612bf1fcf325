"""Time of a collective on the links that its group crosses.

Ranks are numbered in the axis order of `Strategy`, outer to inner: neighbors on the innermost axis
are neighbors on a host. Neighbors on any axis differ by `stride` in rank.

    t = calls x (hops x latency of a hop + call)  +  bytes sent / bandwidth

A ring enters and leaves a unit (a server, a pod) once, and the outgoing traffic uses the links of
all its ranks inside that unit: 8 neighbors have 8 links. In a full mesh, a collective uses only the
links to the other members, and a point-to-point message uses one link. The bandwidth is the lowest
over the levels that the group crosses. All-gather and reduce-scatter go around a ring, where each
hop has the largest latency; all-reduce goes up and down a tree (NCCL; Thakur et al., Optimization
of collective communication operations in MPICH, 2005). In an all-to-all a rank sends to each other
rank directly, at once: data for ranks of another unit are sent over the rank's own way out of its
unit, beside data for ranks of its unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.planner.machine import Cluster, ring
from phalanx.planner.software import Software


@dataclass(frozen=True)
class GroupLayout:
    """A process group: its number of ranks, and the stride between neighbor ranks."""

    size: int
    stride: int


def group_of(axes: Mapping[str, int], names: tuple[str, ...]) -> GroupLayout:
    """Return the group over the axes `names` of a device mesh with `axes`, outer to inner.

    The stride is the product of the degrees of all axes inside the innermost of `names` that has a
    degree above 1. Axes between `names` change neither size nor stride.
    """
    size, stride, inner = 1, 0, 1
    for name, degree in reversed([*axes.items()]):
        if name in names and degree > 1:
            stride = stride or inner
            size *= degree
        inner *= degree
    return GroupLayout(size, stride or 1)


@dataclass(frozen=True)
class GroupLink:
    """Bandwidth and latency of a group over the cluster levels that it crosses.

    Attributes:
        bandwidth: bytes/s of one rank, the lowest over the levels.
        latency_s: latency of one hop, the highest over the levels.
        level: name of the smallest unit that contains the group.
        late_s: added delay of a message to another pipeline stage.
    """

    bandwidth: float
    latency_s: float
    level: str
    late_s: float


def reach(group: GroupLayout, cluster: Cluster, software: Software) -> GroupLink:
    """Return the bandwidth and latency of a collective over a group."""
    # Level by level outward, until the whole group is inside. A ring passes all bytes over each
    # level, so the slowest level bounds the collective:
    #
    #     16 ranks, stride 2, servers of 8 devices
    #     server     8 / 2 = 4 members of the group    the link of a device
    #     cluster    16 members, 4 in each server      one of the 4 sends over the way out of the
    #                                                  server, which has the links of all 4
    bandwidth, latency_s, late_s, inside, level = math.inf, 0.0, 0.0, 1, cluster.levels[0]
    apart = group.size * group.stride // level.devices
    for number, level in enumerate(cluster.levels):
        is_last = number == len(cluster.levels) - 1
        members = group.size if is_last else min(group.size, max(1, level.devices // group.stride))
        if members > inside:
            part = software.outer_bandwidth if number else software.inner_bandwidth
            strain = level.link.congestion_at(apart)
            link_bandwidth = level.link.among(members) * part * strain.bandwidth
            bandwidth = min(bandwidth, link_bandwidth * inside)
            latency_s, late_s = max(latency_s, level.link.latency_s), max(late_s, strain.late_s)
            inside = members
        if inside == group.size:
            break
    return GroupLink(bandwidth, latency_s, level.name, late_s)


def hops(op: str, size: int) -> float:
    """Return the number of sequential hops of one call."""
    if op in ("send", "all_to_all"):
        return 1
    return 2 * math.log2(size) if op == "all_reduce" else size - 1


def seconds(
    op: str,
    group: GroupLayout,
    sent_bytes: float,
    calls: int,
    cluster: Cluster,
    software: Software,
    copies: int = 1,
) -> float:
    """Return the time of `calls` collectives in which a rank sends `sent_bytes` in total.

    Args:
        op: name of the collective.
        group: its ranks.
        sent_bytes: bytes that a rank sends to others in all calls.
        calls: number of calls.
        cluster: the devices and their links.
        software: constants of the training program.
        copies: in an all-to-all, number of ranks to which a row goes; of a program that sends a row
            once to each other unit, fewer bytes leave a unit.
    """
    if group.size == 1 or not calls:
        return 0.0
    inside = cluster.levels[0]
    if op in inside.link.measured and group.size * group.stride <= inside.devices:
        # Ranks that share a core take turns: a hop takes longer for each other rank on the core.
        link, others = inside.link, max(0.0, 1 / cluster.device.cores - 1)
        cost = link.measured[op]
        hop_s = cost.latency_s + link.turn_s * others
        alone_s = calls * ring(op, group.size, 0)[0] * hop_s + sent_bytes / cost.bandwidth
        return alone_s * (1.0 if cluster.device.core is None else link.in_step)
    found = reach(group, cluster, software)
    if op == "all_to_all":
        call_s = found.latency_s + software.call_s
        return calls * call_s + sent_bytes * _per_byte_s(group, cluster, software, copies)
    bandwidth = found.bandwidth
    if op == "send":
        bandwidth = min(bandwidth, reach(GroupLayout(2, group.stride), cluster, software).bandwidth)
    call_s = hops(op, group.size) * found.latency_s + software.call_s
    return calls * call_s + sent_bytes / bandwidth


def _per_byte_s(group: GroupLayout, cluster: Cluster, software: Software, copies: int) -> float:
    """Return the seconds for each byte that a rank sends in an all-to-all."""
    # 16 ranks, stride 1, servers of 8 devices: of the 15 peers 7 are in the rank's server, 8 are
    # behind its way out. Both parts are sent at once, so the slower one counts.
    longest, inside = 0.0, 1
    apart = group.size * group.stride // cluster.levels[0].devices
    for number, level in enumerate(cluster.levels):
        is_last = number == len(cluster.levels) - 1
        members = group.size if is_last else min(group.size, max(1, level.devices // group.stride))
        if members > inside:
            part = software.outer_bandwidth if number else software.inner_bandwidth
            bandwidth = level.link.among(members) * level.link.congestion_at(apart).bandwidth
            peers = (members - inside) / (group.size - 1)
            if number and software.sends_rows_once:
                # Of U units, k copies at random reach 1 - (1 - 1/U)^k of each: in place of k rows
                # to all, U x that.
                units = members / inside
                peers *= units * (1 - (1 - 1 / units) ** copies) / copies
            longest, inside = max(longest, peers / (bandwidth * part)), members
        if inside == group.size:
            break
    return longest


def num_units(cluster: Cluster) -> int:
    """Return the number of innermost units (servers) that a cluster's devices occupy."""
    return -(-cluster.num_devices // cluster.levels[0].devices)
