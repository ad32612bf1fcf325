"""`phalanx run SCRIPT`: run a user's training loop on several processes of this host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from phalanx.config.command_line import read_command_line
from phalanx.config.fields import THREADS, TIMEOUT_S, Positional, Range
from phalanx.config.profile_options import ProfileOptions
from phalanx.data.cache import cache_folder, fingerprint
from phalanx.errors import ConfigError, Interrupted
from phalanx.launch.launched import launched
from phalanx.launch.rank_env import is_under_torchrun


@dataclass(frozen=True, kw_only=True)
class ScriptRunConfig:
    """Run a script that calls phalanx.init on several processes of this host, which join one job.

    Words after -- are the script's own. On several hosts: phalanx launch -- run SCRIPT.
    """

    script: Annotated[str | None, Positional("SCRIPT")] = None
    """The Python file to run."""
    nproc: Annotated[int | None, Range(1)] = None
    """Processes to start; unset: what the strategy needs, else one a GPU, or 2 on a CPU."""
    strategy: str | None = None
    """How to split the work, for a script whose phalanx.init() names no strategy."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to compute on."""
    threads: Annotated[int | None, THREADS] = None
    """CPU threads of each process; unset: the cores shared evenly."""
    timeout_s: Annotated[float, TIMEOUT_S] = 600.0
    """Longest wait of one process for another, in seconds."""
    proof: bool = True
    """Compare the first steps of a new script, or of a changed one, with one process."""
    profile: Annotated[str | None, ProfileOptions] = None
    """Steps to profile, as of `phalanx train`, into a new folder of runs/; without a proof."""
    debug_net: str | None = None
    """Folder for a file of each process with what c10d, gloo and NCCL print."""


def run(argv: list[str]) -> int:
    """Run the script on every process until all have ended.

    Raises:
        ConfigError: the script does not exist, or the number of processes does not fit.
        RankFailed: the script failed; has the traceback of the process that failed first.
        Interrupted: a signal ended the script, or the script exited in response to a signal.
    """
    from phalanx.launch.torchrun import run_verb

    return run_verb(lambda: _read(argv), lambda checked: _run(*checked))


def _read(argv: list[str]) -> tuple[ScriptRunConfig, Path, list[str]]:
    """Return the settings, the script and its own words, once the script can be run."""
    at = argv.index("--") if "--" in argv else len(argv)
    words, own = argv[:at], argv[at + 1 :]
    config = read_command_line(words, ScriptRunConfig, prog="phalanx run")
    if config.script is None:
        raise ConfigError("SCRIPT is missing; expected: phalanx run SCRIPT [OPTIONS] [-- WORDS]")
    path = Path(config.script)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; expected a Python script")
    if is_under_torchrun() and launched() is None:
        raise ConfigError(
            "phalanx run starts its own processes, but this process is already a rank, as under "
            f"torchrun; start the script with torchrun directly: torchrun ... {path}, or by: "
            f"phalanx launch --hosts a:2,b:2 -- run {path}"
        )
    from phalanx.script.arguments import check_python

    check_python(path)
    return config, path, own


def _run(config: ScriptRunConfig, path: Path, own: list[str]) -> int:
    from phalanx.launch.local import prepare_server, run_ranks

    if not is_under_torchrun():
        prepare_server("phalanx.script.loop_proof")
    import phalanx
    from phalanx.launch import debug_net
    from phalanx.launch.failure import report
    from phalanx.script.init import refuse_in_own_loop
    from phalanx.script.loop_proof import is_proved, run_proved
    from phalanx.script.script_rank import run_script
    from phalanx.train.job.request import choose

    # A later generation of `phalanx launch` may have other ranks than the command asks for.
    job = launched()
    text = config.strategy if job is None or job.strategy is None else job.strategy
    strategy, device = choose(text, config.nproc, config.device)
    refuse_in_own_loop(strategy)
    options: dict[str, Any] = {"device": device, "threads": config.threads}
    options["timeout_s"] = config.timeout_s
    source = path.read_bytes()
    may_join = b"phalanx" in source or b"is_initialized" in source
    if strategy.num_ranks > 1 and b"init_process_group(" in source and not may_join:
        raise ConfigError(
            f"{path} makes its own process group by init_process_group, and phalanx run makes one, "
            "too; call phalanx.init in its place, or start the script by python or torchrun"
        )
    # A script that does not name phalanx trains by other means, each time at full length.
    is_due = (
        config.proof and config.profile is None and strategy.num_ranks > 1 and b"phalanx" in source
    )
    proved = cache_folder(None) / "proved" / fingerprint(source, own, strategy, phalanx.__version__)
    if is_due and job is not None:
        is_due = False
        if os.environ["RANK"] == "0" and job.generation == 0:
            report(
                "not proved: phalanx launch starts no process to compare with; compare on one "
                f"host by: phalanx verify {strategy} --script {path}"
            )
    if is_due and device != "cpu":
        report(
            "not proved: one process would need a GPU of its own; compare on CPUs by: "
            f"phalanx verify {strategy} --script {path}"
        )
    ends: list[tuple[int, str]]
    with debug_net.into(None if config.debug_net is None else Path(config.debug_net)):
        if is_due and device == "cpu" and not is_proved(proved):
            ends = run_proved(str(path), own, strategy, config.strategy, proved, **options)
        else:
            given = (str(path), own, config.strategy, config.profile)
            ends = run_ranks(run_script, strategy.num_ranks, *given, **options)
    if any(signum for signum, _ in ends):
        raise Interrupted(*max(ends))
    return 0
