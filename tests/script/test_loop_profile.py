"""A profile of one's own loop: its steps, phases and files, beside torch.profiler by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import ConfigError, ScriptError
from phalanx.launch.local import run_ranks
from phalanx.measure.spans import (
    CollectiveSpan,
    ComputeSpan,
    CounterSample,
    WaitSpan,
    read_spans,
    span_files,
)


class Bottleneck(nn.Module):
    """The block of torchvision's ResNet-50, of `width` and four times as many channels out."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential()
        if stride > 1 or num_in != 4 * width:
            conv = nn.Conv2d(num_in, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet50(nn.Module):
    """A ResNet-50 with its layers in two stages, `seq1` and `seq2`; `width` 64 is the published."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.num_in = width
        stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)]
        ends = [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        layers = [self.layer(width * 2**n, num, 1 if n == 0 else 2) for n, num in enumerate((3, 4))]
        self.seq1 = nn.Sequential(*stem, *ends, *layers)
        layers = [self.layer(width * 2**n, num, 2) for n, num in ((2, 6), (3, 3))]
        pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.num_in, num_classes)]
        self.seq2 = nn.Sequential(*layers, *pooled)

    def layer(self, width: int, num: int, stride: int) -> nn.Sequential:
        blocks: list[nn.Module] = []
        for number in range(num):
            blocks.append(Bottleneck(self.num_in, width, stride if number == 0 else 1))
            self.num_in = 4 * width
        return nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.seq2(self.seq1(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def a_loop(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    folder: Path | None,
    by_hand: Path | None = None,
    accumulation: int = 1,
) -> list[float]:
    """Take five steps on batches of 4, with an evaluation after each; return their losses."""
    torch.manual_seed(0)
    run = phalanx.init("dp2", accumulation=accumulation)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = 20 * accumulation
    data = TensorDataset(torch.randn(rows, *shape), torch.randint(4, (rows,)))
    model, optimizer, loader, held_out = run.prepare(
        model, optimizer, DataLoader(data, 4), DataLoader(data, 10), batch_norm="local"
    )
    cycle = {"wait": 1, "warmup": 1, "active": 2}
    asked: AbstractContextManager[Any] = nullcontext()
    if folder is not None:
        asked = run.profile(
            **cycle, record_shapes=True, profile_memory=shape == (6,), folder=folder
        )
    elif by_hand is not None:
        keep = torch.profiler.tensorboard_trace_handler(str(by_hand), f"rank{run.rank}")
        asked = profile(
            schedule=schedule(**cycle, repeat=1), on_trace_ready=keep, record_shapes=True
        )
    losses: list[float] = []
    with asked as profiled:
        for inputs, labels in loader:
            outputs, labels = run.gather(model(inputs), labels)
            losses.append(float(run.backward(cross_entropy(outputs, labels))))
            if not run.is_step_end:
                continue
            run.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if by_hand is not None:
                profiled.step()
            elif folder is not None and shape == (6,):
                with torch.no_grad():
                    for inputs, _ in held_out:
                        model(inputs)
    return losses


def test_a_run_steps_its_profile(tmp_path: Path) -> None:
    make, shape = Layers, (6,)
    plain, _ = run_ranks(a_loop, 2, make, shape, None, None, 2)
    losses, _ = run_ranks(a_loop, 2, make, shape, tmp_path, None, 2)
    assert losses == plain
    files = [*span_files(tmp_path)]
    assert [(file.parent.name[-1], file.stem[-1]) for file in files] == [
        (step, rank) for step in "34" for rank in "01"
    ]
    for step in map(read_spans, files):
        own = [span for span in step.spans if isinstance(span, ComputeSpan | WaitSpan)]
        phases = [span.phase for span in own]
        first = dict.fromkeys(phases)
        assert [name for name in first if name != "other"] == [
            "data", "forward", "backward", "clip", "optimizer"
        ]  # fmt: skip
        assert phases.count("data") >= 2 and own[0].begin_s == step.begin_s
        assert {span.microbatch for span in own if isinstance(span, ComputeSpan)} == {None, 0, 1}
        assert sum(step.terms_s.values()) == pytest.approx(step.end_s - step.begin_s)
        calls = [span for span in step.spans if isinstance(span, CollectiveSpan)]
        assert {span.label for span in calls} >= {"bucket 0"}
        memory = [s for s in step.spans if isinstance(s, CounterSample) and s.counter == "memory"]
        num_bytes = sum(p.nbytes for p in Layers().parameters())
        assert {sample.values["parameters"] for sample in memory} == {num_bytes}
        assert max(sample.values["gradients"] for sample in memory) >= num_bytes
        assert max(sample.values["activations"] for sample in memory) > 0
    assert len(list((tmp_path / "trace").glob("rank?.*.pt.trace.json"))) == 2


def refusals() -> list[str]:
    run, told = phalanx.init("dp1"), list[str]()
    model = Layers()
    for options in ({}, {"active": 0}, {}):
        try:
            with run.profile(**options), run.profile(**options):  # type: ignore[arg-type]
                told.append("none")
        except (ScriptError, ConfigError) as error:
            told.append(str(error))
        if model is not None:
            run.prepare(model, torch.optim.SGD(model.parameters()))
            model = None
    return told


def test_what_a_profile_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (told,) = run_ranks(refusals, 1)
    unprepared, bad, twice = told
    assert unprepared.startswith("profile: no model is prepared")
    assert bad == "profile: active is 0; expected at least 1; the nearest is 1"
    assert twice == "profile: another profile of this run is open; close it first"


def operators(file: Path) -> Counter[str]:
    """Return how often each operator ran within the recorded steps."""
    events = json.loads(file.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "cpu_op")


def resnet() -> nn.Module:
    return ResNet50(8, 4)


@pytest.mark.slow
def test_a_resnet_of_two_stages_has_the_operators_of_a_profile_by_hand(tmp_path: Path) -> None:
    assert sum(p.numel() for p in ResNet50(64, 1000).parameters()) == 25_557_032
    run_ranks(a_loop, 2, resnet, (3, 32, 32), tmp_path / "run")
    run_ranks(a_loop, 2, resnet, (3, 32, 32), None, tmp_path / "hand")
    for rank in range(2):
        (ours,) = (tmp_path / "run" / "trace").glob(f"rank{rank}.*.pt.trace.json")
        (by_hand,) = (tmp_path / "hand").glob(f"rank{rank}.*.pt.trace.json")
        assert operators(ours) == operators(by_hand) and operators(ours)["aten::conv2d"] == 106
