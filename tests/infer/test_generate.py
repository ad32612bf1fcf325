"""`phalanx generate` on what was trained, under any strategy, and on published layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from served_model import published
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from phalanx import train_decoder
from phalanx.checkpoint.weights import load_decoder
from phalanx.cli.main import main
from phalanx.config import ShapeConfig
from phalanx.hugging_face.convert import convert
from phalanx.infer.served import open_served
from phalanx.train.report.sample import TEMPERATURE
from small_run import small_run

PROMPT = "The square of 7 is"


def generated(
    folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> list[dict[str, Any]]:
    """Return the completions of the JSON document, whose texts standard output has too, alone."""
    capsys.readouterr()  # what the training before it printed
    assert main(["generate", str(folder), *words, "--json"]) == 0
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    document = json.loads(last)
    if "--logprobs" not in words:
        texts = [each["prompt"] + each["text"] for each in document["completions"]]
        assert lines == "\n\n".join(texts).splitlines()
    assert 0 < document["first_token_s"] <= document["took_s"]
    assert re.search(r"tokens in [\d.]+ s, [\d,.]+ tokens/s; the first after [\d.]+ s\n", err)
    return document["completions"]


def trained(folder: Path, strategy: str) -> tuple[Path, str]:
    """Train a small model under a strategy; return its run folder and the sample that it wrote."""
    shape = ShapeConfig(
        num_layers=2, hidden=16, num_heads=2, ffn=24, vocab_size=300, max_seq_len=64
    )
    config = small_run(folder, strategy=strategy, steps=12, shape=shape, prompt=PROMPT)
    summary = train_decoder(config)
    assert summary.sample is not None
    return folder / "run", summary.sample


@pytest.mark.parametrize("strategy", ["pp2", pytest.param("tp4:2d", marks=pytest.mark.slow)])
def test_a_run_of_any_strategy_generates_the_sample_that_its_training_wrote(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, sample = trained(tmp_path, strategy)
    words = ("--precision", "float64", "--temperature", str(TEMPERATURE), "--max-tokens", "8")
    (completion,) = generated(run, capsys, "--prompt", PROMPT, *words)
    assert PROMPT + completion["text"] == sample
    convert(run, tmp_path / "hf")
    (again,) = generated(tmp_path / "hf", capsys, "--prompt", PROMPT, *words)
    served, published = open_served(run), open_served(tmp_path / "hf")
    assert served.end_ids == published.end_ids != ()
    assert again["finish_reason"] == completion["finish_reason"]


@pytest.fixture(name="published")
def _published(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return published(tmp_path, of=getattr(request, "param", "llama"))


@pytest.mark.parametrize("published", ["llama", "mixtral", "qwen2-moe"], indirect=True)
def test_a_published_folder_is_continued_as_transformers_does(
    published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = generated(
        published, capsys, "--prompt", "Once", "--prompt", "upon a", "--temperature", "0",
        "--precision", "float32", "--max-tokens", "12", "--logprobs", "2",
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(published / "tokenizer.json"))
    model: Any = AutoModelForCausalLM.from_pretrained(published)
    for each in found:
        ids = tokenizer(each["prompt"], return_tensors="pt")["input_ids"]
        expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert each["tokens"] == expected.tolist()
        assert each["text"].replace(" ", "") == tokenizer.decode(expected).replace(" ", "")
        with torch.no_grad():
            logits = model(torch.cat([ids[0], expected])[None]).logits[0, ids.shape[1] - 1 : -1]
        top = logits.log_softmax(-1).topk(2).values
        scores = each["logprobs"]
        assert [text[-1] for text in scores["tokens"]] == [
            tokenizer.decode([id]) for id in expected
        ]
        assert scores["token_logprobs"] == pytest.approx(top[:, 0].tolist(), abs=1e-4)
        found = [list(others.values()) for others in scores["top_logprobs"]]
        assert found == [pytest.approx(each, abs=1e-4) for each in top.tolist()]


def test_a_stop_text_ends_a_text_before_it(
    published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--prompt", "Once", "--temperature", "0", "--max-tokens", "30")
    (whole,) = generated(published, capsys, *words)
    stop = whole["text"][5:7]
    (short,) = generated(published, capsys, *words, "--stop", stop, "--stop", "no such")
    assert short["finish_reason"] == "stop"
    assert short["text"] == whole["text"][: whole["text"].index(stop)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "RUN is missing; expected: phalanx generate RUN --prompt TEXT"),
        (["nowhere"], "nowhere does not exist"),
        (["hf", "--top-p", "1.5"], "top_p is 1.5; expected a number in [0, 1]; the nearest is 1"),
        (
            ["hf", "--prompt", "Once", "--max-tokens", "200"],
            "the model has 128 positions; the nearest that fits is max_tokens 123",
        ),
        (
            ["hf", "--cache-tokens", "32"],
            "64 needs 65; the cache has 32 positions; the nearest that fits is max_tokens 31",
        ),
        (
            ["hf", "--cache-tokens", str(10**18)],
            "cache_tokens is 1,000,000,000,000,000,000, and each takes",
        ),
        (
            ["hf", "--prompt", "a" * 200, "--max-tokens", "8"],
            "the model has 128 positions; the nearest that fits is 120 prompt tokens",
        ),
        (
            ["hf", "--prompt", "a" * 200, "--max-tokens", "300"],
            "the nearest that fits is 127 prompt tokens with max_tokens 1",
        ),
        (["hf", "--device", "cuda"], "torch finds no CUDA device; the nearest is cpu"),
    ],
)
def test_a_wrong_request_is_answered(
    words: list[str],
    message: str,
    published: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    monkeypatch.chdir(published.parent)
    assert main(["generate", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_refused(
    published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (published / "tokenizer.json").unlink()
    assert main(["generate", str(published)]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_a_folder_of_links_generates_as_its_files_do(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (published / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (tmp_path / "snapshot").mkdir()
    for file in published.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    words = ("--prompt", "Once", "--max-tokens", "3")
    linked = generated(tmp_path / "snapshot", capsys, *words)
    assert linked == generated(published, capsys, *words)


HOSTILE: dict[str, tuple[str, Any, str]] = {
    "an object for an id": (
        "generation_config.json", {"eos_token_id": {"a": 1}},
        "generation_config.json: eos_token_id is {'a': 1}; expected a whole number, a list of",
    ),
    "a text for an id": (
        "generation_config.json", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'; expected a who"
    ),
    "templates of numbers": (
        "tokenizer_config.json", {"chat_template": [3]},
        "tokenizer_config.json: chat_template is [3]; expected a string, or a list of objects",
    ),
    "a template without a name": (
        "tokenizer_config.json", {"chat_template": [{"template": "x"}]},
        "chat_template is [{'template': 'x'}]; expected a string, or a list of objects with name",
    ),
    "a template in another encoding": (
        "chat_template.jinja", b"\xff", "chat_template.jinja: it is not UTF-8"
    ),
    "a tokenizer of another model": (
        "tokenizer.json",
        {"model": {"type": "WordLevel", "vocab": {"x": 99_999}, "unk_token": "x"}},
        "the tokenizer returns token 99,999, but the model has tokens from 0 to 96; put the",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_file_beside_the_weights_is_named(
    case: str, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, message = HOSTILE[case]
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (published / name).write_bytes(raw)
    assert main(["generate", str(published), "--prompt", "Once", "--max-tokens", "1"]) == 2
    assert message in capsys.readouterr().err


def test_weights_are_read_in_the_type_of_the_engine(published: Path) -> None:
    weights = open_served(published).weights
    model = load_decoder(weights, torch.bfloat16, "cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
