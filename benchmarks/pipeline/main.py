"""Tokens a second of `pp2` beside a loop around transformers by hand, whole processes interleaved.

python benchmarks/pipeline/main.py [--rounds 5] [--steps 8] [--precision bfloat16] [--out FILE.json]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import arguments, by_hand, compare, rows_of, write_result

WARMUP_STEPS = 2
LOOP = "by hand, 4 and 4 layers"
MICROBATCHES = ("--batch.microbatch=2", "--batch.accumulation=8")


def main() -> None:
    args = arguments(str(__doc__), rounds=5, steps=8).parse_args()
    words = (f"--steps={args.steps}", f"--precision={args.precision}")
    loop = by_hand("pipeline/transformers_loop.py", *words)

    def commands(out: str) -> dict[str, list[str]]:
        num_steps = args.steps + WARMUP_STEPS
        ours = rows_of(("pp2", "pp2:zb/1"), num_steps, out, args.precision, *MICROBATCHES)
        return {**ours, LOOP: loop, "by hand, 5 and 3 layers": [*loop, "--first-layers=5"]}

    found = compare(commands, LOOP, args.rounds)
    write_result(args.out, {"steps": args.steps, "precision": args.precision, **found})


if __name__ == "__main__":
    main()
