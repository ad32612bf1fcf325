"""`phalanx verify` from its command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import goldens
from forked_torchrun import run_two
from marks import by_hand
from phalanx.cli import verify
from phalanx.cli.main import main
from phalanx.cli.verify import with_second_axis
from phalanx.config.load import load_config
from phalanx.parallel.pipeline.sizes import HEADER_BYTES
from phalanx.strategy import Strategy
from phalanx.strategy.advice import require_built
from phalanx.strategy.kinds import built
from phalanx.verify.cases import awkward_shapes, splits, with_three
from phalanx.verify.settings import VerifyConfig
from phalanx.verify.verdict import Verdict

CASES = ["llama", "gpt2", "windowed", "reused", "normed"]


def document_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["verify", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_settings_reach_the_run_and_the_document_has_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = document_of(capsys, *goldens.VERIFIED["dp2"].split())
    assert document["is_equal"]
    assert goldens.facts_of_verdicts(document) == goldens.read("verify")["dp2"]
    for verdict in document["verdicts"]:
        assert verdict["strategy"] == "dp2" and verdict["place"] is None
        assert set(verdict["largest_errors"]) >= {"loss", "gradient", "norm", "weight"}
        assert all(error <= 1e-10 for error in verdict["largest_errors"].values())
        sent = {row["phase"]: row for row in verdict["sent"]}
        if verdict["case"] != "normed":  # whose statistics are sums in backward too
            assert sent["backward"]["counted"] == sent["backward"]["predicted"] > 0
    assert [verdict["case"] for verdict in document["verdicts"]] == CASES


def test_a_step_of_new_shapes_sends_the_headers_that_are_predicted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = document_of(capsys, *goldens.VERIFIED["pp2"].split())
    assert goldens.facts_of_verdicts(document) == goldens.read("verify")["pp2"]
    sent = {row["phase"]: row for row in document["verdicts"][0]["sent"]}
    assert sent["sizes"]["counted"] == sent["sizes"]["predicted"] == 2 * HEADER_BYTES


@pytest.mark.slow
def test_an_axis_of_two_runs_with_three_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    document = document_of(capsys, "fsdp2:zero1", "--steps", "1", "--shape.num-layers", "1")
    strategies = [verdict["strategy"] for verdict in document["verdicts"]]
    assert strategies == ["fsdp2:zero1"] * len(CASES) + ["fsdp3:zero1"] * len(CASES)


@pytest.mark.parametrize(
    ("text", "wider"),
    [
        ("dp2:naive", "dp3:naive"),
        ("dp2,fsdp2", "dp2,fsdp3"),
        ("tp2,recompute:full", "tp3,recompute:full"),
        ("dp4", None),
        ("tp4:2d", None),
        ("dp2,fsdp2,tp2", None),  # 12 ranks are too many
    ],
)
def test_three_ranks_where_the_strategy_allows(text: str, wider: str | None) -> None:
    found = with_three(Strategy.parse(text))
    assert (None if found is None else str(found)) == wider


@pytest.mark.parametrize(
    "text", ["dp2", "fsdp3", "tp2", "tp3", "tp4:2d", "tp8:2.5d/2", "tp8:3d", "fsdp3,tp2"]
)
def test_the_awkward_shapes_fit_their_strategy(text: str) -> None:
    strategy = Strategy.parse(text)
    llama, gpt2, windowed = awkward_shapes(strategy).values()
    assert all(splits(shape, strategy) for shape in (llama, gpt2, windowed))
    assert llama.tied and llama.qk_norm and llama.num_kv_heads < llama.num_heads
    assert not gpt2.tied and gpt2.bias and gpt2.norm == "layer" and gpt2.position == "learned"
    assert windowed.window_of(0) is not None and windowed.window_of(1) is None
    assert llama.dropout > 0 and gpt2.dropout > 0 and windowed.dropout > 0
    assert text == "fsdp3,tp2" or llama.vocab_size % 2 == 1


@pytest.mark.slow
def test_ranks_that_torchrun_started_verify_together() -> None:
    small = ("--steps", "1", "--shape.num-layers", "1")
    done = run_two("-m", "phalanx", "verify", "fsdp2", *small, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]  # of rank 0
    verdicts = json.loads(line)["verdicts"]
    found = [(v["strategy"], v["case"], v["is_equal"]) for v in verdicts]
    assert found == [("fsdp2", case, True) for case in CASES]


def test_the_first_rank_prints_the_verdicts_within_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torchrun ends a rank that still prints when another has left with 1."""
    shown: list[str] = []

    def run_here(
        prepare: Callable[[], Any], _facts: Any, function: Callable[[Any], Any], **_: Any
    ) -> Any:
        result = function(prepare())
        shown.append(capsys.readouterr().out)
        return result

    failed = Verdict("dp2", [], failure="a rank failed")
    monkeypatch.setattr("phalanx.launch.torchrun.run_here", run_here)
    monkeypatch.setattr("phalanx.launch.rank_env.is_under_torchrun", lambda: True)
    monkeypatch.setattr("phalanx.cli.verify._verify", lambda *_: [failed])
    monkeypatch.setenv("RANK", "0")
    loaded = load_config(["dp2", "--json"], VerifyConfig, prog="phalanx verify")
    assert verify._run(loaded, Strategy.parse("dp2")) == 1
    assert failed.headline() in shown[0]
    assert not json.loads(shown[0].splitlines()[-1])["is_equal"]


@pytest.mark.parametrize(
    ("words", "num_here", "message"),
    [
        ("dp4", 2, "strategy 'dp4' needs 4 ranks, but there are 2; 'dp2' would use them all"),
        by_hand("dp2 --train", 1, "all ranks read, but the ranks are on several hosts"),
    ],
)
def test_ranks_that_cannot_verify_together_say_so_once(
    words: str, num_here: int, message: str
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(num_here)}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "verify", *words.split()],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **place},
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_verified_run_takes_the_settings_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(
        'strategy = "fsdp2"\nsteps = 900\n[corpus]\nseq_len = 40\n[optimizer]\nbeta2 = 0.9\n'
    )
    words = ["verify", "--train", "--config", str(tmp_path / "run.toml"), "--optimizer.lr", "0.5"]
    assert main([*words, "--show-config", "--json"]) == 0
    config = json.loads(capsys.readouterr().out.splitlines()[-1])["config"]
    assert (config["strategy"], config["corpus"]["seq_len"]) == ("fsdp2", 40)
    assert (config["optimizer"]["beta2"], config["optimizer"]["lr"]) == (0.9, 0.5)
    assert config["optimizer"]["clip_norm"] == 0.2  # what is not given is verify's


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 0", "steps is 0; expected at least 1"),
        ("--optimizer.clip-p 3", "optimizer.clip_p is 3; expected 1, 2 or inf"),
        ("--optimizer.lr -1", "optimizer.lr is -1.0; expected more than 0"),
        ("--steps 2 --optimizer.warmup-steps 5", "optimizer.warmup_steps is 5, but the run has 2"),
        ("--seq-len 1000000000", "76,000,000,000 tokens, all of which one process computes, too"),
        ("--accumulation 1000000000", "408,000,000,068 tokens, all of which one process"),
        ("--steps 1000000000", "expected at most 16,777,216: lower steps"),
        ("--model demo --shape.hidden 1000000000000", "does not fit: under dp1, a rank needs"),
        ("--shape.vocab-size 1000000000000", "parameters) does not fit: under dp1, a rank"),
        ("--train --data /nonexistent", "/nonexistent does not exist"),
        ("--train --corpus.seq-len 1000000000", "expected at most 16,384, because verify"),
        ("--shape.dropout 1", "shape.dropout is 1.0; expected a number in [0, 1)"),
    ],
)
def test_values_out_of_range_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *words.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_train_is_asked_for_by_the_word_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--train=true"], ["--train", "--no-train"]):
        assert main(["verify", "dp2", *words]) == 2
        assert "write --train, or leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "other"),
    [("pp2", "pp2,dp2"), ("tp2", "dp2,tp2"), ("dp2:naive", "dp2:naive,tp2"), ("dp2,tp2", "")],
)
def test_one_axis_says_what_to_run_beside(text: str, other: str) -> None:
    assert with_second_axis(Strategy.parse(text)) == other


@pytest.mark.parametrize(
    "form", [form for form in built() if "N" in form and not form.startswith("recompute")]
)
def test_what_to_run_beside_can_run(form: str) -> None:
    # 8 ranks stand in a grid of every tensor layout but 2d; an option is the word in capitals.
    text = re.sub("/[A-Z]+", "/2", form).replace("N", "4" if form.endswith("2d") else "8")
    if other := with_second_axis(Strategy.parse(text)):
        require_built(Strategy.parse(other))
    assert bool(other) != Strategy.parse(text).is_served
