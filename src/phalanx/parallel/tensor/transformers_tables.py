"""Supported transformers models, by class name, with the roles of their modules and their masks.

Families whose modules have the same names share a table: patterns that match nothing in a model
are dropped. Wrappers that a model needs in addition to roles are in transformers_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from torch import nn

Roles = Mapping[str, str]


def by_role(**names: str) -> dict[str, str]:
    """Return a map of patterns to roles; `names` has for each role its patterns between blanks."""
    return {name: role for role, several in names.items() for name in several.split()}


_LLAMA: Final = {
    **by_role(
        embedding="embed_tokens",
        branch="layers.*.self_attn layers.*.mlp",
        column="layers.*.self_attn.q_proj layers.*.self_attn.k_proj layers.*.self_attn.v_proj "
        "layers.*.mlp.gate_proj layers.*.mlp.up_proj",
        row="layers.*.self_attn.o_proj layers.*.mlp.down_proj",
        local="layers.*.self_attn.q_norm layers.*.self_attn.k_norm",
        norm="layers.*.input_layernorm layers.*.post_attention_layernorm norm "
        "layers.*.pre_feedforward_layernorm layers.*.post_feedforward_layernorm",
    ),
    "layers.*.self_attn.qkv_proj": (
        "column/{0.num_attention_heads}+{0.num_key_value_heads}+{0.num_key_value_heads}"
    ),
    "layers.*.mlp.gate_up_proj": "column/2",
}
_OLMO2: Final = {
    **_LLAMA,
    **by_role(inner_norm="layers.*.self_attn.q_norm layers.*.self_attn.k_norm"),
}
_GPT2: Final = {
    **by_role(
        embedding="wte",
        table="wpe",
        branch="h.*.attn h.*.mlp",
        column="h.*.mlp.c_fc",
        row="h.*.attn.c_proj h.*.mlp.c_proj",
        norm="h.*.ln_1 h.*.ln_2 ln_f",
    ),
    "h.*.attn.c_attn": "column/3",
}
_BERT: Final = by_role(
    embedding="embeddings.word_embeddings",
    table="embeddings.position_embeddings embeddings.token_type_embeddings",
    branch="encoder.layer.*.attention.self encoder.layer.*.intermediate",
    column="encoder.layer.*.attention.self.query encoder.layer.*.attention.self.key "
    "encoder.layer.*.attention.self.value encoder.layer.*.intermediate.dense",
    row="encoder.layer.*.attention.output.dense encoder.layer.*.output.dense",
    norm="embeddings.LayerNorm encoder.layer.*.attention.output.LayerNorm "
    "encoder.layer.*.output.LayerNorm",
    gather="pooler",
)
_VIT: Final = by_role(
    scatter="embeddings",
    branch="layers.*.attention layers.*.mlp",
    column="layers.*.attention.q_proj layers.*.attention.k_proj layers.*.attention.v_proj "
    "layers.*.mlp.fc1",
    row="layers.*.attention.o_proj layers.*.mlp.fc2",
    norm="layers.*.layernorm_before layers.*.layernorm_after layernorm",
    gather="pooler",
)
_BERT_PREDICTIONS: Final = by_role(
    token="cls.predictions.transform", head="cls.predictions.decoder"
)


@dataclass(frozen=True)
class Base:
    """A known model without a head.

    Attributes:
        roles: patterns of its module names to roles; {0} in a role is the model's configuration.
        mask_kind: attention mask: bidirectional (all); causal (earlier); causal with the window
            `config.sliding_window`, if set (window); by `config.layer_types` (by layer).
    """

    roles: Roles
    mask_kind: Literal["all", "earlier", "window", "by layer"] = "earlier"


BASES: Final[Mapping[str, Base]] = {
    "LlamaModel": Base(_LLAMA),
    "MistralModel": Base(_LLAMA, "window"),
    "Qwen2Model": Base(_LLAMA, "by layer"),
    "Qwen3Model": Base(_LLAMA, "by layer"),
    "Olmo2Model": Base(_OLMO2),
    "Gemma2Model": Base(_LLAMA, "by layer"),
    "Gemma3TextModel": Base(_LLAMA, "by layer"),
    "Phi3Model": Base(_LLAMA, "window"),
    "GPT2Model": Base(_GPT2),
    "BertModel": Base(_BERT, "all"),
    "ViTModel": Base(_VIT, "all"),
}
"""Name of the class of a model without a head -> its roles and its mask."""

_DECODERS: Final = ("Llama", "Mistral", "Qwen2", "Qwen3", "Olmo2", "Gemma2", "Gemma3", "Phi3")

HEADS: Final[Mapping[str, Roles]] = {
    **{f"{name}ForCausalLM": {"lm_head": "head"} for name in _DECODERS},
    "GPT2LMHeadModel": {"lm_head": "head"},
    **{
        f"{name}ForSequenceClassification": {"score": "gather"}
        for name in ("GPT2", "Gemma3Text", *_DECODERS)
        if name != "Gemma3"  # a multimodal model, with image inputs
    },
    "BertForMaskedLM": _BERT_PREDICTIONS,
    "BertForPreTraining": {**_BERT_PREDICTIONS, "cls.seq_relationship": "full"},
    "BertForSequenceClassification": {"classifier": "full"},
    "BertForTokenClassification": {"classifier": "gather"},
    "ViTForImageClassification": {"classifier": "full"},
}
"""Name of the class of a model with a head -> patterns of its modules outside of the base."""


def patterns_of(model: nn.Module) -> dict[str, str]:
    """Return the patterns of all known models in `model`, prefixed by their module names in it."""
    patterns: dict[str, str] = {}
    for name, module in model.named_modules():
        base, head = lookup(BASES, module), lookup(HEADS, module)
        own = {**({} if base is None else base.roles), **(head or {})}
        prefix = f"{name}." if name else ""
        config = getattr(module, "config", None)
        patterns |= {prefix + pattern: role.format(config) for pattern, role in own.items()}
    return patterns


_Known = TypeVar("_Known")


def lookup(known: Mapping[str, _Known], module: nn.Module) -> _Known | None:
    """Return the entry of a module's class, or of a base class, because FSDP2 derives classes."""
    return next((known[c.__name__] for c in type(module).__mro__ if c.__name__ in known), None)
