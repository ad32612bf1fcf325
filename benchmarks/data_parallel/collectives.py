"""gloo's all-gather and reduce-scatter beside those of comm/exchange.py, in turns, one thread each.

python benchmarks/data_parallel/collectives.py [--ranks 2 4] [--mib 4 64] [--out FILE.json]
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.comm import exchange
from phalanx.launch.local import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import spread, write_result

ROUNDS = 15


def measure(mib: int) -> dict[str, list[float]]:
    """Return the seconds of each round, of the slowest rank."""
    group, num_ranks = dist.group.WORLD, dist.get_world_size()
    part = torch.ones(mib * 2**20 // 4 // num_ranks)
    whole = torch.ones(part.numel() * num_ranks)
    calls = {
        "all_gather, gloo": lambda: dist.all_gather_into_tensor(whole, part),
        "all_gather, exchange": lambda: exchange.all_gather(whole, part, group),
        "reduce_scatter, gloo": lambda: dist.reduce_scatter_tensor(part, whole),
        "reduce_scatter, exchange": lambda: exchange.reduce_scatter(part, whole, group),
        "all_reduce, gloo": lambda: dist.all_reduce(whole),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            whole.fill_(1)
            part.fill_(1)
            dist.barrier()
            begin_s = time.perf_counter()
            call()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin_s)
    return {name: values[1:] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    print("| ranks | MiB | collective | ms, median | min | max |")
    print("|---:|---:|---|---:|---:|---:|")
    for num_ranks in args.ranks:
        for mib in args.mib:
            for name, values in run_ranks(measure, num_ranks, mib, threads=1)[0].items():
                rows.append({"ranks": num_ranks, "mib": mib, "call": name, "seconds": values})
                cells = spread([1e3 * seconds for seconds in values], ".1f")
                print(f"| {num_ranks} | {mib} | {name} | {cells} |", flush=True)
    write_result(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
