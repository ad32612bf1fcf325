"""Do file work on several ranks so that a failure of one is the failure of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from phalanx.comm.objects import first_object
from phalanx.comm.primitives import share
from phalanx.errors import CheckpointError, PhalanxError

T = TypeVar("T")


def agree(work: Callable[[], T], doing: str) -> T:
    """Do each rank's own work, together with all others of the job; return this rank's result.

    Args:
        work: of this rank.
        doing: begins the message of a failure.

    Raises:
        CheckpointError: on every rank, with the words of the first rank that failed.
    """
    results: list[T] = []
    failure: str | None = None
    cause: BaseException | None = None
    try:
        results.append(work())
    except Exception as error:  # the others wait to hear of it
        failure, cause = words_of(error), error
    words = first_object(failure)
    if words is not None:
        raise CheckpointError(f"{doing}: {words}") from cause
    return results[0]


def agree_on_first(work: Callable[[], T], doing: str) -> T:
    """Do work on the first rank alone; every rank returns its result, or raises its failure.

    Raises:
        CheckpointError: the work failed.
    """
    return share(agree(work if dist.get_rank() == 0 else lambda: None, doing))


def words_of(error: BaseException) -> str:
    """Return the line that says what went wrong."""
    if isinstance(error, PhalanxError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}".splitlines()[0]
