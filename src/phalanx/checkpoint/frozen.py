"""Frozen weights, which whoever resumes a run makes again: a checkpoint has only their checksums.

A weight is frozen if it has no `requires_grad` when a run begins, and its bits are still the same
at a save. So a weight that a script changes itself, as the average of another, is stored; so
is one that it trains later, whatever its `requires_grad` at the save.

The checksum of a tensor is a sum over its elements, modulo 2**64, weighted by their indices in the
full tensor. So the sums of shards add up to it under every strategy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.checkpoint.sharding import Box, sharding_of
from phalanx.checkpoint.untrusted import brief
from phalanx.comm.comm import local_shard
from phalanx.comm.together import all_or_none, gather_objects
from phalanx.errors import CheckpointError
from phalanx.models.random import bits

_PIECE: Final = 1 << 20
"""Elements that are summed at a time, each as 8 bytes."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenWeights:
    """The weights of a model that are frozen when a run begins, with their bits of then."""

    def __init__(self, model: nn.Module) -> None:
        """Note the frozen weights of a split model, before a resume and before the first step."""
        self._bits = _bits({n: p for n, p in model.named_parameters() if not p.requires_grad})
        self._names: set[str] | None = None  # of all ranks
        self._checksums: dict[str, str] = {}

    def checksums(self, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """Return name -> checksum of those that no rank has changed; all ranks call this together.

        `weights` are the weights of the model by name.
        """
        frozen = {name: weights[name] for name in self._bits if name in weights}
        if self._names is None:
            self._names = set[str]().union(*gather_objects([*frozen]))
        if not self._names:
            return {}
        now = _bits(frozen)
        changed = {name for name, before in self._bits.items() if now.get(name) != before}
        same = self._names.difference(*gather_objects(changed))
        # A sum is of the weights of the beginning, so never of those that are changed for a while.
        if new := same - self._checksums.keys():
            self._checksums |= checksums_of({n: frozen[n] for n in frozen if n in new})
        return {name: each for name, each in self._checksums.items() if name in same}


def check_frozen(expected: Mapping[str, str], weights: Mapping[str, Tensor], doing: str) -> None:
    """Compare a model's weights with the checksums in a checkpoint; all ranks call this together.

    Raises:
        CheckpointError: a weight differs, or is missing.
    """
    if not expected:
        return
    ours = checksums_of({name: weights[name] for name in expected if name in weights})

    def compare() -> None:
        for name, checksum in expected.items():
            if name not in ours:
                raise CheckpointError(
                    f"it is of another model: this one has no tensor {brief(name)}"
                )
            if ours[name] != checksum:
                raise CheckpointError(
                    f"it trained on other frozen weights, which it does not contain: {brief(name)} "
                    "differs from this run's; make the model from the same base, with the same "
                    "seed and data type"
                )

    all_or_none(compare, doing)


def checksums_of(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksums of full tensors, given this rank's shards; all ranks call this."""
    sums: dict[str, tuple[Box, int]] = {}
    for name, tensor in weights.items():
        sharding = sharding_of(tensor)
        box = sharding.box(dist.get_rank())
        sums[name] = box, _sum_of_shard(local_shard(tensor.detach()), box, sharding.shape)
    # Replicas have equal boxes, and count once.
    boxes: dict[str, dict[Box, int]] = defaultdict(dict)
    for of_rank in gather_objects(sums):
        for name, (box, total) in of_rank.items():
            boxes[name][box] = total
    return {name: f"{sum(of.values()) % 2**64:016x}" for name, of in boxes.items()}


def _sum_of_shard(local: Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Return this shard's part of a checksum, modulo 2**64."""
    if not box.num_elements:
        return 0
    integers = _INTEGERS[local.element_size()] if not local.is_complex() else None
    if integers is None:
        raise CheckpointError(f"a frozen weight is of {local.dtype}; expected real numbers")
    # Element x[i, j] of the full tensor, with all later dimensions flat in j, adds its bits times
    # rows[i] columns[j], which are random and odd: a change of one element changes the sum.
    inner = torch.zeros((), dtype=torch.int64, device=local.device)
    for dim in range(1, len(shape)):
        places = torch.arange(box.sizes[dim], device=local.device) + box.offsets[dim]
        inner = inner[..., None] + places * math.prod(shape[dim + 1 :])
    columns = bits(1, inner.reshape(-1)) | 1
    elements = local.contiguous().view(integers).reshape(-1, len(columns))
    first = box.offsets[0] if shape else 0
    rows = bits(2, torch.arange(len(elements), device=local.device) + first) | 1
    total, per_piece = 0, max(1, _PIECE // len(columns))
    for piece, of_piece in zip(elements.split(per_piece), rows.split(per_piece), strict=True):
        words = piece.to(torch.int64)
        # No GPU multiplies matrices of integers.
        of_rows = words @ columns if words.is_cpu else (words * columns).sum(1)
        total += int((of_rows * of_piece).sum())
    return total % 2**64


def _bits(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the wrapping sum of the bits of each local shard, which is fast to compare."""
    if not weights:
        return {}
    sums = torch.stack([bits_of(local_shard(tensor)) for tensor in weights.values()])
    return dict(zip(weights, sums.tolist(), strict=True))


def bits_of(tensor: Tensor) -> Tensor:
    """Return the wrapping sum of a tensor's bits, read as int64 words; int64, 0-d."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.data_ptr() % 8:  # an unaligned slice of a buffer has no int64 view
        flat = flat.clone()
    per_piece = 8 // flat.element_size()
    num_whole = len(flat) // per_piece * per_piece
    total = flat[:num_whole].view(torch.int64).sum()
    if num_whole < len(flat):
        rest = flat.new_zeros(per_piece)
        rest[: len(flat) - num_whole] = flat[num_whole:]
        total = total + rest.view(torch.int64)[0]
    return total
