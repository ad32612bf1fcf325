"""Run scheduled steps on the training module, with its attention replaced by paged attention."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from phalanx.comm.together import all_or_none, reason_of
from phalanx.errors import CheckpointError
from phalanx.hugging_face.convert import open_weights
from phalanx.infer.lora_modules import AdapterMask, AdapterSet
from phalanx.infer.paged import FlatStep, KVCache, PagedAttention
from phalanx.infer.sampler import scores_of_rows
from phalanx.infer.served import fill_from
from phalanx.models.decoder import Decoder
from phalanx.parallel.batch_shape import BatchShape, batch_scope, batch_shape
from phalanx.parallel.plan import shard_of
from phalanx.parallel.tensor import operators
from phalanx.parallel.tensor.layout import Layout

SCORED_LOGITS: Final = 1 << 24
"""Most logits that scoring prompt tokens holds at once: 192 MiB in float32 and float64."""


class ModelRunner:
    """Computes the logits of flat steps, and writes keys and values to the cache.

    The decoder is the module that is trained: its own attention is restored after each step.

    Attributes:
        model: the decoder.
        cache: key-value cache of this rank's heads.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        layout: Layout | None = None,
        adapters: AdapterSet | None = None,
    ) -> None:
        """Create a runner; `layout` is of `model` on the ranks of a job, None in one process."""
        self.model, self.cache, self._layout = model, cache, layout
        self._mask = None if adapters is None else AdapterMask(model, adapters, layout)
        self._attentions = [cast(Any, block).attention for block in model.blocks]

    @torch.inference_mode()
    def __call__(self, step: FlatStep) -> Tensor:
        """Return the logits [len(step.rows), V], float32 or wider."""
        self.cache.copy(step.copies)
        paged, model = PagedAttention(self.cache, step), self.model
        positions_1N = paged.positions_1N
        tokens_1N = torch.tensor([step.tokens], device=positions_1N.device)
        if self._mask is not None:
            pairs = zip(step.spans, step.adapters, strict=True)
            self._mask.set([number for span, number in pairs for _ in range(span.start, span.stop)])
        trained = [attention.attend for attention in self._attentions]
        try:
            for layer, attention in enumerate(self._attentions):
                attention.attend = functools.partial(paged.attend, layer)
            with batch_scope(BatchShape(1, len(step.tokens))):
                x_1ND = model.embed(tokens_1N, positions_1N, None)
                x_1ND = model.run_blocks(x_1ND, positions_1N, None, None)
                tp, hidden = self._layout, model.shape.hidden
                if tp is not None and (step.rows or step.scored):  # this rank has a shard of x
                    x_1ND = operators.unshard(tp, x_1ND, tp.residual, batch_shape(), hidden)

            def read(rows: list[int]) -> Tensor:
                """Return the logits of some rows; tp shards these rows anew."""
                x_1RD = x_1ND[:, torch.tensor(rows, device=x_1ND.device)]
                with batch_scope(BatchShape(1, len(rows))):
                    x_1RD = x_1RD if tp is None else operators.shard(tp, x_1RD, tp.residual)
                    logits = model.read(x_1RD)[0]
                return logits.to(torch.promote_types(logits.dtype, torch.float32))

            # Logits of a whole prompt would take tokens x vocabulary: they are reduced to scores,
            # some rows at a time.
            size = max(SCORED_LOGITS // model.shape.vocab_size, 1)
            for begin in range(0, len(step.scored), size):
                some = step.scored[begin : begin + size]
                tokens, nums = [each.token for each in some], [each.num_top for each in some]
                scores = scores_of_rows(
                    read([each.row for each in some]), tokens, nums, step.num_ids
                )
                for each, score in zip(some, scores, strict=True):
                    each.score = score
            return read(step.rows) if step.rows else x_1ND.new_empty(0, model.shape.vocab_size)
        finally:
            for attention, attend in zip(self._attentions, trained, strict=True):
                attention.attend = attend

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Replace the weights in place with the weights of a checkpoint: all of them, or none.

        All ranks of a job call this together; if one fails, all keep their weights.

        Raises:
            CheckpointError: it is damaged, is of another model, or does not fit into memory.
        """
        doing = "the weights stay as they are"
        if self._layout is not None:
            shards = all_or_none(lambda: self.read(folder), doing)
        else:
            try:
                shards = self.read(folder)
            except Exception as error:  # such as OutOfMemoryError
                raise CheckpointError(f"{doing}: {reason_of(error)}") from error
        for shard, value in shards:
            shard.copy_(value)

    def read(self, folder: Path) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a weight shard on this rank and its new value from a checkpoint.

        The new value is on the same device as the shard, so both take memory there.
        """
        weights = open_weights(folder)
        if weights.shape != dataclasses.replace(self.model.shape, lora=None):
            raise CheckpointError(f"{folder} has a model of a different shape")
        fill, pairs = fill_from(weights), list[tuple[Tensor, Tensor]]()
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if ".lora_" in name:  # served adapters stay
                continue
            shard, offset = shard_of(tensor)
            value = torch.empty_like(shard)
            fill(value, name, tuple(tensor.shape), offset)
            pairs.append((shard, value))
        return pairs
