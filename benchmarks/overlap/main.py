"""A step of fsdp with its collectives in flight while blocks compute, and without, in turns.

python benchmarks/overlap/main.py [--rows 1] [--rounds 15] [--gbit RATE] [--out FILE.json]
    [--trace FILE.json]

Two ranks of one thread take the steps of one run; each round has a step of each way. `--gbit` has
all messages pass the loopback device of a network namespace that lets RATE Gbit/s through, both
directions together (`ip netns` and `tc tbf`; needs root). `--trace` records one more step of each
way, for https://ui.perfetto.dev or chrome://tracing.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from phalanx.comm.comm import Ranks
from phalanx.comm.fsdp import LastReduction, ShardGather
from phalanx.comm.transfer import Transfer
from phalanx.comm.waits import around_waits
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches
from timeline import Timeline, chrome_trace

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import SHAPE, spread, write_result

STRATEGY = "fsdp2"
NAMESPACE = "phxslow"
WAYS = ("none in flight", "gathers", "gathers and reductions")
"""What travels while blocks compute."""


@contextmanager
def in_flight(way: str) -> Generator[None]:
    """Let travel what `way` says, and wait at once for all else."""
    gather = ShardGather.__call__

    def gather_and_wait(self: ShardGather, *args: Any, **kwargs: Any) -> Transfer | None:
        transfer = gather(self, *args, **kwargs)
        assert transfer is not None
        transfer.wait()
        return transfer

    with contextlib.ExitStack() as stack:
        if way == "none in flight":
            stack.enter_context(patch.object(ShardGather, "__call__", gather_and_wait))
        if way != "gathers and reductions":
            wait = lambda _, transfer: transfer.wait()  # noqa: E731
            stack.enter_context(patch.object(LastReduction, "leave", wait))
        yield


class Waits:
    """Adds up the seconds in which this rank waits for others."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def __call__(self) -> Generator[None]:
        begin_s = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin_s


def measure(rows: int, rounds: int, is_traced: bool) -> tuple[dict[str, list], dict[str, list]]:
    """Return for each way the seconds, and those of waits, of its steps; and the traced spans."""
    strategy = Strategy.parse(STRATEGY)
    comm = Ranks(strategy, shares_memory=False)  # what it shows is a thread of gloo
    with torch.device("meta"):
        model = Decoder(SHAPE)
    runner = Plan(strategy, model).build(comm, functools.partial(fill_initial, SHAPE, 5))
    config = OptimizerConfig(warmup_steps=0)
    step = Step(
        model, build_optimizer(model, config), NextToken(), config,
        comm=comm, num_steps=10_000, run=runner,
    )  # fmt: skip
    batches = decoder_batches(SHAPE, 1, rows, SHAPE.max_seq_len, 0, 1 + comm.coord("data"))
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for way in WAYS:
        with in_flight(way):
            step(batches)
    for number in range(rounds):
        for way in (*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]):
            waits = Waits()
            dist.barrier()
            begin_s = time.perf_counter()
            with in_flight(way), around_waits(waits):
                step(batches)
            times[way].append((time.perf_counter() - begin_s, waits.seconds))
    spans: dict[str, list] = {}
    for way in WAYS if is_traced else ():
        timeline = Timeline(model)
        dist.barrier()
        with in_flight(way), timeline.recording():
            step(batches)
        spans[way] = timeline.spans
    return times, spans


def in_namespace(gbit: float) -> int:
    """Run this command again where messages pass a slow link."""
    words = [word for word in sys.argv if not word.startswith("--gbit")]
    link = f"tc qdisc add dev lo root tbf rate {gbit}gbit burst 1mb latency 400ms"
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    try:
        inside = ["ip", "netns", "exec", NAMESPACE]
        for command in ("ip link set lo up", link):
            subprocess.run([*inside, *command.split()], check=True)
        environment = {**os.environ, "OVERLAP_GBIT": str(gbit)}
        return subprocess.run([*inside, sys.executable, *words], env=environment).returncode
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1, help="sequences a rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gbit", type=float, help="as --gbit=RATE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    if args.gbit is not None:
        sys.exit(in_namespace(args.gbit))
    ranks = run_ranks(measure, 2, args.rows, args.rounds, args.trace is not None, threads=1)
    print(
        "| in flight | ms a step, median | min | max | against none, round by round | waits, ms |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    rows = {}
    for way in WAYS:
        steps = [max(times[way][n][0] for times, _ in ranks) for n in range(args.rounds)]
        waits = [
            statistics.mean(times[way][n][1] for times, _ in ranks) for n in range(args.rounds)
        ]
        rows[way] = {"step_s": steps, "wait_s": waits}
        ratios = [a / b for a, b in zip(steps, rows[WAYS[0]]["step_s"], strict=True)]
        cells = spread([1e3 * seconds for seconds in steps], ",.0f")
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        print(
            f"| {way} | {cells} | {statistics.median(ratios):.2f} "
            f"({quartiles[0]:.2f}-{quartiles[2]:.2f}) | {1e3 * statistics.median(waits):,.0f} |"
        )
    gbit = os.environ.get("OVERLAP_GBIT")
    document = {"strategy": STRATEGY, "rows": args.rows, "link_gbit": gbit, "ways": rows}
    write_result(args.out, document)
    if args.trace is not None:
        args.trace.write_text(json.dumps(chrome_trace([spans for _, spans in ranks])) + "\n")


if __name__ == "__main__":
    main()
