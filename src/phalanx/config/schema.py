"""The typed configuration of a run, built from TOML files, the command line or the API.

The sections of the file are the nested dataclasses below, so `[optimizer] lr = 1e-3` in a file is
`--optimizer.lr 1e-3` on the command line and `TrainConfig(optimizer=OptimizerConfig(lr=1e-3))` in
Python. The annotation of a field has its range and use; `validate` checks for contradictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Final, Literal

from phalanx.config.fields import SEED, STEPS, THREADS, TIMEOUT_S, OneOf, Range, Use
from phalanx.config.profile_options import ProfileOptions
from phalanx.config.save_policy import SavePolicy

MOST_ROWS: Final = 2**20
"""Most sequences of one rank in one step; all their indices and tokens are in memory at once."""

SMALLEST_VOCABULARY: Final = 257
"""Smallest vocabulary of a byte-level tokenizer: one token per byte, and the end of a text."""


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """Sizes that replace the ones of the preset named by `model`; unset ones stay the preset's."""

    num_layers: Annotated[int | None, Use.RESOLVED, Range(1, 10_000, "[]")] = None
    """Number of transformer blocks."""
    hidden: Annotated[int | None, Use.RESOLVED, Range(1)] = None
    """Width of the residual stream."""
    num_heads: Annotated[int | None, Use.RESOLVED, Range(1)] = None
    """Number of query heads."""
    num_kv_heads: Annotated[int | None, Use.RESOLVED, Range(1)] = None
    """Number of key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: Annotated[int | None, Use.RESOLVED, Range(1)] = None
    """Width of one head; hidden / num_heads if only those are given."""
    ffn: Annotated[int | None, Use.RESOLVED, Range(1)] = None
    """Inner width of the feed-forward layer."""
    vocab_size: Annotated[int | None, Use.RESOLVED, Range(1)] = None
    """Rows of the embedding."""
    max_seq_len: Annotated[int | None, Use.RESOLVED, Range(1)] = None
    """Longest sequence the positions allow."""
    window: Annotated[int | None, Use.RESOLVED, Range(1)] = None
    """Positions that a query looks at, in the blocks that have a window; all if the preset has none
    and this is unset."""
    tied: Annotated[bool | None, Use.RESOLVED] = None
    """Whether the output projection is the embedding."""
    dropout: Annotated[float | None, Use.RESOLVED, Range(0, 1)] = None
    """Probability of dropping an element of the embedding and of each residual branch."""
    experts: Annotated[str | None, Use.RESOLVED] = None
    """Experts in place of the MLPs: num_experts=8,top_k=2,ffn=704, and other entries of
    docs/experts.md; each replaces the preset's."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """How text becomes samples."""

    seq_len: Annotated[int, Use.DATA_ORDER, Range(2)] = 256
    """Tokens in one sample; of chats, also the most of one conversation, which is cut there."""
    vocab_size: Annotated[
        int | None,
        Use.RESOLVED | Use.FIXED_BY_TOKENIZER,
        Range(SMALLEST_VOCABULARY),
    ] = None
    """Size of the tokenizer that is trained when none is given; the model's vocabulary, at most
    8192, if unset."""
    validation: Annotated[float, Use.DATA_ORDER, Range(0, 1)] = 0.02
    """Part of the text's bytes kept aside for validation, in whole documents but for one."""
    max_bytes: Annotated[int | None, Use.RESOLVED, Range(1)] = None
    """Read at most this many bytes of text; all of it if unset."""
    turns: Annotated[Literal["all", "last"], Use.EQUAL] = "all"
    """Answers of a conversation to train on, of data that are chats."""
    document_mask: Annotated[bool, Use.EQUAL] = True
    """Whether a token attends only to tokens of its own document."""
    shuffle: Annotated[bool, Use.DATA_ORDER] = True
    """Whether each epoch visits the samples in an order of its own."""
    tail: Annotated[Literal["keep", "drop", "pad"], Use.EQUAL] = "keep"
    """The samples left over at the end of the last epoch: a smaller batch, dropped, or padded with
    samples from the start of the epoch."""
    cache: Annotated[str | None, Use.PATH | Use.NOT_RESUMED] = None
    """Folder of tokenizers and token files; $XDG_CACHE_HOME/phalanx or ~/.cache/phalanx if unset. A
    resumed run writes to another only if it is given anew."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch law: global_size = microbatch x accumulation x data ranks; two give the third."""

    global_size: Annotated[int | None, Use.RESOLVED, Range(1)] = None
    """Sequences in one optimizer step over all ranks."""
    microbatch: Annotated[
        int | Literal["auto"] | None,
        Use.RESOLVED | Use.NOT_RESUMED,
        Range(1, MOST_ROWS, "[]"),
    ] = None
    """Sequences in one forward pass of one rank; auto: the fastest that fits."""
    accumulation: Annotated[int | None, Use.RESOLVED | Use.NOT_SAVED, Range(1, MOST_ROWS, "[]")] = (
        None
    )
    """Forward and backward passes of one rank before each optimizer step."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or Muon, a cosine schedule with warm-up, and clipping."""

    kind: Annotated[Literal["adamw", "muon"], Use.EQUAL] = "adamw"
    """Optimizer; muon updates the matrices of blocks by Muon, and all other parameters by AdamW."""
    lr: Annotated[float, Use.EQUAL, Range(0, math.inf, "()")] = 2e-3
    """Highest learning rate."""
    min_lr_ratio: Annotated[float, Use.EQUAL, Range(0, 1, "[]")] = 0.02
    """The learning rate at the last step, as a part of lr."""
    warmup_steps: Annotated[int | None, Use.EQUAL, Range(0)] = None
    """Steps over which the learning rate rises from 0; a tenth of the steps, at most 200, if
    unset."""
    beta1: Annotated[float, Use.EQUAL, Range(0, 1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Use.EQUAL, Range(0, 1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Use.EQUAL, Range(0, math.inf, "()")] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Use.EQUAL, Range(0)] = 0.1
    """Decoupled decay of matrices; vectors (norms, biases) do not decay."""
    matrix_lr: Annotated[float | None, Use.EQUAL, Range(0, math.inf, "()")] = None
    """Highest learning rate of Muon's matrices; lr if unset."""
    momentum: Annotated[float, Use.EQUAL, Range(0, 1)] = 0.95
    """Decay of Muon's mean of the gradients."""
    nesterov: Annotated[bool, Use.EQUAL] = True
    """Whether Muon takes the mean one step ahead."""
    adjust_lr: Annotated[Literal["original", "match_rms_adamw"], Use.EQUAL] = "match_rms_adamw"
    """How Muon scales the rate of a matrix [A, B]: by sqrt(max(1, A/B)), or by 0.2 sqrt(max(A, B)),
    which suits rates of AdamW."""
    ns_steps: Annotated[int, Use.EQUAL, Range(1, 99, "[]")] = 5
    """Newton-Schulz steps of Muon."""
    ns_dtype: Annotated[Literal["bfloat16", "float32"], Use.EQUAL] = "bfloat16"
    """Data type of Muon's Newton-Schulz steps; float64 for float64 weights."""
    clip_norm: Annotated[float, Use.EQUAL, Range(0)] = 1.0
    """Largest norm of the whole gradient; 0 switches clipping off."""
    clip_p: Annotated[float, Use.EQUAL, OneOf((1, 2, math.inf))] = 2.0
    """The p of that norm: 1, 2 or inf."""


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Direct preference optimization, of data with chosen and rejected answers."""

    beta: Annotated[float, Use.EQUAL, Range(0, math.inf, "()")] = 0.1
    """How strongly the loss holds the model to the one that the run begins with."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Parameter servers, of a strategy such as dp3:ps."""

    num_servers: Annotated[int, Use.LOCAL, Range(1, 64, "[]")] = 2
    """Servers that the weights are spread over; of two or more, each is the backup of another."""
    groups: Annotated[int, Use.LOCAL, Range(1, 64, "[]")] = 1
    """Groups of workers, of equally many or one more, each with a scheduler of its own."""
    grace_s: Annotated[float, Use.EQUAL, Range(0, 60, "[]")] = 0.0
    """How long an update of dp:quorum that has its quorum waits for more, in seconds."""
    rule: Annotated[Literal["adamw", "sgd", "momentum"], Use.EQUAL] = "adamw"
    """How servers update the weights by gradients; the workers of dp:local always take AdamW."""
    momentum: Annotated[float, Use.EQUAL, Range(0, 1)] = 0.9
    """Momentum of the rule of that name."""
    table_rule: Annotated[Literal["sgd", "adagrad"] | None, Use.EQUAL] = None
    """How servers update the embedding rows that a step looks up, without weight decay; adagrad
    keeps one sum for a row. If unset, `rule` updates the whole embedding."""
    table_lr: Annotated[float | None, Use.EQUAL, Range(0, math.inf, "()")] = None
    """Peak learning rate of table_rule; optimizer.lr if unset."""
    outer_lr: Annotated[float, Use.EQUAL, Range(0, math.inf, "()")] = 0.7
    """Learning rate by which servers apply the changes of dp:local."""
    outer_momentum: Annotated[float, Use.EQUAL, Range(0, 1)] = 0.9
    """Nesterov momentum with which servers apply the changes of dp:local."""
    coordinator: Annotated[str | None, Use.LOCAL | Use.NOT_SAVED] = None
    """Address of a coordinator that `phalanx server` has started; this process is one worker of its
    job, and starts no servers."""
    worker: Annotated[int | None, Use.LOCAL | Use.NOT_SAVED, Range(0)] = None
    """Number of this worker in the job of `coordinator`; worker 0 evaluates and saves."""
    secret: Annotated[str | None, Use.LOCAL | Use.NOT_SAVED] = None
    """File of the secret of that job, which `phalanx server secret` makes."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a run is carried out, whatever it trains."""

    precision: Annotated[
        Literal["auto", "float64", "float32", "bfloat16", "float16"], Use.RESOLVED
    ] = "auto"
    """Data type of the arithmetic; master weights are float32 (float64 for float64). auto: bfloat16
    where the device has it, else float32; for a module of your own, the types that it has."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Use.RESOLVED] = "auto"
    """Where to compute."""
    compile: Annotated[bool, Use.EQUAL] = False
    """Compile each block with torch.compile."""
    threads: Annotated[int | None, Use.LOCAL, THREADS] = None
    """CPU threads of each process; the cores shared evenly if unset."""
    eval_every: Annotated[int, Use.EQUAL, Range(0)] = 0
    """Steps between two measurements of the validation loss; 0: only at the start and the end."""
    save: Annotated[str, Use.EQUAL, SavePolicy] = str(SavePolicy())
    """Checkpoints, such as every=500,minutes=10,keep=3,best=min:loss: one after every 500 steps and
    at the end, of which the latest 3 stay, or all; one after 10 minutes without any, until the next
    (0: none); and the best by the loss, or a metric as of max:accuracy, of the evaluations."""
    memory_every: Annotated[int | None, Use.EQUAL | Use.NOT_SAVED, Range(0)] = None
    """Most steps that a restart by `phalanx launch` loses, by saves in memory, of which each host
    also has another host's part; 0: restarts resume from the disk. Unset: as few as take 4 % of
    the time, and 0 without restarts."""
    patience: Annotated[int | None, Use.EQUAL, Range(1)] = None
    """Evaluations without a better one, by the best of `save` or min:loss, that end the run."""
    nonfinite: Annotated[Literal["stop", "skip"], Use.EQUAL] = "stop"
    """What all ranks do on a loss or gradient that is not finite: end the run, or skip the step."""
    shared_memory: Annotated[bool, Use.EQUAL] = True
    """Whether ranks of one host that compute on CPUs share memory, where gloo would send."""
    compress: Annotated[Literal["none", "auto", "bf16", "int8", "powersgd"], Use.EQUAL] = "none"
    """Compression of the gradients that dp sends over a slow link, with error feedback; auto: the
    fastest of float32, bf16 and int8 on the link."""
    log_to: Annotated[str | None, Use.LOCAL] = None
    """MODULE:FUNCTION, or FILE.py:FUNCTION, to call on rank 0 with the kind and the values of each
    record of metrics.jsonl."""
    debug_comm: Annotated[bool, Use.EQUAL] = False
    """Compare each collective of all ranks before it runs, and name the first two calls that do not
    match; slow."""
    debug_net: Annotated[bool, Use.LOCAL | Use.NOT_SAVED] = False
    """Write what c10d, gloo and NCCL print to <out>/logs/net-rank-N.log and nccl-rank-N.log."""
    timeout_s: Annotated[float, Use.EQUAL, TIMEOUT_S] = 600.0
    """Longest wait for another rank, in seconds."""
    profile: Annotated[str | None, Use.EQUAL | Use.NOT_SAVED, ProfileOptions] = None
    """Steps to profile, such as wait=1,warmup=1,active=2, with torch.profiler's switches: repeat,
    record_shapes, profile_memory, with_stack, with_flops; the traces are in <out>/trace."""

    @cached_property
    def save_policy(self) -> SavePolicy:
        """Policy of the text `save`; ConfigError if it is illegal."""
        return SavePolicy.parse(self.save)


@dataclass(frozen=True, kw_only=True)
class JobConfig(RunConfig):
    """A run as a command line asks for it."""

    strategy: Annotated[str | None, Use.RESOLVED] = None
    """How to split the work, such as dp2 or fsdp2,recompute:full; dp over all processes if unset;
    auto: the fastest that fits. `phalanx train --help` ends with a list of all strategies."""
    nproc: Annotated[int | None, Use.RESOLVED | Use.NOT_SAVED, Range(1)] = None
    """Processes to start on this host; if unset what the strategy needs, or 2 (one per GPU), or for
    the strategy auto one per GPU or core."""
    steps: Annotated[int | None, Use.RESOLVED, STEPS] = None
    """Optimizer steps in all; what `epochs`, or a job of your own, asks for if unset, else 560,
    which suits the demo."""
    out: Annotated[str | None, Use.PATH | Use.NOT_SAVED] = None
    """Folder of what the run writes; runs/<name>-<strategy>-<date> if unset."""
    resume: Annotated[str | None, Use.PATH | Use.NOT_SAVED] = None
    """A run folder to resume from, under any strategy. A run on text takes the settings of its
    config.toml, and those that are given override them; it may be a checkpoint's folder too. auto:
    `out` if it has a checkpoint, else a new run there."""
    report: Annotated[bool, Use.LOCAL | Use.NOT_SAVED] = False
    """Print at the end, before the result, the tables of where time, bytes and memory went."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(JobConfig):
    """Train a decoder on text over one or many processes."""

    model: Annotated[str | None, Use.RESOLVED] = None
    """Preset of the model's shape, listed at the end of this help, or a Hugging Face folder, which
    gives shape, first weights and tokenizer; the checkpoint's to begin with or resume from, else
    demo, if unset."""
    data: Annotated[str | None, Use.PATH] = None
    """A file, folder or glob, relative to the working folder, or an address such as s3://bucket/web:
    .txt, .md, .py, .jsonl and .json (field "text"), also .gz and .zst; .parquet; folders saved by
    `datasets`; token ids in .bin, .npy or a column "input_ids". Or a mixture by weights of samples,
    0.7*web/,0.3*code/. Rows of chats, by the fields messages, prompt and completion, conversations,
    or instruction and output, are recognised, and pairs for DPO, by chosen and rejected. The
    standard library of this Python if unset."""
    tokenizer: Annotated[str | None, Use.PATH | Use.FIXED_BY_TOKENIZER] = None
    """A tokenizer.json; a byte-level BPE trained on the data if unset."""
    chat_template: Annotated[str | None, Use.PATH | Use.NOT_RESUMED] = None
    """A file with the Jinja template of chats; the one of the model's folder if unset."""
    epochs: Annotated[float | None, Use.RESOLVED, Range(0, 10**9, "(]")] = None
    """Passes over the data, instead of steps; unset, the run is as long as `steps` says."""
    seed: Annotated[int, Use.DATA_ORDER, SEED] = 0
    """Fixes the initial weights, the order of the data and the dropout masks."""
    eval_every: Annotated[int, Use.EQUAL, Range(0)] = 100
    eval_samples: Annotated[int, Use.EQUAL, Range(1)] = 256
    """Validation samples in one such measurement."""
    prompt: Annotated[str | None, Use.EQUAL] = None
    """How the sample begins that the model writes at the end; the first words of the validation
    text if unset. Of chats, the question that it answers."""
    init: Annotated[str | None, Use.PATH | Use.NOT_RESUMED] = None
    """A checkpoint, or a run folder, to take the first weights from, and nothing else; the model
    then has that checkpoint's shape."""
    lora: Annotated[str | None, Use.RESOLVED] = None
    """Train low-rank adapters of the model of `init`, and freeze the rest: r=16,alpha=32 and
    targets=q_proj+v_proj, by default all-linear; rslora divides alpha by the root of r."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """Sizes that replace the preset's."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """How text becomes samples."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """The batch law: global_size = microbatch x accumulation x data ranks; two give the third."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW, the learning rate and clipping."""
    dpo: DpoConfig = field(default_factory=DpoConfig)
    """Direct preference optimization, of data with chosen and rejected answers."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """Parameter servers, of a strategy such as dp3:ps."""
