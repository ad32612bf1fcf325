"""Replicas that differ: ranks would train different models, and a checkpoint would mix them.

Ranks that hold the same shard of a parameter apply the same gradient to it. So the shards, called
replicas, stay bitwise equal, and a checksum of their bits shows a difference. The checksums travel
in the sum of the losses, which each backward makes anyway, and are read one step later:

    step n        optimizer writes W
    step n + 1    begins: do the bits of W differ from a replica's? The answer stays on the device
                  last backward: sum of (loss, answer, words of counts and settings) over the ranks
    step n + 2    begins: the sums are on the host by now, and all ranks refuse a difference

So a difference of step n is refused before the gradients of step n + 2. The first
NUM_ALWAYS_CHECKED steps compare, then each STEPS_APART-th. A save, `state_dict`, an evaluation and
the end of the script compare at once, the states of the optimizers too.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.frozen import bits_of
from phalanx.comm.comm import Comm, local_shard
from phalanx.comm.join import job_store
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.models.attention import to_device
from phalanx.script.checksums import (
    sums_show_equal,
    with_squares,
    words_of,
    words_of_tensors,
)
from phalanx.train.clip import sharded_axes

NUM_ALWAYS_CHECKED: Final = 20
"""Number of first steps that all compare; most mistakes show there."""

STEPS_APART: Final = 50
"""After them, number of steps from one that compares to the next."""


def is_compared(number: int) -> bool:
    """Return whether checks that cost time look at step `number`, from 1."""
    return number <= NUM_ALWAYS_CHECKED or number % STEPS_APART == 0


_NUM_WORDS: Final = 2 * 3
"""Numbers of the checksum of a text: words and their squares."""

STEPS, BATCHES, CLIPS = "steps", "batches", "clips"

_MESSAGES: Final = {
    STEPS: "rank {0} has taken {1} steps and rank {2} has taken {3}, so their weights differ; each "
    "rank must step, or skip a step, when the others do",
    BATCHES: "the ranks have read different numbers of batches, {1} on rank {0} and {3} on rank "
    "{2}; each rank must read, or leave out, a batch when the others do",
    CLIPS: "run.clip was called {1} times on rank {0} and {3} times on rank {2}; call it on every "
    "rank, and not under `if run.is_first`",
}

_ADVICE: Final = {
    "the kind": "make the same optimizer on every rank",
    "the arguments": "give run.clip the same on every rank",
    "lr ": "step the scheduler on every rank, and with the same value: a scheduler that takes a "
    "loss, such as ReduceLROnPlateau, needs the loss that run.backward returned, or a run.sum",
    "": "give it the same value on every rank",
}
"""Begin of a setting's name -> what to do if the setting differs."""


class Fact(NamedTuple):
    """A value that replicas share.

    Attributes:
        kind: 0 a count, 1 a setting of an optimizer, 2 a weight, 3 a state of an optimizer. Causes
            come before effects.
        place: which shard of a tensor it is, such as "fsdp=1"; else empty.
        value: as text; the bits of a tensor.
        total: sum of a tensor's elements, for messages.
    """

    kind: int
    place: str
    value: str
    total: float = 0.0


Facts = Mapping[str, Fact]


class AsyncHostCopy:
    """An asynchronous copy of a tensor to the host."""

    def __init__(self, tensor: Tensor) -> None:
        """Start a non-blocking copy; kernels launched later do not delay it."""
        self._copy = tensor.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record()

    def tolist(self) -> list[float]:
        """Wait for the copy, and return the elements of a vector."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()


class _Replica(NamedTuple):
    """A tensor, the axes along which ranks hold replicas of it, and which shard it is."""

    tensor: Tensor
    axes: tuple[str, ...]
    place: str

    def fact(self, kind: int) -> Fact:
        shard = local_shard(self.tensor.detach())
        numbers = shard.real if shard.is_complex() else shard
        return Fact(kind, self.place, str(int(bits_of(shard))), float(numbers.double().sum()))


class Replicas:
    """Compares what must be equal on all ranks: weights, optimizers, and counts of calls.

    Attributes:
        is_checked: whether `check` has run since the current step began.
    """

    def __init__(
        self,
        comm: Comm,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Watch the `parameters` that `optimizers` update; more optimizers may be added later."""
        self._comm, self._optimizers = comm, optimizers
        self._weights: dict[str, _Replica] = {}
        for name, parameter in parameters.items():
            split = sharded_axes(parameter) if isinstance(parameter, DTensor) else ()
            over = {member for axis in split for member in comm.axes_of(axis)}
            place = ",".join(f"{axis}={comm.coord(axis)}" for axis in comm.axes if axis in over)
            axes = tuple(axis for axis in comm.axes if axis not in over)
            self._weights[name] = _Replica(parameter, axes, place)
        self._counts: dict[str, int | str] = {CLIPS: 0}
        self._settings: dict[str, Fact] = {}
        self._sums: AsyncHostCopy | None = None
        self._apart = torch.zeros((), dtype=torch.float64, device=comm.device)
        self._number = 0  # of the current step, equal on all ranks
        self.is_checked = self._is_rounding = self._is_refused = False
        self._shards = self._shards_now()
        self._version = self._versions()

    def check_last_step(self, call: str = "backward") -> bool:
        """Begin a step: refuse differences that the last step found, and look at the weights.

        Returns:
            Whether `seen` of `words` is equal on all ranks; True if the last step did not send it.
        """
        self._number, self.is_checked = self._number + 1, False
        if self._sums is None:
            return True
        *sums, apart = self._sums.tolist()
        if apart or not sums_show_equal(sums[:_NUM_WORDS], self._comm.size("job")):
            self._refuse(call)
        self._apart = torch.zeros_like(self._apart)
        if is_compared(self._number):
            self._apart = self._are_apart(self._weights).double()
            self._shards = self._shards_now()
        return sums_show_equal(sums[_NUM_WORDS:], self._comm.size("job"))

    def words(self, counts: Mapping[str, int], seen: str = "") -> Tensor:
        """Return the values that a backward's all-reduce must sum over the job; float64."""
        if self._comm.size("job") == 1:
            return self._apart.new_zeros(0)
        self._counts.update(counts)
        numbers = [0] * 2 * _NUM_WORDS
        if is_compared(self._number):
            self._settings = self._settings_now()
            numbers = [*with_squares(words_of(repr(self._settings))), *with_squares(words_of(seen))]
        sent = to_device(torch.tensor([*numbers, 0.0], dtype=torch.float64), self._comm.device)
        sent[-1] = self._apart
        return sent

    def store_sums(self, sums: Tensor) -> None:
        """Store the job's sums of `words`, for the next step."""
        if self._comm.size("job") > 1:
            self._sums = AsyncHostCopy(sums)

    def check(self, call: str, steps_done: int) -> None:
        """Compare counts, settings, weights and states now; every rank calls this together."""
        if self._comm.size("job") == 1:
            return
        self._counts[STEPS] = steps_done
        self._settings = self._settings_now()
        words = self._apart.new_tensor(words_of(repr(self._settings)))
        apart = self._differ(words, tuple(self._comm.axes))
        apart = apart | self._are_apart(self._weights | self._states())
        if bool(self._comm.all_reduce(apart.to(torch.uint8), "job", "max")):
            self._refuse(call)
        self.is_checked = True

    def check_end(self, where: str, name: str, steps_done: int) -> None:
        """Refuse to end if ranks differ; compare through the store, without waiting for ranks."""
        if self._sums is None or self._is_refused:
            return
        self._counts[STEPS] = steps_done
        settings, tensors = self._settings_now(), self._facts_of_tensors()
        # After the last step weights may be written, as for an export, and `model.half()` changes
        # their addresses. Training keeps these, except in the first forward of FSDP2, before any
        # comparison.
        pairs = zip(self._shards, self._shards_now(), strict=True)
        is_written = self._versions() != self._version or any(
            before.data_ptr() != now.data_ptr() for before, now in pairs
        )
        tensors = {} if is_written or self._is_rounding else tensors
        store = job_store()
        for place in dict.fromkeys(["", *(fact.place for fact in tensors.values())]):
            mine = settings | {n: fact for n, fact in tensors.items() if fact.place == place}
            key, text = f"phalanx/{where}/{name}/{place}", json.dumps([self._comm.rank, mine])
            # The rank that comes first writes its facts, and each later one reads them.
            rank, theirs = json.loads(store.compare_set(key, "", text).decode())
            pair = [(rank, {n: Fact(*each) for n, each in theirs.items()}), (self._comm.rank, mine)]
            if not all(any(fact.kind > 1 for fact in facts.values()) for _, facts in pair):
                pair = [(r, {n: f for n, f in facts.items() if f.kind < 2}) for r, facts in pair]
            if (difference := first_difference(pair)) is not None:
                raise ScriptError(f"{where} with ranks that differ: {difference[1]}")

    def count_clip(self, max_norm: float, p: float) -> None:
        """Record a call of `run.clip`."""
        self._counts[CLIPS] = int(self._counts[CLIPS]) + 1
        self._counts["the arguments of run.clip"] = f"{max_norm!r}, p={p!r}"

    def note_step(self) -> None:
        """Record that an optimizer has written weights."""
        if self._comm.size("job") > 1:
            self._version = self._versions()

    # Values that are equal on all ranks.

    def _versions(self) -> int:
        """Return the number of in-place writes to weights; a DTensor's shard counts its own."""
        return sum([shard._version for shard in self._shards])

    @torch.no_grad()
    def _shards_now(self) -> list[Tensor]:
        return [local_shard(replica.tensor).detach() for replica in self._weights.values()]

    def _settings_now(self) -> dict[str, Fact]:
        """Return counts, and settings of the optimizers."""
        settings = {n: Fact(int(n not in _MESSAGES), "", str(v)) for n, v in self._counts.items()}
        for number, optimizer in enumerate(self._optimizers):
            kind = type(optimizer).__name__
            settings[f"the kind of optimizer {number}"] = Fact(1, "", kind)
            for at, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    is_size = name == "params"
                    name = "the number of parameters" if is_size else name
                    if text := str(len(value)) if is_size else _text(value):
                        settings[f"{name} of group {at} of {kind}"] = Fact(1, "", text)
        return settings

    def _states(self) -> dict[str, _Replica]:
        """Return the state tensors of the optimizers, by key and parameter name."""
        return {
            f"the optimizer's {key} of {name}": weight._replace(tensor=value.to(self._comm.device))
            for optimizer in self._optimizers
            for name, weight in self._weights.items()
            if weight.tensor in optimizer.state
            for key, value in optimizer.state[weight.tensor].items()
            if isinstance(value, Tensor)
        }

    def _facts_of_tensors(self) -> dict[str, Fact]:
        weights = {name: replica.fact(2) for name, replica in self._weights.items()}
        return weights | {name: replica.fact(3) for name, replica in self._states().items()}

    # Comparisons of these values.

    @torch.no_grad()
    def _are_apart(self, tensors: Mapping[str, _Replica]) -> Tensor:
        """Return whether this rank's tensors differ from their replicas; bool, 0-d."""
        alike: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for replica in tensors.values():
            alike[replica.axes].append(local_shard(replica.tensor))
        apart = torch.zeros((), dtype=torch.bool, device=self._comm.device)
        for axes, shards in sorted(alike.items()):
            if math.prod(self._comm.axes[axis] for axis in axes) > 1:
                apart = apart | self._differ(words_of_tensors(shards), axes)
        return apart

    def _differ(self, words: Tensor, axes: Sequence[str]) -> Tensor:
        """Return whether ranks along `axes` have different words; bool, 0-d."""
        sums = torch.cat([words, words**2])
        for axis in axes:
            self._comm.all_reduce(sums, axis)
        total, squares = sums.chunk(2)
        return (math.prod(self._comm.axes[axis] for axis in axes) * squares != total**2).any()

    def _refuse(self, call: str) -> None:
        """Raise the first difference, or warn if it is rounding; every rank calls this together."""
        states = self._states()
        ranks = gather_objects((self._comm.rank, {**self._settings, **self._facts_of_tensors()}))
        difference = first_difference(ranks)
        if difference is None:  # equal again
            return
        kind, message = difference
        # If some ranks lack a state tensor, the broadcasts of `_differ_by_rounding` do not match.
        is_rounding = kind > 1 and all(facts.keys() == ranks[0][1].keys() for _, facts in ranks)
        if not (is_rounding and self._differ_by_rounding(self._weights | states)):
            self._is_refused = True
            raise ScriptError(f"{call}: {message}")
        if not self._is_rounding and self._comm.is_first:
            warnings.warn(
                f"{message}; they differ by no more than rounding, as on hosts with different "
                "processors",
                stacklevel=2,
            )
        self._is_rounding = True

    @torch.no_grad()
    def _differ_by_rounding(self, tensors: Mapping[str, _Replica]) -> bool:
        """Return whether replicas differ by at most 4 eps of their maximum; all ranks call this."""
        worst = torch.zeros((), dtype=torch.float64, device=self._comm.device)
        for replica in tensors.values():
            own = local_shard(replica.tensor)
            first = own.clone()
            for axis in replica.axes:
                self._comm.broadcast(first, axis)
            if own.numel() and own.is_floating_point():
                scale = first.abs().max().double() * torch.finfo(own.dtype).eps
                gap = (own - first).abs().max().double()
                gap = torch.where(gap == 0, 0.0, gap / scale).nan_to_num(nan=float("inf"))
                worst = torch.maximum(worst, gap)
            else:
                worst = torch.maximum(worst, (own != first).any() * float("inf"))
        return bool(self._comm.all_reduce(worst, "job", "max") <= 4)


def first_difference(ranks: Sequence[tuple[int, Facts]]) -> tuple[int, str] | None:
    """Return kind and message of the first difference, causes first; None if all are equal.

    Args:
        ranks: numbers of ranks with their facts.
    """
    kinds = {name: fact.kind for _, facts in ranks for name, fact in facts.items()}
    for name in sorted(kinds, key=lambda name: kinds[name]):
        first: dict[str, tuple[int, Fact | None]] = {}  # of each shard
        for rank, facts in ranks:
            fact = facts.get(name)
            other, theirs = first.setdefault(fact.place if fact else "", (rank, fact))
            if (fact and fact.value) != (theirs and theirs.value):
                return kinds[name], _message(name, other, theirs, rank, fact)
    return None


def _message(name: str, rank: int, fact: Fact | None, other: int, theirs: Fact | None) -> str:
    is_tensor = any(each is not None and each.kind > 1 for each in (fact, theirs))
    if not is_tensor:
        first, second = (each.value if each else "not set" for each in (fact, theirs))
        if name in _MESSAGES:
            return _MESSAGES[name].format(rank, first, other, second)
        advice = next(advice for begin, advice in _ADVICE.items() if name.startswith(begin))
        return f"{name} is {first} on rank {rank} and {second} on rank {other}; {advice}"
    if fact is None or theirs is None:
        how = f"exists only on rank {other if fact is None else rank}"
    else:
        digits = 17 if f"{fact.total:.6g}" == f"{theirs.total:.6g}" else 6
        first, second = f"{fact.total:.{digits}g}", f"{theirs.total:.{digits}g}"
        how = f"differs: its elements add up to {first} on rank {rank} and {second} on rank {other}"
    return (
        f"{name} {how}; weights, gradients or the optimizer's state were changed on one rank only; "
        "change them on every rank, weights perhaps before run.prepare, and clip gradients by "
        "run.clip"
    )


def _text(value: Any) -> str:
    """Return a setting as text; empty if comparing it would be expensive, as for GPU tensors."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.ndim == 0 and value.device.type == "cpu" else ""
    if isinstance(value, list | tuple):
        parts = [_text(each) for each in value]
        return f"({', '.join(parts)})" if all(parts) else ""
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else ""
