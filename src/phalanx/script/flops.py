"""The FLOPs of a module of any kind, as the account counts its links, and stages cut by them.

`parallel/pipeline/split.py` knows the parameters of a module alone, and a convolution's say little:
the first layers of a residual network have few and do most of the work.
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
from phalanx.measure.utilization import percent
from phalanx.models.decoder import Decoder
from phalanx.parallel.pipeline.cut import cut_chain, schedule_of
from phalanx.parallel.pipeline.partition import imbalance, stage_costs
from phalanx.strategy import Strategy
from phalanx.train.objective import Objective

if TYPE_CHECKING:
    from phalanx.script.trainer import Trainer


@dataclass(frozen=True)
class ModuleFlops:
    """Floating-point operations of forward and backward of a batch."""

    links: tuple[CountedLink, ...]
    num_rows: int
    row_shapes: tuple[torch.Size, ...]

    @property
    def total(self) -> int:
        """Of all links."""
        return sum(link.flops for link in self.links)

    def are_of(self, microbatches: Sequence[Any]) -> bool:
        """Return whether all rows have the shapes that were counted.

        Those that are padded to the longest of their batch may not.
        """
        filled = [each for each in microbatches if any(len(t) for t in tensors_of(each) if t.ndim)]
        return all(row_shapes(each) == self.row_shapes for each in filled)


def row_shapes(batch: Any) -> tuple[torch.Size, ...]:
    """Return the shape of a row in each tensor of a batch."""
    return tuple(tensor.shape[1:] for tensor in tensors_of(batch))


def flops_of(model: nn.Module, objective: Objective, batch: Any) -> ModuleFlops | None:
    """Return the FLOPs of forward and backward of a batch; None if they cannot be counted.

    Matrix products, convolutions and attention count, 2 a multiply-add, by PyTorch's formulas.
    """
    rows = map_tensors(batch, lambda tensor: tensor.to("meta"))
    try:
        links = tuple(count_module(model, objective, rows, type(model).__name__))
    except ConfigError:  # whatever a module does with numbers, which there are none of
        return None
    found = ModuleFlops(links, count_rows(batch), row_shapes(batch))
    return found if found.total else None


def flops_of_trainer(
    trainer: Trainer, strategy: Strategy, model: nn.Module, of_batch: Callable[[Any], Any]
) -> ModuleFlops | None:
    """Return the FLOPs of a global batch; None if they are not counted, or are not all.

    The data are read, and left as they were; `of_batch` is applied before the model gets a batch.
    """
    is_stream = isinstance(trainer.data, IterableDataset)  # which may have no second pass
    if strategy.recompute.kind != "none" or is_stream:
        return None
    state = torch.get_rng_state()
    batch = next(iter(trainer.loader(trainer.data)), None)
    torch.set_rng_state(state)
    if batch is None or not tensors_of(batch):
        return None
    return flops_of(model, trainer.objective, of_batch(batch))


def cut_by_flops(
    strategy: Strategy, model: nn.Module, flops: ModuleFlops | None
) -> tuple[Strategy, list[str]]:
    """Return the strategy with the stages of the model, and lines that report them.

    Without pipelines, without FLOPs, and of our decoder, which has FLOPs of its own, nothing
    changes and nothing is said.
    """
    if strategy.pp.degree == 1 or flops is None or isinstance(model, Decoder):
        return strategy, []
    costs = [float(link.flops) for link in flops.links]
    cut = cut_chain(strategy, costs, ", ".join(" + ".join(link.modules) for link in flops.links))
    counted = dataclasses.replace(strategy, cut=tuple(map(len, cut)))
    return counted, stage_lines(counted, flops.links, cut)


def stage_lines(
    strategy: Strategy, links: Sequence[CountedLink], cut: Sequence[range]
) -> list[str]:
    """Return what each stage has of the links, and how uneven the stages are."""
    costs = [float(link.flops) for link in links]
    rank_of, per_stage = schedule_of(strategy, 1).rank_of, stage_costs(costs, cut)
    lines: list[str] = []
    for stage, part in enumerate(cut):
        names = [name for at in part for name in links[at].modules]
        words = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        share = percent(per_stage[stage] / (sum(per_stage) or 1.0))
        lines.append(f"stage {stage}, rank {rank_of[stage]} of pp: {words}, {share} of the FLOPs")
    return [*lines, f"slowest stage / mean: {imbalance(costs, cut):.2f}"]
