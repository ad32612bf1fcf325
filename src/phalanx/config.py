"""The one typed configuration: a TOML file, the command line and the API all make this value.

The sections of the file are the nested dataclasses below, so `[optimizer] lr = 1e-3` in a file is
`--optimizer.lr 1e-3` on the command line and `TrainConfig(optimizer=OptimizerConfig(lr=1e-3))` in
Python. What a legal value is, stands in config_check; how the value is read, in config_load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from phalanx.errors import BatchError

MOST_ROWS: Final = 2**20
"""Most sequences of one rank in one step: their numbers and tokens are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """Sizes that replace those of the preset named by `model`; unset ones stay the preset's."""

    num_layers: int | None = None
    """Number of transformer blocks."""
    hidden: int | None = None
    """Width of the residual stream."""
    num_heads: int | None = None
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: int | None = None
    """Width of one head; hidden / num_heads if only those are given."""
    ffn: int | None = None
    """Inner width of the feed-forward layer."""
    vocab_size: int | None = None
    """Rows of the embedding."""
    max_seq_len: int | None = None
    """Longest sequence the positions allow."""
    tied: bool | None = None
    """Whether the output projection is the embedding."""
    dropout: float | None = None
    """Probability of dropping an element of the embedding and of each residual branch."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """How text becomes samples."""

    seq_len: int = 256
    """Tokens in one sample."""
    vocab_size: int | None = None
    """Size of the tokenizer that is trained when none is given; the model's vocabulary, at most
    8192, if unset."""
    validation: float = 0.02
    """Share of the text's bytes kept aside for validation, in whole documents but for one."""
    max_bytes: int | None = None
    """Read at most this many bytes of text; all of it if unset."""
    document_mask: bool = True
    """Whether a token attends only to tokens of its own document."""
    shuffle: bool = True
    """Whether each epoch visits the samples in an order of its own."""
    tail: Literal["keep", "drop", "pad"] = "keep"
    """The samples left over at the end of the last epoch: a smaller batch, dropped, or padded with
    samples from the start of the epoch."""
    cache: str | None = None
    """Folder of tokenizers and token files; $XDG_CACHE_HOME/phalanx or ~/.cache/phalanx if
    unset."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch law: global_size = microbatch x accumulation x data ranks; two give the third."""

    global_size: int | None = None
    """Sequences in one optimizer step over all ranks."""
    microbatch: int | None = None
    """Sequences in one forward pass of one rank."""
    accumulation: int | None = None
    """Forward and backward passes of one rank before each optimizer step."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, a cosine schedule with warm-up, and clipping."""

    lr: float = 2e-3
    """Highest learning rate."""
    min_lr_ratio: float = 0.02
    """The learning rate at the last step, as a share of lr."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises from 0; a tenth of the steps, at most 200, if
    unset."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; vectors (norms, biases) do not decay."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient; 0 switches clipping off."""
    clip_p: float = 2.0
    """The p of that norm: 1, 2 or inf."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a decoder on text over one or many processes."""

    model: str | None = None
    """Preset of the model's shape, listed at the end of this help; that of the checkpoint to begin
    with or go on from, else demo, if unset."""
    data: str | None = None
    """A file, folder or glob of .txt, .md, .py, .jsonl (field "text") or .parquet, relative to the
    working folder; the standard library of this Python if unset."""
    tokenizer: str | None = None
    """A tokenizer.json; a byte-level BPE trained on the data if unset."""
    strategy: str | None = None
    """How to split the work, such as dp2 or fsdp2,recompute:full; dp over all processes if unset.
    All that can be asked for stands at the end of this help."""
    nproc: int | None = None
    """Processes to start on this host; what the strategy needs, or 2 (one per GPU), if unset."""
    steps: int | None = None
    """Optimizer steps; what `epochs` asks for, else 560, which suits the demo, if unset."""
    epochs: float | None = None
    """Passes over the data, instead of steps; unset, the run is as long as `steps` says."""
    seed: int = 0
    """Fixes the initial weights, the order of the data and the dropout masks."""
    precision: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the arithmetic; master weights are float32 (float64 for float64). auto: bfloat16
    where the device has it, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    compile: bool = False
    """Compile each block with torch.compile."""
    threads: int | None = None
    """CPU threads of each process; the cores shared evenly if unset."""
    out: str | None = None
    """Folder of what the run writes; runs/<model>-<strategy>-<date> if unset."""
    resume: str | None = None
    """A run folder or checkpoint folder to go on from, with the settings of its config.toml; those
    that are given override them."""
    eval_every: int = 100
    """Steps between two measurements of the validation loss; 0: only at the start and the end."""
    eval_samples: int = 256
    """Validation samples in one such measurement."""
    prompt: str | None = None
    """How the sample begins that the model writes at the end; the first words of the validation
    text if unset."""
    report: bool = False
    """Print at the end, before the result, the tables of where time, bytes and memory went."""
    init: str | None = None
    """A checkpoint, or a run folder, to take the first weights from, and nothing else; the model
    then has that checkpoint's shape."""
    save_every: int = 0
    """Steps between two checkpoints that are kept; 0: only the one at the end."""
    save_every_minutes: float = 10.0
    """Most minutes between two checkpoints; those made for this are replaced by the next one. 0: no
    such checkpoints."""
    keep_checkpoints: int | None = None
    """Of the checkpoints after every `save_every` steps and at the end, how many to keep, the
    latest; all of them if unset."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What all ranks do on a loss or gradient that is not finite: end the run, or skip the step."""
    debug_comm: bool = False
    """Compare each collective of all ranks before it runs, and name the first two calls that do not
    match; slow."""
    timeout_s: float = 600.0
    """Longest wait for another rank, in seconds."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """Sizes that replace the preset's."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """How text becomes samples."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """The batch law: global_size = microbatch x accumulation x data ranks; two give the third."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW, the learning rate and clipping."""


@dataclass(frozen=True)
class BatchPlan:
    """The batch law solved: global_size = microbatch x accumulation x num_data_ranks."""

    global_size: int
    microbatch: int
    accumulation: int
    num_data_ranks: int

    def __str__(self) -> str:
        return (
            f"global batch {self.global_size} = microbatch {self.microbatch} x accumulation "
            f"{self.accumulation} x {self.num_data_ranks} data ranks"
        )


def solve_batch(batch: BatchConfig, num_data_ranks: int) -> BatchPlan:
    """Solve the batch law for the numbers that are not given.

    Any two of global_size, microbatch and accumulation give the third. With fewer than two,
    accumulation is 1, and if that is not enough microbatch is 4.

    Args:
        batch: the numbers that were given.
        num_data_ranks: groups of ranks that see different samples.

    Raises:
        BatchError: the numbers contradict each other; names the nearest that do not.
    """
    size, microbatch, accumulation = batch.global_size, batch.microbatch, batch.accumulation
    for name in ("global_size", "microbatch", "accumulation"):
        value = getattr(batch, name)
        if value is not None and value < 1:
            raise BatchError(f"batch.{name} is {value}; it must be at least 1")
    if accumulation is None and (size is None or microbatch is None):
        accumulation = 1
    if microbatch is None and size is None:
        microbatch = 4
    if size is not None and size > MOST_ROWS * num_data_ranks:
        raise BatchError(
            f"batch.global_size is {size}, {size // num_data_ranks} sequences for each of "
            f"{num_data_ranks} data ranks; the most is {MOST_ROWS} a rank, "
            f"{MOST_ROWS * num_data_ranks} in all"
        )
    if microbatch is not None and accumulation is not None:
        if microbatch * accumulation > MOST_ROWS:
            raise BatchError(
                f"batch.microbatch {microbatch} x batch.accumulation {accumulation} are "
                f"{microbatch * accumulation} sequences for each rank; the most is {MOST_ROWS}"
            )
        product = microbatch * accumulation * num_data_ranks
        if size not in (None, product):
            raise BatchError(
                f"batch.global_size is {size}, but microbatch {microbatch} x accumulation "
                f"{accumulation} x {num_data_ranks} data ranks = {product}; set global_size to "
                f"{product}, or give only two of the three"
            )
        return BatchPlan(product, microbatch, accumulation, num_data_ranks)
    assert size is not None  # without it, the other two would both be known by now
    name, known = ("microbatch", microbatch) if microbatch else ("accumulation", accumulation)
    assert known is not None
    other, rest = divmod(size, known * num_data_ranks)
    if rest:
        raise BatchError(_indivisible(size, name, known, num_data_ranks))
    return BatchPlan(size, microbatch or other, accumulation or other, num_data_ranks)


def _indivisible(size: int, known_name: str, known: int, num_data_ranks: int) -> str:
    """Return the arithmetic of a global size that the known numbers do not divide, and the fix."""
    unit = known * num_data_ranks
    below, above = size // unit * unit, (size // unit + 1) * unit
    legal = f"{below} and {above} are" if below else f"{above} is"
    return (
        f"batch.global_size is {size}, which {known_name} {known} x {num_data_ranks} data ranks = "
        f"{unit} does not divide; {legal} the nearest global_size that it divides"
    )
