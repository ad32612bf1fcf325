"""Collectives with a choice of algorithm, implemented with point-to-point messages.

They are a reference for teaching and tests, and useful if the links between ranks are uneven; the
built-in collectives of NCCL and gloo are faster. Any script can call them after `phalanx.init` or
`torch.distributed.init_process_group`:

    from phalanx import collectives
    collectives.all_reduce(gradient, "avg", algorithm="ring")
    work = collectives.broadcast(weights, root=0, algorithm="tree", async_op=True)
    work.wait()

Every collective has these keyword arguments:

    algorithm   ring, tree, halving-doubling, direct, or hierarchical/RANKS with RANKS on each host;
                None for the default
    group       group of torch.distributed, or None for all ranks of the job. All its ranks must
                make the same calls in the same order, and a call that differs, in collective,
                reduction, dtype, size, root or algorithm, is an error on all of them. On other
                ranks, collectives do nothing.
    async_op    start only, and return a work whose `wait` completes it (comm/algorithms/running.py)

`op` is sum, product, min, max, avg, and, or, xor, or a `torch.distributed.ReduceOp`. Sums and
products have the range of the dtype: integers wrap around, float16 above 65504 becomes infinite,
and the sum of bools is their or. An average is right for all values, except that sums of int64
wrap; an average of integers is truncated toward 0, and bools have none. Tensors may have any
strides, but memory that is written must not overlap, as in an expanded tensor.
Ranks, including `root`, are group ranks. Results are bitwise equal on all ranks and in every run.
`phalanx show ring` prints the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack, override

from phalanx.comm.algorithms.catalogue import ROOTED, list_steps
from phalanx.comm.algorithms.running import (
    AllToAllChunks,
    Chunks,
    Collective,
    Combine,
    FlatChunks,
    combine_of,
    drain,
    lost_peer_named,
    refuse,
)
from phalanx.comm.fork import refuse_in_fork
from phalanx.comm.transfer import Transfer
from phalanx.errors import ConfigError, ScriptError

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

WIDER: Final = {
    torch.float16: torch.float32, torch.int8: torch.int32, torch.uint8: torch.int32,
    torch.int16: torch.int32, torch.int32: torch.int64,
}  # fmt: skip
"""Dtype -> dtype in which an average is summed, so that the sum is within the range."""

Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType


class How(TypedDict, total=False):
    """Keyword arguments of every collective."""

    algorithm: str | None
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
    where = _messaging("isend", tensor, group, target, tag)
    sent = tensor.detach().contiguous()
    work = dist.isend(sent, group=where, group_dst=target, tag=tag)
    return _Message(work, where, target, "send")


def irecv(tensor: Tensor, source: int, *, tag: int = 0, group: Group = None) -> dist.Work:
    """Start to receive; the tensor is complete after the work's `wait`."""
    where = _messaging("irecv", tensor, group, source, tag)
    _check_output("irecv", tensor)
    received = tensor.detach().contiguous()
    work = dist.irecv(received, group=where, group_src=source, tag=tag)
    return _Message(work, where, source, "recv", lambda: _store(received, tensor))


class _Message(Transfer):
    """A running message; an error of its `wait` names the other rank."""

    def __init__(
        self,
        work: dist.Work | None,
        group: dist.ProcessGroup,
        peer: int,
        call: str,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        assert work is not None, "this rank is in the group"
        super().__init__([work], finish)
        self._work, self._named = work, (group, [peer], call)

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:  # the caller's own limit, whose error is torch's
            self._work.wait(timeout)
            self._works = []  # gloo would wait for another message
        with lost_peer_named(*self._named):
            return super().wait()


def broadcast(tensor: Tensor, root: int = 0, **how: Unpack[How]) -> Collective | None:
    """Overwrite the tensor of every rank with the root's tensor."""
    return _in_place("broadcast", tensor, "", root, how)


def reduce(tensor: Tensor, op: Op = "sum", root: int = 0, **how: Unpack[How]) -> Collective | None:
    """Reduce the tensors of all ranks on the root; contents on other ranks become undefined."""
    return _in_place("reduce", tensor, op, root, how)


def all_reduce(tensor: Tensor, op: Op = "sum", **how: Unpack[How]) -> Collective | None:
    """Reduce the tensors of all ranks in place on every rank."""
    return _in_place("all-reduce", tensor, op, 0, how)


def all_gather(output: Tensor, shard: Tensor, **how: Unpack[How]) -> Collective | None:
    """Fill `output`, as large as P shards for P ranks, with the shards in rank order."""

    def prepare(group: dist.ProcessGroup) -> PreparedCall:
        rows = _rows("all_gather", output, shard, group)
        _check_output("all_gather", output)
        rows[group.rank()].copy_(shard.detach().reshape(-1))
        return PreparedCall(
            FlatChunks(rows.view(-1), len(rows)), shard, lambda: _store(rows, output)
        )

    return _run("all-gather", how, prepare)


def reduce_scatter(
    output: Tensor, full: Tensor, op: Op = "sum", **how: Unpack[How]
) -> Collective | None:
    """Set `output` to this rank's shard, 1/P, of the reduced `full`; `full` is not modified."""

    def prepare(group: dist.ProcessGroup) -> PreparedCall:
        name = _name_of(op)
        combine = combine_of(name, _checked("reduce_scatter", full).dtype)
        rows = _rows("reduce_scatter", full, output, group)
        _check_output("reduce_scatter", output)
        rows = _widened(rows, name).clone()

        def finish() -> None:
            _store(_divided(rows[group.rank()], name, len(rows)), output)

        return PreparedCall(FlatChunks(rows.view(-1), len(rows)), output, finish, combine, name)

    return _run("reduce-scatter", how, prepare)


def gather(
    output: Tensor | None, shard: Tensor, root: int = 0, **how: Unpack[How]
) -> Collective | None:
    """Fill the root's `output` with all shards in rank order; it is None on other ranks."""

    def prepare(group: dist.ProcessGroup) -> PreparedCall:
        full = _of_root("gather", output, shard, root, group)
        rows = _rows("gather", full, shard, group)
        _check_output("gather", full)
        rows[group.rank()].copy_(shard.detach().reshape(-1))
        return PreparedCall(FlatChunks(rows.view(-1), len(rows)), shard, lambda: _store(rows, full))

    return _run("gather", how, prepare, root)


def scatter(
    output: Tensor, full: Tensor | None, root: int = 0, **how: Unpack[How]
) -> Collective | None:
    """Set each rank's `output` to its shard of the root's `full`, which is None on other ranks."""

    def prepare(group: dist.ProcessGroup) -> PreparedCall:
        rows = _rows("scatter", _of_root("scatter", full, output, root, group), output, group)
        _check_output("scatter", output)
        held = FlatChunks(rows.view(-1), len(rows))
        return PreparedCall(held, output, lambda: _store(rows[group.rank()], output))

    return _run("scatter", how, prepare, root)


def all_to_all(output: Tensor, given: Tensor, **how: Unpack[How]) -> Collective | None:
    """Send row s of `given` to rank s, and fill row r of `output` with the row from rank r.

    The first dimension of both has one row for each rank, and their memory must not overlap.
    """

    def prepare(group: dist.ProcessGroup) -> PreparedCall:
        for tensor in (output, given):
            _checked("all_to_all", tensor)
        is_alike = (given.shape, given.dtype) == (output.shape, output.dtype)
        if not is_alike or not given.dim() or len(given) != group.size():
            raise ScriptError(
                f"all_to_all: given is {_told(given)} and output {_told(output)}; expected the "
                f"same shape and dtype, with {group.size()} rows"
            )
        _check_output("all_to_all", output)
        sent, into = given.detach().contiguous(), output.detach().contiguous()
        if into.nbytes and abs(into.data_ptr() - sent.data_ptr()) < into.nbytes:
            raise ScriptError(
                "all_to_all: given and output overlap in memory, so rows would be overwritten "
                "before they are sent; pass a separate tensor as output"
            )
        rows = into.view(group.size(), -1) if into.numel() else into.view(group.size(), 0)
        held = AllToAllChunks(sent.view(rows.shape), rows, group.rank())
        return PreparedCall(held, output, lambda: _store(rows, output))

    return _run("all-to-all", how, prepare)


def barrier(**how: Unpack[How]) -> Collective | None:
    """Wait until every rank of the group has called this."""

    def prepare(group: dist.ProcessGroup) -> PreparedCall:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        tokens = torch.zeros(group.size(), dtype=torch.uint8, device=device)
        return PreparedCall(FlatChunks(tokens, group.size()), tokens)

    return _run("barrier", how, prepare)


def _in_place(collective: str, tensor: Tensor, op: Op, root: int, how: How) -> Collective | None:
    """Run a collective that modifies `tensor`, whose pieces are the chunks."""

    def prepare(group: dist.ProcessGroup) -> PreparedCall:
        _check_output(collective, tensor)
        name = _name_of(op)
        combine = combine_of(name, tensor.dtype) if name else torch.add
        flat = _widened(tensor.detach().contiguous().view(-1), name)

        def finish() -> None:
            _store(_divided(flat, name, group.size()), tensor)

        return PreparedCall(FlatChunks(flat, group.size()), tensor, finish, combine, name)

    return _run(collective, how, prepare, root)


@dataclass(frozen=True)
class PreparedCall:
    """What one rank brings into a collective.

    Attributes:
        held: chunks of this rank.
        tensor: tensor whose dtype and size are equal on all ranks.
        finish: called after the last step.
        combine: reduces two chunks.
        reduction: name of the reduction; empty if nothing is reduced.
    """

    held: Chunks
    tensor: Tensor
    finish: Callable[[], object] = lambda: None
    combine: Combine = torch.add
    reduction: str = ""


def _run(
    collective: str, how: How, prepare: Callable[[dist.ProcessGroup], PreparedCall], root: int = 0
) -> Collective | None:
    """Start a collective; complete it unless it is asynchronous.

    If this rank's arguments are invalid, its peers learn the reason, and raise it too.
    """
    group = _joined(collective, how.get("group"))
    if group is None:
        return None
    try:
        _check_keywords(how)
        _check_rank(collective, root, group)
        algorithm = how.get("algorithm") or DEFAULT[collective]
        steps = list_steps(collective, algorithm, group.size(), root)
        part = prepare(group)
    except Exception as error:
        refuse(group, error)
        raise
    dtype = str(part.tensor.dtype).removeprefix("torch.")
    words = (
        collective, part.reduction, f"of {part.tensor.numel()} {dtype}",
        f"with root {root}" if collective in ROOTED else "", f"by {algorithm}",
    )  # fmt: skip
    call = " ".join(filter(None, words))
    work = Collective(call, steps, part.held, group, part.combine, part.finish).begin()
    if how.get("async_op", False):
        return work
    work.wait()
    return None


def _check_keywords(how: How) -> None:
    for name in how:
        if name not in How.__annotations__:
            raise ScriptError(
                f"a collective accepts the keywords {', '.join(How.__annotations__)}, but not "
                f"'{name}'"
            )


def _joined(what: str, given: Group) -> dist.ProcessGroup | None:
    """Return the group; None if this rank is not in it.

    Raises:
        ScriptError: this process has not joined a job, or is a fork of a rank.
    """
    if not dist.is_initialized():
        raise ScriptError(
            "this process has not joined a job; call phalanx.init() or "
            "torch.distributed.init_process_group() first"
        )
    refuse_in_fork(what)
    group: Any = dist.group.WORLD if given is None else given
    return group if isinstance(group, dist.ProcessGroup) else None


def _messaging(what: str, tensor: Tensor, group: Group, peer: int, tag: int) -> dist.ProcessGroup:
    """Check a message's arguments, complete all running collectives, and return the group."""
    where = _joined(what, group)
    if where is None:
        raise ScriptError("this rank is not in the group over which the message is sent")
    _checked(what, tensor)
    _check_rank("a message", peer, where)
    if tag and dist.get_backend(where) == "nccl":
        raise ScriptError(
            f"the tag of a message is {tag}, but NCCL has no tags: it matches messages by their "
            "order; the nearest is tag=0"
        )
    drain()
    return where


def _checked(what: str, tensor: Any) -> Tensor:
    """Return a tensor that has memory.

    Raises:
        ScriptError: it is no tensor, or a tensor on the meta device.
    """
    if not isinstance(tensor, Tensor):
        raise ScriptError(
            f"{what}: expected a tensor, but it is a {type(tensor).__name__}; pass "
            "torch.as_tensor(x), and read the result from that tensor"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ScriptError(
            f"{what}: the tensor is on {tensor.device}, from which ranks cannot send; the nearest "
            "is cpu"
        )
    return tensor


def _check_output(what: str, tensor: Tensor) -> None:
    """Check that a tensor can be written.

    Raises:
        ScriptError: several of its elements are one place in memory.
    """
    _checked(what, tensor)
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(size > 1 and stride == 0 for size, stride in sizes):
        raise ScriptError(
            f"{what}: the tensor of shape {tuple(tensor.shape)} is expanded, so its elements "
            "share memory and cannot have different results; pass x.contiguous()"
        )


def _name_of(op: Op) -> str:
    """Return the name of a reduction, also of torch's."""
    if isinstance(op, str):
        return op
    # torch.distributed.ReduceOp.SUM is a RedOpType, although isinstance takes it for a ReduceOp.
    given: Any = op
    kind = given.op() if hasattr(given, "op") else given
    torch_name = dist.ReduceOp.RedOpType(kind).name
    return {"BAND": "and", "BOR": "or", "BXOR": "xor"}.get(torch_name, torch_name.lower())


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
    _checked(name, shard)
    if group.rank() != root:
        return shard.new_empty(group.size() * shard.numel())
    if full is None:
        raise ScriptError(f"{name}: rank {root} is the root, but its full tensor is None")
    return full


def _rows(name: str, full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a full tensor with one flat row for each rank: a view, or a copy if it has strides."""
    for tensor in (full, shard):
        _checked(name, tensor)
    if full.numel() != group.size() * shard.numel() or full.dtype != shard.dtype:
        raise ScriptError(
            f"{name}: the full tensor is {_told(full)} and the shard {_told(shard)}; expected "
            f"{group.size()} times as many elements, {group.size() * shard.numel()}, and the same "
            "dtype"
        )
    return full.detach().contiguous().view(group.size(), shard.numel())


def _told(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _store(result: Tensor, tensor: Tensor) -> None:
    """Copy a result into a tensor, unless it is the memory of the tensor."""
    if result.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(result.view(tensor.shape))


def _widened(tensor: Tensor, op: str) -> Tensor:
    """Return the terms of a reduction, for an average in a dtype that has the sum."""
    if op != "avg":
        return tensor
    if tensor.dtype == torch.bool:
        raise ConfigError(
            "the reduction is 'avg', and the tensor torch.bool, which has no average; the nearest "
            "are 'and' and 'or', or tensor.float()"
        )
    return tensor.to(WIDER.get(tensor.dtype, tensor.dtype))


def _divided(total: Tensor, op: str, num_ranks: int) -> Tensor:
    """Return the average if `op` is "avg", else the sum unchanged."""
    if op != "avg":
        return total
    if total.is_floating_point() or total.is_complex():
        return total / num_ranks
    return torch.div(total, num_ranks, rounding_mode="trunc")
