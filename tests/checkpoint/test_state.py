"""Save and load on two ranks: what comes back, and how each failure is told."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from torch import nn

from marks import by_hand
from phalanx.checkpoint import files, index, manifest, state
from phalanx.config import OptimizerConfig
from phalanx.errors import CheckpointError
from phalanx.launch.local import run_ranks
from phalanx.train.optimizer import build_optimizer

FILES = ["rank-00000.safetensors", "rank-00001.safetensors"]


def resume(run: Path, config: OptimizerConfig) -> dict[str, Any]:
    """Load with other settings of the optimizer, and say what came back."""
    model, _ = runs.build()
    optimizer = build_optimizer(model, config)
    torch.manual_seed(1000)
    state.load(manifest.find(run), model, optimizer)
    draw = torch.rand(1).item()
    torch.manual_seed(7 + dist.get_rank())
    expected_draw = torch.rand(1).item()
    expected, expected_optimizer = runs.build()
    for _ in range(2):
        runs.step(expected, expected_optimizer)
    same = torch.equal(weights(model), weights(expected))
    runs.step(model, optimizer)
    runs.step(expected, expected_optimizer)
    return {
        "weights": same,
        "next weights": torch.equal(weights(model), weights(expected)),
        "draw": draw == expected_draw,
        "groups": [
            {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            for group in optimizer.param_groups
        ],
    }


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("run")
    run_ranks(runs.save_after, 2, folder, 2, threads=1)
    return folder


def test_a_run_comes_back_to_the_bit_with_its_generators(run: Path) -> None:
    for outcome in run_ranks(resume, 2, run, OptimizerConfig(lr=0.1), threads=1):
        assert outcome["weights"] and outcome["next weights"] and outcome["draw"]


def test_the_settings_of_the_run_that_goes_on_hold(run: Path) -> None:
    config = OptimizerConfig(lr=0.3, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.7)
    for outcome in run_ranks(resume, 1, run, config, threads=1):
        assert outcome["weights"] and not outcome["next weights"] and not outcome["draw"]
        expected = {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-3}
        assert outcome["groups"] == [
            {**expected, "weight_decay": 0.7},
            {**expected, "weight_decay": 0.0},
        ]


def skipped_steps_alone(run: Path) -> tuple[bool, bool]:
    """Save after a step that left gradients but was skipped; go on from there and without."""
    ours, optimizer = runs.build()
    ours(torch.arange(7)).sum().backward()
    runs.save(run, ours, optimizer, 1)
    loaded, loaded_optimizer = runs.build()
    runs.step(loaded, loaded_optimizer)  # what it has then must go
    state.load(manifest.find(run), loaded, loaded_optimizer)
    expected, expected_optimizer = runs.build()
    for pair in ((ours, optimizer), (loaded, loaded_optimizer), (expected, expected_optimizer)):
        runs.step(*pair)
        runs.step(*pair)
    return (
        torch.equal(weights(ours), weights(expected)),
        torch.equal(weights(loaded), weights(expected)),
    )


def test_a_run_that_has_skipped_every_step_goes_on_as_if_it_were_fresh(tmp_path: Path) -> None:
    assert run_ranks(skipped_steps_alone, 1, tmp_path, threads=1) == [(True, True)]


def words_on_a_full_disk(run: Path, num_steps: int, rank: int, limit_bytes: int) -> str:
    """Save under a limit on the size of one rank's files."""
    runs.build()  # what is imported for it may need a file
    if dist.get_rank() == rank:
        sys.dont_write_bytecode = True  # or compiled files would be cut, too
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    return runs.words_of_save(run, num_steps)


@pytest.mark.parametrize(
    ("rank", "limit_bytes", "name"),
    [(0, 4000, FILES[0]), (1, 4000, FILES[1]), (0, 100, FILES[0])],
)
def test_a_full_disk_is_one_error_on_every_rank(
    tmp_path: Path, rank: int, limit_bytes: int, name: str
) -> None:
    run_ranks(runs.save_after, 2, tmp_path, 1, threads=1)
    for words in run_ranks(
        words_on_a_full_disk, 2, tmp_path, 2, rank, limit_bytes, threads=1, timeout_s=30
    ):
        final = manifest.folder_of(tmp_path, 2)
        assert words == (
            f"cannot save {final} (the last checkpoint is {manifest.find(tmp_path)}): "
            f"{final}.partial/{name}: File too large"
        )
    assert runs.folders(tmp_path) == ["step-00000001"]
    folder = manifest.find(tmp_path)
    assert run_ranks(runs.words_of_load, 2, folder, threads=1) == [("", ""), ("", "")]


def fail_at_the_end(run: Path) -> str:
    """Find that there is no room for the manifest, after the tensors."""

    def write(folder: Path, about: manifest.Manifest) -> None:
        raise OSError(28, "No space left on device", str(folder))

    manifest.write = write
    return runs.words_of_save(run, 2)


def test_a_disk_that_is_full_at_the_manifest_fails_on_every_rank(tmp_path: Path) -> None:
    for words in run_ranks(fail_at_the_end, 2, tmp_path, threads=1, timeout_s=30):
        assert "No space left" in words
    assert runs.folders(tmp_path) == []


def test_a_folder_that_cannot_be_made_fails_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    for words in run_ranks(runs.words_of_save, 2, tmp_path, 1, threads=1, timeout_s=30):
        assert words.startswith("cannot save") and "File exists" in words


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    folder = tmp_path / "step-00000002"
    folder.mkdir()
    for path in manifest.find(run).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def assert_both_loads_say(folder: Path, words: str) -> None:
    """Expect the same message from both ways to load, on both ranks."""
    for outcome in run_ranks(runs.words_of_load, 2, folder, threads=1, timeout_s=30):
        assert outcome == (
            f"cannot load {folder}: {words}",
            f"cannot load the weights in {folder}: {words}",
        )


@pytest.mark.parametrize("name", [*FILES, index.NAME])
def test_a_damaged_file_is_one_error_on_every_rank(copy: Path, name: str) -> None:
    whole = (copy / name).read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        (copy / name).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=f"its file {name} is damaged: its sha256"):
            files.verify(copy, manifest.read(copy))
    words = f"its file {name} is damaged: its sha256 differs from the recorded one"
    assert_both_loads_say(copy, words)
    (copy / name).write_bytes(whole[:100])
    assert_both_loads_say(copy, f"its file {name} has 100 bytes, but {len(whole)} were written")
    (copy / name).unlink()
    assert_both_loads_say(copy, f"its file {name} is missing")


@pytest.mark.parametrize("name", [pytest.param(FILES[1], marks=pytest.mark.slow), manifest.NAME])
def test_a_damaged_checkpoint_names_the_older_ones(run: Path, tmp_path: Path, name: str) -> None:
    for steps_done in (100, 200, 300, 400, 500, 600):
        folder = manifest.folder_of(tmp_path, steps_done)
        shutil.copytree(manifest.find(run), folder)
    last = manifest.folder_of(tmp_path, 500)
    (last / name).write_bytes(b"{}")
    words = ", ".join(str(manifest.folder_of(tmp_path, steps)) for steps in (400, 300, 200))
    for outcome in run_ranks(runs.words_of_load, 2, last, threads=1):
        for message in outcome:
            assert message.endswith(f"; older checkpoints that can be used instead: {words}")
    first = manifest.folder_of(tmp_path, 100)
    (first / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError) as raised:
        files.verify(first, manifest.read(first))
    assert "older" not in str(raised.value)
    assert (
        run_ranks(runs.words_of_load, 2, manifest.folder_of(tmp_path, 400), threads=1)
        == [("", "")] * 2
    )


@pytest.mark.parametrize("bits", [(1, 4, 16), *(by_hand((1 << bit,)) for bit in range(8))])
def test_every_byte_of_the_manifest_counts(copy: Path, bits: tuple[int, ...]) -> None:
    expected = manifest.read(copy)
    whole = (copy / manifest.NAME).read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= bits[place % len(bits)]
        (copy / manifest.NAME).write_bytes(flipped)
        try:
            about = manifest.read(copy)
        except CheckpointError as error:
            assert str(error).startswith((f"cannot read {copy}", str(copy)))
        else:  # a space between two values
            assert about == expected and chr(whole[place]).isspace()


def test_another_models_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    folder = manifest.find(run)
    for split in ("whole", "fsdp"):
        for outcome in run_ranks(runs.words_of_load, 2, folder, split, 6, threads=1):
            for words in outcome:
                assert words.endswith(
                    "it is of another model: its embedding.weight has the shape [7, 5], this "
                    "model's [7, 6]"
                )
    assert run_ranks(foreign_models, 1, folder, threads=1) == [
        [
            f"cannot load {folder}: it is of another model: it has no tensor more.weight",
            f"cannot load {folder}: it is of another model: this one has no tensor 'frozen.bias'",
            f"cannot load {folder}: it has optimizer state of 'embedding.weight', "
            "which this run does not train",
        ]
    ]


def foreign_models(folder: Path) -> list[str]:
    """Load into a model with more, one with less, and one that trains less."""
    more, _ = runs.build()
    more.more = nn.Linear(2, 2)
    less, _ = runs.build()
    del less.frozen
    frozen, _ = runs.build()
    frozen.embedding.requires_grad_(False)
    words: list[str] = []
    for model in (more, less, frozen):
        try:
            state.load(folder, model, build_optimizer(model, OptimizerConfig()))
        except CheckpointError as error:
            words.append(str(error))
    return words


def test_weights_alone_begin_a_run_but_do_not_go_on(copy: Path) -> None:
    about = manifest.read(copy)
    manifest.write(copy, dataclasses.replace(about, has_optimizer=False))
    words = "has only weights and no optimizer state, so no run can be resumed from it"
    for resumed, begun in run_ranks(runs.words_of_load, 2, copy, threads=1):
        assert words in resumed and begun == ""
    with pytest.raises(CheckpointError, match=f"{words}; start a run with its weights by --init"):
        manifest.read(copy).check_optimizer()


def edited(folder: Path, **values: Any) -> Path:
    """Change values of the manifest, with a checksum that agrees; None takes one out."""
    whole = json.loads((folder / manifest.NAME).read_text()) | values
    kept = {name: v for name, v in whole.items() if v is not None or name not in values}
    if "sha256" in kept and "num_steps" not in values:
        del kept["sha256"]
        kept["sha256"] = manifest._sha256(kept)
    (folder / manifest.NAME).write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"format": 1}, "it is of format 1; this version reads format 3"),
        ({"format": 2}, "it is of format 2, .* could run code .*; this version reads format 3. Co"),
        ({"format": None}, "it has no 'format'"),
        ({"steps_done": "2"}, "steps_done is '2', expected a whole number"),
        ({"steps_done": True}, "steps_done is True, expected a whole number"),
        ({"consumed": -1}, "consumed is -1"),
        ({"consumed": None}, "it has no 'consumed'"),
        ({"shape": [1]}, r"shape is \[1\], expected an object"),
        ({"files": {"a": [1]}}, r"files 'a' is \[1\], expected tuple\[int, str\]"),
        ({"files": {"a": 3}}, "files 'a' is 3, expected"),
        ({"files": {"../a": [1, ""]}}, "names the file '../a', expected one in its own folder"),
        ({"state": 3}, "state is 3, expected an object"),
        ({"script": 3}, "its position of a script is not valid"),
        ({"settings": {"a": [[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]}}, "it is nested too deeply"),
        ({"has_optimizer": 1}, "has_optimizer is 1, expected true or false"),
        ({"sha256": None}, "it has no 'sha256'"),
        ({"num_steps": 8}, "it is damaged: its sha256"),
        ({"stept": 2}, "it has the unknown entry 'stept'"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(
    copy: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words) as raised:
        manifest.read(edited(copy, **values))
    assert str(raised.value).startswith(f"cannot read {copy / manifest.NAME}: ")


@pytest.mark.parametrize("text", ["null", "[" * 200_000, "{", '{"a": 1, "a": 2}'])
def test_a_manifest_that_is_no_object_is_refused(copy: Path, text: str) -> None:
    (copy / manifest.NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest.json: "):
        manifest.read(copy)


@pytest.mark.parametrize("byte", [b"\xff", b"\0", b"["])
def test_a_manifest_with_a_flipped_byte_is_refused(copy: Path, byte: bytes) -> None:
    raw = (copy / manifest.NAME).read_bytes()
    (copy / manifest.NAME).write_bytes(byte + raw[1:])
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest.json"):
        manifest.read(copy)
    (copy / manifest.NAME).write_text("[1]")
    with pytest.raises(CheckpointError, match="cannot read"):
        manifest.read(copy)


def test_only_whole_checkpoints_are_found_and_the_last_by_number(tmp_path: Path) -> None:
    for name in ("step-9", "step-00000010", "step-00000011.partial", "step-00000012", "other"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        if name != "step-00000012":
            manifest.write(folder, runs.ABOUT)
    assert list(manifest.complete_checkpoints(tmp_path)) == [9, 10]
    assert manifest.find(tmp_path).name == "step-00000010"
    assert manifest.incomplete_after(manifest.find(tmp_path)) == (
        "resumes from step-00000010: step-00000012 has no manifest.json, so not all was saved"
    )
    assert manifest.incomplete_after(tmp_path / "checkpoints" / "step-00000012") is None
