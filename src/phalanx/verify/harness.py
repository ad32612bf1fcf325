"""Does this strategy of this model compute what one process computes?

Rank 0 computes each step of the reference (reference.py) and then, with the other ranks, the same
step under the strategy; every loss, gradient, norm, moment and weight is compared. Where something
differs, the step runs again, recorded, to find the module at fault (locate.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry
from phalanx.comm.together import broadcast_object, gather_objects
from phalanx.config import OptimizerConfig
from phalanx.debug.check import CollectiveCheck
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy, require_built
from phalanx.train.objective import Objective
from phalanx.verify.batches import split, tensors_of
from phalanx.verify.causes import likely_causes
from phalanx.verify.compare import Difference, compare_first_weights, compare_step
from phalanx.verify.locate import locate
from phalanx.verify.record import Case, RankFacts, SplitRun, Unequal, check_rows, unequal_ranks
from phalanx.verify.reference import ReferenceRun
from phalanx.verify.tolerance import DTYPES
from phalanx.verify.verdict import Place, Sent, Verdict

WAIT_S = 3600.0
"""How long ranks may wait for rank 0, which computes the reference."""


def verify(
    build: Callable[[], nn.Module],
    batches: Sequence[Any],
    strategy: str | Strategy,
    objective: Objective,
    *,
    accumulation: int = 1,
    dtype: str = "float64",
    optimizer: OptimizerConfig | None = None,
    roles: Mapping[str, str] | None = None,
    debug_comm: bool = False,
    device: str = "cpu",
) -> Verdict:
    """Compare a strategy with one process on your own module and batches.

    Args:
        build: importable function that returns the module with its first weights; it must draw the
            same ones in every process.
        batches: the global batch of each step: a tensor, or a mapping, sequence or dataclass of
            tensors, whose first dimension is the samples.
        strategy: such as "dp2".
        objective: how a microbatch becomes a sum of losses and a number of valid tokens.
        accumulation: microbatches each rank cuts its share into; one process always takes the
            whole.
        dtype: "float64", "float32" or "bfloat16", of weights and arithmetic; floating-point tensors
            of the batches are cast to it.
        optimizer: AdamW's settings; its defaults if None.
        roles: patterns of module names to roles for tp, as {"layers.*.up": "column"}, see
            docs/tensor.md; known for our decoder and transformers' Llama, GPT-2 and BERT.
        debug_comm: compare each collective of all ranks before it runs, see docs/debugging.md.
        device: "cpu" (gloo), or "cuda" (NCCL, one GPU a rank).

    Returns:
        The verdict; `verdict.is_equal` and `str(verdict)` say it all.

    Raises:
        ConfigError: a batch has too few rows.
        StrategyError: the strategy is not built, or does not split this module.
        CollectiveMismatch: under `debug_comm`, the ranks' calls differ.
    """
    parsed = strategy if isinstance(strategy, Strategy) else Strategy.parse(strategy)
    require_built(parsed)
    if dtype not in DTYPES:
        raise ConfigError(f"verify: dtype is '{dtype}'; expected one of {', '.join(DTYPES)}")
    if not batches:
        raise ConfigError("verify: no batches; give at least one")
    settings = optimizer or OptimizerConfig()
    case = Case(build, objective, batches, accumulation, dtype, settings, roles, device=device)
    return compare_cases({"": case}, parsed, debug_comm)[0]


def compare_cases(
    cases: Mapping[str, Case], strategy: Strategy, debug_comm: bool = False
) -> list[Verdict]:
    """Run cases on one start of the ranks, and where one differs, on one rank too.

    In a job that others have started, its ranks run them, and all call this together.

    Args:
        cases: by what they are called; all on one device.
        strategy: how to split.
        debug_comm: compare each collective of all ranks before it runs.

    Raises:
        ConfigError: a batch has too few rows.
        StrategyError: a model cannot be split so.
    """
    for case in cases.values():
        check_rows(case, strategy.data_ranks)
        Plan(strategy, case.build(), roles=case.roles)
    if dist.is_initialized():
        return verify_on_ranks(cases, str(strategy), debug_comm)
    device = next(iter(cases.values())).device
    verdicts: list[Verdict] = run_ranks(
        verify_on_ranks, strategy.num_ranks, cases, str(strategy), debug_comm,
        device=device, timeout_s=WAIT_S,
    )[0]  # fmt: skip
    return [
        _beside_one_process(verdict, cases[verdict.case]) if strategy.num_ranks > 1 else verdict
        for verdict in verdicts
    ]


def _beside_one_process(verdict: Verdict, case: Case) -> Verdict:
    """Say of what differs whether one process of the trainer differs as well."""
    if verdict.first is None:
        return verdict
    alone = dataclasses.replace(case, accumulation=1)
    (other,) = run_ranks(verify_on_ranks, 1, {"": alone}, "dp1", device=case.device)[0]
    words = (
        "one process of the trainer computes what plain PyTorch does, so it is the split, or a "
        "module or objective that is no sum over samples"
        if other.is_equal
        else f"one process of the trainer differs from plain PyTorch too, first at {other.first}: "
        "the fault is not in the split alone"
    )
    return dataclasses.replace(verdict, causes=[*verdict.causes, words])


def verify_on_ranks(
    cases: Mapping[str, Case], strategy_text: str, debug_comm: bool = False
) -> list[Verdict]:
    """Return the verdict of each case; every rank of a job calls this together."""
    strategy = Strategy.parse(strategy_text)
    comm = Ranks(strategy, next(iter(cases.values())).device)
    verdicts: list[Verdict] = []
    for name, case in cases.items():
        with ExitStack() as stack:
            if debug_comm:
                stack.enter_context(CollectiveCheck(comm.mesh))
            verdict = verify_case(case, strategy, comm)
        verdicts.append(dataclasses.replace(verdict, case=name))
    return verdicts


def verify_case(case: Case, strategy: Strategy, comm: Ranks) -> Verdict:
    """Return the verdict on a case; every rank of `comm` calls this together."""
    differences, unequal, facts, entries = _compare_steps(case, strategy, comm)
    sent = _sent(case, strategy, entries)
    verdict = Verdict(str(strategy), differences, [str(each) for each in unequal], sent, entries)
    if verdict.first is None and not unequal:
        return verdict
    if verdict.first is None:
        first = unequal[0]
        module = first.name.rpartition(".")[0] if first.name else None
        place = Place(module, first.text, first.step, first.rank)
    else:
        place = locate(case, strategy, comm, verdict.first)
    causes = likely_causes(case.build(), strategy, case.accumulation, differences, facts)
    return dataclasses.replace(verdict, place=place, causes=causes)


def _compare_steps(
    case: Case, strategy: Strategy, comm: Ranks
) -> tuple[list[Difference], list[Unequal], list[RankFacts], list[Entry]]:
    """Compare step by step, to the end of the first that differs; all ranks return the same."""
    is_first, device = dist.get_rank() == 0, comm.device
    reference = ReferenceRun(case, device) if is_first else None
    # In float64 the limit is fixed, and nothing has to be perturbed.
    needs_limits = is_first and case.dtype != "float64"
    perturbed = ReferenceRun(case, device, perturbation=1) if needs_limits else None
    run = SplitRun(case, strategy, comm)
    ours = run.first_weights()
    differences: list[Difference] = []
    if reference is not None:
        weights = {n: p.detach().cpu() for n, p in reference.model.named_parameters()}
        differences = compare_first_weights(ours, weights)
    expected = None if reference is None else reference.steps()
    moved = None if perturbed is None else perturbed.steps()
    unequal: list[Unequal] = []
    facts: list[RankFacts] = []
    for step, (record, of_rank) in enumerate(run.steps()):
        facts = gather_objects(of_rank)
        unequal += unequal_ranks(step, facts)
        if expected is not None:
            other = None if moved is None else next(moved)
            differences += compare_step(step, record, next(expected), other)
        if broadcast_object(bool(unequal) or not all(d.passes for d in differences)):
            break
    return broadcast_object((differences, unequal, facts, run.sent()))


def _sent(case: Case, strategy: Strategy, entries: Sequence[Entry]) -> list[Sent]:
    """Set what this rank sent in the last step beside what the strategy's account predicts."""
    if not entries:  # one rank, or it stopped before the last step
        return []
    microbatches = split(case.batches[-1], 0, strategy.data_ranks, case.accumulation)
    shapes = [max((t.shape for t in tensors_of(m)), key=len) for m in microbatches]
    model = case.build().to(getattr(torch, case.dtype))
    sizes = [(shape[0], shape[1] if len(shape) > 1 else 1) for shape in shapes]
    predicted = {
        (e.phase, e.axis, e.op): e.payload_bytes
        for e in Plan(strategy, model, roles=case.roles).traffic(sizes)
    }
    for axis in ("dp", "fsdp"):  # the loss law: the number of valid tokens, and the loss
        if getattr(strategy, axis).degree > 1:
            predicted |= {(phase, axis, "all_reduce"): 8 for phase in ("count", "metrics")}
    counted = {(e.phase, e.axis, e.op): e.payload_bytes for e in entries}
    return [
        Sent(*key, counted.get(key, 0), predicted.get(key, 0), isinstance(model, Decoder))
        for key in dict.fromkeys([*counted, *predicted])
    ]
