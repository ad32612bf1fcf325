"""Faults of experts that are planted in the ranks are found, and named."""

from __future__ import annotations

import pytest
from expert_mutants import JOBS, OF_MUON
from mutants import planted

from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy
from phalanx.verify.cases import awkward_shapes, configured_case
from phalanx.verify.harness import verify_case
from phalanx.verify.settings import VerifyConfig
from phalanx.verify.verdict import Verdict


def verdicts_on_ranks(number: int) -> dict[tuple[str, str], Verdict]:
    found: dict[tuple[str, str], Verdict] = {}
    for text, mutants in JOBS[number].items():
        strategy = Strategy.parse(text)
        comm = Ranks(strategy)
        kind = "muon" if mutants is OF_MUON else "adamw"
        settings = OptimizerConfig(kind=kind, lr=1e-2, clip_norm=0.2, warmup_steps=0)
        config = VerifyConfig(steps=2, optimizer=settings)
        shapes = awkward_shapes(strategy)
        for name, (case, patches, _, _) in mutants.items():
            with planted(*patches):
                found[text, name] = verify_case(configured_case(shapes[case], strategy, config), strategy, comm)
    return found
