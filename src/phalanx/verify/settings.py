"""Settings of `phalanx verify`; this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from phalanx.config import CorpusConfig, OptimizerConfig, ShapeConfig, TrainConfig
from phalanx.config.fields import Positional, Range, Use

SEQ_LEN = 17
"""Default number of tokens of a sample; a training run rounds it up to equal position shards."""


EVALUATION = "eval output"
"""Quantity: result in `eval()` after the last step, the model's output or a sum of losses."""

ROUTING = "routing"
"""Quantity: the set of experts of each token, by router; the error is the margin of the worst."""

VALIDATION = "validation loss"
"""Quantity: mean loss of the validation data, which an evaluation measures."""

STATE = "optimizer's"
"""Prefix of the names of quantities for optimizer state other than AdamW's moments."""

QUANTITIES = (
    ROUTING,
    "loss",
    "buffer",
    "gradient",
    "norm",
    "learning rate",
    "first moment",
    "second moment",
    "weight",
    EVALUATION,
    VALIDATION,
)
"""Quantities that verify compares in each step, and after the last step."""


@dataclass(frozen=True, kw_only=True)
class VerifyShape(ShapeConfig):
    """Sizes and layers that replace the shape's; unset ones stay."""

    norm: Literal["rms", "rms+1", "layer"] | None = None
    """RMSNorm, the same with weights less one, or LayerNorm."""
    norm_at: Literal["input", "output", "both"] | None = None
    """Where the branches of a block are normalised."""
    position: Literal["rope", "learned"] | None = None
    """Rotary positions, or a learned table."""
    mlp: Literal["swiglu", "geglu", "gelu"] | None = None
    """The feed-forward layer."""
    bias: bool | None = None
    """Whether linear maps have a bias."""
    qk_norm: bool | None = None
    """Whether queries and keys are normalised."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Run a strategy beside plain PyTorch on one process, and compare every number of every step.

    Without --model it runs three small decoders that cover all our layers, and typical user
    modules, on uneven batches, and then again with three ranks on an axis that has two.
    """

    strategy: Annotated[str, Positional("[STRATEGY]")] = "dp2"
    """Such as dp2, fsdp2:zero1, dp2,fsdp2 or tp4:2d; `phalanx train --help` has the grammar."""
    model: str | None = None
    """Preset of one shape to run, instead of the small ones."""
    steps: Annotated[int, Range(1)] = 4
    """Optimizer steps to compare."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Data type of weights and arithmetic; float64 shows whether the strategy is exact."""
    global_size: Annotated[int | None, Range(1)] = None
    """Sequences in one step; if unset, data ranks have uneven shares, and the second step more."""
    accumulation: Annotated[int | None, Range(1)] = None
    """Microbatches that each rank cuts its rows into; 3 if unset, or one more than there are
    ranks on pp, and for gpt2 twice the ranks on pp."""
    seq_len: Annotated[int, Range(1)] = SEQ_LEN
    """Tokens of a sequence."""
    seed: Annotated[int, Range(0, 2**63 - 1, "[]")] = 0
    """Fixes weights, batches and dropout masks."""
    train: bool = False
    """Verify a training run too: first weights, precision, data, evaluation, saving, and resuming
    with another strategy and batch. The settings are then as for `phalanx train`, see
    `phalanx verify --train --help`."""
    three: bool = True
    """Run again with three ranks on an axis that has two; not with --model."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute: gloo processes, or NCCL with one GPU for each rank."""
    debug_comm: bool = False
    """Compare each collective of all ranks before it runs, and name the first two calls that do not
    match; slow."""
    shape: VerifyShape = field(default_factory=VerifyShape)
    """Sizes and layers that replace the shape's."""
    optimizer: OptimizerConfig = field(
        # A rate high enough to change weights clearly; a limit low enough to clip every step.
        default_factory=lambda: OptimizerConfig(lr=1e-2, clip_norm=0.2, warmup_steps=0)
    )
    """AdamW, the learning rate and clipping."""


@dataclass(frozen=True, kw_only=True)
class VerifyTrainConfig(TrainConfig):
    """Run a strategy beside plain PyTorch as `phalanx verify` does, and then a training run.

    The settings are as for `phalanx train`, from a file of a run too, and they hold for the run:
    dropout, sequence length, optimizer, document mask and all others. The length of the runs, their
    text and what they read and write are verify's own; model sizes default to small values.
    """

    strategy: Annotated[str | None, Positional("[STRATEGY]")] = "dp2"
    """Such as dp2, fsdp2:zero1, dp2,fsdp2 or tp4:2d; `phalanx train --help` has the grammar."""
    train: bool = True
    """Verify a training run; without this word, `phalanx verify` has other settings."""
    device: Annotated[Literal["cpu", "cuda"], Use.RESOLVED] = "cpu"
    """Where to compute."""
    eval_samples: Annotated[int, Use.EQUAL, Range(1)] = 5
    """Validation samples in one measurement of the validation loss."""
    corpus: CorpusConfig = field(
        default_factory=lambda: CorpusConfig(seq_len=SEQ_LEN, validation=0.1)
    )
    """How text becomes samples."""
    optimizer: OptimizerConfig = field(
        # No warm-up, so that the schedule in the middle of a run is a half cosine.
        default_factory=lambda: OptimizerConfig(lr=1e-2, clip_norm=0.2, warmup_steps=0)
    )
    """AdamW, the learning rate and clipping."""
