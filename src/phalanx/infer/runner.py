"""Run scheduled steps on the training module, with its attention replaced by paged attention."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from phalanx.checkpoint.weights import open_checkpoint
from phalanx.comm.together import reason_of
from phalanx.errors import CheckpointError
from phalanx.infer.paged import FlatStep, KVCache, PagedAttention
from phalanx.infer.served import fill_from
from phalanx.models.decoder import Decoder
from phalanx.parallel.batch_shape import BatchShape, batch_scope, batch_shape
from phalanx.parallel.plan import shard_of
from phalanx.parallel.tensor import operators
from phalanx.parallel.tensor.layout import Layout

WEIGHTS_KEPT: Final = "the weights stay as they are"
"""Start of the message on a checkpoint that cannot be loaded."""


class ModelRunner:
    """Computes the logits of flat steps, and writes keys and values to the cache.

    The decoder is the module that is trained: its own attention is restored after each step.

    Attributes:
        model: the decoder.
        cache: key-value cache of this rank's heads.
    """

    def __init__(self, model: Decoder, cache: KVCache, layout: Layout | None = None) -> None:
        """Create a runner; `layout` is the tensor-parallel layout of `model`, if it has one."""
        self.model, self.cache, self._layout = model, cache, layout
        self._attentions = [cast(Any, block).attention for block in model.blocks]

    @torch.inference_mode()
    def __call__(self, step: FlatStep) -> Tensor:
        """Return the logits [len(step.rows), V], float32 or wider."""
        self.cache.copy(step.copies)
        paged = PagedAttention(self.cache, step)
        tokens_1N = torch.tensor([step.tokens], device=paged.positions_1N.device)
        model, positions_1N = self.model, paged.positions_1N
        rows = torch.tensor(step.rows, dtype=torch.int64, device=tokens_1N.device)
        with self._attending(paged), batch_scope(BatchShape(1, len(step.tokens))):
            x_1ND = model.embed(tokens_1N, positions_1N, None)
            x_1ND = model.run_blocks(x_1ND, positions_1N, None, None)
            if not step.rows:
                logits = x_1ND.new_empty(1, 0, model.shape.vocab_size)
            elif self._layout is None:
                logits = model.read(x_1ND[:, rows])
            else:  # x_1ND is in the layout of tp: the residual of this rank
                tp, hidden = self._layout, model.shape.hidden
                whole = operators.unshard(tp, x_1ND, tp.residual, batch_shape(), hidden)[:, rows]
                with batch_scope(BatchShape(1, len(rows))):
                    logits = model.read(operators.shard(tp, whole, tp.residual))
        return logits[0].to(torch.promote_types(logits.dtype, torch.float32))

    def load(self, folder: Path) -> None:
        """Replace the weights in place with the weights of a checkpoint: all of them, or none.

        Raises:
            CheckpointError: it is damaged, is of another model, or does not fit into memory.
        """
        try:
            read = self.read(folder)
        except Exception as error:  # such as OutOfMemoryError: the old weights stay
            raise CheckpointError(f"{WEIGHTS_KEPT}: {reason_of(error)}") from error
        self.put(read)

    def read(self, folder: Path) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a weight shard on this rank and its new value from a checkpoint.

        The new value is on the same device as the shard, so both take memory there.
        """
        weights = open_checkpoint(folder)
        if weights.shape != self.model.shape:
            raise CheckpointError(f"{folder} has a model of a different shape")
        fill = fill_from(weights)
        read: list[tuple[Tensor, Tensor]] = []
        for name, parameter in self.model.named_parameters():
            shard, offset = shard_of(parameter)
            value = torch.empty_like(shard)
            fill(value, name, tuple(parameter.shape), offset)
            read.append((shard, value))
        return read

    @torch.no_grad()
    def put(self, read: list[tuple[Tensor, Tensor]]) -> None:
        """Copy each new value that `read` returned into its weight shard."""
        for shard, value in read:
            shard.copy_(value)

    @contextmanager
    def _attending(self, paged: PagedAttention) -> Generator[None]:
        """Replace the attention of each layer by paged attention inside the context."""
        before = [attention.attend for attention in self._attentions]
        try:
            for layer, attention in enumerate(self._attentions):
                attention.attend = functools.partial(_attend, paged, layer)
            yield
        finally:
            for attention, attend in zip(self._attentions, before, strict=True):
                attention.attend = attend


def _attend(
    paged: PagedAttention,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Any,
    window: int | None,
) -> Tensor:
    del documents
    return paged.attend(layer, window, q, k, v)
