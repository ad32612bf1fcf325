"""What a worker does with the weights: create, push, pull, and read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.server.message import WireMessage, num_frames
from phalanx.server.placement import CHUNK_BYTES, WeightRange, chunks_of, place
from phalanx.server.requests import Requests
from phalanx.server.role import Settings
from phalanx.server.shared import SharedView, deal
from phalanx.server.wire import MOST_FRAME_BYTES


class Client(Requests):
    """A worker's view of the weights.

    Attributes:
        is_shared: whether weights of a server of this host are read from its memory.
        sent_bytes, received_bytes: of gradients and weights, since the start.
        applied: updates that every server had applied when it was last asked for totals.
        done: clocks of each slot that were pushed to all servers by the last answer.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.sent_bytes = self.received_bytes = 0
        self.applied, self.done = 0, dict[int, int]()
        self._views: dict[int, tuple[Any, SharedView]] = {}
        self.is_shared = True

    def lay_out(
        self, sizes: Sequence[int], dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Place weights, groups of these numbers of elements, over the servers.

        Raises:
            ConfigError: a server's part of a group is larger than a message may be.
        """
        placed = place(chunks_of(sizes, dtype.itemsize, chunk_bytes), self.map["homes"])
        self._chunks: list[list[list[WeightRange]]] = [
            [[chunk for chunk in placed[name] if chunk.group == g] for g in range(len(sizes))]
            for name in sorted(placed)
        ]
        self._dtype = dtype
        largest = max(size for shard in range(self.num_shards) for size in self._sizes(shard))
        if (num_bytes := largest * dtype.itemsize) > MOST_FRAME_BYTES:
            num = math.ceil(self.num_shards * num_bytes / MOST_FRAME_BYTES)
            raise ConfigError(
                f"a server would hold {num_bytes} bytes of a group of weights; at most "
                f"{MOST_FRAME_BYTES} go in a message; the nearest is --server.num-servers {num + 1}"
            )

    def _sizes(self, shard: int) -> list[int]:
        return [sum(c.end - c.begin for c in chunks) for chunks in self._chunks[shard]]

    def _parts(self, shard: int, flats: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the chunks of a shard in each of some flat tensors."""
        pairs = zip(flats, self._chunks[shard], strict=True)
        return [[flat[chunk.begin : chunk.end] for chunk in chunks] for flat, chunks in pairs]

    def _cut(self, shard: int, group: int, flat: Tensor) -> Tensor:
        """Return the chunks of a shard in a flat tensor of a group, one after the other."""
        parts = [flat[chunk.begin : chunk.end] for chunk in self._chunks[shard][group]]
        return torch.cat(parts or [flat[:0]])

    def create(
        self, weights: Sequence[Tensor], rule: Settings, p: float, version: int = 0,
        kept: Sequence[Sequence[Tensor]] = (), steps: float = 0.0,
    ) -> None:  # fmt: skip
        """Give the servers the first weights, and what an optimizer keeps of each after steps."""
        requests: dict[int, WireMessage] = {}
        for shard in range(self.num_shards):
            tensors = [self._cut(shard, group, flat) for group, flat in enumerate(weights)]
            for group, flats in enumerate(kept):
                tensors += [self._cut(shard, group, flat) for flat in flats]
            dtype = str(self._dtype).removeprefix("torch.")
            spec = {"sizes": self._sizes(shard), "dtype": dtype, "rule": rule, "p": p}
            fields = {"spec": {**spec, "law": vars(self.law)}, "version": version, "steps": steps}
            requests[shard] = WireMessage("init", fields, tensors)
        self.ask(requests)

    def push(
        self, clock: int, slot: int, grads: Sequence[Tensor], *, base: int, tokens: float,
        loss: float, rate: float = 0.0, is_save_due: bool = False,
    ) -> int:  # fmt: skip
        """Push the gradient of a task, the mean over its tokens, computed with version `base`.

        Returns when every server and its backup has it: the number of the update that it is in, of
        an asynchronous kind.
        """
        fields = {"clock": clock, "slot": slot, "base": base, "tokens": tokens, "loss": loss}
        fields |= {"rate": rate, "num_live": self.num_live, "is_save_due": is_save_due}
        requests: dict[int, WireMessage] = {}
        for shard in range(self.num_shards):
            tensors = [part for parts in self._parts(shard, grads) for part in parts]
            requests[shard] = WireMessage("push", fields, tensors)
            self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        replies = self.ask(requests)
        self._note_done(replies.values())
        self.ask_scheduler("finish", clock=clock, slot=slot, done=list(self.done.items()))
        return min(int(reply["update"]) for reply in replies.values())

    def totals(
        self, needed: int, idle: Callable[[], None] | None = None
    ) -> dict[int, list[list[float]]]:
        """Wait until `needed` updates are complete; return the totals of the latest, by version.

        Of each what `Shard.totals` says of each shard. `idle` is called while this waits.
        """
        asked = WireMessage("totals", {"needed": needed})
        replies = self.ask(dict.fromkeys(range(self.num_shards), asked), idle)
        found: dict[int, list[list[float]]] = {}
        for shard in range(self.num_shards):  # in this order all workers add up the same
            for version, *numbers in replies[shard]["totals"]:
                found.setdefault(int(version), []).append(numbers)
        self.applied = min(int(reply["version"]) for reply in replies.values())
        self._note_done(replies.values())
        return {v: each for v, each in found.items() if len(each) == self.num_shards}

    def _note_done(self, replies: Iterable[WireMessage]) -> None:
        of_each = [dict(reply["done"]) for reply in replies]
        self.done = {slot: min(done[slot] for done in of_each) for slot in of_each[0]}

    def pull(
        self, targets: Sequence[Tensor], needed: int,
        recipes: Sequence[tuple[int, float, float | None]] = (),
        idle: Callable[[], None] | None = None,
    ) -> int:  # fmt: skip
        """Copy the weights, once they are of version `needed`, into flat tensors.

        The recipes, (version, rate, scale), say how updates are applied before that.

        Returns:
            The oldest version of a part.
        """
        fields = {"needed": needed, "recipes": list(recipes), "shared": self.is_shared}
        replies = self.ask(dict.fromkeys(range(self.num_shards), WireMessage("pull", fields)), idle)
        for shard, reply in replies.items():
            parts = self._parts(shard, targets)
            if "place" in reply.fields and not self._read(shard, reply["place"], parts):
                return self.pull(targets, needed, recipes)
            sent = iter(reply.tensors)
            for size, each in zip(self._sizes(shard), parts, strict=True):
                if reply.tensors:
                    deal(list(islice(sent, num_frames(size, self._dtype))), each)
            self.received_bytes += sum(flat.nbytes for flat in reply.tensors)
        return min(int(reply["version"]) for reply in replies.values())

    def _read(self, shard: int, where: Any, parts: Sequence[Sequence[Tensor]]) -> bool:
        """Read a shard out of its server's memory; False if that cannot be."""
        try:
            if shard not in self._views or self._views[shard][0] != where:
                view = SharedView(where, self._sizes(shard), self._dtype)
                self._views[shard] = where, view
            if self._views[shard][1].read(parts):
                return True
        except OSError:
            pass  # another host, or a server that has gone: over the network then
        self.is_shared = False
        return False

    def read(self, flats: Sequence[Sequence[Tensor]]) -> float | None:
        """Fill of each group the flat weights and what the optimizer keeps; return its steps.

        Moments are left alone where there is nothing yet, which returns None.
        """
        has_kept = True
        replies = self.ask(dict.fromkeys(range(self.num_shards), WireMessage("read")))
        for shard, reply in replies.items():
            sent = iter(reply.tensors)
            targets = [(g, each[0]) for g, each in enumerate(flats)]
            has_kept = has_kept and len(reply.tensors) > len(flats)
            if len(reply.tensors) > len(flats):
                targets += [(g, flat) for g, each in enumerate(flats) for flat in each[1:]]
            for group, target in targets:
                parts = [target[c.begin : c.end] for c in self._chunks[shard][group]]
                deal([next(sent)], parts)
        return min(float(reply["steps"]) for reply in replies.values()) if has_kept else None

    def lend(self, clock: int, flats: Sequence[Tensor]) -> None:
        """Bring flat tensors, as many of each group, for a checkpoint of version `clock`."""
        num = len(flats) // len(self._chunks[0])
        requests: dict[int, WireMessage] = {}
        for shard in range(self.num_shards):
            tensors = [self._cut(shard, at // num, flat) for at, flat in enumerate(flats)]
            fields = {"slot": self.worker, "clock": clock}
            requests[shard] = WireMessage("lend", fields, tensors)
        self.ask(requests)

    def lent(self, clock: int) -> list[list[Tensor]]:
        """Return what each worker has brought for version `clock`, once all have."""
        asked = WireMessage("lent", {"clock": clock})
        replies = self.ask(dict.fromkeys(range(self.num_shards), asked))
        groups, size = range(len(self._chunks[0])), len(replies[0].tensors) // self.law.num_slots
        totals = [sum(self._sizes(s)[group] for s in range(self.num_shards)) for group in groups]
        found: list[list[Tensor]] = []
        for slot in range(self.law.num_slots):
            num = size // len(groups)
            found.append([torch.empty(totals[at // num], dtype=self._dtype) for at in range(size)])
            for shard, reply in replies.items():
                for at, flat in enumerate(found[-1]):
                    parts = [flat[c.begin : c.end] for c in self._chunks[shard][at // num]]
                    deal([reply.tensors[slot * size + at]], parts)
        return found

    def gradient(self, flats: Sequence[Tensor], needed: int) -> None:
        """Fill flat tensors with the sum of the update that is next, each weighted by tokens.

        Waits until `needed` updates are complete.
        """
        asked = WireMessage("gradient", {"needed": needed})
        replies = self.ask(dict.fromkeys(range(self.num_shards), asked))
        for shard, reply in replies.items():
            for flat, parts in zip(reply.tensors, self._parts(shard, flats), strict=True):
                deal([flat], parts)

    def ages(self) -> dict[int, int]:
        """Return how many gradients were applied how many versions late, over all servers."""
        replies = self.ask(dict.fromkeys(range(self.num_shards), WireMessage("stats")))
        counted: dict[int, int] = {}
        for reply in replies.values():
            for age, number in reply["ages"]:
                counted[int(age)] = counted.get(int(age), 0) + int(number)
        return dict(sorted(counted.items()))
