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
import select
import socket
import socketserver
import statistics
import struct
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from phalanx.errors import TrainingError
from phalanx.launch import interface
from phalanx.launch.failure import report
from phalanx.launch.rank_env import RankEnv

if TYPE_CHECKING:
    from torch.distributed import Store

LIMIT_S: Final = 3.0
"""Longest wait, in seconds, for one answer of another host or of a name server."""

PINGS: Final = 20
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


@dataclass(frozen=True, kw_only=True)
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
    is_loopback = address.startswith("127.") or address == "::1"
    if not address or (is_loopback and peer not in (host, "localhost", address)):
        meaning = f"resolves to {address}, {host} itself," if address else "is unknown"
        line = f"replace '{address} {peer}' by" if address else "add"
        yield Finding(
            check="name",
            text=f"the name {peer} {meaning} on {host}",
            cure=f"in /etc/hosts of {host}, {line} 'ADDRESS {peer}' with the address that `ip "
            f"-brief address` shows on {peer}, or use the address in place of the name",
            is_end=True,
            values={"address": address},
        )
        return
    yield Finding(check="name", text=f"{peer} is {address}", values={"address": address})
    source = interface.address_towards(address)
    if not source:
        yield Finding(
            check="route",
            text=f"{host} has no route to {peer} ({address})",
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
    yield Finding(check="route", text=route, values=values)
    times_s = ping(address) if pings else None
    if times_s:
        yield round_trip(times_s)
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
        socket.create_connection((address, port), LIMIT_S).close()
        return Finding(check="port", text=f"{where} is open")
    except ConnectionRefusedError:
        return Finding(check="port", text=f"nobody listens at {where}; no firewall drops it")
    except OSError as error:
        if error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            text = f"connections to {where} get no answer in {LIMIT_S:g} s: a firewall drops them"
            text += "" if is_alive else f", or {peer} is off"
        elif is_alive:
            text = f"a firewall rejects connections to {where}"
        else:
            text = f"no host answers at {where}: {error.strerror}"
            cure = f"check that {peer} is on, its cable and its address (`ip -brief address` on it)"
    return Finding(check="port", text=text, cure=cure, is_end=True)


def ping(address: str) -> list[float] | None:
    """Return round-trip times of ICMP echoes in seconds, as `ping` has them; None if not allowed.

    The kernel notes when an answer arrives, so that no wait for this process is counted.
    """
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            probe = socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP)
        except OSError:  # the kernel allows it to root, or to groups of net.ipv4.ping_group_range
            continue
        with probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, 35, 1)  # SO_TIMESTAMPNS
            probe.connect((address, 0))
            return _echoes(probe, kind == socket.SOCK_RAW)
    return None


def _echoes(probe: socket.socket, is_raw: bool) -> list[float]:
    times_s: list[float] = []
    now_ns, send, number = time.time_ns, probe.send, os.getpid() & 0xFFFF
    begun_s = time.monotonic()
    for turn in range(1 + PINGS):
        head = struct.pack("!BBHHH", 8, 0, 0, number, turn) + bytes(48)
        total = sum(struct.unpack(f"!{len(head) // 2}H", head))
        total = (total & 0xFFFF) + (total >> 16)
        packet = head[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + head[4:]
        now_ns()  # else its first call after a sleep would be counted
        sent_ns = now_ns()
        send(packet)
        until_s = time.monotonic() + LIMIT_S / 3
        while (left_s := until_s - time.monotonic()) > 0:
            probe.settimeout(left_s)
            try:
                data, extra, *_ = probe.recvmsg(256, 256)
            except TimeoutError:
                break
            answer = data[(data[0] & 15) * 4 :] if is_raw else data
            kind, _, _, of, sequence = struct.unpack("!BBHHH", answer[:8])
            if kind == 0 and sequence == turn and (of == number or not is_raw):
                seconds, nanoseconds = struct.unpack("qq", extra[0][2][:16])
                if turn:  # the first also asks for the address of the host's card
                    times_s.append((seconds * 10**9 + nanoseconds - sent_ns) / 1e9)
                break
        if time.monotonic() - begun_s > LIMIT_S or (not times_s and turn):
            break
        time.sleep(0.01)
    return times_s


def round_trip(times_s: Sequence[float]) -> Finding:
    """Return the finding of round-trip times in seconds."""
    ordered = sorted(times_s)
    late_s = ordered[math.ceil(0.99 * len(ordered)) - 1]
    values = {"least_s": ordered[0], "median_s": statistics.median(ordered), "p99_s": late_s}
    texts = (
        f"{name} {1e3 * s:.3g} ms"
        for name, s in zip(("least", "median", "99 %"), values.values(), strict=True)
    )
    return Finding(check="round trip", text=", ".join(texts), values=values)


class Responder(socketserver.ThreadingTCPServer):
    """Answers the checks of another host on a port of this one, in threads, until it is closed.

    A connection asks one thing, in a line:

        time                  the time of this host's clock, in seconds
        take SECONDS BYTES    reads at most so long and so much; answers with bytes per second
        send SECONDS BYTES    sends at most so long and so much
    """

    allow_reuse_address = daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, port: int = 0) -> None:
        """Listen on `port` of all interfaces; 0 takes a free one. OSError: it is taken."""
        super().__init__(("", port), _Answer)
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Answer no further connection."""
        self.shutdown()
        self.server_close()


class _Answer(socketserver.BaseRequestHandler):
    @override
    def handle(self) -> None:
        connection: socket.socket = self.request
        with suppress(OSError, ValueError):
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
    host = socket.gethostname()
    yield _packets(host, peer, address, port)
    sent_s = time.time()
    with asking(address, port, "time") as connection:
        offset_s = _number(connection) - (sent_s + time.time()) / 2
    size = f"{abs(offset_s):,.0f}" if abs(offset_s) > CLOCK_S else f"{abs(offset_s):.3g}"
    ahead = f"{size} s {'ahead of' if offset_s > 0 else 'behind'}"
    yield Finding(
        check="clock",
        text=f"the clock of {peer} is {ahead} the clock of {host}",
        cure="set both by: sudo timedatectl set-ntp true" if abs(offset_s) > CLOCK_S else "",
        values={"offset_s": offset_s},
    )


def _packets(host: str, peer: str, address: str, port: int) -> Finding:
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

    with asking(address, port, "time") as connection:
        most = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
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
            check="MTU",
            text=f"packets from {source} to {target} with more than {largest} bytes of data "
            f"vanish, up to {most} that both hosts allow",
            cure=f"set one MTU on all hosts and switches; until then, on {host} and {peer}: sudo "
            f"ip link set dev INTERFACE mtu {largest + HEADERS}",
            is_end=True,
        )
    return Finding(check="MTU", text=f"packets of {most + HEADERS} bytes pass both ways")


def bandwidth(
    peer: str, address: str, port: int, *, num_bytes: int = 1 << 20, tries: int = 5
) -> Finding:
    """Measure the bandwidth of TCP to a host whose `Responder` is at a port, and back.

    Streams end after a second, or `num_bytes`. A busy host may hold one back, while a slow link is
    slow each time: the best of `tries` counts.

    Raises:
        OSError: the responder does not answer.
    """
    host, to_s, from_s, cure = socket.gethostname(), 0.0, 0.0, ""
    while tries > 0:
        with asking(address, port, f"take 1 {num_bytes}") as connection:
            _send(connection, 1.0, num_bytes)
            to_s = max(to_s, _number(connection))
        with asking(address, port, f"send 1 {num_bytes}") as connection:
            from_s = max(from_s, _take(connection, 1.0, num_bytes))
        cure = cure_of_slow(host, peer, to_s, from_s)
        tries = tries - 1 if cure else 0
    return Finding(
        check="TCP",
        text=both_ways(host, peer, to_s, from_s),
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

    The first rank of each host connects to the next host and measures the link, both ways. It
    reports slow links and clocks.

    Raises:
        TrainingError: connections to the next host do not pass, or large packets vanish; the first
            ranks of both hosts raise it.
    """
    if env.local_rank or env.num_here == env.num_ranks:
        return
    # first ranks     0 --> 2 --> 4 --> 0       of three hosts of two ranks
    # of two hosts, only the first measures the link
    following = env.here.stop % env.num_ranks
    responder, host, fault = Responder(), socket.gethostname(), ""
    store.set(f"{env.rank}", json.dumps([host, address, responder.port, following]))
    peer, address, port, after = json.loads(store.get(f"{following}"))
    for finding in _of_run(peer, address, port, is_measured=env.rank == 0 or after != env.rank):
        if finding.is_end:
            fault = str(finding)
        elif finding.cure:
            report(str(finding))
    store.set(f"{following} is checked", fault)
    fault = fault or store.get(f"{env.rank} is checked").decode()
    responder.close()
    if fault:
        raise TrainingError(fault)


def _of_run(peer: str, address: str, port: int, *, is_measured: bool) -> Iterator[Finding]:
    finding = reach(peer, address, port)
    yield finding
    if is_measured and not finding.is_end:
        try:
            yield from passing(peer, address, port)
            yield bandwidth(peer, address, port)
        except OSError:  # cut since
            yield reach(peer, address, port)
