"""What transformers' Llama, GPT-2 and BERT need besides roles; they are known by their class names.

These models infer batch and sequence length from the embedded tokens, which are sharded here. A
wrapper therefore builds positions, token types and a 4-D attention mask from the full ids; a mask
of four dimensions is handed on as it is. The branches then cut its rows, as they cut every other
argument beside the residual.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError, StrategyError
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.operators import unshard
from phalanx.parallel.tensor.scope import batch_shape

_LLAMA: Final = {
    "embed_tokens": "embedding",
    "layers.*.input_layernorm": "norm",
    "layers.*.self_attn": "branch",
    "layers.*.self_attn.q_proj": "column",
    "layers.*.self_attn.k_proj": "column",
    "layers.*.self_attn.v_proj": "column",
    "layers.*.self_attn.o_proj": "row",
    "layers.*.post_attention_layernorm": "norm",
    "layers.*.mlp": "branch",
    "layers.*.mlp.gate_proj": "column",
    "layers.*.mlp.up_proj": "column",
    "layers.*.mlp.down_proj": "row",
    "norm": "norm",
}
_GPT2: Final = {
    "wte": "embedding",
    "wpe": "table",
    "h.*.ln_1": "norm",
    "h.*.attn": "branch",
    "h.*.attn.c_attn": "column/3",
    "h.*.attn.c_proj": "row",
    "h.*.ln_2": "norm",
    "h.*.mlp": "branch",
    "h.*.mlp.c_fc": "column",
    "h.*.mlp.c_proj": "row",
    "ln_f": "norm",
}
_BERT: Final = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.position_embeddings": "table",
    "embeddings.token_type_embeddings": "table",
    "embeddings.LayerNorm": "norm",
    "encoder.layer.*.attention.self": "branch",
    "encoder.layer.*.attention.self.query": "column",
    "encoder.layer.*.attention.self.key": "column",
    "encoder.layer.*.attention.self.value": "column",
    "encoder.layer.*.attention.output.dense": "row",
    "encoder.layer.*.attention.output.LayerNorm": "norm",
    "encoder.layer.*.intermediate": "branch",
    "encoder.layer.*.intermediate.dense": "column",
    "encoder.layer.*.output.dense": "row",
    "encoder.layer.*.output.LayerNorm": "norm",
    "pooler": "gather",
}
_BERT_PREDICTIONS: Final = {
    "cls.predictions.transform": "token",
    "cls.predictions.decoder": "head",
}

BASES: Final[Mapping[str, Mapping[str, str]]] = {
    "LlamaModel": _LLAMA,
    "GPT2Model": _GPT2,
    "BertModel": _BERT,
}
"""Class of a model without a head -> patterns of names in it."""

HEADS: Final[Mapping[str, Mapping[str, str]]] = {
    "LlamaForCausalLM": {"lm_head": "head"},
    "GPT2LMHeadModel": {"lm_head": "head"},
    "BertForMaskedLM": _BERT_PREDICTIONS,
    "BertForPreTraining": {**_BERT_PREDICTIONS, "cls.seq_relationship": "full"},
    "BertForSequenceClassification": {"classifier": "full"},
    "BertForTokenClassification": {"classifier": "gather"},
}
"""Class of a model with a head -> patterns of the names that it has beside those of its base."""

IMPLEMENTATIONS: Final = ("sdpa", "eager")
"""Of attention; the others take no mask of four dimensions."""


def patterns_of(model: nn.Module) -> dict[str, str]:
    """Return the patterns of the models in `model` that are known here, under their names in it."""
    patterns: dict[str, str] = {}
    for name, module in model.named_modules():
        for known in (BASES, HEADS):
            own = _lookup(known, module)
            prefix = f"{name}." if name else ""
            patterns |= {prefix + pattern: role for pattern, role in (own or {}).items()}
    return patterns


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse settings of a known model that would not compute what one process does.

    Raises:
        StrategyError: names the setting and what it may be.
    """
    for name, base in _bases(model):
        config: Any = base.config
        where = f"tp: {type(base).__name__}{f' {name!r}' if name else ''}"
        implementation = getattr(config, "_attn_implementation", "sdpa")
        if implementation not in IMPLEMENTATIONS:
            raise StrategyError(
                f"{where}: attn_implementation is '{implementation}'; expected one of "
                f"{', '.join(IMPLEMENTATIONS)}, as in from_pretrained(..., "
                f"attn_implementation='{IMPLEMENTATIONS[0]}')"
            )
        if getattr(config, "chunk_size_feed_forward", 0):
            raise StrategyError(
                f"{where}: chunk_size_feed_forward is {config.chunk_size_feed_forward}, which cuts "
                "positions that tp has split already; expected 0"
            )
        if getattr(config, "add_cross_attention", False):
            raise StrategyError(f"{where}: add_cross_attention has no layout under tp; expected no")


def gathered_bases(
    model: nn.Module, reads_residual: Callable[[str], bool]
) -> list[tuple[str, nn.Module]]:
    """Return the known models in `model` whose last hidden state leaves them in full."""
    return [(name, base) for name, base in _bases(model) if not reads_residual(name)]


def bind(model: nn.Module, layout: Layout, reads_residual: Callable[[str], bool]) -> None:
    """Let the known models in `model`, which is split already, run on shards; see above."""
    gathered = [base for _, base in gathered_bases(model, reads_residual)]
    for _, base in _bases(model):
        _bind_base(base, layout, is_gathered=base in gathered)
    for module in model.modules():
        if _lookup(HEADS, module) is not None:
            module.register_forward_pre_hook(_refuse_cut_logits, with_kwargs=True)


def _bases(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.named_modules() if _lookup(BASES, m) is not None]


def _lookup(known: Mapping[str, Mapping[str, str]], module: nn.Module) -> Mapping[str, str] | None:
    """Return what is known of the class of a module, or of one that it is derived from.

    FSDP2 derives a class of its own.
    """
    return next((known[c.__name__] for c in type(module).__mro__ if c.__name__ in known), None)


def _bind_base(base: nn.Module, layout: Layout, *, is_gathered: bool) -> None:
    """Prepare the arguments of a base model, and gather its last hidden state."""
    own, prepare = base.forward, _preparation(base)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(**prepare(*args, **kwargs))
        if not is_gathered:
            return output
        num_features = cast(Any, base).config.hidden_size
        full = unshard(layout, output[0], layout.residual, batch_shape(), num_features)
        if isinstance(output, tuple):
            return (full, *cast(tuple[Any, ...], output)[1:])
        output["last_hidden_state"] = full
        return output

    base.forward = forward


def _preparation(base: nn.Module) -> Callable[..., dict[str, Any]]:
    """Return what gives a base model what it would make from the shape of its residual."""
    signature = inspect.signature(base.forward)
    config: Any = cast(Any, base).config
    is_bert = _lookup(BASES, base) is _BERT
    is_causal = bool(config.is_decoder if is_bert else getattr(config, "is_causal", True))

    def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
        values: dict[str, Any] = dict(signature.bind_partial(*args, **kwargs).arguments)
        values |= values.pop("kwargs", {})
        _refuse_arguments(values, config, is_bert)
        ids: Tensor = values["input_ids"]
        length = ids.shape[1]
        own_positions: Tensor | None = values.get("position_ids")
        positions = torch.arange(length, device=ids.device)[None]
        values["position_ids"] = positions if own_positions is None else own_positions
        if is_bert and values.get("token_type_ids") is None:
            values["token_type_ids"] = torch.zeros_like(positions)
        embedding = cast(Any, base).get_input_embeddings()
        mask = values.get("attention_mask")
        starts = own_positions if _finds_sequences(base, values) else None
        allowed = _allowed(mask, starts, positions, is_causal)
        if allowed is None and own_positions is not None and is_causal:
            allowed = _causal(positions)  # or else it would look for sequences in a shard
        is_eager = config._attn_implementation == "eager"
        if is_eager and allowed is None and is_causal:
            allowed = _causal(positions)
        if is_eager and allowed is not None and allowed.dtype == torch.bool:
            dtype = embedding.weight.dtype
            zero = torch.zeros((), dtype=dtype, device=ids.device)
            allowed = torch.where(allowed, zero, torch.finfo(dtype).min)
        # Embedded here, as GPT-2 would give its result the shape of the ids, which are full.
        values |= {"input_ids": None, "inputs_embeds": embedding(ids)}
        values |= {"attention_mask": allowed, "use_cache": False}
        return values

    return prepare


def _allowed(
    mask: Tensor | None, own_positions: Tensor | None, positions: Tensor, is_causal: bool
) -> Tensor | None:
    """Return which query (third dimension) sees which key (fourth), as transformers has it.

    None stands for all keys, or all up to the query's own position in a causal model.

    Args:
        mask: of padding [B, T]; or of four dimensions, which holds as it is.
        own_positions: given by the caller, where each step that is not one begins a sequence.
        positions: 0..T-1.
        is_causal: a query sees no later position.
    """
    if mask is not None and mask.ndim == 4:
        return mask
    if mask is not None and mask.ndim != 2:
        raise ConfigError(
            f"tp: attention_mask is of shape {tuple(mask.shape)}; expected [rows, positions], or a "
            "mask of four dimensions"
        )
    if mask is not None:
        seen = mask.bool()[:, None, None, :]
        if not is_causal:
            return None if bool(seen.all()) else seen
        return None if bool(seen.all()) else _causal(positions) & seen
    if own_positions is None or not is_causal:
        return None
    steps = torch.diff(own_positions, prepend=own_positions[:, :1] - 1, dim=-1)
    sequences = (steps != 1).cumsum(-1)
    return _causal(positions) & (sequences[:, None, :, None] == sequences[:, None, None, :])


def _finds_sequences(base: nn.Module, values: dict[str, Any]) -> bool:
    """Tell whether a model looks for several sequences in a row: only where it keeps no cache.

    In training it makes one, and drops it, unless it is told otherwise.
    """
    if getattr(base, "gradient_checkpointing", False) and base.training:
        return True
    use_cache = values.get("use_cache")
    return not (cast(Any, base).config.use_cache if use_cache is None else use_cache)


def _causal(positions: Tensor) -> Tensor:
    return positions[:, None, :, None] >= positions[:, None, None, :]


def _refuse_arguments(values: dict[str, Any], config: Any, is_bert: bool) -> None:
    if values.get("input_ids") is None:
        raise ConfigError("tp: expected input_ids; inputs_embeds have no ids to be split by")
    unsupported = ["past_key_values", "encoder_hidden_states", "inputs_embeds"]
    if not is_bert:
        unsupported.append("token_type_ids")
    for name in unsupported:
        if values.get(name) is not None:
            raise ConfigError(f"tp: {name} cannot be given to a model that is split; leave it out")
    for name in ("use_cache", "output_attentions", "output_hidden_states"):
        # That use_cache stands in the configuration is the rule, and asks for nothing in training.
        default = None if name == "use_cache" else getattr(config, name, None)
        if values.get(name, default):
            raise ConfigError(f"tp: {name} is on, and each rank has a shard alone; turn it off")


def _refuse_cut_logits(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ConfigError(
            f"tp: logits_to_keep is {keep}, which cuts positions that tp has split already; "
            "expected 0: all"
        )
