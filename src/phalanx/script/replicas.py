"""Check that the ranks of a script still train the same model, and name the first difference.

    first `NUM_ALWAYS_CHECKED` backwards, then each `STEPS_APART`th
                                        counts and settings: checksums in the loss's all-reduce;
                                        bits of the weights
    save, state_dict, evaluation, exit  all of these, and the optimizer states

Ranks that hold the same shard of a parameter hold replicas of it. They apply the same gradient, so
replicas stay bitwise equal, and a checksum of their bits shows a difference (`bits_of`).
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Comm, local_shard
from phalanx.comm.join import job_store
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.models.attention import to_device
from phalanx.script.drift import (
    CLIPS,
    STEPS,
    WORD_BITS,
    Digest,
    RankState,
    bits_of,
    first_difference,
    sums_show_equal,
    with_squares,
    words_of,
    words_of_tensors,
)
from phalanx.train.clip import sharded_axes

NUM_ALWAYS_CHECKED: Final = 20
"""Number of first backwards that all compare; most mistakes show there."""

STEPS_APART: Final = 50
"""After them, number of backwards from one that compares to the next."""


def is_compared(number: int) -> bool:
    """Return whether checks that cost time look at backward `number`."""
    return number <= NUM_ALWAYS_CHECKED or number % STEPS_APART == 0


_SEEN: Final = 2 * 3
"""Number of checksum words of a rank's last batch of a stream, with their squares."""


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


class _ReplicatedTensor(NamedTuple):
    """A tensor, the axes along which ranks hold replicas of it, and the name of its shard."""

    tensor: Tensor
    axes: tuple[str, ...]
    place: str


class Replicas:
    """Compares the state that must be equal on all ranks of a job, see `RankState`.

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
        self._comm = comm
        self._size = comm.size("job")
        self._optimizers = optimizers
        self._weights = {name: _held(p, p, comm) for name, p in parameters.items()}
        self._clips: tuple[int, str] = 0, ""
        self._counts: dict[str, int] = {}
        self._settings: dict[str, str] = {}
        self._found: AsyncHostCopy | None = None
        self._apart = torch.zeros((), dtype=torch.float64, device=comm.device)
        self._num_backwards = self._num_numbers = 0
        self._is_due = True
        self.is_checked = self._is_rounding = self._is_refused = False
        self._shards = self._shards_now()
        self._version = self._versions()

    def check_last_step(self, call: str = "backward") -> bool:
        """Refuse differences that the last step found; compare weights if the step is due.

        Returns:
            Whether `seen` of `words` is equal on all ranks; True if the last step did not send it.
        """
        self.is_checked = False
        if self._found is None:
            return True
        found = self._found.tolist()  # from the previous step
        words, seen, apart = found[: -_SEEN - 1], found[-_SEEN - 1 : -1], found[-1]
        if apart or not sums_show_equal(words, self._size):
            if not self._is_due:
                self._take_settings(self._counts)
            self._raise_difference(call)
        at = self._num_backwards + 1  # equal on all ranks, which have reduced as many losses
        self._is_due = is_compared(at)
        self._apart = torch.zeros_like(self._apart)
        if self._is_due:
            self._apart = self._spread_of(self._weights).double()
            self._shards = self._shards_now()
        return sums_show_equal(seen, self._size)

    def words(self, counts: Mapping[str, int], seen: str = "") -> Tensor:
        """Return the values that a backward's all-reduce must sum over the job; float64."""
        if self._size == 1:
            return self._apart.new_zeros(0)
        self._num_backwards += 1
        if self._is_due:
            self._take_settings(counts)
            words = [
                *words_of(repr(self._settings)),
                *(n % 2**WORD_BITS for n in self._counts.values()),
            ]
            numbers = [*with_squares(words), *with_squares(words_of(seen))]
            self._num_numbers = len(numbers)
        else:
            self._counts = {**self._counts, **counts}
            numbers = [0.0] * self._num_numbers
        sent = to_device(torch.tensor([*numbers, 0.0], dtype=torch.float64), self._comm.device)
        sent[-1] = self._apart
        return sent

    def store_sums(self, found: Tensor) -> None:
        """Store `found`, the job's sum of `words`, for the next step."""
        if self._size > 1:
            self._found = AsyncHostCopy(found)

    def check(self, call: str, steps_done: int) -> None:
        """Compare counts, settings, weights and states now; every rank calls this together."""
        if self._size == 1:
            return
        self._take_settings({**self._counts, STEPS: steps_done})
        words = self._apart.new_tensor(words_of(repr((self._settings, self._counts))))
        apart = self._words_differ(words, tuple(self._comm.axes)) | self._spread_of(
            self._weights | self._states()
        )
        apart = self._comm.all_reduce(apart.to(torch.uint8), "job", "max")
        if bool(apart):
            self._raise_difference(call)
        self.is_checked = True

    def check_end(self, where: str, name: str, steps_done: int) -> None:
        """Refuse to end if ranks differ; compare through the store, without waiting for ranks."""
        if self._size == 1 or self._found is None or self._is_refused:
            return
        self._take_settings({**self._counts, STEPS: steps_done})
        facts = self._facts()
        # After the last step weights may be written, as for an export, and `model.half()` changes
        # their addresses. Training keeps these, except in the first forward of FSDP2, before any
        # comparison.
        pairs = zip(self._shards, self._shards_now(), strict=True)
        is_written = self._versions() != self._version or any(
            kept.data_ptr() != now.data_ptr() for kept, now in pairs
        )
        weights = {} if is_written or self._is_rounding else facts.weights
        store = job_store()
        for place in dict.fromkeys(["", *(digest.place for digest in weights.values())]):
            here = {name: each for name, each in weights.items() if each.place == place}
            mine = replace(facts, weights=here)
            key = f"phalanx/{where}/{name}/{place}"
            theirs = RankState.of_text(store.compare_set(key, "", mine.to_text()).decode())
            if not (here and theirs.weights):  # weights were written after the last step
                mine, theirs = (replace(each, weights={}, states={}) for each in (mine, theirs))
            if (found := first_difference([theirs, mine])) is not None:
                raise ScriptError(f"{where} with ranks that differ: {found.words}")

    def count_clip(self, max_norm: float, p: float) -> None:
        """Record a call of `run.clip`."""
        self._clips = self._clips[0] + 1, f"{max_norm!r}, p={p!r}"

    def note_step(self) -> None:
        """Record that an optimizer has written weights."""
        if self._size > 1:
            self._version = self._versions()

    # Helpers of the methods above.

    def _versions(self) -> int:
        """Return the number of in-place writes to weights; a DTensor's shard counts its own."""
        return sum([shard._version for shard in self._shards])

    @torch.no_grad()
    def _shards_now(self) -> list[Tensor]:
        return [local_shard(held.tensor).detach() for held in self._weights.values()]

    def _take_settings(self, counts: Mapping[str, int]) -> None:
        """Read the current counts and settings."""
        self._counts = {**counts, CLIPS: self._clips[0]}
        self._settings = _settings(self._optimizers)
        if self._clips[0]:
            self._settings["the arguments of run.clip"] = self._clips[1]

    def _states(self) -> dict[str, _ReplicatedTensor]:
        """Return the state tensors of the optimizers, by key and parameter name."""
        return {
            f"{key} of {name}": weight._replace(tensor=value.to(self._comm.device))
            for optimizer in self._optimizers
            for name, weight in self._weights.items()
            if weight.tensor in optimizer.state
            for key, value in optimizer.state[weight.tensor].items()
            if isinstance(value, Tensor)
        }

    @torch.no_grad()
    def _spread_of(self, tensors: Mapping[str, _ReplicatedTensor]) -> Tensor:
        """Return whether this rank's tensors differ from their replicas; bool, 0-d."""
        alike: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for held in tensors.values():
            alike[held.axes].append(local_shard(held.tensor))
        apart = torch.zeros((), dtype=torch.bool, device=self._comm.device)
        for axes, shards in sorted(alike.items()):
            if self._num_replicas(axes) > 1:
                apart = apart | self._words_differ(words_of_tensors(shards), axes)
        return apart

    def _words_differ(self, words: Tensor, axes: Sequence[str]) -> Tensor:
        """Return whether ranks along `axes` have different words; bool, 0-d."""
        sums = torch.cat([words, words**2])
        for axis in axes:
            self._comm.all_reduce(sums, axis)
        total, squares = sums.chunk(2)
        return (self._num_replicas(axes) * squares != total**2).any()

    def _num_replicas(self, axes: Sequence[str]) -> int:
        return math.prod(self._comm.axes[axis] for axis in axes)

    def _facts(self) -> RankState:
        return RankState(
            self._comm.rank,
            self._counts,
            self._settings,
            {name: _digest(held) for name, held in self._weights.items()},
            {name: _digest(held) for name, held in self._states().items()},
        )

    def _raise_difference(self, call: str) -> None:
        """Raise the first difference, or warn if it is rounding; every rank calls this together."""
        ranks = gather_objects(self._facts())
        found = first_difference(ranks)
        if found is None:  # equal again
            return
        is_rounding = found.kind in ("weights", "states")
        # If some ranks lack a state tensor, the broadcasts of `_differ_by_rounding` do not match.
        is_rounding = is_rounding and all(f.states.keys() == ranks[0].states.keys() for f in ranks)
        if not (is_rounding and self._differ_by_rounding()):
            self._is_refused = True
            raise ScriptError(f"{call}: {found.words}")
        if not self._is_rounding and self._comm.is_first:
            warnings.warn(
                f"{found.words}; they differ by no more than rounding, as on hosts with different "
                "processors",
                stacklevel=2,
            )
        self._is_rounding = True

    @torch.no_grad()
    def _differ_by_rounding(self) -> bool:
        """Return whether replicas differ by at most 4 eps of their maximum; all ranks call this."""
        worst = torch.zeros((), dtype=torch.float64, device=self._comm.device)
        for held in (self._weights | self._states()).values():
            own = local_shard(held.tensor)
            first = own.clone()
            for axis in held.axes:
                self._comm.broadcast(first, axis)
            if own.numel() and own.is_floating_point():
                scale = first.abs().max().double() * torch.finfo(own.dtype).eps
                gap = (own - first).abs().max().double()
                gap = torch.where(gap == 0, 0.0, gap / scale).nan_to_num(nan=float("inf"))
                worst = torch.maximum(worst, gap)
            else:
                worst = torch.maximum(worst, (own != first).any() * float("inf"))
        return bool(self._comm.all_reduce(worst, "job", "max") <= 4)


def _held(tensor: Tensor, parameter: nn.Parameter, comm: Comm) -> _ReplicatedTensor:
    split = sharded_axes(parameter) if isinstance(parameter, DTensor) else ()
    over = {member for axis in split for member in comm.axes_of(axis)}
    axes = tuple(axis for axis in comm.axes if axis not in over)
    place = ",".join(f"{axis}={comm.coord(axis)}" for axis in comm.axes if axis in over)
    return _ReplicatedTensor(tensor, axes, place)


def _digest(held: _ReplicatedTensor) -> Digest:
    shard = local_shard(held.tensor.detach())
    numbers = shard.real if shard.is_complex() else shard
    return Digest(held.place, int(bits_of(shard)), float(numbers.double().sum()))


def _settings(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Return the settings of optimizers as text, by name."""
    found: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        found[f"the kind of optimizer {number}"] = kind
        for at, group in enumerate(optimizer.param_groups):
            of = f"of group {at} of {kind}"
            for name, value in group.items():
                if name == "params":
                    found[f"the number of parameters {of}"] = str(len(value))
                elif text := _text(value):
                    found[f"{name} {of}"] = text
    return found


def _text(value: Any) -> str:
    """Return a setting as text; empty if comparing it would be expensive, as for GPU tensors."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.ndim == 0 and value.device.type == "cpu" else ""
    if isinstance(value, list | tuple):
        parts = [_text(each) for each in value]
        return f"({', '.join(parts)})" if all(parts) else ""
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else ""
