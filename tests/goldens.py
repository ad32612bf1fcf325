"""Numbers that a change of structure must not change: `python tests/goldens.py` writes them anew.

    ledger    bytes of one step: decoders, and own loops by the form of the loss
    plan      `phalanx plan --json` of six questions, and of three modules
    verify    `phalanx verify --json`: names, verdicts, counts and bytes

Tests compare with the files in tests/goldens; what is noise, and each sentence, is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "goldens"

DECODERS: Final = ("dp2", "fsdp2", "fsdp2:zero1", "tp2", "pp2", "cp2")
"""Strategies whose step of a small decoder is counted."""

LOOPS: Final = ("dp2", "fsdp2")
"""Strategies of own loops; each takes a loss of the whole batch, and a mean of own rows."""

PLANS: Final = {
    "small": "--model llama3-1b --shape.num-layers 4 --cluster h100:2 --sequence 1024"
    " --global-batch 4",
    "tight": "--model llama3-8b --cluster h100:8 --sequence 8192 --global-batch 16",
    "interleaved": "--model gpt2-1.5b --cluster a100:8 --sequence 1024 --global-batch 64"
    " --strategy pp4:interleaved/2,dp2",
    "tpu": "--model llama3-8b --cluster tpu-v5p:16 --sequence 8192 --global-batch 128"
    " --strategy fsdp8,tp2,recompute:selective",
    "gpt3": "--model gpt3-175b --cluster h100:64 --sequence 2048 --global-batch 64"
    " --strategy pp8,tp8,recompute:full",
    "long": "--model llama3-405b --cluster h100-llama3:16384 --sequence 131072 --global-batch 128"
    " --strategy pp16,fsdp8,cp16,tp8",
}
"""Words of `phalanx plan`: two searches, and four strategies that are priced alone."""

MODULES: Final = {
    "linear": "--cluster h100:4",
    "convolutions": "--cluster a100:2",
    "attention": "--cluster h100:4 --strategy pp2,dp2",
}
"""Function below that returns a trainer -> further words of `phalanx plan --script`."""

VERIFIED: Final = {
    "dp2": "dp2 --no-three --steps 2 --optimizer.clip-p inf --shape.norm layer"
    " --shape.qk-norm false --shape.num-layers 1",
    "pp2": "pp2 --no-three --steps 2 --shape.num-layers 1",
}
"""Words of `phalanx verify`, of tests in cli/test_verify_command.py, which compare them."""


def ledger() -> dict[str, Any]:
    """Return the entries of rank 0's ledger by strategy."""
    from phalanx.launch.local import run_ranks

    return run_ranks(count, 2, threads=1)[0]


def count() -> dict[str, Any]:
    return count_decoders() | count_loops()


def rows_of(entries: Any) -> list[list[Any]]:
    """Return one row an entry: phase, axis, op, calls, bytes of the tensors, bytes sent."""
    return sorted(list(dataclasses.astuple(entry)) for entry in entries)


def count_decoders() -> dict[str, Any]:
    """Count the first step of a tied decoder of two blocks, of three microbatches."""
    from phalanx.comm.comm import Ranks
    from phalanx.config import OptimizerConfig
    from phalanx.models.shape import ModelShape
    from phalanx.strategy import Strategy
    from phalanx.verify.batches import decoder_batches
    from phalanx.verify.cases import decoder_case
    from phalanx.verify.harness import verify_case

    shape = ModelShape(
        vocab_size=66, num_layers=2, hidden=32, num_heads=8, num_kv_heads=4, head_dim=4, ffn=48,
        max_seq_len=32, tied=True, dropout=0.1,
    )  # fmt: skip
    counted: dict[str, Any] = {}
    for strategy in map(Strategy.parse, DECODERS):
        batches = decoder_batches(shape, 1, 13, 17, strategy.data_ranks, 3)
        case = decoder_case(shape, batches, 3, OptimizerConfig(warmup_steps=1))
        case = dataclasses.replace(case, accumulation=3)
        counted[f"decoder {strategy}"] = rows_of(
            verify_case(case, strategy, Ranks(strategy)).entries
        )
    return counted


def count_loops() -> dict[str, Any]:
    """Count the second step of an own loop of two microbatches, by strategy and form of loss."""
    import torch
    from torch import nn
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader, TensorDataset

    import phalanx
    from phalanx.comm.ledger import Ledger

    counted: dict[str, Any] = {}
    for strategy in LOOPS:
        for form in ("whole", "mean"):
            run = phalanx.init(strategy, accumulation=2)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1))
            optimizer = torch.optim.AdamW(model.parameters())
            data = TensorDataset(torch.randn(36, 6), torch.randn(36, 1))
            model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8))
            for number, (x, y) in enumerate(loader):
                with Ledger(run.comm) if number > 1 else contextlib.nullcontext() as watch:
                    outputs = model(x)
                    if form == "whole":
                        outputs, y = run.gather(outputs, y)
                        run.backward(mse_loss(outputs, y))
                    else:
                        run.backward(mean_of_rows=mse_loss(outputs, y), count=len(y))
                    if run.is_step_end:
                        run.clip(1.0)
                        optimizer.step()
                        optimizer.zero_grad()
                if watch is not None:
                    key = f"loop {strategy} {form}, microbatch {number % 2} of 2"
                    counted[key] = rows_of(watch.entries())
                if number == 3:
                    break
    return counted


class CrossEntropy:
    """The sum of the losses of a microbatch, and its number of rows."""

    def loss_sum(self, model: Any, microbatch: Any, step: int) -> Any:
        from torch.nn.functional import cross_entropy

        inputs, labels = microbatch
        return cross_entropy(model(inputs), labels, reduction="sum")

    def num_valid(self, microbatch: Any) -> int:
        return len(microbatch[1])


def trainer(build: Callable[[], Any], *shape: int, **more: Any) -> Any:
    """Return a job on 64 rows of this shape and ten classes."""
    import torch
    from torch.utils.data import TensorDataset

    import phalanx

    data = TensorDataset(torch.zeros(64, *shape), torch.zeros(64, dtype=torch.long))
    return phalanx.Trainer(build, CrossEntropy(), data, batch_size=64, accumulation=4, **more)


def linear() -> Any:
    from torch import nn

    sizes = [512, 1024, 1024, 512, 10]
    layers = [[nn.Linear(i, o), nn.GELU()] for i, o in itertools.pairwise(sizes)]
    return trainer(lambda: nn.Sequential(*itertools.chain(*layers)), 512)


def convolutions() -> Any:
    from torch import nn

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2),
            nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 10),
        )  # fmt: skip

    return trainer(build, 3, 32, 32, batch_norm="global")


def attention() -> Any:
    from torch import nn

    def build() -> nn.Module:
        block = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(4)]
        return nn.Sequential(*block, nn.Flatten(), nn.Linear(64 * 32, 10))

    return trainer(build, 32, 64)


def plan() -> dict[str, Any]:
    """Return the documents of `phalanx plan` without their sentences."""
    words = {name: text.split() for name, text in PLANS.items()}
    for name, text in MODULES.items():
        words[name] = ["--script", f"{__file__}:{name}", *text.split()]
    return {name: facts_of_plan(document("plan", *each)) for name, each in words.items()}


def facts_of_plan(found: Mapping[str, Any]) -> Any:
    """Return the numbers and names of a plan, floats with nine digits; of most candidates a row."""
    noise = ("advice", "recipe", "loader_rows_per_s")
    kept = {name: value for name, value in found.items() if name not in noise}
    question = {name: each for name, each in kept["question"].items() if name != "script"}
    kept["question"] = question | {"model": question["model"].rpartition("/")[2]}
    first, *others = kept["candidates"] or [None]
    kept["candidates"] = [
        first,
        *([each[n] for n in ("strategy", "microbatch", "step_time_s")] for each in others),
    ]
    return rounded(kept)


def rounded(value: Any) -> Any:
    """Return a document with nine digits of each float: those after may differ by libm."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def verify() -> dict[str, Any]:
    """Return what `phalanx verify --json` says but its errors, which are noise."""
    return {
        name: facts_of_verdicts(document("verify", *text.split()))
        for name, text in VERIFIED.items()
    }


def facts_of_verdicts(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return names, verdicts and counts; of the errors, what they are of."""
    return [
        {**verdict, "largest_errors": sorted(verdict["largest_errors"])}
        for verdict in found["verdicts"]
    ]


def document(*words: str) -> dict[str, Any]:
    """Return the JSON document that a verb writes."""
    from phalanx.cli.main import main

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main([*words, "--json"]) == 0
    return json.loads(shown.getvalue().splitlines()[-1])


SECTIONS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "ledger": ledger,
    "plan": plan,
    "verify": verify,
}


def read(section: str) -> dict[str, Any]:
    """Return a section as it was written."""
    return json.loads((FOLDER / f"{section}.json").read_text())


def text_of(section: Mapping[str, Any]) -> str:
    """Return a section as text with one row a line."""
    lines: list[str] = []
    for name, value in section.items():
        lines.append(f"{json.dumps(name)}: {_text(value, 1)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _text(value: Any, depth: int) -> str:
    """Return JSON whose innermost lists and objects take a line, if it is short."""
    line = json.dumps(value)
    if len(line) <= 120 - depth or not isinstance(value, dict | list):
        return line
    indent = " " * depth
    if isinstance(value, dict):
        parts = [
            f"{indent}{json.dumps(key)}: {_text(each, depth + 1)}" for key, each in value.items()
        ]
        return "{\n" + ",\n".join(parts) + "}"
    return "[\n" + ",\n".join(indent + _text(each, depth + 1) for each in value) + "]"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, compute in SECTIONS.items():
        (FOLDER / f"{name}.json").write_text(text_of(compute()))
