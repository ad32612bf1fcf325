"""Faults that are planted in the ranks are found, and the module at fault is named."""

from __future__ import annotations

import pytest
from mutants import OF_CP, OF_DP, OF_FSDP, OF_TP, SLOW, planted

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy
from phalanx.verify.cases import awkward_shapes, configured_case
from phalanx.verify.harness import verify_case
from phalanx.verify.settings import VerifyConfig
from phalanx.verify.verdict import Verdict

GROUPS = {"dp2": OF_DP, "fsdp2": OF_FSDP, "tp2": OF_TP, "cp2": OF_CP}


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


# One test a job: pytest-xdist may give two tests to two processes, and each would run it.
@pytest.mark.parametrize(
    ("text", "is_slow"),
    [*((text, False) for text in GROUPS), *(by_hand(text, True) for text in GROUPS)],
)
def test_a_planted_fault_is_found_and_named(
    text: str, is_slow: bool, subtests: pytest.Subtests
) -> None:
    found = run_ranks(verdicts_on_ranks, 2, text, is_slow)[0]
    planned = {name for name in GROUPS[text] if (name in SLOW) == is_slow}
    assert set(found) == {*planned, *awkward_shapes(Strategy.parse(text))}
    for name, verdict in found.items():
        with subtests.test(name):
            if name not in GROUPS[text]:
                assert verdict.is_equal, str(verdict)
                continue
            _, _, module, words = GROUPS[text][name]
            assert not verdict.is_equal
            assert verdict.place is not None
            assert verdict.place.module == module, str(verdict)
            assert words in str(verdict)
