"""One decoder-only transformer for all model families, which differ only in their ModelShape.

Layers have plain parameters, cast them to the dtype of the activation, and are independent of
devices.

Dimensions in the suffixes of tensor names:

    B rows of the batch      D hidden            H query heads         K width of a head
    T positions in a row     F inner of the MLP  G key-value heads     V vocabulary
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.models.attention import (
    Attention,
    Documents,
    LatentAttention,
    Rotation,
    documents_of,
    rotation,
)
from phalanx.models.experts import MoE
from phalanx.models.initial import fill_initial
from phalanx.models.layers import MLP, Dropout, Linear, Norm
from phalanx.models.loss import IGNORE, token_loss_sum
from phalanx.models.random import layer_keys
from phalanx.models.shape import ModelShape


class Block(nn.Module):
    """Attention and MLP with norms at `shape.norm_at`, each added to the residual stream.

    Attributes:
        index: number of the block in the full decoder, also in a pipeline stage.
        has_window: whether attention is limited to the shape's window.
    """

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        self.dropout = Dropout(shape.dropout)
        self.index = index
        window = shape.window_of(index)
        self.has_window = window is not None
        self.attention_norm = _norm_at("input", shape)
        self.attention = (Attention if shape.latent is None else LatentAttention)(shape, window)
        self.attention_output_norm = _norm_at("output", shape)
        self.mlp_norm = _norm_at("input", shape)
        experts = shape.experts_of(index)
        self.mlp = MLP(shape, shape.ffn) if experts is None else MoE(shape, experts, index)
        self.mlp_output_norm = _norm_at("output", shape)

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation | None = None,
        documents: Documents | None = None,
        dropout_keys_B: Tensor | None = None,
        counted_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after the block, a tensor like x_BTD.

        Args:
            x_BTD: the residual stream.
            rotation: cosines and sines of the rotary embedding, or None without one.
            documents: boundaries of documents, see `documents_of`; None if each row is one.
            dropout_keys_B: dropout keys of the rows for this block, `layer_keys(keys_B, index)`;
                None for no dropout. The caller applies the index, because torch.compile would
                otherwise recompile for each block.
            counted_BT: whether each token counts toward the load of the experts; None if none does.
        """
        #   x -------------------------------+-> x --------------------------+-> x
        #   norm 1 -> attention -> norm 2 ---^   norm 1 -> MLP -> norm 2 ----^
        #
        # Norm 1 is there for `norm_at` input and both, norm 2 for output and both.
        read_BTD = x_BTD if self.attention_norm is None else self.attention_norm(x_BTD)
        added_BTD = self.attention(read_BTD, rotation, documents)
        if self.attention_output_norm is not None:
            added_BTD = self.attention_output_norm(added_BTD)
        x_BTD = x_BTD + self.dropout(added_BTD, dropout_keys_B, 1)
        read_BTD = x_BTD if self.mlp_norm is None else self.mlp_norm(x_BTD)
        is_dense = isinstance(self.mlp, MLP)
        added_BTD = self.mlp(read_BTD) if is_dense else self.mlp(read_BTD, counted_BT)
        if self.mlp_output_norm is not None:
            added_BTD = self.mlp_output_norm(added_BTD)
        return x_BTD + self.dropout(added_BTD, dropout_keys_B, 2)


def _norm_at(place: str, shape: ModelShape) -> Norm | None:
    return Norm(shape.hidden, shape) if shape.norm_at in (place, "both") else None


class Embedding(nn.Module):
    """A table of vectors, one for each id.

    Attributes:
        sparse: whether the gradient is a sparse tensor, as in nn.Embedding.
    """

    sparse = False

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Look ids_BT up; return a tensor of shape BTD in the table's dtype."""
        return F.embedding(ids_BT, self.weight, sparse=self.sparse)


class Head(nn.Module):
    """The output projection and its loss; if tied, it has no weight and uses the embedding's.

    Attributes:
        compiles_loss: whether torch.compile fuses the loss on a GPU.
    """

    compiles_loss = False

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = (
            None if shape.tied else nn.Parameter(torch.empty(shape.vocab_size, shape.hidden))
        )

    def forward(
        self, x_BTD: Tensor, labels_BT: Tensor | None = None, tied_VD: Tensor | None = None
    ) -> Tensor:
        """Return logits_BTV, or with labels the sum of the token losses.

        Args:
            x_BTD: the normalized residual stream.
            labels_BT: int64, IGNORE where a token does not count.
            tied_VD: weight of the embedding if it is also the output projection.
        """
        weight_VD = tied_VD if self.weight is None else self.weight
        assert weight_VD is not None
        if labels_BT is None:
            return F.linear(x_BTD, weight_VD.to(x_BTD.dtype))
        hidden_ND, labels_N = x_BTD.flatten(0, 1), labels_BT.flatten()
        return token_loss_sum(hidden_ND, weight_VD, labels_N, compiles=self.compiles_loss)


class Stage(NamedTuple):
    """The part of a decoder that runs as one pipeline stage.

    Attributes:
        blocks: numbers of the blocks that run.
        received: residual stream from the previous stage; None in the first stage, which embeds.
        is_last: whether the final norm and the output projection run.
    """

    blocks: range
    received: Tensor | None
    is_last: bool


class Decoder(nn.Module):
    """A decoder-only transformer of the given shape; its weights are set by `initialize`.

    A tied output projection uses the embedding's own `nn.Parameter`, which is registered only once,
    so that neither `to_empty` nor a copy of the module can separate the two.

    Attributes:
        compute_dtype: dtype of the arithmetic; the dtype of the parameters if None.
        segment_size: number of consecutive blocks that run as one function; all blocks by default.
        run_segment: called as `run_segment(function, *args)` for each segment, to return
            `function(*args)`; recomputation replaces it to choose the tensors saved for backward.
        stage: the stage that runs; the full decoder if None. The forward of a stage that is not the
            last returns the residual stream.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.compute_dtype: torch.dtype | None = None
        self.segment_size = shape.num_layers
        self.run_segment: Callable[..., Tensor] = cast(Any, operator.call)
        self.stage: Stage | None = None
        self.embedding = Embedding(shape.vocab_size, shape.hidden)
        self.position_embedding = (
            Embedding(shape.max_seq_len, shape.hidden) if shape.position == "learned" else None
        )
        self.dropout = Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, index) for index in range(shape.num_layers))
        self.norm = Norm(shape.hidden, shape)
        self.output = Head(shape)
        if shape.lora is not None:
            self.requires_grad_(False)
            for block in self.blocks:
                for target in shape.lora.targets:
                    cast(Linear, block.get_submodule(target)).adapt(shape.lora)

    @staticmethod
    def on_meta(
        shape: ModelShape, master: torch.dtype, compute: torch.dtype | None = None
    ) -> Decoder:
        """Return a decoder without values, whose trained parameters have the dtype `master`.

        Frozen parameters have the dtype `compute` of the arithmetic: no optimizer adds small steps
        to them, for which they would need a wider one.
        """
        with torch.device("meta"):
            model = Decoder(shape).to(dtype=master)
        for parameter in model.parameters():
            if compute is not None and not parameter.requires_grad:
                parameter.data = parameter.data.to(compute)
        model.compute_dtype = compute
        return model

    @property
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Modules before and after the blocks; both lists are empty if the embedding is tied."""
        if self.shape.tied:
            return [], []
        children = dict(self.named_children())  # a stage of a pipeline may lack some
        embeddings, head = ("embedding", "position_embedding"), ("norm", "output")
        return [children[n] for n in embeddings if n in children], [
            children[n] for n in head if n in children
        ]

    def initialize(self, seed: int) -> None:
        """Initialize every weight from (seed, parameter name, flat index); see `fill_initial`."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            fill_initial(self.shape, seed, tensor, name)

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | Documents | None = None,
        dropout_keys_B: Tensor | None = None,
    ) -> Tensor:
        """Return logits_BTV in the compute dtype, or with labels the sum of the token losses.

        Args:
            tokens_BT: int64 token ids.
            labels_BT: next token for each token (already shifted); IGNORE where none counts.
            positions_BT: position of each token in its document; 0..T-1 in each row if None.
            documents_BT: number of the document of each token; tokens attend only inside their
                document. One document a row if None. On a GPU pass the result of `documents_of` on
                a host tensor, which avoids a synchronization.
            dropout_keys_B: a key for each row, from `models.random.row_keys`; required for training
                with dropout, unused otherwise.

        Raises:
            ConfigError: rows are longer than the shape's max_seq_len, or dropout has no keys.
        """
        keys_B = None if self.shape.dropout == 0.0 or not self.training else dropout_keys_B
        if self.shape.dropout and self.training and keys_B is None:
            raise ConfigError(
                f"model: dropout is {self.shape.dropout}, so training needs dropout_keys_B (from "
                "models.random.row_keys); call eval() to run without dropout"
            )
        length = tokens_BT.shape[1]
        self.check_length(length)
        if positions_BT is None:
            positions_BT = torch.arange(length, device=tokens_BT.device)[None]
        is_counted = self.shape.experts is not None and self.training and labels_BT is not None
        # Nested, so that no local variable keeps the input of the first block alive.
        x_BTD = self.run_blocks(
            self.embed(tokens_BT, positions_BT, keys_B),
            positions_BT,
            documents_BT,
            keys_B,
            labels_BT != IGNORE if is_counted else None,
        )
        is_last = self.stage is None or self.stage.is_last
        return self.read(x_BTD, labels_BT) if is_last else x_BTD

    def check_length(self, length: int) -> None:
        """Raise a ConfigError for rows longer than `shape.max_seq_len`."""
        if length > self.shape.max_seq_len:
            raise ConfigError(
                f"model: rows of {length} tokens; max_seq_len is {self.shape.max_seq_len}"
            )

    def embed(self, tokens_BT: Tensor, positions_BT: Tensor, keys_B: Tensor | None) -> Tensor:
        """Return the residual stream x_BTD before the first block of this stage."""
        if self.stage is not None and self.stage.received is not None:
            return self.stage.received
        x_BTD = self.embedding(tokens_BT)
        if self.shape.scaled_embedding:
            x_BTD = x_BTD * math.sqrt(self.shape.hidden)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(positions_BT)
        x_BTD = x_BTD.to(self.compute_dtype or x_BTD.dtype)
        return self.dropout(x_BTD, keys_B, 0)

    def run_blocks(
        self,
        x_BTD: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | Documents | None,
        keys_B: Tensor | None,
        counted_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after the blocks of this stage."""
        angles = window_angles = rotation(self.shape, positions_BT, x_BTD.dtype)
        if self.shape.window_theta is not None:
            window_angles = rotation(self.shape, positions_BT, x_BTD.dtype, has_window=True)
        documents = documents_BT
        if not isinstance(documents, tuple):
            documents = documents_of(documents, x_BTD.device)
        running = range(len(self.blocks)) if self.stage is None else self.stage.blocks
        # Segments are of the full decoder, also in a pipeline stage: a stage of blocks 3 to 6 with
        # segments of 4 runs [3] and [4 5 6], so that it recomputes as one process does.
        for start in range(0, len(self.blocks), self.segment_size):
            segment = [
                self.blocks[at] for at in range(start, start + self.segment_size) if at in running
            ]
            x_BTD = self.run_segment(
                _run_blocks, segment, x_BTD, (angles, window_angles), documents, keys_B, counted_BT
            )
        return x_BTD

    def read(self, x_BTD: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        """Apply the final norm and the head; return logits or the sum of the losses."""
        tied_VD = self.embedding.weight if self.shape.tied else None
        return self.output(self.norm(x_BTD), labels_BT, tied_VD)


def _run_blocks(
    blocks: list[nn.Module],
    x_BTD: Tensor,
    angles: tuple[Rotation | None, Rotation | None],
    documents: Documents | None,
    keys_B: Tensor | None,
    counted_BT: Tensor | None,
) -> Tensor:
    for block in cast(list[Block], blocks):
        # Keyed by the number of the block in the full decoder, so a stage draws the masks of one
        # process.
        block_keys_B = None if keys_B is None else layer_keys(keys_B, block.index)
        x_BTD = block(x_BTD, angles[block.has_window], documents, block_keys_B, counted_BT)
    return x_BTD
