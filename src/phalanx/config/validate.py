"""Checks for contradictions in the configuration of a run, and the batch law.

These checks need no data, devices or model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.config.fields import check_values
from phalanx.config.schema import MOST_ROWS, BatchConfig, OptimizerConfig, TrainConfig
from phalanx.errors import BatchError, ConfigError
from phalanx.strategy import Strategy, check_ranks, require_built

AUTO: Final = "auto"
"""Value of `strategy` or `batch.microbatch` for which the planner chooses."""


def check(config: TrainConfig) -> None:
    """Check types, ranges and contradictions of a configuration.

    Raises:
        ConfigError: a value is illegal; the message has the expected and the nearest legal value.
        StrategyError: the strategy cannot be parsed, is not built, or does not fit nproc.
    """
    check_values(config)
    best = config.save_policy.best
    name = (best or "").partition(":")[2]
    if name not in ("", "loss", "bits_per_byte") and not name.startswith("rewards/"):
        raise ConfigError(
            f"save: best is {best}, but an evaluation of text has no {name}; expected min:loss or "
            "min:bits_per_byte"
        )
    if config.strategy is not None and config.strategy != AUTO:
        strategy = Strategy.parse(config.strategy)
        require_built(strategy)
        if config.nproc is not None:
            check_ranks(strategy, config.nproc)
    if config.steps is not None and config.epochs is not None:
        raise ConfigError(
            f"steps is {config.steps} and epochs is {config.epochs:g}, but each fixes the length "
            "of the run; give one of them ('--epochs none' unsets the other)"
        )
    if config.steps is not None:
        check_warmup(config.optimizer, config.steps)
    if config.optimizer.kind == "adamw" and config.optimizer.matrix_lr is not None:
        raise ConfigError(
            f"optimizer.matrix_lr is {config.optimizer.matrix_lr:g}, the rate of Muon's matrices, "
            "but optimizer.kind is adamw; leave matrix_lr out, or set optimizer.kind muon"
        )
    if AUTO in (config.strategy, config.batch.microbatch) and config.batch.accumulation is not None:
        raise ConfigError(
            f"batch.accumulation is {config.batch.accumulation}, but auto chooses it with the "
            "microbatch; leave it out, and set batch.global_size"
        )
    # The worker of a job of servers that run already needs the three, and a place among the others.
    server = config.server
    names = ("coordinator", "worker", "secret")
    missing = [name for name in names if getattr(server, name) is None]
    if missing and len(missing) < len(names):
        set_name = next(name for name in names if name not in missing)
        raise ConfigError(
            f"server.{set_name} is {getattr(server, set_name)}, but server.{missing[0]} is unset; "
            "a worker that joins running servers needs coordinator, worker and secret"
        )
    if not missing:
        strategy = None if config.strategy in (None, AUTO) else Strategy.parse(config.strategy)
        if strategy is None or not strategy.is_served:
            raise ConfigError(
                f"server.coordinator is {server.coordinator}, but strategy {config.strategy} has "
                "no parameter servers; the nearest is dp2:ps"
            )
        if server.worker is not None and server.worker >= strategy.dp.degree:
            raise ConfigError(
                f"server.worker is {server.worker}, but the workers of {strategy} are 0 to "
                f"{strategy.dp.degree - 1}"
            )
    if config.init is not None and config.resume is not None:
        raise ConfigError(
            f"init is {config.init} and resume is {config.resume}, but both set the initial "
            "weights; resume continues a run, init starts a new run from the weights of another"
        )
    if config.tokenizer is not None and config.corpus.vocab_size is not None:
        raise ConfigError(
            f"corpus.vocab_size is {config.corpus.vocab_size}, the size of a tokenizer to train, "
            f"but tokenizer is {config.tokenizer}, which is already trained; give one of them"
        )


def check_warmup(optimizer: OptimizerConfig, num_steps: int) -> None:
    """Raise ConfigError unless the warm-up ends before the last step of the run."""
    warmup_steps = optimizer.warmup_steps
    if warmup_steps is not None and warmup_steps >= num_steps > 0:
        raise ConfigError(
            f"optimizer.warmup_steps is {warmup_steps}, but the run has {num_steps} steps and the "
            f"warm-up must end before the last; the nearest is {num_steps - 1}"
        )


def check_kind(optimizer: OptimizerConfig, strategy: Strategy) -> None:
    """Raise ConfigError for Muon with parameter servers, each of which has a part of a matrix."""
    if strategy.is_served and optimizer.kind == "muon":
        raise ConfigError(
            f"optimizer.kind is muon, but the servers of {strategy} update parts of matrices, and "
            "Muon needs whole ones; leave optimizer.kind out, or use "
            f"dp{strategy.dp.degree}"
        )


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes that satisfy global_size = microbatch x accumulation x num_data_ranks."""

    global_size: int
    microbatch: int
    accumulation: int
    num_data_ranks: int

    def __str__(self) -> str:
        return (
            f"global batch {self.global_size} = microbatch {self.microbatch} x accumulation "
            f"{self.accumulation} x {self.num_data_ranks} data ranks"
        )


def solve_batch(batch: BatchConfig, num_data_ranks: int, pp_degree: int = 1) -> BatchPlan:
    """Solve the batch law for the sizes that are not given.

    Any two of global_size, microbatch and accumulation determine the third. If fewer than two are
    given, accumulation defaults to 1, and microbatch to 4 without a global_size. A pipeline of
    `pp_degree` ranks needs several microbatches: its default accumulation is 2 x `pp_degree`, or
    the largest smaller number that divides the rows per data rank of a given global_size.

    Raises:
        BatchError: the sizes contradict each other; the message has the nearest legal sizes.
    """
    size, microbatch, accumulation = batch.global_size, batch.microbatch, batch.accumulation
    assert microbatch != AUTO, "it is chosen before"
    # given                       then
    # global, microbatch          accumulation = global / (microbatch x ranks)
    # global                      accumulation 1, or of a pipeline up to 2 pp; microbatch the rest
    # microbatch, accumulation    global is their product
    # nothing                     microbatch 4, accumulation as above
    if accumulation is None and (size is None or microbatch is None):
        accumulation = 1 if pp_degree == 1 else 2 * pp_degree
        if size is not None and size % num_data_ranks == 0:
            rows = size // num_data_ranks
            accumulation = max(n for n in range(1, accumulation + 1) if rows % n == 0)
    if microbatch is None and size is None:
        microbatch = 4
    if size is not None:
        _check_most(f"batch.global_size is {size},", -(-size // num_data_ranks), num_data_ranks)
    if microbatch is None or accumulation is None:
        assert size is not None  # without a global size, both are set above
        name, known = ("microbatch", microbatch) if microbatch else ("accumulation", accumulation)
        known = known or 1
        unit = known * num_data_ranks
        other, rest = divmod(size, unit)
        if rest:
            below, above = other * unit, (other + 1) * unit
            legal = f"{below} and {above} are" if below else f"{above} is"
            raise BatchError(
                f"batch.global_size is {size}, but it must be a multiple of {name} {known} x "
                f"{num_data_ranks} data ranks = {unit}; {legal} the nearest"
            )
        microbatch, accumulation = microbatch or other, accumulation or other
    rows = microbatch * accumulation
    product = f"batch.microbatch {microbatch} x batch.accumulation {accumulation} are"
    _check_most(product, rows, num_data_ranks)
    if size not in (None, rows * num_data_ranks):
        whole = rows * num_data_ranks
        raise BatchError(
            f"batch.global_size is {size}, but microbatch {microbatch} x accumulation "
            f"{accumulation} x {num_data_ranks} data ranks = {whole}; set global_size to "
            f"{whole}, or give only two of the three"
        )
    return BatchPlan(rows * num_data_ranks, microbatch, accumulation, num_data_ranks)


def _check_most(words: str, rows: int, num_data_ranks: int) -> None:
    """Raise BatchError if a data rank has more than MOST_ROWS rows; `words` begin the message."""
    if rows > MOST_ROWS:
        raise BatchError(
            f"{words} {rows} sequences for each of {num_data_ranks} data ranks; the most is "
            f"{MOST_ROWS} a rank, {MOST_ROWS * num_data_ranks} in all"
        )
