"""Speed-up of more ranks over one rank, and the seconds that each point loses, by cause.

Each round runs every strategy once, one after the other, each as a separate job, so that other load
on the machine affects all strategies. The speed-up of a round is the rate of N ranks / the rate of
one rank in the same round. N ranks cannot be more than N times as fast: if the median speed-up is
above N, other work disturbed the measurement, and no speed-up is reported.

The ideal step of N ranks takes 1/N of the time in which one rank does the same work. What a step
takes beyond that is divided among causes by the terms of its step ledger (`ScalingPoint.losses`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, NamedTuple

import torch

from phalanx.account.fit import check_fit, check_memory_for
from phalanx.account.planned import decoder_step
from phalanx.bench.picture import draw_speed_ups
from phalanx.bench.scaling_rank import Jobs, RankSteps
from phalanx.bench.verb import BenchResult, DecoderConfig, PrintLine
from phalanx.config import BatchConfig, solve_batch
from phalanx.config.fields import Positional, Range
from phalanx.config.schema import MOST_ROWS
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch.local import check_gpus, num_cores
from phalanx.models.registry import shape_of, with_sizes
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.report.output import values_of
from phalanx.report.tabular import Cell, Number, Part, Table
from phalanx.report.units import MIB, time_text
from phalanx.strategy import AXES, Strategy, require_built

ONE_RANK = "dp1"

METHODS: Final = (
    *("dp", "dp:naive", "dp2,fsdp", "fsdp", "fsdp:zero2", "fsdp:zero1"),
    *(axis for axis in AXES if axis not in ("dp", "fsdp", "ep")),  # the model has no experts
)
"""Methods that are measured by default: strategies in which one axis has no degree yet."""

_OPEN: Final = re.compile(rf"(^|,)({'|'.join(AXES)})(?=[:,]|$)")
"""The axis without a degree in the text of a method."""

BatchOf = Literal["global", "rank"]


class Case(NamedTuple):
    """A job to time: a strategy, the sequences of its step, and whether its arithmetic is waits."""

    strategy: str
    num_rows: int
    is_timed: bool


@dataclass(frozen=True)
class Account:
    """One step of a case, the median one of its median round, on the rank that waits least.

    Attributes:
        terms_s: seconds by term of the step ledger.
        exposed_s: seconds in which the rank waits for others, by mesh axis; part of `terms_s`.
        sent_bytes: bytes that a rank sends, mean over the ranks.
        peak_bytes: peak memory of the rank that holds most.
        unequal_s: its forward and backward beyond their mean over the ranks.
    """

    wall_s: float = 0.0
    terms_s: dict[str, float] = field(default_factory=dict)
    exposed_s: dict[str, float] = field(default_factory=dict)
    sent_bytes: float = 0.0
    peak_bytes: int = 0
    unequal_s: float = 0.0

    @classmethod
    def of(cls, ranks: Sequence[RankSteps]) -> Account:
        """Choose the median step of a job, and in it the rank that waits least."""
        #   rank 0   forward  backward  wait .......  optimizer
        #   rank 1   forward .........  backward ...  optimizer     waits least: the others wait
        #                                                           for this rank
        walls = [max(steps) for steps in zip(*(rank.walls_s for rank in ranks), strict=True)]
        at = walls.index(statistics.median_low(walls))

        def computing(rank: RankSteps) -> float:
            return rank.terms_s[at]["forward"] + rank.terms_s[at]["backward"]

        last = min(
            ranks, key=lambda rank: rank.terms_s[at]["communication"] + rank.terms_s[at]["bubble"]
        )
        return cls(
            walls[at],
            last.terms_s[at],
            last.exposed_s[at],
            statistics.mean(rank.sent_bytes for rank in ranks),
            max(rank.peak_bytes for rank in ranks),
            computing(last) - statistics.mean(map(computing, ranks)),
        )


@dataclass(frozen=True)
class ScalingPoint:
    """Step times of one strategy and of one rank, in seconds, one of each per round.

    Attributes:
        batch_of: what has a fixed batch; "rank": N ranks have N times the batch of one rank.
        method: text of the method whose curve has this point.
        is_timed: whether operators wait for their time instead of computing, also of one rank.
        room: number of ranks that have cores of their own.
    """

    strategy: str
    num_ranks: int
    times_s: tuple[float, ...]
    one_rank_s: tuple[float, ...]
    batch_of: BatchOf = "global"
    method: str = ""
    is_timed: bool = False
    room: int = 2**20
    account: Account = Account()
    one_rank: Account = Account()

    @property
    def work(self) -> int:
        """Sequences of a step / sequences of one rank's step."""
        return self.num_ranks if self.batch_of == "rank" else 1

    @property
    def batches_per_s(self) -> float:
        """Global batches per second in the median round."""
        return 1 / statistics.median(self.times_s)

    @property
    def speed_ups(self) -> list[float]:
        """Rate of N ranks / rate of one rank, for each round."""
        pairs = zip(self.one_rank_s, self.times_s, strict=True)
        return [self.work * one / many for one, many in pairs]

    @property
    def speed_up(self) -> float | None:
        """Median over the rounds; None if it is above N, because then the measurement is wrong."""
        median = statistics.median(self.speed_ups)
        return median if median <= self.num_ranks else None

    @property
    def efficiency(self) -> float | None:
        """Speed-up / N, in [0, 1]."""
        return None if self.speed_up is None else self.speed_up / self.num_ranks

    @property
    def losses(self) -> dict[str, float]:
        """Cause -> seconds by which it makes the step longer than the ideal one; most first.

        The seconds sum to the step minus the ideal step, since terms sum to steps.
        """
        share, terms, alone = (
            self.work / self.num_ranks,
            self.account.terms_s,
            self.one_rank.terms_s,
        )
        excess = {term: terms[term] - share * alone[term] for term in terms}
        lost = {
            f"exposed communication over {axis}": seconds
            for axis, seconds in self.account.exposed_s.items()
        }
        lost["communication outside of waits"] = excess.pop("communication", 0.0) - sum(
            lost.values()
        )
        lost["forward and backward"] = excess.pop("forward", 0.0) + excess.pop("backward", 0.0)
        lost["unequal ranks"] = self.account.unequal_s
        lost["forward and backward"] -= self.account.unequal_s
        lost |= excess
        return dict(sorted(lost.items(), key=lambda item: -item[1]))

    @property
    def reason(self) -> str:
        """The causes of at least a quarter of the loss, or the largest, with their seconds."""
        losses = self.losses
        total = sum(losses.values())
        if self.num_ranks == 1 or self.speed_up is None or not self.account.terms_s:
            return ""
        if total <= 0.02 * self.account.wall_s:
            return "within 2 % of the ideal step"
        largest = [cause for cause in losses if losses[cause] >= total / 4][:2]
        return "; ".join(self._words(cause, losses[cause]) for cause in largest)

    def _words(self, cause: str, seconds: float) -> str:
        share, terms, alone = (
            self.work / self.num_ranks,
            self.account.terms_s,
            self.one_rank.terms_s,
        )
        if cause == "core":
            has_too_few = self.num_ranks > self.room
            who = (
                f"{self.num_ranks} ranks on cores for {self.room}" if has_too_few else "other work"
            )
            return f"waits for a core {time_text(seconds)}: {who}"
        if cause in ("forward and backward", "optimizer"):
            names = ["forward", "backward"] if cause != "optimizer" else [cause]
            ratio = sum(terms[n] for n in names) / (share * sum(alone[n] for n in names))
            why = "smaller products" if cause != "optimizer" else "each rank updates more than 1/N"
            return f"{cause} {time_text(seconds)}: {ratio:.2g} times 1/N, {why}"
        return f"{cause} {time_text(seconds)}"


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(DecoderConfig):
    """Measure the speed-up of methods over one rank, in turns, and why it falls short."""

    strategies: Annotated[tuple[str, ...], Positional("[METHOD | STRATEGY ...]")] = METHODS
    """Strategies to measure beside one rank. In a METHOD an axis has no degree, as in fsdp:zero2 or
    dp2,fsdp: it gets its degree from each number of --ranks."""
    ranks: str | None = None
    """Numbers of ranks of each METHOD, such as 1,2,4,8; if unset, powers of 2 up to the cores,
    GPUs, or ranks of torchrun's job."""
    batch_of: Literal["global", "rank", "both"] = "global"
    """What has a batch of --global-size whatever the number of ranks is: the job, or each rank."""
    global_size: Annotated[int, Range(1, MOST_ROWS, "[]")] = 8
    """Sequences in one step."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; a rank is a GPU, or `threads` threads of the CPU, 1 if unset."""
    steps: Annotated[int, Range(1)] = 5
    """Steps to time in each round, after two that warm up."""
    rounds: Annotated[int, Range(1)] = 3
    """Rounds; each runs every strategy once."""
    gbit: Annotated[float | None, Range(0, ends="()")] = None
    """Rate of a slow link, through which each rank sends its messages, in Gbit/s; CPU only."""
    timed_layers: bool = False
    """Let operators wait for their time instead of computing, where more ranks than cores would
    share cores; messages are real. One thread a rank."""

    @property
    def model_shape(self) -> ModelShape:
        """Shape of the decoder; its tokens are random."""
        return with_sizes(shape_of(self.model), self.shape)


def run(config: ScalingConfig, say: PrintLine) -> BenchResult:
    """Measure the strategies, and return tables and a picture.

    Raises:
        ConfigError: a strategy, the batch or the sequence length does not fit.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = dataclasses.replace(config, device=device, threads=config.threads or 1)
    longest = config.model_shape.max_seq_len
    if config.seq_len > longest:
        raise ConfigError(
            f"seq_len is {config.seq_len}, but the model's positions end at {longest}; the "
            f"nearest is {longest}"
        )
    if device == "cuda" and (config.gbit is not None or config.timed_layers):
        raise ConfigError("--gbit and --timed-layers need the device cpu, but it is cuda")
    if config.timed_layers and config.threads != 1:
        raise ConfigError(
            f"threads is {config.threads}, but --timed-layers measures operators of one thread; "
            "the nearest is 1"
        )
    refused: list[str] = []
    points = measure_scaling(config, say, refused)
    name = f"scaling-{device}"
    if not points:  # another rank of torchrun's job has the results
        return BenchResult(name=name, shown=[], values={}, is_shown=False)
    rows = [
        values_of(point)
        | {"tokens_per_s": _num_rows(point, config) * config.seq_len * point.batches_per_s}
        for point in points
    ]
    kept = ("model", "global_size", "seq_len", "precision", "device", "threads", "steps", "rounds")
    kept += ("batch_of", "gbit", "timed_layers")
    settings = {name: getattr(config, name) for name in kept}
    return BenchResult(
        name=name,
        shown=[*_tables(points, config), *_remarks(points, config), *refused],
        values={
            **settings,
            "compile": False,
            "shape": values_of(config.model_shape),
            "points": rows,
            "refused": refused,
        },
        files={"svg": functools.partial(draw_speed_ups, points)},
    )


def _num_rows(point: ScalingPoint, config: ScalingConfig) -> int:
    return config.global_size * point.work


def _tables(points: Sequence[ScalingPoint], config: ScalingConfig) -> list[Part]:
    heads = (
        *("strategy", Number("ranks", "d"), Number("ms/step", ".1f", 1e-3)),
        *(Number("tokens/s", ",.0f"), Number("batch/s", ".3g"), Number("speed-up", ".2f")),
        *("min-max", Number("eff.", ".0%")),
        *(Number("sent MiB", ".3g", MIB), Number("peak MiB", ".4g", MIB)),
    )
    parts: list[Part] = []
    for batch_of in dict.fromkeys(point.batch_of for point in points):
        rows: list[Sequence[Cell]] = []
        reasons: list[Sequence[Cell]] = []
        for point in (each for each in points if each.batch_of == batch_of):
            rate, name = point.batches_per_s, point.strategy + " (timed)" * point.is_timed
            sped: Sequence[Cell] = ("-", "-", "-")
            if point.speed_up is not None:
                ends = f"{min(point.speed_ups):.2f}-{max(point.speed_ups):.2f}"
                sped = (point.speed_up, ends, point.efficiency)
            tokens = _num_rows(point, config) * config.seq_len * rate
            account = point.account
            costs = (account.sent_bytes, account.peak_bytes)
            rows.append((name, point.num_ranks, 1 / rate, tokens, rate, *sped, *costs))
            if point.reason:
                lost_s = sum(point.losses.values())
                reasons.append((name, account.wall_s, lost_s, point.reason))
        size = f"{config.global_size} x {config.seq_len} tokens"
        of = "a global batch of" if batch_of == "global" else "a batch a rank of"
        parts.append(Table(f"{of} {size}", heads, rows, numbers=["min-max"]))
        if reasons:
            ms = (Number(name, ".1f", 1e-3) for name in ("ms a step", "ms lost"))
            parts.append(Table("Why each falls short", ("strategy", *ms, "most by"), reasons))
    return parts


def _remarks(points: Sequence[ScalingPoint], config: ScalingConfig) -> list[str]:
    lines = [
        f"the median of {config.rounds} rounds; speed-ups compare a round with one rank in the "
        "same round; sent: by a rank in a step; peak: memory of the rank that holds most",
        "lost: the step beyond 1/N of the time in which one rank does the same work",
    ]
    if config.device == "cpu":
        threads = config.threads or 1
        ranks = num_cores() // threads
        lines.append(
            f"each rank uses {threads} of {num_cores()} cores: more than {max(1, ranks)} ranks "
            "share cores"
        )
    if timed := [point for point in points if point.is_timed]:
        lines.append(
            "timed: operators wait for their time instead of computing, messages are real; one "
            f"rank so takes {time_text(statistics.median(timed[0].one_rank_s))} a step"
        )
    doubted = [point.strategy for point in points if point.speed_up is None]
    if doubted:
        lines.append(
            f"no speed-up of {', '.join(doubted)}: it came out above the number of ranks, so other "
            "work disturbed this machine; measure again when it is idle"
        )
    return lines


def strategies_of(config: ScalingConfig, most_ranks: int | None = None) -> list[tuple[str, str]]:
    """Return (method, strategy) of each point: a METHOD has one for each number of ranks.

    Raises:
        ConfigError: `ranks` is no list of numbers, or two axes of a METHOD have no degree.
    """
    here = torch.cuda.device_count() if config.device == "cuda" else num_cores()
    most = most_ranks or here
    text = config.ranks or ",".join(str(2**at) for at in range(max(2, most).bit_length()))
    if not all(word.strip().isdecimal() and int(word) for word in text.split(",")):
        raise ConfigError(f"ranks is {text!r}; expected numbers of ranks, such as 1,2,4,8")
    numbers = sorted({int(word) for word in text.split(",")} - {1})
    pairs: list[tuple[str, str]] = []
    for method in config.strategies:
        match len(_OPEN.findall(method)):
            case 0:
                pairs.append((method, method))
            case 1:
                fixed = Strategy.parse(_OPEN.sub(r"\1\g<2>1", method)).num_ranks
                pairs += [
                    (method, _OPEN.sub(rf"\1\g<2>{number // fixed}", method))
                    for number in numbers
                    if number % fixed == 0 and number > fixed
                ]
            case _:
                raise ConfigError(
                    f"{method}: only one axis can get its degree from --ranks; give the others a "
                    "degree, as in dp2,fsdp"
                )
    return pairs


def _check(strategy: Strategy, num_rows: int, config: ScalingConfig) -> None:
    """Raise each error that a rank would raise, before any process starts."""
    require_built(strategy)
    if config.gbit is not None and min(strategy.dp.degree, strategy.fsdp.degree) > 1:
        raise ConfigError(f"{strategy}: FSDP2 reduces over dp itself, so --gbit cannot slow it")
    check_gpus(strategy.num_ranks, config.device, str(strategy))
    batch = solve_batch(BatchConfig(global_size=num_rows), strategy.data_ranks, strategy.pp.degree)
    load = decoder_step(
        *(config.model_shape, strategy, config.seq_len),
        *(batch.microbatch, batch.accumulation, config.precision),
    )
    device = "cuda" if config.device == "cuda" else "cpu"
    check_fit(load, config.model, strategy.num_ranks, device=device, has_activations=False)
    plan = plan_decoder(strategy, config.model_shape)
    if batch.microbatch % plan.row_shards:
        legal = -(-batch.microbatch // plan.row_shards) * plan.row_shards * strategy.data_ranks
        raise ConfigError(
            f"global_size is {num_rows}, which gives each rank of {strategy} "
            f"microbatches of {batch.microbatch} rows, but {strategy} splits rows into "
            f"{plan.row_shards}; the nearest is {legal}"
        )


def measure_scaling(
    config: ScalingConfig, say: PrintLine, refused: list[str]
) -> list[ScalingPoint]:
    """Time one rank and every strategy in each round.

    A METHOD that cannot have some number of ranks adds a sentence to `refused`.
    """
    kinds: list[BatchOf] = ["global", "rank"]
    kinds = [kind for kind in kinds if config.batch_of in (kind, "both")]
    jobs = Jobs()
    room = max(1, num_cores() // (config.threads or 1)) if config.device == "cpu" else 2**20
    pairs = [(ONE_RANK, ONE_RANK), *strategies_of(config, jobs.most_ranks)]
    chosen: dict[tuple[BatchOf, str], tuple[str, Case]] = {}
    for method, text in pairs:
        try:
            strategy = Strategy.parse(text)
            if jobs.most_ranks is not None:
                if strategy.num_ranks > jobs.most_ranks:
                    raise ConfigError(f"{text} needs more ranks than the {jobs.most_ranks} started")
            for kind in kinds:
                num_rows = config.global_size * (strategy.num_ranks if kind == "rank" else 1)
                _check(strategy, num_rows, config)
                is_timed = config.timed_layers and strategy.num_ranks > room
                chosen[kind, str(strategy)] = method, Case(str(strategy), num_rows, is_timed)
        except PhalanxError as error:
            if method == text:
                raise
            refused.append(f"no {text}: {error}")
    cases = list(dict.fromkeys(case for _, case in chosen.values()))
    if any(case.is_timed for case in cases):
        cases.insert(1, Case(ONE_RANK, config.global_size, is_timed=True))
    if config.device == "cpu":
        check_memory_for(max(Strategy.parse(case.strategy).num_ranks for case in cases))
    times: dict[Case, list[tuple[float, Account]]] = {case: [] for case in cases}
    names = ", ".join(dict.fromkeys(case.strategy for case in cases))
    for number in range(config.rounds):
        if jobs.is_first:
            say(f"round {number + 1} of {config.rounds}: {names} ...")
        # Every round runs all strategies, so that a slow minute of the machine hits each of them.
        for case in cases:
            if steps := jobs.run(case, config):
                account = Account.of(steps)
                times[case].append((account.wall_s, account))
    if not jobs.is_first:
        return []

    def account_of(case: Case) -> Account:
        return sorted(times[case], key=lambda pair: pair[0])[(config.rounds - 1) // 2][1]

    points: list[ScalingPoint] = []
    for (kind, text), (method, case) in chosen.items():
        num_ranks, alone = (
            Strategy.parse(text).num_ranks,
            Case(ONE_RANK, config.global_size, case.is_timed),
        )
        points.append(
            ScalingPoint(
                *(text, num_ranks),
                *(tuple(wall_s for wall_s, _ in times[each]) for each in (case, alone)),
                batch_of=kind,
                method=method,
                is_timed=case.is_timed,
                room=room,
                account=account_of(case),
                one_rank=account_of(alone),
            )
        )
    return points
