"""The rules of NCCL find what never ends and what does not match, and pass the rest."""

from __future__ import annotations

import pytest

from nccl_rules import Broken, Call, Event, Message, Wait, check
from phalanx.debug.fingerprint import Fingerprint

FLOATS = "float32"


def collective(number: int, op: str = "all_reduce", group: str = "a", shapes: str = "[4]") -> Call:
    what = Fingerprint(op, "sum", FLOATS, shapes, places=(f"{op}.py",))
    return Call(number, group, (0, 1), what)


def batch(number: int, *ends: tuple[str, int], group: str = "a", dtype: str = FLOATS) -> Call:
    """Return sends and receives of one call, as pairs of a word and a peer."""
    messages = tuple(
        Message(op == "send", peer, Fingerprint(op, "", dtype, "[4]", places=(f"{op}.py",)))
        for op, peer in ends
    )
    return Call(number, group, (0, 1), messages[0].what, messages)


def send(number: int, peer: int, group: str = "a", dtype: str = FLOATS) -> Call:
    return batch(number, ("send", peer), group=group, dtype=dtype)


def recv(number: int, peer: int, group: str = "a", dtype: str = FLOATS) -> Call:
    return batch(number, ("recv", peer), group=group, dtype=dtype)


def all_then_waits(*called: Call) -> list[Event]:
    return [*called, *(Wait(call.number) for call in called)]


def each_with_its_wait(*called: Call) -> list[Event]:
    return [event for call in called for event in (call, Wait(call.number))]


ENDS: dict[str, list[list[Event]]] = {
    "one sends first, the other receives first": [
        all_then_waits(send(0, 1), recv(1, 1)),
        all_then_waits(recv(0, 0), send(1, 0)),
    ],
    "both send first, as a batch": [
        all_then_waits(batch(0, ("send", 1), ("recv", 1))),
        all_then_waits(batch(0, ("send", 0), ("recv", 0))),
    ],
    "a batch that two calls answer": [
        all_then_waits(batch(0, ("send", 1), ("recv", 1))),
        all_then_waits(recv(0, 0), send(1, 0)),
    ],
    "both send first on a group a direction": [
        all_then_waits(send(0, 1, "there"), recv(1, 1, "back")),
        [recv(0, 0, "there"), send(1, 0, "back"), Wait(0), Wait(1)],
    ],
    "a collective behind a message": [
        all_then_waits(send(0, 1), collective(1)),
        all_then_waits(recv(0, 0), collective(1)),
    ],
    "collectives of two groups in two orders, nobody waits between": [
        all_then_waits(collective(0, group="a"), collective(1, group="b")),
        all_then_waits(collective(0, group="b"), collective(1, group="a")),
    ],
    "sends that are received later": [
        [send(0, 1), send(1, 1), collective(2, group="b"), Wait(2), Wait(0), Wait(1)],
        [recv(0, 0), Wait(0), recv(1, 0), Wait(1), collective(2, group="b"), Wait(2)],
    ],
}


@pytest.mark.parametrize("name", ENDS)
def test_what_nccl_runs_to_its_end_passes(name: str) -> None:
    check(ENDS[name])


NEVER: dict[str, tuple[list[list[Event]], list[str]]] = {
    "both send first": (
        [all_then_waits(send(0, 1), recv(1, 1)), all_then_waits(send(0, 0), recv(1, 0))],
        ["rank 0: send of float32[4] at send.py to rank 1 on group a runs, and does not end",
         "rank 1: send of float32[4] at send.py to rank 0 on group a runs, and does not end"],
    ),
    "both receive first": (
        [all_then_waits(recv(0, 1), send(1, 1)), all_then_waits(recv(0, 0), send(1, 0))],
        ["rank 0: recv", "rank 1: recv"],
    ),
    "a ring whose ranks all send first": (
        [all_then_waits(send(0, (rank + 1) % 3), recv(1, (rank + 2) % 3)) for rank in range(3)],
        [f"rank {rank}: send of float32[4] at send.py to rank {(rank + 1) % 3}" for rank in (0, 2)],
    ),
    "a collective before a message, and after it": (
        [all_then_waits(collective(0), send(1, 1)), all_then_waits(recv(0, 0), collective(1))],
        ["rank 0: all_reduce", "rank 1: recv"],
    ),
    "collectives of two groups in two orders, each waited for": (
        [each_with_its_wait(collective(0, group="a"), collective(1, group="b")),
         each_with_its_wait(collective(0, group="b"), collective(1, group="a"))],
        ["rank 0: all_reduce sum of float32[4] at all_reduce.py on group a runs",
         "rank 1: all_reduce sum of float32[4] at all_reduce.py on group b runs"],
    ),
    "ranks that connect on two groups in two orders": (
        # As of "both send first on a group a direction", but the second rank receives too late.
        [all_then_waits(send(0, 1, "there"), recv(1, 1, "back")),
         all_then_waits(send(0, 0, "back"), recv(1, 0, "there"))],
        ["rank 0: send", "rank 1: send"],
    ),
    "a send that nobody receives": ([all_then_waits(send(0, 1)), []], ["rank 0: send"]),
    "one collective fewer": (
        [all_then_waits(collective(0), collective(1)), all_then_waits(collective(0))],
        ["rank 0: all_reduce"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEVER)
def test_what_never_ends_is_told_with_the_calls(name: str) -> None:
    events, words = NEVER[name]
    with pytest.raises(Broken, match=r"^deadlock:") as caught:
        check(events)
    for word in words:
        assert word in str(caught.value), str(caught.value)


UNLIKE: dict[str, tuple[list[list[Event]], str]] = {
    "kinds": (
        [each_with_its_wait(collective(0)), each_with_its_wait(collective(0, "broadcast"))],
        "ranks 0 and 1 differ in the op: all_reduce and broadcast",
    ),
    "sizes": (
        [each_with_its_wait(collective(0)), each_with_its_wait(collective(0, shapes="[5]"))],
        "ranks 0 and 1 differ in the shape",
    ),
    "data types of a message": (
        [all_then_waits(send(0, 1)), all_then_waits(recv(0, 0, dtype="int64"))],
        "a message of ranks 1 and 0 differs in the data type: int64 and float32",
    ),
    "a call that nobody waits for": (
        [all_then_waits(send(0, 1)), [recv(0, 0)]],
        "rank 1: recv of float32[4] at recv.py from rank 0 on group a is never waited for",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_does_not_match_is_told(name: str) -> None:
    events, words = UNLIKE[name]
    with pytest.raises(Broken) as caught:
        check(events)
    assert words in str(caught.value)
