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
    wrong, causes = [row for row in differences if not row.passes], list[str]()
    lacking = [row for row in wrong if row.problem == "it is missing"]
    if missing := [row.name for row in lacking if row.quantity == "gradient"]:
        causes.append(
            f"{_list(missing)}: the gradient is missing, as if the parameter had not been used"
        )
    if ranks := [rank for rank, of_rank in enumerate(facts) if of_rank.nonfinite]:
        where = named(ranks) if len(ranks) < len(facts) else "all ranks"
        names = _list(facts[ranks[0]].nonfinite)
        causes.append(f"the gradient of {names} is not finite on {where}")
    causes += itertools.islice(_from_ratios(wrong, strategy, case.accumulation), 1)
    return [*causes, *_from_modules(case, strategy)]


def _from_ratios(
    wrong: Sequence[Difference], strategy: Strategy, accumulation: int
) -> Iterator[str]:
    """Recognize factors: a mean in place of a sum, or a sum that is done twice."""
    ratios = [
        (row.what, row.ratio)
        for row in wrong
        if row.ratio is not None and row.quantity in ("loss", "gradient")
    ]
    factors = {
        f"the {strategy.data_ranks} data ranks": strategy.data_ranks,
        **{f"the {axis.degree} ranks of {name}": axis.degree for name, axis in strategy.axes()},
        f"the {accumulation} microbatches": accumulation,
        "ranks x microbatches": strategy.data_ranks * accumulation,
    }
    for (quantity, ratio), (what, factor) in itertools.product(ratios, factors.items()):
        if factor > 1 and abs(ratio - 1 / factor) < 1e-6:
            how = f"1/{factor} of what it should be: a mean instead of a sum"
            yield f"{quantity} is {how}, over {what}"
        if factor > 1 and abs(ratio - factor) < 1e-6 * factor:
            how = f"{factor} times what it should be: a sum computed twice, or a `loss_sum` that"
            yield f"{quantity} is {how} returns a mean, over {what}"
    if ratios and abs(ratios[0][1]) < 1e-12:
        yield f"{ratios[0][0]} is zero"


def _from_modules(case: Case, strategy: Strategy) -> Iterator[str]:
    """Name modules whose result depends on other rows of the batch, or on the rank's generator."""
    is_keyed = case.dropout_seed is not None and strategy.has_whole_samples
    with_statistics, with_draws = list[str](), list[str]()
    for name, module in case.build().train().named_modules():
        kind = type(module).__name__
        is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]
        if not module.training or (is_batch_norm and case.batch_norm == "global"):
            continue  # global statistics are of all rows: an error in them is not the module's
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
