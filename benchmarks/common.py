"""What benchmarks share: runs of `phalanx train` on one shape, spreads in tables, result files."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from phalanx.bench.verb import BenchResult, PrintLine, ResultConfig
from phalanx.cli.bench import measure
from phalanx.cli.main import main
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


SomeConfig = TypeVar("SomeConfig", bound=ResultConfig)


def run_as_verb(
    name: str, schema: type[SomeConfig], run: Callable[[SomeConfig, PrintLine], BenchResult]
) -> NoReturn:
    """Run this script as `phalanx bench` runs a verb: its settings, tables, files and messages."""
    prog = f"python {Path(sys.argv[0])}"

    def on(words: list[str]) -> int:
        measure(words, name, schema, run, prog)
        return 0

    sys.exit(main(run=on))


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


def arguments(about: str, rounds: int, steps: int) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that compares training runs."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path)
    return parser


def rows_of(
    strategies: Sequence[str], steps: int, out: str, precision: str, *words: str
) -> dict[str, list[str]]:
    """Return the run of each strategy, by the name of its row."""
    return {
        f"phalanx {strategy}": [*train_command(strategy, steps, out, precision=precision), *words]
        for strategy in strategies
    }


def by_hand(script: str, *words: str) -> list[str]:
    """Return a run of a loop written by hand, a file of benchmarks/, on two processes."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        f"benchmarks/{script}", *words,
    ]  # fmt: skip


def compare(
    commands: Callable[[str], Mapping[str, Sequence[str]]],
    baseline: str,
    rounds: int,
    keep: Callable[[Mapping[str, Any]], Mapping[str, float]] = lambda _: {},
) -> dict[str, Any]:
    """Run whole processes in turns, and print their tokens a second against one of them.

    Args:
        commands: the run of each row, given a folder for what it writes.
        baseline: name of the row to compare with.
        rounds: each runs every row once.
        keep: what else to keep of the document in the last line of each, a number by its name.

    Returns:
        What a file of results has: the commands, and of each row all values and the ratio.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for number in range(1, rounds + 1):
        for name in commands(""):
            with tempfile.TemporaryDirectory() as out:
                document = last_json(commands(out)[name])
            rate = document["tokens_per_s"]
            for key, value in {"tokens_per_s": rate, **keep(document)}.items():
                values.setdefault(name, {}).setdefault(key, []).append(value)
            print(f"round {number}: {name:<28} {rate:8,.0f} tokens/s", flush=True)
    first = values[baseline]["tokens_per_s"]
    print(f"\n| | tokens/s, median | min | max | against {baseline}, round by round: median |")
    print("|---|---:|---:|---:|---:|")
    rows = {}
    for name, row in values.items():
        rates = row["tokens_per_s"]
        ratio = statistics.median(a / b for a, b in zip(rates, first, strict=True))
        rows[name] = {**row, "median": statistics.median(rates), "ratio": ratio}
        print(f"| {name} | {spread(rates, ',.0f')} | {ratio:.2f}x |")
    run = {name: " ".join(words[1:]) for name, words in commands("OUT").items()}
    return {"rounds": rounds, "commands": run, "rows": rows}


def write_result(path: Path | None, values: Mapping[str, Any]) -> None:
    """Write what was measured, when and on what; nothing where no file is asked for."""
    if path is not None:
        document = {"date": date.today().isoformat(), "environment": environment(), **values}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n")
