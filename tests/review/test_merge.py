"""Merged traces: lanes, arrows and clocks, from synthetic spans of ranks whose clocks are wrong."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.measure.clock import CLOCK
from phalanx.measure.spans import CounterSample, Span
from phalanx.review.merge import merge
from synthetic_spans import Clock, bent, checked, collective, compute, wait, write_clocks, write_step


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
            spans[rank].append(
                collective(begins_s[rank], end_s, name, "dp", group, number, peer)
            )
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
    clocks: list[Clock] = [bent(3.0 * draw.random(), drift * draw.random()) for _ in range(num_ranks)]
    clocks[0] = bent(0.0, 0.0)  # so that times of the trace are true ones
    with TemporaryDirectory() as folder:
        run = Path(folder)
        write_clocks(run, clocks, [99.0] if is_killed else [99.0, 102.0], seed)
        steps = {step: random_spans(seed + step, num_ranks, 6) for step in (7, 8)}
        begin_s = 100.0
        for step, spans in steps.items():
            write_step(run, step, clocks, begin_s, {"dp": num_ranks}, spans.__getitem__)
            begin_s += max(s.end_s for each in spans for s in each if not isinstance(s, CounterSample))
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


def test_lanes_arrows_counters_and_names(tmp_path: Path) -> None:
    pair = (0, 1)
    write_clocks(tmp_path, [bent(0, 0), bent(-7, 0)], [9.0, 12.0])

    def spans_of(rank: int) -> list[Span]:
        sent = collective(0.1, 0.2, "send", "pp", pair, 0, 1)
        received = collective(0.0, 0.3, "recv", "pp", pair, 0, 0)
        return [
            compute(0.0, 0.4, "backward", "layers.1"),
            *((sent,) if rank == 0 else (received,)),
            collective(0.1, 0.5, "all_reduce", "dp", pair, 0, label="bucket 0", num_bytes=4096),
            collective(0.2, 0.6, "all_reduce", "dp", pair, 1),
            collective(0.55, 0.7, "broadcast", "dp", pair, 0),
            collective(0.7, 0.7, "barrier", "world", (rank,), 0),
            wait(0.4, 0.6, "dp"),
            CounterSample(0.1, "memory", {"activations": 12, "gradients": 4}),
            CounterSample(0.2, "in flight", {"microbatches": 2}),
        ]

    write_step(tmp_path, 12, [bent(0, 0), bent(-7, 0)], 10.0, {"pp": 1, "dp": 2}, spans_of)
    merged = merge(tmp_path, tmp_path / "merged.json")
    events = checked(tmp_path / "merged.json")
    named = {(e["pid"], e["name"]): e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named[1, "process_name"] == "rank 1 host b: pp 0, dp 1"
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [lanes[tid] for tid in sorted(lanes)] == (
        ["step", "compute", "wait", "pp", "dp", "dp 2", "world"]
    )
    on_0 = [e for e in events if e["pid"] == 0]
    slices = {lanes[e["tid"]]: e for e in on_0 if e["ph"] == "X"}  # the last of each lane
    assert (slices["dp 2"]["ts"], slices["dp 2"]["dur"]) == (2e5, 4e5)
    assert slices["compute"]["name"] == "backward layers.1"
    assert slices["compute"]["args"]["microbatch"] == 0
    (bucket,) = (e for e in on_0 if e["name"] == "all_reduce bucket 0")
    assert bucket["args"] == {
        "axis": "dp", "op": "all_reduce", "bytes": 4096, "number": 0, "ranks": 2,
        "exposed ms": 0.0, "phase": "forward",
    }  # fmt: skip
    counters = {e["name"]: e["args"] for e in on_0 if e["ph"] == "C"}
    assert counters == {
        "memory": {"activations": 12, "gradients": 4}, "in flight": {"microbatches": 2}
    }  # fmt: skip
    assert sum(e["ph"] == "s" for e in events) == 4
    (send,) = (e for e in events if e["ph"] == "s" and lanes[e["tid"]] == "pp")
    (recv,) = (e for e in events if e["ph"] == "f" and e["id"] == send["id"])
    assert (send["pid"], recv["pid"], recv["ts"]) == (0, 1, pytest.approx(3e5, abs=500))
    assert merged.num_spans == sum(e["ph"] == "X" for e in events) - 2
    assert merged.collectives == {
        "pp": {"send": 1, "recv": 1}, "dp": {"all_reduce": 4, "broadcast": 2}, "world": {"barrier": 2}
    }  # fmt: skip
    assert merged.strategy == "pp1,dp2" and merged.steps == [12] and not merged.notes


def test_missing_and_damaged_files_are_named_and_the_others_merged(tmp_path: Path) -> None:
    clocks = [bent(0, 0)] * 3
    for step in (3, 4, 5):
        write_step(tmp_path, step, clocks, step, {"dp": 3}, random_spans(step, 3, 3).__getitem__)
    folder = tmp_path / "trace/spans/step0000003"
    whole = (folder / "rank0001.jsonl").read_bytes()
    (folder / "rank0001.jsonl").write_bytes(whole[: len(whole) // 2])
    (folder / "rank0002.jsonl").unlink()
    (tmp_path / "trace/spans/step0000004/rank0000.jsonl").write_bytes(b"")
    merged = merge(tmp_path, tmp_path / "merged.json", lambda step: step < 5)
    events = checked(tmp_path / "merged.json")
    assert {e["name"] for e in events if e.get("cat") == "step"} == {"step 3", "step 4"}
    texts = [note.replace(f"{tmp_path}/trace/", "") for note in merged.notes]
    assert texts == [
        "clock.jsonl is missing: ranks are placed by the Unix time of their hosts",
        "spans/step0000003/rank0001.jsonl is left out: it is damaged",
        "spans/step0000004/rank0000.jsonl is left out: it is damaged",
        "step 3 has no spans of ranks 1, 2",
        "step 4 has no spans of rank 0",
    ]
    assert json.loads((tmp_path / "merged.json").read_text())["otherData"] == {
        "strategy": "dp3", "steps": [3, 4], "clock error by rank, s": [None] * 3,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="of these steps"):
        merge(tmp_path, tmp_path / "merged.json", lambda step: step > 5)
    with pytest.raises(ConfigError, match="--profile"):
        merge(tmp_path / "trace", tmp_path / "merged.json")


def test_clocks_without_comparisons_are_corrected_by_messages(tmp_path: Path) -> None:
    clocks = [bent(0, 0), bent(5e-3, 0)]  # its Unix time is right, and the rest is 5 ms off
    write_step(tmp_path, 1, clocks, 10.0, {"dp": 2}, random_spans(1, 2, 20).__getitem__)
    merge(tmp_path, tmp_path / "merged.json")
    assert not (tmp_path / CLOCK).exists()
    checked(tmp_path / "merged.json")


def job_of(num_ranks: int, num_blocks: int, num_microbatches: int) -> list[Span]:
    """The spans of an fsdp step of a rank: each block is gathered, computed and reduced."""
    spans, at_s, group, number = list[Span](), 0.0, tuple(range(num_ranks)), 0
    for microbatch in range(num_microbatches):
        for phase in ("forward", "backward"):
            for block in range(num_blocks):
                ops = ("all_gather", "reduce_scatter") if phase == "backward" else ("all_gather",)
                for op in ops:
                    spans.append(
                        collective(at_s, at_s + 9e-4, op, "fsdp", group, number, None, f"layers.{block}")
                    )
                spans.append(compute(at_s, at_s + 8e-4, phase, f"layers.{block}"))
                spans.append(wait(at_s + 8e-4, at_s + 1e-3, "fsdp"))
                spans.append(CounterSample(at_s, "memory", {"activations": 1e9 * block}))
                at_s, number = at_s + 1e-3, number + 1
    return spans


@pytest.mark.parametrize(
    ("num_ranks", "num_blocks", "num_microbatches"),
    [(16, 8, 2), pytest.param(64, 32, 8, marks=pytest.mark.slow)],
)
def test_files_are_merged_as_a_stream(
    tmp_path: Path, num_ranks: int, num_blocks: int, num_microbatches: int
) -> None:
    draw = random.Random(0)
    clocks = [bent(draw.random() if rank else 0.0, 0.0) for rank in range(num_ranks)]
    spans = job_of(num_ranks, num_blocks, num_microbatches)
    write_clocks(tmp_path, clocks, [9.0, 12.0])
    for step in (1, 2):
        write_step(tmp_path, step, clocks, 9.0 + step, {"fsdp": num_ranks}, lambda _: spans)
    tracemalloc.start()
    merged = merge(tmp_path, tmp_path / "merged.json")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not merged.notes
    assert merged.num_bytes < 100e6
    assert peak_bytes < merged.num_bytes / 2
    if num_ranks < 64:
        checked(tmp_path / "merged.json")
