"""Spans are read back as they were written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from phalanx.measure.spans import (
    CollectiveSpan,
    ComputeSpan,
    CounterSample,
    StepSpans,
    WaitSpan,
    read_spans,
    span_files,
)


def test_spans_are_read_as_written(tmp_path: Path) -> None:
    spans = [
        ComputeSpan(1.0, 1.5, "forward", "forward", 0, "layers.1"),
        WaitSpan(1.5, 1.75, "communication", "forward", "dp"),
        CollectiveSpan(1.25, 1.75, 0.25, "all_reduce", "dp", (0, 2), 3, None, 4096, "forward"),
        CounterSample(1.5, "memory", {"activations": 12}),
    ]
    step = StepSpans(
        step=12,
        rank=3,
        num_ranks=4,
        host="a",
        strategy="dp2,tp2",
        axes={"dp": 2, "tp": 2},
        coords={"dp": 1, "tp": 1},
        begin_s=1.0,
        end_s=2.0,
        unix_s=1e9,
        terms_s={"forward": 0.5},
        spans=[*spans],
    )
    file = step.write(tmp_path)
    assert [*span_files(tmp_path)] == [file]
    assert read_spans(file) == step
    # A run that resumes on fewer ranks takes the same step again.
    dataclasses.replace(step, rank=0, num_ranks=2).write(tmp_path)
    assert [former.stem for former in span_files(tmp_path)] == ["rank0000"]
