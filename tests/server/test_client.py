"""A client that reads weights in the memory of servers on its host, without a request."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from marks import by_hand
from phalanx.server import shared
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.coordinator import Coordinator
from phalanx.server.message import WireMessage
from phalanx.server.processes import LocalRoles, local_roles
from phalanx.server.shard_server import Server
from phalanx.server.shared import IS_POSSIBLE, SharedView
from workers_in_threads import fast_clocks, find_lost, lose

__all__ = ["fast_clocks"]  # a fixture

pytestmark = [
    pytest.mark.skipif(not IS_POSSIBLE, reason="memory of others is read on Linux and x86"),
    pytest.mark.usefixtures("fast_clocks"),
]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take servers for alive however long a loaded machine keeps them waiting."""
    monkeypatch.setattr(shared, "FRESH_S", 1e6)


class Counted(Client):
    """A client that keeps the kinds of its requests to servers, by shard."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.asked = list[tuple[str, int]]()
        ask = self.requests.ask

        def counted(asked: Mapping[int, WireMessage], *args: Any) -> dict[int, WireMessage]:
            self.asked += [(message.kind, shard) for shard, message in asked.items() if shard >= 0]
            return ask(asked, *args)

        self.requests.ask = counted

    def pulled(self, *args: Any) -> tuple[int, float, list[int]]:
        """Pull; return the version, the sum of the weights, and the shards that were asked."""
        self.asked, weights = [], [torch.zeros(600, dtype=torch.float64)]
        version = self.pull(weights, *args)
        return version, float(weights[0].sum()), [shard for _, shard in self.asked]

    def add(self, clock: int, value: float) -> None:
        """Push -`value` for each weight, so that a rate of 1 adds it."""
        numbers: dict[str, Any] = {"base": 0, "tokens": 1.0, "loss": 0.0, "rate": 1.0}
        grads = [torch.full((600,), -value, dtype=torch.float64)]
        self.push(clock, self.worker, grads, **numbers)


def client_of(made: LocalRoles, kind: str) -> Counted:
    """Return the only worker of a job with 600 weights of 0, which each server has some of."""
    client = Counted(made.meeting, 0, Consistency(kind, 1), (0, 100), timeout_s=60)
    client.lay_out([600], torch.float64, chunk_bytes=400)
    client.create([torch.zeros(600, dtype=torch.float64)], {"name": "sgd"}, 2.0)
    return client


def primary_of(made: LocalRoles, client: Client, shard: int) -> Server:
    server = made.roles[client.requests.map["holders"][shard][0]]
    assert isinstance(server, Server)
    return server


def view_of(client: Client, shard: int) -> SharedView:
    return client._mapped._of_shard[shard][2]


def test_a_version_in_memory_is_read_without_a_request() -> None:
    with local_roles(2) as made:
        client = client_of(made, "ps")
        assert client.pulled(0) == (0, 0.0, [0, 1])  # the memory was not mapped
        assert client.pulled(0) == (0, 0.0, [])
        client.add(0, 1.0)
        client.totals(1)
        assert client.pulled(0) == (0, 0.0, [])  # complete, but not applied
        assert client.pulled(1, [(0, 1.0, 1.0)]) == (1, 600.0, [0, 1])
        assert client.pulled(1, [(0, 1.0, 1.0)]) == (1, 600.0, [])  # as another worker would
        client.is_shared = False
        assert client.pulled(1) == (1, 600.0, [0, 1])
        client.close()


def test_an_asynchronous_worker_reads_its_own_update_in_memory() -> None:
    with local_roles(2) as made:
        client = client_of(made, "async")
        client.pulled(0)
        for clock in range(50):
            client.add(clock, 1.0)
            assert client.pulled(0) == (clock + 1, 600.0 * (clock + 1), [])
        client.close()


def test_a_version_is_published_once_the_backup_has_it() -> None:
    with local_roles(2) as made:
        client = client_of(made, "ps")
        client.pulled(0)
        client.add(0, 1.0)
        client.totals(1)
        server, held = primary_of(made, client, 0), view_of(client, 0)
        late = list[WireMessage]()
        link = server.replicas.backups[0].link
        hear, server._links[link] = server._links[link], late.append
        thread = threading.Thread(target=client.pull, args=([torch.zeros(600)], 1, [(0, 1.0, 1.0)]))
        thread.start()
        while server.replicas.shards[0].version == 0 or not late:
            time.sleep(0.001)
        assert held.version == 0
        server._links[link] = hear  # the primary asks again, and hears
        thread.join()
        assert held.version == 1
        client.close()


def until_copied(made: LocalRoles, backup: str) -> Coordinator:
    """Wait until a beat of the backup of shard 0 says that it has a copy."""
    keeper = made.roles["coordinator"]
    assert isinstance(keeper, Coordinator)
    while (0, backup) not in keeper.synced:
        time.sleep(0.001)
    return keeper


@pytest.mark.parametrize("comes_back", [False, by_hand(True)])
def test_the_memory_of_a_server_that_was_replaced_is_not_read(comes_back: bool) -> None:
    """Nor the memory of a former process of the same name."""
    with local_roles(2) as made:
        client = client_of(made, "async")
        client.pulled(0)
        client.add(0, 1.0)
        former, (name, backup) = view_of(client, 0), client.requests.map["holders"][0]
        until_copied(made, backup)
        lose(made, name)
        if comes_back:
            made.start(name)
        client.add(1, 1.0)  # the backup, now the primary, gets it
        version, total, asked = client.pulled(0)
        assert (version, total) == (2, 1200.0) and 0 in asked
        assert former.version == -1  # its server has closed it
        client.close()


def test_a_server_that_got_its_shard_back_is_read_in_its_new_memory() -> None:
    """It was taken for lost while it was alive: its name and process are the same."""
    with local_roles(2) as made:
        client = client_of(made, "async")
        client.pulled(0)
        client.add(0, 1.0)
        former, (name, backup) = view_of(client, 0), client.requests.map["holders"][0]
        keeper = until_copied(made, backup)
        find_lost(made, name)
        while keeper.map["holders"][0] != [name, backup]:
            time.sleep(0.001)
        for clock in (1, 2):
            client.add(clock, 1.0)
            version, total, _ = client.pulled(0)
            assert (version, total) == (clock + 1, 600.0 * (clock + 1))
        assert view_of(client, 0) is not former
        client.close()


def test_memory_that_its_server_has_not_touched_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local_roles(1) as made:
        client = client_of(made, "async")
        client.pulled(0)
        assert client.pulled(0) == (0, 0.0, [])
        touched = view_of(client, 0)._touched
        last_ns = int(touched)
        while int(touched) == last_ns:  # by its loop
            time.sleep(0.001)
        monkeypatch.setattr(shared, "FRESH_S", 0.0)
        assert client.pulled(0) == (0, 0.0, [0])
        client.close()
