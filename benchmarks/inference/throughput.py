"""Tokens a second of one engine under each batching, and of transformers, in turns.

    python benchmarks/inference/throughput.py --rounds 5 --out FILE.json [--device cuda]

A Llama of 21 M parameters with random weights, float32, one thread. 32 requests at once: prompts of
8 to 128 tokens, and 8, 16, 32 or 128 new tokens each, greedily; all engines give the same tokens.

On a GPU, a Llama of 1.2 B parameters in bfloat16, in which near ties fall either way: the share of
requests that agree with the first engine is printed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import random
import re
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from phalanx.hugging_face.convert import decoder_of
from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling
from phalanx.infer.paged import KVCache
from phalanx.infer.pool import BlockPool
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Scheduler
from phalanx.measure.environment import device_name
from phalanx.models.decoder import Decoder

VOCABULARY = 4096
CACHE_TOKENS = 8192
Found = tuple[list[list[int]], int]
"""The new tokens of each request, and the steps that were computed (0 if unknown)."""


SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6,
            "num_attention_heads": 8, "num_key_value_heads": 4},
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip


def twins(max_seq_len: int = 512, device: str = "cpu") -> tuple[Decoder, Any]:
    """Return the same model, ours and transformers'."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY if device == "cpu" else 128_256,
        max_position_embeddings=max_seq_len,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **SIZES[device],
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        theirs: Any = LlamaForCausalLM(config)
    theirs = theirs.to(dtype).eval()
    return decoder_of(theirs).to(device, dtype).eval(), theirs


def workload(num: int) -> tuple[list[list[int]], list[int]]:
    """Return prompts, and how many tokens each is continued by."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(8, 128))] for _ in range(num)
    ]
    return prompts, [draw.choice((8, 16, 32, 128)) for _ in range(num)]


def ours(
    model: Decoder, prompts: list[list[int]], lengths: list[int], slots: int, *, is_static: bool
) -> Found:
    """Continue by our engine; in static batches none begins before all of the one before ended."""
    pool = BlockPool(CACHE_TOKENS // 16, 16)
    weight = next(model.parameters())
    cache = KVCache(model.shape, pool, weight.dtype, weight.device)
    scheduler = Scheduler(pool, budget=512, slots=slots)
    engine = Engine(ModelRunner(model, cache), scheduler, max_seq_len=model.shape.max_seq_len)
    samplings = [Sampling(max_tokens=length, temperature=0) for length in lengths]
    found: list[list[int]] = []
    size = slots if is_static else len(prompts)
    for start in range(0, len(prompts), size):
        found += engine.generate(prompts[start : start + size], samplings[start : start + size])
    return found, engine.counts.steps


def static_batches(theirs: Any, prompts: list[list[int]], lengths: list[int], slots: int) -> Found:
    """Continue padded batches by `generate`, each until its longest has ended."""
    found: list[list[int]] = []
    steps = 0
    for start in range(0, len(prompts), slots):
        batch = prompts[start : start + slots]
        longest = max(map(len, batch))
        rows = [([0] * (longest - len(each)), each) for each in batch]
        ids = torch.tensor([[*pads, *each] for pads, each in rows], device=theirs.device)
        seen = [[*pads, *[1] * len(each)] for pads, each in rows]
        mask = torch.tensor(seen, device=theirs.device)
        most = max(lengths[start : start + slots])
        out = theirs.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False)
        steps += most
        for row, length in zip(out, lengths[start : start + slots], strict=True):
            found.append(row[longest : longest + length].tolist())
    return found, steps


def continuous(theirs: Any, prompts: list[list[int]], lengths: list[int], slots: int) -> Found:
    """Continue by transformers' continuous batching."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=32, num_blocks=CACHE_TOKENS // 32, max_batch_tokens=512,
        max_requests_per_batch=slots,
    )  # fmt: skip
    manager = theirs.init_continuous_batching(
        generation_config=config, continuous_batching_config=batching
    )
    manager.start()
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        manager.add_request(prompt, request_id=str(number), max_new_tokens=length)
    found: dict[int, list[int]] = {}
    while len(found) < len(prompts):
        result = manager.get_result(timeout=60)
        if result is not None and result.is_finished():
            found[int(result.request_id)] = list(result.generated_tokens)
    manager.stop(block=True)
    return [found[number] for number in range(len(prompts))], 0


def engines(num: int, device: str) -> dict[str, Callable[[], Found]]:
    model, theirs = twins(device=device)
    load = workload(num)
    named: dict[str, Callable[[], Found]] = {}
    for batching, slots in (("rolling", 32), ("rolling", 8), ("static", 8)):
        named[f"phalanx {batching}, {slots} slots"] = lambda b=batching, s=slots: ours(
            model, *load, s, is_static=b == "static"
        )
    for slots in (32, 8):
        named[f"transformers continuous, {slots} requests"] = lambda s=slots: continuous(
            theirs, *load, s
        )
    named["transformers generate, batches of 8"] = lambda: static_batches(theirs, *load, 8)
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    named = engines(options.requests, options.device)
    named = {name: run for name, run in named.items() if re.search(options.only, name)}
    rates: dict[str, list[float]] = {name: [] for name in named}
    agree: dict[str, int] = {}
    steps: dict[str, int] = {}
    expected: list[list[int]] | None = None
    for number in range(options.rounds + 1):  # the first warms up
        for name, run in named.items():
            begin_s = time.perf_counter()
            tokens, steps[name] = run()
            took_s = time.perf_counter() - begin_s
            expected = expected or tokens
            agree[name] = equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
            if options.device == "cpu":
                assert equal == len(tokens), f"{name}: {equal} of {len(tokens)} are equal"
            if number:
                rates[name].append(sum(map(len, tokens)) / took_s)
    last = rates[list(named)[-1]]
    for name, values in rates.items():
        median = statistics.median(values)
        ratio = statistics.median(a / b for a, b in zip(values, last, strict=True))
        print(
            f"| {name} | {median:,.0f} | {min(values):,.0f} | {max(values):,.0f} | "
            f"{steps[name] or ''} | {ratio:.2f}x |"
            + f" {agree[name]} |"
            * (options.device != "cpu")
        )
    if options.out is not None:
        about = {"date": str(datetime.date.today()), "machine": device_name(options.device)}
        content = {**about, "torch": torch.__version__, "steps": steps, "tokens_per_s": rates}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
