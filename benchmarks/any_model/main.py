"""Samples a second of `run.prepare` beside DistributedDataParallel and accelerate, in turns.

python benchmarks/any_model/main.py --model bert [--rounds 5] [--steps 6] [--out FILE.json]

With --comparison, the cost of comparing replicas in every other step of one run instead.
"""

import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import arguments, by_hand, compare, last_json, spread, write_result

WAYS = {"DDP": "ddp", "accelerate": "accelerate", "phalanx dp2": "phalanx"}


def comparison(model: str, steps: int) -> dict[str, object]:
    """Print and return what the comparison of replicas costs, from steps with it and without."""
    words = (f"--model={model}", "--wrap=phalanx", "--alternate", f"--steps={steps}")
    load = os.getloadavg()[0]
    found = last_json(by_hand("any_model/loop.py", *words))
    load = load, os.getloadavg()[0]
    print(f"load of the machine before and after: {load[0]:.1f}, {load[1]:.1f}\n")
    print("| seconds of a step | median | min | max |\n|---|---:|---:|---:|")
    for name in ("on_s", "off_s", "on_cpu_s", "off_cpu_s"):
        print(f"| {name} | {spread(found[name], '.4f')} |")
    share = found["spent_s"] / sum(found["on_cpu_s"])
    medians = [statistics.median(found[name]) for name in ("on_cpu_s", "off_cpu_s")]
    print(f"\nprocessor time of the calls: {share:.2%} of that of the steps with them")
    print(f"medians of processor time: {medians[0] / medians[1] - 1:+.2%}")
    return {"model": model, "steps": steps, "load": load, **found}


def main() -> None:
    parser = arguments(str(__doc__), rounds=5, steps=6)
    parser.add_argument("--model", choices=["bert", "resnet50", "mlp"], default="bert")
    parser.add_argument("--comparison", action="store_true")
    args = parser.parse_args()
    if args.comparison:
        write_result(args.out, comparison(args.model, args.steps))
        return

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
