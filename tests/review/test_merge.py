"""Merged traces: lanes, arrows and clocks, from synthetic spans of ranks whose clocks are wrong."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_spans import (
    bent,
    checked,
    collective,
    compute,
    wait,
    write_clocks,
    write_step,
)

from namespaces import HOSTS
from phalanx.errors import ConfigError
from phalanx.measure.clock import CLOCK
from phalanx.measure.spans import CollectiveSpan, ComputeSpan, CounterSample, Span, span_files
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
@settings(max_examples=15)
def test_no_receive_ends_before_its_send_and_errors_bound_the_true_ones(
    seed: int, num_ranks: int, drift: float, is_killed: bool
) -> None:
    draw = random.Random(seed)
    clocks = [bent(3.0 * draw.random(), drift * draw.random()) for _ in range(num_ranks)]
    clocks[0] = bent(0.0, 0.0)  # so that times of the trace are true ones
    begins_s, is_true_s = {7: 100.0}, [list[float]() for _ in clocks]
    num_arrows = 0
    with TemporaryDirectory() as folder:
        run = Path(folder)
        write_clocks(run, clocks, [99.0] if is_killed else [99.0, 102.0], seed)
        for step in (7, 8):
            spans_of = random_spans(seed + step, num_ranks, 6)
            write_step(run, step, clocks, begins_s[step], {"dp": num_ranks}, spans_of.__getitem__)
            begins_s[step + 1] = begins_s[step]
            for rank, spans in enumerate(spans_of):
                for span in spans:
                    assert not isinstance(span, CounterSample)
                    begins_s[step + 1] = max(begins_s[step + 1], begins_s[step] + span.end_s)
                    if isinstance(span, ComputeSpan):
                        is_true_s[rank].append(begins_s[step] + span.begin_s)
                    elif isinstance(span, CollectiveSpan):
                        # One to the receiver, and one to each rank but the first.
                        num_arrows += span.op == "recv" or (span.op != "send" and rank > 0)
        merged = merge(run, run / "merged.json")
        events = checked(run / "merged.json")
    assert not merged.notes
    assert sum(event["ph"] == "f" for event in events) == num_arrows
    errors_s: list[list[float]] = []
    for rank, true_s in enumerate(is_true_s):
        of_rank = [e["ts"] / 1e6 for e in events if (e["pid"], e.get("cat")) == (rank, "compute")]
        errors_s.append([t - true for t, true in zip(sorted(of_rank), true_s, strict=True)])
        bound_s = merged.clock_errors_s[rank] + merged.clock_errors_s[0] + 4e-9
        assert all(abs(a - b) <= bound_s for a, b in zip(errors_s[rank], errors_s[0], strict=True))


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
    named = {
        (e["pid"], e["name"]): e["args"]["name"] for e in events if e["name"] == "process_name"
    }
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
        "pp": {"send": 1, "recv": 1}, "dp": {"all_reduce": 4, "broadcast": 2},
        "world": {"barrier": 2},
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


def test_messages_that_contradict_the_measured_clocks_are_named(tmp_path: Path) -> None:
    write_clocks(tmp_path, [bent(0, 0)] * 2, [9.0, 12.0])
    clocks = [bent(0, 0), bent(0.1, 0)]  # set after the comparison
    write_step(tmp_path, 1, clocks, 10.0, {"dp": 2}, random_spans(1, 2, 20).__getitem__)
    (note,) = merge(tmp_path, tmp_path / "merged.json").notes
    assert note.startswith("messages contradict the measured clocks of")
    checked(tmp_path / "merged.json")


def test_calls_on_a_gpu_return_before_others_begin_and_contradict_no_clock(tmp_path: Path) -> None:
    clocks, pair = [bent(0, 0)] * 2, (0, 1)

    def spans_of(rank: int) -> list[Span]:
        called_s = 0.1 + 0.1 * rank
        return [
            collective(0.3, 0.4, "send", "pp", pair, 0, 0)
            if rank
            else collective(0.0, 0.4, "recv", "pp", pair, 0, 1),
            collective(called_s, called_s + 1e-5, "all_reduce", "dp", pair, 0),
        ]

    write_clocks(tmp_path, clocks, [9.0, 12.0])
    write_step(tmp_path, 1, clocks, 10.0, {"dp": 2}, spans_of)
    for file in span_files(tmp_path):
        file.write_text(file.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    assert not merge(tmp_path, tmp_path / "merged.json").notes
    events = checked(tmp_path / "merged.json")
    ends = {(e["ph"], e["pid"], e["id"]) for e in events if e["ph"] in "sf"}
    assert ends == {("s", 1, 0), ("f", 0, 0), ("s", 0, 1), ("f", 1, 1)}


def job_of(num_ranks: int, num_blocks: int, num_microbatches: int) -> list[Span]:
    """The spans of an fsdp step of a rank: each block is gathered, computed and reduced."""
    spans, at_s, group, number = list[Span](), 0.0, tuple(range(num_ranks)), 0
    for _ in range(num_microbatches):
        for phase in ("forward", "backward"):
            for block in range(num_blocks):
                ops = ("all_gather", "reduce_scatter") if phase == "backward" else ("all_gather",)
                for op in ops:
                    spans.append(
                        collective(
                            at_s, at_s + 9e-4, op, "fsdp", group, number, None, f"layers.{block}"
                        )
                    )
                spans.append(compute(at_s, at_s + 8e-4, phase, f"layers.{block}"))
                spans.append(wait(at_s + 8e-4, at_s + 1e-3, "fsdp"))
                spans.append(CounterSample(at_s, "memory", {"activations": 1e9 * block}))
                at_s, number = at_s + 1e-3, number + 1
    return spans


@pytest.mark.parametrize(
    ("num_ranks", "num_blocks", "num_microbatches"),
    [(16, 8, 1), pytest.param(64, 32, 8, marks=pytest.mark.slow)],
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
    assert peak_bytes < 0.75 * merged.num_bytes
    if num_ranks < 64:
        checked(tmp_path / "merged.json")


SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from phalanx.comm.comm import Ranks
from phalanx.launch.torchrun import leave, leave_failed, run_here
from phalanx.measure.clock import compare, now
from phalanx.measure.spans import CollectiveSpan, StepSpans
from phalanx.strategy import Strategy

run, since_s, true_clock = Path(sys.argv[1]), float(sys.argv[2]), time.perf_counter

def work(_):
    comm = Ranks(Strategy.parse("dp2"))
    rank, tensor, spans = comm.rank, torch.zeros(4), []
    if rank == 1:
        time.perf_counter = lambda: 3.0 + true_clock() + 50e-6 * (true_clock() - since_s)
    compare(run, comm)
    begin_s, unix_s = now(), time.time()
    for number in range(40):
        for op in ("all_reduce", "recv" if rank else "send"):
            peer = None if op == "all_reduce" else 1 - rank
            called_s = now()
            getattr(dist, op)(*(tensor, peer)[: 1 + (peer is not None)])
            spans.append(CollectiveSpan(
                called_s, now(), 0.0, op, "dp", (0, 1), number, peer, 16, "forward"
            ))
        time.sleep(0.01)
    end_s, true_s = now(), true_clock()
    compare(run, comm)
    StepSpans(
        step=1, rank=rank, num_ranks=2, host=os.environ["MY_HOST"], strategy="dp2",
        axes={"dp": 2}, coords={"dp": rank}, begin_s=begin_s, end_s=end_s, unix_s=unix_s,
        terms_s={}, spans=spans,
    ).write(run)
    (run / f"true-{rank}").write_text(f"{end_s!r} {true_s!r}")

try:
    run_here(lambda: 0, lambda _: {}, work, device="cpu", threads=1, timeout_s=60.0)
    leave(0)
except BaseException as error:
    leave_failed(error)
"""


@pytest.mark.slow
def test_clocks_of_two_hosts_one_of_which_is_bent(switch: str, tmp_path: Path) -> None:
    del switch
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    since_s = time.perf_counter()  # namespaces share the machine's clock
    jobs: list[subprocess.Popen[str]] = []
    for rank, name in enumerate(HOSTS):
        variables = (
            f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR={HOSTS[0]} MASTER_PORT=29617 MY_HOST={name}"
        )
        command = f"{sys.executable} {script} {tmp_path} {since_s!r}"
        jobs.append(subprocess.Popen(
            [*f"ip netns exec {name} unshare --uts sh -c".split(),
             f"hostname {name}; {variables} exec {command}"],
            stderr=subprocess.PIPE, text=True,
        ))  # fmt: skip
    for job in jobs:
        words = job.communicate(timeout=120)[1]
        assert job.returncode == 0, words
    merged = merge(tmp_path, tmp_path / "merged.json")
    events = checked(tmp_path / "merged.json")
    assert not merged.notes
    assert sum(event["ph"] == "f" for event in events) == 80  # no receive ends before its send
    ends_us = {e["pid"]: e["ts"] + e["dur"] for e in events if e.get("cat") == "step"}
    true_s = [float((tmp_path / f"true-{rank}").read_text().split()[1]) for rank in (0, 1)]
    apart_s = (ends_us[1] - ends_us[0]) / 1e6
    assert abs(apart_s - (true_s[1] - true_s[0])) <= sum(merged.clock_errors_s.values()) + 1e-6
    assert sum(merged.clock_errors_s.values()) < 0.1
