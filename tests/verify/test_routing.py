"""The experts of tokens: sets, margins, ties, and routes that the reference replays."""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mutants import Patch, on_rank, planted
from torch import Tensor

from phalanx.cli.main import main
from phalanx.launch.local import run_ranks
from phalanx.models import experts
from phalanx.models.experts import Router
from phalanx.verify import cases
from phalanx.verify.plain import PlainRouter
from phalanx.verify.reference import Routed
from phalanx.verify.routing import Route, compare_routes, joined

SMALL = (
    "--model qwen3-30b-a3b --shape.num-layers 1 --shape.hidden 24 --shape.num-heads 2"
    " --shape.num-kv-heads 1 --shape.head-dim 12 --shape.vocab-size 67"
    " --shape.experts num_experts=6,top_k=2,ffn=12 --steps 1 --seq-len 9 --json"
)


def _with_equal_experts(right: Any) -> Any:
    """The router has the same weights for the first two experts, so that their scores are equal."""

    def wrong(*args: Any) -> Any:
        model = right(*args)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, Router):
                    module.weight[1] = module.weight[0]
        return model

    return wrong


def _first_rejected_of_near(right: Any) -> Any:
    """Takes the first rejected expert in place of the last selected one, if both are nearly equal.

    The distance is below 1e-3 of the largest score: what rounding to bfloat16 may decide.
    """

    def wrong(self: Router, scores_NE: Tensor) -> Tensor:
        k = self.experts.top_k
        experts_NE = experts._best(scores_NE, k + 1)
        near_N = scores_NE.gather(1, experts_NE)[:, -2:].diff().abs()[:, 0] < 1e-3 * scores_NE.amax(
            1
        )
        found = right(self, scores_NE)
        found[near_N, -1] = experts_NE[near_N, -1]
        return found

    return wrong


def _without_replay(right: Any) -> Any:
    def wrong(self: PlainRouter, x: Tensor) -> Any:
        self.replayed = None
        return right(self, x)

    return wrong


def _second_best(right: Any) -> Any:
    """Rank 1 selects the experts from the second on."""
    return on_rank(
        1, lambda self, s: experts._best(s, self.experts.top_k + 1)[:, 1:].contiguous(), right
    )


PATCHES: dict[str, Patch] = {
    "equal experts": (cases, "initial_decoder", _with_equal_experts),
    "near": (Router, "_select", _first_rejected_of_near),
    "second best": (Router, "_select", _second_best),
    "no replay": (PlainRouter, "forward", _without_replay),
}


def said_by_the_verb(*runs: tuple[str, tuple[str, ...]]) -> list[tuple[int, Any]]:
    """Return exit code and verdict of `phalanx verify`, of each (words, names of patches)."""
    found: list[tuple[int, Any]] = []
    for words, names in runs:
        output = io.StringIO()
        with (
            planted(*(PATCHES[name] for name in names)),
            contextlib.redirect_stdout(output),
            patch.dict(os.environ),
        ):
            for name in ("RANK", "WORLD_SIZE"):  # else the verb joins the ranks of a torchrun
                del os.environ[name]
            code = main(["verify", *words.split(), *SMALL.split()])
        (document,) = (line for line in output.getvalue().splitlines() if line.startswith("{"))
        found.append((code, json.loads(document)["verdicts"][0]))
    return found


def test_the_plain_verb_judges_sets_of_experts() -> None:
    runs = [
        ("ep2", ("equal experts",)),
        ("ep2", ("second best",)),
        ("ep2", ("near",)),
        ("ep2 --dtype bfloat16", ("near",)),
        ("ep2 --dtype bfloat16", ("near", "no replay")),
    ]
    found = run_ranks(said_by_the_verb, 2, *runs, threads=1)[0]
    tied, wrong, near, replayed, alone = (verdict for _, verdict in found)
    assert [code for code, _ in found] == [1, 1, 1, 0, 0]
    words = "has equal scores on both sides of the limit: a tie, which rounding decides; change the"
    assert words in tied["place"]["what"]
    for verdict in (wrong, near):
        assert verdict["place"]["module"] == "blocks.0.mlp.router"
    assert wrong["largest_errors"]["routing"] > 1e-2
    assert 0 < near["largest_errors"]["routing"] < 1e-3
    # The reference's own experts are others, where the ranks have selected within rounding.
    assert replayed["largest_errors"]["gradient"] < 0.06
    assert alone["largest_errors"]["gradient"] > 0.12


def differences(margin: float, ours: int, dtype: torch.dtype = torch.float64) -> Any:
    """Compare one token of expert `ours` with one process, which takes expert 1 by a margin."""
    selected_BTE = torch.tensor([[[False, True, False]]])
    routed = {"r": Routed(selected_BTE, torch.tensor([[margin]], dtype=torch.float64))}
    one = torch.zeros(1, dtype=torch.int64)
    route = Route("r", one + 5, one, torch.full((1, 1, 1), ours))
    assert joined([[route]], 5)["r"].tolist() == [[[ours]]]
    (found,) = compare_routes(0, [[route]], 5, routed, [routed], dtype)
    return found


@pytest.mark.parametrize(
    ("margin", "ours", "dtype", "passes", "words"),
    [
        (1e-3, 1, torch.float64, True, ""),
        (
            1e-3,
            2,
            torch.float64,
            False,
            "position 0 of row 0 goes to experts 2 on rank 0, and to 1",
        ),
        (1e-12, 2, torch.float64, True, "by a margin of 1.0e-12"),
        (0.0, 1, torch.float64, True, "equal scores on both sides of the limit"),
        (0.0, 1, torch.bfloat16, True, ""),
        (1e-3, 2, torch.bfloat16, True, "by a margin of 1.0e-03"),
        (0.5, 2, torch.bfloat16, False, "by a margin of 5.0e-01"),
    ],
)
def test_a_set_that_differs_has_its_margin_as_error(
    margin: float, ours: int, dtype: torch.dtype, passes: bool, words: str
) -> None:
    """A row that passes and has a problem is a tie, which the prover refuses in float64."""
    found = differences(margin, ours, dtype)
    assert found.passes == passes and found.error == (margin if ours == 2 else 0.0)
    assert words in found.problem and bool(words) == bool(found.problem)
