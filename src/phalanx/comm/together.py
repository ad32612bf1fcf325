"""Collectives of Python objects over all ranks of the job, barriers, and all-or-none execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx.comm.waits import waiting
from phalanx.errors import CheckpointError, PhalanxError

T = TypeVar("T")


def barrier() -> None:
    """Wait until every rank of the job has called this."""
    dist.barrier()


def broadcast_object(value: Any) -> Any:
    """Return rank 0's picklable `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_objects(value: Any) -> list[Any]:
    """Return the picklable `value` of each rank, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_on_first(value: Any) -> list[Any]:
    """Return the picklable `value` of each rank in rank order on rank 0; an empty list elsewhere.

    A rank communicates only with ranks it is connected to, which are 1, 2, 4, ... away (comm.join).
    """
    #   distance 1    1 -> 0    3 -> 2    5 -> 4
    #   distance 2    2 -> 0
    #   distance 4    4 -> 0
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    gathered, distance = {rank: value}, 1
    while distance < num_ranks:
        if rank % (2 * distance):
            dist.send_object_list([gathered], rank - distance)
            return []
        if rank + distance < num_ranks:
            received: list[Any] = [None]
            dist.recv_object_list(received, rank + distance)
            gathered |= received[0]
        distance *= 2
    return [gathered[number] for number in range(num_ranks)]


def max_over_ranks(values: list[int]) -> list[int]:
    """Return the element-wise maximum of `values` over the ranks of the job."""
    return _reduce(values, dist.ReduceOp.MAX)


def first_object(value: Any) -> Any:
    """Return the `value` of the first rank whose value is not None, on every rank; else None.

    If all values are None, only one integer is reduced, which is cheap on many ranks.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    (first,) = _reduce([num_ranks if value is None else rank], dist.ReduceOp.MIN)
    if first == num_ranks:
        return None
    values = [value]
    dist.broadcast_object_list(values, src=first)
    return values[0]


def _reduce(values: list[int], op: dist.ReduceOp.RedOpType) -> list[int]:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    numbers = torch.tensor(values, device=device)
    with waiting(numbers):
        dist.all_reduce(numbers, op)
    return numbers.tolist()


def all_or_none(work: Callable[[], T], doing: str) -> T:
    """Run `work` on each rank; return this rank's result if all ranks succeed.

    Raises:
        CheckpointError: on every rank, with `doing` and the reason of the first rank that failed.
    """
    results: list[T] = []
    failure: str | None = None
    cause: BaseException | None = None
    try:
        results.append(work())
    except Exception as error:  # raised below on all ranks, which wait in `first_object`
        failure, cause = reason_of(error), error
    # A collective on every path: a rank that raised at once would leave the others waiting for it.
    message = first_object(failure)
    if message is not None:
        raise CheckpointError(f"{doing}: {message}") from cause
    return results[0]


def on_first_rank(work: Callable[[], T], doing: str) -> T:
    """Run `work` on rank 0 only; return its result, or raise its failure, on every rank.

    Raises:
        CheckpointError: the work failed.
    """
    return broadcast_object(all_or_none(work if dist.get_rank() == 0 else lambda: None, doing))


def reason_of(error: BaseException) -> str:
    """Return a one-line description of an error."""
    if isinstance(error, PhalanxError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}".splitlines()[0]
