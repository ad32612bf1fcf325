"""A server that follows a run serves the weights of each checkpoint that its training writes."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from served_model import Client, published, serving

from phalanx import train_decoder
from phalanx.checkpoint import manifest
from phalanx.config import ShapeConfig
from phalanx.errors import CheckpointError, ConfigError
from phalanx.infer.assembly import engine_of, with_engine
from phalanx.infer.engine import Engine
from phalanx.infer.engine_thread import follow
from phalanx.infer.options import EngineConfig, Sampling
from phalanx.infer.served import Served, open_served
from small_run import small_run

BODY: dict[str, Any] = {
    "prompt": "The square of 7 is", "temperature": 0, "max_tokens": 20, "ignore_eos": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the checkpoints of one run after 25 and after 50 steps."""
    folder = tmp_path_factory.mktemp("trained")
    shape = ShapeConfig(
        num_layers=1, hidden=16, num_heads=2, ffn=24, vocab_size=300, max_seq_len=64
    )
    train_decoder(small_run(folder, strategy="dp1", steps=50, shape=shape, save="every=25"))
    early, late = (folder / f"run/checkpoints/step-000000{n}" for n in (25, 50))
    return early, late


def appear(checkpoint: Path, run: Path, name: str, *, is_broken: bool = False) -> None:
    """Let a checkpoint appear in a run folder, whole at once."""
    copied = Path(shutil.copytree(checkpoint, run / "copied"))
    shutil.copy(checkpoint.parents[1] / "tokenizer.json", run)
    for file in copied.glob("*.safetensors"):
        if is_broken:
            file.write_bytes(file.read_bytes()[:-1])
    (run / "checkpoints").mkdir(exist_ok=True)
    copied.rename(run / "checkpoints" / name)


def text_of(client: Client) -> str:
    return client.ask("/v1/completions", BODY)[1]["choices"][0]["text"]


def test_a_server_takes_the_weights_of_a_later_checkpoint(
    trained: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = trained
    config: dict[str, Any] = {"precision": "float64", "cache_tokens": 640, "block_size": 4}
    with serving(late, **config) as fresh:
        expected = text_of(fresh)
    run = tmp_path / "run"
    appear(early, run, early.name)
    with serving(run, follow_s=0.02, **config) as client:
        before = text_of(client)
        assert client.ask("/stats")[1]["checkpoint"] == early.name
        appear(late, run, "step-00000030", is_broken=True)
        while "step-00000030" not in caplog.text:
            time.sleep(0.01)
        assert text_of(client) == before
        appear(late, run, late.name)
        while client.ask("/stats")[1]["checkpoint"] != late.name:
            time.sleep(0.01)
        answer = client.ask("/v1/completions", BODY)[1]
        assert answer["choices"][0]["text"] == expected != before
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def unreadable(run: Path) -> dict[int, Path]:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_checkpoint_that_memory_has_no_room_for_is_tried_again(
    trained: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    early, late = trained
    run = tmp_path / "run"
    appear(early, run, early.name)
    with serving(run, follow_s=0.02, cache_tokens=640) as client:
        runner: Any = client.engine._logits  # pyright: ignore[reportPrivateUsage]
        before, own = text_of(client), runner.read

        def read(folder: Path) -> Any:
            raise torch.OutOfMemoryError("out of memory")

        runner.read = read
        appear(late, run, late.name)
        while caplog.text.count("the weights stay as they are: OutOfMemoryError") < 2:
            time.sleep(0.01)
        assert text_of(client) == before and client.ask("/health")[0] == 200
        runner.read = own
        with monkeypatch.context() as patch:  # a server of files that does not answer
            patch.setattr(manifest, "complete_checkpoints", unreadable)
            while "cannot look for a later checkpoint: Input/output error" not in caplog.text:
                time.sleep(0.01)
        while client.ask("/stats")[1]["checkpoint"] != late.name:
            time.sleep(0.01)
        assert text_of(client) != before


def test_attempts_to_load_a_damaged_checkpoint_become_rarer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, attempts = list[int](), list[tuple[str, int]]()
    found = {1: tmp_path / "1", 2: tmp_path / "2"}

    def whole(run: Path) -> dict[int, Path]:
        looks.append(len(looks) + 1)
        if len(looks) == 40:
            found[3] = tmp_path / "3"
        return found

    def load(folder: Path) -> Future[bool]:
        attempts.append((folder.name, looks[-1]))
        loaded: Future[bool] = Future()
        loaded.set_result(folder.name == "3")
        return loaded

    async def follow_for_a_while() -> None:
        thread: Any = SimpleNamespace(load=load)
        follower = asyncio.ensure_future(follow(tmp_path, found[1], 0, thread))
        while len(looks) < 60:
            await asyncio.sleep(0)
        follower.cancel()

    monkeypatch.setattr(manifest, "complete_checkpoints", whole)
    asyncio.run(follow_for_a_while())
    assert attempts == [("2", look) for look in (1, 2, 4, 8, 16, 32)] + [("3", 40)]


def load_and_write(late: Path, other: Path, out: Path, served: Served, engine: Engine) -> None:
    """Load a checkpoint on the ranks of tp, after one that cannot be loaded."""
    prompt = served.encode(BODY["prompt"])
    with pytest.raises(CheckpointError, match="of a different shape"):
        engine.load(other)
    engine.load(late)
    sampling = Sampling(max_tokens=20, temperature=0, ignore_end=True)
    out.write_text(str(engine.generate([prompt], sampling)))


def test_ranks_of_tp_take_them_too(trained: tuple[Path, Path], tmp_path: Path) -> None:
    early, late = trained
    shape = ShapeConfig(
        num_layers=1, hidden=16, num_heads=2, ffn=32, vocab_size=300, max_seq_len=64
    )
    train_decoder(small_run(tmp_path, strategy="dp1", steps=1, shape=shape))
    other = tmp_path / "run/checkpoints/step-00000001"
    config = EngineConfig(precision="float64", cache_tokens=640, strategy="tp2")
    out = tmp_path / "found"
    with_engine(early, config, functools.partial(load_and_write, late, other, out))
    served = open_served(late)
    alone = EngineConfig(precision="float64", cache_tokens=640)
    sampling = Sampling(max_tokens=20, temperature=0, ignore_end=True)
    prompt = served.encode(BODY["prompt"])
    assert out.read_text() == str(engine_of(served, alone).generate([prompt], sampling))


def test_a_model_of_no_run_cannot_be_followed(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="is not a checkpoint of a run folder"),
        serving(published(tmp_path), follow_s=1.0),
    ):
        pass
