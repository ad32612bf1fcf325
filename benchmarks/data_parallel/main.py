"""Tokens a second beside a loop around transformers written by hand, whole processes interleaved.

python benchmarks/data_parallel/main.py ddp|fsdp [--rounds 5] [--steps 12] [--precision float32]
    [--out FILE.json]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import arguments, by_hand, compare, rows_of, write_result

WARMUP_STEPS = 3

STRATEGIES = {
    "ddp": ("dp2", "dp2:naive"),
    "fsdp": ("fsdp2", "fsdp2:zero2", "fsdp2:zero1"),
}
LOOP = "transformers, by hand"


def main() -> None:
    parser = arguments(str(__doc__), rounds=5, steps=12)
    parser.add_argument("against", choices=STRATEGIES)
    args = parser.parse_args()
    loop = by_hand(
        "transformers_loop.py", f"--wrap={args.against}", f"--steps={args.steps}",
        f"--warmup={WARMUP_STEPS}", f"--precision={args.precision}",
    )  # fmt: skip

    def commands(out: str) -> dict[str, list[str]]:
        num_steps = args.steps + WARMUP_STEPS
        return {**rows_of(STRATEGIES[args.against], num_steps, out, args.precision), LOOP: loop}

    found = compare(commands, LOOP, args.rounds)
    about = {"against": args.against, "steps": args.steps, "precision": args.precision}
    write_result(args.out, {**about, **found})


if __name__ == "__main__":
    main()
