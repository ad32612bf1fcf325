"""`phalanx verify STRATEGY`: prove that a strategy computes what one process computes."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from phalanx.cli import script
from phalanx.config import TrainConfig
from phalanx.config.fields import Use, check_values, settings, value_at
from phalanx.config.help import show_config
from phalanx.config.load import Loaded, load_config
from phalanx.config.validate import check_kind, check_warmup
from phalanx.data.addresses import check_data
from phalanx.errors import ConfigError
from phalanx.models.registry import shape_of
from phalanx.report.output import print_json
from phalanx.report.tabular import Line, Table
from phalanx.report.terminal import Terminal
from phalanx.verify.settings import QUANTITIES, VerifyConfig, VerifyTrainConfig

if TYPE_CHECKING:
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
    """Verify, print the verdicts (in a job only on rank 0), and return the exit code.

    Rank 0 prints inside the job, where the ranks wait: torchrun kills all when one exits with 1.
    """
    from phalanx.launch.rank_env import is_under_torchrun
    from phalanx.launch.torchrun import run_here
    from phalanx.verify.prover import WAIT_S

    config = loaded.config
    if loaded.show_config:
        show_config(loaded)
        return 0
    is_first = os.environ.get("RANK", "0") == "0" or not is_under_torchrun()
    console = Terminal(wraps=True, is_quiet=not is_first)

    def verify() -> bool:
        verdicts = _verify(config, strategy, console)
        is_equal = all(verdict.is_equal for verdict in verdicts)
        if is_first:
            show_verdicts(verdicts, console)
            if is_equal and (others := with_second_axis(strategy)):
                also = "One axis can hide faults that appear with two. Also run: phalanx verify "
                console.say(f"{also}{others}", "dim")
            if loaded.json:
                print_verdicts(verdicts)
        return is_equal

    if not is_under_torchrun():
        return 0 if verify() else 1
    keys = [setting.key for setting in settings(type(config)) if not setting.use & Use.LOCAL]
    is_equal = run_here(
        lambda: config,
        lambda config: {key: value_at(config, key) for key in keys},
        lambda _: verify(),
        device=config.device,
        timeout_s=WAIT_S,
    )
    return 0 if is_equal else 1


def _checked(config: AnyConfig) -> Strategy:
    """Check the settings before the verification starts; return the strategy."""
    from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
    from phalanx.train.job.request import choose_strategy

    check_values(config)
    if config.model is not None:
        shape_of(
            config.model
        )  # raises for a folder: the weights compared are small ones of its own
    if isinstance(config, VerifyConfig):  # the training run checks the warm-up of --train
        check_warmup(config.optimizer, config.steps)
    elif is_under_torchrun() and read_rank_env().num_here < read_rank_env().num_ranks:
        raise ConfigError(
            "verify --train saves to a temporary folder that all ranks read, but the ranks are on "
            "several hosts; start them on one host, or leave --train out"
        )
    strategy = choose_strategy(TrainConfig(strategy=config.strategy, device=config.device))[0]
    check_kind(config.optimizer, strategy)
    if isinstance(config, VerifyConfig):
        from phalanx.verify.cases import check_sizes

        check_sizes(config, strategy)
    else:  # check before the long verification of steps
        check_data(config.data)
        if config.corpus.seq_len > MOST_LENGTH:
            raise ConfigError(
                f"corpus.seq_len is {config.corpus.seq_len:,}; expected at most {MOST_LENGTH:,}, "
                "because verify generates a text of several samples, and one process computes "
                "all of it"
            )
    return strategy


def _verify(config: AnyConfig, strategy: Strategy, console: Terminal) -> list[Verdict]:
    """Compare the steps of all cases, also on a wider strategy, then with --train a training run.

    Stop at the first difference.
    """
    import torch.distributed as dist

    from phalanx.train.job.request import choose_strategy
    from phalanx.verify.cases import configured_cases, shapes_to_verify, splits, with_three
    from phalanx.verify.harness import compare_cases

    steps = config
    if isinstance(steps, VerifyTrainConfig):
        steps = VerifyConfig(strategy=str(strategy), seed=config.seed, device=steps.device)
    strategies, wider = [strategy], with_three(strategy)
    if steps.three and steps.model is None and not dist.is_initialized() and wider is not None:
        if all(splits(shape, wider) for shape in shapes_to_verify(steps, wider).values()):
            asked = TrainConfig(strategy=str(wider), device=steps.device)
            strategies.append(choose_strategy(asked)[0])
    verdicts: list[Verdict] = []
    for each in strategies:
        cases, shapes = configured_cases(each, steps), shapes_to_verify(steps, each)
        words = {
            name: f" ({shape.num_layers} x {shape.hidden}, {shape.num_heads}/{shape.num_kv_heads} "
            f"heads, {shape.vocab_size} ids, dropout {shape.dropout:g})"
            for name, shape in shapes.items()
        }
        console.say(f"{each}: {', '.join(n + words.get(n, '') for n in cases)}", "dim")
        verdicts += compare_cases(cases, each, steps.debug_comm, report)
        if not all(verdict.is_equal for verdict in verdicts):
            return verdicts
    if isinstance(config, VerifyTrainConfig):
        from phalanx.verify.training import verify_training

        console.say(f"{strategy}: a small run, saved and resumed", "dim")
        with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as folder:
            verdicts += verify_training(strategy, config, Path(folder))
    return verdicts


def with_second_axis(strategy: Strategy) -> str:
    """Return the strategy with a second axis; empty unless it has one axis and no servers."""
    if len([name for name, axis in strategy.axes() if axis.degree > 1]) != 1 or strategy.is_served:
        return ""
    return str(strategy.with_degree("dp" if strategy.data_ranks == 1 else "tp", 2))


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
        largest = [verdict.largest_errors() for verdict in verdicts]
        # Quantities without errors, such as the learning rate, appear only in the JSON document.
        quantities = [q for q in QUANTITIES if any(errors.get(q, 0) > 0 for errors in largest)]
        rows: list[list[Line]] = []
        for verdict, errors in zip(verdicts, largest, strict=True):
            wrong = {row.quantity for row in verdict.differences if not row.passes}
            texts = {quantity: f"{error:.1e}" for quantity, error in errors.items()}
            cells = [Line(texts.get(q, ""), "bold red" if q in wrong else "") for q in quantities]
            rows.append([Line(f"{verdict.strategy} {verdict.case}"), *cells])
        console.show(Table("", ["", *quantities], rows, quantities))
        if (first := verdicts[0]).sent:
            console.say(f"Sent in the last step of {first.strategy} {first.case}")
            of_sent: list[tuple[str | Line, ...]] = []
            for row in first.sent:
                style = "" if row.predicted in (None, row.counted) else "bold red"
                sizes = ("-" if n is None else f"{n:,}" for n in (row.counted, row.predicted))
                of_sent.append((row.phase, row.axis, row.op, *(Line(n, style) for n in sizes)))
            heads = ("phase", "axis", "collective", "bytes counted", "predicted")
            console.show(Table("", heads, of_sent, heads[3:]))
    for verdict in verdicts:
        style = "green" if verdict.is_equal else "bold red"
        name = f"{verdict.case}, " if verdict.case else ""
        console.say(f"{name}{verdict.headline()}", style)
        for line in verdict.details():
            console.say(f"  {line}")


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print all verdicts as one JSON document."""
    documents = [
        {
            "strategy": verdict.strategy,
            "case": verdict.case,
            "is_equal": verdict.is_equal,
            "num_compared": len(verdict.differences),
            "largest_errors": verdict.largest_errors(),
            "first_difference": None if verdict.first is None else str(verdict.first),
            "place": None if verdict.place is None else dataclasses.asdict(verdict.place),
            "unequal_ranks": verdict.replicas,
            "causes": verdict.causes,
            "failure": verdict.failure,
            "sent": [dataclasses.asdict(row) for row in verdict.sent],
        }
        for verdict in verdicts
    ]
    is_equal = all(verdict.is_equal for verdict in verdicts)
    print_json({"is_equal": is_equal, "verdicts": documents})
