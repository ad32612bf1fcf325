"""The content of a Hugging Face config.json to and from the shape of a decoder.

A `Family` says once, for both directions, which of their entries is which size of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from phalanx.errors import ConfigError, NotDivisible, nearest
from phalanx.models.shape import ModelShape


@dataclass(frozen=True)
class Family:
    """A model type of theirs.

    Attributes:
        architecture: the class in transformers.
        parts: what a decoder of this type is made of, in our words.
        sizes: their entry -> our size, of those that the type has.
        norm_eps: their entry for it.
        constants: entries that are written, and the only values of theirs that are read.
        required: the only values that are read of entries that are not written.
        is_tied: whether the output is the embedding where they do not say.
    """

    architecture: str
    parts: Mapping[str, Any]
    sizes: Mapping[str, str]
    norm_eps: str
    constants: Mapping[str, Any]
    required: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_tied: bool = False


_LLAMA: Final = Family(
    architecture="LlamaForCausalLM",
    parts={"norm": "rms", "position": "rope", "mlp": "swiglu", "bias": False, "qk_norm": False},
    sizes={
        "hidden_size": "hidden",
        "vocab_size": "vocab_size",
        "intermediate_size": "ffn",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim",
        "max_position_embeddings": "max_seq_len",
    },
    norm_eps="rms_norm_eps",
    constants={"hidden_act": "silu", "attention_bias": False},
    required={"mlp_bias": False, "use_sliding_window": False},
)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen3": replace(
            _LLAMA, architecture="Qwen3ForCausalLM", parts={**_LLAMA.parts, "qk_norm": True}
        ),
        "gpt2": Family(
            architecture="GPT2LMHeadModel",
            parts={
                "norm": "layer",
                "position": "learned",
                "mlp": "gelu",
                "bias": True,
                "qk_norm": False,
                "rope_scaling": None,
            },
            sizes={
                "n_embd": "hidden",
                "vocab_size": "vocab_size",
                "n_inner": "ffn",
                "n_layer": "num_layers",
                "n_head": "num_heads",
                "n_positions": "max_seq_len",
            },
            norm_eps="layer_norm_epsilon",
            constants={"activation_function": "gelu_new"},
            required={
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
                "add_cross_attention": False,
            },
            is_tied=True,
        ),
    }
)
"""The model types that a decoder computes."""

_LLAMA3_SCALING: Final = (
    *("factor", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
)

_OPTIONAL: Final = ("num_key_value_heads", "head_dim", "n_inner")
"""Sizes that follow from others where they are null or not there."""


def family_of(shape: ModelShape) -> str:
    """Return the Hugging Face model type that computes this shape.

    Raises:
        ConfigError: none does; names what the nearest has instead.
    """
    differing = {
        name: [
            f"its {part} is {theirs!r}, not {getattr(shape, part)!r}"
            for part, theirs in family.parts.items()
            if getattr(shape, part) != theirs
        ]
        for name, family in FAMILIES.items()
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

    `dtype` is that of its tensors, as torch names it. Dropout is kept for GPT-2 only; the other
    families have none.

    Raises:
        ConfigError: no Hugging Face model computes this shape.
    """
    name = family_of(shape)
    family = FAMILIES[name]
    config = {
        "architectures": [family.architecture],
        "model_type": name,
        "tie_word_embeddings": shape.tied,
        # Unset, transformers would take ids of the first Llama, which mean something else here.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        **{theirs: getattr(shape, ours) for theirs, ours in family.sizes.items()},
        family.norm_eps: shape.norm_eps,
        **family.constants,
    }
    if shape.position == "learned":
        return {
            **config,
            "embd_pdrop": shape.dropout,
            "resid_pdrop": shape.dropout,
            "attn_pdrop": 0.0,
        }
    scaling = None
    if shape.rope_scaling is not None:
        numbers = zip(_LLAMA3_SCALING, shape.rope_scaling, strict=True)
        scaling = {"rope_type": "llama3", **dict(numbers)}
    return {**config, "rope_theta": shape.rope_theta, "rope_scaling": scaling}


def shape_from_hf(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that the content of a config.json describes.

    Raises:
        ConfigError: the model type, or one of its options, is not one that Decoder computes.
    """
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        raise ConfigError(
            f"model_type is '{name}'{nearest(name, FAMILIES)}; legal are {', '.join(FAMILIES)}"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            "the weights are quantized (quantization_config); only float64, float32, bfloat16 and "
            "float16 are read"
        )
    family = FAMILIES[name]
    for option, legal in {**family.constants, **family.required}.items():
        _require(config, option, legal)
    sizes = {
        ours: _whole(config, theirs)
        for theirs, ours in family.sizes.items()
        if theirs not in _OPTIONAL or config.get(theirs) is not None
    }
    hidden, num_heads = sizes["hidden"], sizes["num_heads"]
    if name == "gpt2" and hidden % num_heads:
        raise NotDivisible("n_embd", hidden, num_heads)
    derived = {"num_kv_heads": num_heads, "head_dim": hidden // num_heads, "ffn": 4 * hidden}
    values: dict[str, Any] = {**derived, **sizes, **family.parts}
    if values["position"] == "rope":
        values["rope_theta"], values["rope_scaling"] = _rope(config)
    tied = config.get("tie_word_embeddings", family.is_tied)
    if not isinstance(tied, bool):
        raise ConfigError(f"tie_word_embeddings is {tied!r}; expected true or false")
    return ModelShape(**values, norm_eps=_number(config, family.norm_eps), tied=tied)


def _rope(config: Mapping[str, Any]) -> tuple[float, tuple[float, float, float, int] | None]:
    """Return theta and the scaling: one dict since transformers 5, two entries before."""
    rope: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_scaling is {rope!r}; expected an object")
    _require(rope, "partial_rotary_factor", 1.0)
    where = rope if "rope_theta" in rope else config
    theta = _number(where, "rope_theta") if where.get("rope_theta") is not None else 10_000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(f"rope_type is '{kind}'; legal are 'default' and 'llama3'")
    *numbers, original = _LLAMA3_SCALING
    factor, low, high = (_number(rope, option) for option in numbers)
    if low >= high:
        raise ConfigError(
            f"low_freq_factor is {low:g} and high_freq_factor is {high:g}; "
            "expected a low one below the high one"
        )
    return theta, (factor, low, high, _whole(rope, original))


def _whole(config: Mapping[str, Any], option: str) -> int:
    value = _need(config, option)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{option} is {value!r}; expected a whole number of at least 1")
    return value


def _number(config: Mapping[str, Any], option: str) -> float:
    value = _need(config, option)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ConfigError(f"{option} is {value!r}; expected a number above 0 and finite")
    return float(value)


def _need(config: Mapping[str, Any], option: str) -> Any:
    if option not in config:
        raise ConfigError(f"{option} is missing{nearest(option, config)}")
    return config[option]


def _require(config: Mapping[str, Any], option: str, legal: str | bool | float) -> None:
    actual = config.get(option, legal)
    if actual != legal:
        raise ConfigError(f"{option} is {actual!r}; only {legal!r} is computed")
