"""Attention masks of transformers models, computed from the full batch instead of a shard.

The masks have four dimensions and equal the models' own masks exactly; a mask is `None` only where
the model itself would use none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.parallel.tensor.transformers_tables import Base

Mask = Tensor | Mapping[str, Tensor | None] | None

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Supported entries of `config.layer_types`, for models with one mask per type of layer."""


def mask_of(base: nn.Module, known: Base, values: Mapping[str, Any]) -> Mask:
    """Return the mask of a known model, or one per layer type, from the forward's arguments."""
    config: Any = base.config
    if known.mask_kind != "by layer":
        window = config.sliding_window if known.mask_kind == "window" else None
        return _mask(base, known, values, window)
    if isinstance(values.get("attention_mask"), Mapping):
        return cast(Mask, values["attention_mask"])
    windows = dict(zip(LAYER_TYPES, (None, config.sliding_window), strict=True))
    types = dict.fromkeys(config.layer_types)
    return {each: _mask(base, known, values, windows[each]) for each in types}


def _mask(base: Any, known: Base, values: Mapping[str, Any], window: int | None) -> Tensor | None:
    """Return the mask of layers with a sliding `window`, or of layers without one if None."""
    mask: Tensor | None = values.get("attention_mask")
    if mask is not None and mask.ndim == 4:
        return mask
    if mask is not None and mask.ndim != 2:
        raise ConfigError(
            f"tp: attention_mask is of shape {tuple(mask.shape)}; expected [rows, positions], or a "
            "mask of four dimensions"
        )
    seen = None if mask is None or bool(mask.all()) else mask.bool()[:, None, None, :]
    setting, default = ("is_decoder", False) if known.mask_kind == "all" else ("is_causal", True)
    is_causal = bool(getattr(base.config, setting, default))
    allowed = _causal_mask(base, values, seen, window) if is_causal else seen
    if base.config._attn_implementation != "eager":
        return allowed
    if allowed is None:  # given None, the model would create a mask of the shard's shape
        length = values["input_ids"].shape[1] if is_causal else 1
        allowed = _causal(length, None, base.device)
    zero = torch.zeros((), dtype=base.dtype, device=allowed.device)
    return torch.where(allowed, zero, torch.finfo(base.dtype).min)


def _causal_mask(
    base: nn.Module, values: Mapping[str, Any], seen: Tensor | None, window: int | None
) -> Tensor | None:
    """Return the causal mask: True where a query (third dimension) attends to a key (fourth).

    None stands for the plain causal mask, without padding, window or packed sequences.
    """
    ids: Tensor = values["input_ids"]
    positions: Tensor | None = values.get("position_ids")
    allowed = _causal(ids.shape[1], window, ids.device)
    if seen is not None:
        return allowed & seen
    if positions is None:
        return None if window is None or ids.shape[1] < window else allowed
    # With given positions always return a mask: the model would detect sequences in its shard only.
    # The model detects sequences in a row only without a key-value cache. Even in training it makes
    # a cache, and drops it, unless `use_cache` is off.
    config: Any = base.config
    use_cache = values.get("use_cache")
    has_cache = config.use_cache if use_cache is None else use_cache
    if getattr(base, "gradient_checkpointing", False) and base.training:
        has_cache = False
    if values.get("attention_mask") is not None or has_cache:
        return allowed
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    # Positions 0 1 2 0 1: steps 1 1 1 -2 1, so the sequences are 0 0 0 1 1.
    sequences = (steps != 1).cumsum(-1)
    return allowed & (sequences[:, None, :, None] == sequences[:, None, None, :])


def _causal(length: int, window: int | None, device: torch.device) -> Tensor:
    index = torch.arange(length, device=device)
    distance = index[None, None, :, None] - index[None, None, None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
