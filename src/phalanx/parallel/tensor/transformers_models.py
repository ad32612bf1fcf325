"""Wrappers that known transformers models (transformers_tables.py) need in addition to roles.

These models infer batch and sequence length from the embedded tokens, which are sharded here. A
wrapper therefore builds positions, token types and a 4-D attention mask from the full ids; a given
4-D mask is passed on unchanged. The branches then cut the mask to their rows, like every argument
other than the residual. Vision models have no ids; their embedding module makes the residual.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError, StrategyError
from phalanx.parallel.batch_shape import batch_shape
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.operators import unshard
from phalanx.parallel.tensor.transformers_masks import LAYER_TYPES, mask_of
from phalanx.parallel.tensor.transformers_tables import BASES, HEADS, Base, lookup

IMPLEMENTATIONS: Final = ("sdpa", "eager")
"""Supported attention implementations; the others accept no 4-D mask."""


_UNSUPPORTED: Final = {
    "chunk_size_feed_forward": (
        "is {}, which cuts positions that tp has split already; expected 0"
    ),
    "add_cross_attention": "is on and has no layout under tp; expected off",
    "use_bidirectional_attention": "is on; expected off under tp",
}
"""Configuration settings that must be off -> error message for one that is on."""


def refuse_unsupported(model: nn.Module) -> None:
    """Raise a StrategyError for settings under which results would differ from one process."""
    for name, base, known in _bases(model):
        config: Any = base.config
        where = f"tp: {type(base).__name__}{f' {name!r}' if name else ''}"
        implementation = getattr(config, "_attn_implementation", "sdpa")
        if implementation not in IMPLEMENTATIONS:
            raise StrategyError(
                f"{where}: attn_implementation is '{implementation}'; expected one of "
                f"{', '.join(IMPLEMENTATIONS)}, as in from_pretrained(..., "
                f"attn_implementation='{IMPLEMENTATIONS[0]}')"
            )
        for name_of, problem in _UNSUPPORTED.items():
            if value := getattr(config, name_of, False):
                raise StrategyError(f"{where}: {name_of} {problem.format(value)}")
        if known.mask_kind in ("window", "by layer") and not getattr(config, "is_causal", True):
            raise StrategyError(
                f"{where}: is_causal is off; expected on, because windows look back"
            )
        other = set(getattr(config, "layer_types", None) or ()).difference(LAYER_TYPES)
        if other and known.mask_kind == "by layer":
            raise StrategyError(
                f"{where}: layer_types has {', '.join(sorted(other))}; expected "
                f"{' and '.join(LAYER_TYPES)} alone"
            )


def gathered_bases(
    model: nn.Module, reads_residual: Callable[[str], bool]
) -> list[tuple[str, nn.Module]]:
    """Return the known base models in `model` whose last hidden state has to be gathered.

    They are those without a module outside of them that reads the residual shard.
    """
    return [(name, base) for name, base, _ in _bases(model) if not reads_residual(name)]


def bind(model: nn.Module, layout: Layout, reads_residual: Callable[[str], bool]) -> None:
    """Wrap the known models in an already split `model` so that they run on shards."""
    gathered = [base for _, base in gathered_bases(model, reads_residual)]
    for _, base, known in _bases(model):
        _bind_base(base, known, layout, is_gathered=base in gathered)
    for module in model.modules():
        if lookup(HEADS, module) is not None:
            module.register_forward_pre_hook(_refuse_cut_logits, with_kwargs=True)


def _bases(model: nn.Module) -> list[tuple[str, nn.Module, Base]]:
    bases = ((name, each, lookup(BASES, each)) for name, each in model.named_modules())
    return [(name, each, known) for name, each, known in bases if known is not None]


def _bind_base(base: nn.Module, known: Base, layout: Layout, *, is_gathered: bool) -> None:
    """Wrap a base model's forward: prepare its arguments, and gather its last hidden state."""
    whole = base.forward
    signature = inspect.signature(whole)
    has_types = "embeddings.token_type_embeddings" in known.roles

    def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
        """Add the arguments that a base model would infer from its residual."""
        values: dict[str, Any] = dict(signature.bind_partial(*args, **kwargs).arguments)
        values |= values.pop("kwargs", {})
        main: str = cast(Any, base).main_input_name
        if values.get(main) is None:
            raise ConfigError(
                f"tp: expected {main}; tp cannot split inputs_embeds, which have no ids"
            )
        unsupported = ["past_key_values", "encoder_hidden_states", "inputs_embeds"]
        if not has_types:
            unsupported.append("token_type_ids")
        for name in unsupported:
            if values.get(name) is not None:
                raise ConfigError(
                    f"tp: {name} cannot be given to a model that is split; leave it out"
                )
        for name in ("use_cache", "output_attentions", "output_hidden_states"):
            # use_cache is on in most configurations, without effect in training: check arguments
            # only.
            default = None if name == "use_cache" else getattr(base.config, name, None)
            if values.get(name, default):
                raise ConfigError(f"tp: {name} is on, and each rank has only a shard; turn it off")
        values["attention_mask"] = mask_of(base, known, values)
        if (ids := values.get("input_ids")) is None:
            return values
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        if values.get("position_ids") is None:
            values["position_ids"] = positions
        if has_types and values.get("token_type_ids") is None:
            values["token_type_ids"] = torch.zeros_like(positions)
        # Embed here: given ids, GPT-2 would reshape its result to their full shape.
        embedding = cast(Any, base).get_input_embeddings()
        return values | {"input_ids": None, "inputs_embeds": embedding(ids), "use_cache": False}

    @functools.wraps(whole)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = whole(**prepare(*args, **kwargs))
        if not is_gathered:
            return output
        num_features = cast(Any, base).config.hidden_size
        full = unshard(layout, output[0], layout.residual, batch_shape(), num_features)
        if isinstance(output, tuple):
            return (full, *cast(tuple[Any, ...], output)[1:])
        output["last_hidden_state"] = full
        return output

    base.forward = forward


def _refuse_cut_logits(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ConfigError(
            f"tp: logits_to_keep is {keep}, which cuts positions that tp has split already; "
            "expected 0: all"
        )
