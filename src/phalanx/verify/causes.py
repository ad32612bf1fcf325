"""Likely causes of differences, recognized by known patterns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import nn

from phalanx.errors import named
from phalanx.strategy import Strategy
from phalanx.verify.compare import Difference
from phalanx.verify.record import Case
from phalanx.verify.snapshot import Snapshot


def likely_causes(
    case: Case, strategy: Strategy, differences: Sequence[Difference], facts: Sequence[Snapshot]
) -> list[str]:
    """Return the likely causes of the differences as sentences, the most certain first."""
    wrong = [d for d in differences if not d.passes]
    found = [*_from_values(wrong, facts), *_from_ratios(wrong, strategy, case.accumulation)]
    is_keyed = case.dropout_seed is not None and strategy.has_whole_samples
    model = case.build().train()
    return [*found, *_from_modules(model, is_keyed, case.batch_norm == "global")]


def _from_values(wrong: Sequence[Difference], facts: Sequence[Snapshot]) -> Iterator[str]:
    lacking = [d for d in wrong if d.problem == "it is missing"]
    missing = [d.name for d in lacking if d.quantity == "gradient"]
    if missing:
        yield f"{_list(missing)}: the gradient is missing, as if the parameter had not been used"
    ranks = [rank for rank, of_rank in enumerate(facts) if of_rank.nonfinite]
    if ranks:
        where = named(ranks) if len(ranks) < len(facts) else "all ranks"
        yield f"the gradient of {_list(facts[ranks[0]].nonfinite)} is not finite on {where}"


def _from_ratios(
    wrong: Sequence[Difference], strategy: Strategy, accumulation: int
) -> Iterator[str]:
    """Recognize factors: a mean in place of a sum, or a sum that is done twice."""
    found = [
        (d.what, d.ratio)
        for d in wrong
        if d.ratio is not None and d.quantity in ("loss", "gradient")
    ]
    factors = {
        f"the {strategy.data_ranks} data ranks": strategy.data_ranks,
        **{f"the {axis.degree} ranks of {name}": axis.degree for name, axis in strategy.axes()},
        f"the {accumulation} microbatches": accumulation,
        "ranks x microbatches": strategy.data_ranks * accumulation,
    }
    for (quantity, ratio), (what, factor) in itertools.product(found, factors.items()):
        if factor > 1 and abs(ratio - 1 / factor) < 1e-6:
            yield (
                f"{quantity} is 1/{factor} of what it should be: a mean instead of a sum, over "
                f"{what}"
            )
            return
        if factor > 1 and abs(ratio - factor) < 1e-6 * factor:
            yield (
                f"{quantity} is {factor} times what it should be: a sum computed twice, or a "
                f"`loss_sum` that returns a mean, over {what}"
            )
            return
    if found and abs(found[0][1]) < 1e-12:
        yield f"{found[0][0]} is zero"


def _from_modules(model: nn.Module, is_keyed: bool, is_global: bool) -> Iterator[str]:
    """Name modules whose result depends on other rows of the batch, or on the rank's generator."""
    with_statistics: list[str] = []
    with_draws: list[str] = []
    for name, module in model.named_modules():
        if not module.training:
            continue
        kind = type(module).__name__
        is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]
        if is_batch_norm and is_global:
            continue  # its statistics are of all rows; an error in them is no fault of the module
        if is_batch_norm or getattr(module, "running_mean", None) is not None:
            with_statistics.append(f"{name} ({kind})")
        elif is_keyed and type(module) is nn.Dropout:
            continue
        elif isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:  # pyright: ignore[reportPrivateUsage]
            with_draws.append(f"{name} ({kind}, p {module.p:g})")
        elif any(
            "dropout" in k and isinstance(v, float) and v > 0 for k, v in vars(module).items()
        ):
            with_draws.append(f"{name} ({kind})")
    if with_statistics:
        yield (
            f"{_list(with_statistics)}: in training it takes mean and variance over the rows of "
            "its own microbatch, so its result depends on the split; set "
            "batch_norm='global' with accumulation=1, use GroupNorm or LayerNorm, or put the "
            "module in eval()"
        )
    if with_draws:
        yield (
            f"{_list(with_draws)}: it draws from each process's own generator, so its masks depend "
            "on the rank; set p to 0, or set dropout_seed=0, which makes the masks of nn.Dropout "
            "depend on the sample, as `run.prepare` and the trainer do without tp"
        )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
