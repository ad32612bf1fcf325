"""Find out whether the ranks of a group share the memory of one host, and let them use it.

Each rank says which file of which process its heap is, and the token that it has written there. A
rank that reads the same token in the file of that name has the same memory before it: no name of a
host, no address and no variable of the environment is asked.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import torch
import torch.distributed as dist

from phalanx.comm.channels import IS_SUPPORTED, Channels, SharedRank, reserve
from phalanx.comm.heap import Heap, mapped, own_heap
from phalanx.comm.shared_memory import SharedMemory

MOST_RANKS: Final = 256
"""Ranks of a group that may be on one host."""


def connect(group: dist.ProcessGroup, timeout_s: Callable[[], float]) -> SharedMemory | None:
    """Return what runs the collectives of a group through shared memory; every rank calls this.

    None on all ranks where they are not on one host, as the tokens in each other's memory
    show, or one of them cannot share memory. A rank waits `timeout_s()` for another.
    """
    size = group.size()
    if not 1 < size <= MOST_RANKS:
        return None
    heap, record, kept = None, [0] * 7, None
    if IS_SUPPORTED:
        with suppress(OSError):
            heap = own_heap()
            first, kept = reserve(heap, size)
            tokens = struct.unpack("qq", heap.token)
            record = [os.getpid(), heap.file, heap.num_bytes, first, dist.get_rank(), *tokens]
    given = torch.tensor(record, device="cpu")
    records = [torch.empty_like(given) for _ in range(size)]
    dist.all_gather(records, given, group=group)
    members = [] if heap is None else _members(heap, [each.tolist() for each in records])
    are_all_here = torch.tensor(len(members) == size, dtype=torch.uint8, device="cpu")
    dist.all_reduce(are_all_here, dist.ReduceOp.MIN, group=group)
    if heap is None or not are_all_here:
        return None
    return SharedMemory(group, Channels(members, group.rank(), timeout_s), heap, kept)


def _members(heap: Heap, records: Sequence[Sequence[int]]) -> list[SharedRank]:
    """Return the ranks whose memory this process has mapped, up to the first that has none."""
    members: list[SharedRank] = []
    with suppress(OSError):
        for process, file, num_bytes, first, rank, *tokens in records:
            token = struct.pack("qq", *tokens)
            is_own = token == heap.token
            memory = heap if is_own else mapped(process, file, token, num_bytes)
            members.append(SharedRank(rank, process, memory, first))
    return members
