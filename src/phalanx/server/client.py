"""A worker's operations on the servers' weights: create, push, pull, and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from phalanx.server.consistency import Consistency
from phalanx.server.message import NAMES, WireMessage, num_frames
from phalanx.server.placement import CHUNK_BYTES, PlacedWeights
from phalanx.server.requests import COORDINATOR, SCHEDULER, JobAddress, Requests
from phalanx.server.role import Settings
from phalanx.server.shared import MappedShards, SharedView, copy_concatenated
from phalanx.server.wire import Log


class Client:
    """A worker's operations on tasks and weights.

    Attributes:
        requests: requests to the scheduler and the servers.
        worker: number of this worker.
        consistency: consistency model of the job.
        num_live: number of live workers, as the scheduler last reported.
        is_shared: whether weights of a server on this host are read from its shared memory.
        sent_bytes, received_bytes: bytes of gradients and weights since the start.
        placed: placement of the weights on shards.
        applied: updates that every server had applied at the last call of `totals`.
        done: slot -> clock below which all its tasks were pushed to all servers, as last reported.
    """

    def __init__(
        self, meeting: JobAddress, worker: int, consistency: Consistency, tasks: tuple[int, int],
        timeout_s: float = 600.0, log: Log = lambda _: None,
    ) -> None:  # fmt: skip
        """Join a job, see `Requests`."""
        self.requests = Requests(meeting, worker, consistency, tasks, timeout_s, log)
        self.worker, self.consistency = worker, consistency
        self.num_live = consistency.num_slots
        self.sent_bytes = self.received_bytes = 0
        self.applied, self.done = 0, dict[int, int]()
        self._mapped = MappedShards()
        self.is_shared = True

    def ask_scheduler(self, kind: str, **fields: Any) -> WireMessage:
        """Send a request to the group's scheduler; return its answer, and update `num_live`.

        The scheduler learns what all workers have pushed. With an asynchronous kind, a change of
        `num_live` is sent to the servers.
        """
        fields |= {**self.requests.identity, "done": list(self.done.items())}
        asked = WireMessage(kind, fields)
        reply = self.requests.ask({SCHEDULER: asked})[SCHEDULER]
        before, self.num_live = self.num_live, int(reply["num_live"])
        if self.num_live != before and self.consistency.is_asynchronous:
            self._ask_all("live", num_live=self.num_live)
        return reply

    def agree(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts of the job that its first worker has sent to the coordinator."""
        asked = {COORDINATOR: WireMessage("agree", {"facts": facts})}
        return self.requests.ask(asked)[COORDINATOR]["facts"]

    def leave(self, signum: int = 0) -> int:
        """Notify the scheduler that this worker takes no more steps; return how many are live.

        Worker 0 gives the signal that has ended its steps, if one has: it ends the others', too.
        """
        self.requests.is_leaving = True
        if signum:
            self.ask_scheduler("stop", signum=signum)
        else:
            self.ask_scheduler("leave")
        return self.num_live

    def end(self) -> None:
        """End the job, so that all its roles exit."""
        self.requests.end()

    def close(self) -> None:
        """Stop the heartbeats, and close the connections."""
        self.requests.close()

    def _ask_all(
        self, kind: str, idle: Callable[[], None] | None = None, **fields: Any
    ) -> dict[int, WireMessage]:
        """Send the same request to each shard; return the answers by shard."""
        shards = range(self.requests.num_shards)
        return self.requests.ask(dict.fromkeys(shards, WireMessage(kind, fields)), idle)

    def lay_out(
        self, sizes: Sequence[int], dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES,
        tables: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        """Place weights on the servers: groups of `sizes` elements, and `tables` of 2-D shapes."""
        homes = self.requests.map["homes"]
        self.placed = PlacedWeights(sizes, tables, dtype.itemsize, chunk_bytes, homes)
        self._dtype = dtype

    def create(
        self, weights: Sequence[Tensor], rule: Settings, p: float, version: int = 0,
        kept: Sequence[Sequence[Tensor]] = (), steps: float = 0.0,
    ) -> None:  # fmt: skip
        """Initialize the servers with weights, and with optimizer state `kept` as of `steps` steps.

        `weights` has a flat tensor of each group and table, `kept` its state tensors. `p` is the
        exponent of the gradient norm.
        """
        placed = self.placed
        spec: Settings = {
            "dtype": NAMES[self._dtype], "rule": rule, "p": p,
            "consistency": vars(self.consistency), "tables": [width for _, width in placed.tables],
        }  # fmt: skip
        fields: Settings = {"version": version, "steps": steps, "num_kept": [*map(len, kept)]}
        flats = [*enumerate(weights), *((g, flat) for g, each in enumerate(kept) for flat in each)]
        requests: dict[int, WireMessage] = {}
        for shard in range(placed.num_shards):
            tensors = [placed.cut(shard, group, flat) for group, flat in flats]
            fields = {**fields, "spec": {**spec, "sizes": placed.sizes(shard)}}
            requests[shard] = WireMessage("init", fields, tensors)
        self.requests.ask(requests)

    def push(
        self, clock: int, slot: int, grads: Sequence[Tensor], *, base: int, tokens: float,
        loss: float, rate: float = 0.0, is_save_due: bool = False,
    ) -> int:  # fmt: skip
        """Push the gradient of a task, the mean over its tokens, computed with version `base`.

        `grads` has a flat tensor per group, then a coalesced sparse tensor per table. Return once
        every server and backup has it. The result is the number of the update that includes it,
        valid only for asynchronous kinds.
        """
        fields = {"clock": clock, "slot": slot, "base": base, "tokens": tokens, "loss": loss}
        fields |= {"rate": rate, "num_live": self.num_live, "is_save_due": is_save_due}
        requests: dict[int, WireMessage] = {}
        dense, sparse = grads[: self.placed.num_flat], grads[self.placed.num_flat :]
        of_tables = [self.placed.of_shards(number, grad) for number, grad in enumerate(sparse)]
        for shard in range(self.placed.num_shards):
            tensors = [part for parts in self.placed.parts(shard, dense) for part in parts]
            tensors += [part for of_shards in of_tables for part in of_shards[shard]]
            requests[shard] = WireMessage("push", fields, tensors)
            self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        replies = self.requests.ask(requests)
        self._note_done(replies.values())
        self.ask_scheduler("finish", clock=clock, slot=slot)
        return min(int(reply["update"]) for reply in replies.values())

    def totals(
        self, needed: int, idle: Callable[[], None] | None = None
    ) -> dict[int, list[list[float]]]:
        """Wait until `needed` updates are complete; return totals of recent updates by version.

        An entry has the totals of every shard, see `Shard.totals`. `idle` is called while waiting.
        """
        replies = self._ask_all("totals", idle, needed=needed)
        totals: dict[int, list[list[float]]] = {}
        for shard in range(self.placed.num_shards):  # in order: all workers get equal sums
            for version, *numbers in replies[shard]["totals"]:
                totals.setdefault(int(version), []).append(numbers)
        self.applied = min(int(reply["version"]) for reply in replies.values())
        self._note_done(replies.values())
        return {v: each for v, each in totals.items() if len(each) == self.placed.num_shards}

    def _note_done(self, replies: Iterable[WireMessage]) -> None:
        of_each = [dict(reply["done"]) for reply in replies]
        self.done = {slot: min(done[slot] for done in of_each) for slot in of_each[0]}

    def pull(
        self, targets: Sequence[Tensor], needed: int,
        recipes: Sequence[tuple[int, float, float | None]] = (),
        idle: Callable[[], None] | None = None,
    ) -> int:  # fmt: skip
        """Wait for version `needed` of the weights; copy them, except tables, into flat tensors.

        Servers first apply complete updates, according to recipes (version, learning rate, gradient
        scale). `idle` is called while waiting.

        Returns:
            The oldest version among the shards.
        """
        fields = {"needed": needed, "recipes": list(recipes), "shared": self.is_shared}
        asked = dict.fromkeys(range(self.placed.num_shards), WireMessage("pull", fields))
        parts = {shard: self.placed.parts(shard, targets) for shard in asked}
        replies = self._pulled(asked, lambda shard, view: view.read(parts[shard]), idle)
        for shard, reply in replies.items():
            sent = iter(reply.tensors)
            for size, each in zip(self.placed.sizes(shard), parts[shard], strict=False):
                if reply.tensors:
                    copy_concatenated(list(islice(sent, num_frames(size, self._dtype))), each)
        return min(int(reply["version"]) for reply in replies.values())

    def pull_rows(self, table: int, rows: Tensor, target: Tensor, needed: int) -> None:
        """Wait for version `needed`; copy `rows` of a table into the same rows of `target`."""
        fields = {"needed": needed, "recipes": [], "shared": self.is_shared, "table": table}
        asked, which, values = dict[int, WireMessage](), dict[int, Tensor](), dict[int, Tensor]()
        for shard, which[shard], there in self.placed.places[table].deal(rows):
            asked[shard] = WireMessage("pull", fields, [there])
            values[shard] = target.new_empty(len(there), target.shape[1])
        group = self.placed.num_flat + table
        replies = self._pulled(
            asked, lambda shard, view: view.read_rows(group, asked[shard].tensors[0], values[shard])
        )
        self.sent_bytes += rows.nbytes
        for shard, reply in replies.items():
            if reply.tensors:
                copy_concatenated(reply.tensors, [values[shard].view(-1)])
            target[rows[which[shard]]] = values[shard]

    def _pulled(
        self, asked: Mapping[int, WireMessage], read: Callable[[int, SharedView], bool],
        idle: Callable[[], None] | None = None,
    ) -> dict[int, WireMessage]:  # fmt: skip
        """Send pulls, call `read` for shards in this host's shared memory; return the answers.

        Memory that already has the versions of a pull is read without a request. If memory cannot
        be mapped, or weights change too often to be read, the server is asked to send the weights.
        """
        # 1. memory of this host that is mapped and new enough: read it, without a message
        # 2. else a pull: the answer has the weights, or where they are in shared memory
        # 3. memory that cannot be mapped, or that changed during each try: a pull without sharing
        known = self.requests.map  # which may change meanwhile
        names = {shard: known["holders"][shard][0] for shard in asked}
        primaries = {
            shard: (name, known["incarnations"].get(name)) for shard, name in names.items()
        }
        replies: dict[int, WireMessage] = {}
        for shard, message in asked.items() if self.is_shared else ():
            due = max([message["needed"], *(1 + applied for applied, *_ in message["recipes"])])
            ready = self._mapped.ready(shard, primaries[shard], due)
            if ready is not None and read(shard, ready[1]):
                replies[shard] = WireMessage("ok", {"version": ready[0]})
        sent = self.requests.ask({s: m for s, m in asked.items() if s not in replies}, idle)
        missed: dict[int, WireMessage] = {}
        for shard, reply in sent.items():
            if "place" in reply.fields:
                of = (reply["place"], self.placed.sizes(shard), self._dtype)
                view = self._mapped.map(shard, primaries[shard], *of)
                self.is_shared = self.is_shared and view is not None
                if view is None or not read(shard, view):
                    fields = {**asked[shard].fields, "shared": False}
                    missed[shard] = WireMessage("pull", fields, asked[shard].tensors)
        replies |= sent | self.requests.ask(missed)
        self.received_bytes += sum(each.nbytes for r in replies.values() for each in r.tensors)
        return replies

    def read(self, flats: Sequence[Sequence[Tensor]]) -> tuple[float | None, set[int]]:
        """Fill `flats`, per group or table the weights, then optimizer state.

        Returns:
            The steps of Adam, and the versions of the shards. None, with the state not complete,
            if a shard's optimizer has no state yet, or has a different number of state tensors.
        """
        due, has_kept = [len(each) - 1 for each in flats], True
        replies = self._ask_all("read")
        for shard, reply in replies.items():
            targets = [(g, each[0]) for g, each in enumerate(flats)]
            has_kept = has_kept and reply["num_kept"] == due
            if reply["num_kept"] == due:
                targets += [(g, flat) for g, each in enumerate(flats) for flat in each[1:]]
            for sent, (group, target) in zip(reply.tensors, targets, strict=False):
                copy_concatenated([sent], self.placed.pieces(shard, group, target))
        steps = min(float(reply["steps"]) for reply in replies.values()) if has_kept else None
        return steps, {int(reply["version"]) for reply in replies.values()}

    def upload_state(self, clock: int, flats: Sequence[Tensor]) -> None:
        """Upload this worker's state for a checkpoint at `clock`: equally many flats per group."""
        placed, num = self.placed, len(flats) // len(self.placed.numels)
        requests: dict[int, WireMessage] = {}
        for shard in range(placed.num_shards):
            tensors = [placed.cut(shard, at // num, flat) for at, flat in enumerate(flats)]
            requests[shard] = WireMessage("upload", {"slot": self.worker, "clock": clock}, tensors)
        self.requests.ask(requests)

    def download_states(self, clock: int) -> list[list[Tensor]]:
        """Return the tensors of each worker, once all have called `upload_state` for `clock`."""
        replies = self._ask_all("download", clock=clock)
        size = len(replies[0].tensors) // self.consistency.num_slots
        groups = [at * len(self.placed.numels) // size for at in range(size)]
        states: list[list[Tensor]] = []
        for slot in range(self.consistency.num_slots):
            states.append([torch.empty(self.placed.numels[g], dtype=self._dtype) for g in groups])
            for shard, reply in replies.items():
                sent = reply.tensors[slot * size : (slot + 1) * size]
                for part, group, flat in zip(sent, groups, states[-1], strict=True):
                    copy_concatenated([part], self.placed.pieces(shard, group, flat))
        return states

    def gradient(self, flats: Sequence[Tensor], needed: int) -> None:
        """Wait until `needed` updates are complete; fill `flats` with the next update's gradient.

        It is the sum of gradients weighted by tokens, without tables.
        """
        replies = self._ask_all("gradient", needed=needed)
        for shard, reply in replies.items():
            for flat, parts in zip(reply.tensors, self.placed.parts(shard, flats), strict=True):
                copy_concatenated([flat], parts)

    def ages(self) -> dict[int, int]:
        """Return staleness in versions -> number of gradients applied, summed over all servers."""
        replies = self._ask_all("stats")
        counted = Counter[int]()
        for reply in replies.values():
            counted.update(dict(reply["ages"]))
        return dict(sorted(counted.items()))
