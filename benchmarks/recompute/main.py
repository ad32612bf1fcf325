"""Time and activations of forward and backward under each recompute policy, on one rank.

python benchmarks/recompute/main.py [--rounds 10] [--threads 1] [--out FILE.json]

Time is of forward and backward, the policies taking turns step by step in one process; processor
time stands beside it, which neighbours on the machine disturb less. Activations are those that the
memory account of `phalanx train` sees in a step of the same shape.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from phalanx.account.flops import step_flops
from phalanx.models.decoder import Decoder
from phalanx.parallel import recompute
from phalanx.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import SHAPE, last_json, train_command, write_result

NUM_ROWS, SEQ_LEN = 8, 256  # those of train_command
POLICIES = ("none", "selective", "full", "sqrt")


def build(policy: str) -> Decoder:
    model = Decoder(SHAPE)
    model.initialize(0)
    model.compute_dtype = torch.bfloat16
    recompute.apply(model, Strategy.parse(f"recompute:{policy}").recompute)
    return model


def time_steps(num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (wall, processor) seconds of each step of each policy; the first round warms up."""
    models = {policy: build(policy) for policy in POLICIES}
    tokens_BT = torch.randint(SHAPE.vocab_size, (NUM_ROWS, SEQ_LEN))
    times: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    for number in range(num_rounds + 1):
        for policy, model in models.items():
            wall_s, processor_s = time.perf_counter(), time.process_time()
            model(tokens_BT, tokens_BT.roll(-1, 1)).backward()
            took = (time.perf_counter() - wall_s, time.process_time() - processor_s)
            if number:
                times[policy].append(took)
                print(f"round {number}: {policy:<10} {took[0]:.3f} s", file=sys.stderr)
    return times


def account(policy: str, threads: int) -> dict[str, float]:
    """Return the bytes of activations that a step of `phalanx train` held and had predicted."""
    with tempfile.TemporaryDirectory() as out:
        run = last_json(train_command(f"recompute:{policy}", 4, out, threads))
    memory = run["memory"]
    return {
        "measured_bytes": memory["at_most"]["activations"],
        "predicted_bytes": run["predicted"]["bytes"]["activations"]["predicted"],
        "weight_casts_bytes": memory["at_most"]["cast"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    times = time_steps(args.rounds)
    rows = {}
    print("| | wall, s | processor, s | against none | FLOPs added | activations, MiB | casts |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for policy in POLICIES:
        wall_s, processor_s = (
            statistics.median(column) for column in zip(*times[policy], strict=True)
        )
        pairs = zip(times[policy], times["none"], strict=True)
        ratio = statistics.median(mine[1] / plain[1] for mine, plain in pairs)
        flops = step_flops(
            SHAPE, SEQ_LEN, NUM_ROWS, "full", Strategy.parse(f"recompute:{policy}").recompute
        )
        added, held = flops.recompute / flops.model, account(policy, args.threads)
        rows[policy] = {"times": times[policy], "ratio": ratio, "flops_added": added, **held}
        sizes = " | ".join(
            f"{held[name] / 2**20:.0f}" for name in ("measured_bytes", "weight_casts_bytes")
        )
        print(
            f"| {policy} | {wall_s:.2f} | {processor_s:.2f} | {ratio:.2f}x | {100 * added:.0f} % "
            f"| {sizes} |",
            flush=True,
        )
    write_result(args.out, {"command": " ".join(sys.argv), "rows": rows})


if __name__ == "__main__":
    main()
