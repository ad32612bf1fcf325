"""Do file work on several ranks so that a failure of one is the failure of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from phalanx.comm.objects import gather_objects
from phalanx.errors import CheckpointError, PhalanxError

T = TypeVar("T")


def agree(work: Callable[[], T], doing: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """Do each rank's own work; every rank returns the results of all, by rank.

    Args:
        work: of this rank.
        doing: begins the message of a failure.
        group: of the ranks that call this together; the whole job if None.

    Raises:
        CheckpointError: on every rank, with the words of the first rank that failed.
    """
    result: T | None = None
    failure: str | None = None
    cause: BaseException | None = None
    try:
        result = work()
    except (Exception, CheckpointException) as error:  # the others wait to hear of it
        failure, cause = root_of(error), error
    outcomes: list[tuple[T, str | None]] = gather_objects((result, failure), group)
    for _, words in outcomes:
        if words is not None:
            raise CheckpointError(f"{doing}: {words}") from cause
    return [each for each, _ in outcomes]


def agree_on_first(work: Callable[[], T], doing: str, group: dist.ProcessGroup | None = None) -> T:
    """Do work on the first rank alone; every rank returns its result, or raises its failure.

    Raises:
        CheckpointError: the work failed.
    """
    is_first = dist.get_rank(group) == 0
    results: list[T | None] = agree(work if is_first else lambda: None, doing, group)
    return results[0]  # pyright: ignore[reportReturnType]


def root_of(error: BaseException) -> str:
    """Return the line that says what went wrong, below torch's wrapping."""
    failures = getattr(error, "failures", None)  # of a CheckpointException: by rank
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, PhalanxError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}".splitlines()[0]
