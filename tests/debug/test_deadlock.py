"""Ranks that wait for each other are found; those that only wait are not."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from phalanx.debug.deadlock import Edge, WaitGraph


def graphs(num_ranks: int) -> tuple[dist.Store, list[WaitGraph]]:
    store = dist.HashStore()
    return store, [WaitGraph(store, rank) for rank in range(num_ranks)]


def to_come(rank: int, key: str = "") -> Edge:
    return Edge(rank, key or f"comes/{rank}", False)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_cycle_is_found_by_the_rank_that_closes_it(num_ranks: int) -> None:
    _, waits = graphs(num_ranks)
    for rank, graph in enumerate(waits):
        graph.begin()
        found = graph.cycle([to_come((rank + 1) % num_ranks)], f"rank {rank} waits")
        if rank < num_ranks - 1:
            assert not found
        else:
            assert list(found) == [rank, *range(rank)]
            assert list(found.values()) == [f"rank {each} waits" for each in found]


def test_a_rank_that_has_come_is_waited_for_no_more() -> None:
    store, (first, second) = graphs(2)
    first.cycle([to_come(1)], "first")
    store.set("comes/1", "")
    assert not second.cycle([to_come(0)], "second")
    assert not first.cycle([to_come(1)], "first")  # it is to find out by itself


def test_a_message_is_open_while_its_key_is_there() -> None:
    store, (first, second) = graphs(2)
    store.set("message", "")
    first.cycle([Edge(1, "message", True)], "first")
    assert list(second.cycle([to_come(0)], "second")) == [1, 0]
    store.delete_key("message")
    assert not second.cycle([to_come(0)], "second")


def test_a_wait_that_has_ended_is_nobodys_edge_and_can_be_read() -> None:
    _, (first, second) = graphs(2)
    first.cycle([to_come(1)], "first")
    first.end()
    assert not second.cycle([to_come(0)], "second")


def test_of_several_that_wait_only_those_in_the_cycle_are_told() -> None:
    _, (first, second, third) = graphs(3)
    second.cycle([to_come(0), to_come(2)], "second")
    third.cycle([to_come(1)], "third")
    assert list(first.cycle([to_come(1), to_come(2)], "first")) == [0, 1]
