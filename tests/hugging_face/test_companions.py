"""An exported folder says which token ends a text: generate stops there, and batches are padded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import files_of, saved
from safetensors.torch import load_file, save_file
from small_models import model_of
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from phalanx.checkpoint import manifest
from phalanx.config import ShapeConfig, TrainConfig
from phalanx.data.tokenizer import END_OF_TEXT, MOST_BYTES, end_of_text_id, load_tokenizer
from phalanx.errors import CheckpointError
from phalanx.hugging_face.companions import ORIGIN, ids_of, prepend_separator, write_missing
from phalanx.hugging_face.config import config_to_hf
from phalanx.hugging_face.convert import convert
from phalanx.hugging_face.folder import WEIGHTS
from phalanx.infer.served import open_served
from phalanx.launch.local import run_ranks
from phalanx.models.registry import shape_of
from phalanx.train.job.resolve import resolve
from phalanx.train.text import TextSession
from small_run import small_run, tokenizer_of

PRESETS_OF_TYPES = (
    *("llama3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "olmo2-1b", "gemma3-1b", "gpt2-124m"),
)


def save_at_once(config: TrainConfig) -> None:
    """Begin a run, take a step and save."""
    session = TextSession(resolve(config))
    with session.loader:
        session.step(next(session.loader))
        session.begin_save()
        session.saver.finish()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a run whose last norm is then made to give the direction of the end's embedding."""
    folder = tmp_path_factory.mktemp("exported")
    shape = ShapeConfig(num_layers=1, hidden=32, num_heads=2, ffn=24, vocab_size=300)
    config = small_run(folder, model="gpt2-124m", shape=shape, steps=1, precision="float32")
    run_ranks(save_at_once, 1, config, threads=1)
    convert(folder / "run", folder / "back")
    end = end_of_text_id(load_tokenizer(folder / "run" / "tokenizer.json"))
    tensors = load_file(folder / "back" / WEIGHTS)
    tensors["transformer.ln_f.weight"].zero_()
    tensors["transformer.ln_f.bias"].copy_(tensors["transformer.wte.weight"][end])
    save_file(tensors, folder / "back" / WEIGHTS, metadata={"format": "pt"})
    return folder / "back"


def generated(model: PreTrainedModel, folder: Path, **options: Any) -> torch.Tensor:
    tokens = AutoTokenizer.from_pretrained(folder)("The square of", return_tensors="pt")
    length = tokens["input_ids"].shape[1]
    return model.generate(**tokens, do_sample=False, max_new_tokens=6, **options)[0, length:]


def test_generation_stops_at_the_end_of_a_text(exported: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported)
    end = AutoTokenizer.from_pretrained(exported).eos_token_id
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end
    assert generated(model, exported).tolist() == [end]
    model.generation_config.eos_token_id = None  # it is the id that stops it
    assert generated(model, exported).tolist() == [end] * 6


def test_a_batch_of_texts_is_padded(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    texts = ["one", "The square of 12 is 144"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    own = Tokenizer.from_file(str(exported / "tokenizer.json"))
    for row, mask, text in zip(batch["input_ids"], batch["attention_mask"], texts, strict=True):
        assert row[mask.bool()].tolist() == own.encode(text).ids
        assert set(row[~mask.bool()].tolist()) <= {tokenizer.pad_token_id}
    assert batch["attention_mask"].sum() < batch["attention_mask"].numel()
    assert tokenizer.pad_token == tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.model_max_length == 1024
    assert tokenizer.decode(own.encode("12 * 12").ids) == f"{END_OF_TEXT}12 * 12"


def test_an_export_encodes_a_prompt_as_its_run_does(exported: Path, tmp_path: Path) -> None:
    run, ours = open_served(exported.parent / "run"), open_served(exported)
    library = Tokenizer.from_file(str(exported / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(exported)
    (separator,) = run.end_ids
    for text in ("def f(", f"{END_OF_TEXT}def f(", " 12 * 12\n"):
        ids = run.encode(text)
        assert ids[0] == separator and separator not in ids[1:]
        assert ours.encode(text) == theirs(text)["input_ids"] == ids
        assert library.encode(text.replace(END_OF_TEXT, "")).ids[0] == separator
    assert library.encode("a", "b").ids == [*run.encode("a"), *run.encode("b")]
    convert(exported, tmp_path / "again")
    assert open_served(tmp_path / "again").encode("def f(") == run.encode("def f(")


def test_an_export_that_puts_nothing_before_a_text_still_loads(
    exported: Path, tmp_path: Path
) -> None:
    old = shutil.copytree(exported, tmp_path / "old")
    content = json.loads((old / "tokenizer.json").read_text()) | {"post_processor": None}
    (old / "tokenizer.json").write_text(json.dumps(content))
    assert open_served(old).encode("def f(") == open_served(exported).encode("def f(")[1:]


def with_ids(folder: Path, name: str, **ids: Any) -> Path:
    """Save a small model with ids of its own, and a tokenizer beside it."""
    model = model_of(name)
    for option, value in ids.items():
        setattr(model.config, option, value)
        setattr(model.generation_config, option, value)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_of(300))
    return folder


def test_what_came_from_hugging_face_keeps_its_own(tmp_path: Path) -> None:
    ids = {"bos_token_id": 3, "eos_token_id": [7, 9], "pad_token_id": 11}
    convert(with_ids(tmp_path / "saved", "llama", **ids), tmp_path / "ours")
    (tmp_path / "saved" / "generation_config.json").write_text("{}")
    convert(tmp_path / "ours", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    generation = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    tokens = AutoTokenizer.from_pretrained(tmp_path / "back")
    for name, value in ids.items():
        assert config[name] == generation[name] == value
    assert (tokens.bos_token_id, tokens.eos_token_id, tokens.pad_token_id) == (3, 7, 11)


def test_end_tokens_of_generation_config_are_kept_in_both_directions(tmp_path: Path) -> None:
    folder = with_ids(tmp_path / "saved", "llama", eos_token_id=7)
    for name, ids in (
        ("config", {"pad_token_id": -1}),
        ("generation_config", {"eos_token_id": [7, 9]}),
    ):
        content = json.loads((folder / f"{name}.json").read_text()) | ids
        (folder / f"{name}.json").write_text(json.dumps(content))
    convert(folder, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    found = {name: open_served(tmp_path / name).end_ids for name in ("saved", "ours", "back")}
    assert found == dict.fromkeys(found, (7, 9))
    (tmp_path / "back" / "generation_config.json").unlink()
    assert ids_of(tmp_path / "back") == {
        "bos_token_id": None, "eos_token_id": [7, 9], "pad_token_id": None,
    }  # fmt: skip
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is '</s>'"):
        convert(folder, tmp_path / "none")


def test_a_run_from_weights_keeps_their_type_and_ends_as_it_was_trained(tmp_path: Path) -> None:
    """Phi-3 without a window computes what Llama does, under other names of weights."""
    saved = with_ids(tmp_path / "saved", "phi3-tied-no-window", eos_token_id=7)
    tensors = load_file(saved / WEIGHTS)
    wide = torch.zeros(300, 32)
    wide[:97] = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "model.embed_tokens.weight": wide}, saved / WEIGHTS)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    convert(saved, tmp_path / "ours")
    config = small_run(tmp_path, init=str(tmp_path / "ours"), shape=ShapeConfig(), steps=1)
    run_ranks(save_at_once, 1, config, threads=1)
    assert convert(tmp_path / "run", tmp_path / "back").family == "phi3"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(saved).vocab[END_OF_TEXT]


@pytest.mark.parametrize(
    "content", ['{"eos_token_id": "</s>"}', f'{{"bos_token_id": {10**21}}}', "[]", "{"]
)
def test_a_damaged_word_of_the_origin_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / ORIGIN).write_text(content)
    with pytest.raises(CheckpointError, match=r"hugging_face\.json"):
        ids_of(tmp_path)


@pytest.mark.parametrize("name", PRESETS_OF_TYPES)
def test_the_tokenizer_is_taken_as_it_is_whatever_the_type(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_of(300))
    ids = ids_of(tmp_path)
    config = config_to_hf(shape_of(name), "float32", ids=ids)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert write_missing(tmp_path, ids, 64) == ["generation_config.json", "tokenizer_config.json"]
    separator = ids["bos_token_id"]
    assert isinstance(separator, int)
    prepend_separator(tmp_path, separator)
    tokenizer, own = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    text = f" it's 12,345 Ünicode\n\n  <s> </s> 日本 [INST] {END_OF_TEXT}"
    ids_of_text = own.encode(text, add_special_tokens=False).ids
    assert tokenizer(text)["input_ids"] == own.encode(text).ids == [separator, *ids_of_text]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == ids["eos_token_id"]


def test_the_tokenizer_and_its_like_go_along(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    for name in ("tokenizer.json", "merges.txt"):
        (tmp_path / "saved" / name).write_text(name)
    (tmp_path / "saved" / "notes.txt").write_text("not copied")
    done = convert(tmp_path / "saved", tmp_path / "ours")
    assert done.companions == ["generation_config.json", "merges.txt", "tokenizer.json"]
    assert {*done.companions} <= files_of(tmp_path / "ours") >= {manifest.NAME, "index.json"}
    assert {*done.companions} <= set(manifest.read(tmp_path / "ours").files)
    convert(tmp_path / "ours", tmp_path / "back")
    assert files_of(tmp_path / "back") == {"config.json", WEIGHTS, *done.companions}
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "tokenizer.json"


def test_a_file_beside_weights_that_is_too_large_is_not_copied(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    with (tmp_path / "saved" / "vocab.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"vocab.json has 268,435,457 bytes; expected at"):
        convert(tmp_path / "saved", tmp_path / "ours")
    assert files_of(tmp_path) == {"saved"}
