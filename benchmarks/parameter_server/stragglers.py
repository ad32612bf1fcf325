"""Steps a second where workers stall, or one is always slow: python stragglers.py [STEP_MS]

Four workers in threads sleep in place of computing, so that cores do not matter. `stalls`: a step
takes 10 times as long with probability 0.1. `slow`: one worker takes 5 times as long each time.
"""

from __future__ import annotations

import random
import sys
import threading
import time

import torch

from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.processes import local_roles

NUM_WORKERS = 4
SECONDS = 12.0


def work(
    made,
    worker: int,
    consistency: Consistency,
    step_s: float,
    case: str,
    until: list[float],
    counts,
):
    rng = random.Random(worker)
    client = Client(made.meeting, worker, consistency, (0, 1 << 20))
    client.lay_out([1000], torch.float32)
    weights = [torch.zeros(1000)]
    if worker == 0:
        client.create(weights, {"name": "sgd"}, 2.0)
    version, clock = client.pull(weights, 0), 0
    if worker == 0:
        until.append(time.monotonic() + SECONDS)
    while not until:
        time.sleep(0.01)
    while time.monotonic() < until[0]:
        factor = 5 if case == "slow" and worker == 0 else 1
        if case == "stalls" and rng.random() < 0.1:
            factor = 10
        time.sleep(step_s * factor)
        numbers = {"base": version, "tokens": 1.0, "loss": 1.0, "rate": 0.01}
        update = client.push(clock, worker, [torch.ones(1000)], **numbers)
        counts[worker] += 1
        clock += 1
        if consistency.is_asynchronous:
            needed = update + 1 if consistency.kind == "quorum" else 0
            if time.monotonic() < until[0]:
                version = client.pull(weights, needed)
            continue
        needed = consistency.needs(clock)
        if time.monotonic() > until[0]:
            break
        try:
            totals = client.totals(needed, lambda: _stop(until[0]))
        except TimeoutError:
            break
        recipes = [(v, 0.01, 1.0) for v in sorted(totals) if v >= client.applied]
        version = client.pull(weights, needed, recipes)
    client.close()


def _stop(until_s: float) -> None:
    if time.monotonic() > until_s:
        raise TimeoutError


def main(step_ms: float) -> None:
    print(f"{NUM_WORKERS} workers, a step of {step_ms:g} ms, {SECONDS:g} s each")
    kinds = [("ps", 0), ("ssp", 4), ("async", 0), ("quorum", 3)]
    for case in ("stalls", "slow"):
        rates = {}
        for kind, option in kinds:
            consistency = Consistency(kind, NUM_WORKERS, option)
            counts, until = [0] * NUM_WORKERS, []
            with local_roles(2) as made:
                given = [
                    (made, w, consistency, step_ms / 1000, case, until, counts)
                    for w in range(NUM_WORKERS)
                ]
                threads = [threading.Thread(target=work, args=each) for each in given]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            rates[kind] = sum(counts) / NUM_WORKERS / SECONDS
            name = f"{kind}/{option}" if option else kind
            print(f"{case:7} {name:9} {rates[kind]:6.2f} steps/s  {rates[kind] / rates['ps']:.2f}x")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 50.0)
