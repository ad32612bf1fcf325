"""`phalanx plan`: which strategy fits a cluster and is fastest, priced without a process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.account.parameters import num_parameters
from phalanx.cli.screen import Preparation, print_json, screen
from phalanx.config import ShapeConfig
from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Range
from phalanx.errors import ConfigError, wrapped
from phalanx.models.registry import shape_of, with_sizes
from phalanx.planner import explain, hardware
from phalanx.planner.explain import Figures
from phalanx.planner.given import priced_strategy
from phalanx.planner.search import Candidate, Inequality, Question, search
from phalanx.planner.software import software
from phalanx.strategy import Strategy

EXAMPLE: Final = (
    "phalanx plan --model llama3-8b --cluster h100:64 --sequence 8192 --global-batch 128"
)

BAR: Final = 8
"""Characters of a bar of memory."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Find the fastest strategies that fit, for a model on a cluster; no process is started."""

    model: str | None = None
    """A preset, as train --model takes it, such as llama3-8b."""
    cluster: str | None = None
    """A cluster of phalanx show, with a number of devices, such as h100:64."""
    sequence: Annotated[int | None, Range(1)] = None
    """Tokens of a sequence."""
    global_batch: Annotated[int | None, Range(1)] = None
    """Sequences of a step of all devices."""
    strategy: str | None = None
    """Price this strategy alone."""
    microbatch: Annotated[int | None, Range(1)] = None
    """Its sequences in one forward pass of a rank; the fastest of 1, 2, 4, 8 if unset."""
    software: str = "phalanx"
    """The training program whose constants are used."""
    json: bool = False
    """Make the last line of standard output one JSON document."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """Sizes that replace the preset's."""


def run(argv: list[str]) -> int:
    """Plan, print and return the exit code.

    Raises:
        ConfigError: the question has no answer.
    """
    config = read_command_line(argv, PlanConfig, prog="phalanx plan")
    console = screen()
    question = question_of(config)
    with Preparation(console) as preparation:
        preparation.report("pricing strategies", 0, 0)
        document = _given(config, question) if config.strategy else _found(question)
    _show(console, document)
    if config.json:
        print_json(document)
    return 0


def question_of(config: PlanConfig) -> Question:
    """Return the question that the options ask.

    Raises:
        ConfigError: one is missing, unknown or out of range.
    """
    needed = ("model", "cluster", "sequence", "global_batch")
    missing = [f"--{n.replace('_', '-')}" for n in needed if getattr(config, n) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing; expected, for example: {EXAMPLE}")
    if config.microbatch is not None and config.strategy is None:
        raise ConfigError("--microbatch belongs to a strategy; give --strategy TEXT with it")
    assert config.model and config.cluster and config.sequence and config.global_batch
    shape = with_sizes(shape_of(config.model), config.shape)
    if config.sequence > shape.max_seq_len:
        raise ConfigError(
            f"--sequence is {config.sequence}, but the positions of {config.model} end at "
            f"{shape.max_seq_len}; take at most {shape.max_seq_len}, or set --shape.max-seq-len"
        )
    cluster = hardware.cluster(config.cluster)
    return Question(shape, cluster, software(config.software), config.sequence, config.global_batch)


def _question_values(question: Question, num_devices: int) -> dict[str, Any]:
    return {
        "cluster": question.cluster.name,
        "device": question.cluster.device.name,
        "num_devices": num_devices,
        "usable_bytes": question.cluster.device.usable_bytes,
        "parameters": num_parameters(question.shape).total,
        "sequence": question.seq_len,
        "global_batch": question.num_sequences,
        "software": question.software.name,
        "precision": question.precision,
    }


def _found(question: Question) -> dict[str, Any]:
    """Return the answer of a search."""
    found = search(question)
    best = found.candidates[0] if found.candidates else None
    name = None if best is None else str(best.planned.strategy)
    document = _answer(question, found.candidates, explain.neighbours(name, found.rejected))
    return document | {"num_legal": found.num_legal, "num_priced": found.num_priced}


def _given(config: PlanConfig, question: Question) -> dict[str, Any]:
    """Return the answer on one strategy."""
    assert config.strategy is not None
    strategy = Strategy.parse(config.strategy)
    question.cluster.of(strategy.num_ranks)  # there are as many devices
    answer = priced_strategy(question, strategy, config.microbatch)
    if isinstance(answer, Candidate):
        return _answer(question, [answer], [])
    return _answer(question, [], [answer])


def _answer(
    question: Question, candidates: Sequence[Candidate], rejected: Sequence[Inequality]
) -> dict[str, Any]:
    num = candidates[0].planned.strategy.num_ranks if candidates else question.cluster.num_devices
    return {
        "question": _question_values(question, num),
        "candidates": [explain.figures(question, each) for each in candidates],
        "rejected": [asdict(each) | {"text": str(each)} for each in rejected],
        "advice": explain.advice(question, candidates[0]) if candidates else [],
    }


def _show(console: Console, document: dict[str, Any]) -> None:
    """Print an answer."""
    asked, candidates = document["question"], document["candidates"]
    _say(
        console,
        f"{asked['parameters'] / 1e9:.3g} B parameters on {asked['num_devices']:,} x "
        f"{asked['device']} ({asked['cluster']}), {asked['global_batch']:,} sequences of "
        f"{asked['sequence']:,} tokens a step, by {asked['software']}",
        "bold",
    )
    if candidates:
        _show_best(console, candidates)
    else:
        _say(console, "no strategy fits", "bold")
    if document["rejected"]:
        _say(console, "\nrejected, the nearest first:" if candidates else "\nrejected:", "bold")
        for each in document["rejected"]:
            _say(console, f"  {each['text']}")
    if document["advice"]:
        _say(console, "\nadvice", "bold")
        for line in document["advice"]:
            _say(console, f"  {line}")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(wrapped(text, console.width), style), soft_wrap=True)


def _show_best(console: Console, candidates: Sequence[Figures]) -> None:
    best = candidates[0]
    _say(
        console,
        f"t_theoretical {explain.time(best.t_theoretical_s)} a step: model FLOPs / peak of all "
        "devices, for every strategy\n",
    )
    console.print(table(candidates))
    _say(console, f"\n{best.strategy}: {best.mesh}", "bold")
    causes = (
        f"{name} {explain.time(s)} ({s / best.step_time_s:.0%})"
        for name, s in best.causes_s.items()
        if s
    )
    _say(console, f"  time: {', '.join(causes)}")
    held = (f"{name} {num / 2**30:.1f}" for name, num in best.memory.items())
    _say(
        console,
        f"  memory of stage {best.stage}, the heaviest, in GiB: {', '.join(held)}; "
        f"{best.memory_bytes / 2**30:.1f} of {best.usable_bytes / 2**30:.1f}",
    )
    _say(console, f"  can resume on {_numbers(best.devices)} devices")


def table(rows: Iterable[Figures], widest: int = 34) -> Table:
    """Return strategies as a table of at most 100 columns."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    heads = ("strategy", "batch", "step", "tokens/s", "MFU, %", "", "memory")
    for head in heads:
        right = head in ("batch", "step", "tokens/s", "MFU, %")
        drawn.add_column(head, justify="right" if right else "left", no_wrap=True)
    for each in rows:
        drawn.add_row(Text(_in_lines(each.strategy, widest)), *map(Text, cells(each)))
    return drawn


def cells(of: Figures) -> tuple[str, ...]:
    """Return batch, time, rate, MFU, grade and memory of a strategy."""
    part = of.memory_bytes / of.usable_bytes
    full = round(BAR * part)
    return (
        f"{of.microbatch} x {of.accumulation}",
        explain.time(of.step_time_s),
        f"{of.tokens_per_s_per_device:,.0f}",
        f"{100 * of.mfu_causal:.1f} / {100 * of.mfu_full:.1f}",
        of.grade,
        f"{'#' * full}{'.' * (BAR - full)} {part:.0%}",
    )


def _in_lines(strategy: str, widest: int) -> str:
    """Return the text of a strategy in lines that end between its parts."""
    lines = [""]
    for part in strategy.split(","):
        joined = f"{lines[-1]},{part}" if lines[-1] else part
        if len(joined) < widest or not lines[-1]:
            lines[-1] = joined
        else:
            lines[-1] += ","
            lines.append(part)
    return "\n".join(lines)


def _numbers(numbers: Sequence[int]) -> str:
    shown = [f"{number:,}" for number in numbers]
    return ", ".join([*shown[:4], "...", *shown[-4:]] if len(shown) > 9 else shown)
