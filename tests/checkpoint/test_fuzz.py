"""Thousands of damaged and forged checkpoints: each is read, or refused by one CheckpointError.

Damage is of bytes and of values, in every file; where it is forged, all checksums agree with it, so
that they protect nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from torch.optim import AdamW

from phalanx.checkpoint import index, manifest, state
from phalanx.checkpoint.tensor_file import SUFFIX
from phalanx.checkpoint.weights import open_checkpoint, sizes_of
from phalanx.errors import CheckpointError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.storage import checksum

SHAPE = ModelShape(
    vocab_size=11, num_layers=1, hidden=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn=12,
    max_seq_len=8,
)  # fmt: skip

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 7, 1 << 31, 1 << 62, 1 << 64, 10**30, 0.5, float("nan"), "", "x",
    "..", "../x", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, [], {}, [[]], [0], [-1], ["x"],
    [[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]], {"a": {"b": []}}, "F32", "BF16", "I8", "F4",
    "rank-00000.safetensors", "index.json", "manifest.json", "model.embedding.weight",
]  # fmt: skip

WATCHED = (
    "compile", "exec", "import", "os.exec", "os.fork", "os.posix_spawn", "os.system",
    "pickle.find_class", "socket.connect", "subprocess.Popen", "marshal.loads", "ctypes.dlopen",
    "shutil.rmtree", "os.remove", "os.rename", "os.mkdir", "os.putenv",
)  # fmt: skip
"""What reading a checkpoint never does, by the names of Python's audit events."""


class Watch:
    """Notes what this process does while it is on; opened files are noted by their folder."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: Counter[str] = Counter()
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_on and event in WATCHED:
            self.seen[event] += 1
        elif self.is_on and event == "open" and isinstance(args[0], str | bytes):
            self.seen[f"open in {Path(os.fsdecode(args[0])).parent}"] += 1


def mutate_bytes(draw: random.Random, content: bytes) -> bytes:
    """Flip bits, cut, insert or repeat."""
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 3, 20])):
        place = draw.randrange(len(changed) + 1)
        how = draw.randrange(5)
        if how < 2 and place < len(changed):
            changed[place] ^= 1 << draw.randrange(8)
        elif how == 2:
            del changed[place : place + draw.choice([1, 8, 1000])]
        elif how == 3:
            changed[place:place] = draw.randbytes(draw.choice([1, 8, 100]))
        else:
            changed[place:place] = changed[place : place + draw.choice([1, 10, 100])]
    return bytes(changed)


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Return each place of a tree of values: its container, and its key there."""
    found: list[tuple[Any, Any]] = []
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += nodes(value[key])
    return found


def mutate_values(draw: random.Random, content: Any) -> Any:
    """Replace, remove, repeat, rename or move values of a tree."""
    content = copy.deepcopy(content)
    for _ in range(draw.choice([1, 1, 2, 5])):
        places = nodes(content)
        if not places:
            break
        container, key = draw.choice(places)
        other, other_key = draw.choice(places)
        how = draw.randrange(6)
        if how < 2:
            container[key] = copy.deepcopy(draw.choice(NASTY))
        elif how == 2 and type(container[key]) is int:
            container[key] += draw.choice([-1, 1, 8, -container[key]])
        elif how == 3:
            del container[key]
        elif how == 4:
            container[key] = copy.deepcopy(other[other_key])
        elif isinstance(container, dict):
            container[draw.choice([str(key) + "x", "", "../x", str(other_key)])] = container[key]
        else:
            container.insert(key, container[key])
    return content


def header_of(content: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def damage(draw: random.Random, folder: Path, good: dict[str, bytes]) -> None:
    """Change one file, or two; let the checksums agree or not."""
    about = json.loads(good[manifest.NAME])
    for _ in range(draw.choice([1, 1, 1, 2])):
        name = draw.choice([*good, manifest.NAME, index.NAME])
        content = (folder / name).read_bytes()
        if name != manifest.NAME and draw.random() < 0.5:
            content = mutate_bytes(draw, content)
        elif name == manifest.NAME and draw.random() < 0.2:
            (folder / name).write_bytes(mutate_bytes(draw, content))
            return
        elif name == manifest.NAME:
            about = mutate_values(draw, about)
        elif name.endswith(SUFFIX):
            header, data = header_of(good[name])
            content = with_header(mutate_values(draw, header), data)
        else:
            content = json.dumps(mutate_values(draw, json.loads(good[name]))).encode()
        if name != manifest.NAME:
            (folder / name).write_bytes(content)
    is_forged = draw.random() < 0.8
    files = about.get("files") if isinstance(about, dict) else None
    if is_forged and isinstance(files, dict):
        for name in set(files) & set(good):
            files[name] = list(checksum(folder / name))
    if is_forged and isinstance(about, dict):
        about.pop("sha256", None)
        about["sha256"] = manifest._sha256(about)
    (folder / manifest.NAME).write_text(json.dumps(about))


def save_decoder(run: Path) -> tuple[Decoder, AdamW]:
    model = Decoder(SHAPE)
    model.initialize(0)
    model.register_buffer("count", torch.tensor(3, dtype=torch.int64), persistent=False)
    optimizer = AdamW(model.parameters())
    tokens = torch.arange(8)[None]
    model(tokens, tokens).backward()
    optimizer.step()
    about = dataclasses.replace(runs.about(1), shape=dataclasses.asdict(SHAPE))
    with runs.Saver(run) as saver:
        saver.begin(model, optimizer, about)
    return model, optimizer


def attempt(read: Callable[[], object]) -> str:
    try:
        read()
    except CheckpointError as error:
        assert len(str(error)) < 3000 and str(error).encode()
        return "refused"
    return "read"


def read_weights(folder: Path) -> None:
    weights = open_checkpoint(folder)
    for name in sizes_of(weights.shape):
        weights.read(name)


def fuzz(run: Path, seed: int, num_trials: int) -> dict[str, Any]:
    """Damage a checkpoint again and again, and read it in both ways."""
    model, optimizer = save_decoder(run)
    source = manifest.find(run)
    good = {path.name: path.read_bytes() for path in source.iterdir()}
    folder = run / "damaged"
    draw, watch = random.Random(seed), Watch()
    outcomes: Counter[str] = Counter()
    longest_s = 0.0
    for number in range(num_trials + 20):  # the first ones import what they need
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in good.items():
            (folder / name).write_bytes(content)
        damage(draw, folder, good)
        generators, modules = torch.get_rng_state(), set(sys.modules)
        start_s = time.process_time()
        watch.is_on = number >= 20
        found = [
            attempt(lambda: state.load(folder, model, optimizer)),
            attempt(lambda: read_weights(folder)),
        ]
        watch.is_on = False
        if number < 20:
            before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            continue
        longest_s = max(longest_s, time.process_time() - start_s)
        outcomes.update(found)
        assert set(sys.modules) == modules
        if found[0] == "refused":
            assert torch.equal(torch.get_rng_state(), generators)
        torch.set_rng_state(generators)
    assert torch.get_default_dtype() == torch.float32
    return {
        "outcomes": dict(outcomes),
        "seen": {event for event in watch.seen if event != f"open in {folder}"},
        "longest_s": longest_s,
        "grown_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes,
    }


@pytest.mark.parametrize(
    "num_trials",
    [50, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_damaged_checkpoints_do_no_harm(tmp_path: Path, num_trials: int) -> None:
    (found,) = run_ranks(fuzz, 1, tmp_path, num_trials, num_trials, threads=1)
    sys.stdout.write(f"{found}\n")
    assert found["seen"] == set()
    assert sum(found["outcomes"].values()) == 2 * num_trials
    assert found["outcomes"]["refused"] > num_trials
    assert found["longest_s"] < 30
    assert found["grown_bytes"] < 256 << 20
