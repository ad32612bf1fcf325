"""Bytes that cross the link of two machines in a step of training, and the time of the step.

    sudo sh examples/two_machines.sh python benchmarks/two_machines/crossing.py
    sudo RATE=1gbit sh examples/two_machines.sh python benchmarks/two_machines/crossing.py 1

Each strategy trains `demo` for 4 and for 12 steps. node1's network card counts the bytes of both
runs, whose difference is of 8 steps. The bytes of a step are printed as a part of the 4 P bytes of
all gradients in float32. An argument selects the strategies with this number of ranks a machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

CARD = Path("/sys/class/net/eth0/statistics/tx_bytes")
GRADIENTS = 4 * 5_080_832
SHORT, LONG = 4, 12
CASES = (
    (1, "dp2", ""),
    (1, "dp2", "--compress bf16"),
    (1, "dp2", "--compress int8"),
    (1, "pp2", ""),
    (2, "dp4", ""),
    (2, "dp2,fsdp2", ""),
    (2, "dp2,tp2", ""),
    (2, "fsdp4", ""),
    (2, "pp2,dp2", ""),
)
"""Ranks of a machine, strategy, further words."""


def run(data: Path, num_here: int, strategy: str, further: str, steps: int) -> tuple[int, str]:
    """Train; return the bytes that this machine has sent, and the summary's time of a step."""
    before = int(CARD.read_text())
    words = f"phalanx launch --hosts node1:{num_here},node2:{num_here} -- train --data {data}"
    words += f" --strategy {strategy} --steps {steps} {further} --corpus.seq-len 64 --threads 1"
    words += " --eval-every 0 --eval-samples 8 --save minutes=0"
    with tempfile.TemporaryDirectory(dir="/srv/phalanx") as folder:
        done = subprocess.run(
            [*words.split(), "--out", f"{folder}/run"], capture_output=True, text=True, check=True
        )
    [step] = re.findall(r"[\d.,]+ m?s a step", done.stdout)
    return int(CARD.read_text()) - before, step


def main(only: int | None) -> None:
    """Run all cases and print a row for each."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "squares.txt"
        data.write_text("".join(f"The square of {n} is {n * n}.\n" for n in range(4000)))
        for num_here, strategy, further in CASES:
            if only in (None, num_here):
                few, _ = run(data, num_here, strategy, further, SHORT)
                many, step = run(data, num_here, strategy, further, LONG)
                part = (many - few) / (LONG - SHORT) / GRADIENTS
                print(f"{num_here} ranks  {strategy} {further:16}  {part:.2f}  {step}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
