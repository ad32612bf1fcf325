"""Time an all-reduce of 1 KiB with and without the check of calls (`--debug-comm`)."""

import time

import torch
import torch.distributed as dist

from phalanx.comm.comm import Ranks
from phalanx.debug.check import CollectiveCheck
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy


def microseconds(num_calls: int = 50) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(num_calls):
        dist.all_reduce(torch.ones(256))
    return (time.perf_counter() - start_s) / num_calls * 1e6


def measure() -> tuple[float, float]:
    comm = Ranks(Strategy.parse(f"dp{dist.get_world_size()}"))
    plain = min(microseconds() for _ in range(5))
    with CollectiveCheck(comm):
        microseconds(10)
        return plain, min(microseconds() for _ in range(5))


if __name__ == "__main__":
    for num_ranks in (2, 4):
        plain, compared = run_ranks(measure, num_ranks, threads=1)[0]
        print(f"{num_ranks} ranks: {plain:.0f} us an all-reduce, compared {compared:.0f} us")
