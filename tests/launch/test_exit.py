"""A run that succeeds exits 0, a hundred times in a hundred (pytest -m slow; about ten minutes)."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("launcher", ["own", "torchrun"])
def test_a_hundred_runs_exit_0(launcher: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a text\n" for n in range(900)))
    start = [sys.executable]
    if launcher == "torchrun":
        start += ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [
        *start, "-m", "phalanx", "train", "--steps=3", f"--data={text}", "--device=cpu",
        "--shape.num-layers=1", "--shape.hidden=32", "--shape.num-heads=2", "--shape.head-dim=16",
        "--shape.ffn=64", "--shape.vocab-size=300", "--corpus.seq-len=16", "--threads=1",
        f"--corpus.cache={tmp_path / 'cache'}",
    ]  # fmt: skip
    codes = []
    for number in range(100):
        out = f"--out={tmp_path / str(number)}"
        done = subprocess.run([*command, out], capture_output=True, text=True, timeout=280)
        codes.append(done.returncode)
        assert codes[-1] == 0, f"run {len(codes)}: exit {codes[-1]}\n{done.stdout}\n{done.stderr}"
