"""Presets have their published sizes, and overrides make sensible models."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.weights import shape_in
from phalanx.config import ShapeConfig
from phalanx.errors import CheckpointError, ConfigError, NotDivisible
from phalanx.models.decoder import Decoder
from phalanx.models.registry import PRESETS, shape_of, with_sizes

# Millions of parameters, from the model cards and the weights themselves; GPT-2's with its tied
# embedding counted once.
PUBLISHED = {
    "gpt2-124m": 124.44,
    "gpt2-355m": 354.82,
    "gpt2-774m": 774.03,
    "gpt2-1.5b": 1557.61,
    "gpt3-175b": 174604.26,  # of the sizes of its paper, which says 175 B
    "llama2-7b": 6738.42,
    "llama3-1b": 1235.81,
    "llama3-3b": 3212.75,
    "llama3-8b": 8030.26,
    "llama3-70b": 70553.71,
    "llama3-405b": 405853.39,
    "mistral-7b": 7241.73,
    "phi3-mini": 3821.08,
    "qwen2.5-0.5b": 494.03,
    "qwen2.5-7b": 7615.62,
    "olmo2-1b": 1484.92,
    "olmo2-7b": 7298.62,
    "gemma3-270m": 268.10,
    "gemma3-1b": 999.89,
    "qwen3-0.6b": 596.05,
    "qwen3-1.7b": 1720.57,
    "qwen3-4b": 4022.47,
    "qwen3-8b": 8190.74,
    "qwen3-14b": 14768.31,
    "qwen3-32b": 32762.12,
    "mixtral-8x7b": 46702.79,
    "olmoe-1b-7b": 6919.16,
    "qwen3-30b-a3b": 30532.12,
    "qwen3-235b-a22b": 235093.63,
    "deepseek-v3-671b": 671026.40,  # without the module that predicts a second token
}


def test_every_preset_has_a_published_size() -> None:
    assert PUBLISHED.keys() | {"demo"} == PRESETS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(shape_of(name))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(PUBLISHED[name], abs=0.006)


def test_demo_is_small() -> None:
    count = sum(parameter.numel() for parameter in Decoder(shape_of("demo")).parameters())
    assert 5e6 < count < 10e6


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'llama3-8'.*did you mean 'llama3-8b'"):
        shape_of("llama3-8")


def test_nothing_given_changes_nothing() -> None:
    for shape in PRESETS.values():
        assert with_sizes(shape, ShapeConfig()) == shape


def test_head_dim_follows_hidden_and_num_heads() -> None:
    demo = shape_of("demo")
    assert with_sizes(demo, ShapeConfig(hidden=512)).head_dim == 512 // demo.num_heads
    assert with_sizes(demo, ShapeConfig(num_heads=8)).head_dim == 32
    assert with_sizes(demo, ShapeConfig(hidden=512, head_dim=48)).head_dim == 48
    with pytest.raises(NotDivisible, match=r"hidden is 256, which 3 does not divide.*is 2"):
        with_sizes(demo, ShapeConfig(num_heads=3))


def test_num_kv_heads_follows_num_heads() -> None:
    assert with_sizes(shape_of("demo"), ShapeConfig(num_heads=8)).num_kv_heads == 8
    grouped = shape_of("llama3-8b")
    assert with_sizes(grouped, ShapeConfig(num_heads=16)).num_kv_heads == 8
    assert with_sizes(grouped, ShapeConfig(num_heads=4)).num_kv_heads == 4
    assert with_sizes(grouped, ShapeConfig(hidden=240, num_heads=12)).num_kv_heads == 6
    assert with_sizes(grouped, ShapeConfig(num_heads=16, num_kv_heads=2)).num_kv_heads == 2


def test_false_and_zero_are_values() -> None:
    assert with_sizes(shape_of("gpt2-124m"), ShapeConfig(tied=False)).tied is False
    dropped = with_sizes(shape_of("demo"), ShapeConfig(dropout=0.1))
    assert with_sizes(dropped, ShapeConfig(dropout=0.0)).dropout == 0.0


@pytest.mark.parametrize("sizes", [{"num_heads": 0}, {"hidden": 0}, {"num_layers": -1}])
def test_sizes_below_one_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        with_sizes(shape_of("demo"), ShapeConfig(**sizes))


@pytest.mark.parametrize("name", ["norm_eps", "rope_theta", "window_theta"])
@pytest.mark.parametrize(
    "number", [float("nan"), float("inf"), -1.0, 0.0, pytest.param(10**400, id="more than a float")]
)
def test_a_number_that_no_model_has_is_refused(name: str, number: float) -> None:
    values: dict[str, Any] = {"window": 4, name: number}
    with pytest.raises(ConfigError, match=f"{name} is .*; it must be above 0 and finite"):
        replace(shape_of("demo"), **values)


def test_what_speaks_of_a_window_needs_one() -> None:
    with pytest.raises(ConfigError, match="full_every is 2, but window is None; full_every needs"):
        replace(shape_of("demo"), full_every=2)
    with pytest.raises(ConfigError, match=r"window is 0; it must be at least 1"):
        replace(shape_of("demo"), window=0)
    gemma = with_sizes(shape_of("gemma3-1b"), ShapeConfig(window=64))
    assert [gemma.window_of(block) for block in range(7)] == [64] * 5 + [None, 64]


def test_a_manifest_that_is_older_than_a_choice_means_its_default() -> None:
    shape, of_gpt2 = shape_of("llama3-8b"), shape_of("gpt2-124m")
    new = ("norm_at", "window", "full_every", "window_theta", "scaled_embedding")
    for each in (shape, of_gpt2):
        written = json.loads(json.dumps(asdict(each)))
        older = {name: value for name, value in written.items() if name not in new}
        about = Manifest(
            steps_done=1, num_steps=1, consumed=0, num_ranks=1, strategy="dp1", shape=older,
            stream={},
        )  # fmt: skip
        assert shape_in(about, Path()) == each
        about.check_shape(each)
        with pytest.raises(
            CheckpointError,
            match="its norm_at is input, but --model or --shape sets both; leave",
        ):
            about.check_shape(replace(each, norm_at="both"))
