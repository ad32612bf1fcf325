"""How long the first token of a prompt takes whose first 1,024 tokens another has begun with.

    python benchmarks/inference/first_token.py --rounds 7

throughput.py's model, float32, one thread. Each round has a prefix of its own, and two prompts, one
after the other, of the prefix and 16 tokens more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling
from phalanx.infer.paged import KVCache
from phalanx.infer.pool import BlockPool
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Scheduler
from throughput import VOCABULARY, twins


def first_token_s(engine: Engine, prompt: list[int]) -> float:
    """Return how long a request takes that ends with its first token."""
    begin_s = time.perf_counter()
    engine.generate([prompt], Sampling(max_tokens=1, temperature=0))
    return time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, _ = twins(max_seq_len=2048)
    pool = BlockPool(512, 16)
    cache = KVCache(model.shape, pool, torch.float32, torch.device("cpu"))
    engine = Engine(ModelRunner(model, cache), Scheduler(pool), max_seq_len=2048)
    draw = random.Random(0)
    firsts: list[float] = []
    seconds: list[float] = []
    for number in range(options.rounds + 1):  # the first warms up
        prefix = [draw.randrange(VOCABULARY) for _ in range(1024)]
        first, second = (
            first_token_s(engine, prefix + [draw.randrange(VOCABULARY) for _ in range(16)])
            for _ in range(2)
        )
        if number:
            firsts.append(first)
            seconds.append(second)
    ratios = [b / a for a, b in zip(firsts, seconds, strict=True)]
    for name, values in (("first", firsts), ("second", seconds)):
        ms = [1e3 * value for value in values]
        print(f"| {name} | {statistics.median(ms):,.0f} | {min(ms):,.0f}-{max(ms):,.0f} |")
    print(f"second / first: median {statistics.median(ratios):.3f}, at most {max(ratios):.3f}")


if __name__ == "__main__":
    main()
