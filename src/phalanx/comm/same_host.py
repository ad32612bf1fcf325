"""Detect whether all ranks of a group can share memory, and connect them through it if so.

Each rank publishes its process id, the descriptor of its heap, and the heap's token. A rank that
opens that file and reads the same token shares that memory. Host names, addresses and environment
variables are not used.
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
"""Largest group that uses shared memory."""


def connect(group: dist.ProcessGroup, timeout_s: Callable[[], float]) -> SharedMemory | None:
    """Return a shared-memory engine for the collectives of a group; every rank calls this.

    Return None on all ranks if the group has one rank or more than `MOST_RANKS`, or if a rank
    cannot share memory or read the tokens of all others, as on several hosts. Collectives time out
    after `timeout_s()` seconds.
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
    """Map the heaps of the ranks, up to the first that cannot be mapped; return those ranks."""
    members: list[SharedRank] = []
    with suppress(OSError):
        for process, file, num_bytes, first, rank, *tokens in records:
            token = struct.pack("qq", *tokens)
            is_own = token == heap.token
            memory = heap if is_own else mapped(process, file, token, num_bytes)
            members.append(SharedRank(rank, process, memory, first))
    return members
