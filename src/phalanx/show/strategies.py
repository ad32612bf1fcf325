"""Strategies that `one_step` runs, each with a description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.strategy import Strategy


@dataclass(frozen=True)
class Example:
    """A strategy to show, and its description.

    Attributes:
        line: line in the list of topics.
        strategy: text form, with N for the number of ranks and H for half of it.
        about: introductory sentences.
        in_torch: equivalent call of torch.
        shape: fields of SHAPE to replace.
        bucket_bytes: size of the dp buckets, bytes; None for the trainer's default.
        beside: text form of a strategy whose memory is shown for comparison; empty for none.
        goes_round: whether keys and values are sent around a ring of ranks.
    """

    line: str
    strategy: str
    about: Sequence[str]
    in_torch: str
    shape: Mapping[str, Any] = field(default_factory=dict[str, Any])
    bucket_bytes: int | None = None
    beside: str = ""
    goes_round: bool = False

    def strategy_of(self, num_ranks: int) -> Strategy:
        """Return the strategy for `num_ranks` ranks.

        Raises:
            StrategyError: the strategy cannot have this number of ranks.
        """
        half = max(1, num_ranks // 2)
        return Strategy.parse(self.strategy.replace("N", str(num_ranks)).replace("H", str(half)))


STRATEGIES: Final = {
    "buckets": Example(
        "a step of dp: which bucket is sent during which backward",
        "dpN",
        [
            "Gradients are put into flat buckets, here of at least 16 KiB instead of 25 MiB, last "
            "layers first. A bucket is sent as soon as it is full, during the backward of the next "
            "layer."
        ],
        "DistributedDataParallel(model, bucket_cap_mb=25)",
        {"num_layers": 4},
        16 * 1024,
    ),
    "zero1": Example(
        "a step with sharded optimizer state",
        "fsdpN:zero1",
        [
            "Master weights and moments are sharded; the weights are gathered once a step and "
            "kept. Full gradients are summed over microbatches, and reduced to shards once a step."
        ],
        "ZeroRedundancyOptimizer(params, torch.optim.AdamW)",
    ),
    "zero2": Example(
        "a step with sharded gradients too",
        "fsdpN:zero2",
        ["Like zero1, but each microbatch reduces its gradients to shards at once."],
        "fully_shard(module, reshard_after_forward=False)",
    ),
    "zero3": Example(
        "a step with sharded parameters too",
        "fsdpN:zero3",
        [
            "Weights are sharded too: a block is gathered before its forward, freed, and gathered "
            "again before its backward, which reduces its gradients to shards."
        ],
        "fully_shard(module)",
    ),
    "hsdp": Example(
        "a step with shards in groups, replicas across groups",
        "dp2,fsdpH",
        [
            "Shards over the ranks of a group (fsdp), replicas across groups (dp): gathers stay "
            "inside a group, and only gradients of shards are sent across groups."
        ],
        "fully_shard(module, mesh=init_device_mesh(device, (2, H)))",
    ),
    "recompute": Example(
        "a step whose backward recomputes blocks",
        "dpN,recompute:full",
        [
            "A block keeps only its input. Its backward runs the forward again, so one block's "
            "activations are stored at a time; no additional bytes are sent."
        ],
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        {"num_layers": 4},
        beside="dpN",
    ),
    "ring-attention": Example(
        "positions are split; keys and values circulate",
        "cpN:ring",
        [
            "A rank has a part of the positions. Keys and values circulate around the ring in "
            "N - 1 hops, each sent while the rank attends to them; in backward their gradients "
            "return to the rank that computed them."
        ],
        "torch.distributed.tensor.experimental.context_parallel(mesh, buffers=[q, k, v])",
        goes_round=True,
    ),
    "ulysses": Example(
        "positions are split; all-to-alls swap them for heads",
        "cpN:ulysses",
        [
            "A rank has a part of the positions; before attention an all-to-all gives it all "
            "positions of some heads, and after attention a second all-to-all reverses this."
        ],
        "dist.all_to_all_single before and after scaled_dot_product_attention",
    ),
    "tp-1d": Example(
        "tensor parallelism with sequence parallelism",
        "tpN",
        [
            "q, k, v, gate and up are split by rows (column-parallel), the output of attention and "
            "down by columns (row-parallel); between the branches each rank holds a part of the "
            "positions, so a branch begins with an all-gather and ends with a reduce-scatter."
        ],
        "parallelize_module(block, mesh, {... ColwiseParallel(), RowwiseParallel() ...})",
    ),
    "tp-2d": Example(
        "tensor parallelism on a square of ranks (SUMMA)",
        "tpN:2d",
        [
            "Activations and weights are split over a square of ranks (SUMMA): panels are "
            "broadcast along rows and columns, and products reduced; no full matrix is gathered."
        ],
        "none",
    ),
    "tp-2.5d": Example(
        "tensor parallelism on two squares",
        "tpN:2.5d/2",
        [
            "Two squares, each with the same weights and different rows of the batch; gradients "
            "are summed over the depth."
        ],
        "none",
    ),
    "tp-3d": Example(
        "tensor parallelism on a cube",
        "tpN:3d",
        [
            "Weights and activations are split over a cube of ranks: each product gathers along "
            "two axes and reduces along the third."
        ],
        "none",
    ),
}
"""Topic -> strategy with its description."""

ON_CUBES: Final = ("tp-2.5d", "tp-3d")
"""Topics whose default is 8 ranks."""
