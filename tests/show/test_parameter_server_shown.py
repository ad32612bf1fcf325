"""What `show parameter-server` says: bytes that were counted, and versions of a real run."""

from __future__ import annotations

import re

import pytest

from phalanx.config.command_line import read_command_line
from phalanx.report.tabular import Table
from phalanx.show.parameter_server import ShowServer, served_links, show_parameter_server, trace
from phalanx.show.shown import ServedJob
from workers_in_threads import allowed_connections


def computed_with(grid: Table) -> list[list[tuple[int, int]]]:
    """Return of each worker its steps, and the versions that they were computed with."""
    return [
        [(int(step), int(version)) for step, version in re.findall(r"(\d+)@(\d+)", row[1])]
        for row in grid.rows
    ]


@pytest.mark.slow
def test_the_masters_link_carries_all_and_a_ring_spreads_it() -> None:
    words = "--ranks 5 --bytes 1e9 --bandwidth 1e9".split()
    shown = show_parameter_server(read_command_line(words, ShowServer, prog="show"))
    said = [part for part in shown.parts if isinstance(part, str)]
    assert said == ["4 s to the master, 4 s back", "the ring 1.6 s"]
    master, ring = [part for part in shown.parts if isinstance(part, Table)][:2]
    assert master.rows[0][1:] == ["4.00", "4.00", "100%", "100%"]
    assert master.rows[4][1:] == ["1.00", "1.00", "25%", "25%"]
    assert ring.rows[3][1:] == ["1.60", "1.60", "100%", "100%"]
    traces = {part.title.split(":")[1]: part for part in shown.parts if isinstance(part, Table)
              and part.title.startswith("dp3:")}  # fmt: skip
    for kind in ("ps", "local/2"):
        assert all(step == version for row in computed_with(traces[kind]) for step, version in row)
    stale = computed_with(traces["ssp/2"])
    assert all(0 <= step - version <= 2 for row in stale for step, version in row)
    assert any(step > version for row in stale for step, version in row)
    slow = computed_with(traces["async"])[2]
    assert slow[1][1] > slow[1][0]  # the others have gone ahead
    (roles,) = [part for part in shown.parts if isinstance(part, ServedJob)]
    connected = {process: set(peers) for process, peers in roles.connected.items()}
    assert connected == allowed_connections([0, 0, 1, 1])
    assert roles.groups == [
        ["scheduler0", "worker 0", "worker 1"], ["scheduler1", "worker 2", "worker 3"]
    ]  # fmt: skip
    on_servers = [int(n) for name in ("server0", "server1")
                  for n in re.findall(r"W\[(\d+)\]", roles.shapes[name])]  # fmt: skip
    assert len(on_servers) == 2 and sum(on_servers) == 96
    synchronous, asynchronous = roles.tasks.values()
    assert all(tasks == ["0@0", "1@1", "2@2", "3@3"] for tasks in synchronous.values())
    assert asynchronous["worker 3"][3] != "3@3"


def test_bytes_grow_with_the_workers() -> None:
    assert [sum(link.sent for link in served_links(num)) for num in (1, 3)] == [1.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_trace_is_staler_than_its_bound(bound: int) -> None:
    rows = computed_with(trace("ssp", bound))
    assert all(0 <= step - version <= bound for row in rows for step, version in row)
