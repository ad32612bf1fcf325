"""Checks of the link between two hosts, in the order in which links break, each with its cure.

    name -> route -> round trip -> port    MTU -> clock    bandwidth
    |------------- `way` -------------|    |- `passing` -|
      asks nothing of the other host       asks its `Responder`

`phalanx doctor` prints all of them. Ranks that cannot reach their job's store consult `way`
(`explained`), and ranks of several hosts measure their links before they join (`check_links`).
A finding with a cure is a fault; where it is an end, later checks of the same link mean nothing.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import select
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from phalanx.errors import PeerLost, TrainingError
from phalanx.launch import interface
from phalanx.launch.failure import report
from phalanx.launch.launched import launched
from phalanx.launch.rank_env import RankEnv

if TYPE_CHECKING:
    from torch.distributed import Store

LIMIT_S: Final = 3.0
"""Longest wait, in seconds, for one answer of another host or of a name server."""

NEAR_S: Final = 0.02
"""Longest time of a connection, in seconds, for which a short stream shows the link's bandwidth:
of a longer one it shows the start of TCP."""

CLOCK_S: Final = 5.0
"""Offset of two clocks, in seconds, from which it is a fault."""

SLOW: Final = 50e6 / 8
"""Bytes per second below which a link is slow; one way is, below a third of the other, up to BUSY:
differences of faster links are load of the hosts."""

BUSY: Final = 900e6 / 8

PACKETS: Final = (8948, 1448, 1420, 1400, 1372, 1348, 1300, 1220, 1000, 500, 200)
"""Bytes in a packet of TCP that are tried if the most that a connection allows do not arrive."""

HEADERS: Final = 52
"""Further bytes of such a packet: IP, TCP and its time stamp."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        text: what the check has seen.
        cure: what to do; empty if nothing is wrong.
        is_end: whether later checks of the same link mean nothing.
        values: measured values, by name, in SI units.
    """

    check: str
    text: str
    cure: str = ""
    is_end: bool = False
    values: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return f"{self.text}; {self.cure}" if self.cure else self.text


def way(peer: str, port: int | None = None, *, pings: bool = True) -> Generator[Finding]:
    """Check name, route, round trip and, unless None, a port of another host.

    That nobody listens at the port is no fault.
    """
    host, address = socket.gethostname(), _resolved(peer)
    is_loopback = address.startswith(interface.LOOPBACK)
    names = (host, "localhost", address, socket.getfqdn()) if is_loopback else ()
    if not address or (is_loopback and peer not in names):
        meaning = f"resolves to {address}, {host} itself," if address else "is unknown"
        line = f"replace '{address} {peer}' by" if address else "add"
        yield Finding(
            "name",
            f"the name {peer} {meaning} on {host}",
            cure=f"in /etc/hosts of {host}, {line} 'ADDRESS {peer}' with the address that `ip "
            f"-brief address` shows on {peer}, or use the address in place of the name",
            is_end=True,
            values={"address": address},
        )
        return
    yield Finding("name", f"{peer} is {address}", values={"address": address})
    source = interface.address_towards(address)
    if not source:
        yield Finding(
            "route",
            f"{host} has no route to {peer} ({address})",
            cure=f"give an interface of {host} an address in the network of {address} (`ip -brief "
            "address` lists interfaces; sudo ip address add ADDRESS/24 dev INTERFACE)",
            is_end=True,
        )
        return
    values: dict[str, Any] = {"interface": interface.interface_of(source) or ""}
    for name in ("mtu", "speed"):
        with suppress(OSError, ValueError):  # a virtual interface may have no speed
            values[name] = int(Path(f"/sys/class/net/{values['interface']}/{name}").read_text())
    rate = f", {values['speed']:,} Mbit/s" if values.get("speed", 0) > 0 else ""
    route = f"from {source} by {values['interface']}, MTU {values.get('mtu', 'unknown')}{rate}"
    yield Finding("route", route, values=values)
    if times_s := ping(address) if pings else []:
        late_s = times_s[math.ceil(0.99 * len(times_s)) - 1]
        values = {"least_s": times_s[0], "median_s": statistics.median(times_s), "p99_s": late_s}
        names = ("least", "median", "99 %")
        texts = (f"{name} {1e3 * s:.3g} ms" for name, s in zip(names, values.values(), strict=True))
        yield Finding("round trip", ", ".join(texts), values=values)
    if port is not None:
        yield reach(peer, address, port, is_alive=bool(times_s))


def _resolved(peer: str) -> str:
    """Return an address of a host, IPv4 if it has one, or ""; a name server has LIMIT_S."""
    addresses: list[str] = []

    def resolve() -> None:
        with suppress(OSError, UnicodeError):
            entries = socket.getaddrinfo(peer, None, type=socket.SOCK_STREAM)
            entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
            addresses.append(str(entries[0][4][0]))

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return addresses[0] if addresses else ""


def reach(peer: str, address: str, port: int, *, is_alive: bool = True) -> Finding:
    """Connect to a port; say what a failure means: nobody listens, a firewall, or no host.

    `is_alive` says that the host has answered otherwise.
    """
    source = interface.address_towards(address)
    where = f"{peer}:{port}" if address == peer else f"{peer}:{port} ({address})"
    cure = (
        f"on {peer}, open all TCP ports to {source}: sudo ufw allow from {source}, or sudo "
        f"firewall-cmd --zone=trusted --add-source={source}"
    )
    try:
        begun_s = time.perf_counter()
        socket.create_connection((address, port), LIMIT_S).close()
        values = {"connect_s": time.perf_counter() - begun_s}
        return Finding("port", f"{where} is open", values=values)
    except ConnectionRefusedError:
        return Finding("port", f"nobody listens at {where}; no firewall drops it")
    except OSError as error:
        if error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            text = f"connections to {where} get no answer in {LIMIT_S:g} s: a firewall drops them"
            text += "" if is_alive else f", or {peer} is off"
        elif is_alive:
            text = f"a firewall rejects connections to {where}"
        else:
            text = f"no host answers at {where}: {error.strerror}"
            cure = f"check that {peer} is on, its cable and its address (`ip -brief address` on it)"
    return Finding("port", text, cure, is_end=True)


def ping(address: str) -> list[float]:
    """Return 20 sorted round-trip times of `ping` in seconds; none without an answer, or a ping."""
    command = ["ping", "-n", "-c", "21", "-i", "0.01", "-W", "1", address]
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True)
        times_ms = re.findall(r"time=([\d.]+)", done.stdout)[
            1:
        ]  # the first asks who has the address
        return sorted(float(ms) / 1e3 for ms in times_ms)
    return []


def listening(port: int) -> socket.socket:
    """Return a socket that listens at a port of all interfaces; OSError: it is taken."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class Responder:
    """Answers the checks of another host on a port of this one, in threads, until it is closed.

    A connection asks one thing, in a line:

        time                  the time of this host's clock, in seconds
        take SECONDS BYTES    reads at most so long and so much; answers with bytes per second
        send SECONDS BYTES    sends at most so long and so much
    """

    def __init__(self, port: int = 0) -> None:
        """Listen on `port` of all interfaces; 0 takes a free one. OSError: it is taken."""
        self._listener = listening(port)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Answer no further connection."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection, suppress(OSError, ValueError, IndexError):
        connection.settimeout(4 * LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = b""
        while not line.endswith(b"\n"):  # byte by byte: what follows is data
            line += (byte := connection.recv(1))
            if not byte or len(line) > 100:
                return
        command, *numbers = line.decode().split()
        if command == "time":
            connection.sendall(f"{time.time()!r}\n".encode())
            return
        seconds, num_bytes = min(float(numbers[0]), 10.0), int(numbers[1])
        if command == "take":
            connection.sendall(f"{_take(connection, seconds, num_bytes)!r}\n".encode())
        elif command == "send":
            _send(connection, seconds, num_bytes)


def _take(connection: socket.socket, seconds: float, num_bytes: int) -> float:
    """Return the bytes per second that arrive, without the first third, in which TCP starts."""
    view = memoryview(bytearray(1 << 20))
    points: list[tuple[float, int]] = []
    total = 0
    while total < num_bytes and (num := connection.recv_into(view)):
        total += num
        points.append((time.perf_counter(), total))
        if points[-1][0] - points[0][0] > seconds:
            break
    if not points:
        raise ConnectionResetError("the connection ended before any byte arrived")
    from_s = points[0][0] + (points[-1][0] - points[0][0]) / 3
    at_s, before = next(point for point in points if point[0] >= from_s)
    if points[-1][0] > at_s:
        return (total - before) / (points[-1][0] - at_s)
    return total / 1e-3  # all within one read: faster than can be measured


def _send(connection: socket.socket, seconds: float, num_bytes: int) -> None:
    """Send until all is sent, the other side answers or closes, or LIMIT_S after its time."""
    data, until_s = memoryview(bytes(1 << 18)), time.perf_counter() + seconds + LIMIT_S
    connection.setblocking(False)
    while num_bytes > 0 and (left_s := until_s - time.perf_counter()) > 0:
        readable, writable, _ = select.select([connection], [connection], [], left_s)
        if readable:
            break
        if writable:
            num_bytes -= connection.send(data[: min(len(data), num_bytes)])
    connection.settimeout(4 * LIMIT_S)


@contextmanager
def asking(address: str, port: int, command: str) -> Generator[socket.socket]:
    """Connect to the `Responder` of another host, and ask it a command."""
    with socket.create_connection((address, port), LIMIT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(f"{command}\n".encode())
        yield connection


def _number(connection: socket.socket) -> float:
    with connection.makefile() as lines:
        return float(lines.readline(100))


def passing(peer: str, address: str, port: int) -> Generator[Finding]:
    """Check MTU and clock of the link to a host whose `Responder` is at a port.

    Raises:
        OSError: the responder does not answer.
    """
    host, sent_s = socket.gethostname(), time.time()
    with asking(address, port, "time") as connection:
        most = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        offset_s = _number(connection) - (sent_s + time.time()) / 2
    yield _packets(host, peer, address, port, most)
    size = f"{abs(offset_s):,.0f}" if abs(offset_s) > CLOCK_S else f"{abs(offset_s):.3g}"
    ahead = f"{size} s {'ahead of' if offset_s > 0 else 'behind'}"
    yield Finding(
        "clock",
        f"the clock of {peer} is {ahead} the clock of {host}",
        cure="set both by: sudo timedatectl set-ntp true" if abs(offset_s) > CLOCK_S else "",
        values={"offset_s": offset_s},
    )


def _packets(host: str, peer: str, address: str, port: int, most: int) -> Finding:
    """Check that full packets pass both ways; if they vanish, find the largest that do not."""

    def passes(size: int, is_to: bool) -> bool:
        with suppress(OSError):
            command = f"{'take' if is_to else 'send'} 1 {size}"
            with asking(address, port, command) as connection:
                connection.settimeout(LIMIT_S / 2)
                if not is_to:  # a router may have asked for smaller packets: several arrive
                    return len(connection.makefile("rb").read(size)) == size
                connection.sendall(bytes(size))  # one packet, so that no card splits it later
                return _number(connection) > 0
        return False

    sizes = [size for size in PACKETS if size < most]
    for source, target, is_to in ((host, peer, True), (peer, host, False)):
        if passes(most, is_to):
            continue
        with ThreadPoolExecutor(len(sizes)) as threads:
            which = [*threads.map(passes, sizes, [is_to] * len(sizes))]
        if True not in which:
            raise TimeoutError(errno.ETIMEDOUT, f"{peer} does not answer")
        largest = sizes[which.index(True)]
        return Finding(
            "MTU",
            f"packets from {source} to {target} with more than {largest} bytes of data "
            f"vanish, up to {most} that both hosts allow",
            cure=f"set one MTU on all hosts and switches; until then, on {host} and {peer}: sudo "
            f"ip link set dev INTERFACE mtu {largest + HEADERS}",
            is_end=True,
        )
    return Finding("MTU", f"packets of {most + HEADERS} bytes pass both ways")


def bandwidth(
    peer: str, address: str, port: int, *, seconds: float, num_bytes: int, tries: int
) -> Finding:
    """Measure the bandwidth of TCP to a host whose `Responder` is at a port, and back.

    Streams end after `seconds`, or `num_bytes`. A busy host may hold one back, while a slow link is
    slow each time: the best of `tries` counts.

    Raises:
        OSError: the responder does not answer.
    """
    host, to_s, from_s, cure = socket.gethostname(), 0.0, 0.0, ""
    while tries > 0:
        with asking(address, port, f"take {seconds} {num_bytes}") as connection:
            _send(connection, seconds, num_bytes)
            to_s = max(to_s, _number(connection))
        with asking(address, port, f"send {seconds} {num_bytes}") as connection:
            from_s = max(from_s, _take(connection, seconds, num_bytes))
        cure = cure_of_slow(host, peer, to_s, from_s)
        tries = tries - 1 if cure else 0
    return Finding(
        "TCP",
        both_ways(host, peer, to_s, from_s),
        cure=cure,
        values={"to_bytes_per_s": to_s, "from_bytes_per_s": from_s},
    )


def cure_of_slow(host: str, peer: str, to_s: float, from_s: float) -> str:
    """Return the cure of a slow link, or of one slow way; else an empty text."""
    slow, fast = min(to_s, from_s), max(to_s, from_s)
    look = "`ethtool INTERFACE` shows speed and duplex of a card, `tc qdisc` limits"
    if slow < fast / 3 and slow < BUSY:
        source, target = (host, peer) if to_s == slow else (peer, host)
        return f"only the way from {source} to {target} is slow: try another cable and port; {look}"
    return f"use a cable in place of a wireless link; {look}" if slow < SLOW else ""


def both_ways(host: str, peer: str, to_s: float, from_s: float) -> str:
    """Return the bandwidths of both ways of a link, in bytes per second, as text."""
    return f"{host} to {peer} {rate_text(to_s)}, back {rate_text(from_s)}"


def rate_text(bytes_per_s: float) -> str:
    """Return a bandwidth as network cards have it, such as 941 Mbit/s."""
    if bytes_per_s < 125e6:
        return f"{bytes_per_s * 8e-6:,.3g} Mbit/s"
    return f"{bytes_per_s * 8e-9:,.3g} Gbit/s"


@contextmanager
def explained(env: RankEnv) -> Generator[None]:
    """While the block waits for the job's store, report once a fault of the way to it.

    The first rank of each host reports, except on the host of the store.
    """
    peer, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    is_over = threading.Event()

    def explain() -> None:
        while not is_over.wait(LIMIT_S):
            for finding in way(peer, int(port), pings=False):
                if finding.cure and not is_over.is_set():
                    report(f"waiting for the job's store: {finding}")
                    return

    if env.rank > 0 and env.local_rank == 0 and port.isdecimal():
        threading.Thread(target=explain, name="explain", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def check_links(store: Store, env: RankEnv, address: str) -> None:
    """Check the links of this host before the ranks connect; every rank of the job calls this.

    The first rank of each host connects to the next host and measures the link, both ways, unless
    the address of that host is unknown (""). It reports slow links and clocks.

    Raises:
        TrainingError: connections to the next host do not pass, or large packets vanish; the first
            ranks of both hosts raise it. Where `phalanx launch` may start the job again, the former
            is a PeerLost.
    """
    if env.local_rank or env.num_here == env.num_ranks:
        return
    # first ranks     0 --> 2 --> 4 --> 0       of three hosts of two ranks
    # of two hosts, only the first measures the link
    following, host, fault = env.here.stop % env.num_ranks, socket.gethostname(), ""
    with closing(Responder()) as responder:
        store.set(f"{env.rank}", json.dumps([host, address, responder.port, following]))
        peer, address, port, after = json.loads(store.get(f"{following}"))
        is_measured = env.rank == 0 or after != env.rank
        for finding in _of_run(peer, address, port, is_measured) if address else ():
            if finding.is_end:
                fault = f"{finding.check}: {finding}"
            elif finding.cure:
                report(str(finding))
        store.set(f"{following} is checked", fault)
        fault = fault or store.get(f"{env.rank} is checked").decode()
    check, _, text = fault.partition(": ")
    if check == "port" and launched() is not None:
        report(text)
        raise PeerLost(text)  # its host may be lost
    if fault:
        raise TrainingError(text)


def _of_run(peer: str, address: str, port: int, is_measured: bool) -> Iterator[Finding]:
    yield (reached := reach(peer, address, port))
    if is_measured and not reached.is_end:
        try:
            yield from passing(peer, address, port)
            if reached.values.get("connect_s", 1) < NEAR_S:
                yield bandwidth(peer, address, port, seconds=0.15, num_bytes=1 << 20, tries=3)
        except OSError:  # cut since
            yield reach(peer, address, port)
