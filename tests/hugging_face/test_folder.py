"""The weights of a Hugging Face folder: shards as the index says, and broken folders refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import edit_config, edit_tensors, files_of, saved
from safetensors.torch import load_file

from phalanx.errors import PhalanxError
from phalanx.hugging_face.convert import convert
from phalanx.hugging_face.folder import INDEX, WEIGHTS


def test_shards_hold_what_the_index_says(tmp_path: Path) -> None:
    convert(saved(tmp_path / "saved"), tmp_path / "ours")
    done = convert(tmp_path / "ours", tmp_path / "back", max_shard_bytes=30_000)
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["metadata"]["total_size"] == done.num_bytes
    assert len(index["weight_map"]) == done.num_tensors == 21
    files = sorted(set(index["weight_map"].values()))
    assert files_of(tmp_path / "back") - {INDEX, "config.json", "generation_config.json"} == {
        *files
    }
    for file in files:
        held = load_file(tmp_path / "back" / file)
        assert sum(tensor.nbytes for tensor in held.values()) <= 30_000
        assert {index["weight_map"][name] for name in held} == {file}
    convert(tmp_path / "ours", tmp_path / "whole")
    assert WEIGHTS in files_of(tmp_path / "whole") and INDEX not in files_of(tmp_path / "whole")


@pytest.mark.parametrize("max_shard_bytes", [10**9, 30_000])
def test_a_folder_of_links_is_read_as_in_the_cache_of_the_hub(
    max_shard_bytes: int, tmp_path: Path
) -> None:
    convert(saved(tmp_path / "saved"), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "blobs", max_shard_bytes=max_shard_bytes)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    done = convert(tmp_path / "snapshot", tmp_path / "again")
    assert done.num_tensors == 21 and "generation_config.json" in done.companions
    assert not any(file.is_symlink() for file in (tmp_path / "again").iterdir())


def cut_short(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def as_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def as_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def with_index(**weight_map: str) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return edit


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing tensor": (
        edit_tensors(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        r"'model.layers.1.mlp.up_proj.weight' is missing \(did you mean 'model.layers.0.mlp.up_",
    ),
    "extra tensor": (
        edit_tensors(lambda t: t.update(extra=torch.ones(1))),
        "the model has no 'extra', the first of 1",
    ),
    "wrong shape": (
        edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(33)})),
        r"'model.norm.weight' has shape \(33,\); expected \(32,\)",
    ),
    "integers": (
        edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
        "'model.norm.weight' is of type I8",
    ),
    "cut short": (cut_short, "cannot read .*model.safetensors: .*damaged or incomplete"),
    "no safetensors": (lambda f: (f / WEIGHTS).write_bytes(b"<html>"), "damaged or incomplete"),
    "pipe": (as_pipe, "model.safetensors is no regular file"),
    "stray pipe": (
        lambda f: os.mkfifo((f / WEIGHTS).rename(f / "a.safetensors").with_name("b.safetensors")),
        "b.safetensors is no regular file",
    ),
    "more layers than tensors": (
        edit_config(num_hidden_layers=9_999), "it has 21 tensors, fewer than the 9999 layers"
    ),
    "pickle": (as_pickle, "pytorch_model.bin, a pickle.*save_pretrained"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no weights; expected model.safetensors"),
    "missing shard": (with_index(a="model-2.safetensors"), "names model-2.saf.*which is missing"),
    "wrong shard": (with_index(a="model-1.safetensors"), "'a' in model-1.saf.*does not contain it"),
    "shard elsewhere": (with_index(a="../model-1.safetensors"), "has no weight_map"),
    "tensor twice": (
        lambda f: shutil.copy((f / WEIGHTS).rename(f / "a.safetensors"), f / "b.safetensors"),
        "is both in a.safetensors and in b.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_hugging_face_folder(case: str, tmp_path: Path) -> None:
    breaks, message = BROKEN[case]
    breaks(saved(tmp_path / "saved"))
    with pytest.raises(PhalanxError, match=message):
        convert(tmp_path / "saved", tmp_path / "ours")
    assert files_of(tmp_path) == {"saved"}
