import json
from pathlib import Path

import pytest

import phalanx.cli.bench as bench
from phalanx.bench import in_step
from phalanx.errors import ConfigError
from phalanx.measure.environment import device_name
from phalanx.planner.calibration_file import Calibration, keep, read
from phalanx.planner.hardware import cluster
from phalanx.planner.machine import Level, Link
from phalanx.show.topics import RUN


def last_line(text: str) -> dict[str, object]:
    return json.loads(text.splitlines()[-1])


def test_ceiling_prints_a_table_and_writes_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "ceiling --device cpu --dtype float32 --max-size 1024 --budget-s 1 --threads 1"
    assert bench.run([*arguments.split(), "--json", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    document = last_line(shown)
    assert document["benchmark"] == "ceiling" and document["arithmetic"] == "float32"
    assert document["environment"]
    assert "TFLOP/s" in shown and "1 thread" in shown
    lines = shown.splitlines()[:-1]
    assert all(len(line) <= 100 for line in lines if str(tmp_path) not in line)
    assert json.loads((tmp_path / "ceiling-cpu-float32.json").read_text()) == document
    assert (tmp_path / "ceiling-cpu-float32.svg").read_text().startswith("<?xml")


def test_without_matplotlib_it_says_how_to_get_it_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.cli.bench.has_matplotlib", lambda: False)
    arguments = "ceiling --device cpu --dtype float32 --max-size 512 --budget-s 1 --threads 1"
    assert bench.run([*arguments.split(), "--out", str(tmp_path)]) == 0
    assert "pip install 'phalanx-train[plot]'" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.svg"))


def test_mfu_prints_formula_and_share(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "mfu --device cpu --dtype float32 --width 256 --layers 2 --budget-s 0.2 --threads 1"
    assert bench.run([*arguments.split(), "--json"]) == 0
    shown = capsys.readouterr().out
    assert "MFU of ceiling" in shown and "MFU = model FLOPs" in " ".join(shown.split())
    assert last_line(shown)["width"] == 256


def test_the_lectures_recipe_stands_beside_the_plain_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "mfu --recipe lecture --device cpu --dtype bfloat16 --width 256 --layers 2"
    words = [*arguments.split(), "--budget-s=0.2", "--threads=1", "--json", f"--out={tmp_path}"]
    assert bench.run(words) == 0
    shown = capsys.readouterr().out
    document = last_line(shown)
    assert document["recipe"] == "lecture" and document["width"] == 256
    assert [run["recipe"] for run in document["beside"]] == ["plain"]
    assert json.loads((tmp_path / "mfu-cpu-bfloat16-lecture.json").read_text()) == document
    utilization = document["utilization"]
    share = document["theoretical_s"] / utilization["time_s"]
    assert share == pytest.approx(utilization["mfu_ceiling_causal"], rel=1e-9)
    assert "t_theoretical, at the ceiling" in shown and "t_actual, median (best)" in shown
    heading = next(line for line in shown.splitlines() if "recipe" in line)
    assert heading.index("lecture") < heading.index("plain")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("ceiling --threads 0", "threads is 0"),
        ("ceiling --budget-s 0", "budget_s is 0"),
        ("ceiling --max-size 7", "512"),
        ("ceiling --device cuda:99", "cuda:99"),
        ("ceiling --device cpu --dtype tf32", "tf32"),
        ("mfu --device nothing", "must be cpu"),
        ("mfu --width 0", "at least 1"),
        ("ceiling --out /dev/null/x", "--out"),
        ("comm --ranks 1000000 --device cpu", "1000000 processes take at least .* start fewer"),
        ("mfu --layers 1000000000000", "layers is 1000000000000; .* the nearest is 10000"),
        ("cut --seq-len 1000000000000", "seq_len is 1000000000000; .* the nearest is 1048576"),
        ("cut --microbatch 1000000000000", "microbatch is 1000000000000; .*nearest is 1048576"),
        ("cut --shape.hidden 1000000000000", "demo .* parameters.* does not fit: under dp1, a ra"),
        (
            "scaling --shape.vocab-size 1000000000000",
            "demo .* parameters.* does not fit: under dp1",
        ),
        ("scaling --global-size 1000000000000", "global_size is 1000000000000; .* is 1048576"),
    ],
)
def test_bad_settings_are_one_message(arguments: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        bench.run(arguments.split())
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "ceilng",
            "'ceilng' is not a verb.*'ceiling'.*verbs are ceiling, comm, cut, data, faults, mfu",
        ),
        ("ceiling --dtype bf16", "'bf16'; expected one of auto, bfloat16"),
        ("mfu --size 3", "option '--size' is unknown"),
        ("ceiling --device cpu0", "device is 'cpu0'; it must be cpu, cuda"),
        ("pipeline --schedule zb/1", "'pipeline' is no longer a verb.*run `phalanx show 1f1b`"),
        (
            "tensor",
            "'tensor' is no longer a verb.*run `python benchmarks/tensor/layouts.py` in the repos",
        ),
    ],
)
def test_bad_arguments_are_one_message(arguments: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        bench.run(arguments.split())
    assert caught.value.exit_code == 2


def test_a_request_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with pytest.raises(ConfigError, match="must be cpu"):
        bench.run(["ceiling", "--device", "tpu", "--out", str(folder)])
    assert not folder.parent.exists()
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match="must be cpu"):
        bench.run(["ceiling", "--device", "tpu", "--out", str(folder)])
    assert folder.exists()


def test_a_verb_that_moved_is_a_command() -> None:
    _, topic = bench.REMOVED_VERBS["pipeline"].split(" show ")
    assert topic in RUN
    assert (
        Path(__file__).parents[2] / bench.REMOVED_VERBS["tensor"].removeprefix("python ")
    ).is_file()


def test_help_names_what_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert (bench.run(["--help"]), bench.run([])) == (0, 2)
    shown = capsys.readouterr()
    assert shown.out == shown.err
    assert all(f"\n  {name} " in shown.out for name in bench.VERBS)
    assert max(map(len, shown.out.splitlines())) <= 100


def test_the_ceiling_is_kept_for_the_planner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the links that `bench comm` has measured before."""
    monkeypatch.setattr(in_step, "_RANKS_PER_CORE", 2)  # ranks that wait, in place of new ones
    path = tmp_path / "mine.json"
    link = Link(name="memory", bandwidth=1e9, latency_s=1e-4, source="a test", date="2026-11-25")
    level = Level(name="server", devices=2, link=link)
    keep(path, Calibration(kind="cpu", device_name=device_name("cpu"), num_here=2, levels=(level,)))
    arguments = "ceiling --device cpu --dtype float32 --max-size 512 --budget-s 0.1 --threads 1"
    assert bench.run([*arguments.split(), "--json", "--write", str(path)]) == 0
    measured = last_line(capsys.readouterr().out)
    core = read(path).compute
    assert core is not None and core.best == {"float32": measured["flops_per_s"]}
    assert core.sustained == {"float32": measured["sustained_flops_per_s"]}
    found = cluster(f"{path}:2")
    assert found.device.peak_flops["float32"] == measured["flops_per_s"]
    assert found.num_devices == 2 and found.levels == (level,)
