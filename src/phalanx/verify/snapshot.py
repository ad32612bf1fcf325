"""What a rank holds at a place of a step, and what all ranks hold together.

    rank 0   numbers, shards, hashes ──┐
    rank 1   numbers, shards, hashes ──┼─> full tensors; hashes of replicas to compare
    rank 2   numbers, shards, hashes ──┘

Ranks that hold the same shard send it once, but each sends its hash.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_on_first
from phalanx.parallel.plan import shard_of
from phalanx.parallel.reduce import is_fused
from phalanx.verify.reference import kept_by

BitsKey = tuple[str, str, tuple[int, ...]]
"""Quantity, name of the parameter, and offset of the shard."""

Shards = dict[str, tuple[tuple[int, ...], torch.dtype, tuple[slice, ...], bytes]]
"""Shards of a rank by name: shape and dtype of the full tensor, slices and bytes of the shard."""


class Snapshot(NamedTuple):
    """Numbers and tensors of one rank.

    Attributes:
        numbers: quantity -> name -> number, such as the loss and the norms by p.
        shards: quantity -> shards of which this rank is the first replica.
        bits: hash of each shard of this rank.
        nonfinite: names of the parameters whose gradient shard on this rank is not finite.
    """

    numbers: dict[str, dict[str, float]]
    shards: dict[str, Shards]
    bits: dict[BitsKey, str]
    nonfinite: list[str]

    @classmethod
    def empty(cls) -> Snapshot:
        """Return a snapshot to be filled by `add`."""
        return cls({}, {}, {}, [])

    def add(
        self,
        comm: Comm,
        tensors: Mapping[str, Mapping[str, Tensor]],
        numbers: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Snapshot:
        """Add tensors and numbers, by quantity and name; every rank of `comm` calls this."""
        for quantity, values in (numbers or {}).items():
            self.numbers.setdefault(quantity, {}).update(values)
        for quantity, by_name in tensors.items():
            shards = self.shards.setdefault(quantity, {})
            for name, tensor in by_name.items():
                tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
                shard, offset = shard_of(tensor)
                data = _bytes_of(shard)
                self.bits[quantity, name, offset] = _digest(data)
                if quantity == "gradient" and not shard.isfinite().all():
                    self.nonfinite.append(name)
                if isinstance(tensor, DTensor) and (
                    is_fused(tensor) or not tensor.is_floating_point()
                ):
                    tensor = tensor.full_tensor()
                    shard, offset = shard_of(tensor)
                    data = _bytes_of(shard)
                if shard.numel() and _sends_shard(tensor, comm):
                    ends = zip(offset, shard.shape, strict=True)
                    slices = tuple(slice(i, i + size) for i, size in ends)
                    shards[name] = tuple(tensor.shape), shard.dtype, slices, data
        return self


def hash_of(tensor: Tensor) -> str:
    """Return a hash of this rank's shard of a tensor."""
    return _digest(_bytes_of(shard_of(tensor.detach())[0]))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _sends_shard(tensor: Tensor, comm: Comm) -> bool:
    """Return whether this rank is the first replica of its shard, among the ranks of its stage."""
    shards: set[str] = set()
    if isinstance(tensor, DTensor):
        assert not any(p.is_partial() for p in tensor.placements), "a sum over ranks is pending"
        names = tensor.device_mesh.mesh_dim_names or ()
        pairs = zip(names, tensor.placements, strict=True)
        sharded = [name for name, placement in pairs if not placement.is_replicate()]
        shards = {axis for name in sharded for axis in comm.axes_of(name)}
    return all(comm.coord(axis) == 0 for axis in comm.axes if axis != "pp" and axis not in shards)


def merged(ranks: Sequence[Snapshot]) -> dict[str, dict[str, Tensor | float]]:
    """Return the full tensors, on the CPU, and the numbers of the first rank."""
    numbers = ranks[0].numbers
    quantities = dict.fromkeys(q for rank in ranks for q in rank.shards)  # a stage may be frozen
    tensors = {q: assembled(rank.shards.get(q, {}) for rank in ranks) for q in quantities}
    return {q: {**numbers.get(q, {}), **tensors.get(q, {})} for q in {**numbers, **tensors}}


def assembled(ranks: Iterable[Shards]) -> dict[str, Tensor]:
    """Return the full tensors, on the CPU, from the shards of all ranks."""
    full: dict[str, Tensor] = {}
    for of_rank in ranks:
        for name, (shape, dtype, slices, data) in of_rank.items():
            if name not in full:
                # Elements that no rank sends stay NaN, so that a comparison fails.
                nothing = math.nan if dtype.is_floating_point else 0
                full[name] = torch.full(shape, nothing, dtype=dtype)
            part = full[name][slices]
            part.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view_as(part))
    return full


def full_tensors(tensors: Mapping[str, Tensor], comm: Comm) -> dict[str, Tensor]:
    """Return full copies on the CPU on rank 0, an empty dict elsewhere; every rank calls this.

    Rank 0 has the gathered shards of all ranks in memory together with the full tensors.
    """
    ranks = gather_on_first(Snapshot.empty().add(comm, {"": tensors}).shards[""])
    return assembled(ranks)


def owner(parameter: str) -> str:
    """Return the name of the module that has a parameter."""
    return parameter.rpartition(".")[0]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that exist, by the names of their parameters."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return buffers, optimizer state and weights, by quantity and name."""
    named = dict(model.named_parameters())
    states: dict[str, Any] = {
        n: optimizer.state[p] for n, p in named.items() if p in optimizer.state
    }
    counts = {name: state["step"] for name, state in states.items() if "step" in state}
    return {
        "buffer": dict(model.named_buffers()),
        **kept_by(states),
        "step counter": {name: n for name, n in counts.items() if isinstance(n, Tensor)},
        "weight": {name: p.detach() for name, p in named.items()},
    }
