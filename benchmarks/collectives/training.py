"""Tokens a second of training on two ranks, through shared memory and over gloo, in turns.

python benchmarks/collectives/training.py [--rounds 3] [--steps 8] [--precision float32]
    [--strategies dp2 fsdp2 tp2] [--out FILE.json]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import arguments, compare, rows_of, write_result

WARMUP_STEPS = 2


def main() -> None:
    parser = arguments(str(__doc__), rounds=3, steps=8)
    parser.add_argument("--strategies", nargs="+", default=["dp2", "fsdp2", "tp2"])
    args = parser.parse_args()

    def commands(out: str) -> dict[str, list[str]]:
        steps = args.steps + WARMUP_STEPS
        shared = rows_of(args.strategies, steps, out, args.precision)
        gloo = rows_of(args.strategies, steps, out, args.precision, "--no-shared-memory")
        rows = {}
        for name in shared:
            rows |= {name: shared[name], f"{name}, gloo": gloo[name]}
        return rows

    found = compare(commands, f"phalanx {args.strategies[0]}", args.rounds)
    write_result(args.out, {"steps": args.steps, "precision": args.precision, **found})


if __name__ == "__main__":
    main()
