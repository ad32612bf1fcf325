"""The memory account of one step: the bytes that a rank holds at its peak, by kind.

A `MemoryLedger` records every storage that a dispatched operator allocates, and when the storage is
freed; and the resizes by which FSDP2 frees and refills its gathered parameters. It works on any
device, counts requested bytes (an allocator rounds up), and needs no allocator statistics.

A storage that an operator reads, and that no operator allocated since the step began, was alive
before the step: it counts from the beginning, as do the parameters and the optimizer state.

The kind of a storage is set by its use at any time of its life:

    parameters     this rank's shards of the model's parameters
    gathered       parameters gathered from other ranks, each once: a second copy during the gather
                   is a communication buffer
    cast           parameters cast to the data type of the arithmetic where they are used
    gradients      a parameter's `.grad` when a backward or the step ends, and input and result of a
                   reduction over ranks; a gradient that autograd accumulates into an existing
                   `.grad` is a temporary, and an activation like gradients of activations
    optimizer      the optimizer state
    communication  other inputs and outputs of collectives, and copies of them
    activations    other storages of forward or backward: saved for backward, or temporary
    other          the rest: samples, buffers of the model, temporaries of clipping and update

[Note: Spans] The kind of a storage is often known only after the storage is freed or used: a result
of backward becomes a gradient when a parameter's `.grad` refers to it. So nothing is summed while
the step runs. Each storage is a span, whose kind may be set until the end, and the step is a list
of events. The account adds the events up afterwards, when every span has its kind:

    events     +a  +b  -a  +c  ...        + a span begins, - it ends, in the order of the step
    spans      a: 40 bytes, activations   b: 16 bytes, first unknown, at the end gradients
    account    40  56  16  ...            bytes of each kind after each event; its maximum: the peak

A storage whose kind changes during its life, such as FSDP2's flat buffer once the parameters have
been copied out of it, ends one span and begins the next. Each event also has its time and phase, so
that the account is the maximum of the step's curve.

Not recorded: workspace inside a kernel, memory of libraries (gloo, NCCL, oneDNN), memory that the
allocator caches, and allocations of compiled code. A compiled run therefore has no account.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from phalanx.comm.calls import Call
from phalanx.comm.watch import Watch
from phalanx.measure import clock

Kind = Literal[
    "parameters",
    "gathered",
    "cast",
    "gradients",
    "optimizer",
    "communication",
    "activations",
    "other",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_PASSING: tuple[Kind, ...] = ("cast", "communication", "activations")

_COMPUTING = ("forward", "backward")
"""Phases in which a storage without any other kind is an activation."""

CURVE_POINTS = 200
"""Most points of a curve; a step has up to a million events."""


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes that one rank held during a step, by kind.

    Attributes:
        at_peak: bytes of each kind at the peak of the total.
        at_most: peak bytes of each kind; the kinds peak at different times.
        at_end: bytes of each kind at the end of the step.
        peak_phase: phase of the step at the peak.
        allocated_bytes: peak of CUDA's caching allocator, which rounds up; None on a CPU.
        passing_bytes: peak of the sum of activations, casts and communication buffers.
    """

    at_peak: dict[Kind, int]
    at_most: dict[Kind, int]
    at_end: dict[Kind, int]
    peak_phase: str
    allocated_bytes: int | None = None
    passing_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes of all kinds at the peak."""
        return sum(self.at_peak.values())


def points_to_keep(
    at_s: NDArray[np.float64], held: NDArray[np.int64], most: int = CURVE_POINTS
) -> list[int]:
    """Return the indices of at most `most` points that a picture of the curve needs, in order.

    These are the first and the last point, the peak of the total and the first maximum of each
    kind, and the largest and the smallest total within each of equal intervals of time.

    Args:
        at_s: time of each point, not decreasing; [points].
        held: bytes of each kind at each point; [points, kinds].
        most: largest number of points; at least 3 + kinds.
    """
    num_points, total = len(at_s), held.sum(1)
    if num_points <= most:
        return list(range(num_points))
    kept = {0, num_points - 1, int(total.argmax()), *held.argmax(0).tolist()}
    num_intervals = (most - len(kept)) // 2
    ends = np.linspace(at_s[0], at_s[-1], num_intervals + 1)[1:-1]
    bounds = [0, *np.searchsorted(at_s, ends).tolist(), num_points]
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            of = total[begin:end]
            kept |= {begin + int(of.argmax()), begin + int(of.argmin())}
    return sorted(kept)


class _Event(NamedTuple):
    """The begin (`sign` 1) or end (-1) of a span: [Note: Spans]."""

    span: _Span
    sign: int
    at_s: float
    phase: str


@dataclass(slots=True, eq=False)
class _Span:
    """An interval of a storage's life with one size and one kind: [Note: Spans]."""

    num_bytes: int
    kind: Kind | None
    phase: str
    is_live: bool = True

    def final_kind(self) -> Kind:
        if self.kind is not None:
            return self.kind
        return "activations" if self.phase in _COMPUTING else "other"


class MemoryLedger(Watch):
    """A recorder of the memory of the step that runs inside `with MemoryLedger(...) as ledger:`.

    It costs about 20 microseconds for each tensor operation: use it for one step only.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        device: torch.device | str,
    ) -> None:
        """Prepare to record the storages on `device`; call it between two steps."""
        super().__init__()
        self._model = model
        single = isinstance(optimizer, torch.optim.Optimizer)
        self._optimizers = [optimizer] if single else optimizer
        self._device = torch.device(device)
        self._open = ExitStack()
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Span]] = {}
        self._before: list[_Span] = []
        self.begin_s = self._end_s = 0.0
        self._events: list[_Event] = []
        self._reduced: list[_Span] = []
        self._allocated_bytes: int | None = None
        self._in_call = False

    def __enter__(self) -> MemoryLedger:
        for parameter in self._model.parameters():
            self._find(parameter, "parameters")
            self._find(parameter.grad, "gradients")
        for tensor in self._optimizer_state():
            self._find(tensor, "optimizer")
        for buffer in self._model.buffers():
            self._find(buffer, "other")
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._open.enter_context(_watch_resizes(self._on_resize))
        self.begin_s = clock.now()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._end_s = clock.now()
        self._open.close()
        if self._device.type == "cuda":
            self._allocated_bytes = torch.cuda.max_memory_allocated(self._device)
        self._name_gradients()
        for tensor in self._optimizer_state():
            self._set_kind(tensor, "optimizer")
        self._live.clear()  # drops the weak references and their callbacks too

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Set the phase of the step inside the block."""
        with super().phase(name):
            yield
        if name == "backward":
            self._name_gradients()

    def account(self) -> MemoryAccount:
        """Return the account of the step; call it after the step."""
        held = self._held()
        peak = int(held.sum(1).argmax())
        passing = held[1:, [KINDS.index(kind) for kind in _PASSING]].sum(1)

        def by_kind(row: NDArray[np.int64]) -> dict[Kind, int]:
            return dict(zip(KINDS, row.tolist(), strict=True))

        return MemoryAccount(
            at_peak=by_kind(held[peak]),
            at_most=by_kind(held.max(0)),
            at_end=by_kind(held[-1]),
            peak_phase=self._events[peak - 1].phase if peak else "before",
            allocated_bytes=self._allocated_bytes,
            passing_bytes=int(passing.max(initial=0)),
        )

    def curve(self) -> dict[str, Any]:
        """Return the bytes of each kind over the step: the values of the record `memory`.

        A point of the `curve` holds from its time, `at_s` seconds after the step began, to the next
        point's. It has the `phase` of the step, which is "before" at the first and "after" at the
        last, and the `bytes` of each kind. `peak` is the index of the point with the largest total.
        """
        held = self._held()
        held = np.concatenate([held, held[-1:]])
        at_s = [self.begin_s, *(event.at_s for event in self._events), self._end_s]
        phases = ["before", *(event.phase for event in self._events), "after"]
        times_s = np.maximum.accumulate(at_s) - self.begin_s  # threads may end spans out of order
        kept = points_to_keep(times_s, held)
        curve = {
            "at_s": times_s[kept].round(7).tolist(),
            "phase": [phases[index] for index in kept],
            "bytes": {kind: held[kept, at].tolist() for at, kind in enumerate(KINDS)},
        }
        return {"curve": curve, "peak": int(held[kept].sum(1).argmax())}

    def _held(self) -> NDArray[np.int64]:
        """Return the bytes of each kind before the first event and after each; [1 + events, kinds].

        The first maximum of their sum is the peak.
        """
        changes = np.zeros((1 + len(self._events), len(KINDS)), np.int64)
        for span in self._before:
            changes[0, KINDS.index(span.final_kind())] += span.num_bytes
        for row, event in enumerate(self._events, 1):
            span = event.span
            changes[row, KINDS.index(span.final_kind())] = event.sign * span.num_bytes
        return changes.cumsum(0)

    def _record(self, span: _Span, sign: int) -> None:
        self._events.append(_Event(span, sign, clock.now(), self.phase_name))

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; record the storages that it reads and allocates."""
        for tensor in _tensors((*args, *kwargs.values())):
            self._find(tensor)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self._add(tensor)
        self._name_by_operation(func, args, kwargs, result)
        return result

    @override
    def run_call(self, call: Call, run: Callable[[], Any]) -> Any:
        """Run a collective; record the storages that it reads, fills and allocates."""
        ours = [*_tensors((call.inputs, call.outputs))]
        for tensor in ours:
            self._find(tensor)
        before, self._in_call = self._in_call, True
        try:
            result = run()
        finally:
            self._in_call = before
        for tensor in _tensors((result,)):
            self._add(tensor)
        for tensor in ours:
            self._name_unknown(tensor, "communication")
        if call.op == "reduce_scatter":
            spans = map(self._span, _tensors(call.outputs))
            self._reduced += [span for span in spans if span is not None]
        return result

    @override
    def allocated(self, tensor: torch.Tensor) -> None:
        """Record the storage of a tensor that an engine has allocated, in a call or before one."""
        self._add(tensor)
        if self._in_call:
            self._name_unknown(tensor, "communication")

    def _name_by_operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Set kinds of storages from an operation: of FSDP2, a collective or a cast."""
        match str(func):
            case "fsdp.all_gather_copy_in.default":
                for share in args[0]:
                    self._name_unknown(share, "communication")
                self._name_unknown(args[1], "gathered")
            case "fsdp.split_with_sizes_copy.default":
                # The parameters have been copied out, so the flat buffer is a second copy.
                self._change(args[0], "communication")
                for parameter in kwargs["out"]:
                    self._change(parameter, "gathered")
            case "fsdp.chunk_cat.default":
                for gradient in args[0]:
                    self._set_kind(gradient, "gradients")
                self._name_unknown(kwargs["out"], "communication")
            case "aten._to_copy.default":
                span = self._span(args[0])
                if span is not None and span.kind in ("parameters", "gathered"):
                    self._name_unknown(result, "cast")
            case _:
                pass

    def _name_gradients(self) -> None:
        """Set the kind of all gradients that are alive at the end of a backward.

        These are each parameter's `.grad`, and results of reductions: under HSDP, FSDP2 keeps the
        sum over fsdp in an internal tensor until the last microbatch.
        """
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._set_kind(parameter.grad, "gradients")
        for span in self._reduced:
            if span.is_live:
                span.kind = "gradients"
        self._reduced.clear()

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for values in optimizer.state.values():
                yield from _tensors(values.values())

    def _span(self, tensor: torch.Tensor) -> _Span | None:
        found = self._live.get(id(_storage(tensor)))
        return None if found is None else found[1]

    def _find(self, tensor: torch.Tensor | None, kind: Kind | None = None) -> None:
        """Record the storage of an existing tensor; an unrecorded one was alive before the step."""
        if tensor is not None:
            storage = _storage(tensor)
            if id(storage) not in self._live and self._is_counted(storage):
                self._before.append(self._begin(storage, kind, "before"))

    def _add(self, tensor: torch.Tensor) -> None:
        """Record the storage of an operator's result; an unrecorded one is new."""
        storage = _storage(tensor)
        if id(storage) not in self._live and self._is_counted(storage):
            self._record(self._begin(storage, None, self.phase_name), 1)

    def _is_counted(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == self._device.type and storage.nbytes() > 0

    def _begin(self, storage: torch.UntypedStorage, kind: Kind | None, phase: str) -> _Span:
        # By `id`, which is safe: a freed storage leaves `_live` before another can get its id.
        key = id(storage)
        span = _Span(storage.nbytes(), kind, phase)
        self._live[key] = (weakref.ref(storage, lambda _: self._on_free(key)), span)
        return span

    def _on_free(self, key: int) -> None:
        # Called when Python frees the storage. A gloo thread may free the last storage of a
        # collective after the step has ended.
        found = self._live.pop(key, None)
        if found is not None:
            self._end(found[1])

    def _end(self, span: _Span) -> None:
        span.is_live = False
        self._record(span, -1)

    def _on_resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Record a storage that is about to be resized, as FSDP2 does for a gather."""
        found = self._live.pop(id(storage), None)
        if found is None and self._is_counted(storage):
            self._before.append(span := _Span(storage.nbytes(), None, "before"))
            self._end(span)
        elif found is not None:
            self._end(found[1])
        if num_bytes > 0 and storage.device.type == self._device.type:
            span = self._begin(storage, "communication", self.phase_name)
            span.num_bytes = num_bytes
            self._record(span, 1)

    def _change(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Change the kind of a storage from now on: end its span and begin another."""
        key = id(tensor.untyped_storage())
        if key in self._live and self._live[key][1].kind != kind:
            reference, span = self._live[key]
            self._end(span)
            changed = _Span(span.num_bytes, kind, self.phase_name)
            self._live[key] = (reference, changed)
            self._record(changed, 1)

    def _set_kind(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Set the kind of a storage's whole span, unless it is a parameter."""
        span = self._span(tensor)
        if span is not None and span.kind != "parameters":
            span.kind = kind

    def _name_unknown(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Set the kind of a storage's whole span if it has none."""
        span = self._span(tensor)
        if span is not None and span.kind is None:
            span.kind = kind


@contextmanager
def allocator_snapshot(file: Path) -> Generator[None]:
    """Write the history of CUDA's allocator inside the block, for pytorch.org/memory_viz."""
    file.parent.mkdir(parents=True, exist_ok=True)
    private: Any = torch.cuda.memory  # as PyTorch's guide to memory snapshots calls it
    private._record_memory_history()
    try:
        yield
        private._dump_snapshot(str(file))
    finally:
        private._record_memory_history(enabled=None)


@contextmanager
def _watch_resizes(on_resize: Callable[[torch.UntypedStorage, int], None]) -> Generator[None]:
    """Call `on_resize` before each resize of a storage, which dispatch modes do not intercept."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(self: torch.UntypedStorage, size: int) -> Any:
        on_resize(self, size)
        return resize(self, size)

    torch.UntypedStorage.resize_ = resize_and_tell
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    if tensor.is_sparse:  # count its values only, not its indices
        tensor = tensor._values()
    return tensor.untyped_storage()


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in values and nested lists; skip wrapper subclasses other than DTensor."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if isinstance(value, DTensor) or not is_traceable_wrapper_subclass(value):
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(cast("Iterable[Any]", value))
