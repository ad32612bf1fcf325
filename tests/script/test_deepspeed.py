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


@pytest.mark.parametrize(("stage", "num_ranks", "strategy"), [
    (0, 2, "dp2"), (1, 2, "fsdp2:zero1"), (3, 8, "fsdp8:zero3"), (3, 1, "dp1"),
])  # fmt: skip
def test_stages_are_kinds_of_fsdp(stage: int, num_ranks: int, strategy: str) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": stage}}
    assert phalanx.from_deepspeed(config, num_ranks).strategy == strategy


def refusal_of(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as told:
        phalanx.from_deepspeed(config, 2)
    return str(told.value)


@pytest.mark.parametrize(("more", "words"), [
    ({"fp16": {"enabled": True}}, "fp16 is enabled, but only bf16 and float32"),
    ({"zero_optimization": {"stage": 4}}, "stage is 4, expected 0, 1, 2 or 3"),
    ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param has no counter"),
    ({"compression_training": {"weight_quantization": {}}}, "compression_training has no counter"),
    ({"train_batch_size": 9}, "train_batch_size is 9, but 4 rows a microbatch x 3 microbatches x "),
    ({"train_batch_size": "auto"}, "train_batch_size is 'auto', which another program"),
    ({"gradient_clipping": "auto"}, "gradient_clipping is 'auto', which another program"),
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer is not read: write one of torch.optim and"),
    ({"scheduler": {"type": "WarmupLR"}}, r"scheduler is not read: write one of torch\.optim\.l"),
    ({"gradient_clipping": -1.0}, "gradient_clipping is -1.0, expected a number of at least 0"),
    ({"gradient_clipping": float("nan")}, "gradient_clipping is nan, expected a number of at"),
    ({"bf16": {"enabled": "false"}}, "bf16.enabled is 'false', expected true or false"),
    ({"fp16": {"enabled": 1}}, "fp16.enabled is 1, expected true or false"),
    ({"zero_optimization": {"stage": True}}, "stage is True, expected 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": 1.0}}, r"stage is 1\.0, expected 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": "2"}}, "stage is '2', expected 0, 1, 2 or 3"),
    ({"optimizer": 3}, "optimizer is 3, expected an object"),
    ({"zero_optimization": 3}, "zero_optimization is 3, expected an object"),
])  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        phalanx.from_deepspeed({**CONFIG, **more}, 2)


def test_what_is_no_configuration_is_refused_by_name() -> None:
    config: Any = [CONFIG]
    with pytest.raises(ConfigError, match=r"config is \[.*expected a DeepSpeed configuration"):
        phalanx.from_deepspeed(config)


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
    said = refusal_of(config)
    assert "compression_training has no counterpart" in said
    assert "zero_optimization.offload_optimizer has no counterpart" in said
    autos = "train_micro_batch_size_per_gpu, gradient_accumulation_steps, bf16.enabled are 'auto'"
    assert autos in said and "optimizer is not read" in said
    assert "activation_checkpointing" not in said and "reduce_bucket_size" not in said
    taken = phalanx.from_deepspeed({**CONFIG, "activation_checkpointing": {"profile": True}}, 2)
    assert "activation_checkpointing" in taken.left_out
