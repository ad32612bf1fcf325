"""Collectives on the links that they cross, beside closed forms and beside a measured cluster."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from phalanx.planner.hardware import CLUSTERS, cluster
from phalanx.planner.network import GroupLayout, group_of, reach, seconds
from phalanx.planner.software import SOFTWARE
from phalanx.strategy import Strategy

PLAIN = dataclasses.replace(
    SOFTWARE["phalanx"], inner_bandwidth=1.0, outer_bandwidth=1.0, call_s=0.0
)
"""A program that takes nothing of links."""

LLAMA = CLUSTERS["h100-llama3"]


def test_ranks_of_an_axis_lie_apart() -> None:
    axes = Strategy.parse("pp2,dp3,fsdp4,tp8").mesh_axes()
    assert group_of(axes, ("tp",)) == GroupLayout(8, 1)
    assert group_of(axes, ("fsdp",)) == GroupLayout(4, 8)
    assert group_of(axes, ("dp", "fsdp")) == GroupLayout(12, 8)
    assert group_of(axes, ("pp",)) == GroupLayout(2, 96)


def test_a_call_takes_its_hops_and_its_bytes() -> None:
    """Alpha-beta: of a ring n - 1 hops, of a tree twice the logarithm."""
    link = LLAMA.levels[0].link
    for op, hops in (("all_gather", 7), ("reduce_scatter", 7), ("all_reduce", 6), ("send", 1)):
        found = seconds(op, GroupLayout(8, 1), 450e6, 3, LLAMA, PLAIN)
        assert found == pytest.approx(3 * hops * link.latency_s + 450e6 / 450e9)
    assert seconds("all_gather", GroupLayout(1, 1), 1e9, 3, LLAMA, PLAIN) == 0


@pytest.mark.parametrize(
    ("size", "stride", "gigabytes_per_s", "level"),
    [
        (8, 1, 450, "server"),
        (2, 8, 50, "rack"),
        (16, 1, 8 * 50, "rack"),  # eight ranks of a server have eight links
        (384, 8, 50, "pod"),
        (3072, 1, 8 * 50, "pod"),
        (24576, 1, 450, "cluster"),  # 3072 ranks of a pod have 3072 links of a seventh each
        (8, 3072, 50 / 7, "cluster"),
    ],
)
def test_the_links_of_llama_3(size: int, stride: int, gigabytes_per_s: float, level: str) -> None:
    found = reach(GroupLayout(size, stride), LLAMA, PLAIN)
    assert found.level == level
    assert found.bandwidth <= gigabytes_per_s * 1e9 * (1 + 1e-9)
    if level != "cluster" or stride > 1:
        assert found.bandwidth == pytest.approx(gigabytes_per_s * 1e9)


@given(some.integers(1, 9), some.integers(0, 6), some.sampled_from(sorted(CLUSTERS)))
def test_a_larger_group_is_never_faster(doublings: int, apart: int, name: str) -> None:
    job, stride = CLUSTERS[name], 2**apart
    size = 2**doublings
    if 2 * size * stride > job.num_devices:
        return
    one, two = (reach(GroupLayout(n, stride), job, PLAIN) for n in (size, 2 * size))
    assert two.latency_s >= one.latency_s
    for op in ("all_gather", "all_reduce", "send"):
        small, large = (
            seconds(op, GroupLayout(n, stride), 0.0, 1, job, PLAIN) for n in (size, 2 * size)
        )
        assert large >= small
    assert two.bandwidth > 0 and math.isfinite(two.bandwidth)


def test_all_gathers_fall_over_nodes_as_measured() -> None:
    """The Ultra-Scale Playbook: GB/s on 2 to 64 nodes, of 256 MB; a ring of hops explains it."""
    measured = {2: 184.6, 4: 119.0, 8: 69.0, 16: 55.0, 32: 28.0, 64: 11.0}
    for nodes, gigabytes_per_s in measured.items():
        size = 8 * nodes
        job = cluster(f"h100-p5:{size}")
        software = dataclasses.replace(PLAIN, outer_bandwidth=0.9)
        sent = 256e6 * (size - 1) / size
        found = sent / seconds("all_gather", GroupLayout(size, 1), sent, 1, job, software) / 1e9
        assert 0.5 < found / gigabytes_per_s < 1.3, nodes  # they fall by 17 times


def test_messages_come_late_where_a_fabric_is_strained() -> None:
    near, far = (
        reach(GroupLayout(2, size // 2), cluster(f"h100-p5:{size}"), PLAIN) for size in (256, 512)
    )
    assert near.late_s == 0 < far.late_s and near.bandwidth > far.bandwidth
    assert reach(GroupLayout(2, 256), cluster("h100:512"), PLAIN).late_s == 0


def test_an_exchange_leaves_a_server_by_its_own_link() -> None:
    job = CLUSTERS["h100"]
    inside = seconds("all_to_all", GroupLayout(8, 1), 8e6, 1, job, PLAIN)
    assert inside == pytest.approx(8e6 / 450e9 + job.levels[0].link.latency_s)
    latency_s = job.levels[1].link.latency_s
    for copies, once in ((1, False), (8, False), (1, True)):
        program = dataclasses.replace(PLAIN, sends_rows_once=once)
        across = seconds("all_to_all", GroupLayout(16, 1), 15e6, 1, job, program, copies)
        assert across == pytest.approx(8e6 / 50e9 + latency_s)  # 8 of 15 peers are elsewhere
    # Of 8 copies to experts of 2 servers, one or more goes to the other server but 1 time of 256.
    once = dataclasses.replace(PLAIN, sends_rows_once=True)
    across = seconds("all_to_all", GroupLayout(16, 1), 15e6, 1, job, once, 8)
    assert across == pytest.approx(8e6 / 50e9 * 2 * (255 / 256) / 8 + latency_s)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_each_peer_of_a_full_mesh_has_a_link_of_its_own(size: int) -> None:
    """An MI300X has 7 links of 64 GB/s: ranks use the links to their group, a message one."""
    job, sent = CLUSTERS["mi300x"], 64e9
    inside = reach(GroupLayout(size, 1), job, PLAIN)
    assert inside.bandwidth == pytest.approx((size - 1) * 64e9)
    gathered = seconds("all_gather", GroupLayout(size, 1), sent, 1, job, PLAIN)
    assert gathered == pytest.approx(1 / (size - 1), rel=1e-3)
    assert seconds("send", GroupLayout(size, 1), sent, 1, job, PLAIN) == pytest.approx(1, rel=1e-3)
    exchanged = seconds("all_to_all", GroupLayout(size, 1), sent, 1, job, PLAIN)
    assert exchanged == pytest.approx(1 / (size - 1), rel=1e-3)


def test_a_mesh_between_servers_has_the_links_of_the_network() -> None:
    job, sent = CLUSTERS["mi300x"], 50e9
    assert reach(GroupLayout(16, 1), job, PLAIN).bandwidth == pytest.approx(8 * 50e9)
    assert reach(GroupLayout(4, 4), job, PLAIN).bandwidth == pytest.approx(
        64e9
    )  # two of each server
    assert seconds("all_to_all", GroupLayout(2, 8), sent, 1, job, PLAIN) == pytest.approx(
        1, rel=1e-3
    )
