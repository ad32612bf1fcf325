"""Point-to-point communication: blocking and non-blocking calls, tags, and a deadlock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from phalanx import collectives
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.show.shown import Frame, MessageSent, Shown, ShowRun, Strip

PATIENCE_S: Final = 0.5
"""Timeout of the send in the deadlock, seconds."""

ITEM_BYTES: Final = 8


class Moment(NamedTuple):
    """Values on a rank after a line of an exercise, and the tensors that the line sent."""

    line: str
    holds: str
    sent: str = ""


Exercise = Callable[[int], Iterator[Moment]]


def blocking(rank: int) -> Iterator[Moment]:
    """Rank 0 adds 1 and sends, rank 1 adds 1 and sends back; each call blocks."""
    x = torch.zeros(1, dtype=torch.int64)
    yield Moment("x = torch.zeros(1)", text(x))
    x += 1 - rank
    yield Moment("rank 0: x += 1", text(x))
    collectives.send(x, 1) if rank == 0 else collectives.recv(x, 0)
    yield Moment("rank 0: send(x, 1)   rank 1: recv(x, 0)", text(x), "x" if rank == 0 else "")
    x += rank
    yield Moment("rank 1: x += 1", text(x))
    collectives.send(x, 0) if rank == 1 else collectives.recv(x, 1)
    yield Moment("rank 1: send(x, 0)   rank 0: recv(x, 1)", text(x), "x" if rank == 1 else "")


def asynchronous(rank: int) -> Iterator[Moment]:
    """Both ranks start a receive and a send without blocking, and then wait for both."""
    x, y = torch.full((1,), 10 * (rank + 1)), torch.full((1,), -1)
    yield Moment("x = 10, or 20; y = -1", f"x {text(x)}, y {text(y)}")
    works = [collectives.irecv(y, 1 - rank), collectives.isend(x, 1 - rank)]
    yield Moment(
        "both: irecv(y, other), isend(x, other), which return at once",
        f"x {text(x)}, y not yet known",
        "x",
    )
    for work in works:
        work.wait()
    yield Moment("both: wait() for the two", f"x {text(x)}, y {text(y)}")


def tagged(rank: int) -> Iterator[Moment]:
    """Rank 1 receives two messages by tag, in the reverse order of the sends."""
    a, b = torch.tensor([1]) * (rank == 0), torch.tensor([2]) * (rank == 0)
    yield Moment("rank 0 has a = 1, b = 2; rank 1 has room", f"a {text(a)}, b {text(b)}")
    if rank == 0:
        works = [collectives.isend(a, 1, tag=1), collectives.isend(b, 1, tag=2)]
    else:
        collectives.recv(b, 0, tag=2)
        works = list[dist.Work]()
    yield Moment(
        "rank 0: isend(a, 1, tag=1), isend(b, 1, tag=2)   rank 1: recv(b, 0, tag=2)",
        f"a {text(a)}, b {text(b)}",
        "a b" if rank == 0 else "",
    )
    if rank == 1:
        collectives.recv(a, 0, tag=1)
    for work in works:
        work.wait()
    yield Moment("rank 1: recv(a, 0, tag=1)", f"a {text(a)}, b {text(b)}")


def deadlocked(rank: int) -> Iterator[Moment]:
    """Both ranks send first: each send waits for a receive that comes after the other send."""
    x = torch.full((1,), rank + 1)
    yield Moment("x = 1, or 2", text(x))
    # Use a new group, because gloo closes a connection on which a message has timed out.
    work = collectives.isend(x, 1 - rank, group=dist.new_group([0, 1]))
    try:
        work.wait(timedelta(seconds=PATIENCE_S))
        outcome = "the send has completed"
    except RuntimeError:
        outcome = f"still sending after {PATIENCE_S:g} s"
    yield Moment("both: send(x, other), before recv(y, other)", outcome)


EXERCISES: Final[tuple[tuple[str, Exercise], ...]] = (
    ("blocking: send and recv return when the tensor may be used", blocking),
    ("non-blocking: isend and irecv return a Work at once; wait before you use the tensor",
     asynchronous),
    ("tags: a receive takes the message with its tag, in any order; NCCL has no tags", tagged),
    ("a deadlock: two sends that wait for each other", deadlocked),
)  # fmt: skip

REMEDY: Final = (
    "A send completes when its receive runs, and here each receive comes after a send. To avoid "
    "the deadlock, let one rank receive first, or start both calls on both ranks before waiting "
    "(isend and irecv, batch_isend_irecv)."
)


def show_messages(config: ShowRun) -> Shown:
    """Run the exercises on two ranks, whatever `config.ranks` is.

    Raises:
        ConfigError: `config.ranks` is below 2.
    """
    if config.ranks < 2:
        raise ConfigError(f"ranks is {config.ranks}; a message needs 2; the nearest is 2")
    ranks: list[list[list[Moment]]] = run_ranks(exercise, 2, threads=1)
    strips = [
        Strip(title, ["holds"], [*map(_frame, *(of_rank[number] for of_rank in ranks))])
        for number, (title, _) in enumerate(EXERCISES)
    ]
    return Shown(
        "point to point, ranks 0 and 1",
        ["Every collective is a list of sends and receives."],
        [*strips, REMEDY],
        "dist.send, dist.recv, dist.isend, dist.irecv, dist.batch_isend_irecv",
    )


def exercise() -> list[list[Moment]]:
    """Run all exercises on this rank; return the moments of each."""
    return [[*run(dist.get_rank())] for _, run in EXERCISES]


def text(x: torch.Tensor) -> str:
    """Return the only value of a tensor as text."""
    return str(int(x))


def _frame(first: Moment, second: Moment) -> Frame:
    moments = (first, second)
    sent = [
        MessageSent(rank, 1 - rank, what, ITEM_BYTES)
        for rank, moment in enumerate(moments)
        for what in moment.sent.split()
    ]
    return Frame(first.line, [[moment.holds] for moment in moments], sent)
