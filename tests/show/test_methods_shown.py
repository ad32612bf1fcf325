"""What topics show comes from a run: sums, bytes by the ledger, gradients of one process."""

from __future__ import annotations

import pytest

from marks import by_hand
from phalanx.comm.algorithms.catalogue import COLLECTIVES, ROOTED, algorithms_of, list_steps
from phalanx.errors import ConfigError
from phalanx.report.tabular import Table
from phalanx.report.terminal import text_of
from phalanx.show import data_parallel, one_step
from phalanx.show.collective import ShowCollective, show_collective, values_text
from phalanx.show.point_to_point import show_messages
from phalanx.show.shown import Frame, Shown, ShowRun, ShowTopic, Strip
from phalanx.show.strategies import ON_CUBES, STRATEGIES
from phalanx.show.tables import printed
from phalanx.show.topics import RUN


def strips(shown: Shown) -> list[Strip]:
    return [part for part in shown.parts if isinstance(part, Strip)]


def grids(shown: Shown) -> list[Table]:
    return [part for part in shown.parts if isinstance(part, Table)]


def last(strip: Strip) -> Frame:
    return strip.frames[-1]


def test_the_exercise_of_every_course() -> None:
    shown = show_messages(ShowRun(ranks=4))
    blocking, asynchronous, tags, deadlock = strips(shown)
    assert [[cell for (cell,) in frame.cells] for frame in blocking.frames] == [
        ["0", "0"], ["1", "0"], ["1", "1"], ["1", "2"], ["2", "2"],
    ]  # fmt: skip
    assert [*map(list, last(asynchronous).cells)] == [["x 10, y 20"], ["x 20, y 10"]]
    assert [frame.cells[1][0] for frame in tags.frames] == ["a 0, b 0", "a 0, b 2", "a 1, b 2"]
    assert [*map(list, last(deadlock).cells)] == [["still sending after 0.5 s"]] * 2


PAIRS = [(collective, name) for collective in COLLECTIVES for name in algorithms_of(collective)]
FAST = [("scatter", "tree"), ("all-to-all", "halving-doubling"), ("barrier", "direct")]


@pytest.mark.parametrize(
    ("collective", "algorithm"), [pair if pair in FAST else by_hand(*pair) for pair in PAIRS]
)
def test_collectives_give_the_result_of_torch_and_the_bytes_of_their_steps(
    collective: str, algorithm: str
) -> None:
    root = 2 if collective in ROOTED else 0
    shown = show_collective(collective, algorithm, ShowCollective(ranks=4, root=root))
    (strip,), (totals,) = strips(shown), grids(shown)
    name = "hierarchical/2" if algorithm == "hierarchical" else algorithm
    steps = list_steps(collective, name, 4, root)
    assert len(strip.frames) == 1 + len(steps)
    for rank, (_, num_messages, num_bytes) in enumerate(totals.rows):
        sent = [s for frame in strip.frames for s in frame.sent if s.source == rank]
        assert (int(num_messages), int(num_bytes)) == (len(sent), sum(s.num_bytes for s in sent))
    assert collective == "barrier" or "gave the same on every rank." in shown.parts[-1]


def test_an_example_of_a_sum_has_a_digit_for_each_rank_and_stands_where_ranks_add() -> None:
    for num_ranks, example in ((3, "so 111 is a sum of ranks 0 to 2"), (1, "")):
        steps = list_steps("all-reduce", "ring", num_ranks)
        text = values_text("all-reduce", steps, num_ranks)
        assert example in text and ("sum" in text) is bool(example)
    assert "sum" not in values_text("broadcast", list_steps("broadcast", "ring", 3), 3)


def test_a_root_that_is_no_rank_or_has_no_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="root is 1, but all-reduce has no root; leave it out"):
        show_collective("all-reduce", "ring", ShowCollective(root=1))
    with pytest.raises(ConfigError, match="root is 7, and the ranks are 0 to 2; the nearest is 2"):
        show_collective("broadcast", "ring", ShowCollective(ranks=3, root=7))


STEPS = [name if name in ("buckets", "ring-attention") else by_hand(name) for name in STRATEGIES]


@pytest.mark.parametrize("topic", STEPS)
def test_a_step_sends_what_its_plan_says(topic: str) -> None:
    shown = one_step.show_step(topic, ShowRun(ranks=8 if topic in ON_CUBES else 4))
    said = str(shown.parts[-1]).replace(",", "").split()
    counted, planned = said[3], said[said.index("says") + 1].rstrip(".")
    # Buckets of another size are as many bytes.
    assert counted == planned and "All ranks have the loss" in str(shown.parts[-1])


def test_ranks_that_no_two_groups_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks is 3; hsdp .* the nearest is 2"):
        one_step.show_step("hsdp", ShowRun(ranks=3))


def test_buckets_leave_last_layers_first_under_backward() -> None:
    shown = one_step.show_step("buckets", ShowRun(ranks=2))
    buckets = next(grid for grid in grids(shown) if grid.heads[0] == "bucket")
    under = [row[-1] for row in buckets.rows]
    assert under == sorted(under, reverse=True) and len(set(under)) == 4
    assert "output" in buckets.rows[0][1] and "embedding" in buckets.rows[-1][1]


def test_gradients_with_a_main_device_and_without_are_one_processes() -> None:
    shown = data_parallel.show_data_parallel(ShowRun(ranks=2))
    gaps = [float(str(part).split()[-5]) for part in shown.parts if "differ" in str(part)]
    assert len(gaps) == 2 and max(gaps) <= 1e-12
    main, others = (grid for grid in grids(shown) if grid.heads[0] == "rank")
    size = 8 * sum(p.numel() for p in data_parallel.make_model().parameters())
    sent = [int(row[1].replace(",", "")) for row in main.rows]
    assert sent[0] > size > 0 and all(row[1] == row[2] for row in others.rows)


def test_owners_hold_layers_and_shards_hold_equal_parts() -> None:
    owners, shards, *_ = grids(data_parallel.show_fsdp(ShowRun(ranks=3)))
    held = [[row[-2] for row in grid.rows] for grid in (owners, shards)]
    assert len(set(held[0])) == 2 and len(set(held[1])) == 1
    # Of the 2,048 bytes of layer 0: two broadcasts to two ranks, against a part of a reduction.
    assert [row[1] for row in owners.rows] == ["2,048 / 8,192", "0 / 2,048", "0 / 2,048"]


def test_every_topic_can_be_loaded_and_has_a_short_line() -> None:
    for topic in RUN.values():
        settings, *_ = topic.load()
        assert issubclass(settings, ShowTopic)
        assert len(topic.about) <= 70


def test_tables_fit_a_line() -> None:
    grid = Table("", ["a", "b"], [["1", "x" * 10]], ["a"])
    lines = text_of(*printed(Shown("t", ["s"], [grid, "p"], "call"))).splitlines()
    assert lines == ["t", "s", "in torch: call", "", "a  b", "1  xxxxxxxxxx", "", "p"]
