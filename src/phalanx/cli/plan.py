"""`phalanx plan`: find the fastest strategies that fit a cluster, priced without any processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from phalanx.account.parameters import num_parameters
from phalanx.account.planned import IMBALANCE, PURE, PURE_BYTES, STATE_BYTES, DecoderModel
from phalanx.cli import plan_text
from phalanx.config import ShapeConfig
from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.models.registry import shape_of, with_sizes
from phalanx.models.shape import ModelShape
from phalanx.planner import explain, hardware
from phalanx.planner.chart import draw_scaling
from phalanx.planner.price import timeline
from phalanx.planner.search import (
    Candidate,
    OfDecoder,
    Question,
    priced_strategy,
    search,
)
from phalanx.planner.several import BestPlan, best_on, fits_on, numbers_of, scaled
from phalanx.planner.software import software
from phalanx.planner.stages import write_trace
from phalanx.report.figure import check_picture
from phalanx.report.output import check_writable, print_json, writing
from phalanx.report.tabular import Line
from phalanx.report.terminal import Preparation, Terminal
from phalanx.strategy import Strategy, refuse_servers

EXAMPLE: Final = (
    "phalanx plan --model llama3-8b --cluster h100:64 --sequence 8192 --global-batch 128"
)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Find the fastest strategies that fit, for a model on a cluster; no process is started."""

    model: str | None = None
    """A preset, as train --model takes it, such as llama3-8b."""
    script: str | None = None
    """A job of your own in the model's place, FILE.py:FUNCTION, with its own batch."""
    cluster: str | None = None
    """A cluster of phalanx show, with a number of devices, such as h100:64."""
    sequence: Annotated[int | None, Range(1, 2**40, "[]")] = None
    """Tokens of a sequence."""
    global_batch: Annotated[int | None, Range(1, 2**40, "[]")] = None
    """Sequences of a step of all devices."""
    strategy: str | None = None
    """Price this strategy alone."""
    microbatch: Annotated[int | None, Range(1, 2**40, "[]")] = None
    """Microbatch size; the fastest that fits if unset."""
    compare: str | None = None
    """Clusters, joined by commas, such as a100,h100: the best on each, with --cluster's number."""
    scale: str | None = None
    """Numbers of devices, such as 8,16,64 or 8,16,...,128: the best on each, of the same batch."""
    svg: str | None = None
    """Draw speed-up and efficiency of --scale into this file."""
    trace: str | None = None
    """Write the timeline of the fastest pipeline into this JSON file, which Perfetto opens."""
    arithmetic: bool = False
    """Print the arithmetic of memory without any split: weights, 8 and 16 bytes a parameter."""
    imbalance: Annotated[float, Range(1.0, 1e3, "[]")] = IMBALANCE
    """Rows of the busiest rank of ep, as a multiple of the mean; its peers wait for it. A run's
    records measure it, as rank_load."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer; muon updates the matrices of blocks by Muon, and all other parameters by AdamW."""
    software: str = "phalanx"
    """The training program whose constants are used."""
    precision: str = "bfloat16"
    """Data type of the arithmetic, bfloat16 or float16; weights and moments have 32 bits."""
    json: bool = False
    """Make the last line of standard output one JSON document."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """Sizes that replace the preset's."""


_DEFAULTS: Final = PlanConfig()


def run(argv: list[str]) -> int:
    """Run `phalanx plan` and return the exit code.

    Raises:
        ConfigError: an option is missing or illegal, or does not fit the model or the cluster.
    """
    config = read_command_line(argv, PlanConfig, prog="phalanx plan")
    _check_together(config)
    terminal = Terminal(wraps=True)
    if config.script is not None:
        from phalanx.cli.plan_script import plan_script  # imports the training code

        document = plan_script(config.script, config.cluster, config.software, config.strategy)
        terminal.show(*plan_text.answer(document))
        if config.json:
            print_json(document)
        return 0
    question = question_of(config)
    with Preparation(terminal) as preparation:

        def report(what: str) -> None:
            preparation.report(f"pricing strategies{what}", 0, 0)

        report("")
        if config.compare or config.scale:
            document = _several(config, question, report)
        else:
            document = _given(config, question) if config.strategy else _found(config, question)
    document["question"]["model"] = config.model
    if config.compare or config.scale:
        terminal.show(*plan_text.several(document))
    else:
        terminal.show(*plan_text.answer(document))
    if config.arithmetic:
        model, shape = question.model, question.model.shape
        sizes = {"N": model.num_parameters, "L": shape.num_layers, "T": model.seq_len}
        sizes |= {"h": shape.hidden, "F": explain.inner_width(shape)}
        rows = explain.arithmetic(question)
        terminal.show(*plan_text.arithmetic(sizes, rows))
        document["arithmetic"] = {"sizes": sizes, "rows": rows}
    for path in (config.svg, config.trace):
        if path is not None:
            terminal.show(Line(f"wrote {path}", wraps=False))
    if config.json:
        print_json(document)
    return 0


def _check_together(config: PlanConfig) -> None:
    """Raise ConfigError, before the search, if options exclude or require each other."""
    modes = [f"--{n}" for n in ("strategy", "compare", "scale") if getattr(config, n) is not None]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} are different questions; give one of them")
    of_script = ("script", "cluster", "strategy", "software", "json")
    given = [
        each.name
        for each in fields(PlanConfig)
        if each.name not in of_script
        and getattr(config, each.name) != getattr(_DEFAULTS, each.name)
    ]
    if config.script is not None and given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} does not go with --script, which has its module, its "
            "batch, its microbatches and its data type; leave it out"
        )
    for name, other in (("microbatch", "strategy"), ("svg", "scale")):
        if getattr(config, name) is not None and getattr(config, other) is None:
            raise ConfigError(f"--{name} belongs to --{other}; give both, or neither")
    if config.trace is not None and (config.compare or config.scale):
        raise ConfigError(
            f"--trace writes one timeline, but {modes[0]} makes several plans; leave one out"
        )
    if config.svg is not None:
        check_picture(Path(config.svg))
    if config.trace is not None:
        check_writable(Path(config.trace))


def question_of(config: PlanConfig) -> OfDecoder:
    """Return the input of the search.

    Raises:
        ConfigError: an option is missing, unknown or out of range.
    """
    needed = ("model", "cluster", "sequence", "global_batch")
    missing = [f"--{n.replace('_', '-')}" for n in needed if getattr(config, n) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing; expected, for example: {EXAMPLE}")
    assert config.model and config.cluster and config.sequence and config.global_batch
    shape = with_sizes(shape_of(config.model), config.shape)
    if config.sequence > shape.max_seq_len:
        raise ConfigError(
            f"--sequence is {config.sequence}, but {config.model} has only {shape.max_seq_len} "
            f"positions; give at most {shape.max_seq_len}, or set --shape.max-seq-len"
        )
    _check_precision(config, shape)
    cluster = hardware.cluster(config.cluster)
    if config.scale is not None:  # its numbers replace the number of --cluster
        cluster = hardware.CLUSTERS.get(cluster.name, cluster)
    model = DecoderModel(
        *(shape, config.sequence, config.precision),
        imbalance=config.imbalance,
        is_muon=config.optimizer == "muon",
    )
    return Question(model, cluster, software(config.software), config.global_batch)


def _check_precision(config: PlanConfig, shape: ModelShape) -> None:
    """Raise ConfigError unless the precision is bfloat16 or float16."""
    if config.precision in ("bfloat16", "float16"):
        return
    why = "is not supported by plan"
    if config.precision == PURE:
        gigabytes = [num * num_parameters(shape).total / 1e9 for num in (PURE_BYTES, STATE_BYTES)]
        why = (
            f"would need {PURE_BYTES} bytes per parameter instead of {STATE_BYTES}, for "
            f"{config.model} {gigabytes[0]:.1f} GB instead of {gigabytes[1]:.1f}, but train does "
            "not support it: the weights and moments of train have 32 bits"
        )
    raise ConfigError(f"--precision {config.precision} {why}; take bfloat16 or float16")


def _found(config: PlanConfig, question: OfDecoder) -> dict[str, Any]:
    """Search; return the document with the fastest strategies and the nearest rejected ones."""
    found = search(question)
    _write_trace(config, question, found.candidates)
    best = found.candidates[0] if found.candidates else None
    document = explain.answer(question, found.candidates, explain.neighbours(best, found.rejected))
    if best is None:
        document |= {"fits_on": fits_on(question)}
    return document | {"num_legal": found.num_legal, "num_priced": found.num_priced}


def _given(config: PlanConfig, question: OfDecoder) -> dict[str, Any]:
    """Price the strategy of --strategy; return the document with its figures or its rejection."""
    assert config.strategy is not None
    strategy = Strategy.parse(config.strategy)
    refuse_servers(strategy, "the planner")
    question.cluster.of(strategy.num_ranks)  # raises if there are too few devices
    answer = priced_strategy(question, strategy, config.microbatch)
    if isinstance(answer, Candidate):
        _write_trace(config, question, [answer])
        return explain.answer(question, [answer], [])
    if config.trace is not None:
        raise ConfigError(f"--trace has no timeline of {strategy}, which does not fit: {answer}")
    return explain.answer(question, [], [answer])


def _write_trace(config: PlanConfig, question: OfDecoder, candidates: Sequence[Candidate]) -> None:
    """Write the timeline of the fastest candidate that has a pipeline, if --trace is given."""
    if config.trace is None:
        return
    for each in candidates:
        lanes = timeline(each.planned, question.cluster, question.software)
        if lanes is not None:
            with writing(config.trace):
                write_trace(lanes, Path(config.trace))
            return
    raise ConfigError(
        "--trace has no pipeline to show: no strategy that was found has pp; give one by --strategy"
    )


def _several(
    config: PlanConfig, question: OfDecoder, report: Callable[[str], None]
) -> dict[str, Any]:
    """Return the document of the best strategy on each cluster, or number of devices."""
    num_devices = question.cluster.num_devices
    found: list[BestPlan] = []
    if config.compare is not None:
        clusters = [hardware.cluster(n).of(num_devices) for n in config.compare.split(",")]
        for cluster in clusters:
            report(f" on {cluster.name}")
            found.append(best_on(question, cluster))
    else:
        numbers = numbers_of(config.scale or "")
        num_devices = max(numbers)
        question.cluster.of(num_devices)  # raises if there are too few devices
        for best in scaled(question, numbers):
            found.append(best)
            report(f" after {best.num_devices:,} devices")
    if config.svg is not None:
        with writing(config.svg):
            draw_scaling(found, Path(config.svg))
    name = "compare" if config.compare is not None else "scale"
    return {"question": explain.question_values(question, num_devices), name: found}
