"""Tokens a second with and without speculative decoding by prompt lookup, in turns.

    python benchmarks/hugging_face/speculation.py --rounds 5 [--out FILE.json]

A Llama of 21 M parameters, float32, one thread, which continues a token by a fixed successor: its
embedding and head alone decide the next token, all blocks run. A prompt of 256 tokens has all of
the 128 tokens that follow it, half of them (every second run of 16), or none. Greedy and drawn
tokens are compared with the ones without speculation.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))

from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling
from phalanx.infer.paged import KVCache
from phalanx.infer.pool import BlockPool
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Scheduler
from phalanx.infer.speculation import Ngrams
from phalanx.measure.environment import device_name
from throughput import CACHE_TOKENS, VOCABULARY, twins

NUM_NEW = 128
NUM_PROMPT = 256
RUN = 16
"""Tokens of the answer that stand together in the prompt."""


def copying_model() -> tuple[Any, list[int]]:
    """Return a model whose next token is a permutation of the last one, and the permutation."""
    model, _ = twins(max_seq_len=1024)
    successor = list(range(VOCABULARY))
    random.Random(0).shuffle(successor)
    with torch.no_grad():
        for block in model.blocks:  # computed, but with no weight in the residual
            block.attention.output.weight.mul_(1e-3)
            block.mlp.down.weight.mul_(1e-3)
        model.embedding.weight[0] = model.embedding.weight[1:].mean(0)  # of padding, zero
        model.output.weight[successor] = F.normalize(model.embedding.weight)
    return model, successor


def prompts_of(successor: list[int], share: float, num: int) -> list[list[int]]:
    """Return prompts that have a share of the tokens that follow their last token."""
    draw, prompts = random.Random(1), list[list[int]]()
    for _ in range(num):
        first = draw.randrange(VOCABULARY)
        answer = [first]
        while len(answer) <= NUM_NEW:
            answer.append(successor[answer[-1]])
        runs = [answer[at : at + RUN + 1] for at in range(0, NUM_NEW, RUN)]
        kept = runs if share == 1 else runs[::2] if share else []
        draw.shuffle(kept)
        copied = [token for run in kept for token in run]
        noise = [draw.randrange(VOCABULARY) for _ in range(NUM_PROMPT - 1 - len(copied))]
        prompts.append([*noise, *copied, first])
    return prompts


def generate(
    model: Any, prompts: list[list[int]], temperature: float, ngrams: Ngrams | None
) -> tuple[list[list[int]], float, float, Engine]:
    """Return the new tokens, seconds on the clock and of the CPU, and the engine."""
    pool = BlockPool(CACHE_TOKENS // 16, 16, has_prefix_cache=False)
    cache = KVCache(model.shape, pool, torch.float32, torch.device("cpu"))
    scheduler = Scheduler(pool, slots=len(prompts), guess=ngrams and ngrams.draft)
    engine = Engine(ModelRunner(model, cache), scheduler, max_seq_len=1024)
    samplings = [
        Sampling(max_tokens=NUM_NEW, temperature=temperature, seed=seed)
        for seed in range(len(prompts))
    ]
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    tokens = engine.generate(prompts, samplings)
    return tokens, time.perf_counter() - begin_s, time.process_time() - begin_cpu_s, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speculative", default="ngram")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, successor = copying_model()
    ngrams, rows = Ngrams.parse(options.speculative), list[dict[str, Any]]()
    print("prompt has, requests, temperature | tokens/s of CPU time off, on, ratio | accepted")
    for share in (1.0, 0.5, 0.0):
        for num, temperature in ((1, 0.0), (8, 0.0), (1, 2.5)):
            prompts = prompts_of(successor, share, num)
            seconds: list[tuple[float, ...]] = []
            for _ in range(options.rounds):
                plain, wall_off_s, off_s, _ = generate(model, prompts, temperature, None)
                tokens, wall_on_s, on_s, engine = generate(model, prompts, temperature, ngrams)
                assert all(len(each) == NUM_NEW for each in plain)
                assert tokens == plain, "speculation has changed a token"
                seconds.append((off_s, on_s, off_s / on_s, wall_off_s / wall_on_s))
            off_s, on_s, ratio, wall_ratio = (
                statistics.median(each) for each in zip(*seconds, strict=True)
            )
            counts = engine.counts
            accepted = counts.accepted_tokens / max(counts.guessed_tokens, 1)
            rows.append({
                "share": share, "requests": num, "temperature": temperature,
                "off_tokens_per_cpu_s": num * NUM_NEW / off_s,
                "on_tokens_per_cpu_s": num * NUM_NEW / on_s,
                "ratio": ratio, "wall_ratio": wall_ratio, "accepted": accepted,
                "guessed": counts.guessed_tokens, "steps": counts.steps,
            })  # fmt: skip
            print(
                f"{share:.0%} {num} {temperature} | {num * NUM_NEW / off_s:.0f} "
                f"{num * NUM_NEW / on_s:.0f} {ratio:.2f}x (clock {wall_ratio:.2f}x) | "
                f"{accepted:.0%} of {counts.guessed_tokens}, {counts.steps} steps",
                flush=True,
            )
    if options.out is not None:
        found = {"device": device_name("cpu"), "rounds": options.rounds, "rows": rows}
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
