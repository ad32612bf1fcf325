"""Time to import torch and the code for training, by how often Python collects all garbage.

    python benchmarks/startup/imports.py [ROUNDS]

A new process each, in turns. Printed are median and range, and the number of full collections.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

IMPORT = """
import gc, time
from phalanx.launch.process_memory import collect_rarely
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
{}
begin_s = time.perf_counter()
import torch._dynamo, torch.distributed.tensor, phalanx.train.run, phalanx.train.job
print(time.perf_counter() - begin_s, len(full) // 2)
"""
CASES = {"as usual": "", "rarely": "collect_rarely()"}


def main(num_rounds: int) -> None:
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in CASES}
    for _ in range(num_rounds):
        for name, call in CASES.items():
            run = [sys.executable, "-c", IMPORT.format(call)]
            seconds, num = subprocess.run(
                run, capture_output=True, check=True, text=True
            ).stdout.split()
            found[name].append((float(seconds), int(num)))
    for name, pairs in found.items():
        times = [seconds for seconds, _ in pairs]
        print(
            f"{name:9} {statistics.median(times):5.2f} s ({min(times):.2f} to {max(times):.2f}), "
            f"{max(num for _, num in pairs)} full collections"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 11)
