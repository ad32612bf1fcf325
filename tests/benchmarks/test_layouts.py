"""One block under each layout: what the ledger counts is what arithmetic says, and the script."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from marks import by_hand
from phalanx.cli.bench import measure
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.models.registry import shape_of
from phalanx.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/tensor"))
import layouts
from account import crossing_tokens
from block import BlockSize, Precision
from layouts import TensorConfig, TensorRun, measure_tensor, parse_layout
from split_block import SplitBlock

SCRIPT = Path(layouts.__file__)
SIZE = "128x4x16"


def run_script(words: str) -> None:
    measure(words.split(), "tensor", TensorConfig, layouts.run, "python layouts.py")


def counted(texts: list[str], sizes: list[str], precision: Precision = "float32") -> TensorRun:
    """Count what blocks move and hold, and time nothing."""
    own = {"layouts": tuple(texts), "sizes": tuple(sizes), "dtype": precision}
    return measure_tensor(TensorConfig(**own, repeats=0, threads=1))  # type: ignore[arg-type]


def check_points(run: TensorRun) -> None:
    for point in run.points:
        measured = dataclasses.astuple(point.measured)
        assert measured == pytest.approx(dataclasses.astuple(point.theory), rel=1e-12), point
        assert sum(entry.calls for entry in point.entries) == point.measured.num_calls
        assert {entry.phase for entry in point.entries} == {"forward", "backward", "reduce"}


@pytest.mark.parametrize(
    ("precision", "texts"),
    [
        ("bfloat16", ["tp2", "tp2:megatron"]),  # masters are float32
        by_hand("bfloat16", ["tp4:2d"]),
        by_hand("bfloat16", ["tp8:2.5d/2", "tp8:3d"]),
        by_hand("float32", ["tp2", "tp4:2d"]),
        by_hand("float64", ["tp2", "tp2:megatron", "tp4:2d"]),
    ],
)
def test_a_block_moves_and_holds_what_arithmetic_says(
    precision: Precision, texts: list[str]
) -> None:
    run = counted(texts, [SIZE], precision)
    assert [point.strategy for point in run.points] == texts
    check_points(run)


@pytest.mark.slow
def test_a_square_of_nine_and_two_sizes() -> None:
    run = counted(["tp9:2d"], ["576x3x8", "576x9x5"])
    check_points(run)
    assert run.points[0].theory != run.points[1].theory


@pytest.mark.slow
def test_around_the_crossing_the_other_layout_sends_less() -> None:
    """512 wide, two dimensions send less than one from 999 tokens on; both sides are counted."""
    shape = BlockSize.parse("512x8x32").shape
    crossing = crossing_tokens(Strategy.parse("tp4:2d"), shape, "float32")
    assert 960 < crossing < 1024
    sizes = [f"512x8x{length}" for length in (120, 128)]
    run = counted(["tp4", "tp4:2d"], sizes)
    plain_below, square_below, plain_above, square_above = (
        point.measured.sent_bytes for point in run.points
    )
    assert plain_below < square_below
    assert plain_above > square_above


def test_sizes_follow_the_llama_family() -> None:
    llama = shape_of("llama2-7b")
    shape = BlockSize.parse("4096x1x8").shape
    for name in ("hidden", "num_heads", "num_kv_heads", "head_dim", "ffn"):
        assert getattr(shape, name) == getattr(llama, name)
    assert BlockSize.parse("2048x1x8").shape.num_heads == shape_of("llama3-1b").num_heads


@pytest.mark.slow
def test_it_prints_both_and_keeps_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--layouts tp2 tp4 tp4:2d --sizes {SIZE} --dtype float32 --repeats 2"
    # 128 wide has two heads: one for each rank of tp2, none for two of tp4.
    with pytest.raises(ConfigError, match=r"tp4: .* has 2 heads.*nearest is tp2"):
        run_script(arguments)
    run_script(f"{arguments.replace('tp4 ', '')} --threads=1 --json --out={tmp_path}")
    *shown, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert document == json.loads((tmp_path / "tensor-cpu-float32.json").read_text())
    assert [point["strategy"] for point in document["points"]] == ["tp2", "tp4:2d"]
    assert all(
        len(point["times_s"]) == 2 and point["products_s"] > 0 for point in document["points"]
    )
    assert all(len(line) <= 100 for line in shown if "wrote" not in line)
    text = " ".join(shown)
    assert "theory" in text and "tp4:2d sends less than one dimension from" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--sizes 512x8", "HIDDENxROWSxPOSITIONS"),
        ("--sizes 0x8x8", "HIDDENxROWSxPOSITIONS"),
        ("--sizes 100x8x8", "multiple of 64.*128 is the nearest"),
        ("--layouts tp4:2d --sizes 256x5x8", "splits rows in 2.*nearest is 4"),
        ("--layouts tp4 --sizes 256x4x9", "splits positions in 4.*nearest is 8"),
        ("--layouts tp8:3d --sizes 256x6x8", "splits rows in 4.*nearest is 8"),
        ("--layouts tp8 --sizes 256x4x8", "4 heads.*nearest is tp4"),
        ("--layouts dp2,tp4:2d", "tp alone.*tp4:2d"),
        ("--layouts dp2", "tp alone.*tp2"),
        ("--layouts tp5:2d", "tp4:2d"),
        ("--layouts tp2 --repeats -1", "repeats is -1"),
        ("--layouts tp2 --sizes 16384x512x4096", "GiB"),
        ("--layouts tp1024", "1024 processes take at least"),
        ("--layouts tp2 --out /dev/null/x", "--out"),
    ],
)
def test_bad_settings_are_one_message_before_any_rank(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "run_ranks", None)
    with pytest.raises(ConfigError, match=words):
        run_script(arguments)


@pytest.mark.parametrize("text", ["tp4:2d", by_hand("tp8:3d")])
def test_every_layout_runs_the_same_block(text: str) -> None:
    """The ranks' parts of the result add up alike."""
    one, other = (
        sum(run_ranks(squares, parse_layout(each).num_ranks, each, threads=1))
        for each in ("tp2", text)
    )
    assert other == pytest.approx(one, rel=1e-12)


def squares(text: str) -> float:
    """Return the sum of squares of this rank's part of the block's result."""
    block = SplitBlock(parse_layout(text), BlockSize.parse(SIZE), "float64")
    return block.forward().square().sum().item()


@pytest.mark.slow
def test_the_script_runs_on_ranks_of_its_own() -> None:
    words = ["--layouts=tp2", f"--sizes={SIZE}", "--dtype=float32", "--repeats=0", "--json"]
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (point,) = json.loads(done.stdout.splitlines()[-1])["points"]
    assert point["measured"] == point["theory"]
