"""A small decoder and a text of its own, for the tests that train one, and what its runs record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.config import BatchConfig, CorpusConfig, ShapeConfig, TrainConfig

SHAPE = ShapeConfig(
    num_layers=1, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn=24, vocab_size=300,
    max_seq_len=64, dropout=0.1,
)  # fmt: skip


def small_run(folder: Path, num_lines: int = 400, **settings: Any) -> TrainConfig:
    """Write a text into `folder`; return the settings of a run on it that ends in `folder`/run."""
    text = "".join(
        f"The square of {n} is {n * n}, and its cube {n**3}.\n" for n in range(num_lines)
    )
    (folder / "squares.txt").write_text(text)
    small: dict[str, Any] = {
        "data": str(folder / "squares.txt"),
        "precision": "float64",
        "device": "cpu",
        "threads": 1,
        "eval_every": 0,
        "out": str(folder / "run"),
        "shape": SHAPE,
        "corpus": CorpusConfig(seq_len=24, cache=str(folder / "cache"), validation=0.1),
        "batch": BatchConfig(global_size=8, microbatch=2),
    }
    return TrainConfig(**{**small, **settings})


def records(folder: str | Path | None, kind: str) -> list[dict[str, Any]]:
    """Return what a run has recorded of one kind, in its order."""
    assert folder is not None
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def losses(folder: str | Path | None) -> list[float]:
    """Return the loss of each step of a run."""
    return [record["loss"] for record in records(folder, "step")]


def tokenizer_of(num_tokens: int) -> str:
    """Return a byte-level tokenizer.json with this many tokens."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["<|endoftext|>", *(f"<{i}>" for i in range(num_tokens - 257))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer.to_str()
