"""Exchanges over links of a limited rate (tc tbf), a host each: python links.py [MBIT]

Eight hosts are network namespaces that a switch connects: four for servers, four for workers. Each
link takes MBIT (40) in either direction. It needs root, iproute2 and tc.

exchange   10 MB: one server and 4 workers, push and pull timed apart, beside a ring of 5 hosts;
           with the bytes that each link has carried, in percent of what it can
speed-up   1.25 MB and a step of 0.5 s, in place of which a worker sleeps: samples/s of N workers
           with one server, with 2 and 4 (which also copy each push to a backup), and with a ring
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.coordinator import Coordinator
from phalanx.server.requests import JobAddress
from phalanx.server.secret import Secret
from phalanx.server.shard_server import Server
from phalanx.server.task_scheduler import TaskScheduler

NUM_SERVERS, NUM_HOSTS = 4, 8
SWITCH, HOST = "phxlinks", "phxlink{}"
ADDRESS = "10.79.0.{}"
PORTS = itertools.count(7200, 10)
STEP_S = 0.5
NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""


def make_hosts(mbit: float) -> None:
    remove_hosts()
    shell(f"ip netns add {SWITCH}")
    shell(f"ip -n {SWITCH} link add br0 type bridge")
    shell(f"ip -n {SWITCH} link set br0 up")
    limit = f"root tbf rate {mbit}mbit burst 64kb latency 20ms"
    for number in range(NUM_HOSTS):
        name = HOST.format(number)
        shell(f"ip netns add {name}")
        shell(f"ip -n {name} link set lo up")
        shell(f"ip link add v0 netns {name} type veth peer name p{number} netns {SWITCH}")
        shell(f"ip -n {name} addr add {ADDRESS.format(number + 1)}/24 dev v0")
        shell(f"ip -n {name} link set v0 up")
        shell(f"ip -n {SWITCH} link set p{number} master br0 up")
        shell(f"ip netns exec {name} tc qdisc add dev v0 {limit}")
        shell(f"ip netns exec {SWITCH} tc qdisc add dev p{number} {limit}")


def remove_hosts() -> None:
    for name in [SWITCH, *(HOST.format(number) for number in range(NUM_HOSTS))]:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


def carried() -> tuple[int, int]:
    """Return the bytes that this host's link has sent and received."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    words = next(line for line in lines if line.strip().startswith("v0:")).split()
    return int(words[9]), int(words[1])


class Job:
    """A parameter server job over some hosts; this one's part of it."""

    def __init__(self, host: int, secret: Secret, num_servers: int, num_workers: int) -> None:
        port = next(PORTS)
        own = ADDRESS.format(host + 1)
        where = f"tcp://{ADDRESS.format(1)}:{port}"
        quiet = lambda _: None  # noqa: E731
        self.roles, self.client = [], None
        if host == 0:
            folder = Path(tempfile.mkdtemp())
            self.roles.append(Coordinator(num_servers, "job", folder / "j", secret, where, quiet))
            member = ("job", where, "1", "scheduler", secret, f"tcp://{own}:{port + 1}", quiet)
            self.roles.append(TaskScheduler(*member))
        if host < num_servers:
            member = (f"server{host}", secret, f"tcp://{own}:{port + 2}", quiet)
            self.roles.append(Server("job", where, "1", *member))
        self.threads = [threading.Thread(target=role.run, daemon=True) for role in self.roles]
        for thread in self.threads:
            thread.start()
        worker = host - NUM_SERVERS
        if 0 <= worker < num_workers:
            consistency = Consistency("ps", num_workers)
            self.client = Client(JobAddress(where, secret), worker, consistency, (0, 1000))
            self.client.is_shared = False

    def begin(self, size: int) -> None:
        self.weights, self.grads = [torch.zeros(size)], [torch.ones(size)]
        self.version = 0
        if self.client is not None:
            self.client.lay_out([size], torch.float32, chunk_bytes=1 << 13)
            if self.client.worker == 0:
                self.client.create(self.weights, {"name": "sgd"}, 2.0)
            self.client.pull(self.weights, 0)

    def push(self) -> None:
        if self.client is not None:
            numbers = {"base": self.version, "tokens": 1.0, "loss": 0.0}
            self.client.push(self.version, self.client.worker, self.grads, **numbers)
            self.client.totals(self.version + 1)

    def pull(self) -> None:
        if self.client is not None:
            recipes = [(self.version, 0.1, 1.0)]
            self.version = self.client.pull(self.weights, self.version + 1, recipes)

    def end(self) -> None:
        dist.barrier()
        if self.client is not None and self.client.worker == 0:
            self.client.end()
        if self.client is not None:
            self.client.close()
        for thread in self.threads:
            thread.join()
        dist.barrier()


def timed(act, rate: float) -> tuple[float, list[list[float]]]:
    """Return the seconds of the slowest host, and the percent of each link, out and in."""
    dist.barrier()
    before, begin_s = carried(), time.perf_counter()
    act()
    own_s = time.perf_counter() - begin_s
    dist.barrier()
    after = carried()
    found: list = [None] * NUM_HOSTS
    dist.all_gather_object(found, (own_s, after[0] - before[0], after[1] - before[1]))
    length = max(each[0] for each in found)
    return length, [[100 * b / rate / length for b in each[1:]] for each in found]


def exchange(host: int, secret: Secret, rate: float) -> None:
    size = 10_000_000 // 4
    unit_s = 4 * size / rate
    job = Job(host, secret, 1, 4)
    job.begin(size)
    ring = dist.new_group([0, *range(NUM_SERVERS, NUM_HOSTS)])
    is_in_ring = host == 0 or host >= NUM_SERVERS
    flat = torch.ones(size)

    def all_reduce() -> None:
        if is_in_ring:
            dist.all_reduce(flat, group=ring)

    cases = {"push": (job.push, 4.0), "pull": (job.pull, 4.0), "ring": (all_reduce, 1.6)}
    found: dict[str, list] = {name: [] for name in cases}
    for _ in range(3):
        for name, (act, _) in cases.items():
            found[name].append(timed(act, rate))
    job.end()
    for name, (_, units) in cases.items():
        times = [length for length, _ in found[name]]
        middle, due = statistics.median(times), units * unit_s
        if host == 0:
            loads = found[name][-1][1]
            links = "  ".join(
                f"{who} {loads[h][0]:.0f}/{loads[h][1]:.0f}"
                for who, h in (("master", 0), *((f"worker {w}", 4 + w) for w in range(4)))
            )
            print(
                f"{name:5} {middle:5.2f} s ({min(times):.2f} to {max(times):.2f}), by formula "
                f"{due:.2f}: {100 * (middle / due - 1):+.0f} %   % of a link out/in: {links}",
                flush=True,
            )


def speed_up(host: int, secret: Secret, rate: float) -> None:
    size, rounds = 1_250_000 // 4, 3
    for num_workers in (1, 2, 4):
        is_worker = 0 <= host - NUM_SERVERS < num_workers
        line = f"{num_workers} workers"
        ring = dist.new_group(range(NUM_SERVERS, NUM_SERVERS + num_workers))
        for num_servers in (1, 2, 4, 0):
            job = Job(host, secret, num_servers, num_workers) if num_servers else None
            flat = torch.ones(size)
            if job is not None:
                job.begin(size)

            def step() -> None:
                if not is_worker:  # noqa: B023
                    return
                for _ in range(rounds):
                    time.sleep(STEP_S)
                    if job is None:  # noqa: B023
                        dist.all_reduce(flat, group=ring)  # noqa: B023
                    else:
                        job.push()  # noqa: B023
                        job.pull()  # noqa: B023

            length, loads = timed(step, rate)
            if job is not None:
                job.end()
            gain = num_workers * STEP_S * rounds / length
            busiest = max(max(link) for link in loads)
            name = f"{num_servers} servers" if num_servers else "ring"
            line += f"   {name}: {gain:.2f}x, busiest link {busiest:.0f} %"
        if host == 0:
            print(line, flush=True)


def be(host: int, secret: Secret, mbit: float) -> None:
    """Be a host: enter its namespace, and take part in everything."""
    name = HOST.format(host)
    with open(f"/var/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    os.environ["GLOO_SOCKET_IFNAME"] = "v0"
    torch.set_num_threads(1)
    store = f"tcp://{ADDRESS.format(1)}:7100"
    dist.init_process_group("gloo", init_method=store, rank=host, world_size=NUM_HOSTS)
    rate = mbit * 1e6 / 8
    exchange(host, secret, rate)
    speed_up(host, secret, rate)
    dist.barrier()
    os._exit(0)


def main(mbit: float) -> None:
    make_hosts(mbit)
    secret, context = Secret.new(), multiprocessing.get_context("fork")
    made = [context.Process(target=be, args=(n, secret, mbit)) for n in range(NUM_HOSTS)]
    try:
        for process in made:
            process.start()
        for process in made:
            process.join()
    finally:
        for process in made:
            process.kill()
        remove_hosts()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 40.0)
