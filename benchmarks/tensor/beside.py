"""Tokens a second of `tp2` beside DTensor's styles on the transformers Llama, in turns.

python benchmarks/tensor/beside.py [--rounds 5] [--steps 6] [--precision float32] [--out FILE.json]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import by_hand, compare, train_command, write_result

WARMUP_STEPS = 2
LOOP = "transformers, DTensor styles"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    loop = by_hand(
        "transformers_loop.py", "--wrap=tp", f"--steps={args.steps}",
        f"--warmup={WARMUP_STEPS}", f"--precision={args.precision}",
    )  # fmt: skip

    def commands(out: str) -> dict[str, list[str]]:
        num_steps = args.steps + WARMUP_STEPS
        ours = {
            f"phalanx {s}": train_command(s, num_steps, out, precision=args.precision)
            for s in ("tp2", "tp2:megatron")
        }
        return {**ours, LOOP: loop}

    found = compare(commands, LOOP, args.rounds)
    write_result(args.out, {"steps": args.steps, "precision": args.precision, **found})


if __name__ == "__main__":
    main()
