"""Rates and links of this machine, measured by the ranks of a run, all at once as in training.

Two ranks that compute at once may share caches, memory, or the units of one physical core, and a
collective also waits for the rank that arrives last. So every rank measures at the same time:

    rank 0   products, attention, memory, operators | small step | work, collective, work, ...
    rank 1   products, attention, memory, operators | small step | work, collective, work, ...

Kept rates of products are of one core, and of a link of one rank. They hold for jobs of equally
many ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import torch

from phalanx.account.planned import decoder_step
from phalanx.comm.comm import Comm
from phalanx.errors import PhalanxError
from phalanx.measure.core import SMALL, SMALL_ROWS, measure_core, memory_rate, products_rate, step_s
from phalanx.measure.environment import has_fast_bfloat16
from phalanx.planner import calibration
from phalanx.planner.calibration_file import Calibration, Compute
from phalanx.planner.machine import Core, Level, Link, OpCost, ring
from phalanx.planner.parts import link_seconds
from phalanx.planner.software import DEFAULT
from phalanx.strategy import Strategy

OPS: Final = ("all_reduce", "all_gather", "reduce_scatter", "send")

_OTHER_LOAD: Final = 1.25
"""Ratio of rates of products from which a kept measurement is of another load of the machine."""

_SIZES: Final = (16 << 10, 512 << 10, 4 << 20)
"""Bytes of the tensors of the timed collectives."""

_REPEATS: Final = 5


@torch.random.fork_rng(devices=[])  # operands are random, and a module of the run may draw numbers
def machine_of(comm: Comm, precision: str, *, measures: bool) -> Calibration:
    """Return on rank 0 the measured rates of this machine; every rank calls this.

    What neither the user's calibration file nor an earlier run has, the ranks measure and keep, if
    `measures` is set and they are all the ranks of a job on the CPU of one host. They also measure
    anew if products now take another time than when an earlier run measured.
    """
    num_ranks, num_here = comm.size("job"), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    user = blank = calibration.blank("gpu" if comm.device.type == "cuda" else "cpu")
    kept, expected = None, 0.0
    if comm.is_first:
        with suppress(PhalanxError):  # a damaged file ends `phalanx plan`, and no run
            user = calibration.of_user(blank)
        kept = calibration.kept_by(num_ranks, blank, precision)
    if measures and blank.kind == "cpu" and num_here == num_ranks:
        if kept is not None and kept.compute is not None and kept.compute.core is not None:
            expected = kept.compute.core.products[precision] * kept.num_here / num_ranks
        # Rank 0 looks alone: either all ranks measure, or none.
        has_all, expected = _sums(comm, [user.is_whole(num_ranks), expected])
        if not has_all and expected:
            (rate,) = _sums(comm, [products_rate(getattr(torch, precision)) / num_ranks])
            expected *= 1 / _OTHER_LOAD < rate / expected < _OTHER_LOAD
        if not has_all and not expected:
            kept = measure_ranks(comm, precision)
            if comm.is_first:
                calibration.keep_measured(kept, num_ranks)
    machine = user.filled(kept)
    return machine if machine.num_hosts == max(1, num_ranks // num_here) else blank


def _sums(comm: Comm, values: Sequence[float]) -> list[float]:
    return comm.all_reduce(torch.tensor(values, dtype=torch.float64), "job").tolist()


def measure_ranks(comm: Comm, precision: str) -> Calibration:
    """Measure this machine's CPU on all ranks of a job of this host; every rank calls this.

    It takes about two seconds. All ranks return the mean rates.

    Args:
        comm: communicator of the job; its engines are measured on one axis.
        precision: data type of the job's products, as a name of torch.
    """
    machine, num_ranks = calibration.blank("cpu"), comm.size("job")
    products, attention, operator_s = measure_core(precision)
    measured = [*products.values(), *attention.values(), operator_s, memory_rate(), step_s()]
    axis = next((axis for axis, size in reversed(comm.axes.items()) if size > 1), None)
    points = [] if axis is None else list(_timed(comm, axis))
    sums = _sums(comm, [*measured, *(time_s for *_, time_s in points)])
    means = iter(total / num_ranks for total in sums)
    cores = machine.num_here / num_ranks  # of a rank; it may be a fraction
    products, attention = (
        {of: next(means) / cores for of in part} for part in (products, attention)
    )
    # What ranks lose on a shared core is in their rates already: no `crowd`, no `turn_s`.
    core = Core(
        products=products,
        attention=attention,
        operator_s=next(means) * min(1.0, cores),
        in_step=1.0,
        crowd=0.0,
    )
    compute = Compute(
        best=products,
        sustained=products,
        bandwidth=next(means) / cores,
        memory_bytes=calibration.memory_bytes(machine),
        date=time.strftime("%Y-%m-%d"),
        core=core,
        source=f"measured on this machine by {num_ranks} ranks at once",
    )
    alone = dataclasses.replace(machine, compute=compute)
    core = dataclasses.replace(core, in_step=next(means) / small_step_s(alone, num_ranks))
    levels: tuple[Level, ...] = ()
    if points:
        costs, seconds = dict[str, OpCost](), list(means)
        for op in OPS:
            pairs = zip(points, seconds, strict=True)
            hop_s, byte_s = fit([(hops, sent, s) for (of, hops, sent, _), s in pairs if of == op])
            costs[op] = OpCost(latency_s=hop_s, bandwidth=1 / byte_s)
        link = Link(
            name="collectives in a host",
            bandwidth=costs["all_reduce"].bandwidth,
            latency_s=costs["all_reduce"].latency_s,
            source=f"measured by these {num_ranks} ranks",
            date=time.strftime("%Y-%m"),
            measured=costs,
            turn_s=0.0,
            in_step=1.0,
        )
        levels = (Level(name="server", devices=num_ranks, link=link),)
    return dataclasses.replace(
        machine, compute=dataclasses.replace(compute, core=core), levels=levels
    )


def small_step_s(machine: Calibration, num_ranks: int) -> float:
    """Return the predicted seconds of `small_step` on one of the ranks that share this machine."""
    precision = "bfloat16" if has_fast_bfloat16("cpu") else "float32"
    planned = decoder_step(SMALL, Strategy(), SMALL.max_seq_len, SMALL_ROWS, 1, precision)
    device = calibration.as_cluster("this", machine, num_ranks).device
    links = link_seconds(planned, device, DEFAULT)
    return sum(of.forward.alone + of.backward.alone for of in links) / min(1.0, device.cores)


def _timed(comm: Comm, axis: str) -> Iterator[tuple[str, float, float, float]]:
    """Yield each collective, its hops and bytes in a ring, and its seconds within a step."""
    x, weight = torch.randn(128, 512), torch.randn(512, 512)
    num = comm.size(axis)
    for op, num_bytes in itertools.product(OPS, _SIZES):
        call, times_s = TimedCollective(comm, op, axis, num_bytes // 4 // num * num), list[float]()
        for _ in range(1 + _REPEATS):
            # The work takes other caches and, as in a step, not equally long on all ranks.
            torch.mm(x, weight).relu_()
            begun_s = time.perf_counter()
            call.run()
            times_s.append(time.perf_counter() - begun_s)
        time_s = statistics.median(times_s[1:]) / (2 if op == "send" else 1)
        yield op, *ring(op, num, call.whole.nbytes), time_s


class TimedCollective:
    """One collective on float32 tensors that `comm` allocates, so that no copy is needed."""

    def __init__(self, comm: Comm, op: str, axis: str, size: int) -> None:
        self._comm, self._op, self._axis = comm, op, axis
        self._num, self._coord = comm.size(axis), comm.coord(axis)
        self.whole = comm.empty([size], torch.empty(0, device=comm.device), axis)
        self._out = self.whole
        self._fill()

    def _fill(self) -> None:
        """Fill the tensor of each rank with 1 + its coordinate on the axis."""
        self.whole.fill_(1.0 + self._coord)

    def run(self) -> None:
        """Run the collective once; a send goes to the neighbor rank and back."""
        comm, op, axis, whole = self._comm, self._op, self._axis, self.whole
        if op == "all_reduce":
            comm.all_reduce(whole, axis, "max")  # a sum would grow with each call
        elif op == "all_gather":
            self._out = comm.all_gather(whole.chunk(self._num)[self._coord], axis, 0)
        elif op == "reduce_scatter":
            self._out = comm.reduce_scatter(whole, axis, 0)
        elif (peer := self._coord ^ 1) < self._num:
            is_sender = self._coord % 2 == 0
            for is_mine in (is_sender, not is_sender):
                start = comm.send_start if is_mine else comm.recv_start
                start(whole, axis, peer).wait()

    def num_wrong(self) -> int:
        """Run it again; return the number of wrong result elements over the ranks of the axis."""
        self._fill()
        self.run()
        numbers = torch.arange(1.0, 1 + self._num, device=self.whole.device)
        right = numbers.repeat_interleave(len(self.whole) // self._num)
        if self._op in ("all_reduce", "reduce_scatter"):
            right = numbers.max() if self._op == "all_reduce" else numbers.sum()
        elif self._op == "send":  # the number that the even rank of the pair sent and received back
            right = numbers[self._coord & ~1]
        wrong = (self._out != right).sum()
        return int(self._comm.all_reduce(wrong, self._axis))


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return seconds per hop and per byte, with the least sum of squared relative errors.

    Args:
        points: hops, bytes and seconds of each measured time.

    Neither is negative: if the least sum has a negative latency, only bytes are fitted. If it has
    no positive time per byte, only hops are fitted, and the time per byte is an upper bound.
    """
    # Least squares of relative errors, e = h L + s B - 1 with h = hops / time, s = bytes / time:
    #
    #     | hh hs | | L |   | h1 |
    #     | hs ss | | B | = | s1 |
    rows = [(hops / time_s, sent / time_s) for hops, sent, time_s in points]
    hh, hs = sum(h * h for h, _ in rows), sum(h * s for h, s in rows)
    ss, h1, s1 = sum(s * s for _, s in rows), sum(h for h, _ in rows), sum(s for _, s in rows)
    determinant = hh * ss - hs * hs
    latency_s = (h1 * ss - s1 * hs) / determinant if determinant > 0 else 0.0
    per_byte_s = (s1 * hh - h1 * hs) / determinant if determinant > 0 else s1 / ss
    if per_byte_s <= 0:  # larger sizes took no longer: the times give only a bound
        return h1 / hh, min(time_s / sent for _, sent, time_s in points)
    return (latency_s, per_byte_s) if latency_s >= 0 else (0.0, s1 / ss)
