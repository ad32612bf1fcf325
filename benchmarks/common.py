"""What benchmarks share: runs of `phalanx train` on one shape, spreads in tables, result files."""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from phalanx.measure.environment import environment
from phalanx.models.shape import ModelShape

ROOT = Path(__file__).parents[1]

SHAPE = ModelShape(
    vocab_size=8192,
    num_layers=8,
    hidden=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn=1408,
    max_seq_len=256,
)
"""34 M parameters."""

SIZES = (
    "vocab_size", "num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn",
    "max_seq_len",
)  # fmt: skip


def train_command(
    strategy: str, steps: int, out: str, threads: int = 1, precision: str = "bfloat16"
) -> list[str]:
    """Return a run of SHAPE, 8 sequences a microbatch, without evaluation."""
    return [
        sys.executable, "-m", "phalanx", "train", "--json", f"--strategy={strategy}",
        *(f"--shape.{name.replace('_', '-')}={getattr(SHAPE, name)}" for name in SIZES),
        "--shape.tied=false", "--corpus.no-document-mask", f"--steps={steps}", "--eval-every=0",
        "--eval-samples=2", f"--precision={precision}", f"--threads={threads}", f"--out={out}",
        "--batch.microbatch=8", "--optimizer.lr=3e-4",
    ]  # fmt: skip


def last_json(command: Sequence[str]) -> dict[str, Any]:
    """Run a command in the root of the project; return the document in its last line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: Sequence[float], form: str) -> str:
    """Return median, least and most as cells of a table."""
    numbers = (statistics.median(values), min(values), max(values))
    return " | ".join(format(number, form) for number in numbers)


def write_result(path: Path | None, values: Mapping[str, Any]) -> None:
    """Write what was measured, when and on what; nothing where no file is asked for."""
    if path is not None:
        document = {"date": date.today().isoformat(), "environment": environment(), **values}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n")
