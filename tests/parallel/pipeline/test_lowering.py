"""The lists of ranks under a schedule: by hand, and by rules of NCCL that know no schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    _Action,  # pyright: ignore[reportPrivateUsage]
)

import nccl_rules
from nccl_rules import Broken, Call, Event, Message, Wait
from phalanx.debug.fingerprint import Fingerprint
from phalanx.errors import StrategyError
from phalanx.parallel.pipeline.lowering import lower
from phalanx.parallel.pipeline.schedule import (
    KINDS,
    Action,
    Schedule,
    build_schedule,
    with_whole_backwards,
)
from phalanx.parallel.pipeline.simulate import simulate

LISTS = {
    ("gpipe", 2, 2, 1): """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0SENT_F0 0SENT_F1 0B0 0RECV_B1 0REDUCE1 0B1
        1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1REDUCE1 1B1 1SEND_B1 1SENT_B0 1SENT_B1
    """,
    ("1f1b", 3, 2, 1): """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0SENT_F0 0SENT_F1 0B0 0RECV_B1 0REDUCE1 0B1
        1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1SENT_F0 1B0 1SEND_B0
            1RECV_B1 1SENT_F1 1REDUCE1 1B1 1SEND_B1 1SENT_B0 1SENT_B1
        2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2REDUCE1 2B1 2SEND_B1 2SENT_B0 2SENT_B1
    """,
    # The second rank hands its first stage's output to its second stage: no message.
    ("zbv", 2, 1, 2): """
        0F0 0SEND_F0 3RECV_F0 0SENT_F0 3F0 3I0 3SEND_B0 3REDUCE0 3W0
            0RECV_B0 3SENT_B0 0I0 0REDUCE0 0W0
        1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2SENT_F0 2I0 2REDUCE0 2W0
            1I0 1SEND_B0 1REDUCE0 1W0 1SENT_B0
    """,
}  # fmt: skip
"""Kind, ranks, microbatches, chunks -> the list of each rank; what is indented goes on."""


def lists_of(text: str) -> list[list[str]]:
    lines = [line[8:] for line in text.strip("\n").rstrip().splitlines()]
    found: list[list[str]] = []
    for line in lines:
        if line.startswith(" "):
            found[-1] += line.split()
        else:
            found.append(line.split())
    return found


@pytest.mark.parametrize("case", LISTS, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}")
def test_the_lists(case: tuple[str, int, int, int]) -> None:
    schedule = build_schedule(*case)
    lists = [[*map(str, lower(schedule, rank))] for rank in range(case[1])]
    assert lists == lists_of(LISTS[case])


def test_a_receive_comes_with_those_that_were_sent_before_it() -> None:
    """As drawn in [Note: Receives of a pipeline]: rank 1 computes b before a."""
    orders = ("0F0 0F1 0F2 0B0 0B1 0B2", "1F1 1F0 1F2 1B0 1B1 1B2")
    actions = [tuple(Action(w[1], int(w[0]), int(w[2])) for w in o.split()) for o in orders]  # pyright: ignore[reportArgumentType]
    schedule = Schedule("by hand", (0, 1), tuple(actions), 3)
    forwards = [str(a) for a in lower(schedule, 1) if a.op in ("F", "RECV_F")]
    assert forwards == "1RECV_F0 1RECV_F1 1F1 1F0 1RECV_F2 1F2".split()
    simulate(schedule)


def test_the_text_of_computes_and_messages_is_that_of_pytorch() -> None:
    for op in ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        theirs = _Action.from_str(str(Action(op, 12, 3)))
        assert theirs is not None and str(theirs) == f"12{op}3"


def events_of(schedule: Schedule, rank: int) -> list[Event]:
    """Return the calls of a rank's list, with the headers that go before activations."""
    events: list[Event] = []
    calls: dict[Action, list[Call]] = {}

    def call(action: Action, ends: tuple[int, int], size: int) -> None:
        is_send = rank == ends[0]
        what = Fingerprint("send" if is_send else "recv", "", "float32", (f"[{size}]",))
        message = Message(is_send, ends[is_send], what)
        number = sum(isinstance(event, Call) for event in events)
        made = Call(number, "{} to {}".format(*ends), tuple(sorted(ends)), what, (message,))
        calls.setdefault(action, []).append(made)
        events.append(made)

    def wait(action: Action) -> None:
        events.extend(Wait(each.number) for each in calls[action])

    for action in lower(schedule, rank):
        op, stage, microbatch = action
        if op in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
            above = stage + (op == "SEND_F") - (op == "SEND_B")
            before, after = (above - 1, above) if op[-1] == "F" else (above + 1, above)
            if op.startswith("RECV"):
                before, after = (stage - 1, stage) if op[-1] == "F" else (stage + 1, stage)
            ends = schedule.rank_of[before], schedule.rank_of[after]
            size = 1 + 2 * (1000 * after + microbatch) + (op[-1] == "F")
            if op[-1] == "F":
                call(action, ends, 0)
            if op == "RECV_F":
                events.append(Wait(calls[action][0].number))
            call(action, ends, size)
        elif op in ("SENT_F", "SENT_B"):
            wait(Action("SEND_F" if op == "SENT_F" else "SEND_B", stage, microbatch))
        elif op in ("F", "B", "I"):
            receive = Action("RECV_F" if op == "F" else "RECV_B", stage, microbatch)
            if receive in calls:
                wait(receive)
    return [*dict.fromkeys(events)]


def follows_itself(schedule: Schedule, rank: int) -> bool:
    """Tell whether what a rank needs of itself stands before it in its list."""
    done: set[Action] = set()
    last = schedule.num_stages - 1

    def is_done(*ops: str, stage: int, microbatch: int) -> bool:
        return any(Action(op, stage, microbatch) in done for op in ops)  # pyright: ignore[reportArgumentType]

    for action in lower(schedule, rank):
        op, stage, number = action
        is_right = True
        if op in ("B", "I", "SEND_F"):
            is_right = is_done("F", stage=stage, microbatch=number)
        if op == "SEND_B":
            is_right = is_done("B", "I", stage=stage, microbatch=number)
        if op == "W":
            is_right = is_done("I", stage=stage, microbatch=number)
        if op == "F" and stage > 0:
            here = schedule.rank_of[stage - 1] == rank
            is_right = (
                is_done("F", stage=stage - 1, microbatch=number)
                if here
                else is_done("RECV_F", stage=stage, microbatch=number)
            )
        if op in ("B", "I") and stage < last:
            here = schedule.rank_of[stage + 1] == rank
            is_right &= (
                is_done("B", "I", stage=stage + 1, microbatch=number)
                if here
                else is_done("RECV_B", stage=stage, microbatch=number)
            )
        if not is_right:
            return False
        done.add(action)
    return True


def is_legal_by_the_rules(schedule: Schedule) -> bool:
    ranks = range(len(schedule.orders))
    if not all(follows_itself(schedule, rank) for rank in ranks):
        return False
    try:
        nccl_rules.check([events_of(schedule, rank) for rank in ranks])
    except Broken:
        return False
    return True


def is_legal(schedule: Schedule) -> bool:
    try:
        simulate(schedule)
    except StrategyError:
        return False
    return True


def moved(schedule: Schedule, rank: int, source: int, target: int) -> Schedule:
    """Return a schedule with one action of a rank's list at another position."""
    derived = ("SENT_F", "SENT_B", "REDUCE")
    lists = [
        [action for action in lower(schedule, each) if action.op not in derived]
        for each in range(len(schedule.orders))
    ]
    of_rank = lists[rank]
    action = of_rank.pop(source % len(of_rank))
    of_rank.insert(target % (len(of_rank) + 1), action)

    def computes(actions: Sequence[Action]) -> tuple[Action, ...]:
        return tuple(action for action in actions if action.op in ("F", "B", "I", "W"))

    return dataclasses.replace(
        schedule, orders=tuple(map(computes, lists)), written=tuple(map(tuple, lists))
    )


@given(st.sampled_from([*KINDS]), st.integers(2, 6), st.integers(1, 9), st.integers(1, 3))
def test_every_schedule_ends_under_the_rules_of_nccl(kind: str, p: int, m: int, v: int) -> None:
    schedule = build_schedule(kind, p, m, v)
    for each in (schedule, with_whole_backwards(schedule)):
        assert is_legal_by_the_rules(each)
        assert is_legal(each)


@given(
    st.sampled_from([*KINDS]), st.integers(2, 4), st.integers(1, 4), st.integers(1, 2), st.data()
)
def test_a_list_with_one_action_elsewhere_is_judged_as_by_the_rules_of_nccl(
    kind: str, p: int, m: int, v: int, data: st.DataObject
) -> None:
    schedule = build_schedule(kind, p, m, v)
    rank = data.draw(st.integers(0, p - 1))
    length = len(lower(schedule, rank))
    source = data.draw(st.integers(0, length - 1))
    target = data.draw(st.integers(0, length - 1) | st.integers(source - 3, source + 3))
    changed = moved(schedule, rank, source, target)
    assert is_legal(changed) == is_legal_by_the_rules(changed)
