"""Errors and reports of a worker whose requests are not answered, or whose job has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phalanx.errors import TrainingError
from phalanx.launch.failure import report
from phalanx.server.role import Settings, no_answer


class JobStopped(TrainingError):
    """A signal to worker 0 has ended the job."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"worker 0 has ended the job, by signal {signum}")


class JobEnded(TrainingError):
    """The job of a worker that starts has ended."""


def report_late(worker: int, clocks: Mapping[int, int], for_s: float) -> None:
    """Report the live workers whose tasks `worker` has waited for; clocks is worker -> clock."""
    for other, clock in clocks.items():
        if other != worker:
            report(
                f"worker {worker} has waited {for_s:g} s for push {clock + 1} of worker {other}, "
                "whose process is alive: that worker or a server is slow, is saving, or hangs"
            )


def lost(known: Settings, shard: int) -> TrainingError:
    """Return the error for a shard that was lost with its last copy."""
    has_backups = len(known["holders"]) > 1
    return TrainingError(
        f"{known['holders'][shard][0]} was lost with its part of the weights, and "
        + (
            "the server with a copy was lost, too, or had not received all of it yet; resume from "
            "the last checkpoint"
            if has_backups
            else "no other server had a full copy; resume from the last checkpoint; with "
            "--server.num-servers 2 or more, another server keeps a copy"
        )
    )


def unanswered(worker: int, kinds: Iterable[str], for_s: float) -> TrainingError:
    """Return the error of a worker whose requests have timed out."""
    words = ", ".join(sorted(set(kinds)))
    return TrainingError(
        f"worker {worker} has waited {for_s:g} s for an answer to {words}; see the log of the "
        "servers"
    )


def ended(address: str) -> JobEnded:
    """Return the error of a worker that starts after its job has ended."""
    return JobEnded(
        f"the job of the coordinator at {address} has ended; a new job needs a coordinator with a "
        "new journal"
    )


def known_so_far(known: Settings, address: str) -> str:
    """Describe the servers and scheduler that a coordinator has met, or that it is silent."""
    if known["epoch"] < 0:
        return no_answer(address)
    scheduler = "a scheduler" if known["scheduler"] else "no scheduler"
    num = len(known.get("addresses", ()))
    return f"the coordinator at {address} has registered {num} of its servers and {scheduler}"
