"""Each example runs in a small form, and is on any ranks what it is in plain PyTorch."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import re
import runpy
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from marks import by_hand
from phalanx.launch.local import run_ranks
from phalanx.script.init import STRATEGY

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest.importorskip("sklearn")
pytest.importorskip("transformers")

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"num_epochs": 1, "num_rows": 300},
    "toy_model": {"num_epochs": 1, "num_rows": 93},
    "digits": {"num_epochs": 1, "num_rows": 300},
    "bert_classifier": {"num_epochs": 1, "num_rows": 170, "dropout": 0.0},
    "vit": {"num_epochs": 1, "num_rows": 300},
    "llama": {"num_epochs": 1, "num_rows": 77, "length": 12},
    "resnet": {"num_epochs": 1, "num_rows": 150, "size": 32},
}
"""What makes five steps of each, the last of them with fewer rows."""

SPLITTING = [name for name in SMALL if name != "digits"]
"""Those that prepare their model; the other averages gradients."""


def module_of(name: str, kind: str) -> Any:
    """Import a script of an example."""
    path = EXAMPLES / name / f"{kind}.py"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"{name}_{kind}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


def few_functions(name: str) -> AbstractContextManager[Any]:
    """Let the classifier read two packages; to read them all takes seconds."""
    if name != "bert_classifier":
        return nullcontext()
    return patch.object(sys.modules["functions"], "PACKAGES", ["http", "urllib"])


def trained(name: str, kind: str) -> tuple[str, dict[str, Tensor]]:
    """Run a script in its small form in float64; return what it prints, and the last weights."""
    module = module_of(name, kind)
    sizes = {"sizes": module.SMALL} if name == "resnet" else {}
    torch.set_default_dtype(torch.float64)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), few_functions(name):
            model = module.main(**SMALL[name], **sizes)
    finally:
        torch.set_default_dtype(torch.float32)
    state = model.state_dict()
    whole = {n: getattr(t, "full_tensor", lambda t=t: t)().clone() for n, t in state.items()}
    return printed.getvalue(), whole


def trained_by(pairs: list[tuple[str, str]]) -> list[tuple[str, dict[str, Tensor]]]:
    results: list[tuple[str, dict[str, Tensor]]] = []
    for name, strategy in pairs:
        os.environ[STRATEGY] = strategy
        results.append(trained(name, "distributed"))
    return results


def trained_plainly(names: Sequence[str]) -> dict[str, tuple[str, dict[str, Tensor]]]:
    return {name: trained(name, "plain") for name in names}


@functools.cache
def expected(*names: str) -> dict[str, tuple[str, dict[str, Tensor]]]:
    """What the plain scripts print and train, on one process."""
    return run_ranks(trained_plainly, 1, names, threads=1)[0]


def each(*strategies: str) -> list[tuple[str, str]]:
    return [(name, strategy) for name in SPLITTING for strategy in strategies]


TP = [(name, "tp2") for name in ("bert_classifier", "llama", "vit")]

JOBS = [
    (1, [("mlp", "dp1")]),
    by_hand(1, [(name, "dp1") for name in SMALL]),
    (2, [("digits", "dp2"), ("mlp", "fsdp2")]),
    by_hand(2, [("bert_classifier", "tp2")]),
    by_hand(2, [*each("dp2"), *each("fsdp2", "fsdp2:zero1", "fsdp2:zero2"), *TP]),
    by_hand(3, [("digits", "dp3"), *each("dp3", "fsdp3")]),
    by_hand(4, each("dp2,fsdp2")),
]

UNDETERMINED = ("key.bias", "k_proj.bias")
"""Weights whose gradient is rounding alone, since a softmax does not change with them: Adam makes
steps of that."""


@pytest.mark.parametrize(("num_ranks", "pairs"), JOBS)
def test_examples_compute_what_their_plain_scripts_do(
    num_ranks: int, pairs: list[tuple[str, str]]
) -> None:
    found = run_ranks(trained_by, num_ranks, pairs, threads=1, timeout_s=120)
    plain = expected(*dict.fromkeys(name for name, _ in pairs))
    for rank, results in enumerate(found):
        for (name, strategy), (printed, weights) in zip(pairs, results, strict=True):
            words, theirs = plain[name]
            assert list(weights) == list(theirs)
            for weight, value in theirs.items():
                if value.is_floating_point() and not weight.endswith(UNDETERMINED):
                    error = (weights[weight] - value).abs().max() / value.abs().max()
                    assert error < 1e-10, (name, strategy, rank, weight, float(error))
            # Losses, and how many of what was held back are right, to the last sample.
            assert printed == (words if rank == 0 else ""), (name, strategy, rank)


def test_few_lines_change() -> None:
    counted = runpy.run_path(str(EXAMPLES / "lines_changed.py"))["table"]()
    numbers = {(example, script): number for example, script, number in counted}
    page = (EXAMPLES.parent / "docs" / "your_model.md").read_text()
    for name in SMALL:
        assert numbers[name, "distributed"] <= 6
        assert re.search(rf"\| {name}[^|]* \| {numbers[name, 'distributed']} \|", page)
    others = [str(numbers["mlp", f"with_{each}"]) for each in ("accelerate", "deepspeed")]
    assert f"| mlp | {numbers['mlp', 'distributed']} | {' | '.join(others)} |" in page


def printed_by_the_classifier() -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        module_of("bert_classifier", "plain").main(num_epochs=2, num_rows=3000)
    return printed.getvalue()


@pytest.mark.slow
def test_the_classifier_beats_the_largest_class() -> None:
    words = run_ranks(printed_by_the_classifier, 1, threads=1)[0]
    last = re.search(r"epoch 1: (\d+) of (\d+) right, the largest package has (\d+)", words)
    assert last is not None, words
    right, _, largest = map(int, last.groups())
    assert right > 1.4 * largest, words
