"""Ranks of a test as those that agents of `phalanx launch` start on several hosts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.comm.join import job_store
from phalanx.launch.launched import VARIABLE, Launched


def start_on(hosts: Sequence[tuple[Path, int]], **launched: Any) -> Path:
    """Be a rank that agents have started on hosts, each with its folder and its number of ranks."""
    rank = dist.get_rank()
    ends = list(itertools.accumulate(num_here for _, num_here in hosts))
    host = next(number for number, end in enumerate(ends) if rank < end)
    (folder, num_here), first = hosts[host], ends[host] - hosts[host][1]
    folder.mkdir(parents=True, exist_ok=True)
    store: Any = job_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    os.environ |= {
        VARIABLE: Launched(folder=str(folder), restarts=1, **launched).text(),
        "RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(rank - first),
        "LOCAL_WORLD_SIZE": str(num_here),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return folder
