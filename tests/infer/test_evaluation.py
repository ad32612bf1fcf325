"""lm-evaluation-harness gives the served model the scores that its own backend gives it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/hugging_face"))


@pytest.mark.slow
def test_scores_are_those_of_the_harness_itself(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from evaluation import TASKS, compare

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the harness and its dependencies
        rows = compare(tmp_path)
    assert {row["metric"].split()[0] for row in rows} == set(TASKS)
    for row in rows:
        assert row["served"] == pytest.approx(row["hf"], rel=1e-6), row
        assert row["largest_gap"] < 1e-4, row
        assert "perplexity" in row["metric"] or row["equal"] == row["requests"], row
