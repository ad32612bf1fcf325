"""A shard of the weights, with its optimizers and the state of pending updates.

It is a deterministic state machine: the same operations in the same order leave a primary and its
backup bitwise equal. A push is identified by its task, (clock, slot), whichever worker sends it:
a second push of a task is acknowledged and changes nothing.

[Note: Order of a sum] The gradients of a clock are added in the order of their slots, in whatever
order they arrive, so that every run computes bitwise equal weights. A gradient that arrives before
gradients of lower slots waits for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from phalanx.comm.reductions import power_sum
from phalanx.server.consistency import Consistency, DoneTasks
from phalanx.server.message import DTYPES
from phalanx.server.rule import Optimizers, Settings
from phalanx.server.shared import IS_POSSIBLE, SharedTensors
from phalanx.server.table import flat_parts, sparse_of

MOST_TOTALS: Final = 16
"""Number of updates whose totals are kept, for workers that request them late."""


ALL_WORKERS: Final = 1 << 30
"""Number of live workers while it is not known: then a quorum waits for all that it needs."""


class Pushed(NamedTuple):
    """The numbers of a pushed task.

    Attributes:
        tokens: number of tokens, which is the weight of the task's gradient in the mean.
        base: version of the weights with which the gradient was computed.
        loss: sum of the losses of the tokens.
        rate: learning rate, used by updates that do not belong to a clock.
    """

    tokens: float
    base: int
    loss: float
    rate: float


@dataclass
class PendingUpdate:
    """The gradients pushed so far for one pending update.

    Attributes:
        tasks: slot -> numbers of its task.
        total: sum, weighted by tokens, of the gradients of the first `num_added` slots.
        num_added: number of slots in `total`.
        waiting: slot -> gradient that waits for gradients of lower slots.
        is_save_due: whether worker 0 requests a checkpoint after the update.
        since_s: time of the first push, by `time.monotonic`.
    """

    tasks: dict[int, Pushed] = field(default_factory=dict[int, Pushed])
    total: list[Tensor] = field(default_factory=list[Tensor])
    num_added: int = 0
    waiting: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    is_save_due: bool = False
    since_s: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> float:
        """Number of tokens of all slots, see [Note: Order of a sum]."""
        return sum(self.tasks[slot].tokens for slot in sorted(self.tasks))

    @property
    def loss(self) -> float:
        """Sum of the losses of all tokens, see [Note: Order of a sum]."""
        return sum(self.tasks[slot].loss for slot in sorted(self.tasks))

    @property
    def values(self) -> list[Tensor]:
        """The stored elements of `total`, which may be sparse."""
        return [flat.values() if flat.is_sparse else flat for flat in self.total]

    def add(
        self, slot: int, task: Pushed, grads: Sequence[Tensor], empty: Callable[[], list[Tensor]]
    ) -> None:
        """Add one gradient, the mean over its tokens, see [Note: Order of a sum].

        `empty` returns uninitialized memory for the sum. `grads` has the chunks of each flat weight
        in order, then `table.flat_parts` of each table.
        """
        self.tasks[slot], self.waiting[slot] = task, list(grads)
        # Slots arrive in any order, and are added in theirs:
        #
        #     arrives   waiting        num_added    total
        #     2         {2}            0
        #     0         {2}            1            g0 w0    written, so no zeros
        #     1         {}             3            + g1 w1 + g2 w2
        #
        # An asynchronous update numbers its slots by arrival, so that none waits.
        while self.num_added in self.waiting:
            chunks = iter(self.waiting.pop(self.num_added))
            weight, is_first = self.tasks[self.num_added].tokens, not self.total
            self.total = self.total or empty()
            for number, flat in enumerate(self.total):
                if flat.is_sparse:
                    grad = sparse_of(next(chunks), next(chunks), flat.shape)
                    self.total[number] = flat.add(grad, alpha=weight)
                    continue
                at = 0
                while at < flat.numel():
                    chunk = next(chunks)
                    part = flat[at : at + chunk.numel()]
                    at += chunk.numel()
                    if is_first:
                        torch.mul(chunk, weight, out=part)
                    else:
                        part.add_(chunk, alpha=weight)
            self.num_added += 1


class Shard:
    """A shard of the weights, with its optimizers and the state of pending updates.

    Attributes:
        spec: `dtype`, `rule`, `consistency`, `sizes` of the weights, `tables` and `p`, the exponent
            of the gradient norm. The last weights are tables, with rows of the widths `tables`.
        version: number of updates applied.
        index: number of operations performed that change the shard.
        num_workers: number of live workers, as a worker last reported, for a quorum.
        ages: staleness in versions -> number of gradients applied with it.
        optimizers: optimizers of the weights, with their state.
        memory: shared memory of the weights, which workers on this host map; None without it.
        uploads: slot -> state that its worker has uploaded for a checkpoint of this version.
        done: tasks that were pushed.
    """

    def __init__(
        self, spec: Settings, weights: Sequence[Tensor], kept: Sequence[Sequence[Tensor]] = (),
        version: int = 0, steps: float = 0.0,
    ) -> None:  # fmt: skip
        """Copy weights, and restore optimizer state `kept` of each weight as of `steps` steps."""
        self.spec = spec
        self.consistency = Consistency(**spec["consistency"])
        self.version, self.index, self.num_workers = version, 0, ALL_WORKERS
        self.ages = Counter[int]()
        self.done = DoneTasks(self.consistency.num_slots, version)
        self.open: dict[int, PendingUpdate] = {}
        self._latest: dict[int, tuple[int, int]] = {}  # slot -> clock and update of its last push
        self.uploads: dict[int, list[Tensor]] = {}
        self._totals: dict[int, list[float]] = {}
        self.dtype = DTYPES[spec["dtype"]]
        self.memory = SharedTensors(spec["sizes"], self.dtype) if IS_POSSIBLE else None
        shared = None if self.memory is None else self.memory.tensors
        self.weights = shared or [torch.empty(n, dtype=self.dtype) for n in spec["sizes"]]
        torch._foreach_copy_(self.weights, list(weights))  # pyright: ignore[reportPrivateUsage]
        widths: list[int] = spec.get("tables", [])
        self._num_flat = len(self.weights) - len(widths)
        flats, tables = self.weights[: self._num_flat], self.weights[self._num_flat :]
        self._tables = [table.view(-1, w) for table, w in zip(tables, widths, strict=True)]
        self.optimizers = Optimizers(spec["rule"], flats, self._tables)
        self.optimizers.restore(kept, steps)
        if self.memory is not None:
            self.memory.publish(version)
        self._published: tuple[int, list[Tensor]] | None = None

    # Operations, which change the shard.

    def perform(self, op: str, fields: Any, tensors: Sequence[Tensor]) -> None:
        """Perform an operation, identically on a primary and on its backup."""
        match op:
            case "push":
                self.push(fields, tensors)
            case "apply":
                rate, scale = fields["rate"], fields["scale"]
                self.apply(int(fields["version"]), rate, scale, fields.get("noted"))
            case "close":
                self.apply_asynchronous()
            case "upload":
                self.uploads[int(fields["slot"])] = list(tensors)
            case "live":
                self.num_workers = int(fields["num_live"])
            case _:
                raise ValueError(f"unknown operation '{op}'")
        self.index += 1

    def push(self, fields: Any, grads: Sequence[Tensor]) -> bool:
        """Add the gradient of a task to its update; return False if it was pushed before."""
        clock, slot = int(fields["clock"]), int(fields["slot"])
        if self.done.has(clock, slot):
            return False
        # All that may be malformed is read here, before anything has changed.
        self._check_gradients(grads)
        task = Pushed(
            float(fields["tokens"]), int(fields["base"]), float(fields["loss"]),
            float(fields.get("rate", 0.0)),
        )  # fmt: skip
        self.num_workers = int(fields.get("num_live", self.num_workers))
        self.done.add(clock, slot)
        version = self.version if self.consistency.is_asynchronous else clock
        self._latest[slot] = clock, version
        update = self.open.setdefault(version, PendingUpdate())
        # A synchronous task belongs to the update of its clock, which may lie ahead of the weights
        # by `staleness` versions; an asynchronous one to the update that is open now. In an
        # asynchronous update, slots are numbered in the order of arrival.
        number = len(update.tasks) if self.consistency.is_asynchronous else slot
        update.is_save_due |= bool(fields.get("is_save_due"))
        update.add(number, task, grads, self._no_sum)
        return True

    def _check_gradients(self, grads: Sequence[Tensor]) -> None:
        """Check that the tensors of a push are chunks of each flat weight, then table rows.

        Raises:
            ValueError: they are not.
        """
        at, dtypes = 0, {self.dtype}
        if self.dtype == torch.float32:
            dtypes.add(torch.bfloat16)  # workers of `dp:local` round what their steps changed
        for flat in self.weights[: self._num_flat]:
            left = flat.numel()
            while left > 0:
                chunk = grads[at] if at < len(grads) else flat[:0]
                if chunk.dtype not in dtypes or not 0 < chunk.numel() <= left:
                    raise ValueError(
                        f"tensor {at} of the gradients is {chunk.numel()} of {chunk.dtype}; "
                        f"expected 1 to {left} of {self.dtype}"
                    )
                left -= chunk.numel()
                at += 1
        if len(grads) != at + 2 * len(self._tables):
            num = len(grads) - at
            raise ValueError(f"{num} tensors of table rows; expected {2 * len(self._tables)}")
        for table in self._tables:
            sparse_of(grads[at], grads[at + 1], table.shape)
            at += 2

    def update_of(self, clock: int, slot: int) -> int:
        """Return the number of the update with a task that was pushed.

        A worker that repeats an unanswered push gets the number that the lost answer had. Of a task
        that is not the last of its slot, the result is the last applied update.
        """
        last, version = self._latest.get(slot, (-1, 0))
        return version if last == clock else self.version - 1

    def _no_sum(self) -> list[Tensor]:
        """Return memory for a sum of gradients: uninitialized flats, and tables without rows."""
        flats = [torch.empty_like(flat) for flat in self.weights[: self._num_flat]]
        rows = torch.empty(0, dtype=torch.int64)
        return flats + [sparse_of(rows, table[:0], table.shape) for table in self._tables]

    def completed(self) -> int:
        """Return the version that the weights have once all complete updates are applied."""
        version = self.version
        while (update := self.open.get(version)) is not None:
            waited_s = time.monotonic() - update.since_s
            if not self.consistency.is_due(len(update.tasks), waited_s, self.num_workers):
                break
            version += 1
        return version

    def totals(self) -> list[list[float]]:
        """Return version, tokens, loss, norm and save request of each recent complete update.

        The norm is the sum of |x|^p over this shard's summed gradient, or max |x| for p = inf; the
        save request is 1 if worker 0 requests a checkpoint, else 0.
        """
        for version in range(self.version, self.completed()):
            self.noted(version)
        return [[version, *numbers] for version, numbers in self._totals.items()]

    def noted(self, version: int) -> list[float]:
        """Return the totals of a complete update, which are sent to the backup with `apply`.

        They are computed here if the worker got them from the shard's previous primary.
        """
        if version not in self._totals:
            update = self.open[version]
            power = float(power_sum(update.values, self.spec["p"])) if update.total else 0.0
            numbers = [update.tokens, update.loss, power, float(update.is_save_due)]
            self._keep_totals(version, numbers)
        return self._totals[version]

    def _keep_totals(self, version: int, totals: list[float]) -> None:
        self._totals[version] = totals
        while len(self._totals) > MOST_TOTALS + self.consistency.staleness:
            del self._totals[next(iter(self._totals))]

    def apply(
        self, version: int, rate: float, scale: float | None, noted: list[float] | None = None
    ) -> bool:
        """Apply the update that follows `version`; return False if it was applied before.

        The gradient, the mean over all tokens, is multiplied by `scale`; None leaves the weights
        unchanged. A backup gets the update's totals by `noted`, because workers do not request
        totals from it.
        """
        if version != self.version:
            return False
        if noted is not None:
            self._keep_totals(version, noted)
        update = self.open.pop(version)
        for task in update.tasks.values():
            self.ages[max(0, version - task.base)] += 1
        if scale is not None and update.total:
            mean = scale / max(update.tokens, 1.0)
            torch._foreach_mul_(update.values, mean)  # pyright: ignore[reportPrivateUsage]
            with nullcontext() if self.memory is None else self.memory.changing():
                self.optimizers.step(update.total, rate)
        self.version += 1
        self.uploads.clear()
        return True

    def apply_asynchronous(self) -> None:
        """Apply an asynchronous update; with k of N gradients, scale the learning rate by k/N."""
        update = self.open[self.version]
        rate = max(task.rate for task in update.tasks.values())
        self.apply(self.version, rate * (len(update.tasks) / self.consistency.num_slots), 1.0)

    # Reading.

    def published(self) -> list[Tensor]:
        """Return a copy of the weights, without tables, that stays unchanged; one copy per version.

        ZeroMQ sends its memory later, when the weights may have changed.
        """
        if self._published is None or self._published[0] != self.version:
            flats = self.weights[: self._num_flat]
            self._published = self.version, [flat.clone() for flat in flats]
        return self._published[1]

    def rows(self, table: int, rows: Tensor) -> Tensor:
        """Return a flat copy of rows of a table.

        Raises:
            IndexError: a row is not in the table.
        """
        return self._tables[table][rows].view(-1)

    def gradient(self) -> list[Tensor]:
        """Return the next update's gradient sum, weighted by tokens, without tables."""
        update = self.open.get(self.version)
        return [] if update is None else update.total[: self._num_flat]

    def close(self) -> None:
        """Close the shared-memory file."""
        if self.memory is not None:
            self.memory.close()

    # Serialization, for a new backup.

    def state(self) -> tuple[Settings, list[Tensor]]:
        """Return fields and copied tensors from which `of_state` makes an equal shard."""
        kept = self.optimizers.kept()
        fields: Settings = {
            "spec": self.spec, "version": self.version, "index": self.index,
            "num_kept": [*map(len, kept)], "steps": self.optimizers.steps,
            "num_workers": self.num_workers, "ages": list(self.ages.items()),
            "done": list(self.done.below.items()), "ahead": list(self.done.ahead),
            "latest": list(self._latest.items()), "totals": list(self._totals.items()),
            "uploads": [(slot, len(each)) for slot, each in self.uploads.items()],
            "open": [
                {
                    "version": version, "tasks": list(update.tasks.items()),
                    "num_added": update.num_added, "has_total": bool(update.total),
                    "waiting": [(slot, len(each)) for slot, each in update.waiting.items()],
                    "is_save_due": update.is_save_due,
                }
                for version, update in self.open.items()
            ],
        }  # fmt: skip
        # The tensors follow in one list, whose lengths are in the fields:
        #
        #     weights | state of weight 0, 1, ... | uploads of each slot | for each open update:
        #     the sum so far (tables as rows and values), gradients of waiting slots
        tensors = [*self.weights, *chain(*kept), *chain(*self.uploads.values())]
        for update in self.open.values():
            parts = [*update.total, *chain(*update.waiting.values())]
            tensors += [flat for part in parts for flat in flat_parts(part)]
        return fields, [flat.clone() for flat in tensors]

    @classmethod
    def of_state(cls, fields: Settings, tensors: Sequence[Tensor]) -> Shard:
        """Create a shard from the fields and tensors that `state` returned."""
        (weights, *kept), parts = split_parts(tensors, fields["spec"], fields["num_kept"])
        shard = cls(fields["spec"], weights, kept, fields["version"], fields["steps"])
        shard.index, shard.num_workers = fields["index"], fields["num_workers"]
        shard.ages = Counter(dict(fields["ages"]))
        shard.done.below = dict(fields["done"])
        shard.done.ahead = {(clock, slot) for clock, slot in fields["ahead"]}
        shard._latest = {slot: (clock, version) for slot, (clock, version) in fields["latest"]}
        shard._totals = dict(fields["totals"])

        def take(num: int) -> list[Tensor]:
            return [each.clone() for each in islice(parts, num)]

        shard.uploads = {slot: take(num) for slot, num in fields["uploads"]}
        for each in fields["open"]:
            update = shard.open[each["version"]] = PendingUpdate()
            update.tasks = {slot: Pushed(*numbers) for slot, numbers in each["tasks"]}
            update.num_added, update.is_save_due = each["num_added"], each["is_save_due"]
            if each["has_total"]:
                update.total = take(shard._num_flat)
                for table in shard._tables:
                    rows, values = take(2)
                    update.total.append(sparse_of(rows, values, table.shape))
            update.waiting = {slot: take(num) for slot, num in each["waiting"]}
        return shard


def split_parts(
    tensors: Sequence[Tensor], spec: Settings, num_kept: Sequence[int]
) -> tuple[list[list[Tensor]], Iterator[Tensor]]:
    """Split tensors into the weights, the optimizer state of each weight, and an iterator of more.

    Raises:
        ValueError: there are too few tensors.
    """
    nums = [len(spec["sizes"]), *num_kept]
    if sum(nums) > len(tensors):
        raise ValueError(f"{len(tensors)} tensors; expected {sum(nums)}")
    parts = iter(tensors)
    return [list(islice(parts, num)) for num in nums], parts
