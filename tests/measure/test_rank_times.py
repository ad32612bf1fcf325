"""The times of every rank, gathered on rank 0: spread, the latest rank of each step, links."""

from phalanx.measure.rank_times import RankWindow, groups_of, stages_of, window_of
from phalanx.measure.timer import TERMS, StepTimes, Term


def times(exposed: dict[str, float] | None = None, **seconds: float) -> StepTimes:
    terms_s: dict[Term, float] = {term: seconds.get(term, 0.0) for term in TERMS}
    return StepTimes(terms_s, sum(terms_s.values()), exposed or {})


def window(axes: dict[str, int], *ranks: list[StepTimes], **options: object) -> RankWindow:
    steps = range(1, 1 + len(ranks[0]))
    return window_of(steps, ["a"] * len(ranks), axes, ranks, **options)  # pyright: ignore


def test_ranks_of_groups_and_stages() -> None:
    axes = {"pp": 2, "dp": 2, "tp_row": 1, "tp_col": 2}
    assert groups_of(axes, "dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups_of(axes, "tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert stages_of(axes) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stages_of({"dp": 2, "tp": 2}) == [[0, 1, 2, 3]]


def test_a_window_has_the_spread_and_the_latest_rank_of_each_step() -> None:
    fast = [times(forward=1, data=1, communication=2)] * 3
    slow = [times(forward=1, data=1, communication=2), times(forward=1, data=3), fast[0]]
    found = window({"dp": 3}, fast, slow, fast, saved=[3])
    assert found.spread["data"] == [[1, 1, 1], [1, 1, 3], [1, 1, 1]]
    assert found.spread["wall"] == [[4, 4, 4]] * 3
    assert found.by_rank["data"] == [1, round(5 / 3, 7), 1]
    assert found.excess["data"] == [(0, 0, 0), (1, 2, 2), (0, 0, 0)]
    assert window({"dp": 3}, fast, fast, slow, saved=[2]).excess["work"] == [(0, 0, 0)] * 3


def test_a_rank_alone_in_its_stage_is_compared_with_the_other_stages_as_planned() -> None:
    ranks = [[times(forward=of)] for of in (10, 9, 28, 11)]
    assert window({"pp": 4}, *ranks).excess["stage forward"] == [(2, 18, 18)]
    found = window({"pp": 4}, *ranks, planned=[[1, 1, 1, 1], [1, 1, 3, 1]])
    assert found.excess["stage work"] == [(0, 0, 0)]
    # Two of a stage: both are slow, and the first stands for the stage.
    ranks = [[times(forward=of)] for of in (10, 10, 30, 31)]
    assert window({"pp": 2, "dp": 2}, *ranks).excess["stage forward"] == [(2, 20, 20)]


def test_the_last_of_a_group_waits_for_the_link_alone() -> None:
    ranks = [[times({"dp": of, "tp": 1}), times({"dp": 2})] for of in (3, 5, 4, 1)]
    found = window({"dp": 2, "tp": 2}, *ranks, sent={"dp": (1, 8.0)})
    assert found.exposed == {"dp": [2.5, 3.5, 3, 1.5], "tp": [0.5] * 4}
    assert found.least_exposed == {"dp": [2.5, 1.5], "tp": [0.5, 0.5]}
    assert found.sent == {"dp": (1, 8.0)}
