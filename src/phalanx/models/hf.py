"""Weights and shapes to and from the Hugging Face layout of Llama, Qwen3 and GPT-2.

A state is a dict from name to tensor, as `state_dict()` gives it; a config is the content of a
config.json. Nothing here needs the transformers package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError, nearest
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape

_LLAMA_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_GPT2_OUTER = {
    "embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
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
    return readers[model_type](config)


def from_hf(state: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Rename, split and transpose Hugging Face weights into a state dict of `Decoder(shape)`.

    Where nothing has to change, the tensors are those of `state`, not copies.

    Raises:
        CheckpointError: a weight is missing or of another size, or one is left over.
    """
    # Bare GPT-2 checkpoints lack the prefix that the model with a head has.
    if shape.position == "learned" and "wte.weight" in state:
        state = {f"transformer.{name}": tensor for name, tensor in state.items()}
    left = {name: tensor for name, tensor in state.items() if not _is_known_extra(name, shape)}
    taken: dict[str, Tensor] = {}
    for theirs, ours in _names(shape).items():
        if theirs not in left:
            raise CheckpointError(
                f"Hugging Face weights: '{theirs}' is missing{nearest(theirs, left)}"
            )
        tensor = left.pop(theirs)
        if _is_transposed(theirs, tensor):
            tensor = tensor.T
        taken.update(zip(ours, tensor.chunk(len(ours)), strict=True))
    if left:
        raise CheckpointError(
            f"Hugging Face weights: no place for {len(left)} of them, '{next(iter(left))}' first; "
            "is the shape that of their config.json?"
        )
    _check_sizes(taken, shape)
    return taken


def to_hf(state: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Turn a state dict of `Decoder(shape)` into Hugging Face weights: the inverse of `from_hf`.

    A tied output projection is left out, as `save_pretrained` does.

    Raises:
        CheckpointError: a weight is missing.
    """
    out: dict[str, Tensor] = {}
    for theirs, ours in _names(shape).items():
        for name in ours:
            if name not in state:
                raise CheckpointError(f"weights: '{name}' is missing{nearest(name, state)}")
        tensor = torch.cat([state[name] for name in ours]) if len(ours) > 1 else state[ours[0]]
        out[theirs] = tensor.T.contiguous() if _is_transposed(theirs, tensor) else tensor
    return out


def _names(shape: ModelShape) -> dict[str, list[str]]:
    """Map each Hugging Face name to our names; several of ours are stacked along the outputs."""
    learned = shape.position == "learned"
    outer = _GPT2_OUTER if learned else _LLAMA_OUTER
    names = {
        theirs: [ours]
        for ours, theirs in outer.items()
        if not (shape.tied and ours == "output.weight")
    }
    for index in range(shape.num_layers):
        names.update(_gpt2_block(index) if learned else _llama_block(index, shape.qk_norm))
    return names


def _llama_block(index: int, qk_norm: bool) -> dict[str, list[str]]:
    return {
        f"model.layers.{index}.{theirs}": [f"blocks.{index}.{ours}"]
        for ours, theirs in _LLAMA_BLOCK.items()
        if qk_norm or "_norm.weight" not in ours or not ours.startswith("attention.")
    }


def _gpt2_block(index: int) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for kind in ("weight", "bias"):
        names[f"transformer.h.{index}.attn.c_attn.{kind}"] = [
            f"blocks.{index}.attention.{part}.{kind}" for part in "qkv"
        ]
        for ours, theirs in _GPT2_BLOCK.items():
            names[f"transformer.h.{index}.{theirs}.{kind}"] = [f"blocks.{index}.{ours}.{kind}"]
    return names


def _is_transposed(theirs: str, tensor: Tensor) -> bool:
    """Tell the weights of GPT-2's Conv1D, which are stored as [in, out]."""
    return tensor.ndim == 2 and ".c_" in theirs


def _is_known_extra(name: str, shape: ModelShape) -> bool:
    """Tell buffers that old checkpoints hold, and the second name of a tied weight."""
    if name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
        return True
    return shape.tied and name.endswith("lm_head.weight")


def _check_sizes(state: Mapping[str, Tensor], shape: ModelShape) -> None:
    with torch.device("meta"):
        expected = Decoder(shape).state_dict()
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"Hugging Face weights: '{name}' is {tuple(tensor.shape)}; the shape asks for "
                f"{tuple(expected[name].shape)}"
            )


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
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or hidden // num_heads),
        ffn=_whole(config, "intermediate_size"),
        max_seq_len=_whole(config, "max_position_embeddings"),
        norm_eps=float(_need(config, "rms_norm_eps")),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
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
    return ModelShape(
        vocab_size=_whole(config, "vocab_size"),
        num_layers=_whole(config, "n_layer"),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        ffn=int(config.get("n_inner") or 4 * hidden),
        max_seq_len=_whole(config, "n_positions"),
        norm="layer",
        norm_eps=float(_need(config, "layer_norm_epsilon")),
        position="learned",
        mlp="gelu",
        bias=True,
        tied=bool(config.get("tie_word_embeddings", True)),
    )


def _rope(config: Mapping[str, Any]) -> tuple[float, tuple[float, float, float, int] | None]:
    """Return theta and the scaling: one dict since transformers 5, two entries before."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(
            f"Hugging Face config: rope_type is '{kind}'; legal are 'default' and 'llama3'"
        )
    return theta, (
        float(_need(rope, "factor")),
        float(_need(rope, "low_freq_factor")),
        float(_need(rope, "high_freq_factor")),
        _whole(rope, "original_max_position_embeddings"),
    )


def _need(config: Mapping[str, Any], option: str) -> Any:
    if option not in config:
        raise ConfigError(f"Hugging Face config: {option} is missing{nearest(option, config)}")
    return config[option]


def _whole(config: Mapping[str, Any], option: str) -> int:
    return int(_need(config, option))


def _require(config: Mapping[str, Any], option: str, legal: str | bool) -> None:
    actual = config.get(option, legal)
    if actual != legal:
        raise ConfigError(
            f"Hugging Face config: {option} is {actual!r}; only {legal!r} is computed"
        )
