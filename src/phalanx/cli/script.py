"""`phalanx train --script FILE:JOB` and `phalanx verify --script FILE:JOB`: a job of one's own."""

from __future__ import annotations

import dataclasses
import os
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.table import Table
from rich.text import Text

from phalanx.cli.screen import print_json, say, screen
from phalanx.config.command_line import read_command_line
from phalanx.config.fields import (
    MINUTES,
    STEPS,
    THREADS,
    TIMEOUT_S,
    Positional,
    Range,
    Schema,
    settings,
)
from phalanx.errors import ConfigError
from phalanx.measure.utilization import percent

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.script.fit import Fitted
    from phalanx.script.trainer import Options, Trainer
    from phalanx.verify.verdict import Verdict


def is_asked(argv: list[str]) -> bool:
    """Return whether a command line names a script."""
    return any(word.partition("=")[0] == "--script" for word in argv)


def script_help(verb: str, schema: type) -> str:
    """Return the lines of `verb --help` on its form for a job of one's own."""
    keys = [setting.key for setting in settings(schema) if setting.positional is None]
    options = " ".join(f"--{key.replace('_', '-')}" for key in keys)
    about = f"phalanx {verb} --script FILE.py:FUNCTION: {schema.__doc__} Its options are {options};"
    return textwrap.fill(f"{about} phalanx {verb} --script --help says more.", 78)


def _read(argv: list[str], schema: type[Schema], *, prog: str) -> Schema:
    is_help = {"-h", "--help"}.intersection(argv)  # though --script has no value yet
    return read_command_line(["--help"] if is_help else argv, schema, prog=prog)


@dataclass(frozen=True, kw_only=True)
class ScriptTrainConfig:
    """Train a job of your own: a function that returns a phalanx.Trainer."""

    script: str = ""
    """FILE.py:FUNCTION; the function takes no arguments."""
    strategy: str | None = None
    """How to split the work, such as pp2,dp2; dp over all processes if unset."""
    nproc: Annotated[int | None, Range(1)] = None
    """Processes to start; unset: what the strategy needs, else one a GPU, or 2 on a CPU."""
    steps: Annotated[int | None, STEPS] = None
    """Steps to take in all, in place of what the job says."""
    out: str | None = None
    """Folder of records and checkpoints; runs/FILE-FUNCTION-STRATEGY-DATE if unset."""
    resume: str | None = None
    """Folder of a run to go on from, under any strategy; what is new is written there."""
    save_every: Annotated[int, Range(0)] = 0
    """Steps between two checkpoints; 0: only one at the end, and by the clock."""
    save_every_minutes: Annotated[float, MINUTES] = 10.0
    """Most minutes between two checkpoints; 0: no bound."""
    eval_every: Annotated[int, Range(0)] = 0
    """Steps between two evaluations; 0: only at the start and the end."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to compute on."""
    threads: Annotated[int | None, THREADS] = None
    """CPU threads of each process; the cores shared evenly if unset."""
    timeout_s: Annotated[float, TIMEOUT_S] = 600.0
    """Longest wait for another rank, in seconds."""
    debug_comm: bool = False
    """Compare each collective of all ranks before it runs; slow."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


@dataclass(frozen=True, kw_only=True)
class ScriptVerifyConfig:
    """Prove that a strategy computes what one process computes, on a job of your own.

    A job runs in the trainer's loop beside plain PyTorch; a script with a loop of its own runs on
    one process and on those of the strategy.
    """

    strategy: Annotated[str | None, Positional("STRATEGY")] = None
    """How to split the work, such as pp2,dp2."""
    script: str = ""
    """FILE.py:FUNCTION, which returns a phalanx.Trainer; or FILE.py, whose own loop calls
    phalanx.init, with words of its own after --."""
    steps: Annotated[int, Range(1)] = 5
    """Steps to take; a job is saved in the middle, and another run resumes from there."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Data type of weights and arithmetic."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


def train(argv: list[str]) -> int:
    """Train the job that the command line names, and print what was measured."""
    from phalanx.launch.torchrun import run_verb

    return run_verb(lambda: _settle(argv), lambda settled: _train(*settled))


def _settle(argv: list[str]) -> tuple[ScriptTrainConfig, Trainer, str, Options]:
    """Return what the command line says, the job, its strategy and how it is run."""
    from phalanx.script.trainer import Options, trainer_of
    from phalanx.train.job.request import choose

    config = _read(argv, ScriptTrainConfig, prog="phalanx train --script")
    trainer = trainer_of(config.script)
    if config.steps is not None:
        trainer = dataclasses.replace(trainer, steps=config.steps)
    strategy, device = choose(config.strategy, config.nproc, config.device)
    if config.out is not None and config.resume is not None:
        raise ConfigError("out and resume are both given, and resume goes on in its own folder")
    stem = f"{Path(config.script).stem}-{config.script.rpartition(':')[2]}-{strategy}"
    named = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}".replace(":", "_").replace("/", "_")
    out = Path(config.resume or config.out or Path("runs") / named.replace(",", "-"))
    options = Options(
        out=out,
        resume=config.resume is not None,
        save_every=config.save_every,
        save_every_minutes=config.save_every_minutes,
        eval_every=config.eval_every,
        device="cuda" if device == "cuda" else "cpu",
        threads=config.threads,
        timeout_s=config.timeout_s,
        debug_comm=config.debug_comm,
    )
    return config, trainer, str(strategy), options


def _train(config: ScriptTrainConfig, trainer: Trainer, strategy: str, options: Options) -> int:
    fitted = trainer.start(strategy, options, f"phalanx train --script {config.script} --resume")
    if os.environ.get("RANK", "0") == "0":
        _show(fitted, options.out)
        if config.json:
            print_json(fitted)
    return 0


def verify(argv: list[str]) -> int:
    """Verify the job that the command line names; 1 if something differs."""
    from phalanx.launch.torchrun import run_verb

    return run_verb(lambda: _judged_job(argv), lambda job: _verify(*job))


def _judged_job(argv: list[str]) -> tuple[ScriptVerifyConfig, Callable[[], Verdict]]:
    """Return what the command line says, and what judges the job or script."""
    from phalanx.script.loop_proof import prove_script
    from phalanx.script.trainer import trainer_of
    from phalanx.strategy import Strategy

    at = argv.index("--") if "--" in argv else len(argv)
    config = _read(argv[:at], ScriptVerifyConfig, prog="phalanx verify --script")
    if config.strategy is None:
        raise ConfigError("STRATEGY is missing; expected: phalanx verify dp2 --script FILE:JOB")
    strategy, script = Strategy.parse(config.strategy), config.script
    has_loop = ":" not in script and Path(script).is_file()
    if has_loop and config.dtype != "float64":
        raise ConfigError(
            f"dtype is {config.dtype}, but {script} has a loop of its own, which is verified in "
            "float64; leave dtype out, or give FILE:JOB"
        )
    if has_loop:
        return config, lambda: prove_script(script, argv[at + 1 :], strategy, config.steps)
    trainer = trainer_of(script)
    return config, lambda: trainer.verify(strategy, steps=config.steps, dtype=config.dtype)


def _verify(config: ScriptVerifyConfig, judge: Callable[[], Verdict]) -> int:
    import torch.distributed as dist

    from phalanx.cli.verify import print_verdicts, show_verdicts
    from phalanx.comm.together import barrier
    from phalanx.script.arguments import not_ending

    with not_ending(config.script):
        verdict = judge()
    if os.environ.get("RANK", "0") == "0":
        show_verdicts([verdict], screen())
        if config.json:
            print_verdicts([verdict])
    if dist.is_initialized():  # torchrun ends all ranks when the first leaves with 1
        barrier()
    return 0 if verdict.is_equal else 1


def _show(fitted: Fitted, out: Path) -> None:
    """Print the result, the most important last."""
    console = screen()
    if fitted.sent:
        table = Table("phase", "axis", "collective", "calls", "sent MiB", box=None)
        for entry in fitted.sent:
            sent = f"{entry.sent_bytes / 2**20:.3f}"
            table.add_row(entry.phase, entry.axis, entry.op, str(entry.calls), sent)
        console.print(Text("What the first rank sends in a step"), table)
    if fitted.losses:
        rows = [("loss", f"{fitted.losses[-1]:.4f} in the last step")]
    else:
        done = f"nothing to do: {fitted.steps_done} steps are done; --steps N goes on to step N"
        rows = [("steps", done)]
    if fitted.evaluations:
        (_, first), (_, last) = fitted.evaluations[0], fitted.evaluations[-1]
        rows.append(("validation", f"loss {first:.4f} -> {last:.4f}"))
    if fitted.step_s is not None:
        mfu = "" if fitted.mfu is None else f", MFU {percent(fitted.mfu)} of ceiling"
        rows.append(("speed", f"{1e3 * fitted.step_s:,.1f} ms a step{mfu}"))
    if fitted.memory is not None:
        rows.append(("memory", f"{fitted.memory.peak_bytes / 2**20:,.1f} MiB of tensors at most"))
    rows += [("checkpoint", fitted.checkpoint), ("metrics", str(out / "metrics.jsonl"))]
    rows.append(("tensorboard", str(out / "tensorboard")))
    for name, text in rows:
        say(console, f"{name:<11} {text}")
