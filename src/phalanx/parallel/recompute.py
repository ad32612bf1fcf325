"""Activation recomputation: forward keeps little, and backward runs part of forward again.

Idea      The blocks are cut into segments of K. Only what goes into a segment is kept; backward,
          when it reaches the segment, runs it again, and holds what it needs of this one segment.
          `full` is K = 1, `every/K` is K, and `sqrt` is K = sqrt(L), rounded up: then the memory
          grows as sqrt(L) (Chen et al. 2016, arXiv 1604.06174, section 4.1). It is L / K inputs and
          K blocks; where a block holds much more than its input, a smaller K holds less.
          `selective` keeps also the results of matrix products and of attention, which are dear
          to make and small, and runs the rest again (Korthikanti et al. 2022, arXiv 2205.05198,
          section 5, keeps all but attention; with fused attention its result is small too).
Layout    Parameters stay where they are, under their names: no module is wrapped. With K = 1 and
          with `selective` it is the `forward` of each block that is replaced, so that hooks on the
          block (FSDP2 gathers its weights in one before backward) stay outside and need not run
          again. With K > 1 the model's own loop runs segments, see `Segmented`.
Backward  torch.utils.checkpoint without reentrance: it stops as soon as all is there that backward
          needs, so that the last product of a segment is not run again where nothing reads it
          (under tp it is: what a product keeps is known when it has run).
Cost      FLOPs: `account.flops.step_flops`; bytes: `account.activations`. Nothing is sent:
          FSDP2 gathers a block in backward once, as without recomputation, but with K > 1 the
          blocks of a segment stay gathered together until backward has passed them.
Limits    A forward must compute the same when it runs again: a block that changes state of its own
          (running statistics, a cache of keys) changes it twice. Torch's default random generators
          are set back, so nn.Dropout is right; so is randomness that belongs to positions. Shapes
          and dtypes of recomputed tensors are compared, and torch raises if they differ.
          Collectives inside a block run again, too.
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
from phalanx.parallel.blocks import blocks_of
from phalanx.parallel.split import Split, Target
from phalanx.strategy import Recompute, Strategy


@runtime_checkable
class Segmented(Protocol):
    """A model that runs its blocks by segments, each as one function; `models.Decoder` is one.

    Attributes:
        segment_size: number of consecutive blocks in a segment; the last may be shorter.
        run_segment: called as `run_segment(function, *args)` to return `function(*args)`.
    """

    segment_size: int
    run_segment: Callable[..., Any]


def apply(model: nn.Module, recompute: Recompute, carry: Callable[..., Any] | None = None) -> None:
    """Make `model`, in place, keep for backward only what `recompute` says.

    Without gradients, as in evaluation, it runs as before.

    Args:
        model: a module whose blocks are elements of ModuleLists; see `blocks_of`.
        recompute: the policy.
        carry: called with each function before its first run, to return one that knows the same
            when it runs again, outside of the model's forward; see `batch_shape`.

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

    if segment_size > 1:
        segmented = cast(Segmented, model)
        segmented.segment_size = segment_size
        segmented.run_segment = run_again
        return
    for _, block in blocks_of(model):
        _replace_forward(block, run_again)


def check(model: nn.Module, recompute: Recompute, num_blocks: int | None = None) -> int:
    """Return how many consecutive blocks `recompute` runs again as one; at least 1.

    Args:
        model: the model, or one with a block for each kind of block that it has.
        recompute: the policy.
        num_blocks: of the model, where the blocks of `model` stand for more.

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
                f"{text}: {type(norm).__name__} '{name}' is in training, and its running "
                "statistics would move twice where it runs again; the nearest is recompute:none"
            )
    segment_size = recompute.segment_size(num_blocks) or 1
    if segment_size > 1 and not isinstance(model, Segmented):
        raise StrategyError(
            f"{text}: {type(model).__name__} cannot run {segment_size} blocks as one, for it "
            "has no segment_size and run_segment; the nearest is recompute:full"
        )
    return segment_size


class RecomputeSplit(Split):
    """The setting recompute; it splits nothing, and is applied to what tp has made of a block."""

    axis = "recompute"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        check(target.skeleton.model, target.strategy.recompute, target.skeleton.num_blocks)

    @classmethod
    def is_asked(cls, target: Target) -> bool:
        """Return whether anything is run again."""
        return target.strategy.recompute.kind != "none"

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Replace forwards by those that keep less."""
        has_tensors = self.target.strategy.tp.degree > 1
        apply(model, self.target.strategy.recompute, carried if has_tensors else None)


def _replace_forward(block: nn.Module, run_again: Callable[..., Any]) -> None:
    """Let `run_again` call the block's forward.

    The new forward is a method, so that a copy of the block runs itself and not the original, and a
    function of its own rather than a partial one, which torch.compile would not look into.
    """
    bound = block.forward

    def call_bound(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    # It is no method of the block only where somebody else has replaced it before.
    original = call_bound
    if isinstance(bound, MethodType) and bound.__self__ is block:
        original = bound.__func__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_again(original, self, *args, **kwargs)

    block.forward = MethodType(forward, block)


def _policy(
    context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Keep the result of what torch counts FLOPs for: matrix products, convolutions, attention.

    Whoever has an operator of this kind of his own registers its FLOPs
    (`torch.utils.flop_counter.register_flop_formula`), and it is kept too.
    """
    packet = getattr(operator, "overloadpacket", operator)
    is_kept = packet in flop_registry or packet in _NOT_COUNTED
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


_NOT_COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
    torch.ops.torch_attn._varlen_attn,
}
"""Attention that torch counts no FLOPs for: on CPUs, on devices beside CUDA, and, in torch 2.11, of
documents."""
