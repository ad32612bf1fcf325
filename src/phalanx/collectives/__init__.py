"""Collectives with a choice of algorithm, implemented with point-to-point messages.

They are a reference for teaching and tests, and useful if the links between ranks are uneven; the
built-in collectives of NCCL and gloo are faster. Any script can call them after `phalanx.init` or
`torch.distributed.init_process_group`:

    from phalanx import collectives
    collectives.all_reduce(gradient, "avg", algorithm="ring")
    work = collectives.broadcast(weights, root=0, algorithm="tree", async_op=True)
    work.wait()

Every collective has these keyword arguments:

    algorithm   ring, tree, halving-doubling, direct, or hierarchical/RANKS with RANKS on each host
    group       group of torch.distributed, or None for all ranks of the job. All its ranks must
                make the same calls in the same order. On other ranks, collectives do nothing.
    async_op    start only, and return a work whose `wait` completes it (comm/algorithms/running.py)

`op` is sum, product, min, max, avg, and, or, xor; an average of integers is truncated toward 0.
Ranks, including `root`, are group ranks. Results are bitwise equal on all ranks and in every run.
`phalanx show ring` prints the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from phalanx.comm.algorithms.catalogue import list_steps
from phalanx.comm.algorithms.running import (
    AllToAllChunks,
    Chunks,
    Collective,
    Combine,
    FlatChunks,
    combine_of,
    drain,
)
from phalanx.errors import ScriptError

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "irecv", "isend",
    "recv", "reduce", "reduce_scatter", "scatter", "send",
]  # fmt: skip

Group = dist.ProcessGroup | int | None
"""A group as returned by `torch.distributed.new_group`, which is an int on ranks outside of it."""

DEFAULT: Final = {
    "broadcast": "tree", "reduce": "tree", "scatter": "tree", "gather": "tree",
    "all-gather": "ring", "reduce-scatter": "ring", "all-reduce": "ring",
    "all-to-all": "direct", "barrier": "halving-doubling",
}  # fmt: skip
"""Collective -> default algorithm."""


class How(TypedDict, total=False):
    """Keyword arguments of every collective."""

    algorithm: str
    group: Group
    async_op: bool


def send(tensor: Tensor, target: int, *, tag: int = 0, group: Group = None) -> None:
    """Send a tensor to rank `target`; return when the tensor may be modified again."""
    isend(tensor, target, tag=tag, group=group).wait()


def recv(tensor: Tensor, source: int, *, tag: int = 0, group: Group = None) -> None:
    """Overwrite a tensor with the tensor that rank `source` sends with the same tag."""
    irecv(tensor, source, tag=tag, group=group).wait()


def isend(tensor: Tensor, target: int, *, tag: int = 0, group: Group = None) -> dist.Work:
    """Start to send; the tensor must not be modified before the work's `wait` returns."""
    where = _messaging(group, target, tag)
    work = dist.isend(tensor, group=where, group_dst=target, tag=tag)
    assert work is not None, "this rank is in the group"
    return work


def irecv(tensor: Tensor, source: int, *, tag: int = 0, group: Group = None) -> dist.Work:
    """Start to receive; the tensor is complete after the work's `wait`."""
    where = _messaging(group, source, tag)
    work = dist.irecv(tensor, group=where, group_src=source, tag=tag)
    assert work is not None, "this rank is in the group"
    return work


def broadcast(tensor: Tensor, root: int = 0, **how: Unpack[How]) -> Collective | None:
    """Overwrite the tensor of every rank with the root's tensor."""
    return _in_place("broadcast", tensor, None, root, how)


def reduce(tensor: Tensor, op: str = "sum", root: int = 0, **how: Unpack[How]) -> Collective | None:
    """Reduce the tensors of all ranks on the root; contents on other ranks become undefined."""
    return _in_place("reduce", tensor, op, root, how)


def all_reduce(tensor: Tensor, op: str = "sum", **how: Unpack[How]) -> Collective | None:
    """Reduce the tensors of all ranks in place on every rank."""
    return _in_place("all-reduce", tensor, op, 0, how)


def all_gather(output: Tensor, shard: Tensor, **how: Unpack[How]) -> Collective | None:
    """Fill `output`, as large as P shards for P ranks, with the shards in rank order."""
    group = _joined(how)
    if group is None:
        return None
    rows = _rows("all_gather", output, shard, group)
    rows[group.rank()].copy_(shard.reshape(-1))
    return _begin("all-gather", FlatChunks(rows.view(-1), group.size()), group, how)


def reduce_scatter(
    output: Tensor, full: Tensor, op: str = "sum", **how: Unpack[How]
) -> Collective | None:
    """Set `output` to this rank's shard, 1/P, of the reduced `full`; `full` is not modified."""
    group = _joined(how)
    if group is None:
        return None
    combine = combine_of(op, full.dtype)
    rows = _rows("reduce_scatter", full, output, group).clone()

    def finish() -> None:
        output.copy_(_divided(rows[group.rank()], op, group.size()).view_as(output))

    held = FlatChunks(rows.view(-1), group.size())
    return _begin("reduce-scatter", held, group, how, 0, finish, combine)


def gather(
    output: Tensor | None, shard: Tensor, root: int = 0, **how: Unpack[How]
) -> Collective | None:
    """Fill the root's `output` with all shards in rank order; it is None on other ranks."""
    group = _joined(how)
    if group is None:
        return None
    full = _of_root("gather", output, shard, root, group)
    rows = _rows("gather", full, shard, group)
    rows[group.rank()].copy_(shard.reshape(-1))
    return _begin("gather", FlatChunks(rows.view(-1), group.size()), group, how, root)


def scatter(
    output: Tensor, full: Tensor | None, root: int = 0, **how: Unpack[How]
) -> Collective | None:
    """Set each rank's `output` to its shard of the root's `full`, which is None on other ranks."""
    group = _joined(how)
    if group is None:
        return None
    rows = _rows("scatter", _of_root("scatter", full, output, root, group), output, group)

    def finish() -> None:
        output.copy_(rows[group.rank()].view_as(output))

    return _begin("scatter", FlatChunks(rows.view(-1), group.size()), group, how, root, finish)


def all_to_all(output: Tensor, given: Tensor, **how: Unpack[How]) -> Collective | None:
    """Send row s of `given` to rank s, and fill row r of `output` with the row from rank r.

    The first dimension of both has one row for each rank, and their memory must not overlap.
    """
    group = _joined(how)
    if group is None:
        return None
    if (given.shape, given.dtype) != (output.shape, output.dtype) or len(given) != group.size():
        raise ScriptError(
            f"all_to_all: given is {_told(given)} and output {_told(output)}; expected the same "
            f"shape and dtype, with {group.size()} rows"
        )
    begins, num_bytes = (output.data_ptr(), given.data_ptr()), output.nbytes
    if num_bytes and abs(begins[0] - begins[1]) < num_bytes:
        raise ScriptError(
            "all_to_all: given and output overlap in memory, so rows would be overwritten before "
            "they are sent; pass a separate tensor as output"
        )
    into = _rows("all_to_all", output, output[0], group)
    held = AllToAllChunks(given.reshape(into.shape), into, group.rank())
    return _begin("all-to-all", held, group, how)


def barrier(**how: Unpack[How]) -> Collective | None:
    """Wait until every rank of the group has called this."""
    group = _joined(how)
    if group is None:
        return None
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tokens = torch.zeros(group.size(), dtype=torch.uint8, device=device)
    return _begin("barrier", FlatChunks(tokens, group.size()), group, how)


def _in_place(
    collective: str, tensor: Tensor, op: str | None, root: int, how: How
) -> Collective | None:
    """Run a collective that modifies `tensor`, whose pieces are the chunks."""
    group = _joined(how)
    if group is None:
        return None
    combine = torch.add if op is None else combine_of(op, tensor.dtype)
    flat = tensor.detach().reshape(-1)  # a copy where it is not contiguous

    def finish() -> None:
        result = _divided(flat, op, group.size())
        if result.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(result.view_as(tensor))

    return _begin(collective, FlatChunks(flat, group.size()), group, how, root, finish, combine)


def _begin(
    collective: str,
    held: Chunks,
    group: dist.ProcessGroup,
    how: How,
    root: int = 0,
    finish: Callable[[], object] = lambda: None,
    combine: Combine = torch.add,
) -> Collective | None:
    """Start a collective; complete it unless it is asynchronous."""
    _check_rank(collective, root, group)
    algorithm = how.get("algorithm", DEFAULT[collective])
    steps = list_steps(collective, algorithm, group.size(), root)
    work = Collective(steps, held, group, combine, finish).begin()
    if how.get("async_op", False):
        return work
    work.wait()
    return None


def _joined(how: How) -> dist.ProcessGroup | None:
    """Return the group; None if this rank is not in it.

    Raises:
        ScriptError: this process has not joined a job, or the call names an unknown option.
    """
    for name in how:
        if name not in How.__annotations__:
            raise ScriptError(
                f"a collective accepts the keywords {', '.join(How.__annotations__)}, but not "
                f"'{name}'"
            )
    group: Any = how.get("group")
    if not dist.is_initialized():
        raise ScriptError(
            "this process has not joined a job; call phalanx.init() or "
            "torch.distributed.init_process_group() first"
        )
    group = dist.group.WORLD if group is None else group
    return group if isinstance(group, dist.ProcessGroup) else None


def _messaging(group: Group, peer: int, tag: int) -> dist.ProcessGroup:
    """Check a message's arguments, complete all running collectives, and return the group."""
    where = _joined({"group": group})
    if where is None:
        raise ScriptError("this rank is not in the group over which the message is sent")
    _check_rank("a message", peer, where)
    if tag and dist.get_backend(where) == "nccl":
        raise ScriptError(
            f"the tag of a message is {tag}, but NCCL has no tags: it matches messages by their "
            "order; the nearest is tag=0"
        )
    drain()
    return where


def _check_rank(what: str, rank: int, group: dist.ProcessGroup) -> None:
    if not 0 <= rank < group.size():
        nearest = min(max(rank, 0), group.size() - 1)
        raise ScriptError(
            f"{what}: rank {rank} is not in the group of {group.size()} ranks; the nearest is "
            f"{nearest}"
        )


def _of_root(
    name: str, full: Tensor | None, shard: Tensor, root: int, group: dist.ProcessGroup
) -> Tensor:
    """Return the root's full tensor; on other ranks a buffer for forwarded chunks."""
    if group.rank() != root:
        return shard.new_empty(group.size() * shard.numel())
    if full is None:
        raise ScriptError(f"{name}: rank {root} is the root, but its full tensor is None")
    return full


def _rows(name: str, full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a view of a full tensor with one flat row for each rank."""
    if full.numel() != group.size() * shard.numel() or full.dtype != shard.dtype:
        raise ScriptError(
            f"{name}: the full tensor is {_told(full)} and the shard {_told(shard)}; expected "
            f"{group.size()} times as many elements, {group.size() * shard.numel()}, and the same "
            "dtype"
        )
    if not full.is_contiguous():
        raise ScriptError(f"{name}: the full tensor is not contiguous; pass x.contiguous()")
    return full.detach().view(group.size(), shard.numel())


def _told(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _divided(total: Tensor, op: str | None, num_ranks: int) -> Tensor:
    """Return the average if `op` is "avg", else the sum unchanged."""
    if op != "avg":
        return total
    if total.is_floating_point() or total.is_complex():
        return total / num_ranks
    return torch.div(total, num_ranks, rounding_mode="trunc")
