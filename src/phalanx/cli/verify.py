"""`phalanx verify STRATEGY`: prove that a strategy computes what one process computes."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.config_view import show_config
from phalanx.cli.screen import print_json, screen
from phalanx.config import CorpusConfig, OptimizerConfig, ShapeConfig, TrainConfig
from phalanx.config.fields import Positional, Range, Use, check_values, settings, value_at
from phalanx.config.law import check_warmup
from phalanx.config.load import Loaded, load_config
from phalanx.errors import ConfigError, PhalanxError

if TYPE_CHECKING:
    from phalanx.models.shape import ModelShape
    from phalanx.strategy import Strategy
    from phalanx.verify.verdict import Verdict

QUANTITIES = ("loss", "gradient", "norm", "first moment", "second moment", "weight")


@dataclass(frozen=True, kw_only=True)
class VerifyShape(ShapeConfig):
    """Sizes and layers that replace those of the shape; unset ones stay."""

    norm: Literal["rms", "layer"] | None = None
    """RMSNorm or LayerNorm."""
    position: Literal["rope", "learned"] | None = None
    """Rotary positions, or a learned table."""
    mlp: Literal["swiglu", "gelu"] | None = None
    """The feed-forward layer."""
    bias: bool | None = None
    """Whether linear maps have a bias."""
    qk_norm: bool | None = None
    """Whether queries and keys are normalised."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Run a strategy beside plain PyTorch on one process, and compare every number of every step.

    Without --model it runs two small decoders that between them have every layer of ours, on
    uneven batches, and then again with three ranks on an axis that has two.
    """

    strategy: Annotated[str, Positional("[STRATEGY]")] = "dp2"
    """Such as dp2, fsdp2:zero1, dp2,fsdp2 or tp4:2d; `phalanx train --help` has the grammar."""
    model: str | None = None
    """Preset of one shape to run, instead of the two small ones."""
    steps: Annotated[int, Range(1)] = 4
    """Optimizer steps to compare."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Data type of weights and arithmetic; float64 shows whether the strategy is exact."""
    global_size: Annotated[int | None, Range(1)] = None
    """Sequences in one step; an odd number, so that shares are uneven, if unset."""
    accumulation: Annotated[int, Range(1)] = 2
    """Microbatches that each rank cuts its share into."""
    seq_len: Annotated[int, Range(1)] = 17
    """Tokens of a sequence."""
    seed: Annotated[int, Range(0, 2**63 - 1, "[]")] = 0
    """Fixes weights, batches and dropout masks."""
    train: bool = False
    """Verify the road of training too: first weights, precision, data, evaluation, saving, and
    going on with another strategy and batch. The settings are then those of `phalanx train`, see
    `phalanx verify --train --help`."""
    three: bool = True
    """Run again with three ranks on an axis that has two; not with --model."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute: gloo processes, or NCCL with one GPU for each rank."""
    debug_comm: bool = False
    """Compare each collective of all ranks before it runs, and name the first two calls that do not
    match; slow."""
    shape: VerifyShape = field(default_factory=VerifyShape)
    """Sizes and layers that replace those of the shape."""
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=1e-2, clip_norm=0.2, warmup_steps=0)
    )
    """AdamW, the learning rate and clipping."""


@dataclass(frozen=True, kw_only=True)
class RoadConfig(TrainConfig):
    """Run a strategy beside plain PyTorch as `phalanx verify` does, and then the road of training.

    The settings are those of `phalanx train`, from a file of a run too, and they hold for the road:
    dropout, sequence length, optimizer, document mask and all others. The length of the runs, their
    text and what they read and write are verify's own; sizes of the model that are not given are
    small.
    """

    strategy: Annotated[str | None, Positional("[STRATEGY]")] = "dp2"
    """Such as dp2, fsdp2:zero1, dp2,fsdp2 or tp4:2d; `phalanx train --help` has the grammar."""
    train: bool = True
    """Verify the road of training; without this word, `phalanx verify` has other settings."""
    device: Annotated[Literal["cpu", "cuda"], Use.RESOLVED] = "cpu"
    """Where to compute."""
    eval_samples: Annotated[int, Use.LAW, Range(1)] = 5
    """Validation samples in one measurement of the validation loss."""
    corpus: CorpusConfig = field(default_factory=lambda: CorpusConfig(seq_len=17, validation=0.1))
    """How text becomes samples."""
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=1e-2, clip_norm=0.2, warmup_steps=1)
    )
    """AdamW, the learning rate and clipping."""


def run(argv: list[str]) -> int:
    """Verify as the command line says; 1 if something differs."""
    from phalanx.launch import slurm
    from phalanx.launch.rank_env import is_under_torchrun
    from phalanx.launch.torchrun import leave, leave_failed

    slurm.adopt()
    try:
        schema = RoadConfig if "--train" in argv else VerifyConfig
        loaded: Loaded[RoadConfig | VerifyConfig] = load_config(argv, schema, prog="phalanx verify")
        if loaded.config.train != (schema is RoadConfig):
            raise ConfigError(
                "train is set otherwise than by the word --train alone, which decides what else "
                "may be set; write --train, or leave it out"
            )
        strategy = _checked(loaded.config)
    except PhalanxError as error:
        if is_under_torchrun():
            leave_failed(error, is_everyones=True)
        raise
    if loaded.show_config:
        show_config(loaded)
        return 0
    if not is_under_torchrun():
        return _told(_verify(loaded.config, strategy, screen()), loaded.json)
    try:
        leave(_told(_join(loaded.config, strategy), loaded.json))
    except BaseException as error:
        leave_failed(error)


def _told(verdicts: Sequence[Verdict], as_json: bool) -> int:
    """Print the verdicts, in a job on rank 0; return the exit code."""
    if os.environ.get("RANK", "0") == "0":
        _show(verdicts, screen())
        if as_json:
            print_json(_document(verdicts))
    return 0 if all(verdict.is_equal for verdict in verdicts) else 1


def _checked(config: RoadConfig | VerifyConfig) -> Strategy:
    """Return the strategy.

    Raises:
        ConfigError: a value is out of range, or the strategy is for other ranks than there are.
    """
    from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
    from phalanx.strategy import Strategy, require_built

    check_values(config)
    if isinstance(config, VerifyConfig):  # the other is judged as a run
        check_warmup(config.optimizer, config.steps)
    strategy = Strategy.parse(config.strategy or "dp2")
    require_built(strategy)
    if is_under_torchrun():
        place, is_on_one = read_rank_env(), not isinstance(config, RoadConfig)
        if place.num_ranks != strategy.num_ranks:
            raise ConfigError(
                f"{strategy} is for {strategy.num_ranks} ranks, and {place.num_ranks} are started; "
                f"start {strategy.num_ranks} (torchrun --nproc-per-node), or run `phalanx verify` "
                "without torchrun, which starts them itself"
            )
        if not is_on_one and place.num_here < place.num_ranks:
            raise ConfigError(
                "verify --train saves to a folder of its own that all ranks read, and they are on "
                "several hosts; start them on one, or leave --train out"
            )
    else:
        _check_device(strategy, config.device)
    return strategy


def _join(config: RoadConfig | VerifyConfig, strategy: Strategy) -> Sequence[Verdict]:
    """Verify on the ranks that torchrun has started."""
    from phalanx.launch.torchrun import run_here
    from phalanx.verify.harness import WAIT_S

    console = screen() if os.environ["RANK"] == "0" else Console(quiet=True)
    keys = [setting.key for setting in settings(type(config)) if not setting.use & Use.LOCAL]
    return run_here(
        lambda: config,
        lambda config: {key: value_at(config, key) for key in keys},
        lambda config: _verify(config, strategy, console),
        device=config.device,
        timeout_s=WAIT_S,
    )


def _verify(
    config: RoadConfig | VerifyConfig, strategy: Strategy, console: Console
) -> list[Verdict]:
    """Compare what the configuration names, up to the first that differs."""
    if isinstance(config, VerifyConfig):
        return _verify_steps(config, strategy, console)
    device = "cuda" if config.device == "cuda" else "cpu"
    steps = VerifyConfig(strategy=str(strategy), seed=config.seed, device=device)
    verdicts = _verify_steps(steps, strategy, console)
    if all(verdict.is_equal for verdict in verdicts):
        from phalanx.verify.training import verify_training

        console.print(Text(f"{strategy}: a small run, saved and gone on with", "dim"))
        with _folder() as folder:
            verdicts += verify_training(strategy, config, folder)
    return verdicts


@contextmanager
def _folder() -> Generator[Path]:
    """Make a folder for a while; in a job it is rank 0's for all."""
    import torch.distributed as dist

    from phalanx.comm.together import barrier, broadcast_object

    if dist.is_initialized() and dist.get_rank() > 0:
        yield broadcast_object(None)
        barrier()
        return
    with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as name:
        yield broadcast_object(Path(name)) if dist.is_initialized() else Path(name)
        if dist.is_initialized():
            barrier()  # the others may still read it


def _verify_steps(config: VerifyConfig, strategy: Strategy, console: Console) -> list[Verdict]:
    """Compare the steps of the shapes that the configuration names."""
    import torch.distributed as dist

    from phalanx.verify.cases import Settings, decoder_case, with_three
    from phalanx.verify.harness import compare_cases

    settings = Settings(
        config.steps, config.accumulation, config.seq_len, config.dtype, config.seed,
        config.global_size, config.optimizer, config.device,
    )  # fmt: skip
    verdicts: list[Verdict] = []
    may_be_wider = config.three and config.model is None and not dist.is_initialized()
    wider = with_three(strategy) if may_be_wider else None
    for each in filter(None, (strategy, wider)):
        if each is wider:
            _check_device(each, config.device)
        shapes = _shapes(config, each)
        if shapes is None:
            continue
        words = [_described(name, shape) for name, shape in shapes.items()]
        console.print(Text(f"{each}: {', '.join(words)}", "dim"))
        cases = {name: decoder_case(shape, each, settings) for name, shape in shapes.items()}
        verdicts += compare_cases(cases, each, config.debug_comm)
        if not all(verdict.is_equal for verdict in verdicts):
            break
    return verdicts


def _check_device(strategy: Strategy, device: str) -> None:
    from phalanx.planner.fit import check_memory_for

    if device == "cpu":
        check_memory_for(strategy.num_ranks)
        return
    import torch

    if strategy.num_ranks > (num_gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"device is cuda and {strategy} needs {strategy.num_ranks} GPUs, but this host has "
            f"{num_gpus}; use --device cpu"
        )


def _shapes(config: VerifyConfig, strategy: Strategy) -> dict[str, ModelShape] | None:
    """Return the shapes to run; None if an axis of three does not split what was asked for."""
    from phalanx.models.registry import shape_of, with_sizes
    from phalanx.verify.cases import awkward_shapes, splits

    if config.model is not None:
        return {config.model: with_sizes(shape_of(config.model), config.shape)}
    shapes = {
        name: with_sizes(shape, config.shape) for name, shape in awkward_shapes(strategy).items()
    }
    is_asked = str(strategy) == str(type(strategy).parse(config.strategy))
    fits = is_asked or all(splits(shape, strategy) for shape in shapes.values())
    return shapes if fits else None


def _described(name: str, shape: ModelShape) -> str:
    heads = f"{shape.num_heads}/{shape.num_kv_heads} heads"
    return (
        f"{name} ({shape.num_layers} x {shape.hidden}, {heads}, {shape.vocab_size} ids, dropout "
        f"{shape.dropout:g})"
    )


def _show(verdicts: Sequence[Verdict], console: Console) -> None:
    console.print("Largest errors against plain PyTorch in one process, relative, of all steps")
    console.print(_table(verdicts))
    _show_bytes(verdicts[0], console)
    for verdict in verdicts:
        style = "green" if verdict.is_equal else "bold red"
        name = f"{verdict.case}, " if verdict.case else ""
        console.print(Text(f"{name}{verdict.headline()}", style))
        for line in verdict.details():
            console.print(Text(f"  {line}"))


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in QUANTITIES:
        table.add_column(name, justify="right")
    for verdict in verdicts:
        cells: list[Text] = []
        for quantity in QUANTITIES:
            found = [verdict.worst(step, quantity) for step in verdict.steps]
            worst = max((d for d in found if d), key=lambda d: d.error, default=None)
            style = "" if worst is None or worst.passes else "bold red"
            cells.append(Text("" if worst is None else f"{worst.error:.1e}", style))
        table.add_row(Text(f"{verdict.strategy} {verdict.case}"), *cells)
    return table


def _show_bytes(verdict: Verdict, console: Console) -> None:
    if not verdict.sent:
        return
    table = Table(box=None, pad_edge=False)
    for name in ("phase", "axis", "collective", "bytes counted", "predicted"):
        table.add_column(
            name, justify="right" if name in ("bytes counted", "predicted") else "left"
        )
    for row in verdict.sent:
        style = "" if row.counted == row.predicted else "bold red"
        numbers = [Text(f"{n:,}", style) for n in (row.counted, row.predicted)]
        table.add_row(row.phase, row.axis, row.op, *numbers)
    console.print(f"Sent in the last step of {verdict.strategy} {verdict.case}", table, sep="\n")


def _document(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "is_equal": all(verdict.is_equal for verdict in verdicts),
        "verdicts": [_as_dict(verdict) for verdict in verdicts],
    }


def _as_dict(verdict: Verdict) -> dict[str, Any]:
    first = verdict.first
    worst = {
        quantity: max(
            (d.error for d in verdict.differences if d.quantity == quantity), default=None
        )
        for quantity in QUANTITIES
    }
    return {
        "strategy": verdict.strategy,
        "case": verdict.case,
        "is_equal": verdict.is_equal,
        "num_compared": len(verdict.differences),
        "largest_errors": worst,
        "first_difference": None if first is None else str(first),
        "place": None if verdict.place is None else dataclasses.asdict(verdict.place),
        "unequal_ranks": verdict.replicas,
        "causes": verdict.causes,
        "sent": [dataclasses.asdict(row) for row in verdict.sent],
    }
