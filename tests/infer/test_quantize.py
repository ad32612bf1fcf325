"""int8 weights, and a cache in int8 or fp8: what they take, and how far the logits move."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models_and_prompts import engine, prompts, twins
from served_model import published

from phalanx.cli.main import main
from phalanx.infer.assembly import STORED, engine_of
from phalanx.infer.options import EngineConfig, Sampling
from phalanx.infer.paged import FlatStep, KVCache, StepSpan
from phalanx.infer.quantize import quantize_linears, quantized
from phalanx.infer.runner import ModelRunner
from phalanx.infer.served import open_served


def test_each_channel_is_rounded_by_its_own_scale() -> None:
    x = torch.randn(5, 40) * torch.tensor([1e-6, 1.0, 1e3, 0.0, 1.0])[:, None]
    q, scale = quantized(x)
    assert q.dtype == torch.int8 and scale.shape == (5, 1)
    assert ((q * scale - x).abs() <= 0.501 * scale).all()
    assert (q[3] == 0).all() and int(q[0].abs().max()) == 127


def test_fp8_keeps_the_size_of_each_number() -> None:
    x = torch.randn(5, 40).exp() * torch.tensor([1e-6, 1.0, 1e3, 0.0, 1.0])[:, None]
    q, scale = quantized(x, torch.float8_e4m3fn)
    assert ((q.float() * scale - x).abs() <= x / 16 + scale * 2**-10).all()
    assert float(q[0].float().max()) == 448


def logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    """Return the logits after a prompt whose last token reads the others from the cache."""
    blocks = [3, 1, 2]
    runner(FlatStep(prompt[:-1], [StepSpan(0, len(prompt) - 1, blocks)], []))
    at = len(prompt) - 1
    return runner(FlatStep(prompt[-1:], [StepSpan(at, at + 1, blocks)], [0]))[0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-moe", "olmoe"])
def test_the_logits_move_little(name: str) -> None:
    model, _ = twins(name)
    prompt = prompts(2)[1]
    served = engine(model, block_size=16, num_tokens=64)
    runner: Any = served._logits  # pyright: ignore[reportPrivateUsage]
    expected = logits(runner, prompt)
    sizes = (model.shape, served.scheduler.pool, torch.float32, torch.device("cpu"))
    int8, fp8 = (KVCache(*sizes, stored=stored) for stored in STORED.values())
    assert int8.nbytes < 0.5 * runner.cache.nbytes  # heads of 8 numbers; wider ones are nearer 1/4
    assert fp8.nbytes == int8.nbytes
    small = copy.deepcopy(model)
    quantize_linears(small)
    changed = (ModelRunner(model, int8), ModelRunner(small, runner.cache), ModelRunner(model, fp8))
    for each, most in zip(changed, (0.02, 0.02, 0.1), strict=True):
        error = (logits(each, prompt) - expected).abs().max() / expected.abs().max()
        assert 0 < error < most


def test_experts_compute_with_the_rounded_weights() -> None:
    model, _ = twins("olmoe")
    rounded, small = copy.deepcopy(model), copy.deepcopy(model)
    quantize_linears(small)
    experts, expected = (
        dict(each.named_modules())["blocks.1.mlp.experts"] for each in (small, rounded)
    )
    for name, parameter in expected.named_parameters():
        q, scale = quantized(parameter.detach())
        assert torch.equal(getattr(experts, name), q) and q.dtype == torch.int8
        parameter.data = q * scale
    counts_E = torch.tensor([0, 3, 1, 0, 0, 2, 4, 0])
    rows_MD = torch.randn(10, model.shape.hidden)
    with torch.no_grad():
        torch.testing.assert_close(experts(rows_MD, counts_E), expected(rows_MD, counts_E))
    routers = [
        dict(each.named_parameters())["blocks.1.mlp.router.weight"] for each in (small, model)
    ]
    assert torch.equal(*routers)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_engine_that_rounds(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published(tmp_path)
    config = EngineConfig(weights="int8", cache=kind, precision="float32", cache_tokens=640)
    served = engine_of(open_served(folder), config)
    found = served.generate(prompts(8), Sampling(max_tokens=9, temperature=0, ignore_end=True))
    assert all(len(tokens) == 9 for tokens in found)
    assert main(["generate", str(folder), "--weights", "int8", "--strategy", "tp2"]) == 2
    assert "the nearest is weights full" in capsys.readouterr().err
