"""What a profiled run writes, on every rank, and what becomes of it on a full disk or a kill."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import WITHOUT_PAYLOAD
from phalanx.config.profile_options import ProfileOptions
from phalanx.errors import PhalanxError
from phalanx.launch.local import run_ranks
from phalanx.measure import profile as profile_module
from phalanx.measure import spans as spans_module
from phalanx.measure.spans import (
    CollectiveSpan,
    ComputeSpan,
    CounterSample,
    StepSpans,
    WaitSpan,
    read_spans,
    span_files,
)
from phalanx.review.merge import merge
from phalanx.strategy import Strategy
from phalanx.train.callback import Callback
from phalanx.train.run import train
from phalanx.train.step import StepResult
from small_run import SHAPE, losses, records, small_run

TWO_BLOCKS = dataclasses.replace(SHAPE, num_layers=2, num_kv_heads=2)
OPTIONS = "wait=1,warmup=1,active=2"


def profiled(folder: Path, strategy: str, **settings: Any) -> Path:
    """Train five steps under a profile; return the folder of the run."""
    config = small_run(
        folder, 60, steps=5, strategy=strategy, profile=OPTIONS, shape=TWO_BLOCKS, **settings
    )
    train(config)
    return folder / "run"


def traces(run: Path) -> dict[str, dict[str, Any]]:
    """Return the traces of torch.profiler by the names of their ranks."""
    files = (run / "trace").glob("*.pt.trace.json")
    return {file.name.partition(".")[0]: json.loads(file.read_text()) for file in files}


def samples(step: StepSpans, counter: str) -> list[CounterSample]:
    return [s for s in step.spans if isinstance(s, CounterSample) and s.counter == counter]


def check_lane(step: StepSpans) -> None:
    """Check that compute and waits fill the step without overlap, and sum to its terms."""
    own = [span for span in step.spans if isinstance(span, ComputeSpan | WaitSpan)]
    terms_s, at_s = Counter[str](), step.begin_s
    for span in own:
        assert span.begin_s == at_s and span.end_s >= at_s
        terms_s[span.term] += span.end_s - span.begin_s
        at_s = span.end_s
    assert at_s == step.end_s
    for term, seconds in step.terms_s.items():
        assert abs(terms_s[term] - seconds) <= 0.02 * (step.end_s - step.begin_s), term


def counted(step: StepSpans) -> Counter[tuple[str, ...]]:
    """Return calls and bytes of a step by phase, axis and op, as the ledger counts them."""
    sums = Counter[tuple[str, ...]]()
    for span in step.spans:
        if isinstance(span, CollectiveSpan) and span.op not in WITHOUT_PAYLOAD:
            sums[span.phase, span.axis, span.op] += 1
            sums[span.phase, span.axis, span.op, "bytes"] += span.payload_bytes
    return sums


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("pp2", ["pp 0F1", "send pp", "wait recv pp"]),
        *map(
            lambda each: by_hand(*each),
            [
                ("fsdp2", ["all_gather fsdp blocks.1", "reduce_scatter fsdp rest", "microbatch 1"]),
                ("dp2:naive", ["all_reduce dp"]),
                ("fsdp2:zero2", ["blocks.0", "blocks.1"]),
                ("fsdp2:zero1", ["blocks.0", "blocks.1"]),
                ("tp2", ["all_gather tp", "blocks.1"]),
                ("cp2", ["wait recv cp"]),
                ("cp2:ulysses", ["all_to_all cp"]),
                ("pp2:zb/2", ["pp 0I1", "pp 0W1"]),
                ("dp2,fsdp2", ["all_gather fsdp blocks.1"]),
                ("pp2,fsdp2", ["pp 0F1", "all_gather fsdp blocks.0"]),
            ],
        ),
    ],
)
def test_every_collective_of_the_ledger_is_a_span_and_lanes_are_filled(
    strategy: str, words: list[str], tmp_path: Path
) -> None:
    run, parsed = profiled(tmp_path, strategy), Strategy.parse(strategy)
    # The ledger counted rank 0's second step, without a profile.
    ledger = Counter[tuple[str, ...]]()
    for entry in records(run, "summary")[0]["sent"]:
        key = entry["phase"], entry["axis"], entry["op"]
        ledger[key] += entry["calls"]
        ledger[*key, "bytes"] += entry["payload_bytes"]
    steps = [read_spans(file) for file in span_files(run)]
    ranks = range(parsed.num_ranks)
    assert [(step.step, step.rank) for step in steps] == [(n, r) for n in (3, 4) for r in ranks]
    messages = Counter[tuple[Any, ...]]()
    for step in steps:
        check_lane(step)
        assert counted(step) == ledger or step.rank > 0
        flights = [s.values["microbatches"] for s in samples(step, "in flight")]
        assert flights[-1] == 0 and min(flights) == 0
        assert max(flights) == (1 if parsed.pp.degree == 1 else max(flights))
        for span in step.spans:
            if isinstance(span, CollectiveSpan):
                assert step.begin_s <= span.begin_s <= span.end_s <= step.end_s
                ends = (step.rank, span.peer) if span.op == "send" else (span.peer, step.rank)
                key = (step.step, span.ranks, span.number, span.payload_bytes)
                if span.op in ("send", "recv"):
                    messages[*key, ends] += 1
                else:
                    messages[*key, span.op] += 1
    # Each message has two ends, and each collective all ranks of its group.
    for key, number in messages.items():
        assert number == (2 if isinstance(key[-1], tuple) else len(key[1])), key
    found = traces(run)
    assert sorted(found) == [f"rank{rank}" for rank in ranks]
    assert [found[f"rank{rank}"]["distributedInfo"]["rank"] for rank in ranks] == [*ranks]
    names = {str(event.get("name")) for event in found["rank0"]["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3", "forward", "backward", "optimizer"} <= names
    for word in words:
        assert any(name == word or name.startswith(f"{word} ") for name in names), word


def test_losses_are_equal_to_the_bit_and_words_name_what_was_sent(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 5, "shape": TWO_BLOCKS}
    with_memory = f"{OPTIONS},profile_memory=true"
    train(small_run(tmp_path, 60, strategy="dp2", profile=with_memory, **settings))
    train(small_run(tmp_path, 60, out=str(tmp_path / "plain"), **settings))
    run = tmp_path / "run"
    assert losses(run) == losses(tmp_path / "plain")
    assert not (tmp_path / "plain" / "trace").exists()
    step = read_spans(next(span_files(run)))
    # The account of memory of an unprofiled step has the same peak.
    curve = [sum(s.values.values()) for s in samples(step, "memory")]
    (account, _) = records(run, "memory")
    assert max(curve) == max(map(sum, zip(*account["curve"]["bytes"].values(), strict=True)))
    assert all(step.begin_s <= s.at_s <= step.end_s for s in samples(step, "memory"))
    merge(run, tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    drawn = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "memory"]
    assert len(drawn) >= len(curve) and set(drawn[0]) == set(account["curve"]["bytes"])
    (bucket,) = (s for s in step.spans if isinstance(s, CollectiveSpan) and s.label == "bucket 0")
    assert (bucket.op, bucket.axis, bucket.ranks, bucket.peer) == ("all_reduce", "dp", (0, 1), None)
    parts = [s for s in step.spans if isinstance(s, ComputeSpan) and s.part == "blocks.1"]
    assert [(s.phase, s.microbatch) for s in parts] == [
        (phase, microbatch) for microbatch in (0, 1) for phase in ("forward", "backward")
    ]
    event = next(e for e in traces(run)["rank1"]["traceEvents"] if "all_reduce dp" in e["name"])
    assert event["name"].endswith(" MiB")


def full_disk(folder: Path, place: str) -> tuple[list[str], bool, int]:
    """Take six steps in cycles of two on a disk that is full for rank 1."""
    comm, said = Ranks(Strategy.parse("dp2")), list[str]()
    if comm.rank == 1 and place == "spans":

        def full(file: Path, _: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

        spans_module.replace_file = full
    elif comm.rank == 1:

        def cut(directory: str, worker_name: str) -> Any:
            return lambda _: (Path(directory) / f"{worker_name}.json").write_text('{"traceEve')

        profile_module.tensorboard_trace_handler = cut
    model = nn.Linear(2, 2)
    profile = profile_module.Profile(
        folder,
        comm,
        Strategy.parse("dp2"),
        ProfileOptions(wait=0, warmup=0, active=2, repeat=0),
        model=model,
        optimizers=None,
        phases={},
        say=said.append,
    )
    num_steps = 0
    for step in range(1, 7):
        profile.begin_step(step)
        num_steps += profile.recorder is not None
        comm.all_reduce(model(torch.ones(1, 2)).detach(), "dp")
        profile.end_step()
    profile.close(is_failed=False)
    return said, profile.is_over, num_steps


@pytest.mark.parametrize("place", ["spans", "trace"])
@pytest.mark.fresh_ranks
def test_a_full_disk_ends_the_profile_on_all_ranks_and_not_the_run(
    place: str, tmp_path: Path
) -> None:
    (said, *first), (nothing, *second) = run_ranks(full_disk, 2, tmp_path, place)
    assert first == second == [True, 2] and nothing == []
    assert len(said) == 1 and said[0].startswith("the profile ends, because it cannot be written: ")
    assert {step.rank for step in map(read_spans, span_files(tmp_path))} == (
        {0} if place == "spans" else {0, 1}
    )
    assert not list((tmp_path / "trace").glob(".rank*"))
    assert [name for name in traces(tmp_path)] == ["rank0"]


class Killed(Callback):
    """Kills the first rank after the third step: the first of the two that are profiled."""

    def step(self, steps_done: int, result: StepResult) -> bool | None:
        if steps_done == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return None


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_whole_files_and_resumes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 5, "shape": TWO_BLOCKS, "save": "every=1"}
    config = small_run(tmp_path, 60, profile=OPTIONS, **settings)
    with pytest.raises(PhalanxError):
        train(config, callbacks={"killed": Killed()})
    run = tmp_path / "run"
    assert {read_spans(file).step for file in span_files(run)} == {3}
    assert not traces(run)
    train(
        small_run(
            tmp_path, 60, resume=str(run), out=None, profile=OPTIONS, steps=7, shape=TWO_BLOCKS
        )
    )
    assert {read_spans(file).step for file in span_files(run)} > {3}
    assert sorted(traces(run)) == ["rank0", "rank1"]
    assert not list((run / "trace").glob(".rank*"))


@pytest.mark.slow
def test_a_run_without_a_profile_imports_none_of_this() -> None:
    code = "import sys, phalanx.train.loop, phalanx.script.run, phalanx.script.session; "
    code += "print([name for name in sys.modules if 'measure.profile' in name or 'span' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
