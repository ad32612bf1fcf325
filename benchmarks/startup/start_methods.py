"""Start processes that use torch, by each start method of multiprocessing, and time them.

Run it as `python benchmarks/startup/start_methods.py [RANKS] [ROUNDS]`. Each round times in turns how
long it takes until every process has added two tensors. The server of forkserver has imported torch
before, as the server of `phalanx` has; fork copies this process, which has imported torch too.
"""

import multiprocessing
import statistics
import sys
import time

METHODS = ("spawn", "fork", "forkserver")


def add() -> None:
    """Add two tensors, as a rank's first work."""
    import torch

    assert torch.ones(2).add(1).sum().item() == 4


def seconds(method: str, ranks: int) -> float:
    """Start `ranks` processes; return the seconds until the last has ended."""
    context = multiprocessing.get_context(method)
    begun_s = time.perf_counter()
    processes = [context.Process(target=add) for _ in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return time.perf_counter() - begun_s


def main(ranks: int, rounds: int) -> None:
    """Print the median and the range of each method."""
    import torch  # noqa: F401 - for fork, which copies this process

    multiprocessing.get_context("forkserver").set_forkserver_preload(["phalanx.launch.preload"])
    seconds("forkserver", 1)  # starts the server, which imports torch once
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method in METHODS:
            times[method].append(seconds(method, ranks))
    print(f"{ranks} processes, {rounds} rounds: seconds, median (least to most)")  # noqa: T201
    for method, values in times.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{method:<11} {middle:6.2f} ({low:.2f} to {high:.2f})")  # noqa: T201


if __name__ == "__main__":
    main(*(int(word) for word in [*sys.argv[1:], "4", "5"][:2]))
