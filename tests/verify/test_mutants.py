"""Faults that are planted in the ranks are found, and the module at fault is named."""

from __future__ import annotations

import functools

import pytest
from mutants import OF_DP, OF_FSDP, OF_TP, SLOW, Mutant, planted

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy
from phalanx.verify.cases import awkward_shapes, configured_case
from phalanx.verify.harness import verify_case
from phalanx.verify.settings import VerifyConfig
from phalanx.verify.verdict import Verdict

GROUPS = {"dp2": OF_DP, "fsdp2": OF_FSDP, "tp2": OF_TP}


def verdicts_on_ranks(text: str, is_slow: bool) -> dict[str, Verdict]:
    """Run the mutants of a group in one job, and at the end what has no fault."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    cases = {
        name: configured_case(shape, strategy, VerifyConfig(steps=2))
        for name, shape in awkward_shapes(strategy).items()
    }
    found: dict[str, Verdict] = {}
    for name, (case, patches, _, _) in GROUPS[text].items():
        if (name in SLOW) != is_slow:
            continue
        with planted(*patches):
            found[name] = verify_case(cases[case], strategy, comm)
    for name, case in cases.items():
        found[name] = verify_case(case, strategy, comm)
    return found


@functools.cache
def verdicts(text: str, is_slow: bool) -> dict[str, Verdict]:
    return run_ranks(verdicts_on_ranks, 2, text, is_slow)[0]


@pytest.mark.parametrize(
    ("text", "name", "mutant"),
    [
        by_hand(text, name, mutant) if name in SLOW else (text, name, mutant)
        for text, group in GROUPS.items()
        for name, mutant in group.items()
    ],
)
def test_a_planted_fault_is_found_and_named(text: str, name: str, mutant: Mutant) -> None:
    verdict = verdicts(text, name in SLOW)[name]
    assert not verdict.is_equal
    assert verdict.place is not None
    assert verdict.place.module == mutant[2], str(verdict)
    assert mutant[3] in str(verdict)


@pytest.mark.parametrize("text", GROUPS)
def test_what_has_no_fault_passes(text: str) -> None:
    for name in ("llama", "gpt2"):
        verdict = verdicts(text, False)[name]
        assert verdict.is_equal, str(verdict)
