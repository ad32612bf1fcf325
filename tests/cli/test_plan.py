"""`phalanx plan`: its table and its JSON say the same, and each wrong question has one answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.cli.main import main

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
    assert row[7:11] == [
        f"{100 * best['mfu_causal']:.1f}", "/", f"{100 * best['mfu_full']:.1f}", best["grade"]
    ]  # fmt: skip
    assert row[12] == f"{best['memory_bytes'] / best['usable_bytes']:.0%}"
    assert all(each["step_time_s"] >= best["step_time_s"] for each in others)
    assert all(line in " ".join(text.split()) for line in found["advice"])


def test_figures_of_a_candidate_agree_with_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = planned(capsys, ON_TWO)
    for each in found["candidates"]:
        assert sum(each["causes_s"].values()) == pytest.approx(each["step_time_s"])
        assert sum(each["memory"].values()) == each["memory_bytes"] <= each["usable_bytes"]
        assert each["tokens_per_s_per_device"] * each["step_time_s"] * 2 == pytest.approx(4 * 1024)
        peak_s = each["t_theoretical_s"] / each["step_time_s"]
        assert peak_s == pytest.approx(each["mfu_causal"]) and each["devices"][-1] == 2


def test_a_strategy_that_does_not_fit_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model llama3-8b --cluster h100:8 --sequence 1024 --global-batch 8 --strategy dp8"
    text, found = planned(capsys, words)
    (failed,) = found["rejected"]
    assert found["candidates"] == [] and failed["left"] > failed["right"]
    # 8.03 B parameters at 16 B on 80 GB, of which torch finds 81,559 MiB.
    assert failed["text"] == "dp8: 119.7 GiB > 79.6 GiB of weights, gradients and moments alone"
    assert failed["text"] in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--model, --cluster, --sequence, --global-batch is missing"),
        (f"{SMALL} --cluster h100:0", "1 to 65,536 devices, not 0; the nearest is h100:1"),
        (f"{SMALL} --cluster h10:8", "'h10' is no cluster of the catalogue (did you mean"),
        (f"{ON_TWO} --software megatrn", "(did you mean 'megatron'?)"),
        (f"{ON_TWO} --model llama3-2b", "there is no preset 'llama3-2b'"),
        (f"{ON_TWO} --sequence 0", "sequence is 0; expected at least 1"),
        (f"{ON_TWO} --sequence 200000", "end at 131072"),
        (f"{ON_TWO} --global-batch 7 --strategy dp2", "2 data ranks = 2; the nearest batch is"),
        (f"{ON_TWO} --strategy dp2 --microbatch 4", "microbatch 4 x 2 data ranks = 8"),
        (f"{ON_TWO} --strategy dp4", "1 to 2 devices, not 4"),
        (f"{ON_TWO} --strategy tp3", "not 3"),
        (f"{ON_TWO} --strategy pp2,cut:1+1", "cut:1+1"),
        (f"{ON_TWO} --strategy cp2 --sequence 1023", "the nearest sequence has 1024"),
        (f"{ON_TWO} --microbatch 1", "--microbatch belongs to a strategy"),
    ],
)
def test_a_question_without_an_answer(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("phalanx: ") and said in error and "Traceback" not in error
