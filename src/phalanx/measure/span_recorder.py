"""Record the spans of one step on this rank, see measure/spans.py.

A `SpanRecorder` is a ledger of bytes that keeps each collective it counts, so the collectives of a
trace are those of the ledger, with its bytes. Ranges (comm.ranges) say what the rank's thread does,
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
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

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

_ACTION = re.compile(r"pp (\d+([A-Z]+(?:_[FB])?)(\d+))")
_COMPUTES = ("F", "B", "I", "W")

_SNAP_S = 50e-6
"""Longest time between the begin of a wait for the timer and its begin for the recorder."""


class _Label(NamedTuple):
    """What the rank's thread does; `axis` is the axis that it waits for, None if it computes."""

    phase: str = "other"
    microbatch: int | None = None
    part: str = ""
    axis: str | None = None
    of: str = ""


@dataclass
class _Collective:
    """A collective that may be under way; `span.end_s` is its end so far."""

    span: CollectiveSpan
    exposed_s: float = 0.0
    has_ended: bool = False  # known from the engine


class SpanRecorder(Ledger):
    """Records the step that runs inside `with SpanRecorder(comm, phases) as recorder:`.

    Attributes:
        begin_s: begin of the step.
    """

    def __init__(self, comm: Comm, phases: Mapping[str, str]) -> None:
        """Begin now; `phases` are the names of ranges that are phases, each with its term."""
        super().__init__(comm)
        self._phases = phases
        self._label = _Label()
        self.begin_s = clock.now()
        self._marks = [(self.begin_s, self._label)]
        self._samples: list[CounterSample] = []
        self._collectives: list[_Collective] = []
        self._numbers = Counter[tuple[Any, ...]]()
        self._at: dict[int, _Collective] = {}  # address of a tensor -> its latest collective
        self._num_in_flight, self._is_pipeline = 0, comm.size("pp") > 1
        self._is_cuda = comm.device.type == "cuda"
        self._blocks = dict[str, list[AbstractContextManager[Any]]]()
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

    def switch(self, **changes: Any) -> _Label:
        """Change what the thread does, until the next switch; return what it did before."""
        before, self._label = self._label, self._label._replace(**changes)
        self.phase_name = self._label.phase
        self._marks.append((clock.now(), self._label))
        return before

    @contextmanager
    def _in_range(self, name: str, of: str) -> Generator[None]:
        changes: dict[str, Any] = {}
        action = _ACTION.fullmatch(name)
        if name in self._phases:
            changes["phase"] = name
        elif name.startswith("microbatch "):
            changes["microbatch"] = int(name.removeprefix("microbatch "))
        elif action:
            word = "part" if action[2] in _COMPUTES else "of"
            changes |= {word: action[1], "microbatch": int(action[3])}
        elif name in self._blocks:
            changes["part"] = name
        elif name.startswith("gradient bucket "):
            changes["of"] = name.removeprefix("gradient ")
        elif of:
            changes["of"] = of
        if not changes:
            yield
            return
        before = self.switch(**changes)
        try:
            yield
        finally:
            own = self._label
            self.switch(**before._asdict())
            # The end of a microbatch's forward, or of what is left of its backward.
            if action or not self._is_pipeline:
                step = {"forward": 1, "F": 1, "backward": -1, "B": -1, "W": -1}
                change = step.get(action[2] if action else name, 0)
                if change and own.microbatch is not None:
                    self._num_in_flight += change
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
            waited = None if tensor is None else self._at.get(_address(tensor))
            if waited is not None:
                end_s = self._marks[-1][0]
                waited.exposed_s += end_s - begin_s
                if not waited.has_ended:
                    waited.span = replace(waited.span, end_s=end_s)

    @override
    def run_call(self, call: Call, run: Callable[[], Any]) -> Any:
        begin_s, peer = clock.now(), None
        if call.op in ("send", "recv"):
            peer = call.ranks[call.arguments["dst" if call.op == "send" else "src"]]
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
        collective = _Collective(span)
        self._collectives.append(collective)
        for tensor in _tensors((call.inputs, call.outputs)):
            self._at[_address(tensor)] = collective
        result = super().run_call(call, run)
        self._ended(collective)
        if isinstance(result, SharedTransfer):
            collective.has_ended = result.has_ended
            result.on_end = partial(self._ended, collective, is_known=True)
        work = result
        while isinstance(work, list | tuple) and work:
            work = work[-1]
        if isinstance(work, torch.ScriptObject) and not self._is_cuda:
            with suppress(RuntimeError):  # gloo has no future of a message
                future: Any = dist.Work.unbox(work).get_future()
                future.add_done_callback(partial(self._ended, collective, is_known=True))
        for tensor in _tensors(result):  # of a functional collective
            self._at.setdefault(_address(tensor), collective)
        return result

    def _ended(self, collective: _Collective, *_: Any, is_known: bool = False) -> None:
        collective.has_ended |= is_known
        collective.span = replace(collective.span, end_s=clock.now())

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

    def _term(self, label: _Label) -> str:
        return "communication" if label.axis else self._phases.get(label.phase, "other")

    def spans(
        self, begin_s: float, end_s: float, switches: Sequence[tuple[Any, float]] = ()
    ) -> list[Span]:
        """Return the spans of a step; without a timer's `switches`, phases give the terms."""
        terms = switches or [(self._term(label), at_s) for at_s, label in self._marks]
        return [
            *_cut(self._marks, terms, begin_s, end_s),
            *(replace(each.span, exposed_s=each.exposed_s) for each in self._collectives),
            *self._samples,
        ]


def _cut(
    marks: Sequence[tuple[float, _Label]],
    switches: Sequence[tuple[Any, float]],
    begin_s: float,
    end_s: float,
) -> Iterator[ComputeSpan | WaitSpan]:
    """Yield the spans of the rank's thread: cut at each mark and each switch."""
    marked, switched = {at_s for at_s, _ in marks}, {at_s for _, at_s in switches}
    times = marked | switched | {begin_s, end_s}
    bounds = sorted(at_s for at_s in times if begin_s <= at_s <= end_s)
    mark = switch = 0
    pieces: list[tuple[float, float, str, _Label]] = []
    for first_s, last_s in pairwise(bounds):
        while mark + 1 < len(marks) and marks[mark + 1][0] <= first_s:
            mark += 1
        while switch + 1 < len(switches) and switches[switch + 1][1] <= first_s:
            switch += 1
        term, label = switches[switch][0], marks[mark][1]._replace(of="")
        pieces.append((first_s, last_s, term if isinstance(term, str) else term[0], label))
    # A span that is short only because the timer and the recorder read the clock one after the
    # other joins a neighbor of its term:
    #
    #   timer       forward   |          communication         | forward
    #   recorder    forward      |       waits for dp       |    forward
    #   spans       forward   |          waits for dp          | forward
    joined: list[tuple[float, float, str, _Label]] = []
    for place, (first_s, last_s, term, label) in enumerate(pieces):
        near = [each for each in (*joined[-1:], *pieces[place + 1 : place + 2]) if each[2] == term]
        near.sort(key=lambda each: each[3].axis is None)  # a wait first
        is_between = (first_s in marked) != (last_s in marked) and marked != switched
        if near and is_between and label.axis is None and last_s - first_s < _SNAP_S:
            label = near[0][3]
        if joined and joined[-1][2:] == (term, label):
            joined[-1] = (joined[-1][0], last_s, term, label)
        else:
            joined.append((first_s, last_s, term, label))
    for first_s, last_s, term, label in joined:
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


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's data; that of its storage would name a whole heap."""
    return tensor.data_ptr()
