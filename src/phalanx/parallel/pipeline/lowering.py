"""Lower a schedule to one list of actions for each rank, which the runtime runs in a loop.

The text form of an action is stage, operation, and microbatch, as in torch.distributed.pipelining:

    2F0 2B0 2I0 2W0   computes (schedule.py); a compute waits for the tensor that it receives
    2SEND_F0          starts to send the output of stage 2 to the rank of stage 3
    3RECV_F0          starts to receive that output on the rank of stage 3
    2SENT_F0          waits until the send has ended, and frees the sent tensor
    3SEND_B0 2RECV_B0 3SENT_B0   the same for the gradient, from stage 3 to stage 2
    2REDUCE0          the next backward of stage 2 is its last in the step and reduces its gradients

Between two stages of the same rank there are no messages.

[Note: Receives of a pipeline] All messages from one rank to another use one queue ([Note: One-way
groups] in comm/meshes.py), so receives must start in the order of the sends. With chunks, a compute
may need a message before messages that were sent earlier. So the receives of all earlier messages
are listed before its receive:

    rank 0 computes and sends    a ------> b ------> c
                                 |         |         |
                                 v         v         v
    rank 1 receives              RECV a    RECV b    RECV c
    rank 1 computes                        b    a    c
    rank 1's list                RECV a  RECV b  b  a  RECV c  c

A receive is listed as late as possible, right before the compute that needs it, because the host
blocks on the header of an activation (sizes.py). A sent tensor is kept until the sender has proof
of its receipt: a message that the receiver computed after it used the tensor.

    rank 0   F0 SEND_F0 F1 SEND_F1 RECV_B0 SENT_F0 B0     rank 1 computed F0 before it sent B0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from phalanx.parallel.pipeline.schedule import Action, Op, Schedule

COMPUTES = ("F", "B", "I", "W")
SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")
SEND_WAITS = ("SENT_F", "SENT_B")

_OTHER_END: Final[dict[Op, Op]] = {
    "SEND_F": "RECV_F", "RECV_F": "SEND_F", "SENT_F": "RECV_F",
    "SEND_B": "RECV_B", "RECV_B": "SEND_B", "SENT_B": "RECV_B",
}  # fmt: skip


def lower(schedule: Schedule, rank: int) -> tuple[Action, ...]:
    """Return all actions of a rank, in order; the schedule must list all computes."""
    listed = schedule.written[rank] if schedule.written else _with_messages(schedule, rank)
    actions = tuple(_with_ends_of_sends(schedule, rank, listed))
    # The last of several equal keys wins: the index of the last backward of each stage.
    last = {action.stage: at for at, action in enumerate(actions) if action.op in ("B", "W")}
    lowered: list[Action] = []
    for at, action in enumerate(actions):
        if last.get(action.stage) == at:  # the last backward of the stage
            lowered.append(action._replace(op="REDUCE"))
        lowered.append(action)
    return tuple(lowered)


def send_after(action: Action, last_stage: int) -> Action | None:
    """Return the send of a compute's result; None if no other stage takes the result.

    A forward sends to the next stage, a backward to the previous stage.
    """
    op, stage, microbatch = action
    if op == "F" and stage < last_stage:
        return Action("SEND_F", stage, microbatch)
    if op in ("B", "I") and stage > 0:
        return Action("SEND_B", stage, microbatch)
    return None


def receive_before(action: Action, last_stage: int) -> Action | None:
    """Return the receive of a compute's input; None if no other stage makes the input."""
    op, stage, microbatch = action
    if op == "F" and stage > 0:
        return Action("RECV_F", stage, microbatch)
    if op in ("B", "I") and stage < last_stage:
        return Action("RECV_B", stage, microbatch)
    return None


def other_stage(message: Action) -> int:
    """Return the stage at the other end of a message: the receiver's of a send, or the reverse."""
    return message.stage + (1 if message.op in ("SEND_F", "SENT_F", "RECV_B") else -1)


def other_end(message: Action) -> Action:
    """Return the receive that matches a SEND or SENT, or the send that matches a receive."""
    return Action(_OTHER_END[message.op], other_stage(message), message.microbatch)


def messages_of(schedule: Schedule, action: Action) -> Iterator[Action]:
    """Yield the receive and the send of a compute, unless both stages are on one rank."""
    last, rank_of = schedule.num_stages - 1, schedule.rank_of
    for message in (receive_before(action, last), send_after(action, last)):
        if message is not None and rank_of[other_stage(message)] != rank_of[action.stage]:
            yield message


def _with_messages(schedule: Schedule, rank: int) -> Iterator[Action]:
    """Yield a rank's computes, sends and receives, see [Note: Receives of a pipeline]."""
    coming: dict[int, Iterator[Action]] = {}
    begun: set[Action] = set()
    for action in schedule.orders[rank]:
        messages = [*messages_of(schedule, action)]
        for needed in (each for each in messages if each.op in RECEIVES):
            source = schedule.rank_of[other_stage(needed)]
            if source not in coming:  # all messages from `source` to this rank, as it sends them
                coming[source] = (
                    other_end(send)
                    for computed in schedule.orders[source]
                    for send in messages_of(schedule, computed)
                    if send.op in SENDS and schedule.rank_of[other_stage(send)] == rank
                )
            while needed not in begun:
                receive = next(coming[source])
                begun.add(receive)
                yield receive
        yield action
        yield from (each for each in messages if each.op in SENDS)


def _with_ends_of_sends(
    schedule: Schedule, rank: int, listed: Iterable[Action]
) -> Iterator[Action]:
    """Yield a rank's actions with a SENT for each send, as soon as receipt is certain."""
    # (is forward, stage, microbatch) -> index of the forward or backward in its rank's order.
    position = {
        (action.op == "F", action.stage, action.microbatch): at
        for order in schedule.orders
        for at, action in enumerate(order)
        if action.op != "W"
    }

    def at_other_end(message: Action) -> tuple[int, int]:
        """Return rank and index of the compute at the other end, which makes or takes a message."""
        stage = other_stage(message)
        at = position[message.op.endswith("F"), stage, message.microbatch]
        return schedule.rank_of[stage], at

    # `needed` is a message that rank `source` computed at index `made_at` of its order. Each send
    # of this rank that `source` takes at a smaller index has been received, so its tensor can be
    # freed:
    #
    #   this rank   F0 SEND_F0 F1 SEND_F1 RECV_B0          SENT_F0, before B0
    #   `source`    F0 (index 0)  B0 (index 1)  F1 (index 2)
    #
    # SEND_F1 stays: `source` may not have received it when it sent the gradient of microbatch 0.
    held: list[Action] = []
    for action in listed:
        for needed in messages_of(schedule, action):
            if needed.op in RECEIVES:
                source, made_at = at_other_end(needed)
                ended = [send for send in held if at_other_end(send) < (source, made_at)]
                for send in ended:
                    if schedule.rank_of[other_stage(send)] == source:
                        held.remove(send)
                        yield _end_of(send)
        yield action
        if action.op in SENDS:
            held.append(action)
    yield from map(_end_of, held)


def _end_of(send: Action) -> Action:
    return send._replace(op="SENT_F" if send.op == "SEND_F" else "SENT_B")
