"""The pieces of benchmarks/gpu: what is to be run, and one of them at a small size on a CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "run.sh"
PIECES = [
    *("tests", "ceiling", "mlp"),
    *("llama3-1b", "llama3-1b-compiled", "llama3-8b", "llama3-8b-compiled"),
    "table",
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )


def test_a_dry_run_prints_each_piece_and_its_limit(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(PIECES)
    assert all(line.startswith("timeout 540 ") for line in lines)
    assert "-m gpu" in lines[0] and "--recipe lecture" in lines[2]
    assert ["--compile" in line for line in lines[3:7]] == [False, True, False, True]
    assert not (tmp_path / "none").exists()
    one = run("--piece", "llama3-8b", "--dry-run")
    assert one.stdout.count("\n") == 1 and "--model llama3-8b" in one.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--piece", "lama"], "no piece 'lama'; the pieces are tests"),
        (["--piece"], "--piece wants a value"),
        (["--device", "tpu"], "device is 'tpu'; it must be cpu or cuda"),
        (["--fast"], "unknown option '--fast'"),
        pytest.param(
            ["--piece", "ceiling"],
            "no CUDA device.*--device cpu --tiny",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
            ],
        ),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert re.search(words, done.stderr), done.stderr


@pytest.mark.slow
def test_a_piece_runs_on_a_cpu_and_is_in_the_table(tmp_path: Path) -> None:
    pieces = ["--piece", "llama3-1b", "--piece", "table"]
    done = run(*pieces, "--device", "cpu", "--tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "decoder-tiny-eager.json").read_text())
    assert found["step_s"] > 0 and found["skipped"] is None and found["environment"]
    assert "| decoder-tiny-eager, recompute:none | " in (tmp_path / "table.md").read_text()


@pytest.mark.slow
def test_each_recipe_of_the_perceptron_is_a_row_of_the_table(tmp_path: Path) -> None:
    shares = {
        "time_s": 0.5,
        "data_sheet_flops_per_s": 1e15,
        "mfu_data_sheet_causal": 0.49,
        "hfu_data_sheet_causal": 0.5,
    }
    perceptron = {"num_layers": 8, "width": 8192, "utilization": shares}
    mlp = {
        **{"benchmark": "mfu", "date": "2026-01-01", "environment": {"gpus": [{"name": "G1"}]}},
        **{"recipe": "lecture", **perceptron, "beside": [{"recipe": "plain", **perceptron}]},
    }
    (tmp_path / "mfu-cuda-bfloat16-lecture.json").write_text(json.dumps(mlp))
    done = run("--piece", "table", "--device", "cpu", "--tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "table.md").read_text()
    for recipe in ("lecture", "plain"):
        shares = "49.0 % | 50.0 % | data sheet"
        row = f"| perceptron 8 x 8192, {recipe} | 0.500 | {shares} | | G1 | 2026-01-01 |"
        assert row in table
