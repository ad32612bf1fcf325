"""What a run shows at its end, and that a figure which breaks its bound is not shown."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.ledger import Entry, sent_bytes
from phalanx.measure.memory import KINDS, Kind
from phalanx.measure.memory_report import MemoryReport
from phalanx.measure.summary import StepSummary, advice, summarize, summary_table
from phalanx.measure.timer import TERMS, StepTimes
from phalanx.measure.utilization import CountedFlops, Utilization
from phalanx.report.units import percent
from phalanx.train.evaluate import Evaluation
from phalanx.train.report.summary import Summary

SECONDS = st.floats(1e-9, 1e4)


def times(seconds: list[float], wall_s: float | None = None) -> StepTimes:
    terms_s = dict(zip(TERMS, seconds, strict=True))
    return StepTimes(terms_s, sum(seconds) if wall_s is None else wall_s)


def steps(wall_s: float = 0.7) -> StepSummary:
    return summarize([times([0.1] * 7, wall_s)])


def shown(summary: Summary, **options: bool) -> str:
    return summary.render(**options)


def summary_of(**changes: object) -> Summary:
    summary = Summary(
        run="demo", steps_done=5, num_steps=5, seconds=3.0, steps=steps(), straggler=None,
        ranks=None, placement=None, utilization=None, unit="tokens",
        units_per_s=1000.0, batches_per_s=2.5, losses=[4.0],
        evaluations=[Evaluation(at, 3.0, {"bits_per_byte": 4.0 - at}) for at in (0, 2)],
        best=None, sent=[], memory=None,
        no_memory="no account", predicted=None, resident_bytes=2**30,
        served_text=None,
        sample="To be\x1b[31m or\nnot", paths={"metrics": "runs/a b/metrics.jsonl"},
        resume="phalanx train --resume 'runs/a b' --steps 10",
    )  # fmt: skip
    return dataclasses.replace(summary, **changes)  # type: ignore[arg-type]


def test_the_result_comes_first_and_tables_only_with_report() -> None:
    text = shown(summary_of())
    assert "4.000 -> 2.000 bits per byte, 0.50 of where" in text
    assert "1,000 tokens/s, 2.5 global batches/s" in text
    assert "phalanx train --resume 'runs/a b' --steps 10" in text
    assert "Where 1 step went" not in text and len(text.splitlines()) <= 22
    assert "\x1b" not in text, "the model's text does not steer the terminal"
    assert "Where 1 step went" in shown(summary_of(), report=True)


def test_the_mfu_with_servers_is_called_that_of_a_worker() -> None:
    count = CountedFlops(10**9)
    use = Utilization(
        causal=count, full=None, time_s=1.0, num_devices=1, peak=None, ceiling_flops_per_s=2e9
    )
    of_ranks, of_worker = (
        shown(summary_of(utilization=use, served_text=text), report=True) for text in (None, "late")
    )
    assert of_ranks.count("worker 0: ") == 0 and of_worker.count("worker 0: ") == 2
    assert "MFU         worker 0: 50.0 % of the ceiling (0.002 TFLOP/s for 1 device)" in of_worker


def test_terms_that_do_not_sum_to_the_step_are_a_sentence() -> None:
    doubted = steps(wall_s=0.35)
    assert "sum to 200 %" in (doubted.doubt or "")
    assert summary_table(doubted) == advice(doubted) or "200 %" in str(summary_table(doubted))
    text = shown(summary_of(steps=doubted, units_per_s=None, batches_per_s=None), report=True)
    assert "tokens/s" not in text and "sum to 200 %" in text


@given(st.lists(st.lists(SECONDS, min_size=7, max_size=7), min_size=1, max_size=5))
def test_shares_sum_to_the_whole(values: list[list[float]]) -> None:
    summary = summarize([times(seconds) for seconds in values])
    assert summary.doubt is None
    assert all(0 <= share <= 1 for share in summary.shares.values())


@given(st.floats())
def test_what_is_no_share_is_not_printed(share: float) -> None:
    if not 0 <= share <= 1.001:
        assert percent(share) in ("unknown", "-0.0 %", "-0.1 %", "0.0 %")


@given(
    st.sampled_from(["all_reduce", "all_gather", "send"]), st.integers(0, 2**40), st.integers(1, 99)
)
def test_a_rank_sends_at_most_twice_the_payload(op: str, payload: int, num_ranks: int) -> None:
    assert 0 <= sent_bytes(op, payload, num_ranks) <= 2 * payload


def test_an_account_below_what_is_held_all_along_is_a_sentence() -> None:
    none: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    held: dict[Kind, int] = {**none, "parameters": 100}
    good = MemoryReport(held, held, held, "forward", largest_bytes=100, resident_bytes=1000)
    assert good.doubt is None
    bad = dataclasses.replace(good, at_peak=none)
    assert (
        "of parameters and optimizer state" in (bad.doubt or "") and str(bad.table()) == bad.doubt
    )
    over = dataclasses.replace(good, largest_bytes=99)
    assert over.doubt is not None


def test_advice_points_at_the_axis_that_sends_most() -> None:
    seconds = [0.1, 0.1, 0.1, 0.5, 0.1, 0.1, 0.1]
    summary = summarize([times(seconds)])
    gathers = [Entry(p, "fsdp", "all_gather", 1, 8, 4.0) for p in ("forward", "backward")]
    assert "gathers of fsdp, once for each microbatch" in advice(summary, gathers)
    assert "over tp, in proportion" in advice(summary, [Entry("forward", "tp", "x", 1, 8, 4.0)])
    assert "more accumulation" in advice(summary, [Entry("backward", "dp", "x", 1, 8, 4.0)])
