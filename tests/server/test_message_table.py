"""The table of messages: roles handle each kind in it, and nothing else."""

from __future__ import annotations

import pytest

from phalanx.server.coordinator import Coordinator
from phalanx.server.message import WireError, WireMessage
from phalanx.server.message_table import MESSAGES, Dispatch
from phalanx.server.replica import ShardReplicas
from phalanx.server.shard_server import Server
from phalanx.server.task_scheduler import TaskScheduler

HANDLERS = {
    "coordinator": Coordinator,
    "scheduler": TaskScheduler,
    "server": Server,
    "backup": ShardReplicas,
}


def test_a_row_has_its_own_fields_and_answers_and_those_of_its_block() -> None:
    row = MESSAGES["server"]["push"]
    assert row.sender == "worker"
    assert row.needed == {"q", "shard", "clock", "slot", "base", "tokens", "loss"}
    assert row.optional == {"is_known", "rate", "num_live", "is_save_due"}
    assert row.answers == {"ok": {"update", "done"}, "moved": {"epoch"}, "empty": set()}
    assert MESSAGES["scheduler"]["help"].answers["ok"] >= {"task", "is_over"}


@pytest.mark.parametrize("receiver", HANDLERS)
def test_each_kind_has_a_method_and_each_method_a_kind(receiver: str) -> None:
    methods = {name for name in dir(HANDLERS[receiver]) if name.startswith("on_")}
    assert methods == {f"on_{kind}" for kind in MESSAGES[receiver]}
    assert MESSAGES.keys() == HANDLERS.keys()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (WireMessage("conquer"), "unknown request 'conquer'"),
        (WireMessage("alive", {"name": "a"}), "a message 'alive' lacks 'incarnation'"),
    ],
)
def test_a_message_that_is_not_in_the_table_is_refused(message: WireMessage, words: str) -> None:
    with pytest.raises(WireError, match=words):
        Dispatch("coordinator", Coordinator).method(message)
