"""Experts beside a loop around transformers' Mixtral written by hand, whole processes interleaved.

python benchmarks/experts/main.py [--experts 8] [--rounds 5] [--steps 8] [--precision float32]
    [--out FILE.json]

The 34 M shape with experts of half its MLP, two a token: a token meets 34 M parameters.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import SHAPE, arguments, by_hand, compare, rows_of, write_result

WARMUP_STEPS = 3
IMPLEMENTATIONS = ("eager", "grouped_mm")


def main() -> None:
    parser = arguments(str(__doc__), rounds=5, steps=8)
    parser.add_argument("--experts", type=int, default=8)
    args = parser.parse_args()
    strategies = ("ep2", "dp2", "fsdp2,ep2")
    words = {
        "num_experts": args.experts, "top_k": 2, "ffn": SHAPE.ffn // 2, "renormalizes": "true",
        "aux_loss": 0.01, "pools_layers": "true",
    }  # fmt: skip
    shape = ",".join(f"{name}={value}" for name, value in words.items())
    loops = {
        f"DDP + transformers, {implementation}": by_hand(
            "transformers_loop.py", "--wrap=ddp", f"--steps={args.steps}",
            f"--warmup={WARMUP_STEPS}", f"--precision={args.precision}",
            f"--experts={args.experts}", f"--implementation={implementation}",
        )
        for implementation in IMPLEMENTATIONS
    }  # fmt: skip

    def commands(out: str) -> dict[str, list[str]]:
        num_steps = args.steps + WARMUP_STEPS
        ours = rows_of(strategies, num_steps, out, args.precision, f"--shape.experts={shape}")
        return {**ours, **loops}

    found = compare(commands, next(iter(loops)), args.rounds)
    about = {"experts": args.experts, "steps": args.steps, "precision": args.precision}
    write_result(args.out, {**about, **found})


if __name__ == "__main__":
    main()
