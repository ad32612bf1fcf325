"""Faults that are planted in the ranks are found, and the module at fault is named."""

from __future__ import annotations

import pytest
from mutants import OF_CP, OF_DP, OF_FSDP, OF_TP, SLOW, Mutant, planted
from pipeline_mutants import OF_STAGES, OF_STAGES_SPLIT

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy
from phalanx.verify.cases import awkward_shapes, configured_case
from phalanx.verify.harness import verify_case
from phalanx.verify.settings import VerifyConfig
from phalanx.verify.verdict import Verdict

JOBS: list[dict[str, dict[str, Mutant]]] = [
    {"dp2": OF_DP}, {"fsdp2": OF_FSDP}, {"tp2": OF_TP}, {"cp2": OF_CP}, OF_STAGES, OF_STAGES_SPLIT,
]  # fmt: skip
"""Of each: strategies of as many ranks, and the mutants of each."""


def verdicts_on_ranks(number: int, is_slow: bool) -> dict[tuple[str, str], Verdict]:
    """Run the mutants of a job; in the slow run, after those of a strategy what has no fault."""
    found: dict[tuple[str, str], Verdict] = {}
    for text, mutants in JOBS[number].items():
        strategy = Strategy.parse(text)
        comm = Ranks(strategy)
        cases = {
            name: configured_case(shape, strategy, VerifyConfig(steps=2))
            for name, shape in awkward_shapes(strategy).items()
        }
        for name, (case, patches, _, _) in mutants.items():
            if (name in SLOW) != is_slow:
                continue
            with planted(*patches):
                found[text, name] = verify_case(cases[case], strategy, comm)
        for name, case in cases.items() if is_slow else ():
            found[text, name] = verify_case(case, strategy, comm)
    return found


# One test a job: pytest-xdist may give two tests to two processes, and each would run it.
@pytest.mark.parametrize(
    ("number", "is_slow"),
    [
        *((number, False) for number in range(5)),
        *(by_hand(number, False) for number in range(5, len(JOBS))),
        *(by_hand(number, True) for number in range(len(JOBS))),
    ],
    ids=lambda value: next(iter(JOBS[value])) if type(value) is int else None,
)
def test_a_planted_fault_is_found_and_named(
    number: int, is_slow: bool, subtests: pytest.Subtests
) -> None:
    job = JOBS[number]
    num_ranks = Strategy.parse(next(iter(job))).num_ranks
    found = run_ranks(verdicts_on_ranks, num_ranks, number, is_slow, threads=1)[0]
    planned = {(text, name) for text in job for name in job[text] if (name in SLOW) == is_slow}
    right = {
        (text, name)
        for text in (job if is_slow else ())
        for name in awkward_shapes(Strategy.parse(text))
    }
    assert set(found) == planned | right
    for (text, name), verdict in found.items():
        with subtests.test(f"{text}: {name}"):
            if (text, name) in right:
                assert verdict.is_equal, str(verdict)
                continue
            _, _, module, words = job[text][name]
            assert not verdict.is_equal
            assert verdict.place is not None
            assert verdict.place.module == module, str(verdict)
            assert words in str(verdict)
