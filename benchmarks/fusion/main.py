"""What fusion gains on one rank: eager, our fused CPU operators, compiled blocks, in turns.

python benchmarks/fusion/main.py [--rounds 5] [--steps 5] [--threads 1] [--precision bfloat16]
    [--layers 8] [--hidden 512] [--global-size 8] [--seq-len 256] [--out FILE.json]
"""

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import SHAPE, spread, write_result
from phalanx.bench.scaling import ONE_RANK, Case, ScalingConfig
from phalanx.bench.scaling_rank import time_strategy
from phalanx.config import ShapeConfig
from phalanx.launch.local import run_ranks
from phalanx.models import cpu

EAGER, FUSED, COMPILED = "eager", "fused operators", "compiled"
WAYS = (EAGER, FUSED, COMPILED)


def seconds(way: str, config: ScalingConfig) -> float:
    """Return the median step of one way, on this rank."""
    if way == EAGER:
        cpu.is_preferred = lambda x: False  # the decoder goes through PyTorch's own operations
    case = Case(ONE_RANK, config.global_size, is_timed=False)
    steps = time_strategy(case, config, compile=way == COMPILED, is_watched=False)
    return statistics.median(steps.walls_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--layers", type=int, default=SHAPE.num_layers)
    parser.add_argument("--hidden", type=int, default=SHAPE.hidden)
    parser.add_argument("--global-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    num_heads = args.hidden // SHAPE.head_dim
    own = {"num_layers": args.layers, "hidden": args.hidden, "num_heads": num_heads,
           "num_kv_heads": num_heads, "max_seq_len": args.seq_len}  # fmt: skip
    sizes = {
        field.name: getattr(SHAPE, field.name) for field in dataclasses.fields(ShapeConfig)
    } | own
    config = ScalingConfig(
        shape=ShapeConfig(**sizes), global_size=args.global_size, seq_len=args.seq_len,
        precision=args.precision, device="cpu", threads=args.threads, steps=args.steps,
        rounds=args.rounds,
    )  # fmt: skip
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way in WAYS:
            times[way] += run_ranks(seconds, 1, way, config, threads=args.threads, timeout_s=3600)
            print(f"round {number + 1}: {way:<16} {times[way][-1]:.4f} s a step", flush=True)
    print("\n| | s a step, median | min | max | eager / this, round by round: median |")
    print("|---|---:|---:|---:|---:|")
    rows = {}
    for way, values in times.items():
        pairs = zip(times[EAGER], values, strict=True)
        gain = statistics.median(eager / value for eager, value in pairs)
        rows[way] = {"step_s": values, "gain": gain}
        print(f"| {way} | {spread(values, '.4f')} | {gain:.2f}x |")
    write_result(args.out, {"case": dataclasses.asdict(config), "rows": rows})


if __name__ == "__main__":
    main()
