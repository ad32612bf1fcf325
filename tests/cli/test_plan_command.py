"""`phalanx plan`: its table and its JSON say the same, and each wrong question has one answer."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from phalanx.cli.main import main
from phalanx.planner.several import numbers_of

SMALL = "--model llama3-1b --sequence 1024 --global-batch 4 --shape.num-layers 4"
ON_TWO = f"{SMALL} --cluster h100:2"


def planned(capsys: pytest.CaptureFixture[str], words: str) -> tuple[str, dict[str, Any]]:
    assert main(["plan", *words.split(), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    return "\n".join(lines), json.loads(last)


def test_the_table_says_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    text, found = planned(capsys, ON_TWO)
    head = next(n for n, line in enumerate(text.splitlines()) if line.startswith("strategy"))
    best, *others = found["candidates"]
    row = text.splitlines()[head + 1].split()
    assert row[0] == best["strategy"]
    assert row[1:4] == [str(best["microbatch"]), "x", str(best["accumulation"])]
    assert row[4:6] == [f"{1000 * best['step_time_s']:.3g}", "ms"]
    assert row[6] == f"{best['tokens_per_s_per_device']:,.0f}"
    assert row[7:10] == [
        f"{100 * best['mfu_causal']:.1f}", "/", f"{100 * best['mfu_full']:.1f}"
    ]  # fmt: skip
    assert row[11] == f"{best['memory_bytes'] / best['usable_bytes']:.0%}"
    assert all(each["step_time_s"] >= best["step_time_s"] for each in others)
    words = " ".join(text.split())
    assert all(line in words for line in found["advice"])
    assert f", the heaviest, {best['memory_moment']}: " in words
    causes, total, unit = re.search(
        r"the heaviest, [a-z ]+: (.*) = ([0-9.,]+) of [0-9.,]+ ([GM]iB)", words
    ).groups()
    printed = {name: float(num) for name, num in map(str.split, causes.split(" + "))}
    assert round(10 * sum(printed.values())) == round(10 * float(total))
    assert unit == "GiB" and float(total) == round(best["memory_bytes"] / 2**30, 1)
    for name, num_bytes in best["memory"].items():
        assert abs(printed.get(name, 0.0) - num_bytes / 2**30) < 0.1


def test_the_arithmetic_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """700 GB of weights of GPT-3, at 4 bytes; 63 GiB of a feed-forward tensor of Llama 3 405B."""
    words = "--sequence {} --global-batch 1 --strategy dp1 --cluster h100:1 --arithmetic"
    text, gpt = planned(capsys, f"--model gpt3-175b {words.format(2048)}")
    weights, _, of_16_bits, of_32_bits, *_ = gpt["arithmetic"]["rows"]
    assert weights[2] / 1e9 == pytest.approx(700, rel=0.005)
    assert of_32_bits[2] == 2 * of_16_bits[2] == 4 * weights[2]
    assert f"{weights[2] / 1e9:,.1f}" in text
    _, llama = planned(capsys, f"--model llama3-405b {words.format(4096)}")
    of_4h, own = (num_bytes / 2**30 for *_, num_bytes in llama["arithmetic"]["rows"][-2:])
    assert (of_4h, own) == pytest.approx((63.0, 51.2), rel=0.001)


def test_figures_of_a_candidate_agree_with_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = planned(capsys, ON_TWO)
    for each in found["candidates"]:
        assert sum(each["causes_s"].values()) == pytest.approx(each["step_time_s"])
        assert sum(each["memory"].values()) == each["memory_bytes"] <= each["usable_bytes"]
        is_late = each["memory_moment"] == "with all gradients"
        assert is_late == (each["memory"]["activations"] == 0)
        assert each["tokens_per_s_per_device"] * each["step_time_s"] * 2 == pytest.approx(4 * 1024)
        peak_s = each["t_theoretical_s"] / each["step_time_s"]
        assert peak_s == pytest.approx(each["mfu_causal"]) and each["devices"][-1] == 2


def test_a_strategy_that_does_not_fit_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model llama3-8b --cluster h100:8 --sequence 1024 --global-batch 8 --strategy dp8"
    text, found = planned(capsys, words)
    (failed,) = found["rejected"]
    assert found["candidates"] == [] and failed["left"] > failed["right"]
    # 8.03 B parameters at 16 B on 80 GB, of which torch finds 81,559 MiB.
    assert failed["text"] == "dp8: 119.7 GiB > 79.6 GiB for weights, gradients and moments alone"
    assert failed["text"] in text


@pytest.mark.slow
def test_where_nothing_fits_the_nearest_is_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model llama3-70b --cluster h100:2 --sequence 1024 --global-batch 2"
    text, found = planned(capsys, words)
    lefts = [each["left"] for each in found["rejected"]]
    assert "no strategy fits" in text and found["candidates"] == []
    assert lefts == sorted(set(lefts)) and len(lefts) > 1
    larger = found["fits_on"]  # 70.6 B parameters at 16 B fill 14 devices of 79.6 GiB
    assert larger["num_devices"] == 16 and larger["figures"]["memory_bytes"] < lefts[0]
    assert f"16 devices hold the job: {larger['figures']['strategy']}, " in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--model, --cluster, --sequence, --global-batch is missing"),
        (f"{SMALL} --cluster h100:0", "1 to 65,536 devices, not 0; the nearest is h100:1"),
        (f"{SMALL} --cluster h10:8", "'h10' is not a cluster of the catalogue (did you mean"),
        (f"{ON_TWO} --software megatrn", "(did you mean 'megatron'?)"),
        (f"{ON_TWO} --model llama3-2b", "there is no preset 'llama3-2b'"),
        (f"{ON_TWO} --sequence 0", "sequence is 0; expected at least 1"),
        (f"{ON_TWO} --sequence 200000", "only 131072 positions"),
        (f"{ON_TWO} --global-batch {10**22}", "the nearest is 1099511627776"),
        (f"{ON_TWO} --script a.py:job", "--model does not go with --script"),
        (
            "--script a.py:job --cluster h100:2 --shape.hidden 8",
            "--shape does not go with --script",
        ),
        ("--script a.py:job --cluster h100:2 --precision float16", "--precision does not go with"),
        (f"{ON_TWO} --scale 1,2 --svg no/x.svg", "there is no folder no"),
        (f"{ON_TWO} --global-batch 7 --strategy dp2", "2 data ranks = 2; the nearest batch is"),
        (f"{ON_TWO} --strategy dp2 --microbatch 4", "microbatch 4 x 2 data ranks = 8"),
        (f"{ON_TWO} --strategy dp4", "1 to 2 devices, not 4"),
        (f"{ON_TWO} --strategy tp3", "not 3"),
        (f"{ON_TWO} --strategy pp2,cut:1+1", "cut:1+1"),
        (
            f"{ON_TWO} --strategy pp2 --sequence 64 --global-batch 1048576 --microbatch 1",
            "the most with 2 stages are 131,072",
        ),
        (f"{ON_TWO} --strategy cp2 --sequence 1023", "tokens, not 1023; the nearest is 1024"),
        (f"{ON_TWO} --strategy tp2 --sequence 1023", "multiple of 2 tokens, not 1023"),
        (f"{SMALL} --cluster h100:5 --strategy cp5:ulysses --sequence 1023", "has 32 heads"),
        (f"{SMALL} --cluster h100:5 --strategy tp5 --sequence 1023", "has 32 heads"),
        (f"{SMALL} --cluster h100:7", "the nearest batch that data parallelism splits is 7"),
        (f"{ON_TWO} --precision pure-bfloat16", "8 bytes per parameter instead of 16"),
        (f"{ON_TWO} --precision int8", "take bfloat16 or float16"),
        (f"{ON_TWO} --microbatch 1", "--microbatch belongs to --strategy"),
        (f"{ON_TWO} --svg x.svg", "--svg belongs to --scale"),
        (f"{ON_TWO} --scale 2 --compare a100", "--compare and --scale are different questions"),
        (f"{ON_TWO} --scale 2,1", "expected rising numbers of devices"),
        (f"{ON_TWO} --scale {'9' * 5000}", "expected rising numbers of devices"),
        (f"{ON_TWO} --scale 1,1{'0' * 400},...,1{'0' * 500}", "expected rising numbers of"),
        (f"{ON_TWO} --scale 10000000,10000001,...,999999999", "which has more than 100 numbers"),
        (f"{SMALL} --cluster gb200-nvl72:2 --scale 1,99", "1 to 72 devices, not 99"),
        (f"{ON_TWO} --compare a100,h10", "'h10' is not a cluster"),
        (f"{ON_TWO} --strategy dp2 --trace x.json", "--trace has no pipeline to show"),
        (
            "--model llama3-8b --cluster h100:2 --sequence 64 --global-batch 2 --strategy dp2 "
            "--trace x.json",
            "--trace has no timeline of dp2, which does not fit",
        ),
        (f"{ON_TWO} --strategy pp2 --trace no/x.json", "cannot write no/x.json"),
    ],
)
def test_a_question_without_an_answer(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("phalanx: ") and said in error and "Traceback" not in error


def test_the_trace_has_a_lane_a_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _, found = planned(capsys, f"{ON_TWO} --strategy pp2 --microbatch 1 --trace {path}")
    events = json.loads(path.read_text())["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    assert {each["tid"] for each in events} == {each["tid"] for each in spans} == {0, 1}
    # 4 microbatches, forward and backward on each of 2 ranks, none at the same time on one rank.
    assert len(spans) == 4 * 2 * 2
    for lane in (0, 1):
        own = sorted((each["ts"], each["dur"]) for each in spans if each["tid"] == lane)
        assert all(b + d <= after + 1e-6 for (b, d), (after, _) in pairwise(own))
    best = found["candidates"][0]
    pipeline_s = best["causes_s"]["compute"] + best["causes_s"]["pp"]
    length_s = max(each["ts"] + each["dur"] for each in spans) / 1e6
    assert length_s == pytest.approx(pipeline_s)


def test_clusters_are_compared_by_as_many_devices(capsys: pytest.CaptureFixture[str]) -> None:
    text, found = planned(capsys, f"{ON_TWO} --compare a100,h100")
    slow, fast = found["compare"]
    assert [each["num_devices"] for each in (slow, fast)] == [2, 2]
    # The peak of an A100 is 312 TFLOP/s, of an H100 989.
    ratio = slow["figures"]["t_theoretical_s"] / fast["figures"]["t_theoretical_s"]
    assert ratio == pytest.approx(989.4 / 312, rel=0.01)
    for each in (slow, fast):
        assert f"{1000 * each['figures']['step_time_s']:.3g} ms" in text


def test_devices_are_scaled_with_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "scale.svg"
    text, found = planned(capsys, f"{SMALL} --cluster h100:2 --scale 1,2,3 --svg {path}")
    assert "on 1 to 3 x h100, " in text and found["question"]["num_devices"] == 3
    one, two, three = found["scale"]
    assert one["speed_up"] == one["efficiency"] == 1
    ratio = one["figures"]["step_time_s"] / two["figures"]["step_time_s"]
    assert two["speed_up"] == pytest.approx(ratio)
    assert two["efficiency"] == pytest.approx(ratio / 2) and f"{ratio:.2f}" in text
    # 3 divides neither 4 sequences, nor the heads; 4 layers are split in 3 stages.
    assert three["figures"] is None or three["figures"]["strategy"].startswith("pp3")
    words = " ".join(ElementTree.parse(path).getroot().itertext())
    assert one["figures"]["strategy"] in words and "efficiency" in words


def test_numbers_of_devices_double_where_dots_stand() -> None:
    assert numbers_of("8,16,...,128") == [8, 16, 32, 64, 128]
    assert numbers_of("1,2,...,6") == [1, 2, 4, 6] and numbers_of("4") == [4]
