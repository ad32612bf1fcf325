"""FLOPs of any module, counted link by link (`account.module`), and pipeline stages cut by them.

`parallel/pipeline/split.py` cuts by parameter counts, which mislead for convolutions: the first
layers of a residual network have few parameters and most of the FLOPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from phalanx.account.module import CountedLink, count_module
from phalanx.data.rows import count_rows, map_tensors, tensors_of
from phalanx.errors import ConfigError
from phalanx.models.decoder import Decoder
from phalanx.parallel.pipeline.cut import schedule_of
from phalanx.parallel.pipeline.links import cut_links, links_of
from phalanx.parallel.pipeline.partition import imbalance, stage_costs
from phalanx.report.units import percent
from phalanx.strategy import Strategy

if TYPE_CHECKING:
    from phalanx.script.trainer import Trainer


@dataclass(frozen=True)
class ModuleFlops:
    """FLOPs of the forward and backward of a batch, by link."""

    links: tuple[CountedLink, ...]
    num_rows: int
    row_shapes: tuple[torch.Size, ...]

    @property
    def total(self) -> int:
        """FLOPs of all links."""
        return sum(link.flops for link in self.links)

    def are_of(self, microbatches: Sequence[Any]) -> bool:
        """Return whether all rows have the shapes that were counted.

        Rows that are padded to the longest row of their batch may have other shapes.
        """
        filled = [each for each in microbatches if any(len(t) for t in tensors_of(each) if t.ndim)]
        return all(row_shapes(each) == self.row_shapes for each in filled)


def row_shapes(batch: Any) -> tuple[torch.Size, ...]:
    """Return the shape of one row of each tensor in a batch."""
    return tuple(tensor.shape[1:] for tensor in tensors_of(batch))


def flops_of_trainer(
    trainer: Trainer, strategy: Strategy, model: nn.Module, of_batch: Callable[[Any], Any]
) -> ModuleFlops | None:
    """Return the FLOPs of a global batch; None for streams, recomputation and uncountable modules.

    Reads one batch, and restores torch's generator. `of_batch` converts it before the model runs.
    Matrix products, convolutions and attention count by PyTorch's formulas, 2 per multiply-add.
    """
    is_stream = isinstance(trainer.data, IterableDataset)  # a stream may have no second pass
    if strategy.recompute.kind != "none" or is_stream:
        return None
    with torch.random.fork_rng(devices=[]):
        batch = next(iter(trainer.loader(trainer.data)), None)
    if batch is None or not tensors_of(batch):
        return None
    rows = map_tensors(of_batch(batch), lambda tensor: tensor.to("meta"))
    try:
        links = tuple(count_module(model, trainer.objective, rows, type(model).__name__))
    except ConfigError:  # the module reads values, and meta tensors have none
        return None
    counted = ModuleFlops(links, count_rows(rows), row_shapes(rows))
    return counted if counted.total else None


def cut_by_flops(
    strategy: Strategy, model: nn.Module, flops: ModuleFlops | None
) -> tuple[Strategy, list[str]]:
    """Return `strategy` with pipeline stages balanced by FLOPs, and lines that report the stages.

    With pp1, without FLOPs, or for our `Decoder`, which is cut elsewhere, return the strategy
    unchanged and no lines.

    Raises:
        StrategyError: the model is no chain, or has fewer layers than stages.
    """
    if strategy.pp.degree == 1 or flops is None or isinstance(model, Decoder):
        return strategy, []
    costs = [float(link.flops) for link in flops.links]
    cut = cut_links(strategy, model, links_of(model), costs)
    counted = dataclasses.replace(strategy, cut=tuple(map(len, cut)))
    return counted, stage_lines(counted, flops.links, cut)


def stage_lines(
    strategy: Strategy, links: Sequence[CountedLink], cut: Sequence[range]
) -> list[str]:
    """Return lines with the modules and FLOPs of each stage, and the stages' imbalance."""
    costs = [float(link.flops) for link in links]
    rank_of, per_stage = schedule_of(strategy, 1).rank_of, stage_costs(costs, cut)
    lines: list[str] = []
    for stage, part in enumerate(cut):
        names = [name for at in part for name in links[at].modules]
        words = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        share = percent(per_stage[stage] / (sum(per_stage) or 1.0))
        lines.append(f"stage {stage}, rank {rank_of[stage]} of pp: {words}, {share} of the FLOPs")
    return [*lines, f"slowest stage / mean: {imbalance(costs, cut):.2f}"]
