"""Small models of transformers with random weights, which compute in the type they are given.

Their norms and their eager attention compute in float32 whatever they are given, so no two orders
of a sum agree to 1e-10. Here both are the same but for that.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_WORDS = 67  # odd

SIZES: dict[str, Any] = {
    "vocab_size": NUM_WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_cache": False,
    "num_labels": 3,
}
DROPOUT = dict.fromkeys(
    ("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop",
     "embd_pdrop", "attn_pdrop"), 0.0
)  # fmt: skip

WINDOW = {"sliding_window": 4}
TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**WINDOW, **TYPES, "head_dim": 8}  # heads are wider than hidden_size has room for
OPTIONS: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "qwen2": {**WINDOW, **TYPES, "use_sliding_window": True},
    "qwen3": {"head_dim": 8},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA,
    "phi3": WINDOW,
    "vit": {"image_size": 12, "patch_size": 4},
}
"""What a family has beside `SIZES`."""


def small(
    family: str, task: str = "CausalLM", has_own_norms: bool = False, **options: Any
) -> nn.Module:
    """Return a small model: of a family, by its `model_type`, for a task, or "" for the base."""
    import transformers

    torch.manual_seed(0)
    given = {**SIZES, **DROPOUT, **OPTIONS.get(family, {}), **options}
    config = transformers.AutoConfig.for_model(family, **given)
    of = getattr(transformers, f"AutoModel{f'For{task}' if task else ''}")
    model = of.from_config(config)
    return model if has_own_norms else in_the_given_type(model)


def in_the_given_type(model: nn.Module) -> nn.Module:
    """Let norms and eager attention of a model compute in the type that they are given."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            # Also where all weights are first 0, gradients must come through the branch.
            nn.init.uniform_(module.weight, -0.5, 0.5)
            module.forward = MethodType(_norm, module)
    code = sys.modules[type(model).__module__]
    if hasattr(code, "eager_attention_forward"):
        code.eager_attention_forward = _attention
    return model


def _norm(self: Any, x: Tensor) -> Tensor:
    eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
    weight = 1 + self.weight if "Gemma" in type(self).__name__ else self.weight
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, -1)
    return (weights @ value).transpose(1, 2).contiguous(), weights
