"""Ranks of ep generate what one process does, to the bit of each log-probability."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from models_and_prompts import DEMAND, NUM_NEW, prompts, scored
from served_model import letters
from small_models import deepseek_v3, mixtral, olmoe, qwen3_moe

from phalanx.hugging_face.convert import convert, decoder_of
from phalanx.infer import assembly
from phalanx.infer.assembly import with_engine
from phalanx.infer.engine import Engine
from phalanx.infer.options import EngineConfig, Sampling
from phalanx.infer.served import Served
from phalanx.models.decoder import Decoder
from phalanx.strategy import Strategy

GREEDY = Sampling(max_tokens=NUM_NEW, temperature=0, ignore_end=True)
SAMPLED = [
    Sampling(max_tokens=NUM_NEW, temperature=1.3, top_p=0.95, seed=seed, ignore_end=True)
    for seed in range(16)
]
MODELS = {  # of widths of which torch computes every row by vectors alone
    "mixtral": functools.partial(mixtral, intermediate_size=64),
    "olmoe": functools.partial(olmoe, intermediate_size=32),
    "qwen3-moe": functools.partial(qwen3_moe, moe_intermediate_size=32),
    "deepseek-v3": functools.partial(deepseek_v3, moe_intermediate_size=32),
}


def written(folder: Path, of: str, seed: int = 0) -> Path:
    """Write a model with random weights and its tokenizer as transformers does."""
    torch.manual_seed(seed)
    model = MODELS[of]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder / "hf")
    (folder / "hf" / "tokenizer.json").write_text(letters())
    return folder / "hf"


def run(served: Served, engine: Engine) -> list[Any]:
    """Return preemptions, cached tokens, greedy and sampled tokens, and scores of prompts."""
    engine._num_ids = None  # pyright: ignore[reportPrivateUsage]
    greedy = engine.generate(prompts(16), GREEDY)
    sampled = engine.generate(prompts(16), SAMPLED)
    scores = scored(engine, 8, max_tokens=0)
    scheduler = engine.scheduler
    return [scheduler.num_preemptions, scheduler.num_cached_tokens, greedy, sampled, scores]


CELLS = [
    ("ep2", "mixtral", 4, 64, True, False),
    *(
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in (
            ("ep2", "qwen3-moe", 16, 7, True, True),
            ("ep2", "deepseek-v3", 4, 64, True, False),
            ("ep2", "deepseek-v3", 16, 512, False, True),
            ("ep4", "deepseek-v3", 16, 23, True, False),
            ("ep3", "qwen3-moe", 1, 64, True, False),
            ("ep4", "olmoe", 4, 64, False, False),
        )
    ),
]


@pytest.mark.parametrize(
    ("strategy", "of", "block_size", "budget", "has_prefix_cache", "is_ample"), CELLS
)
def test_tokens_and_scores_are_those_of_one_process_to_the_bit(
    strategy: str,
    of: str,
    block_size: int,
    budget: int,
    has_prefix_cache: bool,
    is_ample: bool,
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "precision": "float32",
        "cache_tokens": 2 * DEMAND if is_ample else int(0.2 * DEMAND),
        "block_size": block_size,
        "budget": budget,
        "prefix_cache": has_prefix_cache,
        "threads": 1,
    }
    folder = written(tmp_path, of)
    found = with_engine(folder, EngineConfig(strategy=strategy, **settings), run)
    alone = with_engine(folder, EngineConfig(**settings), run)
    assert found == alone
    num_preemptions, num_cached, greedy, sampled, _ = found
    assert sampled != greedy
    assert (num_cached > 0) is has_prefix_cache
    if budget > 7:
        assert (num_preemptions > 0) is not is_ample


def load_and_run(checkpoint: Path, served: Served, engine: Engine) -> list[list[int]]:
    engine._num_ids = None  # pyright: ignore[reportPrivateUsage]
    before = engine.generate(prompts(4), GREEDY)
    engine.load(checkpoint)
    after = engine.generate(prompts(4), GREEDY)
    assert after != before
    return after


def test_ranks_load_a_later_checkpoint(tmp_path: Path) -> None:
    early = written(tmp_path / "early", "qwen3-moe")
    convert(written(tmp_path / "late", "qwen3-moe", seed=1), tmp_path / "checkpoint")
    config = EngineConfig(strategy="ep2", precision="float32", cache_tokens=640)
    found = with_engine(early, config, functools.partial(load_and_run, tmp_path / "checkpoint"))
    alone = with_engine(tmp_path / "late" / "hf", EngineConfig(precision="float32"), tokens_of)
    assert found == alone


def tokens_of(_: Served, engine: Engine) -> list[list[int]]:
    engine._num_ids = None  # pyright: ignore[reportPrivateUsage]
    return engine.generate(prompts(4), GREEDY)


def test_ranks_that_share_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = decoder_of(MODELS["mixtral"]()).shape
    model = Decoder(shape)
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    monkeypatch.setattr(assembly, "free_memory_bytes", lambda device: 16 * token_bytes * 100)
    config, ep2 = EngineConfig(slots=1000), Strategy.parse("ep2")
    # Each rank has all heads, and half of the memory.
    assert assembly.num_blocks_of(config, model, ep2) == int(assembly.CACHE_PART * 100 / 2)
