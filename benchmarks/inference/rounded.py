"""What weights of int8 and caches of int8 or fp8 change: bytes, logits, tokens and time.

python benchmarks/inference/rounded.py --rounds 3
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from phalanx.infer.assembly import STORED
from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling
from phalanx.infer.paged import KVCache
from phalanx.infer.pool import BlockPool
from phalanx.infer.quantize import quantize_linears
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Scheduler
from throughput import CACHE_TOKENS, twins, workload


def engine(model: Any, cache_type: Callable[..., KVCache]) -> tuple[Engine, int]:
    pool = BlockPool(CACHE_TOKENS // 16, 16)
    cache = cache_type(model.shape, pool, torch.float32, torch.device("cpu"))
    made = Engine(ModelRunner(model, cache), Scheduler(pool), max_seq_len=model.shape.max_seq_len)
    return made, cache.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    full, _ = twins()
    small = copy.deepcopy(full)
    quantize_linears(small)
    int8, fp8 = (functools.partial(KVCache, stored=each) for each in STORED.values())
    kinds: dict[str, tuple[Any, Callable[..., KVCache]]] = {
        "float32": (full, KVCache),
        "int8 cache": (full, int8),
        "fp8 cache": (full, fp8),
        "int8 weights": (small, KVCache),
        "int8 weights and cache": (small, int8),
    }
    prompts, lengths = workload(32)
    samplings = [Sampling(max_tokens=n, temperature=0, logprobs=0) for n in lengths]
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    tokens: dict[str, list[list[int]]] = {}
    scores: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):
        for name, kind in kinds.items():
            made, _ = engine(*kind)
            begin_s = time.perf_counter()
            completions = [made.add(*pair)[0] for pair in zip(prompts, samplings, strict=True)]
            while made.scheduler.has_work:
                made.step()
            tokens[name] = [completion.new_tokens for completion in completions]
            scores[name] = [completion.scores[0].logprob for completion in completions]
            if number:
                rates[name].append(sum(lengths) / (time.perf_counter() - begin_s))
    for name, (model, cache_type) in kinds.items():
        held = [*model.parameters(), *model.buffers()]
        mib = sum(each.nbytes for each in held) / 2**20
        first = [(a[0] == b[0]) for a, b in zip(tokens[name], tokens["float32"], strict=True)]
        error = max(abs(a - b) for a, b in zip(scores[name], scores["float32"], strict=True))
        print(
            f"| {name} | {mib:.1f} | {engine(model, cache_type)[1] / 2**20:.1f} | "
            f"{statistics.median(rates[name]):,.0f} | {sum(first)} of 32 | {error:.4f} |"
        )


if __name__ == "__main__":
    main()
