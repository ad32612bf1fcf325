"""The shape of a decoder: all sizes and choices of its parameters and arithmetic, without torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NoReturn

from phalanx.config.fields import Parts
from phalanx.errors import ConfigError, nearest

TARGETS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "q_proj": ("attention.q",),
        "k_proj": ("attention.k",),
        "v_proj": ("attention.v",),
        "o_proj": ("attention.output",),
        "gate_proj": ("mlp.gate",),
        "up_proj": ("mlp.up",),
        "down_proj": ("mlp.down",),
        "c_fc": ("mlp.up",),
        "c_proj": ("attention.output", "mlp.down"),
    }
)
"""Name of a linear map in PEFT's `target_modules` -> its names in a block of ours."""

_FUSED: Final = {
    "qkv_proj": "q_proj+k_proj+v_proj",
    "c_attn": "q_proj+k_proj+v_proj",
    "gate_up_proj": "gate_proj+up_proj",
}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters of linear maps: y = W x + scaling B A x (Hu et al. 2021, section 4.1).

    Only A [rank, in] and B [out, rank] are trained.

    Attributes:
        rank: inner size of each adapter.
        alpha: numerator of the scaling.
        targets: linear maps of each block that have an adapter, such as "attention.q".
        is_rank_stabilized: whether alpha is divided by sqrt(rank) (Kalajdzievski 2023) and not by
            rank.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    is_rank_stabilized: bool = False

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.is_rank_stabilized else self.rank)

    @staticmethod
    def parse(text: str, mlp: str, has_experts: bool = False) -> Lora:
        """Return the adapters that a setting such as `r=16,alpha=32,targets=q_proj+v_proj` names.

        Without `alpha`, it is twice the rank; without `targets`, all linear maps of the blocks of a
        model of this `mlp` kind have adapters. Experts have none.

        Raises:
            ConfigError: an entry is unknown or has an invalid value.
        """
        entries = (entry.partition("=") for entry in text.split(","))
        values = {name: value for name, _, value in entries}
        targets, rslora = values.pop("targets", "all-linear"), values.pop("rslora", None)
        try:
            rank = int(values.pop("r", ""))
            alpha = float(values.pop("alpha", 2 * rank))
        except ValueError:
            rank = alpha = 0
        if values or rslora or rank < 1 or not 0 < alpha < math.inf:
            raise ConfigError(
                f"lora is {text!r}; expected r=RANK and, separated by commas, alpha=NUMBER, "
                "targets=NAME+NAME or rslora, such as r=16,alpha=32"
            )
        every = linear_maps(mlp, has_experts)
        chosen: set[str] = set()
        for name in targets.split("+"):
            ours = (*every,) if name == "all-linear" else TARGETS.get(name, ())
            if not ours or not set(every) >= set(ours):
                legal = [n for n, of in TARGETS.items() if set(every) >= set(of)]
                hint = (
                    "; experts have no adapters" if has_experts and ours else nearest(name, legal)
                )
                if name in _FUSED:  # PEFT trains one A for all parts, Phalanx one for each
                    hint = f"; each of its parts gets an adapter: {_FUSED[name]}"
                raise ConfigError(
                    f"lora: the model has no target {name!r}{hint}; the targets are all-linear, "
                    f"{', '.join(legal)}"
                )
            chosen.update(ours)
        return Lora(
            rank=rank,
            alpha=alpha,
            targets=tuple(name for name in every if name in chosen),
            is_rank_stabilized=rslora is not None,
        )


def linear_maps(mlp: str, has_experts: bool) -> list[str]:
    """Return the names of the linear maps that every block has: those that may have an adapter."""
    every = dict.fromkeys(ours for names in TARGETS.values() for ours in names)
    if mlp == "gelu":
        del every["mlp.gate"]
    return [name for name in every if not (has_experts and name.startswith("mlp."))]


IN_EVALUATION: Final[Mapping[str, Any]] = MappingProxyType(
    {"bias_rate": 0.0, "aux_loss": 0.0, "pools_layers": False, "z_loss": 0.0, "capacity": None}
)
"""Values in an evaluation of the attributes of `ExpertShape` that act in training alone."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape(Parts):
    """Experts in place of the MLP: a router sends each token to `top_k` of `num_experts` MLPs.

    Shazeer et al., Outrageously Large Neural Networks, 2017; Fedus et al., Switch Transformers,
    2021; for sigmoid scores, groups and the balancing bias DeepSeek-AI, DeepSeek-V3, 2024, section
    2.1.2. Scores are computed in float32, in float64 for a float64 model.

    Attributes:
        num_experts: number of experts that a router selects from.
        top_k: number of experts of each token.
        ffn: inner size of an expert.
        first_dense: number of first blocks that have an MLP, of the shape's `ffn`, and no experts.
        score: how logits become scores: softmax over the experts, or sigmoid of each.
        renormalizes: whether the weights of a token's experts are divided by their sum.
        scaling: factor of the weights, after they are renormalized.
        num_groups: number of equal groups of consecutive experts.
        top_groups: number of groups with the best scores, from which experts are selected.
        group_score: score of a group: the largest of its experts', or the sum of the two largest.
        has_bias: whether a bias that only selects, and is no factor of the output, balances loads.
        bias_rate: change of the bias of an expert a step, down if its load is above the mean.
        shared_ffn: inner size of the shared expert, which every token visits; 0 for none.
        has_shared_gate: whether the sigmoid of a linear map scales the shared expert's output.
        aux_loss: coefficient of the balancing loss E sum_e f_e P_e, over the global batch; f_e is
            the selections of expert e a token, P_e its mean part in the scores of a token.
        pools_layers: whether f and P are means over all layers, and not of one layer each.
        z_loss: coefficient of the mean squared log-sum-exp of the logits (Zoph et al. 2022).
        capacity: most tokens of a row that an expert takes in training, as a multiple of the mean
            top_k T / num_experts of a row of T tokens, rounded up; later ones are dropped. None for
            no limit.
    """

    KEY: ClassVar = "experts"
    num_experts: int
    top_k: int
    ffn: int
    first_dense: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalizes: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    has_bias: bool = False
    bias_rate: float = 0.0
    shared_ffn: int = 0
    has_shared_gate: bool = False
    aux_loss: float = 0.0
    pools_layers: bool = False
    z_loss: float = 0.0
    capacity: float | None = None

    def __post_init__(self) -> None:
        def at_least(low: float, *names: str) -> None:
            for name in names:
                value = getattr(self, name)
                if not low <= value <= sys.float_info.max:
                    self._refuse(name, f"at least {low:g} and finite", low)

        at_least(1, "num_experts", "top_k", "ffn", "num_groups", "top_groups")
        at_least(0, "first_dense", "shared_ffn", "bias_rate", "aux_loss", "z_loss")
        if not 0 < self.scaling <= sys.float_info.max:
            self._refuse("scaling", "above 0 and finite", 1.0)
        if self.capacity is not None and not 0 < self.capacity <= sys.float_info.max:
            self._refuse("capacity", "above 0 and finite, or none", 1.0)
        if self.num_experts % self.num_groups:
            divisors = (n for n in range(self.num_groups, 0, -1) if self.num_experts % n == 0)
            self._refuse("num_groups", f"a divisor of {self.num_experts} experts", next(divisors))
        if self.top_groups > self.num_groups:
            self._refuse("top_groups", f"at most num_groups {self.num_groups}", self.num_groups)
        size = self.num_experts // self.num_groups
        if self.group_score == "top2" and size < 2:
            self._refuse("group_score", "max for groups of one expert", "max")
        if self.top_k > (most := self.top_groups * size):
            what = "num_experts" if most == self.num_experts else f"top_groups * {size}"
            self._refuse("top_k", f"at most {what}, {most}", most)
        if self.bias_rate and not self.has_bias:
            self._refuse("bias_rate", "0 without has_bias", 0.0)
        if self.has_shared_gate and not self.shared_ffn:
            self._refuse("has_shared_gate", "false without shared_ffn", "false")

    def _refuse(self, name: str, expected: str, nearest_legal: object) -> NoReturn:
        raise ConfigError(
            f"experts: {name} is {getattr(self, name)}; expected {expected}; the nearest is "
            f"{nearest_legal}"
        )

    @property
    def as_evaluated(self) -> ExpertShape:
        """The experts without what acts in training alone, and may differ from a checkpoint's."""
        return replace(self, **IN_EVALUATION)

    @property
    def has_losses(self) -> bool:
        """Whether there are auxiliary losses."""
        return self.aux_loss > 0 or self.z_loss > 0

    @property
    def needs_loads(self) -> bool:
        """Whether a step needs the loads of the global batch, for losses or for biases."""
        return self.has_losses or self.bias_rate > 0

    @property
    def without_losses(self) -> ExpertShape:
        """The experts without auxiliary losses, whose operations and messages are the same."""
        return replace(self, aux_loss=0.0, z_loss=0.0)

    def limit(self, length: int) -> int:
        """Return the most tokens of a row of `length` that an expert takes in training."""
        if self.capacity is None:
            return length
        # The decimal number: 1.1 * 3 in binary is above 3.3, which would be rounded up.
        return math.ceil(Fraction(str(self.capacity)) * self.top_k * length / self.num_experts)

    def needs_first_pass(self, num_microbatches: int, num_stages: int) -> bool:
        """Return whether a step counts loads by forwards of their own, before the first backward.

        With one microbatch and no pipeline, its forward counts all that the backward needs.
        """
        return self.has_losses and (num_microbatches > 1 or num_stages > 1)


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention: keys and values are projections of one small vector a token.

    DeepSeek-AI, DeepSeek-V2, 2024, section 2.1. A head's query and key have `plain_dim` features
    without position and `rope_dim` with rotary embedding; the latter part of the key is one for all
    heads.

    Attributes:
        query_rank: width of the latent vector of queries; None for a direct projection.
        kv_rank: width of the latent vector of keys and values.
        plain_dim: features of a query or key without position.
        rope_dim: features of a query or key with position.
        value_dim: features of a value.
    """

    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Frequencies of the rotary embedding for rows longer than in pre-training.

    Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023, sections
    3.2 to 3.4. Features that turn less than `beta_slow` times in `original_length` positions turn
    `factor` times slower, features that turn more than `beta_fast` times as before, and features
    between them by interpolation.

    Attributes:
        factor: the new length as a multiple of `original_length`.
        original_length: most positions of a row in pre-training.
        beta_fast, beta_slow: turns at the borders of the interpolation.
        truncate: whether these borders are rounded outward to whole pairs of features.
        attention_factor: factor of cosines and sines; None if it follows from the other values.
        mscale, mscale_all_dim: coefficients of DeepSeek's models, see the two properties.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        optional = dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), 0)
        for name, least in {"factor": 1, "original_length": 1, **optional}.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= sys.float_info.max:
                raise ConfigError(f"yarn: {name} is {value}; it must be at least {least}, finite")
        if not 0 < self.beta_slow < self.beta_fast <= sys.float_info.max:
            raise ConfigError(
                f"yarn: beta_fast is {self.beta_fast:g} and beta_slow is {self.beta_slow:g}; "
                "expected beta_slow above 0 and below beta_fast"
            )

    @property
    def rotation_scale(self) -> float:
        """Factor of cosines and sines, of queries and of keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    @property
    def score_scale(self) -> float:
        """Factor of the scores of latent attention, also of the features without position."""
        return self._scale(self.mscale_all_dim or 0.0) ** 2

    def _scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes and choices of one decoder-only transformer.

    The defaults are Llama's. GPT-2 has norm="layer", position="learned", mlp="gelu" and
    bias=True. Choices are independent; models/registry.py lists the choices of each model family.
    """

    vocab_size: int
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    max_seq_len: int
    norm: Literal["rms", "rms+1", "layer"] = "rms"
    """RMSNorm, RMSNorm that stores weight - 1, or LayerNorm."""
    norm_eps: float = 1e-5
    norm_at: Literal["input", "output", "both"] = "input"
    """Placement of the norms of a branch: at its input, at its output, or both."""
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, float, float, int] | Yarn | None = None
    """YaRN, or Llama 3.1's scaling: factor, low_freq_factor, high_freq_factor, original length."""
    window: int | None = None
    """Number of positions that a query attends to, its own the last; all up to its own if None."""
    full_every: int | None = None
    """Every `full_every`-th block has no window; if None, all blocks have `window`."""
    window_theta: float | None = None
    """rope_theta of blocks with a window, without rope_scaling; if None, as in other blocks."""
    mlp: Literal["swiglu", "geglu", "gelu"] = "swiglu"
    bias: Literal[False, True, "qkv"] = False
    """Which linear maps have biases: none, all, or the query, key and value projections."""
    qk_norm: Literal[False, True, "projection"] = False
    """Whether queries and keys are normalized: no, within each head, or over all heads together."""
    tied: bool = False
    """Whether the output projection uses the embedding's weight."""
    scaled_embedding: bool = False
    """Whether embedding vectors are multiplied by sqrt(hidden)."""
    dropout: float = 0.0
    lora: Lora | None = None
    """Adapters of the linear maps; with them, all other parameters are frozen."""
    experts: ExpertShape | None = None
    """Experts in place of the MLPs."""
    latent: LatentShape | None = None
    """Latent attention in place of grouped queries."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.type in ("int", "int | None") and size is not None and size < 1:
                raise ConfigError(f"model shape: {field.name} is {size}; it must be at least 1")
        for name in ("norm_eps", "rope_theta", "window_theta"):
            number = getattr(self, name)
            low = int(name == "rope_theta" and isinstance(self.rope_scaling, Yarn))
            if number is not None and not low < number <= sys.float_info.max:
                above = f"it must be above {low} and finite"
                raise ConfigError(f"model shape: {name} is {number}; {above}")
        for name in ("full_every", "window_theta"):
            if self.window is None and (value := getattr(self, name)) is not None:
                raise ConfigError(
                    f"model shape: {name} is {value}, but window is None; {name} needs a window"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model shape: num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}"
            )
        if self.position == "rope" and self.latent is None and self.head_dim % 2:
            raise ConfigError(
                f"model shape: head_dim is {self.head_dim}; rotary embedding needs an even number, "
                f"{self.head_dim + 1} is the nearest"
            )
        if (of := self.latent) is not None:
            needed = {
                "head_dim": of.plain_dim + of.rope_dim,
                "num_kv_heads": self.num_heads,
                "position": "rope",
                "bias": False,
                "qk_norm": False,
                "lora": None,
            }
            for name, value in needed.items():
                if (actual := getattr(self, name)) != value:
                    raise ConfigError(
                        f"model shape: {name} is {actual}; with this `latent` it must be {value}"
                    )
            sizes = (of.query_rank or 1, of.kv_rank, of.plain_dim, of.rope_dim, of.value_dim)
            if min(sizes) < 1 or of.rope_dim % 2 or of.value_dim > self.head_dim:
                raise ConfigError(
                    f"model shape: latent is {of}; expected sizes of at least 1, an even rope_dim "
                    f"and a value_dim of at most plain_dim + rope_dim, {self.head_dim}"
                )
        if self.experts is not None:
            self._check_experts(self.experts)
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model shape: dropout is {self.dropout}; it must be in [0, 1)")

    def _check_experts(self, experts: ExpertShape) -> None:
        if experts.first_dense >= self.num_layers:
            raise ConfigError(
                f"model shape: first_dense is {experts.first_dense}, so none of {self.num_layers} "
                f"blocks has experts; the nearest is {self.num_layers - 1}"
            )
        if self.mlp == "gelu" or self.bias is True:
            raise ConfigError(
                f"model shape: experts have a gate and no biases, but mlp is {self.mlp} and bias "
                f"{self.bias}; the nearest is mlp swiglu and bias qkv"
            )
        adapted = [] if self.lora is None else [t for t in self.lora.targets if t[:3] == "mlp"]
        if adapted:
            raise ConfigError(
                f"lora: experts have no adapters, but the targets contain {', '.join(adapted)}; "
                "the nearest is targets=q_proj+k_proj+v_proj+o_proj"
            )

    def experts_of(self, block: int) -> ExpertShape | None:
        """Return the experts of block number `block`; None if it has an MLP."""
        is_dense = self.experts is None or block < self.experts.first_dense
        return None if is_dense else self.experts

    def window_of(self, block: int) -> int | None:
        """Return the window of block number `block`; None if it has no window."""
        is_full = self.full_every is not None and (block + 1) % self.full_every == 0
        return None if is_full else self.window

    def has_bias(self, linear: Literal["qkv", "other"]) -> bool:
        """Return whether linear maps of a kind have biases: the q, k and v maps, or the others."""
        return self.bias is True or self.bias == linear


def causal_pairs(length: int, window: int | None = None) -> int:
    """Return the number of (query, key) pairs in a row; a query has at most `window` keys."""
    near = length if window is None else min(window, length)
    return near * (near + 1) // 2 + near * (length - near)
