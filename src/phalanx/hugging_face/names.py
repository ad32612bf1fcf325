"""Map the weights of a decoder to and from the tensor names of each Hugging Face model type.

`table(shape, family)` is the mapping for both directions. A tensor of ours has another name in
theirs, and may be transposed (GPT-2's Conv1D is [in, out]) or stacked (GPT-2's c_attn and Phi-3's
qkv_proj contain q, k and v). Experts of a block are one tensor of ours and, in files of released
models, a tensor an expert of theirs; transformers 5 has them in memory as two stacked tensors.

The RoPE layout is the same: both rotate the pair (x_i, x_{i + K/2}) of a head, so the rows of q and
k are not permuted; but DeepSeek-V3 rotates (x_2i, x_{2i+1}). A tied output projection is omitted,
as in `save_pretrained`.

This module does not need the transformers package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from phalanx.checkpoint.weights import sizes_of
from phalanx.errors import CheckpointError, nearest
from phalanx.models.shape import ModelShape

_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_QWEN3_BLOCK = {
    **_LLAMA_BLOCK,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
_PHI3_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q attention.k attention.v": "self_attn.qkv_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate mlp.up": "mlp.gate_up_proj",
    "mlp.down": "mlp.down_proj",
}
_GEMMA3_BLOCK = {
    **_QWEN3_BLOCK,
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_OLMO2_BLOCK = {
    ours: theirs
    for ours, theirs in _GEMMA3_BLOCK.items()
    if ours not in ("attention_norm", "mlp_norm")
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.q attention.k attention.v": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_MIXTRAL_BLOCK = {
    **_LLAMA_BLOCK,
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.*.w1.weight",
    "mlp.experts.up": "block_sparse_moe.experts.*.w3.weight",
    "mlp.experts.down": "block_sparse_moe.experts.*.w2.weight",
}
_MOE_BLOCK = {
    **_QWEN3_BLOCK,
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.*.gate_proj.weight",
    "mlp.experts.up": "mlp.experts.*.up_proj.weight",
    "mlp.experts.down": "mlp.experts.*.down_proj.weight",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
_DEEPSEEK3_BLOCK = {
    **{ours: t for ours, t in _LLAMA_BLOCK.items() if ours not in ("attention.k", "attention.v")},
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv": "self_attn.kv_b_proj",
    **{ours: t for ours, t in _MOE_BLOCK.items() if ".experts." in ours},
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
_BLOCKS: Final = MappingProxyType(
    {
        "deepseek_v3": _DEEPSEEK3_BLOCK,
        "mixtral": _MIXTRAL_BLOCK,
        **dict.fromkeys(("qwen3_moe", "qwen2_moe", "olmoe"), _MOE_BLOCK),
        "qwen3": _QWEN3_BLOCK,
        "phi3": _PHI3_BLOCK,
        "olmo2": _OLMO2_BLOCK,
        "gemma3_text": _GEMMA3_BLOCK,
        "gpt2": _GPT2_BLOCK,
    }
)
"""Model type -> names of the modules of a block, ours -> theirs; other types use Llama's.

`*` stands for the number of an expert. Modules that a block lacks are left out.
"""

_STACKED: Final = {
    "mlp.experts.gate mlp.experts.up": "mlp.experts.gate_up_proj",
    "mlp.experts.down": "mlp.experts.down_proj",
}
"""Names of the experts of a block in memory, of all model types."""


@dataclass(frozen=True)
class TheirTensor:
    """The name of a Hugging Face tensor, and the names of our tensors in it.

    Several tensors of ours are stacked along the output dimension; `rows` is the number of rows of
    each. A transposed tensor is stored as [in, out], ours as [out, in]. If `expert` is not None,
    theirs is of one expert, and ours have all. If `turned` is (K, E), the last E rows of each head
    of K rows are rotated in pairs of neighbours in theirs, of the two halves in ours.
    """

    theirs: str
    ours: tuple[str, ...]
    rows: tuple[int, ...]
    is_transposed: bool = False
    expert: int | None = None
    turned: tuple[int, int] | None = None

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return their tensor from our tensors, in the order of `ours`; a view of a single one."""
        # GPT-2:  q, k, v [768, 768] -> cat [2304, 768] -> T: attn.c_attn.weight [768, 2304]
        # Mixtral, expert 3:  gate [8, 14336, 4096] -> experts.3.w1.weight [14336, 4096]
        # in memory:  gate, up [8, 14336, 4096] -> cat: experts.gate_up_proj [8, 28672, 4096]
        parts = [each if self.expert is None else each[self.expert] for each in tensors]
        stacked = torch.cat(parts, max(-2, -parts[0].ndim)) if len(parts) > 1 else parts[0]
        stacked = stacked if self.turned is None else self._paired(stacked, 2)
        return stacked.T if self.is_transposed else stacked

    def join_sizes(self, sizes: Mapping[str, torch.Size]) -> torch.Size:
        """Return the size of their tensor; `sizes` maps the names of our tensors to sizes."""
        return self.join([torch.empty(sizes[name], device="meta") for name in self.ours]).shape

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Split their tensor into our tensors, as views, or into an expert's part of each."""
        stacked = tensor.T if self.is_transposed else tensor
        if self.turned is not None:
            stacked = self._paired(stacked, self.turned[1] // 2)
        return stacked.split(self.rows, max(-2, -stacked.ndim))

    def _paired(self, matrix: Tensor, num_groups: int) -> Tensor:
        """Reorder the turned rows of each head from `num_groups` groups to what pairs them."""
        # E = 6, from two halves to neighbours and, with three groups, back:
        #     0 1 2 | 3 4 5   ->   0 3 | 1 4 | 2 5   ->   0 1 2 | 3 4 5
        assert self.turned is not None
        head, width = self.turned
        plain, turned = matrix.unflatten(0, (-1, head)).split([head - width, width], 1)
        turned = turned.unflatten(1, (num_groups, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat([plain, turned], 1).flatten(0, 1)


def table(shape: ModelShape, family: str, is_stacked: bool = False) -> list[TheirTensor]:
    """Return the tensors of a model type and their parts, in order from embedding to output.

    Args:
        shape: shape of the decoder.
        family: model type, which computes the shape.
        is_stacked: whether experts are stacked, as in memory, and not a tensor each, as in files.
    """
    if family == "gpt2":
        embedding = {"embedding": "wte", "position_embedding": "wpe"}
        model, blocks, norm = "transformer", "h", "ln_f"
    else:
        embedding = {"embedding": "embed_tokens"}
        model, blocks, norm = "model", "layers", "norm"
    # Sizes of a block of each kind serve all: a model of 100 layers would else be built to name its
    # tensors. Block 0 is like all or, if the first blocks have no experts, like these.
    block, experts = _BLOCKS.get(family, _LLAMA_BLOCK), shape.experts
    num_dense = 0 if experts is None else experts.first_dense
    one_of_each = replace(
        shape,
        num_layers=1 + bool(num_dense),
        experts=experts and replace(experts, first_dense=int(bool(num_dense))),
    )
    of_kind = sizes_of(one_of_each)
    if is_stacked:
        others = {ours: theirs for ours, theirs in block.items() if ".experts." not in ours}
        block = {o: t.replace("block_sparse_moe.", "mlp.") for o, t in others.items()} | _STACKED
    turned: dict[str, tuple[int, int]] = {}
    if (latent := shape.latent) is not None:
        if latent.query_rank is not None:
            block = {**block, "attention.q": "self_attn.q_b_proj"}
        turned["attention.q.weight"] = shape.head_dim, latent.rope_dim
        turned["attention.kv_down.weight"] = latent.kv_rank + latent.rope_dim, latent.rope_dim
    modules = {ours: f"{model}.{theirs}" for ours, theirs in embedding.items()}
    for index in range(shape.num_layers):
        for ours, theirs in block.items():
            stacked = " ".join(f"blocks.{index}.{each}" for each in ours.split())
            modules[stacked] = f"{model}.{blocks}.{index}.{theirs}"
    modules["norm"] = f"{model}.{norm}"
    if not shape.tied:
        modules["output"] = "lm_head"
    links: list[TheirTensor] = []
    for ours, theirs in modules.items():
        for kind in (".weight", ".bias", ""):
            # "blocks.3.attention.q blocks.3.attention.k ..." with ".weight": each part is as
            # large as in the block of its kind, and what this block lacks (a bias) is left out.
            # Our names of experts are of parameters, so that nothing is added to them.
            names = tuple(f"{each}{kind}" for each in ours.split())
            like = [
                _NUMBER.sub(lambda n: f"blocks.{int(0 < num_dense <= int(n[1]))}.", name)
                for name in names
            ]
            if like[0] not in of_kind:
                continue
            rows = tuple(of_kind[name][-2:][0] for name in like)
            is_transposed = kind == ".weight" and ".c_" in theirs
            of_experts = range(of_kind[like[0]][0]) if "*" in theirs else [None]
            of_heads = turned.get(_NUMBER.sub("", names[0]))
            links += [
                TheirTensor(
                    f"{theirs}{kind}".replace("*", str(n)), names, rows, is_transposed, n, of_heads
                )
                for n in of_experts
            ]
    return links


_BUFFERS: Final = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Suffixes of the names of buffers that old files contain."""

_NUMBER: Final = re.compile(r"^blocks\.(\d+)\.")


def locate(sizes: Mapping[str, Sequence[int]], shape: ModelShape, family: str) -> list[TheirTensor]:
    """Return the table with the names of the file whose tensors have `sizes`.

    Experts of the file may be stacked. If the model was saved without its head, the first part of
    each name is missing. Buffers of old files and the second copy of a tied weight are ignored.

    Raises:
        CheckpointError: a tensor is missing, has the wrong size, or does not belong to the model.
    """
    prefix = "transformer." if family == "gpt2" else "model."
    # Names in the file; all that are known are taken out, so the rest belongs to no tensor of ours.
    left = set(sizes).difference(_tied_copies(sizes, shape))
    # A block after the last predicts a further token, for training alone.
    beyond = f"model.layers.{shape.num_layers}." if family == "deepseek_v3" else "\n"
    left = {n for n in left if not n.endswith(_BUFFERS) and not n.startswith(beyond)}
    is_stacked = any(name.endswith(".experts.gate_up_proj") for name in left)
    least, of = shape.num_layers, "layers"
    if shape.experts is not None and not is_stacked:
        least = (shape.num_layers - shape.experts.first_dense) * shape.experts.num_experts
        of = "experts of all layers"
    if least > len(sizes):  # before a large model is built
        raise CheckpointError(
            f"it has {len(sizes)} tensors, fewer than the {least} {of} in its config.json"
        )
    links = table(shape, family, is_stacked)
    # The first entry of the table is the embedding, which every model has.
    if links[0].theirs not in left and links[0].theirs.removeprefix(prefix) in left:
        links = [replace(link, theirs=link.theirs.removeprefix(prefix)) for link in links]
    for link in links:
        if (name := link.theirs) not in left:
            hint = nearest(name, left)
            if name.endswith("lm_head.weight"):
                hint = (
                    "; if the output projection is the embedding, set tie_word_embeddings to true "
                    "in config.json"
                )
            raise CheckpointError(f"'{name}' is missing{hint}")
    left.difference_update(link.theirs for link in links)
    if left:
        raise CheckpointError(
            f"the model has no '{min(left)}', the first of {len(left)} unexpected weights; does "
            "config.json belong to these weights?"
        )
    expected = sizes_of(shape)
    for link in links:
        wanted, actual = tuple(link.join_sizes(expected)), tuple(sizes[link.theirs])
        if actual != wanted:
            raise CheckpointError(f"'{link.theirs}' has shape {actual}; expected {wanted}")
    return links


def reader(
    shape: ModelShape,
    family: str,
    sizes: Mapping[str, tuple[int, ...]],
    read_theirs: Callable[[str], Tensor],
) -> Callable[[str], Tensor]:
    """Return a function that reads a weight of ours, by name, from their tensors.

    Raises:
        CheckpointError: see `locate`; or a copy of a tied weight differs from the embedding.
    """
    located = locate(sizes, shape, family)
    links: dict[str, list[TheirTensor]] = {}
    for link in located:
        for name in link.ours:
            links.setdefault(name, []).append(link)
    embedding = located[0].theirs
    for name in _tied_copies(sizes, shape):
        if not torch.equal(read_theirs(name), read_theirs(embedding)):
            raise CheckpointError(
                f"config.json ties the output to the embedding, but '{name}' differs from "
                f"'{embedding}'; set tie_word_embeddings to false in it to keep both"
            )

    def read(name: str) -> Tensor:
        parts = [
            link.split(read_theirs(link.theirs))[link.ours.index(name)] for link in links[name]
        ]
        return parts[0] if links[name][0].expert is None else torch.stack(parts)

    return read


def _tied_copies(names: Iterable[str], shape: ModelShape) -> list[str]:
    """Return the names of output projections that duplicate a tied embedding."""
    return [name for name in names if shape.tied and name.endswith("lm_head.weight")]
