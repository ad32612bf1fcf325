"""Overlap fsdp's communication with the computation of blocks on a CPU.

On a GPU FSDP2 runs collectives on separate streams, and the host runs ahead of them. A CPU has no
streams: to overlap, a collective must start before the computation and be waited for after it.

A step of zero3 with embedding E, blocks 0 to 3, head H and the rest R. Time runs to the right, and
the entries of one column run at the same time:

    forward    gathers     R   E   .   0   1   2   3   H   .
               computes    .   .   E   .   0   1   2   3   H

    backward   gathers     .   2   1   0   .   .   .   .         3, H and R are still gathered
               computes    H   3   2   1   0   E   .   .
               reduces     .   H   3   2   1   0   R   E

A gather starts before the preceding block computes, and is waited for before its own block
computes. A reduction starts when the backward of its block ends, and is waited for before the next
reduction starts. No block is gathered while the embedding computes, because its computation is
too short to hide a gather, and the memory would hold the table and a block together.

At most one block in addition to the computing one is gathered (see `groups.peak_gathered_bytes`),
and one reduction has buffers. Every rank starts all collectives in one order, as collectives
require.

A reduction is waited for at once if FSDP2 reads its result immediately: to add it to the gradient
of earlier microbatches, or with HSDP, to all-reduce it over dp.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from phalanx.comm.comm import Ranks
from phalanx.comm.fsdp import LastReduction, ShardGather, ShardReduction, param_groups
from phalanx.parallel.groups import Group


def use_engine(model: nn.Module, comm: Ranks, *, has_replicas: bool) -> None:
    """Make FSDP2 gather and reduce through the engines of `comm`, and wait as late as possible.

    Call this after `fully_shard` has split the model and the parameters are on their device.
    """
    last, gathers = LastReduction(), dict[FSDPModule, list[ShardGather]]()
    axis_of, known = comm.axis_by_ranks(), set[object]()
    # Private, and the only way to make FSDP2 start gathers asynchronously;
    # tests/parallel/test_overlap.py pins it.
    cast(FSDPModule, model)._set_unshard_async_op(True)  # pyright: ignore[reportPrivateUsage]
    for name, module in model.named_modules():
        groups = param_groups(module) if isinstance(module, FSDPModule) else []
        for group in (each for each in groups if each not in known):  # modules may have one group
            known.add(group)
            # Nothing overlaps the reduction of the rest.
            of = [each.sharded_param for each in group.fsdp_params] if name else model.parameters()
            trained = [parameter for parameter in of if parameter.requires_grad]
            is_read_at_once = functools.partial(_is_read_at_once, trained, has_replicas)
            ranks = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
            engine, part = comm.engine(axis_of[tuple(ranks)]), name or "rest"
            # Private, because FSDP2 sets them only for modules of one group.
            group._all_gather_comm = gather = ShardGather(engine, part)
            group._reduce_scatter_comm = ShardReduction(engine, last, is_read_at_once, part)
            gathers.setdefault(cast(FSDPModule, module), []).append(gather)

    def take_unused(*_: Any) -> None:
        # No later forward may use the old weights of blocks that inference skipped. For blocks
        # that a training step skips, FSDP2 drops the gather when backward ends.
        if not torch.is_grad_enabled():
            for module, of_module in gathers.items():
                if any(gather.is_under_way for gather in of_module):
                    cast(UnshardHandle, module.unshard(async_op=True)).wait()

    model.register_forward_hook(take_unused)


def gather_ahead(model: nn.Module, groups: Sequence[Group]) -> None:
    """Prefetch each block, and the head, in forward while the block before it computes.

    The blocks of the model, which `fully_shard` has split, must run in the order of the groups.
    """
    computing = dict.fromkeys(g.names for g in groups if g.place in ("block", "head"))
    modules = [cast(FSDPModule, model.get_submodule(first)) for first, *_ in computing]
    for module, following in itertools.pairwise(modules):
        module.set_modules_to_forward_prefetch([following])


def _is_read_at_once(trained: Sequence[nn.Parameter], has_replicas: bool) -> bool:
    """Return whether the result of a group's reduction is read before backward continues.

    FSDP2 reads it, or a hook on a parameter does, which FSDP2 calls at once.
    """
    # Private; FSDP2 calls the hooks in this attribute. tests/parallel/test_overlap.py pins it.
    hooks = "_post_accumulate_grad_hooks"
    return has_replicas or any(p.grad is not None or getattr(p, hooks, None) for p in trained)
