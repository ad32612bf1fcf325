"""The same Llama for the trainer, and beside it phalanx's own decoder with the same weights.

phalanx train --script examples/llama/job.py:of_transformers --strategy pp2,dp2
phalanx train --script examples/llama/job.py:ours --strategy fsdp2,tp2
python examples/llama/job.py
"""

import dataclasses
import functools
from pathlib import Path

import phalanx
import torch
from plain import build, load
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset


class NextByte:
    def loss_sum(self, model: nn.Module, microbatch: list[Tensor], step: int) -> Tensor:
        (rows,) = microbatch
        logits = model(rows).logits[:, :-1].flatten(0, 1)
        return cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum")

    def num_valid(self, microbatch: list[Tensor]) -> int:
        return microbatch[0][:, 1:].numel()


class NextByteOfOurs(NextByte):
    """Our decoder makes no logits where it is given labels; -100 counts for none."""

    def loss_sum(self, model: nn.Module, microbatch: list[Tensor], step: int) -> Tensor:
        (rows,) = microbatch
        return model(rows, nn.functional.pad(rows[:, 1:], (0, 1), value=-100))


def of_transformers(num_rows: int = 1000, length: int = 64) -> phalanx.Trainer:
    return phalanx.Trainer(
        build,
        NextByte(),
        TensorDataset(load(num_rows, length)),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        batch_size=16,
        accumulation=2,
        unit="bytes",
    )


def build_ours() -> nn.Module:
    return phalanx.decoder_of(build())


def ours(num_rows: int = 1000, length: int = 64) -> phalanx.Trainer:
    job = of_transformers(num_rows, length)
    return dataclasses.replace(job, build=build_ours, objective=NextByteOfOurs())


def main(strategy: str = "dp2") -> None:
    for name, job in {"transformers": of_transformers(), "ours": ours()}.items():
        fitted = job.train(strategy, phalanx.Options(out=Path("runs") / f"llama-{name}"))
        print(f"{name}: loss {fitted.losses[-1]:.4f}, {1e3 * fitted.step_s:.1f} ms a step")


if __name__ == "__main__":
    main()
