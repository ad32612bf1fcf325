"""A parameter server compared with a ring, and the order of updates in each consistency.

One rank is the master, a server that stores all weights; the others are workers. The real server
roles and clients (phalanx.server) run as threads of this process, with small weights. The times for
larger weights and a given bandwidth are computed from the counted bytes.
"""

from __future__ import annotations

import functools
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
from phalanx.server.processes import LocalRoles, local_roles
from phalanx.show.data_parallel import counter
from phalanx.show.shown import MOST_RANKS, Shown, ShowTopic

ELEMENTS: Final = 840 * 64
"""Number of elements of the small weights, divisible by every number of ranks."""

STEP_S: Final = 0.02
"""Duration of a worker's step, which is a sleep; the last worker takes five times as long."""

NUM_CLOCKS: Final = 4
GROWTH: Final = (2, 3, 5, 9, 17, 33, 65)
"""Numbers of ranks in the table of scaling."""

KINDS: Final = (("ps", 0), ("ssp", 2), ("async", 0), ("local", 2))


@dataclass(frozen=True, kw_only=True)
class ShowServer(ShowTopic):
    """Exchange by a parameter server and by a ring, and print what each link carries.

    Then print which weights each worker computed with, in four consistencies.
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
    parts: list[Table | str] = [
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


def trace(kind: str, option: int) -> Table:
    """Run three workers, the last one slow; return the weight versions that each computed with."""
    consistency = Consistency(kind, 3, option)
    computed: dict[int, list[str]] = {}
    ages: dict[int, int] = {}

    def work(roles: LocalRoles, worker: int) -> None:
        is_last = worker == consistency.num_slots - 1
        client, weights = _client(roles, worker, consistency, NUM_CLOCKS), [torch.zeros(8).double()]
        version, computed[worker] = client.pull(weights, 0), []
        for clock in range(NUM_CLOCKS):
            computed[worker].append(f"{clock}@{version}")
            time.sleep(STEP_S * (5 if is_last else 1) * consistency.num_local_steps)
            version = _step(client, weights, clock, version)
        client.leave()
        if is_last:
            ages.update(client.ages())
        client.close()

    with local_roles(1) as roles:
        _in_threads(functools.partial(work, roles), consistency.num_slots)
    name = f"{kind}/{option}" if option else kind
    late = ", ".join(f"{age}: {count}" for age, count in sorted(ages.items()))
    unit = f"round of {option} steps" if kind == "local" else "step"
    rows = [[str(worker), " ".join(computed[worker])] for worker in range(consistency.num_slots)]
    return Table(
        f"dp3:{name}: each {unit}@version of its initial weights; pushes by versions late: {late}",
        ["worker", "the last worker is 5 times slower"],
        rows,
    )


def _client(roles: LocalRoles, worker: int, consistency: Consistency, num_clocks: int) -> Client:
    """Return a registered client of a worker; worker 0 creates the weights on the servers."""
    size = ELEMENTS if num_clocks == 1 else 8
    client = Client(roles.meeting, worker, consistency, (0, num_clocks), timeout_s=60)
    client.is_shared = num_clocks > 1  # bytes are counted on sockets
    client.lay_out([size], torch.float64)
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
