"""Each schedule as its paper draws it; all of them for any numbers of ranks and microbatches."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import StrategyError
from phalanx.parallel.pipeline.schedule import KINDS, Action, Schedule, build_schedule
from phalanx.parallel.pipeline.simulate import check_complete, most_in_flight, simulate
from phalanx.strategy import Strategy

GRIDS = {
    ("naive", 3, 2, 1): """
        F0  .  .  .  .  .  . B0 B0 F1  .  .  .  .  .  . B1 B1
         . F0  .  .  . B0 B0  .  .  . F1  .  .  . B1 B1
         .  . F0 B0 B0  .  .  .  .  .  . F1 B1 B1
    """,
    ("gpipe", 4, 4, 1): """
        F0 F1 F2 F3  .  .  .  .  .  .  .  .  . B0 B0 B1 B1 B2 B2 B3 B3
         . F0 F1 F2 F3  .  .  .  .  .  . B0 B0 B1 B1 B2 B2 B3 B3
         .  . F0 F1 F2 F3  .  .  . B0 B0 B1 B1 B2 B2 B3 B3
         .  .  . F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
    """,
    ("1f1b", 4, 4, 1): """
        F0 F1 F2 F3  .  .  .  .  .  . B0 B0  . B1 B1  . B2 B2  . B3 B3
         . F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1  . B2 B2  . B3 B3
         .  . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2  . B3 B3
         .  .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
    """,
    ("interleaved", 2, 4, 2): """
        F0 F1 f0 f1 F2  . b0 b0 F3 b1 b1 f2 B0 B0 f3 B1 B1  . b2 b2  . b3 b3 B2 B2 B3 B3
         . F0 F1 f0 b0 b0 f1 b1 b1 F2 B0 B0 F3 B1 B1 f2 b2 b2 f3 b3 b3 B2 B2 B3 B3
    """,
    ("zb", 3, 4, 1): """
        F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
         . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
         .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """,
    ("zbv", 2, 4, 2): """
        F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
         . F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
    """,
    ("dualpipev", 2, 4, 2): """
        F0 F1 F2 f0 i0 w0 f1 F3 b1 b1 f2 B0 B0 b2 b2 f3  . B1 B1 b3 b3 I2 W2 I3 W3
         . F0 f0 F1 f1 F2 b0 b0 f2 B0 B0 F3 b1 b1 f3 B1 B1 b2 b2 B2 B2 i3 I3 w3 W3
    """,
}
"""Kind, ranks, microbatches, chunks -> a lane a rank; a backward takes twice as long as a forward.

Letters of the second chunk are small.
"""


def draw(schedule: Schedule) -> str:
    """Return the schedule as text, a lane a rank, a cell a unit of time of UNITS.

    `F3` is the forward of microbatch 3, `B3` its backward; `f3` is that of the second chunk. With
    more chunks than two, `a` to `z` after the number names the chunk.
    """
    lines: list[str] = []
    chunks = len(schedule.stages_of(0))
    for rank, lane in enumerate(simulate(schedule).lanes):
        cells: list[str] = []
        for action, begin, end in lane:
            chunk = schedule.stages_of(rank).index(action.stage)
            cell = f"{action.op}{action.microbatch}"
            if chunks > 2:
                cell += chr(ord("a") + chunk)
            cells += [""] * (int(begin) - len(cells))
            cells += [cell.lower() if chunk == 1 and chunks == 2 else cell] * int(end - begin)
        lines.append(" ".join(f"{cell or '.':>2}" for cell in cells).rstrip())
    return "\n".join(lines)


@pytest.mark.parametrize("case", GRIDS, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}")
def test_the_grid(case: tuple[str, int, int, int]) -> None:
    drawn = [line.split() for line in draw(build_schedule(*case)).splitlines()]
    assert drawn == [line.split() for line in GRIDS[case].strip().splitlines()]


def test_every_kind_is_drawn() -> None:
    assert {kind for kind, *_ in GRIDS} == set(KINDS)


@given(
    st.sampled_from([*KINDS]),
    st.integers(1, 9),
    st.integers(1, 24),
    st.integers(1, 4),
)
def test_every_schedule_is_legal_and_ends(kind: str, p: int, m: int, v: int) -> None:
    schedule = build_schedule(kind, p, m, v)
    simulate(schedule)
    # Gradients are added in the order of the microbatches, as one rank adds them.
    for order in schedule.orders:
        for stage, ops in itertools.product(range(schedule.num_stages), ("F", "BI", "BW")):
            numbers = [a.microbatch for a in order if a.stage == stage and a.op in ops]
            assert numbers == sorted(numbers)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (4, 7), (8, 16), (3, 12)])
def test_bubbles_are_those_of_the_papers(p: int, m: int) -> None:
    def bubble(kind: str, v: int = 1) -> float:
        return simulate(build_schedule(kind, p, m, v)).bubble

    assert bubble("naive") == pytest.approx(1 - 1 / p)
    assert bubble("gpipe") == pytest.approx((p - 1) / (m + p - 1))
    assert bubble("1f1b") == pytest.approx((p - 1) / (m + p - 1))
    if m % p == 0:
        for v in (2, 3):
            assert bubble("interleaved", v) == pytest.approx((p - 1) / (v * m + p - 1))
    if m >= p:  # forward + input half - weight half, for each of p - 1 ranks
        assert bubble("zb", 1) == pytest.approx((p - 1) / (3 * m + p - 1))
    if m >= 2 * p:
        assert bubble("zb", 2) < bubble("interleaved", 2)
        assert bubble("zbv") == pytest.approx((p - 1) / (6 * m + p - 1))
        assert bubble("dualpipev") < bubble("1f1b")


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (2, 4, 8) for m in (p, 2 * p, 2 * p + 3)])
def test_what_is_held_is_what_the_papers_say(p: int, m: int) -> None:
    """In forwards of one stage, of which v are one microbatch on a rank of v stages.

    gpipe         m (arXiv 1811.06965, without recomputation)
    1f1b          p - r on rank r (arXiv 2006.09503, PipeDream-Flush)
    interleaved   2 (p - r - 1) + (v - 1) p forwards go before the first pair of a forward and a
                  backward (arXiv 2104.04473, section 2.2, as Megatron-LM counts them)
    zb/1          p on every rank, what the first of 1f1b holds (arXiv 2401.10241, ZB-H1)
    zbv           2 p, each of half a rank's layers: as that rank, too (arXiv 2405.15362, ZB-V)
    dualpipev     2 p + 1, likewise (arXiv 2412.19437, table 2: PP + 1, where PP stages are two a
                  rank)
    """

    def held(kind: str, v: int = 1) -> list[int]:
        return most_in_flight(build_schedule(kind, p, m, v))

    ranks = range(p)
    assert held("naive") == [1] * p
    assert held("gpipe") == [m] * p
    assert held("1f1b") == [min(p - rank, m) for rank in ranks]
    assert held("zb", 1) == [p] * p
    for v in (2, 3, 4):
        ahead = [2 * (p - rank - 1) + (v - 1) * p + 1 for rank in ranks]
        assert held("interleaved", v) == [min(each, v * m) for each in ahead]
        # No paper has it: the weights' gradients of r more microbatches wait on rank r.
        waiting = [min(each + rank, v * m) for rank, each in enumerate(ahead)]
        assert held("zb", v) == waiting
    if m >= 2 * p:
        assert held("zbv", 2) == [2 * p] * p
        assert held("dualpipev", 2) == [2 * p + 1] * p
    else:  # not as many as the V is written for: p forwards before the first backward, and r more
        assert held("zbv", 2) == held("dualpipev", 2) == [p + 1 + rank for rank in ranks]


@given(
    st.sampled_from([*KINDS]),
    st.integers(2, 8),
    st.integers(1, 20),
    st.none() | st.integers(1, 4),
)
def test_a_strategy_names_a_schedule_that_ends_or_is_refused(
    kind: str, p: int, m: int, v: int | None
) -> None:
    """By the number of stages a rank: only interleaved and zb take one, from 2 and from 1 on."""
    least = {"interleaved": 2, "zb": 1}.get(kind)
    legal = v is None if least is None else v is not None and v >= least
    text = f"pp{p}:{kind}" if v is None else f"pp{p}:{kind}/{v}"
    if not legal:
        with pytest.raises(StrategyError, match=rf"{kind}.*; write \S*{kind}") as caught:
            Strategy.parse(text)
        assert len(str(caught.value).splitlines()) == 1
        return
    axis = Strategy.parse(text).pp
    schedule = build_schedule(axis.kind, axis.degree, m, axis.option or 1)
    check_complete(schedule)
    assert schedule.num_stages == p * (v or KINDS[kind].chunks or 1)
    timeline = simulate(schedule)
    assert 0 < timeline.bubble < 1
    # What must run one after the other: all stages for the first microbatch, and a rank's work.
    work = schedule.num_stages // p * m * 3
    assert timeline.length >= max(work + (p - 1), schedule.num_stages * 2)


def changed(schedule: Schedule, rank: int, order: list[Action]) -> Schedule:
    orders = list(schedule.orders)
    orders[rank] = tuple(order)
    return dataclasses.replace(schedule, orders=tuple(orders))


def test_what_is_not_legal_is_refused() -> None:
    schedule = build_schedule("1f1b", 2, 3)
    first, last = (list(order) for order in schedule.orders)
    with pytest.raises(StrategyError, match="microbatch 2 has 1 F, 0 B, 0 I, 0 W in stage 0"):
        simulate(changed(schedule, 0, first[:-1]))
    with pytest.raises(StrategyError, match="microbatch 0 has 2 F, 1 B, 0 I, 0 W in stage 0"):
        simulate(changed(schedule, 0, [first[0], *first]))
    with pytest.raises(StrategyError, match="1F0 is on rank 0; stage 1 is on rank 1"):
        simulate(changed(schedule, 0, [last[0], *first]))
    with pytest.raises(StrategyError, match="0B9 has a stage or microbatch out of range"):
        simulate(changed(schedule, 0, [*first, Action("B", 0, 9)]))
    with pytest.raises(StrategyError, match="deadlock: rank 0 waits at 0RECV_B0 for 1SEND_B0"):
        simulate(changed(schedule, 0, [first[2], *first[:2], *first[3:]]))


@pytest.mark.parametrize("kind", KINDS)
def test_any_two_actions_of_a_rank_changed_about_are_refused_or_still_end(kind: str) -> None:
    """Refused where the later one needs the other; what is not refused still runs to its end."""
    schedule = build_schedule(kind, 2, 3, 2)
    num_refused = 0
    for rank, order in enumerate(schedule.orders):
        for at in range(len(order) - 1):
            swapped = list(order)
            swapped[at : at + 2] = reversed(swapped[at : at + 2])
            (_, stage, microbatch), later = order[at], order[at + 1]
            is_chain = stage == later.stage and microbatch == later.microbatch
            try:
                timeline = simulate(changed(schedule, rank, swapped))
            except StrategyError:
                num_refused += 1
            else:
                assert not is_chain
                ends = {span.action: span for lane in timeline.lanes for span in lane}
                assert len(ends) == sum(map(len, schedule.orders))
    assert num_refused > 0 or kind == "gpipe"


@pytest.mark.parametrize(("kind", "most"), [("gpipe", 32_768), ("zbv", 16_384)])
def test_lists_that_take_minutes_to_build_are_refused(kind: str, most: int) -> None:
    with pytest.raises(StrategyError, match=f"a step has {most + 1:,} micro.* are {most:,}; take"):
        build_schedule(kind, 8, most + 1)
