"""Compressed sums of a bucket of gradients beside float32, over gloo, on a link as slow as asked.

python benchmarks/collectives/compression.py [--mbit 1000] [--ranks 4] [--mib 16] [--out FILE.json]

The ranks of one network namespace share its loopback, which `tc tbf` holds at `--mbit`; 0 leaves
the host's own. Needs the right to make a network namespace.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.comm.comm import Ranks
from phalanx.launch.local import run_ranks
from phalanx.parallel.compression import chosen

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import spread, write_result

ROUNDS = 5
INSIDE = "PHALANX_SHAPED"
SHAPED = "ip link set lo up && tc qdisc add dev lo root tbf rate {}mbit burst 256kb latency 100ms"


def measure(mib: int) -> tuple[dict[str, list[float]], str]:
    """Return the seconds of a sum in each round, by the way it travels; and what auto chooses."""
    comm = Ranks({"dp": dist.get_world_size()}, shares_memory=False)
    side = int((mib << 20) ** 0.5 / 2)
    flat = torch.randn(side * side)
    parts = [flat.view(side, side)]
    ways: dict[str, Callable[[], object]] = {"float32": lambda: comm.all_reduce(flat, "dp")}
    for name, make in chosen.COMPRESSORS.items():
        compressor = make(comm)
        ways[name] = lambda it=compressor: it.start(0, flat, parts).wait()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            flat.copy_(torch.randn(len(flat)))
            dist.barrier()
            begin_s = time.perf_counter()
            way()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin_s)
    fastest = chosen.fastest(chosen.measure_seconds(comm))
    return {name: values[1:] for name, values in seconds.items()}, fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.mbit and INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        shaped = f'{SHAPED.format(args.mbit)} && exec "$0" "$@"'
        again = [sys.executable, *sys.argv]
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", shaped, *again])
    found, fastest = run_ranks(measure, args.ranks, args.mib, threads=1)[0]
    print("| travels as | ms, median | min | max | float32 / this |")
    print("|---|---:|---:|---:|---:|")
    for name, values in found.items():
        pairs = zip(found["float32"], values, strict=True)
        ratio = statistics.median(whole / own for whole, own in pairs)
        print(f"| {name} | {spread([1e3 * value for value in values], '.1f')} | {ratio:.2f}x |")
    print(f"auto: {fastest}")
    write_result(args.out, {"mbit": args.mbit, "ranks": args.ranks, "mib": args.mib, "s": found})


if __name__ == "__main__":
    main()
