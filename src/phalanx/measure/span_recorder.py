"""Record the spans of one step on this rank, see measure/spans.py.

A `SpanRecorder` is a ledger of bytes that keeps each collective it counts, so a trace has the
collectives and the bytes of the ledger. Ranges (comm.ranges) say what the rank's thread does,
and waits (comm.waits) for whom it waits:

    ranges       microbatch 0, forward ...............| microbatch 0, backward .......
    blocks         layers.0 ....| layers.1 ...........|  layers.1 .........|
    waits                              |dp|                       |dp|
    spans        | 1 | 2        | 3    |4 | 5         | 6 | 7     |8 | 9   | 10 ...

A span ends wherever one of them changes. What the spans count toward, the timer of the step says
(measure.timer): its switches cut the spans too, so their sums are the terms of the step ledger.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from phalanx.comm.calls import Call
from phalanx.comm.comm import Comm
from phalanx.comm.ledger import Ledger, payload_bytes
from phalanx.comm.ranges import around_ranges, named
from phalanx.comm.shared_transfer import SharedTransfer
from phalanx.comm.waits import around_waits
from phalanx.measure import clock
from phalanx.measure.spans import CollectiveSpan, ComputeSpan, CounterSample, Span, WaitSpan

_ACTION: Final = re.compile(r"pp (\d+([A-Z]+(?:_[FB])?)(\d+))")

_COMPUTES: Final = {"F": 1, "B": -1, "I": 0, "W": -1}
"""Compute of a pipeline -> how it changes the number of microbatches in flight."""

_SNAP_S: Final = 50e-6
"""Longest time between the reading of the clock by the timer and by the recorder."""


class _Activity(NamedTuple):
    """What the rank's thread does; `axis` is the axis that it waits for, None if it computes."""

    phase: str = "other"
    microbatch: int | None = None
    part: str = ""
    axis: str | None = None
    of: str = ""


class SpanRecorder(Ledger):
    """Records the step that runs inside `with SpanRecorder(comm, phases) as recorder:`.

    Attributes:
        begin_s: begin of the step.
    """

    def __init__(self, comm: Comm, phases: Mapping[str, str]) -> None:
        """Begin now; `phases`: range of a phase, beside "data" and "other" -> its term."""
        super().__init__(comm)
        self._phases = {"data": "data", "other": "other", **phases}
        self._label = _Activity()
        self.begin_s = clock.now()
        self._marks = [(self.begin_s, self._label)]
        self._samples: list[CounterSample] = []
        self._calls: list[CollectiveSpan] = []
        self._has_ended: set[int] = set()  # calls whose end is known, by their index
        self._numbers = Counter[tuple[Any, ...]]()
        self._call_at: dict[int, int] = {}  # address of a tensor -> index of its latest call
        self._blocks = dict[str, list[AbstractContextManager[Any]]]()
        self._is_cuda, self._is_pipeline = comm.device.type == "cuda", comm.size("pp") > 1
        self._num_in_flight = 0
        self._open = ExitStack()

    def __enter__(self) -> SpanRecorder:
        self._open.enter_context(around_ranges(self._in_range))
        self._open.enter_context(around_waits(self._in_wait))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._open.close()

    def sample(self, counter: str, values: dict[str, float], at_s: float | None = None) -> None:
        """Add a sample of a counter, by default of now."""
        self._samples.append(CounterSample(clock.now() if at_s is None else at_s, counter, values))

    def switch(self, **changes: Any) -> _Activity:
        """Change what the thread does, until the next switch; return what it did before."""
        before, self._label = self._label, self._label._replace(**changes)
        self.phase_name = self._label.phase
        self._marks.append((clock.now(), self._label))
        return before

    @contextmanager
    def _in_range(self, name: str, of: str) -> Generator[None]:
        action, changes = _ACTION.fullmatch(name), dict[str, Any]({"of": of} if of else {})
        if name in self._phases:
            changes["phase"] = name
        elif name in self._blocks:
            changes["part"] = name
        elif name.startswith("microbatch "):
            changes["microbatch"] = int(name.removeprefix("microbatch "))
        elif name.startswith("gradient bucket "):
            changes["of"] = name.removeprefix("gradient ")
        elif action:
            changes["part" if action[2] in _COMPUTES else "of"] = action[1]
            changes["microbatch"] = int(action[3])
        before = self.switch(**changes) if changes else self._label
        try:
            yield
        finally:
            if changes:
                in_flight = 0
                if self._is_pipeline:
                    in_flight = _COMPUTES.get(action[2], 0) if action else 0
                elif self._label.microbatch is not None:
                    in_flight = {"forward": 1, "backward": -1}.get(name, 0)
                self.switch(**before._asdict())
                if in_flight:
                    self._num_in_flight += in_flight
                    self.sample("in flight", {"microbatches": self._num_in_flight})

    @contextmanager
    def _in_wait(self, tensor: Tensor | None, axis: str) -> Generator[None]:
        if self._label.axis is not None:  # within another wait
            yield
            return
        before, begin_s = self.switch(axis=axis), self._marks[-1][0]
        try:
            yield
        finally:
            self.switch(**before._asdict())
            if tensor is not None and (index := self._call_at.get(tensor.data_ptr())) is not None:
                end_s = self._marks[-1][0]
                exposed_s = self._calls[index].exposed_s + end_s - begin_s
                self._calls[index] = replace(self._calls[index], exposed_s=exposed_s)
                self._ended(index, end_s)

    @override
    def run_call(self, call: Call, run: Callable[[], Any]) -> Any:
        begin_s, index = clock.now(), len(self._calls)
        end = {"send": "dst", "recv": "src"}.get(call.op)
        peer = None if end is None else call.ranks[call.arguments[end]]
        key = call.op, call.ranks, peer
        span = CollectiveSpan(
            begin_s=begin_s,
            end_s=begin_s,
            exposed_s=0.0,
            op=call.op,
            axis=self.axis_of(call),
            ranks=call.ranks,
            number=self._numbers[key],
            peer=peer,
            payload_bytes=payload_bytes(call),
            phase=self.phase_name,
            label=self._label.of or self._label.part,
        )
        self._numbers[key] += 1
        self._calls.append(span)
        result = super().run_call(call, run)
        for tensor in _tensors((call.inputs, call.outputs, result)):
            self._call_at[tensor.data_ptr()] = index
        # The end of a collective, from the best source that there is:
        #   shared memory      when its last step has run
        #   gloo               when its future is done; messages have none
        #   else               when this thread has waited for it
        self._ended(index, clock.now())
        if isinstance(result, SharedTransfer):
            result.on_end = partial(self._end_now, index)
            if result.has_ended:
                self._has_ended.add(index)
        work = result
        while isinstance(work, list | tuple) and work:
            work = work[-1]
        if isinstance(work, torch.ScriptObject) and not self._is_cuda:
            with suppress(RuntimeError):
                future: Any = dist.Work.unbox(work).get_future()
                future.add_done_callback(partial(self._end_now, index))
        return result

    def _end_now(self, index: int, _: Any = None) -> None:
        self._has_ended.discard(index)
        self._ended(index, clock.now())
        self._has_ended.add(index)

    def _ended(self, index: int, at_s: float) -> None:
        if index not in self._has_ended:
            self._calls[index] = replace(self._calls[index], end_s=at_s)

    @contextmanager
    def around_blocks(self, blocks: Sequence[tuple[str, nn.Module]]) -> Generator[None]:
        """Name the forward and backward of blocks inside, by hooks."""
        with ExitStack() as hooks:
            for name, block in () if self._is_pipeline else blocks:  # whose parts are actions
                if block._compiled_call_impl is not None:  # pyright: ignore[reportPrivateUsage]
                    continue  # a hook would compile it again
                self._blocks[name] = []
                before, after = partial(self._before, name), partial(self._after, name)
                hooks.callback(block.register_forward_pre_hook(before).remove)
                # Always: recomputation leaves a forward by an error once it has what it needs.
                hooks.callback(block.register_forward_hook(after, always_call=True).remove)
            yield

    def _before(self, name: str, _: nn.Module, inputs: Any) -> None:
        # Backward of a block begins when the gradient of its output is there, and ends when the
        # gradient of its input is, if no other block has begun.
        def end(_: Tensor) -> None:
            if self._label.part == name:
                self.switch(part="")

        self._hook(inputs, end)
        self._blocks[name].append(named(name))
        self._blocks[name][-1].__enter__()

    def _after(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        def begin(_: Tensor) -> None:
            self.switch(part=name)

        if self._blocks[name]:
            self._blocks[name].pop().__exit__(None, None, None)
        self._hook(output, begin)

    @staticmethod
    def _hook(values: Any, hook: Callable[[Tensor], None]) -> None:
        for tensor in _tensors(values):
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(hook)

    def spans(
        self, begin_s: float, end_s: float, switches: Sequence[tuple[Any, float]] = ()
    ) -> list[Span]:
        """Return the spans of a step; without a timer's `switches`, phases give the terms."""
        terms = switches or [
            ("communication" if label.axis else self._phases[label.phase], at_s)
            for at_s, label in self._marks
        ]
        return [*_cut(self._marks, terms, begin_s, end_s), *self._calls, *self._samples]


def _cut(
    marks: Sequence[tuple[float, _Activity]],
    switches: Sequence[tuple[Any, float]],
    begin_s: float,
    end_s: float,
) -> Iterator[ComputeSpan | WaitSpan]:
    """Yield the spans of the rank's thread: cut at each mark and each switch."""
    # The timer and the recorder read the clock one after the other, so marks move to switches:
    #
    #   timer       forward   |          communication         | forward
    #   recorder    forward      |       waits for dp       |    forward
    #   spans       forward   |          waits for dp          | forward
    switched, snapped = [at_s for _, at_s in switches], list[tuple[float, _Activity]]()
    for at_s, label in marks:
        place = bisect(switched, at_s)
        near_s = min(switched[max(0, place - 1) : place + 1], key=lambda each: abs(each - at_s))
        at_s = near_s if abs(near_s - at_s) < _SNAP_S else at_s
        snapped.append((at_s, label._replace(of="")))
    times = {*switched, *(at_s for at_s, _ in snapped), begin_s, end_s}
    bounds = sorted(at_s for at_s in times if begin_s <= at_s <= end_s)
    mark = switch = 0
    pieces: list[tuple[float, float, str, _Activity]] = []
    for first_s, last_s in pairwise(bounds):
        while mark + 1 < len(snapped) and snapped[mark + 1][0] <= first_s:
            mark += 1
        while switch + 1 < len(switches) and switches[switch + 1][1] <= first_s:
            switch += 1
        term, label = switches[switch][0], snapped[mark][1]
        term = term if isinstance(term, str) else str(term[0])
        if term == "other":  # the overhead around a block or an action is of none
            label = label._replace(part="")
        if pieces and pieces[-1][2:] == (term, label):
            first_s = pieces.pop()[0]
        pieces.append((first_s, last_s, term, label))
    for first_s, last_s, term, label in pieces:
        if label.axis is None:
            yield ComputeSpan(first_s, last_s, term, label.phase, label.microbatch, label.part)
        else:
            yield WaitSpan(first_s, last_s, term, label.phase, label.axis)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
