"""Activation recomputation: forward saves few activations, and backward recomputes the others.

Idea      The blocks are grouped into segments of K. Forward saves only the input of each segment;
          backward runs the forward of a segment again when it reaches the segment, and holds the
          activations of this one segment. `full` is K = 1, `every/K` is K, and `sqrt` is
          K = sqrt(L), rounded up, with which memory grows as sqrt(L) (Chen et al. 2016, arXiv
          1604.06174, section 4.1). Memory is L / K inputs plus the activations of K blocks; if a
          block's activations are much larger than its input, a smaller K needs less memory.
          `selective` also saves the results of matrix products and of attention, which are
          expensive to compute and small, and recomputes the rest (Korthikanti et al. 2022, arXiv
          2205.05198, section 5, recomputes attention; fused attention has a small result).
Layout    Parameters keep their names: no module is wrapped. With K = 1 and with `selective` the
          `forward` of each block is replaced, so that hooks on the block, such as the one in which
          FSDP2 gathers weights before backward, stay outside and do not run again. With K > 1 the
          model's own loop runs segments, see `Segmented`.
Backward  Non-reentrant torch.utils.checkpoint. Recomputation stops once all saved tensors are
          restored, so the last product of a segment does not run again if nothing reads its result
          (with tp it does run, because a composite product saves its tensors after it has run).
Cost      FLOPs: `account.flops.step_flops`; bytes: `account.activations`. No additional fsdp
          communication: FSDP2 gathers a block once in backward, as without recomputation. But with
          K > 1 the blocks of a segment stay gathered until backward has passed the segment.
Limits    A forward must compute the same result when it runs again: a block that changes its own
          state (running statistics, a key-value cache) would change it twice. Torch's default
          random generators are restored, so nn.Dropout is correct; so is randomness keyed by
          position. Torch compares shapes and dtypes of recomputed tensors and raises if they
          differ. Collectives inside a block run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.attention.varlen  # pyright: ignore[reportUnusedImport] (it registers its operator)
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from phalanx.comm.comm import Ranks
from phalanx.errors import StrategyError
from phalanx.parallel.batch_norm import batch_norms
from phalanx.parallel.batch_shape import carried
from phalanx.parallel.skeleton import blocks_of
from phalanx.parallel.split import Split, Target
from phalanx.strategy import Recompute, Strategy


@runtime_checkable
class Segmented(Protocol):
    """A model that runs its blocks in segments, each as one function, such as `models.Decoder`.

    Attributes:
        segment_size: number of consecutive blocks in a segment; the last one may be shorter.
        run_segment: called as `run_segment(function, *args)` to return `function(*args)`.
    """

    segment_size: int
    run_segment: Callable[..., Any]


def apply(model: nn.Module, recompute: Recompute, carry: Callable[..., Any] | None = None) -> None:
    """Apply the recomputation policy to the blocks of `model`, in place.

    A forward without gradients, as in evaluation, runs as before.

    Args:
        model: a module whose blocks are elements of ModuleLists; see `blocks_of`.
        recompute: the policy.
        carry: wraps each function before its first run, so that the second run, outside of the
            model's forward, sees the same context; see `batch_shape.carried`.

    Raises:
        StrategyError: see `check`.
    """
    segment_size = check(model, recompute)
    if recompute.kind == "none":
        return
    run_again = functools.partial(checkpoint, use_reentrant=False)
    if recompute.kind == "selective":
        keep = functools.partial(create_selective_checkpoint_contexts, _policy)
        run_again = functools.partial(run_again, context_fn=keep)
    if carry is not None:
        run_known, known = run_again, carry

        def run_again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return run_known(known(function), *args, **kwargs)

    #   K = 1    hooks [ block 0 ]  hooks [ block 1 ]  ...       [ ] runs again in backward
    #   K = 2    [ hooks block 0  hooks block 1 ]  [ hooks block 2  hooks block 3 ]
    if segment_size > 1:
        segmented = cast(Segmented, model)
        segmented.segment_size = segment_size
        segmented.run_segment = run_again
        return
    for _, block in blocks_of(model):
        _replace_forward(block, run_again)


def check(model: nn.Module, recompute: Recompute, num_blocks: int | None = None) -> int:
    """Return the number of consecutive blocks that `recompute` runs again together; at least 1.

    Args:
        model: the model, or a small one with one block for each kind of block.
        recompute: the policy.
        num_blocks: number of blocks of the full model, if `model` is a small one.

    Raises:
        StrategyError: the model has no blocks, fewer than a segment, cannot run segments, or keeps
            running statistics.
    """
    if recompute.kind == "none":
        return 1
    text = str(Strategy(recompute=recompute))
    num_blocks = len(blocks_of(model)) if num_blocks is None else num_blocks
    if num_blocks == 0:
        raise StrategyError(
            f"{text} needs a ModuleList of blocks, and this {type(model).__name__} has none; the "
            "nearest is recompute:none"
        )
    for name, norm in batch_norms(model):
        if norm.training and norm.track_running_stats:
            raise StrategyError(
                f"{text}: {type(norm).__name__} '{name}' is in training, and recomputing it would "
                "update its running statistics twice; the nearest is recompute:none"
            )
    segment_size = recompute.segment_size(num_blocks) or 1
    if segment_size > 1 and not isinstance(model, Segmented):
        raise StrategyError(
            f"{text}: {type(model).__name__} cannot run {segment_size} blocks as one, "
            "because it has no segment_size and run_segment; the nearest is recompute:full"
        )
    return segment_size


class RecomputeSplit(Split):
    """The setting recompute; it splits nothing, and wraps blocks that tp has already split."""

    axis = "recompute"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        check(target.skeleton.model, target.strategy.recompute, target.skeleton.num_blocks)

    @classmethod
    def applies_to(cls, target: Target) -> bool:
        """Return whether the strategy recomputes activations."""
        return target.strategy.recompute.kind != "none"

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Replace the forwards of blocks by forwards that recompute in backward."""
        strategy = self.target.strategy
        apply(model, strategy.recompute, None if strategy.has_whole_samples else carried)


def _replace_forward(block: nn.Module, run_again: Callable[..., Any]) -> None:
    """Replace the block's forward by one that calls the original through `run_again`.

    The new forward is a bound method, so that a copy of the block runs the copy and not the
    original. It is no functools.partial, which torch.compile would not trace into.
    """
    bound = block.forward

    def call_bound(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    # `bound` is not a method of the block only if other code has replaced the forward before.
    original = call_bound
    if isinstance(bound, MethodType) and bound.__self__ is block:
        original = bound.__func__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_again(original, self, *args, **kwargs)

    block.forward = MethodType(forward, block)


def _policy(
    context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save the results of operators with a FLOP formula: matrix products, convolutions, attention.

    The result of a custom operator is saved as well once the operator has a FLOP formula
    (`torch.utils.flop_counter.register_flop_formula`).
    """
    packet = getattr(operator, "overloadpacket", operator)
    is_kept = packet in flop_registry or packet in _NOT_COUNTED
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


_NOT_COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
    torch.ops.torch_attn._varlen_attn,
    torch.ops.aten._grouped_mm,
}
"""Operators without a FLOP formula in torch: attention for CPUs, for devices other than CUDA, and,
in torch 2.11, for packed documents (variable lengths); and grouped products of experts."""
