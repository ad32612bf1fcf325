"""`phalanx convert` as a command, and `phalanx train --init` with what it wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from phalanx.checkpoint import manifest
from phalanx.checkpoint.weights import Weights, open_checkpoint
from phalanx.cli.main import main
from phalanx.config import BatchConfig, CorpusConfig, ShapeConfig, TrainConfig
from phalanx.errors import CheckpointError, ConfigError
from phalanx.hugging_face.compare import compare_logits
from phalanx.hugging_face.convert import convert
from phalanx.launch.local import run_ranks
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.text import TextSession
from small_run import tokenizer_of

logging.disable_progress_bar()


def llama(folder: Path, **options: Any) -> LlamaForCausalLM:
    """Save a small Llama with a tokenizer; return it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_of(300))
    return model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder that holds a saved Llama and a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    llama(tmp_path / "saved")
    (tmp_path / "text.txt").write_text("".join(f"{n} {n * n}\n" for n in range(300)))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_what_was_done_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "saved", "ours", "--check", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("checked: the logits of LlamaForCausalLM of transformers and of ")
    assert "agree on 2 x 64 random tokens in float32" in lines[0]
    assert lines[1].startswith("wrote ours: a checkpoint of weights (llama), 21 tensors, 1")
    assert lines[1].endswith("with generation_config.json, tokenizer.json")
    document = json.loads(lines[2])
    assert document["kind"] == "phalanx" and document["num_tensors"] == 21
    assert document["num_bytes"] == 4 * LlamaForCausalLM.from_pretrained("saved").num_parameters()
    assert document["check"]["agrees"] is True
    assert 0 < document["check"]["largest_difference"] < 1e-4 * document["check"]["largest_logit"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_check_allows_for_the_rounding_that_was_asked_for(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "saved", "ours", "--check", "--dtype", dtype]) == 0
    assert main(["convert", "ours", "back", "--max-shard-gb", "1e-5", "--check"]) == 0
    assert f"bytes of {dtype}, in " in capsys.readouterr().out
    assert len(list(Path("back").glob("model-*-of-*.safetensors"))) > 5


def test_the_check_fails_where_the_models_differ(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was written is damaged between writing and checking."""
    from phalanx.cli import convert as verb

    def convert_and_spoil(*args: Any, **options: Any) -> Any:
        done = convert(*args, **options)
        config = json.loads((done.destination / "config.json").read_text())
        config["rope_theta"] *= 1.01
        (done.destination / "config.json").write_text(json.dumps(config))
        return done

    convert(folder / "saved", folder / "ours")
    monkeypatch.setattr("phalanx.hugging_face.convert.convert", convert_and_spoil)
    assert verb.run(["ours", "back", "--check", "--json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "do NOT agree" in lines[0]
    assert json.loads(lines[2])["check"]["agrees"] is False


def test_one_wrong_weight_is_seen(folder: Path) -> None:
    convert(folder / "saved", folder / "ours")
    right = open_checkpoint(folder / "ours")

    def read(name: str) -> Tensor:
        tensor = right.read(name)
        if name == "blocks.1.attention.k.weight":
            tensor[0, 0] += 0.1
        return tensor

    assert compare_logits(right, folder / "saved", torch.float32).is_within
    wrong = Weights(right.folder, right.shape, read)
    assert not compare_logits(wrong, folder / "saved", torch.float32).is_within
    nan = Weights(right.folder, right.shape, lambda name: right.read(name) * float("nan"))
    assert not compare_logits(nan, folder / "saved", torch.float32).is_within


def test_what_transformers_cannot_run_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **options: Any) -> None:
        raise RuntimeError(f"no place for {sorted(options)}\nand more lines")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    assert main(["convert", "saved", "ours", "--check"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "phalanx: written, but could not be checked: transformers cannot run saved: RuntimeError: "
        "no place for ['dtype', 'local_files_only']"
    ]
    assert open_checkpoint(folder / "ours").shape.num_layers == 2


def test_the_check_without_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("phalanx.hugging_face.compare.find_spec", lambda _: None)
    assert main(["convert", "saved", "ours", "--check"]) == 2
    assert "pip install 'phalanx-train[hf]'" in capsys.readouterr().err
    assert not (folder / "ours").exists()


@pytest.mark.slow
def test_a_bar_on_a_terminal_where_there_is_no_transformers(folder: Path) -> None:
    """Only the check needs transformers."""
    code = (
        "import sys; sys.modules['transformers'] = None; from phalanx.cli.main import main;"
        "sys.exit(main(['convert', 'saved', 'ours']) or main(['convert', 'ours', 'back']))"
    )
    master, slave = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=slave,
        env={**os.environ, "TERM": "xterm-256color"},
        timeout=280,
    )
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert done.returncode == 0
    assert "convert" in shown and "wrote ours" in shown and "wrote back" in shown
    assert (folder / "back" / "config.json").exists()


# --init


def config_of(**options: Any) -> TrainConfig:
    base = TrainConfig(
        data="text.txt", init="ours", device="cpu", precision="float32", strategy="dp2", steps=4,
        threads=1, out="run", eval_every=0,
        corpus=CorpusConfig(seq_len=16, validation=0),
        batch=BatchConfig(global_size=4, microbatch=2),
    )  # fmt: skip
    return dataclasses.replace(base, **options)


def step_and_save(job: Job) -> tuple[float, list[tuple[Tensor, Tensor]]]:
    """Take a step and save; return its loss and this rank's tokens and labels."""
    session = TextSession(job)
    with session.loader:
        batches = next(session.loader)
        loss = session.step(batches).loss
        session.begin_save()
        session.saver.finish()
    return loss, [(batch.tokens_BT, batch.labels_BT) for batch in batches]


@pytest.mark.parametrize("strategy", ["dp2", "fsdp2"])
def test_the_first_loss_is_that_of_transformers(strategy: str, folder: Path) -> None:
    convert(folder / "saved", folder / "ours")
    job = resolve(config_of(strategy=strategy))
    ranks = run_ranks(step_and_save, 2, job, threads=1)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "saved").double()
    rows = [batch for _, batches in ranks for batch in batches]
    logits = theirs(torch.cat([tokens for tokens, _ in rows])).logits
    labels = torch.cat([labels for _, labels in rows])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert [loss for loss, _ in ranks] == pytest.approx([expected, expected], rel=2e-6)
    assert Path("run/tokenizer.json").read_text() == Path("ours/tokenizer.json").read_text()


def test_the_shape_is_that_of_the_weights(folder: Path) -> None:
    convert(folder / "saved", folder / "ours")
    held = open_checkpoint(folder / "ours").shape
    assert resolve(config_of()).shape == held
    same = ShapeConfig(num_layers=2, vocab_size=320)
    assert resolve(config_of(shape=same)).shape == held
    with_dropout = resolve(config_of(shape=ShapeConfig(dropout=0.1))).shape
    assert with_dropout == dataclasses.replace(held, dropout=0.1)
    for options, message in (
        ({"shape": ShapeConfig(num_layers=3)}, "num_layers is 2, but the given shape has 3"),
        ({"model": "gpt2-124m"}, r"vocab_size is 320, but model gpt2-124m .*has 50257"),
        ({"shape": ShapeConfig(tied=True)}, "tied is False, but the given shape has True"),
    ):
        with pytest.raises(ConfigError, match=f"init is ours.*{message}.*leave model and shape"):
            resolve(config_of(**options))


def test_the_tokenizer_is_that_of_the_folder_unless_one_is_given(folder: Path) -> None:
    convert(folder / "saved", folder / "ours")
    size = Tokenizer.from_file(str(resolve(config_of()).tokens.tokenizer)).get_vocab_size()
    assert size == 300
    (folder / "other.json").write_text(tokenizer_of(310))
    given = resolve(config_of(tokenizer="other.json")).tokens.tokenizer
    assert Tokenizer.from_file(str(given)).get_vocab_size() == 310
    trained = resolve(config_of(corpus=CorpusConfig(seq_len=16, vocab_size=270)))
    assert Tokenizer.from_file(str(trained.tokens.tokenizer)).get_vocab_size() == 270
    (folder / "ours" / "tokenizer.json").write_text(tokenizer_of(400))
    with pytest.raises(ConfigError, match=r"ours/tokenizer.json has ids up to 399, but .* 320"):
        resolve(config_of())


def test_weights_alone_begin_a_run_but_resume_none(folder: Path) -> None:
    convert(folder / "saved", folder / "ours")
    with pytest.raises(CheckpointError, match=r"has only weights.*--init"):
        resolve(config_of(init=None, resume="ours", strategy="dp7", data="not there"))
    with pytest.raises(
        CheckpointError, match=r"init is saved, a Hugging Face folder; .*--model sa"
    ):
        resolve(config_of(init="saved"))


def test_from_weights_to_a_run_and_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run begun with --init goes on with its shape and tokenizer, and is converted."""
    convert(folder / "saved", folder / "ours")
    run_ranks(step_and_save, 2, resolve(config_of(strategy="fsdp2")), threads=1)
    again = resolve(config_of(init=None, resume="run", out=None))
    assert again.start is not None and again.start.about.steps_done == 1
    run_ranks(step_and_save, 2, again, threads=1)
    assert main(["convert", "run", "back", "--check"]) == 0
    assert "wrote back: a Hugging Face folder (llama), 21" in capsys.readouterr().out
    assert (folder / "back" / "tokenizer.json").exists()
    latest = manifest.find(folder / "run")
    assert latest.name == "step-00000002"
    theirs = AutoModelForCausalLM.from_pretrained(folder / "back").model.norm.weight
    assert torch.equal(theirs, open_checkpoint(latest).read("norm.weight"))
    before = AutoModelForCausalLM.from_pretrained(folder / "saved").model.norm.weight
    assert not torch.equal(theirs, before)
