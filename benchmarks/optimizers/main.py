"""A step with Muon beside a step with AdamW, in turns, and what the owners of matrices send.

python benchmarks/optimizers/main.py [--strategy dp2] [--rows 8] [--rounds 9] [--out FILE.json]

Two ranks of one thread train the 34 M shape in bfloat16; each round has a step of each way. Under
dp a third way is Muon without owners: every replica orthogonalises every matrix.
"""

import argparse
import contextlib
import functools
import os
import statistics
import sys
import time
from collections.abc import Generator
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.initial import fill_initial
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import Muon, build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import SHAPE, spread, write_result

WAYS = ("adamw", "muon", "muon without owners")


def ways_of(strategy: Strategy) -> tuple[str, ...]:
    return WAYS if strategy.fsdp.degree == 1 else WAYS[:2]


def step_of(strategy: Strategy, comm: Ranks, way: str) -> Step:
    plan = plan_decoder(strategy, SHAPE, torch.float32, torch.bfloat16)
    runner = plan.build(comm, functools.partial(fill_initial, SHAPE, 5))
    kind = "adamw" if way == "adamw" else "muon"
    config = OptimizerConfig(kind=kind, warmup_steps=0, lr=3e-4)
    optimizer = build_optimizer(plan.model, config, None if way == WAYS[2] else comm)
    return Step(plan.model, optimizer, NextToken(), config, comm=comm, num_steps=10_000, run=runner)


def measure(text: str, rows: int, rounds: int) -> tuple[dict, dict]:
    """Return for each way the seconds of its steps, of their updates and of the processor.

    And the calls and bytes of its updates by collective.
    """
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    steps = {way: step_of(strategy, comm, way) for way in ways_of(strategy)}
    batches = decoder_batches(SHAPE, 1, rows, SHAPE.max_seq_len, 0, 1 + comm.coord("data"))
    update_s = 0.0

    @contextlib.contextmanager
    def clock(phase: str) -> Generator[None]:
        nonlocal update_s
        begin_s = time.perf_counter()
        yield
        if phase == "optimizer":
            update_s += time.perf_counter() - begin_s

    bytes_of: dict[str, dict] = {}
    for way, step in steps.items():
        ledger = Ledger(comm)
        with ledger, step.watched(ledger.phase):
            step(batches)
        sent = {f"{e.op} over {e.axis}": e for e in ledger.entries() if e.phase == "optimizer"}
        bytes_of[way] = {name: (e.calls, e.sent_bytes) for name, e in sent.items()}
        if isinstance(step.optimizer, Muon) and step.optimizer.owners is not None:
            owners = step.optimizer.owners
            stated = owners.traffic(range(len(owners.parameters)), 2)
            assert {*stated} == {*sent.values()}, (stated, sent)
    times: dict[str, list[tuple[float, float, float]]] = {way: [] for way in steps}
    for number in range(rounds):
        names = [*steps]
        for way in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            update_s, begin_s, cpu_s = 0.0, time.perf_counter(), time.process_time()
            with steps[way].watched(clock):
                steps[way](batches)
            cpu_s = time.process_time() - cpu_s
            times[way].append((time.perf_counter() - begin_s, update_s, cpu_s))
    return times, bytes_of


def against(seconds: list[float], others: list[float]) -> str:
    """Return the median ratio of two lists, pair by pair, and its quartiles."""
    ratios = [a / b for a, b in zip(seconds, others, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return f"{statistics.median(ratios):.2f} ({quartiles[0]:.2f}-{quartiles[2]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="dp2")
    parser.add_argument("--rows", type=int, default=8, help="sequences of 256 tokens a rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    ranks = run_ranks(measure, 2, args.strategy, args.rows, args.rounds, threads=1)
    print(f"{args.strategy}, {args.rows} rows a rank, load {load:.1f} before the start")
    print(
        "| optimizer | ms a step, median | min | max | against AdamW, round by round "
        "| processor, ms | against AdamW | update, ms |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    rows = {}
    for way in ways_of(Strategy.parse(args.strategy)):
        steps, updates, cpus = (
            [max(times[way][n][at] for times, _ in ranks) for n in range(args.rounds)]
            for at in range(3)
        )
        rows[way] = {"step_s": steps, "update_s": updates, "cpu_s": cpus, "sent": ranks[0][1][way]}
        print(
            f"| {way} | {spread([1e3 * seconds for seconds in steps], ',.0f')} | "
            f"{against(steps, rows['adamw']['step_s'])} | {1e3 * statistics.median(cpus):,.0f} | "
            f"{against(cpus, rows['adamw']['cpu_s'])} | {1e3 * statistics.median(updates):,.0f} |"
        )
    for way, each in rows.items():
        for name, (calls, num_bytes) in each["sent"].items():
            print(f"{way}: {name}: {calls} calls, {num_bytes / 1e6:.2f} MB a rank")
    document = {"strategy": args.strategy, "rows": args.rows, "load": load, "ways": rows}
    write_result(args.out, document)


if __name__ == "__main__":
    main()
