"""Start processes that use torch, by each start method of multiprocessing, and time them.

    python benchmarks/startup/start_methods.py [PROCESSES] [ROUNDS]

In turns, each method starts the processes, and each process adds two tensors. Printed are seconds
until the last has ended. forkserver's server has imported torch before, as the server of `phalanx`
has; fork copies this process, which has imported torch too.
"""

import multiprocessing
import statistics
import sys
import time
from typing import Any

METHODS = ("spawn", "fork", "forkserver")


def add() -> None:
    """Add two tensors, as a rank's first work."""
    import torch

    assert torch.ones(2).add(1).sum().item() == 4


def seconds(method: str, number: int) -> float:
    """Start `number` processes; return the seconds until the last has ended."""
    context: Any = multiprocessing.get_context(method)
    begun_s = time.perf_counter()
    processes = [context.Process(target=add) for _ in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return time.perf_counter() - begun_s


def main(number: int, rounds: int) -> None:
    """Print the median and the range of each method."""
    import torch  # noqa: F401 - for fork, which copies this process

    multiprocessing.get_context("forkserver").set_forkserver_preload(["phalanx.launch.preload"])
    seconds("forkserver", 1)  # starts the server, which imports torch once
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method in METHODS:
            times[method].append(seconds(method, number))
    print(f"{number} processes, {rounds} rounds: seconds, median (least to most)")
    for method, values in times.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{method:<11} {middle:6.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    main(*words, *(4, 3)[len(words) :])
