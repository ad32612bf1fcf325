"""Two ranks of tp generate what one process does."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from models_and_prompts import (
    DEMAND,
    GRID,
    NUM_NEW,
    expected,
    expected_scores,
    prompts,
    scored,
    twins,
)
from served_model import published

from phalanx.checkpoint import manifest
from phalanx.cli.main import main
from phalanx.errors import CheckpointError, RankFailed
from phalanx.infer import assembly
from phalanx.infer.assembly import with_engine
from phalanx.infer.engine import Engine
from phalanx.infer.options import EngineConfig, Sampling
from phalanx.infer.served import Served
from phalanx.launch.heartbeat import PULSE, Beat
from phalanx.launch.heartbeat_monitor import HeartbeatMonitor
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.strategy import Strategy

GREEDY = Sampling(max_tokens=NUM_NEW, temperature=0, ignore_end=True)


def write(out: Path, served: Served, engine: Engine) -> None:
    """Generate on the first rank, and write the tokens to a file."""
    engine._num_ids = None  # pyright: ignore[reportPrivateUsage]
    tokens = engine.generate(prompts(32), GREEDY)
    found = [engine.scheduler.num_preemptions, engine.scheduler.num_cached_tokens, tokens]
    found.append(scored(engine, 8, max_tokens=0))
    out.write_text(json.dumps(found))


QUICK = (4, 64, True, False)
CELLS = [
    *(("tp2", *cell) for cell in GRID),
    ("tp2:megatron", *QUICK),
    ("tp2:megatron", 16, 512, True, True),
]


@pytest.mark.parametrize(
    ("strategy", "block_size", "budget", "has_prefix_cache", "is_ample"),
    [pytest.param(*c, marks=[] if c == ("tp2", *QUICK) else pytest.mark.slow) for c in CELLS],
)
def test_tokens_equal_generate(
    strategy: str,
    block_size: int,
    budget: int,
    has_prefix_cache: bool,
    is_ample: bool,
    tmp_path: Path,
) -> None:
    config = EngineConfig(
        strategy=strategy,
        precision="float32",
        cache_tokens=2 * DEMAND if is_ample else int(0.35 * DEMAND),
        block_size=block_size,
        budget=budget,
        prefix_cache=has_prefix_cache,
        speculative="ngram,3,2,1" if budget == 64 else "none",
    )
    out = tmp_path / "found.json"
    with_engine(published(tmp_path), config, functools.partial(write, out))
    num_preemptions, num_found, tokens, scores = json.loads(out.read_text())
    assert tokens == expected("llama", 32)
    for ours, theirs in zip(scores, expected_scores("llama", 8), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-6)
    assert (num_found > 0) is has_prefix_cache
    if budget > 7:
        assert (num_preemptions > 0) is not is_ample


@pytest.mark.parametrize(
    ("strategy", "of"),
    [
        ("tp2", "olmoe"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *(("tp2:megatron", "olmoe"), ("tp2", "mixtral"), ("tp2", "qwen2-moe")),
                *(("ep2,tp2", "mixtral"), ("ep2,tp2:megatron", "deepseek-v3")),
            )
        ),
    ],
)
def test_experts_are_split_too(strategy: str, of: str, tmp_path: Path) -> None:
    config = EngineConfig(strategy=strategy, precision="float32", cache_tokens=480, budget=23)
    found = with_engine(published(tmp_path, of=of), config, tokens_of)
    assert found == expected(of, 8)


def tokens_of(_: Served, engine: Engine) -> list[list[int]]:
    engine._num_ids = None  # pyright: ignore[reportPrivateUsage]
    return engine.generate(prompts(8), GREEDY)


def rest(until: Path, served: Served, engine: Engine) -> None:
    end_s = time.monotonic() + 60
    while not until.exists() and time.monotonic() < end_s:
        time.sleep(0.05)


def test_the_ranks_of_an_idle_server_are_not_stalled_but_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = tmp_path / "heard"

    def record(_: HeartbeatMonitor, rank: int, beat: Beat) -> None:
        if (beat.doing, beat.waits) == ("waiting for requests", True):
            heard.touch()

    monkeypatch.setattr(HeartbeatMonitor, "record", record)
    config = EngineConfig(strategy="tp2", precision="float32")
    with_engine(published(tmp_path), config, functools.partial(rest, heard))
    assert heard.exists()


def generate_when_asked_to_stop(served: Served, engine: Engine) -> tuple[int, list[list[int]]]:
    PULSE.heed()
    while not PULSE.stop_signal:
        time.sleep(0.01)
    engine._num_ids = None  # pyright: ignore[reportPrivateUsage]
    return PULSE.stop_signal, engine.generate(prompts(2), GREEDY)


def test_ranks_answer_what_runs_after_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, sent = HeartbeatMonitor.record, list[int]()

    def record(self: HeartbeatMonitor, rank: int, beat: Beat) -> None:
        own(self, rank, beat)
        if self.handles_stop() and not sent:
            sent.append(rank)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(HeartbeatMonitor, "record", record)
    config = EngineConfig(strategy="tp2", precision="float32")
    found = with_engine(published(tmp_path), config, generate_when_asked_to_stop)
    assert found == (signal.SIGTERM, expected("llama", 2))


def opened_apart(run: Path, found: list[list[int]]) -> str:
    """Open a run; return the checkpoint, if each rank finds these in turn."""
    mine = iter(found[dist.get_rank()])

    def opened(folder: Path, _: object = ()) -> Any:
        return SimpleNamespace(
            weights=SimpleNamespace(folder=manifest.folder_of(folder, next(mine)))
        )

    assembly.open_served = opened
    try:
        return assembly._open_together(run, ()).weights.folder.name  # pyright: ignore[reportPrivateUsage]
    except CheckpointError as error:
        return str(error)


def test_ranks_serve_one_checkpoint_of_a_run_that_saves_meanwhile(tmp_path: Path) -> None:
    found = [[10, 20], [20, 20]]
    assert run_ranks(opened_apart, 2, tmp_path, found, threads=1) == 2 * ["step-00000020"]
    found = [[10, 20, 30], [20, 30, 40]]
    words, same = run_ranks(opened_apart, 2, tmp_path, found, threads=1)
    assert words == same
    assert "step-00000030, " in words and "step-00000040, because the run saves too often" in words


def fail_amid_a_step(out: Path, served: Served, engine: Engine) -> None:
    """Let the first rank fail after the other has begun the step; a server catches the error."""
    runner: Any = engine._logits._runner  # pyright: ignore

    def fails(*args: Any) -> None:
        raise ValueError("a kernel has failed")

    runner.model.read = fails
    engine.add(served.encode("Once"), GREEDY)
    with pytest.raises(ValueError, match="a kernel"):
        engine.step()
    out.write_text("it failed")


def test_a_first_rank_that_fails_amid_a_step_leaves_none_waiting(tmp_path: Path) -> None:
    config = EngineConfig(strategy="tp2", precision="float32", cache_tokens=490)
    out = tmp_path / "out"
    with pytest.raises(RankFailed, match="a kernel has failed"):
        with_engine(published(tmp_path), config, functools.partial(fail_amid_a_step, out))
    assert out.read_text() == "it failed"


def test_the_first_rank_ends_the_others_after_the_current_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread of the engine runs a step when the work that has started it returns."""
    sent: list[Any] = []
    monkeypatch.setattr(assembly, "broadcast_object", sent.append)
    has_ended = threading.Event()

    def end() -> None:
        leading.end()
        has_ended.set()

    ending = threading.Thread(target=end)

    def run(step: Any) -> Any:
        ending.start()
        assert not has_ended.wait(0.1)
        assert sent == [step]
        return step

    leading = assembly._BroadcastingRunner(cast(Any, run))  # pyright: ignore[reportPrivateUsage]
    step = cast(Any, "a step")
    assert leading(step) is step
    ending.join()
    assert sent == [step, None]
    assert leading._lock.locked()  # pyright: ignore[reportPrivateUsage]


def test_the_cache_takes_the_memory_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = twins("llama")
    shape = model.shape
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    monkeypatch.setattr(assembly, "free_memory_bytes", lambda device: 16 * token_bytes * 100)
    config, tp2 = EngineConfig(slots=1000), Strategy.parse("tp2")
    most = int(assembly.CACHE_PART * 100)
    assert assembly.num_blocks_of(config, model, Strategy()) == most
    assert assembly.num_blocks_of(config, model, tp2) == most  # each holds half of all blocks
    elsewhere = Decoder(shape).to("meta")  # as a GPU, no memory of this host
    assert assembly.num_blocks_of(config, elsewhere, tp2) == 2 * most


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("dp2", "strategy is dp2; generation splits a model only by tp, in the layouts 1d"),
        ("ep2", "the model is a Decoder without experts; the nearest is dp2"),
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
