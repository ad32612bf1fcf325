"""The spans of a profiled step on one rank: one file for each step and rank, whole or absent.

    RUN/trace/spans/step0000012/rank0003.jsonl    the `StepSpans` without its spans, then the spans
    RUN/trace/clock.jsonl                         comparisons of the ranks' clocks

    compute      --- forward ---|-- backward --------|   |-- backward --|  | optimizer |
    wait                                             |dp|               |dp|
    collectives          |------- all_reduce dp, bucket 0 ---|
    counters     memory by kind, and microbatches in flight, whenever they change

Compute and wait spans do not overlap: a wait ends one compute span and starts another. Collectives
of one axis may overlap. All times are seconds of this rank's `time.perf_counter`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

from phalanx.storage import replace_file

SPANS: Final = "trace/spans"
"""Folder of the spans, within the folder of a run."""


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """Work of the rank's own thread.

    Attributes:
        begin_s: its begin.
        end_s: its end.
        term: term of the step ledger.
        phase: phase of the step, such as "forward", "clip"; "data" or "other" outside of phases.
        microbatch: number of the microbatch; None if the phase has none.
        part: block of the model such as "layers.3", or stage and action such as "1F0"; empty if
            unknown.
    """

    begin_s: float
    end_s: float
    term: str
    phase: str
    microbatch: int | None = None
    part: str = ""


@dataclass(frozen=True, slots=True)
class WaitSpan:
    """A wait of the rank's own thread for other ranks of `axis`; see `ComputeSpan`."""

    begin_s: float
    end_s: float
    term: str
    phase: str
    axis: str


@dataclass(frozen=True, slots=True)
class CollectiveSpan:
    """A collective from its call to its end, as this rank sees it.

    Attributes:
        begin_s: time of the call.
        end_s: time when the collective was complete, or else when this rank had waited for it.
        exposed_s: seconds for which this rank's thread waited for it.
        op: name of the collective, as in comm.calls.
        axis: mesh axis, as in the ledger of bytes.
        ranks: global ranks of the group.
        number: index among the calls of this op on this group (and with this peer) in the step.
            It is equal on all ranks of a collective, and on the two ranks of a message.
        peer: global rank of the other end of a message; None for a collective of all ranks.
        payload_bytes: see comm.ledger; of a recv the bytes received.
        phase: phase of the step at the call.
        label: bucket, block or stage that it is of; empty if unknown.
    """

    begin_s: float
    end_s: float
    exposed_s: float
    op: str
    axis: str
    ranks: tuple[int, ...]
    number: int
    peer: int | None
    payload_bytes: int
    phase: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class CounterSample:
    """Values of a counter from `at_s` on: "memory" by kind in bytes, or "in flight"."""

    at_s: float
    counter: str
    values: dict[str, float]


Span = ComputeSpan | WaitSpan | CollectiveSpan | CounterSample

_KINDS: Final = {kind.__name__: kind for kind in get_args(Span)}


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """One step of one rank.

    Attributes:
        step: number of the step, counted from 1.
        rank: global rank.
        num_ranks: ranks of the job.
        host: name of the host.
        strategy: text form of the strategy.
        axes: mesh axis -> size, outer to inner.
        coords: mesh axis -> coordinate of this rank.
        begin_s: begin of the step.
        end_s: end of the step.
        unix_s: Unix time at `begin_s`, which locates the step in the file of torch.profiler.
        terms_s: terms of the step ledger of this step.
        spans: all spans, in any order.
        device: type of the device; on "cuda" collectives may end after `end_s`.
    """

    step: int
    rank: int
    num_ranks: int
    host: str
    strategy: str
    axes: dict[str, int]
    coords: dict[str, int]
    begin_s: float
    end_s: float
    unix_s: float
    terms_s: dict[str, float]
    spans: list[Span] = field(default_factory=list)
    device: str = "cpu"

    def write(self, run: Path) -> Path:
        """Write the file of this step and rank in the folder of a run; return the file."""
        file = run / SPANS / f"step{self.step:07}" / f"rank{self.rank:04}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:  # files of the same step in a former job of more ranks
            for former in file.parent.glob("rank*.jsonl"):
                if int(former.stem.removeprefix("rank")) >= self.num_ranks:
                    former.unlink(missing_ok=True)
        head = {name: value for name, value in vars(self).items() if name != "spans"}
        lines = [head, *({"kind": type(span).__name__, **asdict(span)} for span in self.spans)]
        replace_file(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
        return file


def read_spans(file: Path) -> StepSpans:
    """Read a file that `StepSpans.write` has written."""
    with file.open(encoding="utf-8") as lines:
        step = StepSpans(**json.loads(next(lines)))
        step.spans.extend(map(_span, lines))
    return step


def _span(line: str) -> Span:
    values: dict[str, Any] = json.loads(line)
    if "ranks" in values:
        values["ranks"] = tuple(values["ranks"])
    return _KINDS[values.pop("kind")](**values)


def span_files(run: Path) -> Iterator[Path]:
    """Yield the files of spans of a run, in the order of steps and ranks."""
    yield from sorted((run / SPANS).glob("step*/rank*.jsonl"))
