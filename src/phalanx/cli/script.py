"""`phalanx train --script FILE:JOB` and `phalanx verify --script FILE:JOB`: a user's job."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Positional, Range, Schema, settings
from phalanx.config.schema import JobConfig, RunConfig
from phalanx.config.validate import AUTO
from phalanx.errors import ConfigError
from phalanx.object_store import path_of
from phalanx.report.output import print_json
from phalanx.report.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.script.trainer import Options, Trainer
    from phalanx.verify.verdict import Verdict


def has_script_option(argv: list[str]) -> bool:
    """Return whether a command line has --script."""
    return any(word.partition("=")[0] == "--script" for word in argv)


def script_help(verb: str, schema: type) -> str:
    """Return the lines of `verb --help` on its form with --script."""
    keys = [setting.key for setting in settings(schema) if setting.positional is None]
    options = " ".join(f"--{key.replace('_', '-')}" for key in keys)
    purpose = " ".join((schema.__doc__ or "").split())
    about = f"phalanx {verb} --script FILE.py:FUNCTION: {purpose} Its options are {options};"
    return textwrap.fill(f"{about} phalanx {verb} --script --help says more.", 78)


def _read(argv: list[str], schema: type[Schema], *, prog: str) -> Schema:
    is_help = {"-h", "--help"}.intersection(argv)  # even if --script lacks its value
    return read_command_line(["--help"] if is_help else argv, schema, prog=prog)


@dataclass(frozen=True, kw_only=True)
class ScriptTrainConfig(JobConfig):
    """Train a job of your own: a function that returns a phalanx.Trainer."""

    script: str = ""
    """FILE.py:FUNCTION; the function takes no arguments."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


@dataclass(frozen=True, kw_only=True)
class ScriptVerifyConfig:
    """Prove that a strategy computes what one process computes, on a job of your own.

    A job runs in the trainer's loop beside plain PyTorch; a script with a loop of its own runs on
    one process and on the strategy's.
    """

    strategy: Annotated[str | None, Positional("STRATEGY")] = None
    """How to split the work, such as pp2,dp2."""
    script: str = ""
    """FILE.py:FUNCTION, which returns a phalanx.Trainer; or FILE.py, whose own loop calls
    phalanx.init, with words of its own after --."""
    steps: Annotated[int, Range(1)] = 5
    """Steps to take; a job is saved twice on the way, and a further run resumes from each."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Data type of weights and arithmetic."""
    three: bool = False
    """If nothing differs, also run with three ranks on an axis that has two; not in a job of
    torchrun."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


class _Chosen(NamedTuple):
    """A strategy, and lines with the planner's reasons; no lines without `auto`."""

    strategy: str
    why: list[str]


def train(argv: list[str]) -> int:
    """Train the job of the command line, and print the summary."""
    from phalanx.launch.torchrun import run_verb

    return run_verb(lambda: _settle(argv), lambda settled: _train(*settled))


def _settle(argv: list[str]) -> tuple[ScriptTrainConfig, Trainer, _Chosen, Options]:
    """Return the settings, the job, its strategy and the options of the run."""
    from phalanx.launch.local import prepare_server
    from phalanx.launch.rank_env import is_under_torchrun
    from phalanx.train.job.resume import continued

    config = continued(_read(argv, ScriptTrainConfig, prog="phalanx train --script"))
    if not is_under_torchrun():
        prepare_server("phalanx.script.session")  # imports torch beside this process
    from phalanx.script.automatic import chosen
    from phalanx.script.trainer import Options, trainer_of
    from phalanx.strategy import refuse_servers
    from phalanx.train.job.request import choose, choose_device
    from phalanx.train.job.run_folder import net_files, new_folder

    trainer = trainer_of(config.script)
    if config.steps is not None:
        trainer = dataclasses.replace(trainer, steps=config.steps)
    if config.strategy == AUTO:
        strategy, why = chosen(trainer, config.script, config)
        device, _ = choose_device(config.device)
    else:
        strategy, device = choose(config.strategy, config.nproc, config.device)
        why = []
    refuse_servers(strategy, "a script")
    if config.out is not None and config.resume is not None:
        raise ConfigError(
            "out and resume are both given, but a resumed run writes to its own folder; give one "
            "of them"
        )
    net_files(config, Path())
    name = f"{Path(config.script).stem}-{config.script.rpartition(':')[2]}"
    out = path_of(config.resume or config.out or new_folder(name, strategy))
    shared = {each.name: getattr(config, each.name) for each in dataclasses.fields(RunConfig)}
    shared["device"] = device
    options = Options(**shared, out=out, resume=bool(config.resume))
    return config, trainer, _Chosen(str(strategy), why), options


def _train(config: ScriptTrainConfig, trainer: Trainer, chosen: _Chosen, options: Options) -> int:
    again = f" --strategy {AUTO}" if config.strategy == AUTO else ""
    command = f"phalanx train --script {config.script}{again} --resume"
    summary = trainer.start(chosen.strategy, options, command, chosen.why)
    if os.environ.get("RANK", "0") == "0":
        Terminal(wraps=True).show(*summary.parts(report=config.report))
        if config.json:
            print_json(summary)
    return 0


def verify(argv: list[str]) -> int:
    """Verify the job of the command line; return 1 if a value differs, else 0."""
    from phalanx.launch.torchrun import run_verb

    return run_verb(lambda: _job_verifier(argv), lambda job: _verify(*job))


def _job_verifier(argv: list[str]) -> tuple[ScriptVerifyConfig, Callable[[], list[Verdict]]]:
    """Return the settings, and a function that verifies the job or script."""
    from phalanx.launch.rank_env import is_under_torchrun
    from phalanx.script.loop_proof import prove_script
    from phalanx.script.trainer import trainer_of
    from phalanx.strategy import Strategy, refuse_servers
    from phalanx.verify.cases import with_three

    at = argv.index("--") if "--" in argv else len(argv)
    config = _read(argv[:at], ScriptVerifyConfig, prog="phalanx verify --script")
    if config.strategy is None:
        raise ConfigError("STRATEGY is missing; expected: phalanx verify dp2 --script FILE:JOB")
    strategy, script = Strategy.parse(config.strategy), config.script
    refuse_servers(strategy, "a script")
    has_loop = ":" not in script and Path(script).is_file()
    if has_loop and config.dtype != "float64":
        raise ConfigError(
            f"dtype is {config.dtype}, but {script} has a loop of its own, which is verified in "
            "float64; leave dtype out, or give FILE:JOB"
        )
    trainer = None if has_loop else trainer_of(script)

    def prove(each: Strategy) -> Verdict:
        if trainer is None:
            return prove_script(script, argv[at + 1 :], each, config.steps)
        return trainer.verify(each, steps=config.steps, dtype=config.dtype)

    def judge() -> list[Verdict]:
        verdicts = [prove(strategy)]
        wider = with_three(strategy) if config.three and not is_under_torchrun() else None
        return [*verdicts, prove(wider)] if verdicts[0].is_equal and wider else verdicts

    return config, judge


def _verify(config: ScriptVerifyConfig, judge: Callable[[], list[Verdict]]) -> int:
    import torch.distributed as dist

    from phalanx.cli.verify import print_verdicts, show_verdicts
    from phalanx.comm.together import barrier
    from phalanx.script.arguments import not_ending

    with not_ending(config.script):
        verdicts = judge()
    if os.environ.get("RANK", "0") == "0":
        is_job = ":" in config.script
        show_verdicts(verdicts, Terminal(wraps=True), "plain PyTorch" if is_job else "the script")
        if config.json:
            print_verdicts(verdicts)
    if dist.is_initialized():  # wait: torchrun kills all ranks when one exits with 1
        barrier()
    return 0 if all(verdict.is_equal for verdict in verdicts) else 1
