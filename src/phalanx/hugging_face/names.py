"""Weights of Llama, Qwen3 and GPT-2 to and from the Hugging Face layout.

`table(shape)` says once, for both directions, which of our tensors stand in which of theirs, and
how: under another name, transposed (GPT-2's Conv1D is [in, out]) or stacked (its c_attn holds q, k
and v). The rotary layout is the same: both turn the pair (x_i, x_{i + K/2}) of a head, so the rows
of q and k keep their order. A tied output projection is left out, as `save_pretrained` does.

Nothing here needs the transformers package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.checkpoint.weights import sizes_of
from phalanx.errors import CheckpointError, nearest
from phalanx.hugging_face.config import family_of
from phalanx.models.shape import ModelShape

_LLAMA_FIRST = {"embedding.weight": "model.embed_tokens.weight"}
_LLAMA_LAST = {"norm.weight": "model.norm.weight"}
_LLAMA_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_QWEN3_BLOCK = {
    **_LLAMA_BLOCK,
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
_GPT2_FIRST = {
    "embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
}
_GPT2_LAST = {"norm.weight": "transformer.ln_f.weight", "norm.bias": "transformer.ln_f.bias"}
_OUTPUT = {"output.weight": "lm_head.weight"}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.q attention.k attention.v": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


@dataclass(frozen=True)
class Link:
    """One Hugging Face tensor and the tensors of ours that it holds.

    Attributes:
        theirs: its name.
        ours: our names; several are equal parts, stacked along the outputs.
        is_transposed: it is stored as [in, out], ours as [out, in].
    """

    theirs: str
    ours: tuple[str, ...]
    is_transposed: bool = False

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return their tensor, made of ours in the order of `ours`; a view where that is enough."""
        stacked = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
        return stacked.T if self.is_transposed else stacked

    def join_sizes(self, sizes: Mapping[str, torch.Size]) -> torch.Size:
        """Return the size of their tensor, from the sizes of ours by name."""
        return self.join([torch.empty(sizes[name], device="meta") for name in self.ours]).shape

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return our tensors, views of theirs: the inverse of `join`."""
        stacked = tensor.T if self.is_transposed else tensor
        return stacked.chunk(len(self.ours))


def table(shape: ModelShape) -> list[Link]:
    """Return what stands where, from the embedding to the output.

    Raises:
        ConfigError: no Hugging Face model computes this shape.
    """
    family = family_of(shape)
    first, last = (_GPT2_FIRST, _GPT2_LAST) if family == "gpt2" else (_LLAMA_FIRST, _LLAMA_LAST)
    blocks = [
        link
        for index in range(shape.num_layers)
        for link in (_gpt2_block(index) if family == "gpt2" else _llama_block(index, family))
    ]
    return [*_links(first), *blocks, *_links(last), *_links({} if shape.tied else _OUTPUT)]


def _links(names: Mapping[str, str]) -> list[Link]:
    return [Link(theirs, (ours,)) for ours, theirs in names.items()]


def _llama_block(index: int, family: str) -> list[Link]:
    names = _QWEN3_BLOCK if family == "qwen3" else _LLAMA_BLOCK
    return [
        Link(f"model.layers.{index}.{theirs}", (f"blocks.{index}.{ours}",))
        for ours, theirs in names.items()
    ]


def _gpt2_block(index: int) -> list[Link]:
    return [
        Link(
            f"transformer.h.{index}.{theirs}.{kind}",
            tuple(f"blocks.{index}.{part}.{kind}" for part in ours.split()),
            is_transposed=kind == "weight" and ".c_" in theirs,
        )
        for ours, theirs in _GPT2_BLOCK.items()
        for kind in ("weight", "bias")
    ]


def locate(sizes: Mapping[str, Sequence[int]], shape: ModelShape) -> dict[str, str]:
    """Find the tensors of the table among those of a file.

    The names differ where a model was saved without its head, which leaves the first part of each
    name out. Buffers that old files hold, and the second name of a tied weight, are passed over.

    Args:
        sizes: the size of each tensor of the file, by name.
        shape: of the decoder.

    Returns:
        The name in the file by the name in the table.

    Raises:
        CheckpointError: a tensor is missing, of another size, or has no place.
    """
    prefix = "transformer." if family_of(shape) == "gpt2" else "model."
    left = {name for name in sizes if not _is_known_extra(name, shape)}
    links = table(shape)
    # The embedding comes first in the table, and every model has one.
    if links[0].theirs not in left and links[0].theirs.removeprefix(prefix) in left:
        found = {link.theirs: link.theirs.removeprefix(prefix) for link in links}
    else:
        found = {link.theirs: link.theirs for link in links}
    for name in found.values():
        if name not in left:
            raise CheckpointError(f"Hugging Face weights: '{name}' is missing{nearest(name, left)}")
    left -= set(found.values())
    if left:
        raise CheckpointError(
            f"Hugging Face weights: no place for {len(left)} of them, '{min(left)}' first; is the "
            "shape that of their config.json?"
        )
    expected = sizes_of(shape)
    for link in links:
        wanted, actual = tuple(link.join_sizes(expected)), tuple(sizes[found[link.theirs]])
        if actual != wanted:
            raise CheckpointError(
                f"Hugging Face weights: '{found[link.theirs]}' is {actual}; the shape asks for "
                f"{wanted}"
            )
    return found


def tied_copies(names: Iterable[str], shape: ModelShape) -> list[str]:
    """Return the names under which a file holds a tied weight a second time."""
    return [name for name in names if shape.tied and name.endswith("lm_head.weight")]


def _is_known_extra(name: str, shape: ModelShape) -> bool:
    if name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
        return True
    return bool(tied_copies([name], shape))
