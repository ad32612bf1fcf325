"""Collectives through shared memory beside gloo's, in turns, one thread a rank.

python benchmarks/collectives/main.py [--ranks 2 4] [--kib 64 1024 16384 65536] [--out FILE.json]

Rows: gloo's own collective; its gathers and reduce-scatters by direct exchange (comm/exchange.py);
shared memory of tensors that lie there; of tensors that are copied there; and gathers into an
output that the ranks have in common, as fsdp's, for which nothing is copied.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.comm import Ranks
from phalanx.comm.transfer import CommEngine
from phalanx.launch.local import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import spread, write_result

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
ROUNDS = 9
AT_A_TIME_BYTES = 64 << 20
"""Small calls are repeated until they have moved this much."""


def by_engine(engine: CommEngine, op: str, whole: Tensor, part: Tensor) -> Callable[[], None]:
    """Return what runs a collective of `whole`, or from or to this rank's `part` of it."""
    out, given, option = {
        "all_reduce": (whole, whole, "sum"),
        "reduce_scatter": (part, whole, None),
        "all_gather": (whole, part, None),
        "broadcast": (whole, whole, 0),
    }[op]

    def call() -> None:
        work = engine.begin(op, out, given, option)
        if work is not None:
            work.wait()

    return call


def by_common_output(engine: CommEngine, size: int, part: slice) -> Callable[[], None]:
    """Return what gathers into an output that the ranks have in common, as fsdp does."""

    def call() -> None:
        out = engine.gather_output([size], torch.float32, torch.device("cpu"))
        work = engine.begin("all_gather", out, out[part], is_spent=True)
        if work is not None:
            work.wait()

    return call


def by_gloo(op: str, whole: Tensor, part: Tensor) -> Callable[[], object]:
    """Return gloo's own collective."""
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter(
            part, list(whole.chunk(dist.get_world_size()))
        ),
        "all_gather": lambda: dist.all_gather(list(whole.chunk(dist.get_world_size())), part),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[op]


def measure(kib: int, op: str) -> dict[str, list[float]]:
    """Return the seconds of a call in each round, by the name of its row."""
    num_ranks = dist.get_world_size()
    shared, gloo = (Ranks({"dp": num_ranks}, shares_memory=on) for on in (True, False))
    size = kib * 1024 // 4 // num_ranks * num_ranks
    usual = torch.zeros(size)
    lying = shared.empty([size], usual).zero_()
    part = slice(
        shared.coord("dp") * size // num_ranks, (shared.coord("dp") + 1) * size // num_ranks
    )
    apart = torch.zeros(size // num_ranks)
    in_place = op == "all_gather"
    rows: dict[str, Callable[[], object]] = {
        "gloo": by_gloo(op, usual, apart),
        "gloo, exchange": by_engine(gloo.engine("dp"), op, usual, apart),
        "shared memory": by_engine(
            shared.engine("dp"), op, lying, lying[part] if in_place else apart
        ),
        "shared memory, copied": by_engine(shared.engine("dp"), op, usual, apart),
    }
    if op == "all_gather":
        rows["shared memory, common output"] = by_common_output(shared.engine("dp"), size, part)
    if op in ("all_reduce", "broadcast"):
        del rows["gloo, exchange"]
    repeats = max(1, min(200, AT_A_TIME_BYTES // (kib * 1024)))
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(ROUNDS + 1):
        for name, call in rows.items():
            dist.barrier()
            begin_s = time.perf_counter()
            for _ in range(repeats):
                call()
            dist.barrier()
            seconds[name].append((time.perf_counter() - begin_s) / repeats)
    return {name: values[1:] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 64, 1024, 16384, 65536])
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS[:3])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    print("| ranks | collective | KiB | by | ms, median | min | max | against gloo |")
    print("|---:|---|---:|---|---:|---:|---:|---:|")
    for num_ranks in args.ranks:
        for op in args.op:
            for kib in args.kib:
                found = run_ranks(measure, num_ranks, kib, op, threads=1)[0]
                for name, values in found.items():
                    pairs = zip(found["gloo"], values, strict=True)
                    ratio = statistics.median(gloo / own for gloo, own in pairs)
                    rows.append(
                        {"ranks": num_ranks, "op": op, "kib": kib, "by": name, "seconds": values}
                    )
                    cells = spread([1e3 * value for value in values], ".3f")
                    print(
                        f"| {num_ranks} | {op} | {kib} | {name} | {cells} | {ratio:.1f}x |",
                        flush=True,
                    )
    write_result(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
