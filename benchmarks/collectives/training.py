"""Steps of training on two ranks through shared memory and over gloo, step by step in turns.

python benchmarks/collectives/training.py [--rounds 7] [--strategies fsdp2 dp2 tp2]
    [--out FILE.json]

A decoder of 34 M parameters in bfloat16, 8 sequences of 256 a microbatch, one thread a rank. All
ways are built in one pair of processes and take a step each in every round.
"""

import argparse
import functools
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.initial import fill_initial
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy
from phalanx.train.optimizer import build_optimizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import SHAPE, spread, write_result

ENGINES = {"shared memory": True, "gloo": False}
NUM_ROWS = 8


def measure(strategies: list[str], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each round's step, by strategy and engine."""
    ways = {}
    for text in strategies:
        for engine, shares_memory in ENGINES.items():
            strategy = Strategy.parse(text)
            comm = Ranks(strategy, shares_memory=shares_memory)
            plan = plan_decoder(strategy, SHAPE, torch.float32, torch.bfloat16)
            model = plan.model.train()
            runner = plan.build(comm, functools.partial(fill_initial, SHAPE, 5))
            ways[text, engine] = model, runner, build_optimizer(model, OptimizerConfig())
    tokens = torch.randint(0, SHAPE.vocab_size, (NUM_ROWS, SHAPE.max_seq_len + 1))
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, (model, runner, optimizer) in ways.items():
            dist.barrier()
            begun_s = time.perf_counter()
            runner(
                [tokens],
                lambda batch, model=model: model(batch[:, :-1], batch[:, 1:]),
                lambda loss: loss / tokens[:, 1:].numel(),
            )
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            seconds[way].append(time.perf_counter() - begun_s)
    return {way: values[1:] for way, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--strategies", nargs="+", default=["fsdp2", "dp2", "tp2"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = run_ranks(measure, 2, args.strategies, args.rounds, threads=1)[0]
    print("| strategy | by | ms a step, median | min | max | gloo / this |")
    print("|---|---|---:|---:|---:|---:|")
    for (text, engine), values in found.items():
        pairs = zip(found[text, "gloo"], values, strict=True)
        ratio = statistics.median(gloo / own for gloo, own in pairs)
        cells = spread([1e3 * value for value in values], ",.0f")
        print(f"| {text} | {engine} | {cells} | {ratio:.2f}x |")
    rows = {" ".join(way): values for way, values in found.items()}
    write_result(args.out, {"rounds": args.rounds, "seconds": rows})


if __name__ == "__main__":
    main()
