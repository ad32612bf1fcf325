"""A job with parameter servers, servers compared with a ring, and the order of updates.

The job has two servers and two groups of workers. In the comparison one rank is the master, a
server that stores all weights; the others are workers. The real server roles and clients
(phalanx.server) run as threads of this process, with small weights. The times for larger weights
and a given bandwidth are computed from the counted bytes.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import torch

from phalanx import collectives
from phalanx.config.fields import Range
from phalanx.launch.local import run_ranks
from phalanx.report.tabular import Table
from phalanx.report.units import time_text
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.placement import CHUNK_BYTES
from phalanx.server.processes import LocalRoles, local_roles, log_of
from phalanx.show.data_parallel import counter
from phalanx.show.shown import MOST_RANKS, ServedJob, Shown, ShowTopic

ELEMENTS: Final = 840 * 64
"""Number of elements of the small weights, divisible by every number of ranks."""

STEP_S: Final = 0.02
"""Duration of a worker's step, which is a sleep; the last worker takes five times as long."""

NUM_CLOCKS: Final = 4

FEW: Final = 96
"""Number of elements of the weights whose versions are shown, in chunks of `FEW_BYTES`."""

FEW_BYTES: Final = 128
GROWTH: Final = (2, 3, 5, 9, 17, 33, 65)
"""Numbers of ranks in the table of scaling."""

KINDS: Final = (("ps", 0), ("ssp", 2), ("async", 0), ("local", 2))


@dataclass(frozen=True, kw_only=True)
class ShowServer(ShowTopic):
    """Exchange by a parameter server and by a ring, and print what each link carries.

    Print first who is who in a job of two worker groups, and last which weights each worker
    computed with, in four consistencies.
    """

    ranks: Annotated[int, Range(2, MOST_RANKS, "[]")] = 5
    """Ranks: the master, which holds the weights, and workers."""
    bytes: Annotated[float, Range(1)] = 1e9
    """Bytes of the weights, for the seconds."""
    bandwidth: Annotated[float, Range(1)] = 1e9
    """Bytes a second of each link, in each direction."""


class LinkBytes(NamedTuple):
    """Bytes that a rank sends and receives, as multiples of the bytes of the weights."""

    sent: float
    received: float


def show_parameter_server(config: ShowServer) -> Shown:
    """Run both exchanges and the four consistencies."""
    num_workers = config.ranks - 1
    workers = served_links(num_workers)
    out, back = (sum(getattr(link, name) for link in workers) for name in ("sent", "received"))
    ring = ring_links(config.ranks)
    unit_s = config.bytes / config.bandwidth
    ring_s = max(max(link) for link in ring) * unit_s
    rows = [_row("0, master", LinkBytes(back, out), 1.0, 1.0)]
    for number, link in enumerate(workers, 1):
        rows.append(_row(f"{number}, worker", link, link.sent / out, link.received / back))
    heads = ["rank", "sends", "receives", "load to the master", "load from the master"]
    in_ring = [
        _row(str(rank), link, link.sent * unit_s / ring_s, link.received * unit_s / ring_s)
        for rank, link in enumerate(ring)
    ]
    ring_heads = ["rank", "sends", "receives", "load out", "load in"]
    parts: list[Table | ServedJob | str] = [
        groups_of(num_workers),
        Table("through a master, as multiples of the weights", heads, rows, heads[1:]),
        f"{time_text(out * unit_s)} to the master, {time_text(back * unit_s)} back",
        Table(
            "by a ring all-reduce, as multiples of the weights", ring_heads, in_ring, ring_heads[1:]
        ),
        f"the ring {time_text(ring_s)}",
        growth(unit_s),
        *(trace(kind, option) for kind, option in KINDS),
    ]
    return Shown(
        f"a parameter server and {num_workers} workers, {config.bytes:.3g} B of weights, links of "
        f"{config.bandwidth:.3g} B/s",
        ["Workers push gradients to the master and pull weights; the master's link carries both.",
         "Load is the fraction of the time of an exchange in which a link is busy."],
        parts,
        "torch has none; dist.reduce(gradients, dst=0) and dist.broadcast(weights, src=0) move the "
        "same bytes",
    )  # fmt: skip


def _row(name: str, link: LinkBytes, to_master: float, back: float) -> list[str]:
    """Return a row: traffic of a rank, and the load of its link in both directions."""
    return [name, f"{link.sent:.2f}", f"{link.received:.2f}", f"{to_master:.0%}", f"{back:.0%}"]


def served_links(num_workers: int) -> list[LinkBytes]:
    """Push gradients and pull weights once; return the traffic of each worker."""
    consistency, links = Consistency("ps", num_workers), dict[int, LinkBytes]()
    num_bytes = ELEMENTS * 8

    def work(roles: LocalRoles, worker: int) -> None:
        client = _client(roles, worker, consistency, 1)
        weights = [torch.zeros(ELEMENTS, dtype=torch.float64)]
        client.received_bytes = 0
        version = _step(client, weights, 0, 0)
        assert version == 1, "the sum is applied"
        links[worker] = LinkBytes(client.sent_bytes / num_bytes, client.received_bytes / num_bytes)
        client.leave()
        client.close()

    with local_roles(1) as roles:
        _in_threads(functools.partial(work, roles), num_workers)
    return [links[worker] for worker in range(num_workers)]


def ring_links(num_ranks: int) -> list[LinkBytes]:
    """All-reduce the gradients by a ring; return the traffic of each rank."""
    sent = run_ranks(_ring_bytes, num_ranks, threads=1)
    return [LinkBytes(sent[rank], sent[rank - 1]) for rank in range(num_ranks)]


def _ring_bytes() -> float:
    flat, sent_in = torch.ones(ELEMENTS, dtype=torch.float64), counter()
    return sent_in(collectives.all_reduce, flat, algorithm="ring") / flat.nbytes


def growth(unit_s: float) -> Table:
    """Return a table of the time of an exchange over the number of ranks, by formulas.

    `unit_s` is the time in which a link carries the weights once.
    """
    rows = [
        [str(ranks), *(time_text(2 * max(1, (ranks - 1) / num) * unit_s) for num in (1, 4)),
         time_text(2 * (ranks - 1) / ranks * unit_s)]
        for ranks in GROWTH
    ]  # fmt: skip
    heads = ["ranks", "1 server and workers", "4 servers, the same workers", "ring"]
    return Table("time of an exchange by number of ranks, from the formulas", heads, rows, heads)


def groups_of(num_workers: int) -> ServedJob:
    """Run a job of two servers and two worker groups, synchronous, then asynchronous."""
    num_groups, tasks = min(2, num_workers), dict[str, dict[str, list[str]]]()
    shapes, log = dict[str, str](), ""
    for kind, name in (("ps", "synchronous"), ("async", "asynchronous")):
        done, _, sizes, log = _run(Consistency(kind, num_workers), 2, num_groups)
        tasks[f"{name}, dp{num_workers}:{kind}"] = {f"worker {n}": done[n] for n in sorted(done)}
        shapes = {f"server{at}": f"W[{size}]" for at, size in enumerate(sizes)}
    connected = dict[str, set[str]]()
    for process, peer in re.findall(r"(\w+ ?\d): connected to \S+/(\w+)\n", log):
        connected.setdefault(process, set()).add(peer)
    groups = [
        [name, *(each for each in sorted(connected) if each[0] == "w" and name in connected[each])]
        for name in sorted(each for each in connected if each.startswith("scheduler"))
    ]
    of_group = {
        name: f"group {at}: {len(workers) * NUM_CLOCKS} tasks"
        for at, (name, *workers) in enumerate(groups)
    }
    workers = {each: f"W, dW[{FEW}]" for _, *workers in groups for each in workers}
    return ServedJob(
        f"W[{FEW}] on two servers; worker groups: {num_groups}; connections that sockets recorded",
        {"coordinator": "manager: the map", **shapes, **of_group, **workers},
        groups,
        {process: sorted(peers) for process, peers in connected.items()},
        tasks,
    )


def _run(
    consistency: Consistency, num_servers: int, num_groups: int
) -> tuple[dict[int, list[str]], dict[int, int], list[int], str]:
    """Run workers, the last one slow.

    Returns:
        The tasks of each worker, as clock@version; staleness -> gradients; the number of elements
        on each server; and the log of all processes.
    """
    computed, ages, sizes = dict[int, list[str]](), dict[int, int](), list[int]()

    def work(roles: LocalRoles, worker: int) -> None:
        is_last = worker == consistency.num_slots - 1
        client = _client(roles, worker, consistency, NUM_CLOCKS)
        weights = [torch.zeros(FEW, dtype=torch.float64)]
        version, computed[worker] = client.pull(weights, 0), []
        for clock in range(NUM_CLOCKS):
            if client.ask_scheduler("claim", clock=clock)["is_mine"]:
                computed[worker].append(f"{clock}@{version}")
            time.sleep(STEP_S * (5 if is_last else 1) * consistency.num_local_steps)
            version = _step(client, weights, clock, version)
        client.leave()
        if is_last:
            ages.update(client.ages())
            sizes.extend(client.placed.sizes(at)[0] for at in range(num_servers))
        client.close()

    with local_roles(num_servers, num_groups) as roles:
        _in_threads(functools.partial(work, roles), consistency.num_slots)
        log = roles.log.read_text()
    return computed, ages, sizes, log


def trace(kind: str, option: int) -> Table:
    """Run three workers, the last one slow; return the weight versions that each computed with."""
    computed, ages, _, _ = _run(Consistency(kind, 3, option), 1, 1)
    name = f"{kind}/{option}" if option else kind
    late = ", ".join(f"{age}: {count}" for age, count in sorted(ages.items()))
    unit = f"round of {option} steps" if kind == "local" else "step"
    rows = [[str(worker), " ".join(computed[worker])] for worker in sorted(computed)]
    return Table(
        f"dp3:{name}: each {unit}@version of its initial weights; pushes by versions late: {late}",
        ["worker", "the last worker is 5 times slower"],
        rows,
    )


def _client(roles: LocalRoles, worker: int, consistency: Consistency, num_clocks: int) -> Client:
    """Return a registered client of a worker; worker 0 creates the weights on the servers."""
    size, log = ELEMENTS if num_clocks == 1 else FEW, log_of(f"worker {worker}", roles.log)
    client = Client(roles.meeting, worker, consistency, (0, num_clocks), 60.0, log)
    client.is_shared = num_clocks > 1  # bytes are counted on sockets
    client.lay_out([size], torch.float64, CHUNK_BYTES if num_clocks == 1 else FEW_BYTES)
    weights = [torch.zeros(size, dtype=torch.float64)]
    if worker == 0:
        client.create(weights, {"name": "sgd"}, 2.0)
    client.pull(weights, 0)
    return client


def _step(client: Client, weights: Sequence[torch.Tensor], clock: int, version: int) -> int:
    """Push a gradient, and pull weights as the consistency requires; return their version."""
    consistency, grads = client.consistency, [torch.ones_like(flat) for flat in weights]
    client.push(clock, client.worker, grads, base=version, tokens=1.0, loss=0.0, rate=0.1)
    needed = consistency.needs(clock + 1)
    totals = () if consistency.is_asynchronous else sorted(client.totals(needed))
    recipes = [(each, 0.1, 1.0) for each in totals if each >= client.applied]
    return client.pull(weights, needed, recipes)


def _in_threads(work: Callable[[int], None], num_workers: int) -> None:
    """Run each worker in a thread; raise the first exception of a worker, if any."""
    with ThreadPoolExecutor(num_workers) as pool:
        list(pool.map(work, range(num_workers)))
