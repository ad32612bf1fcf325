"""The tables of `phalanx plan`: at most 100 columns, and no cell is cut."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.cli import plan_text
from phalanx.planner.explain import Figures
from phalanx.planner.several import BestPlan
from phalanx.report.terminal import text_of


def figures(strategy: str, **others: Any) -> Figures:
    given: dict[str, Any] = {
        "strategy": strategy,
        "microbatch": 8,
        "accumulation": 128,
        "step_time_s": 14.4,
        "t_theoretical_s": 5.0,
        "tokens_per_s_per_device": 56_012.0,
        "samples_per_s": 10.0,
        "mfu_causal": 0.45,
        "mfu_full": 0.52,
        "causes_s": {},
        "sent_s": 0.0,
        "exchanged": {},
        "stage": 0,
        "memory": {},
        "memory_moment": "",
        "memory_bytes": 80_000_000_000,
        "usable_bytes": 80e9,
        "mesh": "",
        "devices": (),
    }
    return Figures(**given | others)


ROWS = (
    figures("pp8,dp16,fsdp8,tp8,recompute:full"),
    figures("pp8:interleaved/4,dp16,fsdp128:zero3,tp8:2d,recompute:selective"),
    figures("dp2", accumulation=16_384, step_time_s=1500.0, tokens_per_s_per_device=1_234_567.0),
)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[1:]])
@pytest.mark.parametrize("unit", ["tokens", "rows"])
def test_a_table_is_whole_in_100_columns(rows: tuple[Figures, ...], unit: str) -> None:
    text = text_of(plan_text.table(rows, unit))
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    assert f"{unit}/s" in text and "causal / full" in text
    for each in rows:
        assert all(cell in text for cell in plan_text.cells(each))
        assert all(part in text for part in each.strategy.split(","))


def test_a_strategy_breaks_where_the_line_ends() -> None:
    first, second = (text_of(plan_text.table([each])) for each in (ROWS[1], ROWS[2]))
    assert len(first.splitlines()) == 4 and len(second.splitlines()) == 3
    assert first.splitlines()[2].startswith("pp8:interleaved/4,dp16,fsdp128:zero3,  8 x 128")


@pytest.mark.parametrize("question", ["compare", "scale"])
def test_several_are_whole_in_100_columns(question: str) -> None:
    gained = {"speed_up": 1.0, "efficiency": 1.0} if question == "scale" else {}
    best = [
        BestPlan(cluster="h100-llama3", num_devices=16_384, figures=each, **gained) for each in ROWS
    ]
    asked = {
        "sequence": 8192, "global_batch": 2048, "model": "llama3-405b", "parameters": 405e9,
        "active_parameters": 405e9,
        "num_devices": 16_384, "device": "h100", "cluster": "h100-llama3", "software": "phalanx",
    }  # fmt: skip
    text = text_of(*plan_text.several({"question": asked, question: best}), wraps=True)
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    assert all(part in text for each in ROWS for part in each.strategy.split(","))
