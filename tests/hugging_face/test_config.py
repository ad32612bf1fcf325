"""A config.json: read, written, and refused by the option that is not computed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folders import GPT2, edit_config, files_of, saved
from small_models import FULL, LLAMA3_ROPE, WINDOWED, YARN, model_of
from transformers import MixtralConfig

from phalanx.errors import ConfigError, PhalanxError
from phalanx.hugging_face.config import config_to_hf, shape_from_hf
from phalanx.hugging_face.convert import convert
from phalanx.hugging_face.families import families_of, family_of
from phalanx.models.shape import ExpertShape, ModelShape


def llama3_rope(**changes: Any) -> Callable[[Path], None]:
    return edit_config(rope_parameters={**LLAMA3_ROPE, **changes})


def yarn(**changes: Any) -> Callable[[Path], None]:
    return edit_config(rope_parameters={**YARN, **changes})


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "architecture": (edit_config(model_type="mamba"), "model_type is 'mamba'.*legal are llama"),
    "option": (edit_config(hidden_act="relu"), "hidden_act is 'relu'; only 'silu'"),
    "logit scaling": (edit_config(logits_scaling=8.0), "logits_scaling is 8.0; only 1.0"),
    "capped logits": (edit_config(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
    "biases of the MLP": (edit_config(mlp_bias=True), "mlp_bias is True; only False"),
    "biases of attention": (edit_config(attention_bias=True), "attention_bias is True; only False"),
    "windows of a type without": (edit_config(sliding_window=7), "sliding_window is 7; only None"),
    "partly rotary": (edit_config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; only"),
    "size": (edit_config(hidden_size="32"), "hidden_size is '32'; expected a whole number"),
    "a billion layers": (
        edit_config(num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000; expected a whole number from 1 to 10,000",
    ),
    "a width without end": (
        edit_config(hidden_size=10**40), r"hidden_size is 1000\d+.*; expected .* to 1,048,576"
    ),
    "a vocabulary without end": (
        edit_config(vocab_size=10**40), r"vocab_size is 1000\d+.*; expected .* to 1,073,741,824"
    ),
    "more than a float holds": (
        edit_config(rms_norm_eps=10**400), r"rms_norm_eps is 10000\d+\.\.\.; expected a number"
    ),
    "no heads": (edit_config(num_attention_heads=0), "num_attention_heads is 0"),
    "number": (edit_config(rms_norm_eps="tiny"), "rms_norm_eps is 'tiny'; expected a number"),
    "rope": (edit_config(rope_parameters=[1]), r"rope_scaling is \[1\]; expected an object"),
    "rope factor 0": (llama3_rope(factor=0.0), r"factor is 0.0; expected a number above 0"),
    "rope factor": (llama3_rope(factor=float("inf")), r"factor is inf; expected .* and finite"),
    "rope theta": (llama3_rope(rope_theta=float("nan")), r"rope_theta is nan; expected a number"),
    "rope order": (
        llama3_rope(low_freq_factor=4.0), r"low_freq_factor is 4 and high_freq_factor is 4; expect"
    ),
    "yarn without a factor": (yarn(factor=None), "factor is None; expected a number"),
    "yarn, shorter": (yarn(factor=0.5), r"yarn: factor is 0\.5; it must be at least 1, finite"),
    "yarn, borders": (yarn(beta_fast=1.0), "beta_fast is 1 and beta_slow is 1; expected beta_slow"),
    "yarn, truncate": (yarn(truncate=1), "truncate is 1; expected true or false"),
    "yarn, theta": (yarn(rope_theta=1.0), r"rope_theta is 1\.0; it must be above 1 and finite"),
    "tied is no flag": (
        edit_config(tie_word_embeddings="false"), r"tie_word_embeddings is 'false'; expected true"
    ),
    "quantized": (edit_config(quantization_config={"bits": 4}), "the weights are quantized"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "cannot read .*config.js"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "it is not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_config(case: str, tmp_path: Path) -> None:
    breaks, message = BROKEN[case]
    breaks(saved(tmp_path / "saved"))
    with pytest.raises(PhalanxError, match=message):
        convert(tmp_path / "saved", tmp_path / "ours")
    assert files_of(tmp_path) == {"saved"}


OF_TYPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen2, mixed windows": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
                  "layer_types": None},
        "windows are mixed: blocks 0 of 2 have none; expected windows in all blocks, in none, or",
    ),
    "qwen2, windows and no word of them": (
        "qwen2", {"layer_types": [WINDOWED, FULL]}, "but use_sliding_window is not true",
    ),
    "qwen3, another kind of attention": (
        "qwen3", {"layer_types": ["chunked_attention", FULL]}, "has 'chunked_attention'; legal",
    ),
    "qwen3, layers": ("qwen3", {"layer_types": [FULL]}, "expected a list of 2 blocks"),
    "mistral, no word of windows": (
        "mistral", {"sliding_window": ...}, "sliding_window is missing"
    ),
    "mistral, no key heads": (
        "mistral", {"num_key_value_heads": ...}, "num_key_value_heads is missing"
    ),
    "phi3, longrope": (
        "phi3", {"rope_parameters": None, "rope_scaling": {"type": "longrope"}},
        "rope_type is 'longrope'; legal here: 'default'",
    ),
    "phi3, partly rotary": (
        "phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75; only 1.0",
    ),
    "olmo2, clipped": ("olmo2", {"clip_qkv": 8.0}, "clip_qkv is 8.0; only None"),
    "gemma3, scale": (
        "gemma3", {"query_pre_attn_scalar": 168}, "query_pre_attn_scalar is 168; only 16",
    ),
    "gemma3, scaled positions": (
        "gemma3", {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}}},
        "rope_type is 'linear'; legal here: 'default'",
    ),
    "gemma3, capped": ("gemma3", {"attn_logit_softcapping": 50.0}, "_softcapping is 50.0; only"),
    "gemma3, both ways": (
        "gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True",
    ),
    "mixtral, noise": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; only"),
    "mixtral, too many": (
        "mixtral", {"num_experts_per_tok": 5},
        "num_experts_per_tok is 5; expected a whole number from 1 to 4",
    ),
    "qwen3 moe, every other block": (
        "qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only 1",
    ),
    "qwen3 moe, the second block dense": (
        "qwen3-moe", {"mlp_only_layers": [1]},
        "mlp_only_layers is [1]; only the first blocks may have no experts, as in [0, 1]",
    ),
    "qwen3 moe, all blocks dense": (
        "qwen3-moe", {"mlp_only_layers": [0, 1]}, "and the last block has some",
    ),
    "qwen3 moe, windows": (
        "qwen3-moe", {"use_sliding_window": True}, "use_sliding_window is True; only False",
    ),
    "qwen2 moe, no biases": ("qwen2-moe", {"qkv_bias": False}, "qkv_bias is False; only True"),
    "olmoe, clipped": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; only None"),
    "olmoe, no flag": ("olmoe", {"norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or f"),
    "olmoe, coefficient": (
        "olmoe", {"output_router_logits": True, "router_aux_loss_coef": -1.0},
        "router_aux_loss_coef is -1.0; expected a number above 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_TYPES)
def test_an_option_of_a_type_that_is_not_computed(case: str, tmp_path: Path) -> None:
    name, changes, message = OF_TYPES[case]
    config = json.loads(json.dumps(model_of(name).config.to_dict())) | changes
    (tmp_path / "config.json").write_text(
        json.dumps({option: value for option, value in config.items() if value is not ...})
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        convert(tmp_path, tmp_path.with_suffix(".ours"))


EXPERTS = ExpertShape(num_experts=4, top_k=2, ffn=24, renormalizes=True)
LLAMA: dict[str, Any] = {
    "vocab_size": 97, "num_layers": 3, "hidden": 32, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "ffn": 48, "max_seq_len": 64,
}  # fmt: skip


def test_a_shape_that_no_hugging_face_model_has() -> None:
    with pytest.raises(ConfigError, match=r"the nearest is llama, but its mlp is 'swiglu', not 'g"):
        config_to_hf(ModelShape(**LLAMA, mlp="gelu"), "float32")
    with pytest.raises(ConfigError, match="the nearest is gpt2, but its num_kv_heads is 4, not 2"):
        family_of(ModelShape(**LLAMA, **GPT2))


def test_a_shape_with_experts_has_the_type_that_computes_it() -> None:
    def of(experts: ExpertShape = EXPERTS, **parts: Any) -> list[str]:
        return families_of(ModelShape(**LLAMA, experts=experts, **parts))

    assert of() == ["mixtral"] == of(window=7)
    assert of(qk_norm=True) == ["qwen3_moe"]
    assert of(replace(EXPERTS, first_dense=2), qk_norm=True) == ["qwen3_moe"]
    assert of(replace(EXPERTS, renormalizes=False), qk_norm="projection") == ["olmoe"]
    shared = replace(EXPERTS, shared_ffn=40, has_shared_gate=True)
    assert of(shared, bias="qkv") == ["qwen2_moe"]
    # What is of training alone does not matter.
    assert of(replace(EXPERTS, aux_loss=0.01, z_loss=0.001, capacity=1.25)) == ["mixtral"]
    with pytest.raises(ConfigError, match=r"is mixtral, but its experts.renormalizes is True"):
        of(replace(EXPERTS, renormalizes=False))
    with pytest.raises(
        ConfigError,
        match=r"of those with experts, mixtral, qwen3_moe, qwen2_moe, olmoe, deepseek_v3 supports "
        r"this shape; the nearest is qwen3_moe, but its experts.score is 'softmax', not 'sigmoid'$",
    ):
        of(replace(EXPERTS, score="sigmoid"), qk_norm=True)
    with pytest.raises(ConfigError, match="'llama' does not support this shape; legal are mix"):
        family_of(ModelShape(**LLAMA, experts=EXPERTS), "llama")


def test_the_balancing_loss_of_a_config() -> None:
    config = model_of("olmoe").config.to_dict() | {"router_aux_loss_coef": 0.02}
    assert not config["output_router_logits"]
    assert shape_from_hf(config).experts == ExpertShape(num_experts=8, top_k=2, ffn=48)
    config["output_router_logits"] = True
    shape = shape_from_hf(config)
    assert shape.experts is not None
    assert (shape.experts.aux_loss, shape.experts.pools_layers) == (0.02, True)
    back = config_to_hf(shape, "float32")
    assert (back["output_router_logits"], back["router_aux_loss_coef"]) == (True, 0.02)
    of_layers = replace(shape, experts=replace(shape.experts, pools_layers=False))
    assert config_to_hf(of_layers, "float32")["output_router_logits"] is False
    config["router_aux_loss_coef"] = 0.0
    assert shape_from_hf(config).experts == ExpertShape(num_experts=8, top_k=2, ffn=48)


def test_a_config_of_either_name_of_the_number_of_experts() -> None:
    config = model_of("qwen3-moe").config.to_dict()
    old = {**config, "num_experts": config["num_local_experts"]}
    del old["num_local_experts"]
    assert shape_from_hf(old) == shape_from_hf(config)
    del config["num_local_experts"]
    with pytest.raises(ConfigError, match="num_experts is missing"):
        shape_from_hf(config)


def test_theta_of_a_mixtral_that_has_none() -> None:
    config = model_of("mixtral").config.to_dict()
    del config["rope_parameters"]
    assert shape_from_hf(config).rope_theta == MixtralConfig().rope_parameters["rope_theta"] == 1e6
