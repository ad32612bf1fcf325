"""The protocol of a job with parameter servers: each message, its sender and its answer.

    workers of group g --> scheduler g      which tasks are mine, or are left by lost workers?
         |        |           | beat
         | map    |           v
         |        `-----> coordinator       the map: holders of each shard, members of each group
         |                    ^ beat
         v                    |
    server 0 .. S-1, the primary of a shard ---- op, copy ----> another server, its backup

A push and a pull under `ps`, for one of the shards:

    worker               primary               backup
      | push --------------> | add the gradient    |
      |                      | op push ----------> | add the gradient
      |                      | <-------------- ack |
      | <------ ok update    |                     |
      | totals ------------> | parked until all workers have pushed the clock
      | <------ ok totals    |                     |
      | pull, recipes -----> | step the optimizer  |
      |                      | op apply ---------> | step the optimizer
      |                      | <-------------- ack |
      | <------ ok, weights  |                     |

`MESSAGES` is read from `TABLE`, and roles dispatch by it: role R needs a method `on_KIND` for each
kind to R, which is called with messages that have all their fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.server.message import WireError, WireMessage

PROTOCOL: Final = 8
"""Version of the messages. The coordinator refuses members of another version, and a worker that
joins refuses such a coordinator."""

TABLE: Final = """
worker -> coordinator
  map                                                       -> map
  end     q?                                                -> map
  agree   facts q shard is_known?                           -> ok facts

scheduler, server -> coordinator
  beat    name role address incarnation job? protocol? term? epoch? weight? synced? group? -> map
  alive   name incarnation

worker -> scheduler
  *       worker tasks is_open q? shard? is_known? done?    -> ok is_over num_live stop_signal
  beat
  claim   clock                                             -> ok is_mine
  help    limit is_through                                  -> ok task
  finish  clock slot                                        -> ok
  stats                                                     -> ok late
  leave                                                     -> ok
  stop    signum                                            -> ok

worker -> server
  *       q shard is_known?                                 -> moved epoch | empty
  again                                                     -> resend
  init    spec version steps num_kept [weights, state]      -> ok version
  push    clock slot base tokens loss rate? num_live? is_save_due? [gradients]  -> ok update done
  totals  needed                                            -> ok totals version done
  pull    needed recipes shared? table? [rows]              -> ok version place? [weights]
  read                                                      -> ok version steps num_kept [all]
  gradient  needed                                          -> ok [sums]
  upload  clock slot [state]                                -> ok
  download  clock                                           -> ok [states]
  live    num_live                                          -> ok
  stats                                                     -> ok ages version

primary -> backup
  *       shard epoch                                       -> fenced shard
  copy    state [all]                                       -> ack shard index
  op      index op fields [gradients, state]                -> ack shard index | gap shard
  where   sent                                              -> at shard index sent | gap shard
"""
"""A block for each sender and receiver; `*` has the fields and answers of all kinds of its block.

`?` follows optional fields, and brackets have the tensors. An answer has the `q` of its request.
Any request may be answered by `refused why`, and any message of a worker to a server by:

moved   the server is not the shard's primary: ask for the map, and send again
empty   a shard that this worker knows is lost with its last copy
resend  neither the request `q` nor its answer is under way, see [Note: Sent again]
"""


@dataclass(frozen=True)
class Row:
    """A kind of message to one receiver.

    Attributes:
        sender: role, or roles, that send it.
        needed: names of the fields that it must have.
        optional: names of the fields that it may have.
        answers: kind of answer -> names of its fields; an optional one ends with `?`.
    """

    sender: str
    needed: frozenset[str]
    optional: frozenset[str]
    answers: Mapping[str, frozenset[str]]


def _read(table: str) -> dict[str, dict[str, Row]]:
    """Return receiver -> kind -> row."""
    rows: dict[str, dict[str, Row]] = {}
    for block in re.sub(r"\[.*?\]", "", table).strip().split("\n\n"):
        heading, *lines = block.splitlines()
        sender, receiver = heading.split(" -> ")
        common, common_answers = list[str](), dict[str, frozenset[str]]()
        for line in lines:
            request, _, replies = line.partition("->")
            kind, *fields = request.split()
            lists = [each.split() for each in replies.split("|") if each.strip()]
            answers = {name: frozenset(names) for name, *names in lists}
            if kind == "*":
                common, common_answers = fields, answers
                continue
            for name, more in common_answers.items():
                answers[name] = answers.get(name, frozenset()) | more
            fields += common
            needed = frozenset(name for name in fields if not name.endswith("?"))
            optional = frozenset(name.rstrip("?") for name in fields) - needed
            rows.setdefault(receiver, {})[kind] = Row(sender, needed, optional, answers)
    return rows


MESSAGES: Final = _read(TABLE)
"""Receiver -> kind -> row of `TABLE`."""


class Dispatch:
    """The methods that handle the messages to a receiver."""

    def __init__(self, receiver: str, handler: object) -> None:
        """Look up the method `on_KIND` of `handler` for each kind of message to `receiver`."""
        self._rows = MESSAGES[receiver]
        self._methods = {kind: getattr(handler, f"on_{kind}") for kind in self._rows}

    def __contains__(self, kind: str) -> bool:
        return kind in self._rows

    def method(self, message: WireMessage) -> Callable[..., Any]:
        """Return the method for a message.

        Raises:
            WireError: the receiver gets no such message, or the message lacks a field.
        """
        if message.kind not in self._rows:
            raise WireError(f"unknown request '{message.kind}'")
        for name in self._rows[message.kind].needed:
            message[name]
        return self._methods[message.kind]
