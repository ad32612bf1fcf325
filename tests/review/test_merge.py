"""Merged traces: lanes, arrows and clocks, from synthetic spans of ranks whose clocks are wrong."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_spans import (
    Clock,
    bent,
    checked,
    collective,
    compute,
    wait,
    write_clocks,
    write_step,
)

from phalanx.measure.spans import CounterSample, Span
from phalanx.review.merge import merge


def random_spans(seed: int, num_ranks: int, num_calls: int) -> list[list[Span]]:
    """Calls of all ranks, that no rank ends before it may, by an instant at the earliest."""
    draw, at_s = random.Random(seed), [0.0] * num_ranks
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    numbers = dict[object, int]()
    for _ in range(num_calls):
        for rank in range(num_ranks):
            last_s, at_s[rank] = at_s[rank], at_s[rank] + draw.expovariate(1e4)
            spans[rank].append(compute(last_s, at_s[rank], "forward", "layers.0"))
        op = draw.choice(["send", "all_reduce", "broadcast"])
        members = sorted(draw.sample(range(num_ranks), 2 if op == "send" else num_ranks))
        group = tuple(members)
        draw.shuffle(members)
        call = (op, *(members if op == "send" else group))
        number = numbers[call] = numbers.get(call, -1) + 1
        soon_s = draw.choice([3e-9, 1e-6, 1e-3])
        begins_s = {rank: at_s[rank] for rank in members}
        for rank in members:
            name, peer, sources = op, None, members
            if op != "all_reduce":
                sources = members[:1]
            if op == "send":
                name, peer = ("send", members[1]) if rank == members[0] else ("recv", members[0])
            end_s = max(begins_s[rank], *(begins_s[each] for each in sources), 0.0) + soon_s
            spans[rank].append(collective(begins_s[rank], end_s, name, "dp", group, number, peer))
            if draw.random() < 0.7:  # or it goes on beneath what follows
                spans[rank].append(wait(at_s[rank], end_s, "dp"))
                at_s[rank] = end_s
    return spans


@given(st.integers(0, 10**6), st.integers(2, 5), st.floats(-50e-6, 50e-6), st.booleans())
@settings(max_examples=25)
def test_no_receive_ends_before_its_send_and_errors_bound_the_true_ones(
    seed: int, num_ranks: int, drift: float, is_killed: bool
) -> None:
    draw = random.Random(seed)
    clocks: list[Clock] = [
        bent(3.0 * draw.random(), drift * draw.random()) for _ in range(num_ranks)
    ]
    clocks[0] = bent(0.0, 0.0)  # so that times of the trace are true ones
    with TemporaryDirectory() as folder:
        run = Path(folder)
        write_clocks(run, clocks, [99.0] if is_killed else [99.0, 102.0], seed)
        steps = {step: random_spans(seed + step, num_ranks, 6) for step in (7, 8)}
        begin_s = 100.0
        for step, spans in steps.items():
            write_step(run, step, clocks, begin_s, {"dp": num_ranks}, spans.__getitem__)
            begin_s += max(
                s.end_s for each in spans for s in each if not isinstance(s, CounterSample)
            )
        merged = merge(run, run / "merged.json")
        events = checked(run / "merged.json")
        assert not merged.notes
        # One arrow for each message, and one from the first to each other rank of a collective.
        num_calls = sum(
            span.op != "send"
            for spans in steps.values() for each in spans for span in each if hasattr(span, "op")
        )  # fmt: skip
        num_firsts = sum(
            span.op not in ("send", "recv") and rank == 0
            for spans in steps.values() for rank, each in enumerate(spans) for span in each
            if hasattr(span, "op")
        )  # fmt: skip
        assert sum(event["ph"] == "f" for event in events) == num_calls - num_firsts
        # Where the trace has each span, beside the true time.
        offsets_s = []
        for rank in range(num_ranks):
            slices = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
            begins_s = sorted(e["ts"] / 1e6 for e in slices if e["cat"] == "compute")
            true_s = sorted(
                step_begin + span.begin_s
                for step_begin, spans in zip((100.0, begin_s_of(steps)), steps.values(), strict=True)
                for span in spans[rank] if type(span).__name__ == "ComputeSpan"
            )  # fmt: skip
            offsets_s.append([b - t for b, t in zip(begins_s, true_s, strict=True)])
        for rank, errors_s in enumerate(offsets_s):
            assert len(errors_s) == len(offsets_s[0])
            for own, base in zip(errors_s, offsets_s[0], strict=True):
                bound_s = merged.clock_errors_s[rank] + merged.clock_errors_s[0] + 4e-9
                assert abs(own - base) <= bound_s


def begin_s_of(steps: dict[int, list[list[Span]]]) -> float:
    """The true begin of the second step."""
    return 100.0 + max(
        s.end_s for each in steps[7] for s in each if not isinstance(s, CounterSample)
    )
