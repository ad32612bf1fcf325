"""Tokens a second and memory of long samples under `cp2`, `tp2` and `fsdp2`, in turns.

python benchmarks/context/main.py [--length 2048] [--rounds 3] [--steps 3] [--precision float32]
    [--out FILE.json]

A step is two samples, for fsdp2 has to have one for each rank; the others take one after the other.
"""

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import arguments, compare, rows_of, write_result

WARMUP_STEPS = 1
STRATEGIES = ("fsdp2", "tp2", "cp2", "cp2:ulysses")
MIB = 1 << 20


def memory_of(document: Mapping[str, Any]) -> dict[str, float]:
    memory = document["memory"]
    return {
        "peak_bytes": memory["peak_bytes"],
        "activation_bytes": memory["at_most"]["activations"],
        "resident_bytes": document["resident_bytes"],
    }


def main() -> None:
    parser = arguments(str(__doc__), rounds=3, steps=3)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    num_steps = max(3, args.steps + WARMUP_STEPS)  # the account of memory needs three

    def commands(out: str) -> dict[str, list[str]]:
        words = [f"--corpus.seq-len={args.length}", f"--shape.max-seq-len={args.length}"]
        words += ["--batch.microbatch=1", "--batch.global-size=2"]
        return rows_of(STRATEGIES, num_steps, out, args.precision, *words)

    found = compare(commands, "phalanx fsdp2", args.rounds, memory_of)
    print("\n| | MiB at the peak | of it activations | resident MiB |\n|---|---:|---:|---:|")
    for name, row in found["rows"].items():
        keys = ("peak_bytes", "activation_bytes", "resident_bytes")
        cells = (f"{statistics.median(row[key]) / MIB:,.0f}" for key in keys)
        print(f"| {name} | {' | '.join(cells)} |")
    about = {"length": args.length, "steps": num_steps, "precision": args.precision}
    write_result(args.out, {**about, **found})


if __name__ == "__main__":
    main()
