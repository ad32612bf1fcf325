"""Check whether a model under a strategy computes the same numbers as on one process.

Cases (record.py) go to the prover; the bytes that a case sends are compared with the prediction.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry
from phalanx.comm.row_counts import RowCounts
from phalanx.comm.together import broadcast_object
from phalanx.config import OptimizerConfig
from phalanx.data.rows import cast_batch, tensors_of
from phalanx.debug.check import CollectiveCheck
from phalanx.errors import ConfigError, RankFailed
from phalanx.launch.local import run_ranks
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.models.decoder import Decoder
from phalanx.parallel.batch_norm import Statistics
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import copied_on_meta
from phalanx.strategy import Strategy, refuse_first_come, require_built
from phalanx.train.objective import Objective, check_build
from phalanx.verify.batches import split
from phalanx.verify.compare import DTYPES
from phalanx.verify.prover import WAIT_S, Proof, prove, small_pieces
from phalanx.verify.record import Case, CaseRun, check_rows
from phalanx.verify.reference import in_training
from phalanx.verify.verdict import Sent, Verdict, Whereabouts, failed

Report = Callable[[Verdict, float], None]
"""Function that receives the verdict on a case, and the time that the case took, in seconds."""


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
    batch_norm: Statistics | None = None,
    dropout_seed: int | None = None,
) -> Verdict:
    """Compare a strategy with one process on your own module and batches.

    Args:
        build: importable function that returns a new module, with equal initial weights each time.
        batches: global batch of each step: tensors with samples as first dimension, or mappings,
            sequences or dataclasses of such tensors.
        strategy: strategy, such as "dp2".
        objective: computes the sum of losses and the number of valid tokens of a microbatch.
        accumulation: microbatches into which each rank splits its rows; the reference has one.
        dtype: data type of weights, arithmetic and batches: "float64", "float32" or "bfloat16".
        optimizer: AdamW's settings; its defaults if None.
        roles: patterns of module names -> roles for tp, such as {"layers.*.up": "column"}, for
            modules that docs/strategies.md does not name.
        debug_comm: whether to compare each collective between ranks, see docs/debugging.md.
        device: "cpu" (gloo), or "cuda" (NCCL, one GPU per rank).
        batch_norm: "global" if BatchNorm takes its mean and variance over the rows of all ranks.
        dropout_seed: seed of dropout masks keyed by sample, without tp; None: each process draws.

    Returns:
        The verdict; see `verdict.is_equal` and `str(verdict)`.

    Raises:
        ConfigError: a batch has too few rows, or `build` returns the same module twice.
        StrategyError: the strategy is not available, or cannot split this module.
        CollectiveMismatch: with `debug_comm`, the ranks' collective calls differ.
    """
    parsed = strategy if isinstance(strategy, Strategy) else Strategy.parse(strategy)
    require_built(parsed)
    if dtype not in DTYPES:
        raise ConfigError(f"verify: dtype is '{dtype}'; expected one of {', '.join(DTYPES)}")
    if not batches:
        raise ConfigError("verify: no batches; give at least one")
    check_build("verify", build)
    settings = optimizer or OptimizerConfig()
    case = Case(
        build, objective, batches, accumulation, dtype, settings, roles,
        device=device, batch_norm=batch_norm, dropout_seed=dropout_seed,
    )  # fmt: skip
    return compare_cases({"": case}, parsed, debug_comm)[0]


def compare_cases(
    cases: Mapping[str, Case],
    strategy: Strategy,
    debug_comm: bool = False,
    report: Report | None = None,
) -> list[Verdict]:
    """Run all cases (name -> case) on newly started ranks; run a case that differs on one rank too.

    In an existing job, its ranks run the cases, and all of them call this together. All cases use
    one device type; see `verify` for the other arguments. A rank that dies ends the run.

    `report` must be importable; the first rank calls it with each verdict and its time in seconds.
    """
    for case in cases.values():
        check_rows(case, strategy.data_ranks)
        Plan(strategy.of_worker, case.build(), roles=case.roles)
    refuse_first_come(strategy)
    if dist.is_initialized():
        return verify_on_ranks(cases, strategy, debug_comm, report)
    device = next(iter(cases.values())).device
    try:
        verdicts: list[Verdict] = run_ranks(
            verify_on_ranks, strategy.num_ranks, cases, strategy, debug_comm, report,
            device=device, timeout_s=WAIT_S,
        )[0]  # fmt: skip
    except RankFailed as failure:
        return [failed(str(strategy), failure)]
    if strategy.num_ranks == 1 or is_under_torchrun():  # a job can start no further process
        return verdicts
    for number, verdict in enumerate(verdicts):
        if verdict.first is not None:  # say whether one process of the trainer differs too
            alone = dataclasses.replace(cases[verdict.case], accumulation=1)
            (other,) = run_ranks(verify_on_ranks, 1, {"": alone}, Strategy(), device=device)[0]
            words = (
                "one process of the trainer computes the same as plain PyTorch, so the fault is in "
                "the split, or in a module or objective that is not a sum over samples"
                if other.is_equal
                else "one process of the trainer differs from plain PyTorch too, first at "
                f"{other.first}: the fault is not in the split alone"
            )
            verdicts[number] = dataclasses.replace(verdict, causes=[*verdict.causes, words])
    return verdicts


def verify_on_ranks(
    cases: Mapping[str, Case],
    strategy: Strategy,
    debug_comm: bool = False,
    report: Report | None = None,
) -> list[Verdict]:
    """Return the verdict of each case; every rank of a job calls this together."""
    comm = Ranks(strategy, next(iter(cases.values())).device)
    verdicts: list[Verdict] = []
    for name, case in cases.items():
        start_s = time.monotonic()
        check = CollectiveCheck(comm) if debug_comm else nullcontext()
        with small_pieces(), Whereabouts(name) as at, check:
            verdict = verify_case(case, strategy, comm, at)
        verdicts.append(dataclasses.replace(verdict, case=name))
        if report is not None and comm.is_first:
            report(verdicts[-1], time.monotonic() - start_s)
    return verdicts


def verify_case(
    case: Case, strategy: Strategy, comm: Ranks, at: Whereabouts | None = None
) -> Verdict:
    """Return the verdict on a case; every rank of `comm` calls this together.

    `at` tracks the module and phase in which this rank is.
    """
    runs: list[CaseRun] = []

    def opened(_is_again: bool) -> CaseRun:
        runs.append(CaseRun(case, strategy, comm))
        return runs[-1]

    proof = Proof(str(strategy), strategy, case, opened, CaseRun.rows, CaseRun.take)
    verdict = prove(proof, at or Whereabouts())
    entries = runs[0].ledger.entries()
    sent = _sent(case, strategy, comm, entries, runs[0].routed) if comm.is_first else []
    sent, entries = broadcast_object((sent, entries))
    return dataclasses.replace(verdict, sent=sent, entries=entries)


def _sent(
    case: Case, strategy: Strategy, comm: Ranks, entries: Sequence[Entry], routed: list[RowCounts]
) -> list[Sent]:
    """Return the bytes this rank sent in the last step, each with the strategy's prediction."""
    if not entries:  # one rank, or the comparison ended before the last step
        return []
    sizes_of_steps = list[list[tuple[int, int]]]()  # of the first rank: (rows, positions)
    microbatch_of = dict[tuple[int, int], Any]()
    for batch in case.batches:
        microbatches = split(batch, 0, strategy.data_ranks, case.accumulation)
        shapes = [max((t.shape for t in tensors_of(m)), key=len) for m in microbatches]
        sizes = [(shape[0], shape[1] if len(shape) > 1 else 1) for shape in shapes]
        sizes_of_steps.append(sizes)
        microbatch_of |= zip(sizes, microbatches, strict=True)
    *before, sizes = sizes_of_steps

    def run_on_shapes(model: nn.Module, size: tuple[int, int]) -> Tensor:
        microbatch = cast_batch(microbatch_of[size], case.torch_dtype, torch.device("meta"))
        (objective,) = copied_on_meta((case.objective,))
        return objective.loss_sum(model, microbatch, 0)

    model = in_training(case.build()).to(case.torch_dtype)
    plan = Plan(
        strategy,
        model,
        roles=case.roles,
        batch_norm=case.batch_norm,
        run_on_shapes=run_on_shapes,
    )
    first_time = plan.header_traffic(sizes, list(itertools.chain(*before)))
    predicted = Counter[tuple[str, str, str]]()
    for e in (*plan.traffic(sizes, routed), *first_time):
        predicted[e.phase, e.axis, e.op] += e.payload_bytes
    for phase, name in (("count", "data"), ("metrics", "loss")):  # valid tokens, and the loss
        for axis in comm.axes_of(name):
            if comm.size(axis) > 1:
                predicted[phase, axis, "all_reduce"] = 8
    counted = {(e.phase, e.axis, e.op): e.payload_bytes for e in entries}
    is_exact = isinstance(model, Decoder)
    unknown = 0 if is_exact else None
    return [
        Sent(*key, counted.get(key, 0), predicted.get(key, unknown), is_exact)
        for key in dict.fromkeys([*counted, *predicted])
    ]
