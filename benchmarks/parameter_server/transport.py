"""Push and pull 16 MiB, beside a raw TCP echo of the same bytes: python transport.py [ADDRESS]

ADDRESS is this host's own on a network, such as 10.0.0.5: there, bytes are encrypted. All is
measured in turns, and a server without a backup holds the weights. "one host" is what `phalanx
train` does where all roles run on one host: it pushes over a Unix socket, and reads the weights in
shared memory. A ZeroMQ echo, of frames of a megabyte, shows what the sockets alone take, and
encryption alone.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zmq

from phalanx.launch.process_memory import keep_freed_memory
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.coordinator import Coordinator
from phalanx.server.requests import JobAddress
from phalanx.server.secret import Secret
from phalanx.server.shard_server import Server
from phalanx.server.task_scheduler import TaskScheduler

NUM_BYTES = 16 << 20
ROUNDS = 15


def roles(where: list[str], key: bytes) -> None:
    """Run a coordinator, a scheduler and one server, at these addresses."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as `phalanx server` does
    secret, folder = Secret(key), Path(tempfile.mkdtemp())
    made = [
        Coordinator(1, "job", folder / "journal", secret, where[0], lambda _: None),
        TaskScheduler("job", where[0], "1", "scheduler", secret, where[1], lambda _: None),
        Server("job", where[0], "1", "server0", secret, where[2], lambda _: None),
    ]
    for role in made[:2]:
        threading.Thread(target=role.run, daemon=True).start()
    made[2].run()


def echo(host: str, port: int) -> None:
    listener = socket.create_server((host, port))
    connection, _ = listener.accept()
    buffer = bytearray(NUM_BYTES)
    while True:
        fill(connection, buffer)
        connection.sendall(buffer)


def frames_echo(address: str, key: bytes) -> None:
    """Send back what comes over ZeroMQ; encrypted if there is a key."""
    router = zmq.Context().socket(zmq.ROUTER)
    if key:
        router.curve_publickey, router.curve_secretkey = Secret(key).curve("listener")
        router.curve_server = True
    router.bind(address)
    while True:
        router.send_multipart(router.recv_multipart(copy=False), copy=False)


def frames_round_trip(address: str, key: bytes):
    """Return what sends frames to such an echo, and takes them back."""
    context = multiprocessing.get_context("spawn")
    context.Process(target=frames_echo, args=(address, key), daemon=True).start()
    dealer = zmq.Context().socket(zmq.DEALER)
    if key:
        dealer.curve_publickey, dealer.curve_secretkey = Secret(key).curve("link")
        dealer.curve_serverkey = Secret(key).curve("listener")[0]
    dealer.connect(address)
    frames = [bytearray(1 << 20) for _ in range(NUM_BYTES >> 20)]

    def round_trip() -> None:
        dealer.send_multipart(frames, copy=False)
        dealer.recv_multipart(copy=False)

    return round_trip


def fill(connection: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        view = view[connection.recv_into(view) :]


def connected(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.2)


class Served:
    """A worker of a server, whose job is at three addresses that begin alike."""

    def __init__(self, begin: str) -> None:
        secret, where = Secret.new(), [f"{begin}{number}" for number in range(3)]
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=roles, args=(where, secret.key), daemon=True)
        self.process.start()
        address = JobAddress(where[0], secret)
        self.client = Client(address, 0, Consistency("ps", 1), (0, 1 << 20))
        self.grads = [torch.ones(NUM_BYTES // 4)]
        self.weights = [torch.zeros(NUM_BYTES // 4)]
        self.client.lay_out([NUM_BYTES // 4], torch.float32)
        self.client.create(self.weights, {"name": "sgd"}, 2.0)
        self.version = self.client.pull(self.weights, 0)

    def push(self) -> None:
        numbers = {"base": self.version, "tokens": 1.0, "loss": 0.0}
        self.client.push(self.version, 0, self.grads, **numbers)

    def pull(self, *, is_shared: bool) -> None:
        self.client.is_shared = is_shared
        recipes = [(self.version, 0.1, 1.0)]
        self.version = self.client.pull(self.weights, self.version + 1, recipes)

    def only_pull(self, *, is_shared: bool) -> None:
        self.client.is_shared = is_shared
        self.client.pull(self.weights, self.version)


def main(host: str | None) -> None:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    plain = Served("tcp://127.0.0.1:2410")
    near = Served(f"ipc://{tempfile.mkdtemp()}/")
    coded = Served(f"tcp://{host}:2420") if host else None
    context.Process(target=echo, args=("127.0.0.1", 24300), daemon=True).start()
    raw = connected(("127.0.0.1", 24300))
    buffer = bytearray(NUM_BYTES)

    def round_trip() -> None:
        raw.sendall(buffer)
        fill(raw, buffer)

    def exchange(served: Served, *, is_shared: bool = False) -> None:
        served.push()
        served.pull(is_shared=is_shared)

    cases: dict[str, Callable[[], object]] = {
        "raw TCP echo": round_trip,
        "push + pull": lambda: exchange(plain),
    }
    cases["push + pull, one host"] = lambda: exchange(near, is_shared=True)
    cases["ZeroMQ echo"] = frames_round_trip("tcp://127.0.0.1:24301", b"")
    if coded is not None:
        cases["ZeroMQ echo, CURVE"] = frames_round_trip("tcp://127.0.0.1:24302", bytes(32))
        cases["push + pull, CURVE"] = lambda: exchange(coded)
    cases["pull over TCP"] = lambda: plain.only_pull(is_shared=False)
    cases["pull from shared memory"] = lambda: plain.only_pull(is_shared=True)
    source = torch.zeros_like(plain.weights[0])
    cases["copy by one thread"] = lambda: plain.weights[0].copy_(source)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(ROUNDS + 3):
        for name, case in cases.items():
            begin_s = time.perf_counter()
            case()
            if number >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin_s))
    for name, found in times.items():
        middle = statistics.median(found)
        low, high = min(found), max(found)
        of = middle / statistics.median(times["raw TCP echo"])
        print(f"{name:24} {middle:7.1f} ms ({low:.1f} to {high:.1f})  {of:.2f}x the echo")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
