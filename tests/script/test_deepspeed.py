"""A DeepSpeed configuration as a strategy and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx.errors import ConfigError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "offload_optimizer": {"device": "none"},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.1}},
}


def test_a_configuration_becomes_a_strategy_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    settings = phalanx.from_deepspeed(path, num_ranks=4)
    assert settings.strategy == "fsdp4:zero2"
    assert (settings.accumulation, settings.batch_size) == (3, 16)
    assert settings.autocast is torch.bfloat16
    assert settings.max_norm == 1.0
    assert settings.left_out == ("steps_per_print", "zero_optimization.overlap_comm")
    optimizer = settings.optimizer([torch.nn.Parameter(torch.ones(2))])
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    found = [group[name] for name in ("lr", "betas", "eps", "weight_decay")]
    assert found == [3e-4, (0.9, 0.95), 1e-7, 0.1]


@pytest.mark.parametrize(("stage", "num_ranks", "strategy"), [
    (0, 2, "dp2"), (1, 2, "fsdp2:zero1"), (3, 8, "fsdp8:zero3"), (3, 1, "dp1"),
])  # fmt: skip
def test_stages_are_kinds_of_fsdp(stage: int, num_ranks: int, strategy: str) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": stage}}
    assert phalanx.from_deepspeed(config, num_ranks).strategy == strategy


@pytest.mark.parametrize(("type_", "more", "kind", "decay"), [
    ("Adam", {}, torch.optim.AdamW, 0.0), ("Adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0),
    ("AdamW", {}, torch.optim.AdamW, 0.0), ("SGD", {"momentum": 0.9}, torch.optim.SGD, 0.0),
])  # fmt: skip
def test_optimizers_have_the_defaults_of_deepspeed(
    type_: str, more: dict[str, Any], kind: type, decay: float
) -> None:
    config = {"train_batch_size": 8, "optimizer": {"type": type_, "params": {"lr": 0.1, **more}}}
    settings = phalanx.from_deepspeed(config, 1)
    optimizer = settings.optimizer([torch.nn.Parameter(torch.ones(2))])
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["weight_decay"] == decay


# What DeepSpeed 0.19.8 gives an optimizer of lr 0.05 before each of 14 steps.
RATES = [
    ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 5},
     [0, 0, 0.0431, 0.0683, 0.0861, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
    ("WarmupLR", {"warmup_num_steps": 5, "warmup_type": "linear", "warmup_min_lr": 0.01},
     [0.01, 0.01, 0.018, 0.026, 0.034, 0.042, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05]),
    ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_max_lr": 0.2},
     [0, 0, 0.1, 0.1585, 0.2, 0.2, 0.175, 0.15, 0.125, 0.1, 0.075, 0.05, 0.025, 0]),
    ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_min_ratio": 0.1,
                        "warmup_type": "linear"},
     [0, 0.005, 0.0163, 0.0275, 0.0388, 0.0481, 0.0427, 0.0346, 0.025, 0.0154, 0.0073, 0.0019,
      0, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("type_", "params", "expected"), RATES)
def test_schedules_are_those_of_deepspeed(
    type_: str, params: dict[str, Any], expected: list[float]
) -> None:
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "scheduler": {"type": type_, "params": params},
    }
    settings = phalanx.from_deepspeed(config, 1)
    optimizer = settings.optimizer([torch.nn.Parameter(torch.ones(2))])
    scheduler = settings.scheduler(optimizer)
    assert scheduler is not None
    rates: list[float] = []
    for _ in expected:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected, abs=5.1e-5)


@pytest.mark.parametrize(("more", "words"), [
    ({"fp16": {"enabled": True}}, "fp16 is enabled, and only bf16 or float32"),
    ({"zero_optimization": {"stage": 4}}, "stage is 4, expected 0, 1, 2 or 3"),
    ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param has no counter"),
    ({"compression_training": {"weight_quantization": {}}}, "compression_training has no counter"),
    ({"train_batch_size": 9}, "train_batch_size is 9, but 4 rows a microbatch x 3 microbatches x "),
    ({"train_batch_size": "auto"}, "train_batch_size is 'auto', which another program"),
    ({"gradient_clipping": "auto"}, "gradient_clipping is 'auto', which another program"),
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type is 'OneBitAdam', expected Adam"),
    ({"scheduler": {"type": "OneCycle"}}, "scheduler.type is 'OneCycle', expected WarmupLR"),
    ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "optimizer.params.lr is 'auto'"),
    ({"zero_optimization": 3}, "zero_optimization is 3, expected an object"),
])  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        phalanx.from_deepspeed({**CONFIG, **more}, 2)


@pytest.mark.parametrize(("section", "words"), [
    ({"optimizer": {"type": "SGD", "params": {"lr": 1, "x": 2}}}, "optimizer.params of SGD: .*'x'"),
    ({"scheduler": {"type": "WarmupLR", "params": {"x": 1}}}, "WarmupLR has x, which it has not"),
])  # fmt: skip
def test_what_torch_has_not_is_refused_by_name(section: dict[str, Any], words: str) -> None:
    settings = phalanx.from_deepspeed({**CONFIG, **section}, 2)
    with pytest.raises(ConfigError, match=words):
        settings.scheduler(settings.optimizer([torch.nn.Parameter(torch.ones(2))]))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*ds.json"):
        phalanx.from_deepspeed(tmp_path / "ds.json")


def test_all_that_cannot_be_taken_is_named_at_once() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"
        },
        "activation_checkpointing": {"partition_activations": True},
        "compression_training": {"weight_quantization": {}},
    }  # fmt: skip
    with pytest.raises(ConfigError) as told:
        phalanx.from_deepspeed(config, 2)
    said = str(told.value)
    assert "compression_training has no counterpart" in said
    assert "zero_optimization.offload_optimizer has no counterpart" in said
    autos = (
        "train_micro_batch_size_per_gpu, gradient_accumulation_steps, bf16.enabled, "
        "optimizer.params.lr are 'auto'"
    )
    assert autos in said
    assert "activation_checkpointing" not in said and "reduce_bucket_size" not in said
    taken = phalanx.from_deepspeed({**CONFIG, "activation_checkpointing": {"profile": True}}, 2)
    assert "activation_checkpointing" in taken.left_out
