"""How long a plan of thousands of ranks takes to answer, from the shape of a model alone.

Made and asked are the plans of all stages: what a rank holds, sends and announces, what tp does to
each parameter, the cut and the schedule. Each round forgets what the one before has kept; the first
round also loads what PyTorch loads when it is first used.

python benchmarks/plan/main.py [--model llama3-405b] [--strategy pp16,fsdp128,tp8] [--rounds 9]
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from phalanx.models.registry import shape_of
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy


def ask(strategy: Strategy, shape: ModelShape, microbatches: list[tuple[int, int]]) -> None:
    """Make the plan of each stage, and ask it everything."""
    first = plan_decoder(strategy, shape, compute=torch.bfloat16)
    for pp_rank in range(strategy.pp.degree):
        plan = first.for_pp_rank(pp_rank) if pp_rank else first
        plan.holds(len(microbatches))
        plan.traffic(microbatches)
        plan.header_traffic(microbatches, [])
        plan.table()
        plan.schedule(len(microbatches))


def caches() -> Iterator[Any]:
    """Yield the functions of Phalanx that keep their results."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("phalanx."):
            yield from (each for each in vars(module).values() if hasattr(each, "cache_clear"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-405b")
    parser.add_argument("--strategy", default="pp16,fsdp128,tp8")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    strategy, shape = Strategy.parse(args.strategy), shape_of(args.model)
    microbatches = [(1, shape.max_seq_len)] * args.microbatches
    walls, processors = list[float](), list[float]()
    for _ in range(args.rounds):
        for cached in caches():
            cached.cache_clear()
        gc.collect()
        wall_s, processor_s = time.perf_counter(), time.process_time()
        ask(strategy, shape, microbatches)
        walls.append(1e3 * (time.perf_counter() - wall_s))
        processors.append(1e3 * (time.process_time() - processor_s))
    stages = strategy.pp.degree
    print(f"{args.model}, {strategy}: {strategy.num_ranks:,} ranks, {stages} plans a round")
    for name, times in (("wall", walls), ("processor", processors)):
        print(
            f"{name}: median {statistics.median(times):.1f} ms, least {min(times):.1f}, "
            f"first round {times[0]:.1f}"
        )


if __name__ == "__main__":
    main()
