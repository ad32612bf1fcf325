"""What one rank of a job of thousands does beside computing, without the other ranks.

A process joins PyTorch's fake process group as one rank of many: collectives return at once, and
everything else is what `phalanx train` does. Counted and timed in the processor's own seconds.

python benchmarks/scale/main.py [--model llama3-8b] [--out FILE.json]
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from phalanx.checkpoint.sharding import Sharding, WritePlan, plan_reads
from phalanx.checkpoint.state import local_shards_with_moments
from phalanx.comm.comm import Ranks
from phalanx.comm.join import num_files
from phalanx.comm.ledger import Ledger
from phalanx.config import OptimizerConfig
from phalanx.data.order import Order
from phalanx.debug.check import CollectiveCheck
from phalanx.launch.agreement import check_same
from phalanx.models.decoder import Decoder
from phalanx.models.registry import shape_of
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.train.optimizer import build_optimizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import write_result

Value = TypeVar("Value")

SPLITS = {
    "dp64,fsdp8,tp8": "dp32,fsdp16,tp8",
    "dp512,fsdp8": "dp64,fsdp8,tp8",
    "dp16,fsdp32,tp8:2.5d/2": "dp512,fsdp8",
    "dp8,fsdp512": "dp64,fsdp8,tp8",
    "fsdp4096": "dp512,fsdp8",
}
"""A strategy of 4,096 ranks, and the one that goes on with its checkpoint."""

BOUND_S = 30.0
"""Most of the processor's seconds that one rank may work before the first step."""

NUM_CALLS = 20
"""Collectives that --debug-comm compares while it is timed."""


class Clock:
    """Collects the processor's seconds of named pieces of work in this process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], Value]) -> Value:
        """Do a piece of work and keep how long the processor worked for it."""
        begin_s = time.process_time()
        value = work()
        self.seconds[name] = time.process_time() - begin_s
        return value


def join(rank: int, num_ranks: int) -> dist.HashStore:
    """Become one rank of a job without any other, and return the store where they would meet."""
    assert fake_pg.FakeProcessGroup is not None  # imported, it makes the backend known
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=num_ranks)
    return store


def split(model_name: str, strategy: Strategy, comm: Ranks) -> dict[str, Sharding]:
    """Split a model that holds nothing; return how its state will lie over the ranks."""
    with torch.device("meta"):
        model = Decoder(shape_of(model_name))
    Plan(strategy, model).build(comm)
    held = local_shards_with_moments(model, build_optimizer(model, OptimizerConfig()))
    return {name: each.sharding for name, each in held.items()}


def start(text: str, other: str, rank: int, model_name: str) -> dict[str, Any]:
    """Start as one rank of a job, plan a save, and to load it by another split.

    Args:
        text: strategy of the job.
        other: strategy of the job that goes on, of as many ranks.
        rank: which one of them this process is.
        model_name: a preset.
    """
    strategy, clock = Strategy.parse(text), Clock()
    num_ranks = strategy.num_ranks
    join(rank, num_ranks)
    comm = clock.time("mesh and groups", lambda: Ranks(strategy))
    with torch.device("meta"):
        model = Decoder(shape_of(model_name))
    whole = clock.time("plan", lambda: Plan(strategy, model))
    entries = clock.time("traffic()", lambda: whole.traffic([(1, 4096)]))
    holding = clock.time("holds()", whole.holds)
    with Ledger(comm) as ledger:
        shardings = clock.time("split", lambda: split(model_name, strategy, comm))
    place, num_places = comm.coord("data"), comm.size("data")
    rows = np.arange(place, 64 * num_places, num_places)
    clock.time("samples of 64 steps", lambda: Order(10**9, seed=0).samples(rows))
    plan = clock.time("who writes what", lambda: WritePlan(shardings, num_ranks))
    writes = clock.time("what this rank writes", lambda: plan.writes_of(rank))
    layouts = clock.time("index, on rank 0", plan.layouts)
    resumed = split(model_name, Strategy.parse(other), Ranks(Strategy.parse(other)))
    boxes = {name: sharding.box(rank) for name, sharding in resumed.items()}
    reads = clock.time(f"reads, by {other}", lambda: plan_reads(layouts, boxes))
    return {
        "cpu_s": clock.seconds,
        "calls_before_the_first_step": sum(entry.calls for entry in ledger.entries()),
        "sent_bytes_a_step": sum(entry.sent_bytes for entry in entries),
        "parameter_and_optimizer_bytes": holding.parameter_bytes + holding.optimizer_bytes,
        "written_bytes": sum(info.num_bytes for info in writes.values()),
        "files_read": len(reads),
        "open_files_of_rank_0": num_files(comm.axes, num_ranks, "cpu"),
    }


class CountingStore:
    """Stands for a store, and counts the keys that are turned to, and the bytes set and got."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.num_keys = 0
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = getattr(self.store, name)(*args)
            self.num_keys += len(args[0]) if isinstance(args[0], list) else 1
            self.num_bytes += sum(
                len(text) for text in (*args, found) if isinstance(text, str | bytes)
            )
            return found

        return call


def compare_calls(num_ranks: int) -> dict[str, float]:
    """Return what one compared call of --debug-comm takes the last rank that comes to it."""
    join(num_ranks - 1, num_ranks)
    comm = Ranks(Strategy.parse(f"dp{num_ranks}"))
    with CollectiveCheck(comm) as check:
        group = comm.mesh.get_group("dp")
        for number in range(1, NUM_CALLS + 3):  # the others have come to each call before
            check._store.add(f"{group.group_name}/{number}/count", num_ranks - 1)
        for _ in range(2):  # the first loads libraries, the second removes what the first left
            dist.all_reduce(torch.ones(4), group=group)
        store = CountingStore(check._store)
        check._store = store  # type: ignore[assignment]
        begin_s = time.process_time()
        for _ in range(NUM_CALLS):
            dist.all_reduce(torch.ones(4), group=group)
        cpu_s = time.process_time() - begin_s
    return {
        "cpu_s": cpu_s / NUM_CALLS,
        "keys": store.num_keys / NUM_CALLS,
        "bytes": store.num_bytes / NUM_CALLS,
    }


def compare_facts(num_ranks: int) -> float:
    """Return the processor's seconds in which rank 0 compares what the ranks have prepared."""
    facts = [{f"setting {n}": f"value {n}" for n in range(60)} for _ in range(num_ranks)]
    begin_s = time.process_time()
    check_same(facts)
    return time.process_time() - begin_s


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process of its own: a process can be one rank only."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(function, args)


def measure(model: str) -> dict[str, Any]:
    """Return everything that is measured."""
    num_ranks = 4096
    splits = {
        text: in_a_process(start, text, other, num_ranks // 3, model)
        for text, other in SPLITS.items()
    }
    return {
        "num_ranks": num_ranks,
        "model": model,
        "splits": splits,
        "bound_cpu_s": BOUND_S,
        "is_within_bound": all(sum(s["cpu_s"].values()) <= BOUND_S for s in splits.values()),
        "a_call_of_debug_comm": {n: in_a_process(compare_calls, n) for n in (64, num_ranks)},
        "facts_of_all_ranks_cpu_s": compare_facts(num_ranks),
    }


def main() -> None:
    """Measure, print, and write to a file if asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.model)
    print(json.dumps(found, indent=2))
    write_result(arguments.out, found)


if __name__ == "__main__":
    main()
