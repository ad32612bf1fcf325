"""Low-rank adapters on disk: PEFT's folder, in both directions, and their merge into weights.

adapter_config.json           rank, scaling, targets, and the folder of the base
adapter_model.safetensors     A [rank, in] and B [out, rank] of each linear map

The names are of transformers' modules. One of their maps may join three of ours (Phi-3's
qkv_proj). PEFT then has one A, which our three maps share; and our three adapters become one of
three times the rank:

    A = [A_q; A_k; A_v]      B = diag(B_q, B_k, B_v)
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from phalanx.checkpoint import tensor_file
from phalanx.checkpoint.tensor_file import TensorInfo, open_file
from phalanx.checkpoint.untrusted import brief, read_json, write_json
from phalanx.checkpoint.weights import Weights
from phalanx.errors import CheckpointError
from phalanx.hugging_face.names import table
from phalanx.models.shape import ModelShape

CONFIG: Final = "adapter_config.json"
MODEL: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."

_REQUIRED: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "target_parameters"), (None, [])),
    **dict.fromkeys(("trainable_token_indices", "alora_invocation_tokens"), (None, [])),
}
"""Entry of adapter_config.json that changes the result -> the values that are supported."""


class LowRank(NamedTuple):
    """The adapter of one weight, which becomes `weight + scaling B A`."""

    A: Tensor
    B: Tensor
    scaling: float

    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight with the adapter, in float64."""
        return weight.double().addmm(self.B.double(), self.A.double(), alpha=self.scaling)


Adapters = dict[str, LowRank]
"""Name of a weight of the decoder, such as "blocks.0.attention.q.weight" -> its adapter."""


def adapters_in(weights: Weights) -> Adapters:
    """Return the adapters in a checkpoint of a run with the setting `lora`."""
    lora = weights.shape.lora
    assert lora is not None, "the checkpoint has adapters"
    modules = (f"blocks.{n}.{t}" for n in range(weights.shape.num_layers) for t in lora.targets)
    return {
        f"{module}.weight": LowRank(
            weights.read(f"{module}.lora_A.weight"),
            weights.read(f"{module}.lora_B.weight"),
            lora.scaling,
        )
        for module in modules
    }


def merged(base: Weights, adapters: Adapters, folder: Path) -> Weights:
    """Return the weights of `base` with adapters added to them, as weights of `folder`."""

    def read(name: str) -> Tensor:
        weight = base.read(name)
        return adapters[name].merged(weight) if name in adapters else weight

    return dataclasses.replace(base, folder=folder, read=read)


def read_peft(folder: Path, shape: ModelShape, family: str) -> Adapters:
    """Read the adapters of PEFT's folder for a decoder of `shape`, with the names of `family`.

    Raises:
        CheckpointError: the folder is damaged, or has a kind of adapter that the decoder lacks.
    """
    config = read_json(folder / CONFIG, may_be_link=True)
    for name, legal in _REQUIRED.items():
        if name in config and config[name] not in legal:
            hint = ""
            if name == "target_parameters":  # PEFT's all-linear has them in models with experts
                hint = (
                    "; adapters of experts and routers are read once merge_and_unload merges them"
                )
            raise CheckpointError(
                f"{folder / CONFIG}: {name} is {brief(config[name])}; expected {legal[0]!r}{hint}"
            )
    adapters: Adapters = {}
    with open_file(folder / MODEL) as file:
        left = set(file.keys())
        for link in table(shape, family):
            module = link.theirs.removesuffix(".weight")
            names = [f"{_PREFIX}{module}.lora_{letter}.weight" for letter in "AB"]
            is_linear = module != link.theirs and link.expert is None
            if not is_linear or not left.issuperset(names):
                continue
            left.difference_update(names)
            lora_A, lora_B = map(file.get_tensor, names)
            rank, scaling = len(lora_A), _scaling(config, module, len(lora_A), folder)
            sizes = [tuple(part.shape) for part in (lora_A, lora_B)]
            if lora_A.ndim != 2 or sizes[1] != (sum(link.rows), rank):
                raise CheckpointError(
                    f"{folder / MODEL}: '{module}' has adapters of shapes {sizes[0]} and "
                    f"{sizes[1]}; expected (rank, inputs) and {(sum(link.rows), 'rank')}"
                )
            for ours, part in zip(link.ours, lora_B.split(link.rows), strict=True):
                adapters[ours] = LowRank(lora_A, part, scaling)
    if left or not adapters:
        raise CheckpointError(
            f"{folder / MODEL} has {f'{min(left)!r}' if left else 'no adapter'}, which no linear "
            f"map of this {family} model has; is it of another model?"
        )
    return adapters


def _scaling(config: Mapping[str, Any], module: str, rank: int, folder: Path) -> float:
    """Return the scaling of a module's adapter, as PEFT computes it."""
    patterns = cast("dict[str, Any]", config.get("alpha_pattern") or {})
    matching = (a for key, a in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    alpha = next(matching, config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{folder / CONFIG}: lora_alpha is {brief(alpha)}; expected a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def write_peft(folder: Path, weights: Weights, base: str, family: str) -> None:
    """Write the adapters of a run's checkpoint as PEFT's folder.

    Args:
        folder: an empty folder.
        weights: the checkpoint.
        base: folder of the base, for whoever loads the adapters.
        family: Hugging Face model type of the base.
    """
    lora, adapters = weights.shape.lora, adapters_in(weights)
    assert lora is not None, "the checkpoint has adapters"
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for link in table(dataclasses.replace(weights.shape, lora=None), family):
        if not any(name in adapters for name in link.ours):
            continue
        module = link.theirs.removesuffix(".weight")
        none = torch.empty(0)
        parts = [
            adapters.get(name) or LowRank(none, none.new_empty(rows, 0), 1.0)
            for name, rows in zip(link.ours, link.rows, strict=True)
        ]
        lora_A = torch.cat([part.A for part in parts])
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = lora_A
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = torch.block_diag(*(p.B for p in parts))
        # GPT-2 has two maps c_proj in a block, which differ in the module around them.
        target = ".".join(module.split(".")[-2 if module.endswith("c_proj") else -1 :])
        ranks[target] = len(lora_A)
    # The alphas by which adapters of these ranks have the same scaling.
    divisor = math.sqrt if lora.is_rank_stabilized else float
    others = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    alphas = {name: lora.scaling * divisor(rank) for name, rank in others.items()}
    infos = {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in sorted(tensors.items())}
    tensor_file.write(folder / MODEL, infos, (tensors[name].contiguous() for name in infos))
    write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "use_rslora": lora.is_rank_stabilized,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": [*ranks],
            "rank_pattern": others,
            "alpha_pattern": alphas,
            "fan_in_fan_out": family == "gpt2",
            "inference_mode": True,
        },
    )
