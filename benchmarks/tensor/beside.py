"""Tokens a second of `tp2` beside DTensor's styles on the transformers Llama, in turns.

python benchmarks/tensor/beside.py [--rounds 5] [--steps 6] [--precision float32] [--out FILE.json]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import arguments, by_hand, compare, rows_of, write_result

WARMUP_STEPS = 2
LOOP = "transformers, DTensor styles"


def main() -> None:
    args = arguments(str(__doc__), rounds=5, steps=6).parse_args()
    loop = by_hand(
        "transformers_loop.py", "--wrap=tp", f"--steps={args.steps}",
        f"--warmup={WARMUP_STEPS}", f"--precision={args.precision}",
    )  # fmt: skip

    def commands(out: str) -> dict[str, list[str]]:
        num_steps = args.steps + WARMUP_STEPS
        return {**rows_of(("tp2", "tp2:megatron"), num_steps, out, args.precision), LOOP: loop}

    found = compare(commands, LOOP, args.rounds)
    write_result(args.out, {"steps": args.steps, "precision": args.precision, **found})


if __name__ == "__main__":
    main()
