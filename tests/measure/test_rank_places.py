"""Who is where, of ranks on one host and on several."""

from __future__ import annotations

import os

from phalanx.comm.comm import Ranks
from phalanx.launch.interface import address_of
from phalanx.launch.local import run_ranks
from phalanx.measure.rank_places import MOST_RANKS, Placement, gathered
from phalanx.report.terminal import text_of
from phalanx.strategy import Strategy


def placed(axes: dict[str, int], num_here: int) -> Placement:
    """Return a job on hosts of `num_here` ranks."""
    num_ranks = 1
    for size in axes.values():
        num_ranks *= size
    return Placement(
        axes,
        [
            {
                "local_rank": rank % num_here,
                "process": 4_194_000 + rank,
                "host": f"gpu-node-{rank // num_here:03}",
                "address": f"192.168.100.{100 + rank // num_here}",
                "interface": f"enp{rank // num_here % 2}s0f1",
                "device": f"cuda:{rank % num_here}",
            }
            for rank in range(num_ranks)
        ],
    )


def where() -> Placement | None:
    return gathered(Ranks(Strategy.parse("dp2,tp2"), "cpu"))


def test_ranks_of_one_host_are_inside_it() -> None:
    first, *others = run_ranks(where, 4, threads=1)
    assert others == [None] * 3
    assert first.axes == {"dp": 2, "tp": 2}
    assert [rank["local_rank"] for rank in first.ranks] == [0, 1, 2, 3]
    assert {rank["host"] for rank in first.ranks} == {os.uname().nodename}
    assert len({rank["process"] for rank in first.ranks}) == 4
    assert {rank["address"] for rank in first.ranks} == {"127.0.0.1"}
    assert first.links == {"dp": "inside a host", "tp": "inside a host"}


def test_an_axis_that_leaves_a_host_is_named_with_its_interfaces() -> None:
    placement = placed({"pp": 2, "dp": 2, "tp": 2}, 4)
    assert placement.links == {
        "pp": "between hosts, by enp0s0f1, enp1s0f1",
        "dp": "inside a host",
        "tp": "inside a host",
    }
    assert placed({"dp": 3, "tp": 2}, 3).links["tp"] == "between hosts, by enp0s0f1, enp1s0f1"
    lines = text_of(placement.table()).splitlines()
    assert lines[1].split() == [
        *("rank", "local", "process", "host", "address", "interface", "device"),
        *("pp", "dp", "tp"),
    ]
    assert lines[7].split() == [
        *("5", "1", "4194005", "gpu-node-001", "192.168.100.101", "enp1s0f1"),
        *("cuda:1", "1", "0", "1"),
    ]
    assert max(map(len, lines)) <= 100
    assert address_of("no-such") == ""


def test_many_ranks_have_a_row_a_host() -> None:
    placement = placed({"pp": 4, "dp": 4, "fsdp": 2, "tp": 4}, 8)
    assert len(placement.ranks) > MOST_RANKS
    lines = text_of(placement.table()).splitlines()
    row = next(line for line in lines if "node-005" in line)
    assert row.split()[:2] == ["40-47", "0-7"] and row.split()[-4:] == ["1", "1", "0-1", "0-3"]
    assert max(map(len, lines)) <= 100
