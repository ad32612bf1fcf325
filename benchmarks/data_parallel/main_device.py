"""Why there is no main device: gradients gathered on one rank beside an all-reduce.

torch.nn.DataParallel collects the gradients of all devices on the first, updates the weights there
and sends them out again. This does the same between processes (gloo, one thread each) and counts
bytes sent and received, time and memory, of the main rank and of the others, beside `dp`.

python benchmarks/data_parallel/main_device.py [--parameters 34e6] [--ranks 2 4 8] [--out FILE.json]
"""

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from phalanx.launch.local import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import write_result

ROUNDS = 5


def main_device_step(weights: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """Gather the gradients on rank 0, add them up, update there, broadcast the weights."""
    assert weights.grad is not None
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        parts = [torch.empty_like(weights) for _ in range(num_ranks)]
        dist.gather(weights.grad, parts, dst=0)
        for part in parts[1:]:
            parts[0].add_(part)
        weights.grad = parts[0]
        assert optimizer is not None
        optimizer.step()
    else:
        dist.gather(weights.grad, None, dst=0)
    dist.broadcast(weights.detach(), src=0)


def all_reduce_step(weights: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """All-reduce the gradients, update everywhere."""
    assert weights.grad is not None and optimizer is not None
    dist.all_reduce(weights.grad)
    optimizer.step()


def measure(form: str, num_parameters: int) -> dict[str, float]:
    """Return the median seconds of a step, the processor seconds in it, and the peak memory."""
    step = main_device_step if form == "main device" else all_reduce_step
    weights = nn.Parameter(torch.zeros(num_parameters))
    is_updating = form != "main device" or dist.get_rank() == 0
    optimizer = torch.optim.AdamW([weights], fused=True) if is_updating else None
    wall, busy = [], []
    for _ in range(ROUNDS):
        weights.grad = torch.ones_like(weights)
        dist.barrier()
        begin_s, begin_busy_s = time.perf_counter(), time.process_time()
        step(weights, optimizer)
        busy.append(time.process_time() - begin_busy_s)
        dist.barrier()
        wall.append(time.perf_counter() - begin_s)
    assert torch.equal(weights.max(), weights.min())
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "step_s": statistics.median(wall),
        "busy_s": statistics.median(busy),
        "peak_bytes": peak_bytes,
    }


def bytes_moved(form: str, num_ranks: int, size: int) -> tuple[list[float], list[float]]:
    """Return what the main rank sends and receives, and what another does, in a step."""
    if form == "main device":
        across = (num_ranks - 1) * size
        return [across, across], [size, size]
    ring = 2 * (num_ranks - 1) / num_ranks * size
    return [ring, ring], [ring, ring]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=34e6)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    num_parameters = int(args.parameters)
    rows = []
    print("| ranks | form | rank | sends + receives MiB | processor s | peak MiB | step s |")
    print("|---:|---|---|---:|---:|---:|---:|")
    for num_ranks in args.ranks:
        for form in ("main device", "all-reduce"):
            ranks = run_ranks(measure, num_ranks, form, num_parameters, threads=1)
            moved = bytes_moved(form, num_ranks, 4 * num_parameters)
            for place, name in enumerate(("first", "last")):
                own = ranks[0] if place == 0 else ranks[-1]
                rows.append({"ranks": num_ranks, "form": form, "rank": name, **own})
                print(
                    f"| {num_ranks} | {form} | {name} | {sum(moved[place]) / 2**20:,.0f} "
                    f"| {own['busy_s']:.2f} | {own['peak_bytes'] / 2**20:,.0f} "
                    f"| {own['step_s']:.2f} |",
                    flush=True,
                )
    write_result(args.out, {"parameters": num_parameters, "rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
