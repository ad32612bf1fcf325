"""Who is late is named from the times of all ranks; ranks that only share cores are not accused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

import numpy as np
import pytest

from marks import by_hand
from phalanx.measure.rank_times import RankWindow, window_of
from phalanx.measure.straggler import accuse, window_from
from phalanx.measure.timer import TERMS, StepTimes, Term
from phalanx.report.output import json_text

BASE: Mapping[Term, float] = {
    "data": 5e-4, "forward": 0.01, "backward": 0.015, "optimizer": 1e-3, "other": 1e-3,
}  # fmt: skip

Late = dict[tuple[int, int], tuple[Term, float]]
"""Step and rank -> a term, and its seconds beyond the usual."""


def windows(
    axes: dict[str, int], late: Late, seed: int = 0, num_steps: int = 24, noise: float = 0.4,
    hosts: str = "", exposed: Mapping[str, float] | None = None,
) -> list[RankWindow]:  # fmt: skip
    """Return three windows of ranks that share cores: times vary, and a rank stalls at times."""
    draws, num_ranks = np.random.default_rng(seed), int(np.prod([*axes.values()]))
    factors = draws.lognormal(0, noise, (num_ranks, num_steps, len(BASE)))
    stalls = draws.exponential(0.02, factors.shape) * (draws.random(factors.shape) < 0.02)
    ranks: list[list[StepTimes]] = [[] for _ in range(num_ranks)]
    for step in range(num_steps):
        work: list[dict[Term, float]] = []
        for rank in range(num_ranks):
            taken = factors[rank, step] * [*BASE.values()] + stalls[rank, step] * (noise > 0)
            work.append(dict(zip(BASE, taken.tolist(), strict=True)))
            work[rank]["other"] += 3e-3 * (rank == 0)  # the records
            if (step, rank) in late:
                term, seconds = late[step, rank]
                work[rank][term] += seconds
        wall_s = max(sum(of.values()) for of in work) + 2e-3 + sum((exposed or {}).values())
        for rank, of in enumerate(work):
            terms_s: dict[Term, float] = {term: of.get(term, 0.0) for term in TERMS}
            terms_s["communication"] = wall_s - sum(of.values())
            waits = {"dp": 1e-3, **(exposed or {})}
            ranks[rank].append(StepTimes(terms_s, wall_s, waits))
    cuts = [0, 1, 4, num_steps]
    sent = {axis: (10, 1e6) for axis in axes}
    return [
        window_of(
            range(begin + 1, end + 1),
            hosts or "a" * num_ranks,
            axes,
            [of[begin:end] for of in ranks],
            sent=sent,
        )
        for begin, end in itertools.pairwise(cuts)
    ]


ALL = range(24)


@pytest.mark.parametrize(
    ("axes", "late", "hosts", "sentence"),
    [
        (
            {"dp": 4}, {(s, 2): ("forward", 0.04) for s in ALL}, "aabb",
            "Rank 2 on host b is late in all steps: forward takes 4",
        ),
        (
            {"dp": 2}, {(s, 1): ("data", 0.03) for s in ALL}, "aa",
            "Rank 1 on host a is late in all steps: data takes 30",
        ),
        (
            {"dp": 4}, {(s, r): ("forward", 0.05) for s in ALL for r in (2, 3)}, "aabb",
            "Host b (ranks 2 and 3) is late in all steps: forward takes",
        ),
        (
            {"pp": 2, "dp": 2}, {(s, r): ("backward", 0.1) for s in ALL for r in (2, 3)}, "aabb",
            "Stage 1 (ranks 2 and 3 on host b) is late in all steps: backward takes",
        ),
        (
            {"pp": 4}, {(s, 3): ("forward", 0.08) for s in ALL}, "aaaa",
            "Stage 3 (rank 3 on host a) is late in all steps: forward takes",
        ),
        (
            {"dp": 4}, {(s, s * 7 % 4): ("data", 0.03) for s in ALL}, "aabb",
            "Another of ranks 0 to 3 on host a and b is late each step: data takes",
        ),
        (
            {"dp": 2}, {(s, 0): ("optimizer", 0.3) for s in (5, 10, 15, 20)}, "ab",
            "Rank 0 on host a is late in few steps (4 of 21): optimizer takes 30",
        ),
    ],
)  # fmt: skip
def test_who_is_late_is_named(axes: dict[str, int], late: Late, hosts: str, sentence: str) -> None:
    straggler = accuse(windows(axes, late, noise=0.1, hosts=hosts))
    assert straggler is not None and sentence in straggler.text()
    assert 0 < straggler.share < 1


def test_a_rank_with_half_a_core_is_named_by_its_largest_term() -> None:
    late: Late = {}
    for step in ALL:
        late[step, 1] = ("backward", 0.03) if step % 3 else ("forward", 0.03)
    straggler = accuse(windows({"dp": 2}, late, noise=0.1))
    assert straggler is not None
    assert (straggler.ranks, straggler.term) == ((1,), "backward")


def test_a_link_is_slow_if_the_last_rank_waits_too_and_far_longer_than_over_others() -> None:
    axes = {"dp": 2, "tp": 2}
    slow = accuse(windows(axes, {}, exposed={"dp": 0.03, "tp": 1e-3}))
    assert slow is not None and slow.term == "communication over dp" and slow.ranks == (0, 1, 2, 3)
    assert accuse(windows(axes, {}, exposed={"dp": 0.03, "tp": 0.02})) is None
    assert accuse(windows({"dp": 2}, {}, exposed={"dp": 0.03})) is None  # nothing to compare with


def test_windows_are_read_back_from_their_records() -> None:
    made = windows({"dp": 2}, {(s, 1): ("data", 0.03) for s in ALL})
    read = [window_from({"kind": "ranks", **json.loads(json_text(vars(each)))}) for each in made]
    assert accuse(read) == accuse(made) is not None
    assert accuse(made[:2]) is None and accuse([]) is None  # too few steps
    old = [window_from({**vars(each), "excess": {}, "least_exposed": {}}) for each in made]
    assert accuse(old) is None


@pytest.mark.parametrize("num_seeds", [60, by_hand(1000)])
def test_ranks_that_only_share_cores_are_not_accused(num_seeds: int) -> None:
    layouts = [{"dp": 2}, {"dp": 4}, {"pp": 2, "dp": 2}, {"pp": 4}]
    for seed in range(num_seeds):
        noise = (0.1, 0.4, 0.7)[seed % 3]
        accused = accuse(windows(layouts[seed % 4], {}, seed, noise=noise))
        assert accused is None, (seed, accused)
