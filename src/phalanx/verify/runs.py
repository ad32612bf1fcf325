"""The settings of the runs that `verify --train` verifies."""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from pathlib import Path
from typing import Any

from phalanx.config import BatchConfig, ShapeConfig, TrainConfig
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Axis, Strategy
from phalanx.verify.cases import awkward_shapes
from phalanx.verify.settings import SEQ_LEN

STEPS = 2
"""Steps after which the first run saves and the second goes on; each ends after twice as many."""

NARROW = ("float32", "bfloat16")
"""Precisions that the third run may have; bfloat16 stands for the others."""


def first_run(given: TrainConfig, strategy: Strategy, folder: Path) -> TrainConfig:
    """Return the settings of the first run, and write its text into `folder`.

    Settings hold as they are given, but for the length of the run, its data and what it reads and
    writes. Sizes that are not given are small.
    """
    num_lines = max(300, 4 * given.corpus.seq_len)
    lines = (f"The square of {n} is {n * n}, its cube {n**3}.\n" for n in range(num_lines))
    (folder / "squares.txt").write_text("".join(lines))
    plan = plan_decoder(strategy, awkward_shapes(strategy)["llama"])
    seq_len, shards = given.corpus.seq_len, plan.position_shards
    if seq_len == SEQ_LEN:
        seq_len = -(-seq_len // shards) * shards
    own: dict[str, Any] = {
        "data": str(folder / "squares.txt"),
        "tokenizer": None,
        "strategy": str(strategy),
        "nproc": None,
        "steps": 2 * STEPS,
        "epochs": None,
        "precision": "float64",
        "nonfinite": "skip",  # what is not finite is compared and named
        "out": str(folder / "first"),
        "resume": None,
        "init": None,
        "eval_every": STEPS,
        "save_every": STEPS,
        "save_every_minutes": 0.0,
        "keep_checkpoints": None,
        "shape": _sizes(given, strategy),
        "corpus": dataclasses.replace(
            given.corpus,
            seq_len=seq_len,
            vocab_size=300,
            max_bytes=None,
            cache=str(folder / "cache"),
        ),
    }
    if given.batch == BatchConfig():
        own["batch"] = BatchConfig(
            microbatch=max(2, plan.row_shards), accumulation=max(2, strategy.pp.degree + 1)
        )
    given_values = {field.name: getattr(given, field.name) for field in fields(TrainConfig)}
    return TrainConfig(**(given_values | own))


def _sizes(given: TrainConfig, strategy: Strategy) -> ShapeConfig:
    """Return the sizes that are given, and for the others small and awkward ones."""
    shape, sizes = awkward_shapes(strategy)["llama"], dataclasses.asdict(given.shape)
    small = ["num_layers", "hidden", "num_heads", "ffn"]
    if given.shape.hidden is None or given.shape.num_heads is None:
        small.append("head_dim")
    if given.model is None:  # else a preset says how many heads share a key
        small += ["tied", "dropout"]
        small += ["num_kv_heads"] if given.shape.num_heads is None else []
    for name in small:
        if sizes[name] is None:
            sizes[name] = getattr(shape, name)
    sizes["vocab_size"] = 307
    sizes["max_seq_len"] = sizes["max_seq_len"] or max(32, given.corpus.seq_len)
    return ShapeConfig(**sizes)


def second_run(config: TrainConfig, strategy: Strategy, checkpoint: Path) -> TrainConfig:
    """Return the settings of the run that goes on from the first run's checkpoint.

    It has another strategy and another global batch.
    """
    return dataclasses.replace(
        config,
        resume=str(checkpoint),
        out=str(Path(config.out or "").with_name("second")),
        strategy=str(other_strategy(strategy)),
        batch=BatchConfig(microbatch=2, accumulation=3),
    )


def other_strategy(strategy: Strategy) -> Strategy:
    """Return a strategy of as many ranks that splits otherwise, for the run that resumes."""
    if strategy.fsdp.degree > 1:
        return Strategy(dp=Axis(strategy.num_ranks, "bucketed"))
    return Strategy(fsdp=Axis(strategy.num_ranks, "zero3"))


def narrow_run(config: TrainConfig, precision: str) -> TrainConfig:
    """Return the settings of the first run in the narrow data type that is asked for."""
    chosen: Any = precision if precision in NARROW else "bfloat16"
    return dataclasses.replace(
        config, precision=chosen, out=str(Path(config.out or "").with_name("narrow"))
    )
