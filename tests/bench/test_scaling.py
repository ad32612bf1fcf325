"""bench scaling: what it times, and that no speed-up above the number of ranks is given."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import phalanx.cli.bench as bench
from forked_torchrun import run_two
from phalanx.bench.scaling import (
    Account,
    Case,
    ScalingConfig,
    ScalingPoint,
    strategies_of,
)
from phalanx.bench.scaling_rank import RankSteps, time_strategy
from phalanx.config import ShapeConfig
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Block

SECONDS = st.floats(1e-6, 1e3)


@given(st.integers(1, 64), st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=9))
def test_a_speed_up_keeps_its_bound_or_is_not_given(
    num_ranks: int, times: list[tuple[float, float]]
) -> None:
    one, many = zip(*times, strict=True)
    point = ScalingPoint("dpN", num_ranks, many, one)
    assert point.batches_per_s > 0
    if point.speed_up is None:
        assert max(point.speed_ups) > num_ranks and point.efficiency is None
    else:
        assert 0 < point.speed_up <= num_ranks
        assert point.efficiency is not None and 0 < point.efficiency <= 1


def test_a_figure_that_cannot_be_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [ScalingPoint("dp1", 1, (4.0,), (4.0,)), ScalingPoint("dp2", 2, (1.0,), (4.0,))]
    monkeypatch.setattr("phalanx.bench.scaling.measure_scaling", lambda *_: found)
    assert bench.run(["scaling", "dp2"]) == 0
    shown = capsys.readouterr().out
    assert "4.00" not in shown.split("dp2", 1)[1]
    assert "no speed-up of dp2: it came out above the number of ranks" in shown


def test_each_strategy_takes_the_same_batch_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--shape.num-layers 1 --shape.hidden 16 --shape.num-heads 2 --shape.num-kv-heads 2"
    sizes += " --shape.head-dim 8 --shape.ffn 32 --shape.vocab-size 64 --seq-len 8"
    words = f"scaling dp2 fsdp2 {sizes} --rounds 2 --steps 1 --device cpu --json"
    assert bench.run(words.split()) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert shown[0] == "round 1 of 2: dp1, dp2, fsdp2 ..."
    points = json.loads(last)["points"]
    assert [point["strategy"] for point in points] == ["dp1", "dp2", "fsdp2"]
    assert points[0]["speed_up"] == 1
    for point in points:
        assert len(point["times_s"]) == 2
        assert point["tokens_per_s"] == pytest.approx(8 * 8 * point["batches_per_s"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dp3", "6 and 9 are the nearest"),
        ("dp2 --rounds 0", "rounds is 0; expected at least 1"),
        ("dp2 --seq-len 100000", "the nearest is"),
        ("tp4:2d --global-size 1", "splits rows into 2; the nearest is 2"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(words: str, expected: str) -> None:
    with pytest.raises(PhalanxError, match=expected):
        bench.run(["scaling", *words.split()])


def test_losses_are_terms_beyond_the_share_of_one_rank_and_sum_to_the_step() -> None:
    terms = ("forward", "backward", "communication", "bubble", "optimizer", "core")
    alone = Account(1.0, dict(zip(terms, (0.3, 0.6, 0.0, 0.0, 0.1, 0.0), strict=True)))
    step = dict(zip(terms, (0.15, 0.3, 0.2, 0.03, 0.1, 0.02), strict=True))
    account = Account(0.8, step, {"dp": 0.15})
    point = ScalingPoint("dp2", 2, (0.8,), (1.0,), room=1, account=account, one_rank=alone)
    assert point.losses == pytest.approx(
        {
            "exposed communication over dp": 0.15,
            "communication outside of waits": 0.05,
            "optimizer": 0.05,
            "bubble": 0.03,
            "core": 0.02,
            "forward and backward": 0,
            "unequal ranks": 0,
        }
    )
    assert sum(point.losses.values()) == pytest.approx(0.8 - 1.0 / 2)
    assert point.reason == "exposed communication over dp 150 ms"
    per_rank = dataclasses.replace(point, batch_of="rank")
    assert per_rank.speed_ups == [2.5] and per_rank.losses["optimizer"] == 0


def test_the_account_is_of_the_rank_that_the_others_wait_for() -> None:
    slow = {"forward": 3.0, "backward": 0.0, "communication": 0.0, "bubble": 0.0}
    fast = {"forward": 1.0, "backward": 0.0, "communication": 2.0, "bubble": 0.0}
    ranks = [
        RankSteps([2.0, 3.0, 9.0], [fast] * 3, [{"dp": 2.0}] * 3, 10, 5),
        RankSteps([2.0, 3.0, 9.0], [slow] * 3, [{}] * 3, 20, 7),
    ]
    assert Account.of(ranks) == Account(3.0, slow, {}, 15, 7, unequal_s=1.0)


def test_a_method_gets_its_degree_from_the_ranks() -> None:
    config = ScalingConfig(
        strategies=("fsdp:zero2", "dp2,fsdp", "tp3"), ranks="1,2,4", device="cpu"
    )
    assert strategies_of(config) == [
        ("fsdp:zero2", "fsdp2:zero2"), ("fsdp:zero2", "fsdp4:zero2"), ("dp2,fsdp", "dp2,fsdp2"),
        ("tp3", "tp3"),
    ]  # fmt: skip
    for strategy, ranks, match in (
        ("dp,fsdp", "2", "only one axis"),
        ("dp", "2,x", "expected numbers of ranks"),
    ):
        wrong = dataclasses.replace(config, strategies=(strategy,), ranks=ranks)
        with pytest.raises(ConfigError, match=match):
            strategies_of(wrong)


def planted(case: Case, config: ScalingConfig, plants: frozenset[str]) -> RankSteps:
    """Time a case whose optimizer sleeps, whose link is slow, whose blocks wait for each row."""
    forward, step = Block.forward, torch.optim.AdamW.step

    def sleep(seconds: float) -> None:
        time.sleep(seconds)

    def slow_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = forward(self, x, *args, **kwargs)
        sleep(0.02 * len(x))
        out.register_hook(lambda _: sleep(0.02 * len(x)))
        return out

    def slow_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        sleep(0.5)
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "forward", slow_forward)
        if "optimizer" in plants:
            patch.setattr(torch.optim.AdamW, "step", slow_step)
        if "link" in plants:
            config = dataclasses.replace(config, gbit=0.0002)
        return time_strategy(case, config)


CAUSES = {"optimizer": "optimizer", "link": "exposed communication over dp", "bubble": "bubble"}


@pytest.mark.slow
@pytest.mark.fresh_ranks
@pytest.mark.parametrize("plant", CAUSES)
def test_the_cause_that_is_named_gains_most_when_it_is_removed(plant: str) -> None:
    sizes = ShapeConfig(
        num_layers=2, hidden=16, num_heads=2, num_kv_heads=2, head_dim=8, ffn=32, vocab_size=64
    )
    config = ScalingConfig(seq_len=8, steps=3, device="cpu", threads=1, shape=sizes)
    axis, rows = ("pp", 2) if plant == "bubble" else ("dp", 8)

    def measured(plants: set[str], rows: int, num_ranks: int = 2) -> Account:
        case = Case(f"{axis}{num_ranks}", rows, is_timed=False)
        words = case, config, frozenset(plants)
        return Account.of(run_ranks(planted, num_ranks, *words, device="cpu", threads=1))

    weak = {"bubble": set[str](), "link": {"link"}, "optimizer": {"optimizer"}}[plant]
    account, alone = measured(weak, rows), measured(weak, rows, 1)
    point = ScalingPoint(
        f"{axis}2", 2, (account.wall_s,), (alone.wall_s,), account=account, one_rank=alone
    )
    assert next(iter(point.losses)) == CAUSES[plant], point.losses
    # Without the cause, the step loses less than half of what it lost.
    if plant == "bubble":  # 16 times the microbatches, for 16 times the work
        better_s, ideal_s = measured(weak, 16 * rows).wall_s / 16, alone.wall_s / 2
    else:
        better_s, ideal_s = measured(set(), rows).wall_s, measured(set(), rows, 1).wall_s / 2
    assert better_s - ideal_s < (account.wall_s - alone.wall_s / 2) / 2


@pytest.mark.slow
def test_ranks_of_torchrun_measure_jobs_of_fewer_ranks() -> None:
    sizes = "--shape.num-layers 1 --shape.hidden 16 --shape.num-heads 2 --shape.num-kv-heads 2"
    sizes += " --shape.head-dim 8 --shape.ffn 32 --shape.vocab-size 64 --seq-len 8"
    words = f"bench scaling dp --ranks 1,2,4 {sizes} --rounds 1 --steps 1 --device cpu --json"
    done = run_two("-m", "phalanx", *words.split())
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert [point["strategy"] for point in document["points"]] == ["dp1", "dp2"]
    assert document["refused"] == ["no dp4: dp4 needs more ranks than the 2 started"]
