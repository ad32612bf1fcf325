"""Small decoders with their transformers twins, engines over them, and prompts."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "hugging_face"))

from small_models import model_of

from phalanx.hugging_face.convert import decoder_of
from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling
from phalanx.infer.paged import KVCache
from phalanx.infer.pool import BlockPool
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Scheduler
from phalanx.models.decoder import Decoder

VOCABULARY = 97
NUM_NEW = 24
DEMAND = 32 * 44
"""Positions that 32 prompts and their continuations fill, about."""

GRID = list(itertools.product((1, 4, 16), (1, 7, 64, 512), (True, False), (True, False)))
"""Block sizes, budgets, whether prefixes are found, and whether the pool is ample."""


@functools.cache
def twins(name: str) -> tuple[Decoder, PreTrainedModel]:
    """Return a decoder and the model of transformers that it computes."""
    theirs = model_of(name)
    return decoder_of(theirs).eval(), theirs


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of 1 to 36 tokens, of which half begin alike."""
    draw = random.Random(seed)
    begin = [draw.randrange(VOCABULARY) for _ in range(18)]
    return [
        (begin if number % 2 else [])
        + [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 18))]
        for number in range(num)
    ]


@functools.cache
def expected(name: str, num: int) -> list[list[int]]:
    """Return what `generate` of transformers continues each prompt with, greedily, one by one."""
    _, theirs = twins(name)
    found: list[list[int]] = []
    for prompt in prompts(num):
        ids: Any = theirs.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)  # pyright: ignore[reportCallIssue]
        found.append(ids[0, len(prompt) :].tolist())
    return found


@functools.cache
def expected_scores(name: str, num: int) -> list[list[float]]:
    """Return the log-probability that transformers gives each token of a prompt but its first."""
    _, theirs = twins(name)
    found: list[list[float]] = []
    for prompt in prompts(num):
        with torch.no_grad():
            logprobs = theirs(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        found.append([float(logprobs[at, token]) for at, token in enumerate(prompt[1:])])
    return found


def scored(engine: Engine, num: int, **options: Any) -> list[list[float]]:
    """Return the log-probabilities that an engine gives the tokens of prompts but their first."""
    sampling = Sampling(prompt_logprobs=1, temperature=0, ignore_end=True, **options)
    requests = [engine.add(prompt, sampling, sampling) for prompt in prompts(num)]
    while engine.scheduler.has_work:
        engine.step()
    found: list[list[float]] = []
    for first, second in requests:
        assert first.prompt_scores is second.prompt_scores and first.prompt_scores[0] is None
        scores = [score for score in first.prompt_scores if score is not None]
        assert all((each.rank == 1) == (each.logprob == each.top[0][1]) for each in scores)
        found.append([each.logprob for each in scores])
    return found


def engine(
    model: Decoder,
    *,
    block_size: int = 16,
    num_tokens: int = 4096,
    has_prefix_cache: bool = True,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Engine:
    """Return an engine over a decoder whose cache has room for `num_tokens`."""
    pool = BlockPool(num_tokens // block_size, block_size, has_prefix_cache=has_prefix_cache)
    cache = KVCache(model.shape, pool, dtype, torch.device("cpu"))
    scheduler = Scheduler(pool, **options)
    return Engine(ModelRunner(model, cache), scheduler, max_seq_len=model.shape.max_seq_len)
