"""The content of a Hugging Face config.json to and from the shape of a decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from phalanx.errors import ConfigError, NotDivisible, nearest
from phalanx.models.shape import ModelShape

_LLAMA: Final[Mapping[str, Any]] = MappingProxyType(
    {"norm": "rms", "position": "rope", "mlp": "swiglu", "bias": False, "qk_norm": False}
)

FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen3": MappingProxyType({**_LLAMA, "qk_norm": True}),
        "gpt2": MappingProxyType(
            {
                "norm": "layer",
                "position": "learned",
                "mlp": "gelu",
                "bias": True,
                "qk_norm": False,
                "rope_scaling": None,
            }
        ),
    }
)
"""What a decoder of each model type is made of."""

_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def family_of(shape: ModelShape) -> str:
    """Return the Hugging Face model type that computes this shape.

    Raises:
        ConfigError: none does; names what the nearest has instead.
    """
    differing = {
        family: [
            f"its {part} is {theirs!r}, not {getattr(shape, part)!r}"
            for part, theirs in parts.items()
            if getattr(shape, part) != theirs
        ]
        for family, parts in FAMILIES.items()
    }
    differing["gpt2"] += [
        f"its {part} is {theirs}, not {getattr(shape, part)}"
        for part, theirs in (
            ("num_kv_heads", shape.num_heads),
            ("head_dim", shape.hidden / shape.num_heads),
        )
        if getattr(shape, part) != theirs
    ]
    family = min(differing, key=lambda name: len(differing[name]))
    if differing[family]:
        raise ConfigError(
            f"no Hugging Face model of {', '.join(FAMILIES)} computes this shape; the nearest is "
            f"{family}, but {', '.join(differing[family])}"
        )
    return family


def config_to_hf(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """Return the config.json of a decoder, in the words that published ones use.

    Dropout is kept for GPT-2 only; the others of its place have none.

    Args:
        shape: of the decoder.
        dtype: of its tensors, as torch names it: "float32".

    Raises:
        ConfigError: no Hugging Face model computes this shape.
    """
    family = family_of(shape)
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
        # Unset, transformers would take ids of the first Llama, which mean something else here.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        **(_gpt2_config(shape) if family == "gpt2" else _llama_config(shape)),
    }


def shape_from_hf(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that the content of a config.json describes.

    Raises:
        ConfigError: the model type, or one of its options, is not one that Decoder computes.
    """
    readers = {"llama": _llama_shape, "qwen3": _qwen3_shape, "gpt2": _gpt2_shape}
    model_type = str(config.get("model_type"))
    if model_type not in readers:
        raise ConfigError(
            f"Hugging Face config: model_type is '{model_type}'{nearest(model_type, readers)}; "
            f"legal are {', '.join(readers)}"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            "Hugging Face config: the weights are quantized (quantization_config); only float64, "
            "float32, bfloat16 and float16 are read"
        )
    return readers[model_type](config)


def _llama_config(shape: ModelShape) -> dict[str, Any]:
    scaling = None
    if shape.rope_scaling is not None:
        factor, low, high, original_length = shape.rope_scaling
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original_length,
        }
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": False,
    }


def _gpt2_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "n_embd": shape.hidden,
        "n_inner": shape.ffn,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_positions": shape.max_seq_len,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": shape.norm_eps,
        "embd_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "attn_pdrop": 0.0,
    }


def _llama_shape(config: Mapping[str, Any], qk_norm: bool = False) -> ModelShape:
    for option, legal in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
    ):
        _require(config, option, legal)
    num_heads = _whole(config, "num_attention_heads")
    hidden = _whole(config, "hidden_size")
    theta, scaling = _rope(config)
    return ModelShape(
        vocab_size=_whole(config, "vocab_size"),
        num_layers=_whole(config, "num_hidden_layers"),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=_whole(config, "num_key_value_heads", unset=num_heads),
        head_dim=_whole(config, "head_dim", unset=hidden // num_heads),
        ffn=_whole(config, "intermediate_size"),
        max_seq_len=_whole(config, "max_position_embeddings"),
        norm_eps=_number(config, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=qk_norm,
        tied=_flag(config, "tie_word_embeddings", unset=False),
    )


def _qwen3_shape(config: Mapping[str, Any]) -> ModelShape:
    return _llama_shape(config, qk_norm=True)


def _gpt2_shape(config: Mapping[str, Any]) -> ModelShape:
    for option, legal in (
        ("activation_function", "gelu_new"),
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        _require(config, option, legal)
    hidden, num_heads = _whole(config, "n_embd"), _whole(config, "n_head")
    if hidden % num_heads:
        raise NotDivisible("Hugging Face config: n_embd", hidden, num_heads)
    return ModelShape(
        vocab_size=_whole(config, "vocab_size"),
        num_layers=_whole(config, "n_layer"),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        ffn=_whole(config, "n_inner", unset=4 * hidden),
        max_seq_len=_whole(config, "n_positions"),
        norm="layer",
        norm_eps=_number(config, "layer_norm_epsilon"),
        position="learned",
        mlp="gelu",
        bias=True,
        tied=_flag(config, "tie_word_embeddings", unset=True),
    )


def _rope(config: Mapping[str, Any]) -> tuple[float, tuple[float, float, float, int] | None]:
    """Return theta and the scaling: one dict since transformers 5, two entries before."""
    rope: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"Hugging Face config: rope_scaling is {rope!r}; expected an object")
    _require(rope, "partial_rotary_factor", 1.0)
    where = rope if "rope_theta" in rope else config
    theta = _number(where, "rope_theta") if where.get("rope_theta") is not None else 10_000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(
            f"Hugging Face config: rope_type is '{kind}'; legal are 'default' and 'llama3'"
        )
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low >= high:
        raise ConfigError(
            f"Hugging Face config: low_freq_factor is {low:g} and high_freq_factor is {high:g}; "
            "expected a low one below the high one"
        )
    original_length = _whole(rope, "original_max_position_embeddings")
    return theta, (_number(rope, "factor"), low, high, original_length)


def _whole(config: Mapping[str, Any], option: str, unset: int | None = None) -> int:
    """Return a size; `unset` stands for one that is null or not there, None refuses that."""
    value = config.get(option)
    if value is None and unset is not None:
        return unset
    value = _need(config, option)
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"Hugging Face config: {option} is {value!r}; expected a whole number of at least 1"
        )
    return value


def _number(config: Mapping[str, Any], option: str) -> float:
    value = _need(config, option)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ConfigError(
            f"Hugging Face config: {option} is {value!r}; expected a number above 0 and finite"
        )
    return float(value)


def _flag(config: Mapping[str, Any], option: str, unset: bool) -> bool:
    value = config.get(option, unset)
    if not isinstance(value, bool):
        raise ConfigError(f"Hugging Face config: {option} is {value!r}; expected true or false")
    return value


def _need(config: Mapping[str, Any], option: str) -> Any:
    if option not in config:
        raise ConfigError(f"Hugging Face config: {option} is missing{nearest(option, config)}")
    return config[option]


def _require(config: Mapping[str, Any], option: str, legal: str | bool | float) -> None:
    actual = config.get(option, legal)
    if actual != legal:
        raise ConfigError(
            f"Hugging Face config: {option} is {actual!r}; only {legal!r} is computed"
        )
