"""Convert to and from the Hugging Face layout: to the bit, in little memory, all or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import multiprocessing
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folders import GPT2, edit_config, edit_tensors, files_of, saved
from safetensors.torch import load_file, save_file
from small_models import MODELS, mixtral, model_of, olmoe, qwen2_moe, qwen3_moe
from states import from_hf
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
)
from transformers.utils import logging

from marks import by_hand
from phalanx.checkpoint import index, manifest, state
from phalanx.checkpoint.sharding import file_of
from phalanx.checkpoint.tensor_file import TensorInfo
from phalanx.checkpoint.weights import load_decoder, open_checkpoint, sizes_of
from phalanx.cli.main import main
from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig, ShapeConfig, TrainConfig
from phalanx.errors import CheckpointError, ConfigError
from phalanx.hugging_face.compare import compare_logits
from phalanx.hugging_face.config import config_to_hf, shape_from_hf
from phalanx.hugging_face.convert import convert, decoder_of
from phalanx.hugging_face.families import family_of
from phalanx.hugging_face.folder import INDEX, WEIGHTS, write_folder
from phalanx.hugging_face.names import table
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.plan import Plan
from phalanx.storage import checksum
from phalanx.strategy import Strategy
from phalanx.train.job.resolve import resolve
from phalanx.train.text import TextSession
from small_run import small_run, tokenizer_of

logging.disable_progress_bar()


DERIVED = (
    *("_name_or_path", "attention_bias", "head_dim", "n_inner", "max_window_layers"),
    *("sliding_window_pattern", "_sliding_window_pattern"),
)
"""Options that an export states where the model of transformers has a default or another option."""


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype and torch.equal(actual[key], tensor), key


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    theirs = model_of(name)
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert (tmp_path / "saved" / INDEX).exists()

    convert(tmp_path / "saved", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", max_shard_bytes=30_000)
    loaded, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(found.values())
    assert type(loaded) is type(theirs)
    assert_equal(loaded.state_dict(), theirs.state_dict())
    assert_equal(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "saved"))
    found, expected = loaded.config.to_dict(), theirs.config.to_dict()
    assert {option: found.get(option) for option in expected if option not in DERIVED} == {
        option: value for option, value in expected.items() if option not in DERIVED
    }
    tokens = torch.arange(97)[None, :60]
    assert torch.equal(loaded(tokens).logits, theirs(tokens).logits)
    agreement = compare_logits(open_checkpoint(tmp_path / "ours"), tmp_path / "back", torch.float32)
    assert agreement.is_within, str(agreement)

    loaded.save_pretrained(tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "ours-again")
    first, second = open_checkpoint(tmp_path / "ours"), open_checkpoint(tmp_path / "ours-again")
    assert first.shape == second.shape
    names = list(sizes_of(first.shape))
    assert_equal({n: second.read(n) for n in names}, {n: first.read(n) for n in names})
    assert_equal(decoder_of(theirs).state_dict(), {n: first.read(n) for n in names})


WITH_EXPERTS = ("mixtral", "qwen3-moe-tied-first-dense", "qwen2-moe", "olmoe", "deepseek-v3")


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_stacked_experts_are_read_too(name: str, tmp_path: Path) -> None:
    theirs = model_of(name)
    theirs.save_pretrained(tmp_path / "saved", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_in(tmp_path / "saved"))
    convert(tmp_path / "saved", tmp_path / "ours")
    ours = open_checkpoint(tmp_path / "ours")
    expected = decoder_of(theirs).state_dict()
    assert_equal({name: ours.read(name) for name in sizes_of(ours.shape)}, expected)


def test_experts_are_read_once_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(saved(tmp_path / "saved", "olmoe"), tmp_path / "ours")
    own, read = index.load_full, list[str]()

    def load_full(file: Any, tensors: Any, name: str) -> Tensor:
        read.append(name)
        return own(file, tensors, name)

    monkeypatch.setattr(index, "load_full", load_full)
    convert(tmp_path / "ours", tmp_path / "back")
    assert len(read) == len(set(read)) == len(sizes_of(open_checkpoint(tmp_path / "ours").shape))


def take_a_step_and_save(config: TrainConfig) -> None:
    session = TextSession(resolve(config))
    with session.loader:
        session.step(next(session.loader))
        session.begin_save()
        session.saver.finish()


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (mixtral, "fsdp2"),
        (olmoe, "ep2"),
        pytest.param(qwen3_moe, "tp2", marks=pytest.mark.slow),
        pytest.param(qwen2_moe, "fsdp2,ep2", marks=pytest.mark.slow),
        pytest.param(mixtral, "dp2,ep2", marks=pytest.mark.slow),
    ],
)
def test_a_run_begins_with_experts_and_is_written_back(
    make: Callable[..., Any], strategy: str, tmp_path: Path
) -> None:
    theirs = make(vocab_size=300)
    theirs.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text(tokenizer_of(300))
    config = small_run(
        tmp_path,
        model=str(tmp_path / "saved"),
        shape=ShapeConfig(),
        steps=1,
        strategy=strategy,
        optimizer=OptimizerConfig(lr=1e-12, warmup_steps=0),
    )
    run_ranks(take_a_step_and_save, Strategy.parse(strategy).num_ranks, config, threads=1)
    assert open_checkpoint(tmp_path / "run").shape == shape_from_hf(theirs.config.to_dict())
    done = convert(tmp_path / "run", tmp_path / "back", dtype=torch.float64)
    assert done.family == theirs.config.model_type
    back, expected = tensors_in(tmp_path / "back"), tensors_in(tmp_path / "saved")
    assert back.keys() == expected.keys()
    moved = [float((back[name] - expected[name].double()).abs().max()) for name in back]
    assert 0 < max(moved) < 1.1e-12


def test_experts_that_are_missing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", "mixtral")
    gone = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    edit_tensors(lambda tensors: tensors.pop(gone))(folder)
    with pytest.raises(CheckpointError, match=f"'{gone}' is missing"):
        convert(folder, tmp_path / "ours")
    edit_config(num_local_experts=10**6)(folder)
    with pytest.raises(
        CheckpointError, match=r"it has 40 tensors, fewer than the 2000000 experts of all layers"
    ):
        convert(folder, tmp_path / "ours")


def test_what_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a model of transformers, not a Linear"):
        decoder_of(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", torch.bfloat16), ("gpt2", torch.float16), ("deepseek_v3", torch.bfloat16)],
)
def test_half_precision_is_kept_exactly(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The bias of a router is float32 in a bfloat16 model, in both libraries."""
    theirs = model_of(name.replace("_", "-")).to(dtype)
    torch.manual_seed(0)
    for router in theirs.modules():
        if (bias := getattr(router, "e_score_correction_bias", None)) is not None:
            router.e_score_correction_bias = 5 + torch.randn(bias.shape) / 16
    theirs.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "ours", dtype=dtype)
    ours = open_checkpoint(tmp_path / "ours")
    for key, expected in from_hf(theirs.state_dict(), ours.shape, name).items():
        assert torch.equal(ours.read(key), expected), key
    decoder = load_decoder(ours, dtype, "cpu")
    assert_equal(decoder.state_dict(), from_hf(theirs.state_dict(), ours.shape, name))
    convert(tmp_path / "ours", tmp_path / "back", dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert loaded.dtype == dtype
    assert_equal(loaded.state_dict(), theirs.state_dict())


def weights_on_rank(folder: Path, shape: ModelShape, strategy: str) -> dict[str, Tensor]:
    comm = Ranks(Strategy.parse(strategy), "cpu")
    model = Decoder(shape)
    Plan(Strategy.parse(strategy), model).build(comm)
    state.load_weights(folder, model)
    full = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        full[name] = whole.detach().clone()
    return full


@pytest.mark.parametrize("strategy", ["dp2", "fsdp2"])
def test_a_split_model_loads_what_was_converted(strategy: str, tmp_path: Path) -> None:
    theirs = model_of("gpt2")
    theirs.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "ours", dtype=torch.bfloat16)
    shape = open_checkpoint(tmp_path / "ours").shape
    expected = from_hf(theirs.state_dict(), shape, "gpt2")
    for found in run_ranks(weights_on_rank, 2, tmp_path / "ours", shape, strategy):
        assert_equal(found, {name: t.bfloat16().float() for name, t in expected.items()})


def test_progress_is_told_by_bytes(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    done = convert(
        saved(tmp_path / "saved"), tmp_path / "ours", progress=lambda *words: told.append(words)
    )
    assert told[0][1] == 0 and told[-1] == ("convert", done.num_bytes, done.num_bytes)
    assert [words[1] for words in told] == sorted(words[1] for words in told)


def test_a_weight_that_is_tied_but_saved_twice(tmp_path: Path) -> None:
    saved(tmp_path / "saved", "qwen3-tied-every-other-window")
    tensors = load_file(tmp_path / "saved" / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "saved" / WEIGHTS)
    assert convert(tmp_path / "saved", tmp_path / "ours").num_tensors == len(tensors) - 1
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "saved" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from 'model.embed"):
        convert(tmp_path / "saved", tmp_path / "other")


def test_of_a_whole_file_and_shards_the_one_transformers_takes_is_taken(tmp_path: Path) -> None:
    saved(tmp_path / "saved", max_shard_size="20KB")
    whole = model_of("llama")
    with torch.no_grad():
        whole.get_input_embeddings().weight.zero_()
    save_file(whole.state_dict(), tmp_path / "saved" / WEIGHTS, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").get_input_embeddings().weight
    convert(tmp_path / "saved", tmp_path / "ours")
    assert torch.equal(open_checkpoint(tmp_path / "ours").read("embedding.weight"), theirs)
    assert not theirs.any()


def test_some_manifest_does_not_make_a_checkpoint_of_a_hugging_face_folder(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    (tmp_path / "saved" / manifest.NAME).write_text('{"name": "of a web page"}')
    assert convert(tmp_path / "saved", tmp_path / "ours").kind == "phalanx"


def test_a_type_that_computes_the_same_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    theirs = model_of("phi3-tied-no-window")
    theirs.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "ours")
    for family in ("llama", "mistral", "phi3"):
        assert convert(tmp_path / "ours", tmp_path / family, family=family).family == family
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / family)
        assert loaded.config.model_type == family
        tokens = torch.arange(97)[None, :60]
        torch.testing.assert_close(loaded(tokens).logits, theirs(tokens).logits)
    with pytest.raises(ConfigError, match=r"type 'qwen2' does not support .*legal are llama, mist"):
        convert(tmp_path / "ours", tmp_path / "other", family="qwen2")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    convert(saved(tmp_path / "saved"), tmp_path / "ours")
    shutil.rmtree(tmp_path / "saved")
    return tmp_path / "ours"


def test_a_broken_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    file = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"its file {file.name} is damaged"):
        convert(checkpoint, tmp_path / "back")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"its file {file.name} is missing"):
        convert(checkpoint, tmp_path / "back")
    assert files_of(tmp_path) == {"ours"}


def rewritten(checkpoint: Path, **changes: Any) -> None:
    about = manifest.read(checkpoint)
    manifest.write(checkpoint, manifest.Manifest(**{**vars(about), **changes}))


def test_a_checkpoint_whose_manifest_tells_of_another_model(
    checkpoint: Path, tmp_path: Path
) -> None:
    shape = manifest.read(checkpoint).shape
    rewritten(checkpoint, shape={**shape, "ffn": 49})
    with pytest.raises(CheckpointError, match=r"'blocks.0.mlp.gate.weight' is \(48, 32\); .*\(49"):
        convert(checkpoint, tmp_path / "back")
    rewritten(checkpoint, shape={**shape, "num_layers": 3})
    with pytest.raises(CheckpointError, match=r"'blocks.2.attention_norm.weight' is missing"):
        convert(checkpoint, tmp_path / "back")
    rewritten(checkpoint, shape={**shape, "width": 3})
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest.json: .*'width'"):
        convert(checkpoint, tmp_path / "back")


def test_float16_that_cannot_hold_a_value(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    edit_tensors(lambda t: t.update({"model.norm.weight": torch.full((32,), 1e5)}))(
        tmp_path / "saved"
    )
    with pytest.raises(CheckpointError, match=r"'norm.weight' has values up to 100000, but float"):
        convert(tmp_path / "saved", tmp_path / "ours", dtype=torch.float16)
    assert files_of(tmp_path) == {"saved"}


def test_sources_that_are_none(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"sav does not exist \(did you mean '.*saved'\?\)"):
        convert(tmp_path / "sav", tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"model.safetensors is a file; expected the folder"):
        convert(tmp_path / "saved" / WEIGHTS, tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty is neither a Hugging Face folder"):
        convert(tmp_path / "empty", tmp_path / "ours")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        convert(tmp_path / "run", tmp_path / "ours")


def test_destinations_that_are_not_free(tmp_path: Path) -> None:
    source = saved(tmp_path / "saved")
    before = files_of(source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    for name, message in {
        "full": "full is not empty",
        "saved": "is inside .*saved",
        "saved/inside": "is inside .*saved, which is the input",
        "full/a": "is a file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            convert(source, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"cannot write .*full/a/b"):
        convert(source, tmp_path / "full" / "a" / "b")
    assert files_of(source) == before
    assert files_of(tmp_path) == {"saved", "full"}
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    assert manifest.NAME in files_of(tmp_path / "empty")


def test_too_little_space_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "saved")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(CheckpointError, match=r"needs [0-9.]+ [KM]iB, but .* left; make room"):
        convert(source, tmp_path / "ours")
    assert files_of(tmp_path) == {"saved"}


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process of its own, which has the libraries loaded."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(function, args)


def fill_the_disk() -> None:
    """Set a limit on the size of files, which fails a write in the midst as a full disk does."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, hard))


def convert_on_a_full_disk(folder: Path, source: str) -> tuple[int, str]:
    """Convert as the command does; return its exit code and what it said of errors."""
    sys.dont_write_bytecode = True  # compiled files, too, would be cut
    fill_the_disk()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["convert", str(folder / source), str(folder / "out")])
    return code, said.getvalue()


def command_on_a_full_disk(folder: Path, source: str) -> tuple[int, str]:
    """Do the same by the command itself, which may say more when it ends."""
    words = ["convert", str(folder / source), str(folder / "out")]
    command = [sys.executable, "-B", "-m", "phalanx", *words]
    done = subprocess.run(
        command, preexec_fn=fill_the_disk, stderr=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("source", ["saved", by_hand("ours")])
def test_a_disk_that_fills_up(source: str, tmp_path: Path) -> None:
    convert(saved(tmp_path / "saved"), tmp_path / "ours")
    if source == "ours":
        code, said = command_on_a_full_disk(tmp_path, source)
    else:
        code, said = in_a_process(convert_on_a_full_disk, tmp_path, source)
    assert code == 2, said
    assert said.startswith(f"phalanx: cannot write {tmp_path / 'out'}, and nothing of it is")
    assert len(said.splitlines()) == 1 and "File too large" in said
    assert files_of(tmp_path) == {"saved", "ours"}


def memory_bytes(kind: str) -> int:
    """Return a figure of this process, mapped files included."""
    return 1024 * int(re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def growths_of_memory(folder: Path) -> list[int]:
    """Convert there and back; return by how much the memory of this process grows meanwhile."""
    torch.set_num_threads(1)
    growths_bytes: list[int] = []
    for source, destination in (("saved", "ours"), ("ours", "back")):
        convert(folder / "small" / source, folder / "small" / destination)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before_bytes = memory_bytes("VmRSS")
        convert(folder / "large" / source, folder / "large" / destination)
        growths_bytes.append(memory_bytes("VmHWM") - before_bytes)
    return growths_bytes


def written(folder: Path, shape: ModelShape) -> int:
    """Write a Hugging Face folder of random weights; return the bytes of the largest tensor."""
    sizes = {
        link.theirs: link.join_sizes(sizes_of(shape)) for link in table(shape, family_of(shape))
    }
    folder.mkdir(parents=True)
    write_folder(
        folder,
        config_to_hf(shape, "float32"),
        {name: TensorInfo(torch.float32, size) for name, size in sizes.items()},
        lambda name: torch.rand(sizes[name]),
        1 << 40,
    )
    return 4 * max(size.numel() for size in (*sizes.values(), *sizes_of(shape).values()))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("num_layers", "hidden", "options"),
    [
        by_hand(8, 512, {}),
        by_hand(8, 512, GPT2),
        by_hand(24, 1024, {}),
        by_hand(12, 256, {"experts": ExpertShape(num_experts=16, top_k=2, ffn=512)}),
    ],
    ids=["llama", "gpt2", "llama-1.5-gb", "experts"],
)
def test_only_a_few_tensors_are_in_memory(
    num_layers: int, hidden: int, options: dict[str, Any], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"vocab_size": 512, "max_seq_len": 64, "head_dim": 64, **options}

    def shape(num_layers: int, hidden: int) -> ModelShape:
        heads = hidden // 64
        return ModelShape(
            num_layers=num_layers, hidden=hidden, num_heads=heads, num_kv_heads=heads,
            ffn=4 * hidden, qk_norm="projection" if "experts" in common else False, **common,
        )  # fmt: skip

    written(tmp_path / "small" / "saved", shape(1, 128))
    largest_bytes = written(tmp_path / "large" / "saved", shape(num_layers, hidden))
    total_bytes = sum(path.stat().st_size for path in (tmp_path / "large" / "saved").iterdir())
    growths_bytes = in_a_process(growths_of_memory, tmp_path)
    # Of a tensor there are its bytes, what torch.load makes of them, and the target; the allocator
    # keeps some of those before. It does not grow with the number of layers.
    assert max(growths_bytes) < 8 * largest_bytes + (8 << 20) < total_bytes / 2, growths_bytes


def test_weights_of_whole_numbers_are_refused(tmp_path: Path) -> None:
    ours = convert(saved(tmp_path / "saved"), tmp_path / "ours").destination
    for name in (index.NAME, file_of(0)):
        content = (ours / name).read_bytes()
        (ours / name).write_bytes(content.replace(b'"F32"', b'"I32"'))
    about = manifest.read(ours)
    files = {name: checksum(ours / name) for name in about.files}
    manifest.write(ours, dataclasses.replace(about, files=files))
    words = "the weight 'embedding.weight' is of torch.int32; expected a type of real numbers"
    with pytest.raises(CheckpointError, match=words):
        convert(ours, tmp_path / "back")
