"""How long a collective takes on the links that its ranks really cross.

Ranks are numbered as `Strategy` orders axes, outer to inner: neighbours on the innermost axis are
neighbours on a host. So the ranks of an axis lie `stride` devices apart.

    t = calls x hops x latency  +  bytes sent / bandwidth

A ring enters and leaves a unit (a server, a pod) once, and its traffic there is carried by the
links of all its ranks inside that unit: of 8 neighbours, 8 links carry it. The bandwidth is the
lowest over the levels that a group crosses; the latency of each level counts once for each time
the group doubles there (Thakur et al., Optimization of collective communication operations in
MPICH, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.planner.machine import Cluster
from phalanx.planner.software import Software


@dataclass(frozen=True)
class Members:
    """Ranks that communicate: how many, and how far apart they lie."""

    size: int
    stride: int


def group_of(axes: Mapping[str, int], names: tuple[str, ...]) -> Members:
    """Return the group of the axes `names` of a mesh of `axes`, outer to inner.

    Axes between them belong to other groups, and only lie between their ranks.
    """
    size, stride, inner = 1, 0, 1
    for name, degree in reversed([*axes.items()]):
        if name in names and degree > 1:
            stride = stride or inner
            size *= degree
        inner *= degree
    return Members(size, stride or 1)


@dataclass(frozen=True)
class Reach:
    """What a group crosses of a cluster.

    Attributes:
        bandwidth: bytes/s of one rank, the lowest over the levels.
        latency_s: of one call.
        level: name of the outermost unit that it needs.
    """

    bandwidth: float
    latency_s: float
    level: str


def reach(group: Members, cluster: Cluster, software: Software) -> Reach:
    """Return the bandwidth and latency of a collective over a group."""
    bandwidth, latency_s, inside, level = math.inf, 0.0, 1, cluster.levels[0]
    for number, level in enumerate(cluster.levels):
        is_last = number == len(cluster.levels) - 1
        members = group.size if is_last else min(group.size, max(1, level.devices // group.stride))
        if members > inside:
            is_inner = number == 0
            part = software.inner_bandwidth if is_inner else software.outer_bandwidth
            lost = 1.0 if is_inner else _contention(cluster, software)
            bandwidth = min(bandwidth, level.link.bandwidth * part * lost * inside)
            hop_s = software.inner_call_s if is_inner else software.outer_call_s
            latency_s += (level.link.latency_s + hop_s) * math.log2(members / inside)
            inside = members
        if inside == group.size:
            break
    return Reach(bandwidth, latency_s, level.name)


def exchange_s(group: Members, sent_bytes: float, cluster: Cluster, software: Software) -> float:
    """Return the time of one all-to-all in which a rank sends `sent_bytes` to the others.

    What goes to ranks of other units leaves by the rank's own link.
    """
    first = cluster.levels[0]
    inside = min(group.size, max(1, first.devices // group.stride))
    inner_s = sent_bytes * inside / group.size / (first.link.bandwidth * software.inner_bandwidth)
    if inside == group.size:
        return inner_s + first.link.latency_s + software.inner_call_s
    link = cluster.levels[1].link
    bandwidth = link.bandwidth * software.outer_bandwidth * _contention(cluster, software)
    outer_s = sent_bytes * (1 - inside / group.size) / bandwidth
    return max(inner_s, outer_s) + link.latency_s + software.outer_call_s


def _num_units(cluster: Cluster) -> float:
    return max(1.0, cluster.num_devices / cluster.levels[0].devices)


def _contention(cluster: Cluster, software: Software) -> float:
    """Return the part of the bandwidth between units that is left in a job of many of them."""
    return min(1.0, (2 / _num_units(cluster)) ** software.contention)


def seconds(
    group: Members, sent_bytes: float, calls: float, cluster: Cluster, software: Software
) -> float:
    """Return the time of `calls` collectives in which a rank sends `sent_bytes` altogether."""
    if group.size == 1 or not calls:
        return 0.0
    found = reach(group, cluster, software)
    return calls * found.latency_s + sent_bytes / found.bandwidth
