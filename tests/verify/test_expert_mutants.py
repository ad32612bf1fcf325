"""Faults of experts that are planted in the ranks are found, and named."""

from __future__ import annotations

import pytest
from expert_mutants import JOBS, OF_MUON, QUICK
from mutants import planted

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy
from phalanx.verify.cases import awkward_shapes, configured_case
from phalanx.verify.harness import verify_case
from phalanx.verify.settings import VerifyConfig
from phalanx.verify.verdict import Verdict


def verdicts_on_ranks(number: int, is_quick: bool) -> dict[tuple[str, str], Verdict]:
    found: dict[tuple[str, str], Verdict] = {}
    for text, mutants in JOBS[number].items():
        strategy = Strategy.parse(text)
        comm = Ranks(strategy)
        kind = "muon" if mutants is OF_MUON else "adamw"
        settings = OptimizerConfig(kind=kind, lr=1e-2, clip_norm=0.2, warmup_steps=0)
        config = VerifyConfig(steps=2, optimizer=settings)
        shapes = awkward_shapes(strategy)
        for name, (case, patches, _, _) in mutants.items():
            if is_quick and name not in QUICK:
                continue
            with planted(*patches):
                configured = configured_case(shapes[case], strategy, config)
                found[text, name] = verify_case(configured, strategy, comm)
    return found


@pytest.mark.parametrize(("number", "is_quick"), [(0, True), by_hand(0, False), by_hand(1, False)])
def test_a_fault_of_experts_is_found_and_named(
    number: int, is_quick: bool, subtests: pytest.Subtests
) -> None:
    job = JOBS[number]
    num_ranks = Strategy.parse(next(iter(job))).num_ranks
    found = run_ranks(verdicts_on_ranks, num_ranks, number, is_quick, threads=1)[0]
    named = {(text, name) for text in job for name in job[text] if not is_quick or name in QUICK}
    assert set(found) == named
    for (text, name), verdict in found.items():
        with subtests.test(f"{text}: {name}"):
            _, _, module, words = job[text][name]
            assert not verdict.is_equal
            assert verdict.place is not None
            assert module == verdict.place.module, str(verdict)
            assert words in " ".join(str(verdict).split())
