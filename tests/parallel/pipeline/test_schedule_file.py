"""Schedules read from files: what is written is read again, what cannot run is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError, StrategyError
from phalanx.launch.agreement import check_same
from phalanx.parallel.pipeline.cut import schedule_of, strategy_facts
from phalanx.parallel.pipeline.lowering import lower
from phalanx.parallel.pipeline.schedule import KINDS, build_schedule
from phalanx.parallel.pipeline.schedule_file import read_schedule, text_of
from phalanx.strategy import Strategy

BY_HAND = """\
# 1F1B, as PyTorch writes it: what ranks compute, and nothing where they wait
0F0,0F1,,0B0,,0B1

,1F0,1B0,1F1,1B1,
"""
WITH_MESSAGES = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


@given(st.sampled_from([*KINDS]), st.integers(2, 4), st.integers(1, 5), st.integers(1, 2))
def test_what_is_written_is_read_again(folder: Path, kind: str, p: int, m: int, v: int) -> None:
    schedule = build_schedule(kind, p, m, v)
    path = folder / f"{kind}-{p}-{m}-{v}.csv"
    path.write_text("\n".join(text_of(schedule)) + "\n")
    read = read_schedule(str(path), p)
    assert (read.rank_of, read.orders) == (schedule.rank_of, schedule.orders)
    assert text_of(read) == text_of(schedule)


@pytest.mark.parametrize("text", [BY_HAND, WITH_MESSAGES], ids=["computes", "messages"])
def test_a_file_by_hand_has_the_lists_of_the_kind_that_it_is(folder: Path, text: str) -> None:
    path = folder / f"{len(text)}.csv"
    path.write_text(text)
    expected = build_schedule("1f1b", 2, 2)
    for strategy in (f"pp2,schedule:{path}", f"pp2,fsdp2,schedule:{path}"):
        schedule = schedule_of(Strategy.parse(strategy), 2)
        assert text_of(schedule) == text_of(expected)


def test_a_step_of_fewer_microbatches_leaves_out_the_others(folder: Path) -> None:
    path = folder / "three.csv"
    path.write_text("\n".join(text_of(build_schedule("zb", 2, 3))))
    strategy = Strategy.parse(f"pp2,schedule:{path}")
    fewer = schedule_of(strategy, 2)
    assert {action.microbatch for rank in (0, 1) for action in lower(fewer, rank)} == {0, 1}
    assert [str(a) for a in lower(fewer, 0) if a.op == "REDUCE"] == ["0REDUCE1"]
    with pytest.raises(StrategyError, match=r"three.csv: a step has 4 .* for at most 3"):
        schedule_of(strategy, 4)
    whole = schedule_of(Strategy.parse(f"pp2,fsdp2,schedule:{path}"), 3)
    assert {action.op for order in whole.orders for action in order} == {"F", "B"}


def test_ranks_whose_files_differ_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host reads the file of a strategy by itself."""
    texts = (BY_HAND, BY_HAND.replace("\n\n", "\n"), "\n".join(text_of(build_schedule("zb", 2, 2))))
    of_hosts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        (host := tmp_path / str(number)).mkdir()
        (host / "mine.csv").write_text(text)
        monkeypatch.chdir(host)
        read_schedule.cache_clear()
        of_hosts.append(strategy_facts(Strategy.parse("pp2,schedule:mine.csv")))
    check_same(of_hosts[:2])  # of the same actions
    with pytest.raises(ConfigError, match=r"rank 2 would .* sha256 of the schedule in mine\.csv"):
        check_same(of_hosts)
    read_schedule.cache_clear()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n1F0,1B0\n2F0,2B0", "has 3 lines of actions; expected 2"),
        ("0F0,0B0\n1F0,1B", "line 2: cannot read '1B'; expected a stage, one of F, B, I, W"),
        ("0F0,0UNSHARD1\n1F0,1B0", "line 1: cannot read '0UNSHARD1'"),
        ("0F0,0B0\n2F0,2B0", "no rank computes stage 1; expected each from 0 to 2"),
        ("0F1,0B1\n1F1,1B1", "no rank computes microbatch 0"),
        ("0SEND_F0\n1RECV_F0", "no rank computes stage 0"),
        ("0F0,0B0,1F0,1B0\n0SEND_F0", "rank 1 computes no stage"),
        ("0F0,0B0,1F0\n1B0", "1F0 is on rank 0; stage 1 is on rank 1"),
        ("0F0,0B0\n1F0", "microbatch 0 has 1 F, 0 B, 0 I, 0 W in stage 1"),
        ("0B0,0F0\n1F0,1B0", "deadlock: rank 0 waits at 0RECV_B0 for 1SEND_B0, rank 1 waits at 1R"),
        (WITH_MESSAGES.replace("1RECV_F1,", ""), "rank 1 has 1RECV_F1 0 times; expected 1"),
        (WITH_MESSAGES.replace("0F1,", "0F1,0SEND_F0,"), "rank 0 has 0SEND_F0 2 times; expected 1"),
        (WITH_MESSAGES.replace("0F1,", "0F1,0SEND_F9,"), "rank 0 has 0SEND_F9 1 times; expected 0"),
        (
            WITH_MESSAGES.replace("1RECV_F1,", "").replace("1RECV_F0,", "1RECV_F1,1RECV_F0,"),
            "rank 1 begins 1RECV_F1 where rank 0 has sent 0SEND_F0",
        ),
        (
            "0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
            "deadlock: rank 0 waits at 0RECV_B0 for 1SEND_B0, rank 1 waits at 1RECV_F0 for 0S",
        ),
        ("0F0,0REDUCE0,0B0\n1F0,1B0,1REDUCE0", "rank 0 has 0REDUCE0 where 0SEND_F0 is expected"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(StrategyError) as caught:
        schedule_of(Strategy.parse(f"pp2,schedule:{path}"), 1)
    message = str(caught.value)
    assert message.startswith(f"schedule {path}") and words in message
    assert len(message.splitlines()) == 1


def test_stages_of_ranks_that_are_no_neighbours_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "far.csv"
    path.write_text("0F0,0B0\n2F0,2B0\n1F0,1B0\n3F0,3B0")
    with pytest.raises(StrategyError, match="stage 0 is on rank 0, and stage 1 on rank 2"):
        read_schedule(str(path), 4)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe0F0")
    for name, words in [
        ("none", "No such file"), ("", "Is a directory"), ("bytes", "not UTF-8"),
    ]:  # fmt: skip
        with pytest.raises(StrategyError, match=words):
            read_schedule(str(tmp_path / name), 2)
