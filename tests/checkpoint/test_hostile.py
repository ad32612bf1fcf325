"""Checkpoints that somebody has made to do harm: refused in one message, and nothing is run."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from phalanx.checkpoint import files, index, manifest, state
from phalanx.checkpoint.tensor_file import open_file
from phalanx.errors import CheckpointError
from phalanx.launch.local import run_ranks
from phalanx.storage import checksum

FIRST = "rank-00000.safetensors"


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    run_ranks(runs.save_after, 2, run, 2, threads=1)
    return manifest.find(run)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "step-00000002"
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def read_all(folder: Path) -> None:
    """Read what `phalanx convert` reads, of a model that is none of ours."""
    about = manifest.read(folder)
    files.verify(folder, about)
    tensors = index.read(folder, about.files)
    for name in tensors:
        index.load_full(lambda file: open_file(folder / file), tensors, name)


def with_checksums(folder: Path, *more: str) -> None:
    """Have the manifest agree with the files, whatever they are."""
    about = manifest.read(folder)
    names = [*about.files, *more]
    listed = {name: checksum(folder / name) for name in names}
    manifest.write(folder, dataclasses.replace(about, files=listed))


def edit_index(folder: Path, change: Callable[[Any], object]) -> None:
    content = json.loads((folder / index.NAME).read_text())
    change(content)
    (folder / index.NAME).write_text(json.dumps(content))
    with_checksums(folder)


def pickled_index(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful(mark)))
    (folder / index.NAME).write_bytes(pickle.dumps(Harmful(mark)))
    with_checksums(folder, ".metadata")


def pickled_shard(folder: Path, mark: Path) -> None:
    torch.save({"model.scale": Harmful(mark)}, folder / FIRST)
    with (folder / FIRST).open("ab") as file:
        file.write(b"0" * 20_000)  # as many bytes as the index asks for
    with_checksums(folder)


def old_format(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful(mark)))
    content = json.loads((folder / manifest.NAME).read_text()) | {"format": 2}
    (folder / manifest.NAME).write_text(json.dumps(content))


def file_outside(folder: Path, mark: Path) -> None:
    shutil.copy(folder / FIRST, folder.parent / "outside.safetensors")

    def change(content: Any) -> None:
        for layout in content["layouts"]:
            for shard in layout["shards"]:
                shard[2] = shard[2].replace(FIRST, "../outside.safetensors")

    edit_index(folder, change)


def list_file(folder: Path, name: str) -> None:
    about = manifest.read(folder)
    listed = about.files | {name: (1, "0" * 64)}
    manifest.write(folder, dataclasses.replace(about, files=listed))


def listed_file_outside(folder: Path, mark: Path) -> None:
    list_file(folder, "../outside.safetensors")


def link(folder: Path, mark: Path) -> None:
    (folder / FIRST).rename(folder.parent / "outside.safetensors")
    (folder / FIRST).symlink_to(folder.parent / "outside.safetensors")


def pipe(folder: Path, mark: Path) -> None:
    (folder / FIRST).unlink()
    os.mkfifo(folder / FIRST)


def manifest_pipe(folder: Path, mark: Path) -> None:
    (folder / manifest.NAME).unlink()
    os.mkfifo(folder / manifest.NAME)


def wrong(change: Callable[[Any], object]) -> Callable[[Path, Path], None]:
    return lambda folder, _: edit_index(folder, change)


def first_layout(content: Any) -> Any:
    """Return the layout of the embedding, [7, 5], which one file holds."""
    return content["layouts"][content["tensors"]["model.embedding.weight"][1]]


ESCAPE = "a\x1b]0;gone\x07"
"""Renames a terminal's window, and is a name as good as any."""


def write_data(path: Path, name: str, repeated: bytes) -> None:
    """Write some bytes again and again over the data of a tensor."""
    content = bytearray(path.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    offsets = json.loads(content[8 : 8 + header_bytes])[name]["data_offsets"]
    begin, end = (8 + header_bytes + offset for offset in offsets)
    content[begin:end] = repeated * ((end - begin) // len(repeated))
    path.write_bytes(content)


def escape_in_header(folder: Path, mark: Path) -> None:
    content = (folder / FIRST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[ESCAPE] = header.pop(next(name for name in header if name != "__metadata__"))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / FIRST).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with_checksums(folder)


def escape_in_manifest(folder: Path, mark: Path) -> None:
    values = json.loads((folder / manifest.NAME).read_text())
    del values["sha256"]
    values["settings"]["data"] = ESCAPE
    values["sha256"] = manifest._sha256(values)
    (folder / manifest.NAME).write_text(json.dumps(values))


def no_files(folder: Path, mark: Path) -> None:
    manifest.write(folder, dataclasses.replace(manifest.read(folder), files={}))


ATTACKS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a pickle for an index": (pickled_index, "cannot read .*index.json: 'utf-8' codec"),
    "a pickle for tensors": (pickled_shard, f"cannot read .*{FIRST}: .*damaged or incomplete"),
    "format 2": (old_format, "it is of format 2, of an earlier Phalanx, whose files could run"),
    "a file elsewhere": (file_outside, "'../outside.safetensors' is not a tensor file in the man"),
    "a listed file elsewhere": (listed_file_outside, "names the file '../outside.safetensors'"),
    "a link": (link, f"its file {FIRST} is a link, a folder or a device"),
    "a pipe": (pipe, f"its file {FIRST} is a link, a folder or a device"),
    "a pipe for a manifest": (manifest_pipe, "manifest.json is no regular file"),
    "no files": (no_files, "its manifest does not list index.json"),
    "no layouts": (wrong(lambda c: c.pop("layouts")), "index of tensors: it has no 'layouts'"),
    "layouts deep down": (
        wrong(lambda c: c.update(layouts=[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]])), "nested too deeply"
    ),
    "no such layout": (
        wrong(lambda c: c["tensors"].update(a=["F32", 10**9])), "'a' is .'F32', 1000000000."
    ),
    "escapes in a name": (
        wrong(lambda c: c["tensors"].update({ESCAPE: ["F32", 0]})), "control characters in 'a.x1b"
    ),
    "escapes in a header": (escape_in_header, "control characters in 'a.x1b"),
    "escapes in a setting": (escape_in_manifest, "control characters in 'a.x1b"),
    "a name that turns the text round": (
        wrong(lambda c: c["tensors"].update({"model.\u202exx": ["F32", 0]})),
        r"it is of another model: this one has no tensor '.u202exx'",
    ),
    "a name of a million letters": (
        wrong(lambda c: c["tensors"].update({"model." + "x" * 10**6: ["F32", 0]})),
        r"it is of another model: this one has no tensor 'x{76}\.\.\.$",
    ),
    "a file whose name turns round": (
        lambda folder, _: list_file(folder, "\u202exx"), r"it names the file '.u202exx', expected"
    ),
    "a file of a long name": (
        lambda folder, _: list_file(folder, "x" * 256), r"it names the file 'x+\.\.\., expected one"
    ),
    "no such type": (wrong(lambda c: c["tensors"].update(a=["F33", 0])), "'a' is .'F33', 0."),
    "a huge tensor": (
        wrong(lambda c: first_layout(c).update(
            shape=[1 << 40, 5], shards=[[[0, 0], [1 << 40, 5], FIRST]]
        )),
        "is larger than the file",
    ),
    "a number too large": (
        wrong(lambda c: first_layout(c).update(shape=[1 << 70, 5])),
        "layouts.shape is 1180.*, expected a whole number",
    ),
    "a negative offset": (
        wrong(lambda c: first_layout(c)["shards"][0][0].__setitem__(0, -1)),
        "layouts.shards is -1, expected a whole number",
    ),
    "a gap": (
        wrong(lambda c: first_layout(c)["shards"][0][0].__setitem__(0, 1)), "overlap or leave gaps"
    ),
    "a part that is not there": (
        wrong(lambda c: first_layout(c)["shards"][0][1].__setitem__(0, 6)), "cover 6 of 7"
    ),
    "other sizes than in the file": (
        wrong(lambda c: first_layout(c).update(
            shape=[5, 7], shards=[[[0, 0], [5, 7], first_layout(c)["shards"][0][2]]]
        )),
        "it is of another model: its embedding.weight has the shape .5, 7.",
    ),
    "another type than in the file": (
        wrong(lambda c: c["tensors"]["model.embedding.weight"].__setitem__(0, "F16")),
        "has 'model.embedding.weight' as .*'F32'.*, which differs from index.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_made_to_do_harm_is_refused(copy: Path, tmp_path: Path, name: str) -> None:
    attack, words = ATTACKS[name]
    attack(copy, tmp_path / "has run")
    for outcome in run_ranks(runs.words_of_load, 2, copy, threads=1, timeout_s=30):
        for message in outcome:
            assert message.startswith(("cannot load", "cannot load the weights in"))
            assert message.isprintable()
            with pytest.raises(AssertionError, match=words):
                raise AssertionError(message)
    if "of another model" not in words and "not as" not in words:
        with pytest.raises(CheckpointError, match=words):
            read_all(copy)
    assert not (tmp_path / "has run").exists()


def test_a_setting_with_control_characters_is_spelled_out_and_read(copy: Path) -> None:
    """As a path may have: what was saved must be read."""
    about = manifest.read(copy)
    odd = {"data": f"{ESCAPE}\x7f\x9b", "prompt": "第一\n\t第二"}
    manifest.write(copy, dataclasses.replace(about, settings=odd))
    settings = manifest.read(copy).settings
    assert settings == {"data": r"a\x1b]0;gone\x07\x7f\x9b", "prompt": "第一\n\t第二"}


def test_a_refused_checkpoint_leaves_the_generators_alone(copy: Path) -> None:
    assert run_ranks(load_bad_generator, 1, copy, threads=1) == [True]


def load_bad_generator(folder: Path) -> bool:
    """Load a checkpoint, of one rank, whose generator is in no state that there is."""
    run = folder.parent / "alone"
    model, optimizer = runs.build()
    torch.manual_seed(7)
    runs.save(run, model, optimizer, 1)
    copy = manifest.find(run)
    path = copy / FIRST
    write_data(path, "generators.cpu", b"\xff")
    with_checksums(copy)
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="its generator state is not valid"):
        state.load(copy, model, optimizer)
    return torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -1.0, 4.5, 1e30])
def test_a_count_of_steps_that_no_optimizer_has_is_refused(copy: Path, count: float) -> None:
    name = "optimizer.middle.weight.step"
    for path in copy.glob("rank-*"):
        if name.encode() in path.read_bytes():
            write_data(path, name, struct.pack("<f", count))
    with_checksums(copy)
    words = f"its optimizer has taken {count:g} steps of middle.weight; expected a whole number"
    for messages in run_ranks(runs.words_of_load, 2, copy, threads=1):
        assert any(words in message for message in messages)


def test_a_mean_of_squares_below_0_is_refused(copy: Path) -> None:
    name = "optimizer.middle.weight.exp_avg_sq"
    for path in copy.glob("rank-*"):
        if name.encode() in path.read_bytes():
            write_data(path, name, struct.pack("<f", -1.0))
    with_checksums(copy)
    for messages in run_ranks(runs.words_of_load, 2, copy, threads=1):
        assert any("exp_avg_sq of middle.weight has elements below 0" in m for m in messages)
