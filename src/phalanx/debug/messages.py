"""Compare each send with its receive, without synchronization: the later of the two calls compares.

A message that its sender left without sending is reported by the sender or by the receiver,
depending on which comes later.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

import torch

from phalanx.comm.calls import Call
from phalanx.debug.check_store import GRACE_S, LEFT, CheckStore, described
from phalanx.debug.deadlock import Edge
from phalanx.debug.fingerprint import Fingerprint, pair_difference
from phalanx.errors import CollectiveMismatch


class Messages:
    """The sends and receives of this rank, and their comparison."""

    def __init__(self, check_store: CheckStore) -> None:
        self._check_store = check_store
        self._store = check_store.store
        self._rank = check_store.rank
        self._numbers: Counter[str] = Counter()
        self._awaited: set[int] = set()
        # Address of a receive buffer -> sender, store key of the message, call of this rank.
        self._receiving: dict[int, tuple[int, str, Fingerprint]] = {}

    def receive_any(self, call: Call) -> None:
        """Stop comparing messages to this rank on the group: a receive may match any sender."""
        self._store.set(self._any_source_key(call, self._rank), "")

    def pair(self, call: Call, fingerprint: Fingerprint) -> None:
        """Compare a send with its receive if the other rank called first; else store this call."""
        is_send = call.op == "send"
        peer = call.ranks[call.arguments["dst" if is_send else "src"]]
        sender, receiver = (self._rank, peer) if is_send else (peer, self._rank)
        line = f"{call.group.group_name}/{sender}-{receiver}/{call.arguments['tag']}"
        self._numbers[line] += 1
        text = fingerprint.text()
        self._store.set(f"last/{self._rank}", json.dumps([text, ""]))
        key = f"{line}/{self._numbers[line]}"
        theirs = self._store.compare_set(key, "", text).decode()
        # One key for each message: the first of the pair stores its call, the second compares and
        # deletes. Equal texts cannot come from the peer, since a send and a receive differ in the
        # op.
        if theirs == text:  # this rank is the first of the two
            if not is_send:
                if call.inputs[0].numel():
                    self._receiving[call.inputs[0].data_ptr()] = peer, key, fingerprint
                number = self._numbers[line]
                waits = f"it has not sent message {number} to rank {self._rank}"
                description = f"{described(self._rank, fingerprint)}\n{'':10}waits for it"
                if peer not in self._awaited:
                    self._awaited.add(peer)
                    number = self._store.add(f"receivers/{peer}", 1)
                    self._store.set(f"receivers/{peer}/{number}", str(self._rank))
                self._store.set(
                    f"awaits/{peer}/{self._rank}", json.dumps([key, waits, description])
                )
                if self._check_store.read(f"gone/{peer}") == LEFT:
                    raise self._unsent(peer, waits, description)
            return
        self._store.delete_key(key)
        other = Fingerprint.read(theirs)
        what = pair_difference(fingerprint, other)
        if what and not self._store.check([self._any_source_key(call, receiver)]):
            raise self._check_store.verdict(
                f"ranks {self._rank} and {peer} differ in message {self._numbers[line]} from rank "
                f"{sender} to rank {receiver}, in the {what}\n"
                f"{described(self._rank, fingerprint)}\n{described(peer, other)}"
            )

    @contextmanager
    def wait_for(self, tensor: torch.Tensor | None, _: str) -> Generator[None]:
        """Wait until the message for `tensor` is sent, before the block waits for its receive."""
        address = None if tensor is None or not tensor.numel() else tensor.data_ptr()
        if address in self._receiving:
            self._wait_for_sender(*self._receiving.pop(address))
        yield

    def _wait_for_sender(self, sender: int, key: str, fingerprint: Fingerprint) -> None:
        """Wait until a message is sent, or until the limit is over, which is no error."""
        description = (
            f"{described(self._rank, fingerprint)}\n{'':10}waits for it, from rank {sender}"
        )
        until_s = time.monotonic() + self._check_store.limit_s

        def look(waited_s: float) -> None:
            end = self._check_store.read(f"gone/{sender}")
            # A sender that has left is reported by `_await`, or by its own `leave`.
            if end not in (None, LEFT) and waited_s > min(GRACE_S, self._check_store.limit_s):
                raise self._check_store.verdict(
                    f"rank {sender} has ended by {end}, and sends no more messages\n{description}"
                )
            self._check_store.refuse_deadlock([Edge(sender, key, True)], description)

        def is_over() -> bool:
            return not self._store.check([key]) or time.monotonic() > until_s

        with self._check_store.explaining_lost_store():
            self._check_store.poll(is_over, look, 2e-3)

    def leave(self) -> None:
        """Raise if another rank waits for a message from this rank, which has left the check."""
        num_receivers = int(self._check_store.read(f"receivers/{self._rank}") or 0)
        for number in range(1, num_receivers + 1):
            receiver = self._check_store.read(f"receivers/{self._rank}/{number}")
            if text := self._check_store.read(f"awaits/{self._rank}/{receiver}"):
                key, waits, description = json.loads(text)
                if self._store.check([key]):  # else it was sent
                    raise self._unsent(self._rank, waits, description)

    def _unsent(self, sender: int, waits: str, description: str) -> CollectiveMismatch:
        last = f"  rank {sender}: has made no call yet"
        if (text := self._check_store.read(f"last/{sender}")) is not None:
            call = Fingerprint.read(json.loads(text)[0])
            last = f"{described(sender, call)}\n{'':10}was its last call"
        return self._check_store.verdict(
            f"rank {sender} has finished without an error, and {waits}\n{description}\n{last}\n"
            "Each rank must make the same number of calls."
        )

    def _any_source_key(self, call: Call, receiver: int) -> str:
        return f"any/{call.group.group_name}/{receiver}"
