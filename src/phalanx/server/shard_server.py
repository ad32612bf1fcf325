"""A server: it answers the requests of workers.

push     add the gradient of a task; acknowledged when the backup has it too
totals   return tokens, loss and norm of complete updates, once a given one is complete
pull     return the weights, or given rows of a table, once they have a given version; first apply
         complete updates with the learning rate and gradient scale in the request, which are equal
         on all workers
read     return the weights and the optimizer state
lend     store a worker's local state for a checkpoint; `lent` returns the state of all workers
gradient, stats, live   return the next update's sum, return staleness, set the number of workers
"""

from __future__ import annotations

import functools
from typing import Any

from typing_extensions import override

from phalanx.server.message import WireMessage, in_frames
from phalanx.server.replica import ReplicatedShards
from phalanx.server.shard import Shard, split_parts


class Server(ReplicatedShards):
    """A server that answers requests for its shards; premature requests are parked."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._parked: dict[tuple[bytes, int], WireMessage] = {}
        self._open = set[tuple[bytes, int]]()  # received requests that are not answered

    @override
    def handle(self, peer: bytes, message: WireMessage) -> None:
        if message.kind in ("op", "copy", "where"):
            self.handle_replication(peer, message)
            return
        number, key = int(message["shard"]), (peer, int(message["q"]))
        if not self.is_primary(number):
            self.reply(peer, message, "moved", epoch=self.map["epoch"])
            return
        if message.kind == "again":
            if key not in self._open:
                self.reply(peer, message, "resend")
            return
        self._open.add(key)
        if message.kind == "init":
            self._init(peer, message, number)
        elif not self._answer(peer, message, number):
            self._parked[key] = message
        else:
            self._parked.pop(key, None)

    @override
    def reply(self, peer: bytes, request: WireMessage, *args: Any, **more: Any) -> None:
        super().reply(peer, request, *args, **more)
        self._open.discard((peer, request.fields.get("q", 0)))

    @override
    def changed(self) -> None:
        super().changed()
        self._open.clear()  # workers resend, as answers that waited for a backup may be lost

    def _init(self, peer: bytes, message: WireMessage, number: int) -> None:
        shard = self.shards.get(number)
        if shard is None:
            spec = message["spec"]
            (weights, *kept), _ = split_parts(message.tensors, spec, message["num_kept"])
            shard = Shard(spec, weights, kept, int(message["version"]), float(message["steps"]))
            self.shards[number] = shard
            self.begin(number)
        elif shard.spec != message["spec"]:
            raise ValueError("the shard belongs to a different model, optimizer or strategy")
        self._reply_ok(peer, message, number, version=shard.version)

    def _reply_ok(
        self, peer: bytes, message: WireMessage, number: int, tensors: Any = (), **more: Any
    ) -> None:
        """Answer a request once the backup has all operations so far.

        So no answer reports what a backup that becomes the primary lacks: a worker that starts
        again would not push a task that the former primary reported as done.
        """
        reply = functools.partial(self.reply, peer, message, "ok", tensors, **more)
        self.after(number, reply)

    def _answer(self, peer: bytes, message: WireMessage, number: int) -> bool:
        """Answer a request, or return False if the request is premature.

        A pull is premature until the weights have the version that it needs, because its worker
        would otherwise compute with weights staler than the job allows.
        """
        shard = self.shards.get(number)
        if shard is None:  # not initialized by worker 0, or lost
            if message.fields.get("is_known"):
                self.reply(peer, message, "empty")
            return bool(message.fields.get("is_known"))
        if message.kind == "push":
            self._push(peer, message, number, shard)
        elif message.kind == "lend":
            if message["clock"] == shard.version and message["slot"] not in shard.lent:
                self.change(number, "lend", {"slot": message["slot"]}, list(message.tensors))
            self._reply_ok(peer, message, number)
            self._look_at_parked()
        elif message.kind == "lent":
            if message["clock"] == shard.version and len(shard.lent) < shard.consistency.num_slots:
                return False
            found = [flat for _, of_slot in sorted(shard.lent.items()) for flat in of_slot]
            self._reply_ok(peer, message, number, found)
        elif message.kind in ("totals", "gradient"):
            if shard.completed() < int(message["needed"]):
                return False
            if message.kind == "gradient":
                sums = [flat.clone() for flat in shard.gradient()]
                self._reply_ok(peer, message, number, sums)
                return True
            more = {"version": shard.version, "done": list(shard.done.items())}
            self._reply_ok(peer, message, number, totals=shard.totals(), **more)
        elif message.kind == "pull":
            for version, rate, scale in message["recipes"]:
                if version == shard.version and shard.completed() > version:
                    how = {"version": version, "rate": rate, "scale": scale}
                    self.change(number, "apply", {**how, "noted": shard.noted(version)})
            if shard.version < int(message["needed"]):
                return False
            self._give(peer, message, number, shard)
        else:
            self._report(peer, message, number, shard)
        return True

    def _report(self, peer: bytes, message: WireMessage, number: int, shard: Shard) -> None:
        """Answer `read`, `stats`, or `live`, which may complete an asynchronous update."""
        if message.kind == "read":
            kept = shard.optimizers.kept()
            found = [*shard.weights, *(each for of_weight in kept for each in of_weight)]
            more = {"steps": shard.optimizers.steps, "num_kept": [len(each) for each in kept]}
            more["version"] = shard.version
            self._reply_ok(peer, message, number, [flat.clone() for flat in found], **more)
        elif message.kind == "live":
            if message["num_live"] != shard.num_workers:
                self.change(number, "live", {"num_live": message["num_live"]})
            self._close_due(number)
            self._reply_ok(peer, message, number)
        elif message.kind == "stats":
            ages = list(shard.ages.items())
            self._reply_ok(peer, message, number, ages=ages, version=shard.version)
        else:
            raise ValueError(f"unknown request '{message.kind}'")

    def _push(self, peer: bytes, message: WireMessage, number: int, shard: Shard) -> None:
        task = int(message["clock"]), int(message["slot"])
        if not shard.has(*task):
            self.change(number, "push", dict(message.fields), list(message.tensors))
        update = shard.update_of(*task)
        done = list(shard.done.items())
        self._close_due(number)  # first, so that a worker reads its own update in shared memory
        self._reply_ok(peer, message, number, update=update, done=done)
        self._look_at_parked()

    def _give(self, peer: bytes, message: WireMessage, number: int, shard: Shard) -> None:
        """Answer a pull with the current version once the backup has it."""
        version, memory = shard.version, shard.memory
        if message.fields.get("shared") and memory is not None:
            self.after(number, functools.partial(memory.publish, version))
            self._reply_ok(peer, message, number, version=version, place=memory.place)
        else:
            flats = shard.published()
            if (table := message.fields.get("table")) is not None:
                flats = [shard.rows(int(table), message.tensors[0])]
            sent = [each for flat in flats for each in in_frames(flat)]
            self._reply_ok(peer, message, number, sent, version=version)

    def _look_at_parked(self) -> None:
        """Handle all parked requests again; those that are still premature stay parked."""
        for key, message in list(self._parked.items()):
            if self._parked.pop(key, None) is not None:  # a push among them looks at the others
                self.handle_or_refuse(key[0], message)

    def _close_due(self, number: int) -> None:
        """Apply the current asynchronous update if it is complete."""
        shard = self.shards[number]
        if shard.consistency.is_asynchronous and shard.completed() > shard.version:
            self.change(number, "close", {"version": shard.version})

    @override
    def tick(self) -> None:
        super().tick()
        for number, shard in self.shards.items():
            if shard.consistency.is_asynchronous and self.is_primary(number):
                self._close_due(number)
        self._look_at_parked()
