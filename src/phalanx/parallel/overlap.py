"""What fsdp sends on a CPU travels while blocks compute.

On a GPU FSDP2 puts collectives on streams of their own, and the host runs ahead of them. On a CPU
there is neither: a message that travels beside the arithmetic must begin before it and is waited
for after it.

A step of zero3 with embedding E, blocks 0 to 3, head H and the rest R. Time runs to the right, and
what stands in one column runs at the same time:

    forward    gathers     R   E   .   0   1   2   3   H   .
               computes    .   .   E   .   0   1   2   3   H

    backward   gathers     .   2   1   0   .   .   .   .         3, H and R have stayed gathered
               computes    H   3   2   1   0   E   .   .
               reduces     .   H   3   2   1   0   R   E

A gather begins before the block on its left computes, and is waited for before its own block does.
A reduction begins when its block is done, and is waited for before the next reduction begins.
Nothing is gathered under the embedding, which computes next to nothing: its table and a block would
be held together.

Beside a block at work one more is gathered at most, as `groups.most_gathered` says, and one
reduction has its buffers. Every rank begins all this in one order, as it must.

Some reductions are waited for at once, since FSDP2 reads what they leave: where it adds to what
earlier microbatches have left, and under HSDP, where it all-reduces over dp.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from phalanx.comm.fsdp import LastReduction, ShardGather, ShardReduction
from phalanx.comm.transfer import CommEngine
from phalanx.parallel.groups import Group


def use_engine(
    model: nn.Module, groups: Sequence[Group], engine: CommEngine, *, has_replicas: bool
) -> None:
    """Have FSDP2 gather and reduce by `engine`, and wait only where it must.

    The model is split by `fully_shard`, and its parameters are where they will stay.
    """
    last, gathers = LastReduction(), dict[FSDPModule, ShardGather]()
    # Private, and the only way to have FSDP2 ask for a gather that it waits for later;
    # tests/parallel/test_overlap.py pins it.
    cast(FSDPModule, model)._set_unshard_async_op(True)  # pyright: ignore[reportPrivateUsage]
    for group in groups:
        modules = [model.get_submodule(name) for name in group.names]
        # The parameters of the rest are all of the model; nothing computes while it is reduced.
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        is_read_at_once = functools.partial(_is_read_at_once, trained, has_replicas)
        for module in cast(list[FSDPModule], modules):
            gathers[module] = ShardGather(engine)  # FSDP2 takes the last of a group
            module.set_custom_all_gather(gathers[module])
            module.set_custom_reduce_scatter(ShardReduction(engine, last, is_read_at_once))
    model.register_forward_hook(functools.partial(_take_unused, gathers))


def gather_ahead(model: nn.Module, groups: Sequence[Group]) -> None:
    """Have forward gather each block, and the head, while the block before it computes.

    The blocks of the model, which `fully_shard` has split, run in the order of the groups.
    """
    computing = [group.names for group in groups if group.place in ("block", "head")]
    modules = [cast(FSDPModule, model.get_submodule(first)) for first, *_ in computing]
    for module, following in itertools.pairwise(modules):
        module.set_modules_to_forward_prefetch([following])


def _take_unused(gathers: Mapping[FSDPModule, ShardGather], *_: Any) -> None:
    """Wait for what was gathered for a block that inference left out: later it would be old.

    What a step leaves out, FSDP2 drops as backward ends.
    """
    if not torch.is_grad_enabled():
        for module, gather in gathers.items():
            if gather.is_under_way:
                cast(UnshardHandle, module.unshard(async_op=True)).wait()


def _is_read_at_once(trained: Sequence[nn.Parameter], has_replicas: bool) -> bool:
    """Return whether FSDP2 reads the sum of a group's gradients before it returns to backward.

    So does a hook on a gradient, which FSDP2 calls at once.
    """
    # Private; FSDP2 calls the hooks that it finds there. tests/parallel/test_overlap.py pins it.
    hooks = "_post_accumulate_grad_hooks"
    return has_replicas or any(p.grad is not None or getattr(p, hooks, None) for p in trained)
