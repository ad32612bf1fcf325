"""The order of faults that a seed fixes, and what each of them cost."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from phalanx.bench.fault_order import KINDS, Cost, Fault, Strike, Timeline, order_of


def test_a_seed_fixes_which_fault_strikes_when_and_whom() -> None:
    order = order_of(7, ["rank", "host", "ssh"], 5, 60)
    assert [(each.kind, each.step, each.victim) for each in order] == [
        ("host", 9, 6168),
        ("rank", 11, 59618),
        ("ssh", 21, 5632),
        ("ssh", 32, 15772),
        ("rank", 47, 3873),
    ]
    assert order_of(8, ["rank", "host", "ssh"], 5, 60) != order


@given(
    st.integers(0, 2**40),
    st.lists(st.sampled_from(list(KINDS)), min_size=1, unique=True),
    st.integers(1, 60),
    st.integers(1, 10**4),
)
def test_faults_rise_before_the_end_and_each_kind_is_as_frequent(
    seed: int, kinds: list[str], number: int, steps: int
) -> None:
    order = order_of(seed, kinds, number, steps)
    assert order == order_of(seed, kinds, number, steps) and len(order) == number
    assert {0 <= each.pause < 1 and each.victim >= 0 for each in order} == {True}
    times = Counter(each.kind for each in order)
    assert max(times.values()) - min(times[kind] for kind in kinds) <= 1
    if steps > number:
        rising = [each.step for each in order]
        assert rising == sorted(set(rising)) and 1 <= rising[0] <= rising[-1] < steps


def watched(*steps: tuple[float, int], lost: tuple[float, ...] = ()) -> Timeline:
    seen = Timeline([(at_s, "lost", "") for at_s in lost])
    seen.add(0.0, {"kind": "config", "strategy": "dp4"})
    seen.add(1.5, {"kind": "ranks", "sent": {"dp": [2, 100.0], "world": [1, 20.0]}})
    for at_s, number in steps:
        seen.add(at_s, {"kind": "step", "step": number})
    return seen


def struck(at_s: float, until_s: float, kind: str = "rank") -> Strike:
    return Strike(Fault(kind, 3, 0, 0.0), "rank 1 on a", at_s, until_s, 0.5)


def test_a_lost_rank_costs_the_time_until_the_step_after_the_last_that_was_taken() -> None:
    # The fault strikes after step 3; one more step is taken; 3 and 4 are repeated.
    seen = watched(
        *((1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)),
        *((10.0, 3), (11.0, 4), (12.0, 5), (13.0, 6)),
        lost=(5.25,),
    )
    seen.add(9.0, {"kind": "config", "strategy": "dp2"})
    strike = struck(3.25, 3.25)
    assert seen.step_s == 1.0
    assert seen.cost_of(strike, 14.0) == Cost(
        kind="rank", who="rank 1 on a", step=3, detected_s=2.0, next_step_s=4.75, repeated=2,
        lost_s=7.0, again_bytes=240.0, strategy="dp2", load=0.5,
    )  # fmt: skip
    assert seen.has_recovered(strike)
    assert not watched((1.0, 1), (3.0, 3), (10.0, 3), lost=(5.0,)).has_recovered(strike)
    assert [*seen.final] == [1, 2, 3, 4, 5, 6]


def test_a_fault_that_no_rank_is_lost_by_costs_what_the_steps_take_longer() -> None:
    seen = watched((1.0, 1), (2.0, 2), (3.0, 3), (6.0, 4), (9.0, 5), (10.0, 6), (11.0, 7))
    cost = seen.cost_of(struck(3.5, 8.5, "slow"), 12.0)
    assert (cost.detected_s, cost.next_step_s, cost.repeated) == (None, None, 0)
    assert cost.lost_s == 4.0
    assert not watched((1.0, 1), (2.0, 2)).has_recovered(struck(2.5, 8.5, "slow"))
