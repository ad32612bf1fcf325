"""Hierarchical collectives: inside each host, then across hosts, then inside each host again.

Only one rank per host, the leader, communicates with other hosts: so in an all-reduce 2 (H-1)/H of
the tensor crosses the slow link of each of H hosts, however many ranks a host has. Inside a host a
tree is used. Across hosts, broadcast, reduce, scatter and gather use a tree, and the others a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.comm.algorithms import by_ring, by_tree
from phalanx.comm.algorithms.steps import Steps, cut, dual, remap, side_by_side

Rooted = Callable[[int, int], Steps]


def all_reduce(num_ranks: int, host_size: int) -> Steps:
    """Reduce to each leader, all-reduce among leaders, broadcast inside each host."""
    # Hosts {0 1} and {2 3}, the leaders are 0 and 2:
    #
    #   inside    0 <- 1        2 <- 3          a sum for each host
    #   across        0 <----> 2                the total on both leaders
    #   inside    0 -> 1        2 -> 3
    hosts = _hosts(num_ranks, host_size)
    across = remap(by_ring.all_reduce(len(hosts)), _leaders(hosts), cut(num_ranks, len(hosts)))
    return _inside(by_tree.reduce, hosts) + across + _inside(by_tree.broadcast, hosts)


def all_gather(num_ranks: int, host_size: int) -> Steps:
    """Gather on each leader, all-gather among leaders, broadcast inside each host."""
    hosts = _hosts(num_ranks, host_size)
    # The ring's chunk of a host is all chunks of its ranks, `hosts[h]`: the leader has them after
    # the first part, and its ranks are numbered in a row.
    across = remap(by_ring.all_gather(len(hosts)), _leaders(hosts), hosts)
    inside = _inside(by_tree.gather, hosts, own_chunks=True)
    return inside + across + _inside(by_tree.broadcast, hosts)


def reduce_scatter(num_ranks: int, host_size: int) -> Steps:
    """Reduce to each leader, reduce-scatter among leaders, scatter inside each host."""
    hosts = _hosts(num_ranks, host_size)
    across = remap(by_ring.reduce_scatter(len(hosts)), _leaders(hosts), hosts)
    inside = _inside(by_tree.scatter, hosts, own_chunks=True)
    return _inside(by_tree.reduce, hosts) + across + inside


def broadcast(num_ranks: int, root: int, host_size: int) -> Steps:
    """Broadcast among leaders, with the root as leader of its host, then inside each host."""
    hosts = _hosts(num_ranks, host_size)
    pieces = cut(num_ranks, len(hosts))
    across = by_tree.broadcast(len(hosts), root // host_size)
    return remap(across, _leaders(hosts, root), pieces) + _inside(by_tree.broadcast, hosts, root)


def reduce(num_ranks: int, root: int, host_size: int) -> Steps:
    """Reduce inside each host, then among leaders."""
    return dual(broadcast(num_ranks, root, host_size), "reduce", reduces=True)


def scatter(num_ranks: int, root: int, host_size: int) -> Steps:
    """Scatter the chunks of each host to its leader, then inside each host."""
    hosts = _hosts(num_ranks, host_size)
    across = remap(by_tree.scatter(len(hosts), root // host_size), _leaders(hosts, root), hosts)
    return across + _inside(by_tree.scatter, hosts, root, own_chunks=True)


def gather(num_ranks: int, root: int, host_size: int) -> Steps:
    """Gather inside each host, then among leaders."""
    return dual(scatter(num_ranks, root, host_size), "gather", reduces=False)


def _hosts(num_ranks: int, host_size: int) -> list[range]:
    begins = range(0, num_ranks, host_size)
    return [range(begin, min(begin + host_size, num_ranks)) for begin in begins]


def _leaders(hosts: Sequence[range], root: int = 0) -> list[int]:
    return [root if root in host else host.start for host in hosts]


def _inside(
    collective: Rooted, hosts: Sequence[range], root: int = 0, *, own_chunks: bool = False
) -> Steps:
    """Run a collective rooted at the leader on each host, on all chunks or only its ranks' own."""
    num_ranks = hosts[-1].stop
    return side_by_side(
        remap(
            collective(len(host), leader - host.start),
            host,
            [range(r, r + 1) for r in host] if own_chunks else cut(num_ranks, len(host)),
        )
        for host, leader in zip(hosts, _leaders(hosts, root), strict=True)
    )
