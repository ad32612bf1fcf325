"""Convert the content of a Hugging Face config.json to and from a `ModelShape`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, cast

from phalanx.checkpoint.untrusted import brief
from phalanx.errors import ConfigError, NotDivisible, nearest
from phalanx.hugging_face.families import FAMILIES, Family, family_of
from phalanx.models.shape import ExpertShape, LatentShape, ModelShape, Yarn

CONFIG: Final = "config.json"

IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Entries with the ids of the begin, end and padding tokens."""

_LENGTH: Final = "original_max_position_embeddings"
_LLAMA3_SCALING: Final = ("factor", "low_freq_factor", "high_freq_factor", _LENGTH)

_YARN: Final = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
"""Optional numbers of rope_scaling of type yarn."""

MAX_LAYERS: Final = 10_000
"""Largest accepted number of layers; lists of this length are built before the weights are read."""

MAX_SIZE: Final = 2**20
"""Largest accepted width and number of heads: torch can count the bytes of a tensor with three such
dimensions."""

MAX_ROWS: Final = 2**30
"""Largest accepted vocabulary size and number of positions."""

_MOST: Final = {"num_layers": MAX_LAYERS, "vocab_size": MAX_ROWS, "max_seq_len": MAX_ROWS}

_FULL, _WINDOWED = "full_attention", "sliding_attention"
"""Values of layer_types for a block with full attention, and for a block with a window."""

_GEMMA_PATTERN: Final = 6
_GEMMA_THETA: Final = (1_000_000.0, 10_000.0)
"""Defaults of transformers for Gemma: theta of blocks without a window, and with a window."""

_NOT_COMPUTED: Final[Mapping[str, Any]] = {
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "clip_qkv": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "use_bidirectional_attention": False,
}
"""Options of any model type that are not supported -> the one value that has no effect."""


def config_to_hf(
    shape: ModelShape,
    dtype: str,
    family: str | None = None,
    ids: Mapping[str, int | list[int] | None] | None = None,
) -> dict[str, Any]:
    """Return the content of a config.json for a decoder, with the entries of published models.

    Dropout is written for GPT-2 only; the other families have none. Of the losses of a router, only
    a balancing loss that pools the layers is written; no family has another, or a capacity.

    If `family` is None, the first family that computes the shape is used. Ids that are not in `ids`
    are written as null, because transformers would default to the ids of the published model.

    Raises:
        ConfigError: no Hugging Face model, or not the type `family`, computes this shape.
    """
    name = family_of(shape, family)
    of = FAMILIES[name]
    config = {
        "architectures": [of.architecture],
        "model_type": name,
        "tie_word_embeddings": shape.tied,
        **dict.fromkeys(IDS),
        **(ids or {}),
        "torch_dtype": dtype,
        **{theirs: getattr(shape, ours) for theirs, ours in of.sizes.items()},
        of.norm_eps: shape.norm_eps,
        **of.constants,
        **_windows_to_hf(shape, name),
        **_experts_to_hf(shape, of),
        **{theirs: getattr(shape.latent, ours) for theirs, ours in of.latent_entries.items()},
        **({"num_nextn_predict_layers": 0} if of.latent_entries else {}),
    }
    if shape.position == "learned":
        return {
            **config,
            "embd_pdrop": shape.dropout,
            "resid_pdrop": shape.dropout,
            "attn_pdrop": 0.0,
        }
    scaling: dict[str, Any] | None = None
    if isinstance(yarn := shape.rope_scaling, Yarn):
        chosen = {name: getattr(yarn, name) for name in (*_YARN, "truncate")}
        scaling = {"rope_type": "yarn", "factor": yarn.factor, _LENGTH: yarn.original_length}
        scaling |= {name: each for name, each in chosen.items() if each != getattr(Yarn, name)}
    elif shape.rope_scaling is not None:
        numbers = zip(_LLAMA3_SCALING, shape.rope_scaling, strict=True)
        scaling = {"rope_type": "llama3", **dict(numbers)}
    config |= {"rope_theta": shape.rope_theta, "rope_scaling": scaling}
    if name == "gemma3_text":
        config["query_pre_attn_scalar"] = shape.head_dim
        config["rope_local_base_freq"] = shape.window_theta or shape.rope_theta
    return config


def shape_from_hf(config: Mapping[str, Any]) -> ModelShape:
    """Return the `ModelShape` that the content of a config.json describes.

    Raises:
        ConfigError: Decoder does not support the model type, or the value of an option.
    """
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        # Suggest no similar name: the config might load under that type as a different model.
        raise ConfigError(f"model_type is '{name}'; legal are {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise ConfigError(
            "the weights are quantized (quantization_config); only float64, float32, bfloat16 and "
            "float16 are read"
        )
    family = FAMILIES[name]
    for option, legal in {**_NOT_COMPUTED, **family.constants, **family.required}.items():
        _require(config, option, legal)
    sizes = {
        ours: _whole(config, theirs, most=_MOST.get(ours, MAX_SIZE))
        for theirs, ours in family.sizes.items()
        if theirs not in family.optional or config.get(theirs) is not None
    }
    hidden, num_heads = sizes["hidden"], sizes["num_heads"]
    if name == "gpt2" and hidden % num_heads:
        raise NotDivisible("n_embd", hidden, num_heads)
    derived = {"num_kv_heads": num_heads, "head_dim": hidden // num_heads, "ffn": 4 * hidden}
    values: dict[str, Any] = {**derived, **sizes, **family.parts}
    values |= _windows(config, name, sizes["num_layers"])
    values["experts"] = _experts(config, family, sizes["num_layers"])
    if family.latent_entries:
        _require(config, "rope_interleave", True, absent=True)
        of_latent: dict[str, Any] = {"query_rank": None} | {
            ours: _whole(config, theirs, most=MAX_SIZE)
            for theirs, ours in family.latent_entries.items()
            if ours != "query_rank" or _need(config, theirs) is not None
        }
        values["latent"] = LatentShape(**of_latent)
        values["head_dim"] = values["latent"].plain_dim + values["latent"].rope_dim
    if name == "gemma3_text":
        _require(config, "query_pre_attn_scalar", values["head_dim"], absent=256)
        # Both thetas, from the dicts per block kind (transformers 5) or the older entries.
        rope: Any = config.get("rope_parameters") or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(f"rope_parameters is {rope!r}; expected an object")
        by_kind = cast("Mapping[str, Any]", rope)
        full = by_kind.get(_FULL) or config.get("rope_scaling") or {}
        theta, local_theta = _GEMMA_THETA
        entries = {"rope_theta": config.get("rope_theta") or theta}
        values["rope_theta"], _ = _rope(full, entries, family)
        entries = {"rope_theta": config.get("rope_local_base_freq") or local_theta}
        local_theta, _ = _rope(by_kind.get(_WINDOWED) or {}, entries, family)
        values["window_theta"] = local_theta if values["window"] is not None else None
    elif values["position"] == "rope":
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        values["rope_theta"], values["rope_scaling"] = _rope(rope, config, family)
    tied = _flag(config, "tie_word_embeddings", family.is_tied)
    norm_eps = _number(config, family.norm_eps)
    if (needed := values.pop("norm_eps", norm_eps)) != norm_eps:
        raise ConfigError(f"{family.norm_eps} is {norm_eps}; only {needed} is supported")
    return ModelShape(**values, norm_eps=norm_eps, tied=tied)


_NUM_EXPERTS: Final = ("num_experts", "num_local_experts")
"""Two names of one entry: published files have one, and transformers 5 may write the other."""


def _experts_to_hf(shape: ModelShape, family: Family) -> dict[str, Any]:
    """Return the config.json entries for experts."""
    if (experts := shape.experts) is None:
        return {}
    values = {theirs: getattr(experts, ours) for theirs, ours in family.expert_entries.items()}
    if "mlp_only_layers" in values:
        values["mlp_only_layers"] = list(range(experts.first_dense))
    if "n_shared_experts" in values:  # as many experts of one size as the shared one is wide
        values["n_shared_experts"] = experts.shared_ffn // experts.ffn
    if experts.aux_loss and experts.pools_layers:
        return {**values, "output_router_logits": True, "router_aux_loss_coef": experts.aux_loss}
    return {**values, "output_router_logits": False}


def _experts(config: Mapping[str, Any], family: Family, num_layers: int) -> ExpertShape | None:
    """Return the `ModelShape` field `experts`."""
    if not family.expert_entries:
        return None
    values: dict[str, Any] = {**family.expert_parts}
    for theirs, ours in family.expert_entries.items():
        if ours == "renormalizes":
            values[ours] = _flag(config, theirs)
        elif theirs == "n_shared_experts":
            values[ours] = values["ffn"] * _whole(config, theirs, most=MAX_SIZE)
        elif ours == "scaling":
            values[ours] = _number(config, theirs)
        elif theirs == "first_k_dense_replace":
            values[ours] = _whole(config, theirs, least=0, most=num_layers - 1)
        elif ours == "first_dense":
            dense: Any = config.get(theirs) or []
            if not isinstance(dense, list) or dense != [*range(min(len(dense), num_layers - 1))]:
                raise ConfigError(
                    f"{theirs} is {brief(dense)}; only the first blocks may have no experts, as in "
                    "[0, 1], and the last block has some"
                )
            values[ours] = len(dense)
        elif ours == "num_experts":
            found = next((name for name in _NUM_EXPERTS if name in config), theirs)
            values[ours] = _whole(config, found, most=MAX_SIZE)
        else:
            most = values["num_experts"] if ours == "top_k" else MAX_SIZE
            values[ours] = _whole(config, theirs, most=most)
    if _flag(config, "output_router_logits") and config.get("router_aux_loss_coef") != 0:
        # transformers adds the loss only with the router's logits, of all layers at once.
        values |= {"aux_loss": _number(config, "router_aux_loss_coef"), "pools_layers": True}
    return ExpertShape(**values)


def _windows_to_hf(shape: ModelShape, name: str) -> dict[str, Any]:
    """Return the config.json entries for sliding windows."""
    windows = [shape.window_of(block) for block in range(shape.num_layers)]
    match FAMILIES[name].windows:
        case "none":
            return {}
        case "all":
            return {"sliding_window": shape.window}
        case "layers":
            kinds = [_FULL if window is None else _WINDOWED for window in windows]
            if name != "gemma3_text":
                # For readers that ignore layer_types: blocks from max_window_layers on have one.
                return {
                    "use_sliding_window": _WINDOWED in kinds,
                    "sliding_window": shape.window,
                    "max_window_layers": 0 if _WINDOWED in kinds else shape.num_layers,
                    "layer_types": kinds,
                }
            every = shape.full_every
            return {
                "sliding_window": shape.window or shape.max_seq_len,
                "layer_types": kinds,
                **({} if every is None else {"sliding_window_pattern": every}),
            }


def _windows(config: Mapping[str, Any], name: str, num_layers: int) -> dict[str, Any]:
    """Return the `ModelShape` fields for sliding windows."""
    family = FAMILIES[name]
    # layer_types lists the blocks; where a config lacks it, each type has its own older entries:
    #
    #   mistral, phi3    sliding_window, for all blocks
    #   qwen2, qwen3     use_sliding_window, and max_window_layers: the first block with a window
    #   gemma3_text      sliding_window_pattern N: every N-th block without a window
    if family.windows == "none":
        _require(config, "use_sliding_window", False)
        if "use_sliding_window" not in config:  # else sliding_window has no effect
            _require(config, "sliding_window", None)
        default = [_FULL] * num_layers
    elif family.windows == "all":
        # No default: without the entry, transformers uses 4,096 for one type, none for another.
        window = _need(config, "sliding_window")
        default = [_FULL if window is None else _WINDOWED] * num_layers
    elif name == "gemma3_text":
        every = config.get("sliding_window_pattern") or _GEMMA_PATTERN
        default = [_WINDOWED if (n + 1) % every else _FULL for n in range(num_layers)]
    else:
        first = _whole(config, "max_window_layers", 0) if config.get("use_sliding_window") else None
        default = [_FULL if first is None or n < first else _WINDOWED for n in range(num_layers)]
        if first is None and _WINDOWED in (config.get("layer_types") or ()):
            raise ConfigError(
                "layer_types has windows, but use_sliding_window is not true; set it to true, or "
                "remove the windows"
            )
    kinds = config.get("layer_types") or default
    if not isinstance(kinds, list) or len(cast("list[Any]", kinds)) != num_layers:
        raise ConfigError(f"layer_types is {kinds!r}; expected a list of {num_layers} blocks")
    if family.windows != "layers" and kinds != default:
        raise ConfigError(
            f"layer_types is {kinds!r}; only {default!r} is supported for this model_type"
        )
    every = _full_every(cast("list[Any]", kinds), config.get("sliding_window_pattern"))
    if every == 1:
        return {"window": None}
    return {"window": _whole(config, "sliding_window", most=MAX_ROWS), "full_every": every}


def _full_every(kinds: list[Any], wanted: Any) -> int | None:
    """Return N if exactly every N-th block has no window; None if all blocks have a window.

    N is 1 if no block has a window. If several N fit, `wanted` is preferred.
    """
    if unknown := next((kind for kind in kinds if kind not in (_FULL, _WINDOWED)), None):
        raise ConfigError(f"layer_types has {unknown!r}; legal are '{_FULL}' and '{_WINDOWED}'")
    # W W F W W F is every 3. W W F is every 3 too, and W W W F W has every 4 alone; W W is every 3
    # or more, so None (all have windows) comes before the numbers, and `wanted` before all.
    is_full = [kind == _FULL for kind in kinds]
    if all(is_full):
        return 1
    numbers = [wanted] if type(wanted) is int and wanted > 1 else []
    for every in (*numbers, None, *range(2, len(kinds) + 1)):
        if is_full == [every is not None and (n + 1) % every == 0 for n in range(len(kinds))]:
            return every
    raise ConfigError(
        "windows are mixed: blocks "
        f"{', '.join(str(n) for n, full in enumerate(is_full) if full)} of {len(kinds)} have none; "
        "expected windows in all blocks, in none, or in all but the last of every N"
    )


def _rope(
    rope: Any, config: Mapping[str, Any], family: Family
) -> tuple[float, tuple[float, float, float, int] | Yarn | None]:
    """Return theta and the RoPE scaling, from one dict (transformers 5) or two older entries."""
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_scaling is {rope!r}; expected an object")
    rope = cast("Mapping[str, Any]", rope)
    _require(rope, "partial_rotary_factor", 1.0)
    where = rope if "rope_theta" in rope else config
    # transformers 5 has theta beside the scaling in one object, older files have it in the config.
    theta = (
        _number(where, "rope_theta") if where.get("rope_theta") is not None else family.rope_theta
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in family.rope_types:
        legal = " and ".join(repr(each) for each in family.rope_types)
        raise ConfigError(f"rope_type is {kind!r}; legal here: {legal}")
    if kind == "default":
        return theta, None
    if kind == "yarn":
        # As in transformers, 0 and null mean that a number is not set.
        given: dict[str, Any] = {name: _number(rope, name) for name in _YARN if rope.get(name)}
        given |= {"factor": _number(rope, "factor"), "truncate": _flag(rope, "truncate", True)}
        named = {_LENGTH: config.get("max_position_embeddings"), **rope}
        return theta, Yarn(original_length=_whole(named, _LENGTH, most=MAX_ROWS), **given)
    *numbers, original = _LLAMA3_SCALING
    factor, low, high = (_number(rope, option) for option in numbers)
    if low >= high:
        raise ConfigError(
            f"low_freq_factor is {low:g} and high_freq_factor is {high:g}; "
            "expected low_freq_factor below high_freq_factor"
        )
    return theta, (factor, low, high, _whole(rope, original, most=MAX_ROWS))


def _whole(config: Mapping[str, Any], option: str, least: int = 1, most: int | None = None) -> int:
    value = _need(config, option)
    if type(value) is not int or value < least or (most is not None and value > most):
        legal = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise ConfigError(f"{option} is {brief(value)}; expected a whole number {legal}")
    return value


def _number(config: Mapping[str, Any], option: str) -> float:
    value = _need(config, option)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{option} is {brief(value)}; expected a number above 0 and finite")
    return float(value)


def _flag(config: Mapping[str, Any], option: str, absent: bool = False) -> bool:
    value = config.get(option, absent)
    if not isinstance(value, bool):
        raise ConfigError(f"{option} is {brief(value)}; expected true or false")
    return value


def _need(config: Mapping[str, Any], option: str) -> Any:
    if option not in config:
        raise ConfigError(f"{option} is missing{nearest(option, config)}")
    return config[option]


def _require(config: Mapping[str, Any], option: str, legal: Any, absent: Any = None) -> None:
    """Raise ConfigError unless an option has the legal value; its default is `absent`, if given."""
    actual = config.get(option, legal if absent is None else absent)
    if actual != legal and not (actual is None and option in _NOT_COMPUTED):
        raise ConfigError(f"{option} is {actual!r}; only {legal!r} is supported")
