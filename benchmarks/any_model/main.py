"""Samples a second of `run.prepare` beside DistributedDataParallel and accelerate, in turns.

python benchmarks/any_model/main.py --model bert [--rounds 5] [--steps 6] [--out FILE.json]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import arguments, by_hand, compare, write_result

WAYS = {"DDP": "ddp", "accelerate": "accelerate", "phalanx dp2": "phalanx"}


def main() -> None:
    parser = arguments(str(__doc__), rounds=5, steps=6)
    parser.add_argument("--model", choices=["bert", "resnet50", "mlp"], default="bert")
    args = parser.parse_args()

    def commands(_out: str) -> dict[str, list[str]]:
        words = (f"--model={args.model}", f"--steps={args.steps}")
        return {
            name: by_hand("any_model/loop.py", f"--wrap={wrap}", *words)
            for name, wrap in WAYS.items()
        }

    found = compare(commands, "DDP", args.rounds)
    write_result(args.out, {"model": args.model, "steps": args.steps, **found})


if __name__ == "__main__":
    main()
