"""`phalanx verify STRATEGY`: prove that a strategy computes what one process computes."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from phalanx.cli import script
from phalanx.config import TrainConfig
from phalanx.config.fields import Use, check_values, settings, value_at
from phalanx.config.help import show_config
from phalanx.config.load import Loaded, load_config
from phalanx.config.validate import check_warmup
from phalanx.data.corpus import sources
from phalanx.errors import ConfigError
from phalanx.report.output import print_json
from phalanx.report.tabular import Line, Table
from phalanx.report.terminal import Terminal
from phalanx.verify.settings import QUANTITIES, VerifyConfig, VerifyTrainConfig

if TYPE_CHECKING:
    from phalanx.models.shape import ModelShape
    from phalanx.strategy import Strategy
    from phalanx.verify.verdict import Verdict

MOST_LENGTH: Final = 1 << 14
"""Largest `corpus.seq_len` of verify --train, in tokens."""

AnyConfig = VerifyConfig | VerifyTrainConfig


def run(argv: list[str]) -> int:
    """Run `phalanx verify`; return 1 if a value differs, else 0."""
    if script.has_script_option(argv):
        return script.verify(argv)
    from phalanx.launch.torchrun import run_verb

    def prepare() -> tuple[Loaded[AnyConfig], Strategy]:
        schema = VerifyTrainConfig if "--train" in argv else VerifyConfig
        try:
            loaded: Loaded[AnyConfig] = load_config(argv, schema, prog="phalanx verify")
        except SystemExit:
            if {"-h", "--help"}.intersection(argv):
                print(script.script_help("verify STRATEGY", script.ScriptVerifyConfig))
            raise
        if loaded.config.train != (schema is VerifyTrainConfig):
            raise ConfigError(
                "train is set by other means than the option --train without a value, which "
                "decides which options are legal; write --train, or leave it out"
            )
        return loaded, _checked(loaded.config)

    return run_verb(prepare, lambda prepared: _run(*prepared))


def _run(loaded: Loaded[AnyConfig], strategy: Strategy) -> int:
    """Verify, print the verdicts (in a job only on rank 0), and return the exit code."""
    from phalanx.launch.rank_env import is_under_torchrun

    if loaded.show_config:
        show_config(loaded)
        return 0
    if is_under_torchrun():
        is_equal = _join(loaded, strategy)
    else:
        is_equal = _verify_and_show(loaded, strategy, Terminal(wraps=True))
    return 0 if is_equal else 1


def _verify_and_show(loaded: Loaded[AnyConfig], strategy: Strategy, console: Terminal) -> bool:
    """Verify, print the verdicts on rank 0, and return whether all values are equal."""
    verdicts = _verify(loaded.config, strategy, console)
    is_equal = all(verdict.is_equal for verdict in verdicts)
    if os.environ.get("RANK", "0") == "0":
        show_verdicts(verdicts, console)
        if is_equal and (others := with_second_axis(strategy)):
            also = (
                f"One axis can hide faults that appear with two. Also run: phalanx verify {others}"
            )
            console.say(also, "dim")
        if loaded.json:
            print_verdicts(verdicts)
    return is_equal


def _checked(config: AnyConfig) -> Strategy:
    """Check the settings before the verification starts; return the strategy."""
    from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
    from phalanx.train.job.request import choose_strategy

    check_values(config)
    if isinstance(config, VerifyConfig):  # the training run checks the warm-up of --train
        check_warmup(config.optimizer, config.steps)
    elif is_under_torchrun() and read_rank_env().num_here < read_rank_env().num_ranks:
        raise ConfigError(
            "verify --train saves to a temporary folder that all ranks read, but the ranks are on "
            "several hosts; start them on one host, or leave --train out"
        )
    strategy = choose_strategy(TrainConfig(strategy=config.strategy, device=config.device))[0]
    if isinstance(config, VerifyConfig):
        from phalanx.verify.cases import check_sizes

        check_sizes(config, strategy)
    else:  # check before the long verification of steps
        if config.data is not None:
            sources(config.data)
        if config.corpus.seq_len > MOST_LENGTH:
            raise ConfigError(
                f"corpus.seq_len is {config.corpus.seq_len:,}; expected at most {MOST_LENGTH:,}, "
                "because verify generates a text of several samples, and one process computes "
                "all of it"
            )
    return strategy


def _join(loaded: Loaded[AnyConfig], strategy: Strategy) -> bool:
    """Verify on the ranks that torchrun started; return whether all values are equal.

    Rank 0 prints inside the job, where the ranks wait: torchrun kills all when one exits with 1.
    """
    from phalanx.launch.torchrun import run_here
    from phalanx.verify.harness import WAIT_S

    config = loaded.config
    console = Terminal(wraps=True, is_quiet=os.environ["RANK"] != "0")
    keys = [setting.key for setting in settings(type(config)) if not setting.use & Use.LOCAL]
    return run_here(
        lambda: config,
        lambda config: {key: value_at(config, key) for key in keys},
        lambda _: _verify_and_show(loaded, strategy, console),
        device=config.device,
        timeout_s=WAIT_S,
    )


def _verify(config: AnyConfig, strategy: Strategy, console: Terminal) -> list[Verdict]:
    """Compare the steps, then with --train a training run, up to the first difference."""
    if isinstance(config, VerifyConfig):
        return _verify_steps(config, strategy, console)
    steps = VerifyConfig(strategy=str(strategy), seed=config.seed, device=config.device)
    verdicts = _verify_steps(steps, strategy, console)
    if all(verdict.is_equal for verdict in verdicts):
        from phalanx.verify.training import verify_training

        console.say(f"{strategy}: a small run, saved and resumed", "dim")
        with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as folder:
            verdicts += verify_training(strategy, config, Path(folder))
    return verdicts


def _verify_steps(config: VerifyConfig, strategy: Strategy, console: Terminal) -> list[Verdict]:
    """Compare the steps of all configured cases, also on a wider strategy; stop at a difference."""
    from phalanx.verify.cases import configured_cases, shapes_to_verify
    from phalanx.verify.harness import compare_cases

    verdicts: list[Verdict] = []
    for each in filter(None, (strategy, _wider(config, strategy))):
        cases, shapes = configured_cases(each, config), shapes_to_verify(config, each)
        words = [_described(name, shapes[name]) if name in shapes else name for name in cases]
        console.say(f"{each}: {', '.join(words)}", "dim")
        verdicts += compare_cases(cases, each, config.debug_comm, report)
        if not all(verdict.is_equal for verdict in verdicts):
            break
    return verdicts


def _wider(config: VerifyConfig, strategy: Strategy) -> Strategy | None:
    """Return the strategy with three ranks on an axis; None if disabled or not applicable."""
    import torch.distributed as dist

    from phalanx.train.job.request import choose_strategy
    from phalanx.verify.cases import shapes_to_verify, splits, with_three

    wider = with_three(strategy)
    if not config.three or config.model is not None or dist.is_initialized() or wider is None:
        return None
    if not all(splits(shape, wider) for shape in shapes_to_verify(config, wider).values()):
        return None
    return choose_strategy(TrainConfig(strategy=str(wider), device=config.device))[0]


def with_second_axis(strategy: Strategy) -> str:
    """Return the strategy with a second axis; empty unless it has one axis and no servers."""
    if len([name for name, axis in strategy.axes() if axis.degree > 1]) != 1 or strategy.is_served:
        return ""
    return str(strategy.with_degree("dp" if strategy.data_ranks == 1 else "tp", 2))


def _described(name: str, shape: ModelShape) -> str:
    heads = f"{shape.num_heads}/{shape.num_kv_heads} heads"
    return (
        f"{name} ({shape.num_layers} x {shape.hidden}, {heads}, {shape.vocab_size} ids, dropout "
        f"{shape.dropout:g})"
    )


def report(verdict: Verdict, seconds: float) -> None:
    """Print one line on a verified case."""
    word = "equal" if verdict.is_equal else "differs"
    Terminal().say(f"  {verdict.case}: {word}, {seconds:.1f} s", "dim")


def show_verdicts(
    verdicts: Sequence[Verdict], console: Terminal, reference: str = "plain PyTorch"
) -> None:
    """Print the largest errors against `reference`, the bytes sent, and each verdict."""
    if any(verdict.differences for verdict in verdicts):
        console.say(f"Largest errors against {reference} in one process, relative, of all steps")
        console.show(_errors(verdicts))
        if (first := verdicts[0]).sent:
            console.say(f"Sent in the last step of {first.strategy} {first.case}")
            console.show(_bytes(first))
    for verdict in verdicts:
        style = "green" if verdict.is_equal else "bold red"
        name = f"{verdict.case}, " if verdict.case else ""
        console.say(f"{name}{verdict.headline()}", style)
        for line in verdict.details():
            console.say(f"  {line}")


def _errors(verdicts: Sequence[Verdict]) -> Table:
    # Quantities without errors, such as the learning rate, appear only in the JSON document.
    of_all = [each for verdict in verdicts for each in verdict.largest_errors().items()]
    found = {what for what, error in of_all if error > 0}
    quantities = [what for what in QUANTITIES if what in found]
    rows: list[list[Line]] = []
    for verdict in verdicts:
        wrong = {d.quantity for d in verdict.differences if not d.passes}
        errors = verdict.largest_errors()
        texts = {what: f"{error:.1e}" for what, error in errors.items()}
        cells = [Line(texts.get(q, ""), "bold red" if q in wrong else "") for q in quantities]
        rows.append([Line(f"{verdict.strategy} {verdict.case}"), *cells])
    return Table("", ["", *quantities], rows, quantities)


def _bytes(verdict: Verdict) -> Table:
    rows: list[tuple[str | Line, ...]] = []
    for row in verdict.sent:
        style = "" if row.predicted in (None, row.counted) else "bold red"
        sizes = ("-" if n is None else f"{n:,}" for n in (row.counted, row.predicted))
        rows.append((row.phase, row.axis, row.op, *(Line(size, style) for size in sizes)))
    heads = ("phase", "axis", "collective", "bytes counted", "predicted")
    return Table("", heads, rows, heads[3:])


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print all verdicts as one JSON document."""
    is_equal = all(verdict.is_equal for verdict in verdicts)
    print_json({"is_equal": is_equal, "verdicts": [_as_dict(each) for each in verdicts]})


def _as_dict(verdict: Verdict) -> dict[str, Any]:
    first = verdict.first
    return {
        "strategy": verdict.strategy,
        "case": verdict.case,
        "is_equal": verdict.is_equal,
        "num_compared": len(verdict.differences),
        "largest_errors": verdict.largest_errors(),
        "first_difference": None if first is None else str(first),
        "place": None if verdict.place is None else dataclasses.asdict(verdict.place),
        "unequal_ranks": verdict.replicas,
        "causes": verdict.causes,
        "failure": verdict.failure,
        "sent": [dataclasses.asdict(row) for row in verdict.sent],
    }
