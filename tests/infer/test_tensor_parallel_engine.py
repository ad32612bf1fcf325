"""Two ranks of tp generate what one process does."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from models_and_prompts import NUM_NEW, expected, prompts
from served_model import published

from phalanx.cli.main import main
from phalanx.infer.options import EngineConfig, Sampling
from phalanx.infer.ranks import with_engine
from phalanx.infer.served import Served
from phalanx.infer.texts import TextEngine

GREEDY = Sampling(max_tokens=NUM_NEW, temperature=0, ignore_end=True)


def write(out: Path, served: Served, texts: TextEngine) -> None:
    """Generate on the first rank, and write the tokens to a file."""
    engine = texts.engine
    engine._num_ids = None  # pyright: ignore[reportPrivateUsage]
    tokens = engine.generate(prompts(32), GREEDY)
    found = [engine.scheduler.num_preemptions, engine.counts.found_tokens, tokens]
    out.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("strategy", "cache_tokens"),
    [
        ("tp2", 490),
        pytest.param("tp2", 2800, marks=pytest.mark.slow),
        pytest.param("tp2:megatron", 490, marks=pytest.mark.slow),
    ],
)
def test_tokens_equal_generate(strategy: str, cache_tokens: int, tmp_path: Path) -> None:
    config = EngineConfig(
        strategy=strategy, precision="float32", cache_tokens=cache_tokens, block_size=4, budget=64
    )
    out = tmp_path / "found.json"
    with_engine(published(tmp_path), config, functools.partial(write, out))
    num_preemptions, num_found, tokens = json.loads(out.read_text())
    assert tokens == expected("llama", 32)
    assert num_found > 0 and (num_preemptions > 0) is (cache_tokens == 490)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("dp2", "strategy is dp2; generation splits a model by tp alone"),
        ("tp4:2d", "the nearest are tp4 and tp4:megatron"),
        ("tp3", "3"),
        ("tpx", "tpx"),
        ("tp2 --max-tokens 500", "the model has 128 positions"),  # what the first rank finds
    ],
)
def test_another_strategy_is_refused(
    strategy: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(published(tmp_path)), "--prompt", "a", "--strategy"]
    assert main([*words, *strategy.split()]) == 2
    assert message in capsys.readouterr().err
