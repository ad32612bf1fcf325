"""A server: it stores shards of the weights, and answers the requests of workers.

A request is answered once the backup has all operations before it (replica.py). So no answer
reports what a backup that becomes the primary lacks: a worker that starts again would not push a
task that the former primary reported as done.
"""

from __future__ import annotations

import functools
import threading
from typing import Final

from typing_extensions import override

from phalanx.launch.lease import ListeningClock
from phalanx.server.liveness import BEAT_S, HeartbeatThread
from phalanx.server.message import WireMessage, answer, in_frames
from phalanx.server.message_table import PROTOCOL, Dispatch
from phalanx.server.replica import ShardReplicas
from phalanx.server.role import Membership, Role, Settings
from phalanx.server.secret import Secret
from phalanx.server.shard import Shard, split_parts
from phalanx.server.wire import Log

STUCK_S: Final = 300.0
"""Time a server may spend on one message, in seconds, before it stops its heartbeats, so that its
backup becomes primary; by default a worker waits twice as long for an answer."""


class Server(Role):
    """A server that answers requests for its shards; premature requests are parked.

    Attributes:
        member: membership of the job, with the map.
        replicas: the shards that this server stores, as their primary or as their backup.
    """

    kind = "server"

    def __init__(
        self, job: str, coordinator: str, incarnation: str, name: str, secret: Secret, address: str,
        log: Log, weight: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(name, secret, address, log)
        self._constant = {"job": job, "protocol": PROTOCOL, "weight": weight}
        self.member = Membership(self, coordinator, incarnation, self.facts, self._changed)
        self.replicas = ShardReplicas(self, self.member)
        self._of_primary = Dispatch("backup", self.replicas)
        self._parked: dict[tuple[bytes, int], WireMessage] = {}
        self._open = set[tuple[bytes, int]]()  # received requests that are not answered
        self._beat_clock, self._seen, self._is_stuck = ListeningClock(4 * BEAT_S), (0.0, 0.0), False

    def facts(self) -> Settings:
        """Return the fields that the server adds to its heartbeats."""
        return {**self._constant, "synced": sorted(self.replicas.synced.items())}

    def _changed(self) -> None:
        self.replicas.changed()
        self._open.clear()  # workers resend, as answers that waited for a backup may be lost

    @override
    def run(self, stop: threading.Event | None = None) -> None:
        alive = WireMessage("alive", {"name": self.name, "incarnation": self.member.incarnation})
        beats = HeartbeatThread(self.secret, self.log, alive, self._beats_to)
        try:
            super().run(stop)
        finally:
            beats.close()

    def _beats_to(self) -> str:
        """Return the receiver of heartbeats: the coordinator, or "" while the loop is stuck."""
        self._beat_clock.tick()
        now_s = self._beat_clock.now_s
        if self.begun_s != self._seen[0]:
            self._seen, self._is_stuck = (self.begun_s, now_s), False
        if not self._is_stuck and now_s - self._seen[1] > STUCK_S:
            self._is_stuck = True
            self.log(
                f"at one message for {STUCK_S:g} s: heartbeats stop, so the coordinator declares "
                "this server lost"
            )
        return "" if self._is_stuck else self.member.coordinator.address

    @override
    def handle(self, peer: bytes, message: WireMessage) -> None:
        """Answer a message, park it, or refuse it if its sender or this server is outdated.

        message               is outdated if                  then
        op, copy, where       another primary has replaced    "fenced": the sender cannot
                              its sender                      acknowledge the push
        any of a worker       this server is not the          "moved": the worker sends the
                              primary, or is no longer        push to the primary
        push                  its task was pushed before      `on_push` changes nothing, and
                                                              acknowledges it
        pull                  the weights are staler than     parked until they are not, see
                              `Consistency.needs` allows      `on_pull`
        """
        if message.kind in self._of_primary:
            report = self._of_primary.method(message)
            if self.replicas.is_fenced(int(message["shard"]), int(message["epoch"])):
                self.reply(peer, message, answer("fenced", shard=message["shard"]))
            else:
                self.reply(peer, message, report(message))
            return
        method = self.dispatch.method(message)
        number, key = int(message["shard"]), (peer, int(message["q"]))
        if not self.replicas.is_primary(number):
            self.reply(peer, message, answer("moved", epoch=self.member.map["epoch"]))
            return
        if message.kind == "again":
            if key not in self._open:
                self.reply(peer, message, self.on_again())
            return
        # A request is `open` from here to its answer, parked or waiting for the backup: so a
        # worker's query "again" is silent for it, and is answered "resend" for one that never came.
        self._open.add(key)
        shard, reply = self.replicas.shards.get(number), None
        before = None if shard is None else shard.index
        if shard is not None or message.kind == "init":
            reply = method(shard, message)
        elif message.fields.get("is_known"):
            self.reply(peer, message, answer("empty"))
            return
        if reply is None:
            self._parked[key] = message
            return
        self._parked.pop(key, None)
        self.replicas.after(number, functools.partial(self.reply, peer, message, reply))
        if self.replicas.shards[number].index != before:
            self._handle_parked()

    @override
    def reply(self, peer: bytes, request: WireMessage, reply: WireMessage) -> None:
        super().reply(peer, request, reply)
        self._open.discard((peer, request.fields.get("q", 0)))

    def _handle_parked(self) -> None:
        """Handle all parked requests again; those that are still premature stay parked."""
        for key, message in list(self._parked.items()):
            if self._parked.pop(key, None) is not None:  # a push among them handles the others
                self.handle_or_refuse(key[0], message)

    @override
    def tick(self) -> None:
        super().tick()
        self.member.tick()
        self.replicas.tick()
        for number, shard in self.replicas.shards.items():
            if shard.consistency.is_asynchronous and self.replicas.is_primary(number):
                self._close_due(number, shard)
        self._handle_parked()

    @override
    def close(self) -> None:
        self.replicas.close()
        super().close()

    # Requests of workers. A method returns the answer, or None if the request is premature.

    def on_again(self) -> WireMessage:
        """Return the answer to a query for a request that is not under way."""
        return answer("resend")

    def on_init(self, shard: Shard | None, message: WireMessage) -> WireMessage:
        """Create a shard from its weights and optimizer state, unless it exists."""
        number, spec = int(message["shard"]), message["spec"]
        if shard is None:
            (weights, *kept), _ = split_parts(message.tensors, spec, message["num_kept"])
            shard = Shard(spec, weights, kept, int(message["version"]), float(message["steps"]))
            self.replicas.shards[number] = shard
            self.replicas.copy(number)
        elif shard.spec != spec:
            raise ValueError("the shard belongs to a different model, optimizer or strategy")
        return answer("ok", version=shard.version)

    def on_push(self, shard: Shard, message: WireMessage) -> WireMessage:
        """Add the gradient of a task, unless the task was pushed before."""
        task = int(message["clock"]), int(message["slot"])
        if not shard.done.has(*task):
            self.replicas.change(
                message["shard"], "push", dict(message.fields), list(message.tensors)
            )
        update, done = shard.update_of(*task), list(shard.done.below.items())
        self._close_due(
            message["shard"], shard
        )  # first: a worker reads its own update in shared memory
        return answer("ok", update=update, done=done)

    def on_totals(self, shard: Shard, message: WireMessage) -> WireMessage | None:
        """Return tokens, loss and norm of complete updates, once a given one is complete."""
        if shard.completed() < int(message["needed"]):
            return None
        done = list(shard.done.below.items())
        return answer("ok", totals=shard.totals(), version=shard.version, done=done)

    def on_pull(self, shard: Shard, message: WireMessage) -> WireMessage | None:
        """Return the weights, or rows of a table, once they have a given version.

        Until then the pull is premature: its worker would compute with weights staler than the job
        allows. Complete updates are applied first, with the learning rate and gradient scale in
        the request, which are equal on all workers. A worker on this host gets the place of the
        weights in shared memory, where their version is published once the backup has it.
        """
        for version, rate, scale in message["recipes"]:
            if version == shard.version and shard.completed() > version:
                fields = {"version": version, "rate": rate, "scale": scale}
                fields["noted"] = shard.noted(version)
                self.replicas.change(message["shard"], "apply", fields)
        version, memory = shard.version, shard.memory
        if version < int(message["needed"]):
            return None
        if message.fields.get("shared") and memory is not None:
            self.replicas.after(message["shard"], functools.partial(memory.publish, version))
            return answer("ok", version=version, place=memory.place)
        table = message.fields.get("table")
        is_whole = table is None
        flats = shard.published() if is_whole else [shard.rows(int(table), message.tensors[0])]
        return answer("ok", [each for flat in flats for each in in_frames(flat)], version=version)

    def on_read(self, shard: Shard, _: WireMessage) -> WireMessage:
        """Return the weights and the optimizer state."""
        kept = shard.optimizers.kept()
        flats = [*shard.weights, *(each for of_weight in kept for each in of_weight)]
        fields: Settings = {"steps": shard.optimizers.steps, "num_kept": [*map(len, kept)]}
        return answer("ok", [flat.clone() for flat in flats], version=shard.version, **fields)

    def on_gradient(self, shard: Shard, message: WireMessage) -> WireMessage | None:
        """Return the next update's sum, once it is complete."""
        if shard.completed() < int(message["needed"]):
            return None
        return answer("ok", [flat.clone() for flat in shard.gradient()])

    def on_upload(self, shard: Shard, message: WireMessage) -> WireMessage:
        """Store a worker's local state for a checkpoint."""
        slot = message["slot"]
        if message["clock"] == shard.version and slot not in shard.uploads:
            self.replicas.change(message["shard"], "upload", {"slot": slot}, list(message.tensors))
        return answer("ok")

    def on_download(self, shard: Shard, message: WireMessage) -> WireMessage | None:
        """Return the state of all workers, once all have sent theirs."""
        if message["clock"] == shard.version and len(shard.uploads) < shard.consistency.num_slots:
            return None
        return answer(
            "ok", [flat for _, of_slot in sorted(shard.uploads.items()) for flat in of_slot]
        )

    def on_live(self, shard: Shard, message: WireMessage) -> WireMessage:
        """Set the number of live workers, which may complete an asynchronous update."""
        num_live = message["num_live"]
        if num_live != shard.num_workers:
            self.replicas.change(message["shard"], "live", {"num_live": num_live})
        self._close_due(message["shard"], shard)
        return answer("ok")

    def on_stats(self, shard: Shard, _: WireMessage) -> WireMessage:
        """Return the staleness of the gradients so far."""
        return answer("ok", ages=list(shard.ages.items()), version=shard.version)

    def _close_due(self, number: int, shard: Shard) -> None:
        """Apply the current asynchronous update if it is complete."""
        if shard.consistency.is_asynchronous and shard.completed() > shard.version:
            self.replicas.change(number, "close", {"version": shard.version})
