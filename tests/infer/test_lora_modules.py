"""Adapters by name beside the model: each request as if its adapter were merged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from models_and_prompts import prompts, twins
from safetensors.torch import load_file, save_file
from served_model import published, serving

from phalanx.checkpoint.weights import Weights
from phalanx.cli import convert
from phalanx.errors import CheckpointError, ConfigError
from phalanx.hugging_face.peft_folder import CONFIG, MODEL, write_peft
from phalanx.infer.app import Limits
from phalanx.infer.assembly import engine_of, with_engine
from phalanx.infer.engine import Engine
from phalanx.infer.options import EngineConfig, Sampling
from phalanx.infer.served import Served, open_served
from phalanx.models.shape import Lora

CONFIG_OF = EngineConfig(precision="float64", threads=1, cache_tokens=1280, budget=32)
GREEDY = Sampling(max_tokens=4, temperature=0, ignore_end=True, logprobs=0)
TARGETS = {"a": ("attention.q", "mlp.down"), "b": ("attention.q", "attention.output", "mlp.gate")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapted(tmp_path_factory.mktemp("adapters"), "llama", TARGETS)


def adapted(folder: Path, of: str, adapters: dict[str, tuple[str, ...]]) -> Path:
    """Write a model, hf, and adapters a and b of other ranks and maps; return `folder`."""
    published(folder, of=of)
    shape = twins(of)[0].shape
    for seed, (name, targets) in enumerate(adapters.items()):
        lora = Lora(rank=2 + seed, alpha=5, targets=targets, is_rank_stabilized=bool(seed))
        torch.manual_seed(seed)
        made: dict[str, torch.Tensor] = {}

        def read(
            name: str, lora: Lora = lora, made: dict[str, torch.Tensor] = made
        ) -> torch.Tensor:
            module = dict(twins(of)[0].named_modules())[name.partition(".lora_")[0]]
            num_out, num_in = module.weight.shape
            size = (lora.rank, num_in) if ".lora_A" in name else (num_out, lora.rank)
            return made.setdefault(name, torch.randn(size) / 4)

        (folder / name).mkdir()
        weights = Weights(folder, dataclasses.replace(shape, lora=lora), read)
        write_peft(folder / name, weights, str(folder / "hf"), twins(of)[1].config.model_type)
    return folder


def modules_of(folder: Path) -> tuple[str, ...]:
    return tuple(f"{name}={folder / name}" for name in TARGETS)


Answers = list[tuple[list[int], list[float]]]


def answers(engine: Engine, adapters: list[int]) -> Answers:
    """Continue a prompt for each adapter number in one batch; return tokens and their scores."""
    begun = [
        engine.prepare(prompt, GREEDY, adapter=number)[0]
        for prompt, number in zip(prompts(len(adapters)), adapters, strict=True)
    ]
    for each in begun:
        engine.queue([each])
    while engine.scheduler.has_work:
        engine.step()
    return [(each.new_tokens, [score.logprob for score in each.scores]) for each in begun]


MIXED = [0, 1, 2, 1, 2]


def mixed_answers(_: Served, engine: Engine) -> Answers:
    return answers(engine, MIXED) + answers(engine, MIXED[::-1])  # prefixes are found again


def check_mixed(found: Answers, folder: Path) -> None:
    expected = [
        answers(engine_of(open_served(folder / name), CONFIG_OF), [0] * len(MIXED))
        for name in ("hf", *TARGETS)
    ]
    assert len({str(of[3][0]) for of in expected}) == 3  # the adapters change the text
    for number, (tokens, scores) in enumerate(found):
        at = number % len(MIXED)
        adapter = MIXED[at] if number < len(MIXED) else MIXED[::-1][at]
        assert tokens == expected[adapter][at][0]
        assert scores == pytest.approx(expected[adapter][at][1], abs=1e-10)


def test_a_batch_of_several_adapters_is_as_of_merged_models(folder: Path) -> None:
    config = dataclasses.replace(CONFIG_OF, lora_modules=modules_of(folder))
    check_mixed(with_engine(folder / "hf", config, mixed_answers), folder)


def test_attention_has_adapters_beside_experts(tmp_path: Path) -> None:
    of_attention = {"a": ("attention.q", "attention.v"), "b": ("attention.q", "attention.output")}
    folder = adapted(tmp_path, "olmoe", of_attention)
    config = dataclasses.replace(CONFIG_OF, lora_modules=modules_of(folder))
    check_mixed(with_engine(folder / "hf", config, mixed_answers), folder)
    settings = json.loads((folder / "b" / CONFIG).read_text())
    settings["target_parameters"] = ["gate.weight", "down_proj", "gate_up_proj"]
    (folder / "b" / CONFIG).write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="adapters of experts and routers are read once merg"):
        open_served(folder / "hf", config.lora_modules)
    tensors = load_file(folder / "a" / MODEL)
    for letter in "AB":  # as PEFT writes them over a transformers that had a module an expert
        shape = {"A": (2, 32), "B": (48, 2)}[letter]
        name = "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_{}.weight"
        tensors[name.format(letter)] = torch.ones(shape)
    save_file(tensors, folder / "a" / MODEL)
    with pytest.raises(
        CheckpointError, match=r"experts\.3\.up_proj.*which no linear map of this o"
    ):
        open_served(folder / "hf", config.lora_modules)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tp2", "tp2:megatron"])
def test_so_it_is_on_several_ranks(folder: Path, strategy: str) -> None:
    config = dataclasses.replace(
        CONFIG_OF, lora_modules=modules_of(folder), strategy=strategy, device="cpu"
    )
    check_mixed(with_engine(folder / "hf", config, mixed_answers), folder)


def test_a_request_chooses_by_its_field_model(folder: Path) -> None:
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    texts: list[str] = []
    with serving(folder / "hf", Limits(), lora_modules=modules_of(folder)) as client:
        status, models = client.ask("/v1/models")
        assert status == 200 and [each["id"] for each in models["data"]] == ["hf", "a", "b"]
        assert models["data"][1]["parent"] == "hf"
        for name in ("hf", "a", "b"):
            status, whole = client.ask("/v1/completions", {"model": name, **body})
            assert status == 200 and whole["model"] == name
            texts.append(whole["choices"][0]["text"])
        assert client.ask("/v1/models/b")[1]["id"] == "b"
        assert client.ask("/v1/completions", {"model": "c", **body})[0] == 404
    assert len(set(texts)) == 3


def test_what_is_no_adapter_of_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    for modules in (("a",), ("a=x", "a=y")):
        with pytest.raises(ConfigError, match="expected NAME=FOLDER, each name once"):
            open_served(folder / "hf", modules)
    with pytest.raises(CheckpointError, match="has no adapters"):
        open_served(folder / "hf", (f"a={folder / 'hf'}",))
    text = (folder / "a" / CONFIG).read_text()
    (tmp_path / CONFIG).write_text(text.replace('"bias": "none"', '"bias": "all"'))
    with pytest.raises(CheckpointError, match="bias is 'all'; expected 'none'"):
        open_served(folder / "hf", (f"a={tmp_path}",))


def test_a_merged_folder_has_the_logits_of_the_adapter(folder: Path, tmp_path: Path) -> None:
    words = [str(folder / "b"), str(tmp_path / "merged"), "--base", str(folder / "hf"), "--check"]
    assert convert.run(words) == 0
