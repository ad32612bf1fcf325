"""Families of transformers' models under tp, against one process in float64."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hub import NUM_WORDS, small
from marks import by_hand
from phalanx.launch.local import run_ranks
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.verify.harness import verify_on_ranks
from phalanx.verify.record import Case
from phalanx.verify.verdict import Verdict

transformers = pytest.importorskip("transformers")

NUM_ROWS, LENGTH = 7, 9  # no degree divides them; windows are shorter
NUM_TOKENS_OF_IMAGE = 10  # nine patches and one more


@dataclasses.dataclass(frozen=True)
class Objective:
    """Cross-entropy over what a model says of tokens or rows; `inputs` are its arguments."""

    inputs: tuple[str, ...] = ("input_ids", "attention_mask")

    def loss_sum(self, model: nn.Module, microbatch: dict, step: int) -> Tensor:
        logits = model(**{name: microbatch[name] for name in self.inputs}).logits
        labels = microbatch["labels"] if logits.ndim == 3 else microbatch["row_labels"]
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")

    def num_valid(self, microbatch: dict) -> int:
        return len(microbatch["row_labels"])


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    shape = (NUM_ROWS, LENGTH)
    places = torch.arange(LENGTH)[None]
    found: list[dict[str, Tensor]] = []
    for _ in range(2):
        lengths = torch.randint(3, LENGTH + 1, (NUM_ROWS, 1), generator=draw)
        is_padding = places >= lengths
        ids = torch.randint(1, NUM_WORDS, shape, generator=draw).masked_fill(is_padding, 0)
        labels = torch.randint(0, NUM_WORDS, shape, generator=draw)
        found.append(
            {
                "input_ids": ids,
                "attention_mask": (~is_padding).long(),
                "position_ids": torch.where(is_padding, places - lengths, places),
                "pixel_values": torch.randn(
                    NUM_ROWS, 3, 12, 12, generator=draw, dtype=torch.float64
                ),
                "labels": labels.masked_fill(is_padding, -100),
                "row_labels": torch.randint(0, 3, (NUM_ROWS,), generator=draw),
            }
        )
    return found


def make_cases() -> dict[str, Case]:
    families = ("mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3_text", "phi3")
    classes = "SequenceClassification"
    models = {name: (functools.partial(small, name), Objective()) for name in families}
    tied = functools.partial(small, tie_word_embeddings=True)
    models |= {
        "mistral, several sequences in a row": (models["mistral"][0], _of("position_ids")),
        "qwen3, tied": (functools.partial(tied, "qwen3"), _of()),
        **{
            f"{name}, classes": (functools.partial(small, name, classes), Objective())
            for name in ("llama", "gpt2", *families)
        },
        "vit": (
            functools.partial(small, "vit", "ImageClassification"),
            Objective(("pixel_values",)),
        ),
        "vit, eager": (
            functools.partial(small, "vit", "ImageClassification", attn_implementation="eager"),
            Objective(("pixel_values",)),
        ),
    }
    return {name: Case(*model, batches(), 2) for name, model in models.items()}


def _of(*inputs: str) -> Objective:
    return Objective(("input_ids", *inputs))


def run_split(text: str, names: list[str]) -> list[Verdict]:
    cases = make_cases()
    return verify_on_ranks({name: cases[name] for name in names}, Strategy.parse(text))
