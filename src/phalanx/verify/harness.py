"""Check whether a model under a strategy computes the same numbers as on one process.

All ranks compute each step under the strategy, and rank 0 also computes the step of the reference
(reference.py); every loss, gradient, norm, moment and weight is compared. If a value differs, the
step is repeated with recording, to find the module at fault (locate.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm import reductions, shared_memory
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry
from phalanx.comm.together import broadcast_object, gather_objects, gather_on_first
from phalanx.config import OptimizerConfig
from phalanx.data.rows import cast_batch, tensors_of
from phalanx.debug.check import CollectiveCheck
from phalanx.errors import ConfigError, RankFailed
from phalanx.launch.local import run_ranks
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.models.decoder import Decoder
from phalanx.parallel import reduce
from phalanx.parallel.batch_norm import Statistics
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import copied_on_meta
from phalanx.strategy import Strategy, refuse_first_come, require_built
from phalanx.train.objective import Objective, check_build
from phalanx.verify.batches import split
from phalanx.verify.causes import likely_causes
from phalanx.verify.compare import DTYPES, Difference, StepwiseReference, compare_values, worst
from phalanx.verify.judge import unequal_ranks
from phalanx.verify.locate import locate
from phalanx.verify.record import (
    Case,
    SplitRun,
    check_rows,
    full_tensors,
)
from phalanx.verify.reference import RankFacts, StepRecord, in_training
from phalanx.verify.settings import EVALUATION
from phalanx.verify.verdict import Place, Sent, Verdict, Whereabouts, failed

Report = Callable[[Verdict, float], None]
"""Function that receives the verdict on a case, and the time that the case took, in seconds."""

WAIT_S = 3600.0
"""Longest wait for rank 0, which computes the reference, in seconds."""


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
    return [_beside_one_process(verdict, cases[verdict.case]) for verdict in verdicts]


def _beside_one_process(verdict: Verdict, case: Case) -> Verdict:
    """Add to a verdict that differs whether one process of the trainer differs too."""
    if verdict.first is None:
        return verdict
    alone = dataclasses.replace(case, accumulation=1)
    (other,) = run_ranks(verify_on_ranks, 1, {"": alone}, Strategy(), device=case.device)[0]
    words = (
        "one process of the trainer computes the same as plain PyTorch, so the fault is in the "
        "split, or in a module or objective that is not a sum over samples"
        if other.is_equal
        else f"one process of the trainer differs from plain PyTorch too, first at {other.first}: "
        "the fault is not in the split alone"
    )
    return dataclasses.replace(verdict, causes=[*verdict.causes, words])


_SMALL = (
    (reduce, "BUCKET_BYTES", 64),
    (shared_memory, "SMALL_BYTES", 64),
    (reductions, "_PIECE", 8),
)


@contextmanager
def small_pieces() -> Generator[None]:
    """Cut tensors at such sizes that small tensors take the paths of large ones, in this block."""
    before = [getattr(module, name) for module, name, _ in _SMALL]
    for module, name, size in _SMALL:
        setattr(module, name, size)
    try:
        yield
    finally:
        for (module, name, _), size in zip(_SMALL, before, strict=True):
            setattr(module, name, size)


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
    differences, unequal, facts, entries, sent, begin = _compare_steps(case, strategy, comm, at)
    replicas = [f"step {each.step}: {each.what}" for each in unequal]
    verdict = Verdict(str(strategy), differences, replicas, sent, entries)
    if verdict.first is not None:
        place = locate(case, strategy, comm, verdict.first, begin=begin)
    elif unequal:
        place = unequal[0]
    else:
        return verdict
    causes = likely_causes(case, strategy, differences, facts)
    return dataclasses.replace(verdict, place=place, causes=causes)


_Compared = tuple[
    list[Difference], list[Place], list[RankFacts], list[Entry], list[Sent], StepRecord | None
]


def _compare_steps(
    case: Case, strategy: Strategy, comm: Ranks, at: Whereabouts | None
) -> _Compared:
    """Compare step by step, to the end of the first step that differs.

    All ranks return the same values, except the last: the state from which the reference starts
    the differing step, on rank 0 only.
    """
    run, at = SplitRun(case, strategy, comm), at or Whereabouts()
    at.follow(run.model)
    ours = {"weight": full_tensors(dict(run.model.named_parameters()), comm)}
    differences, unequal, facts = list[Difference](), list[Place](), list[RankFacts]()
    beside = StepwiseReference(case, comm.device) if comm.is_first else None
    differences += beside.compare_first(ours) if beside else []
    is_equal = True
    at.step = 0
    for step, (record, of_rank) in enumerate(run.steps(at.phase)):
        at.step = step + 1
        facts = gather_on_first(of_rank)
        if beside is not None:
            unequal += unequal_ranks(step, facts)
            differences += beside.compare(step, record)
        is_equal = not unequal and all(d.passes for d in differences)
        if not (is_equal := broadcast_object(is_equal)):
            break
    if is_equal:
        differences += _compare_evaluation(case, run, comm, beside)
    run.close()
    entries = run.ledger.entries()
    sent = _sent(case, strategy, comm, entries) if beside else []
    found = broadcast_object((differences, unequal, facts, entries, sent))
    return *found, beside and beside.begin


def _compare_evaluation(
    case: Case, run: SplitRun, comm: Ranks, beside: StepwiseReference | None
) -> list[Difference]:
    """Compare the model's output in `eval()`; every rank calls this together."""
    made = run.evaluate()
    expected, moved = broadcast_object(beside.evaluated() if beside else (torch.empty(0), []))
    if expected.ndim == 0:
        total = torch.zeros((), dtype=torch.float64, device=comm.device)
        made = comm.all_reduce(total if made is None else made.double().to(total), "loss")
    else:
        rows = run.evaluated_rows
        expected, moved = expected[rows], [each[rows] for each in moved]
    if made is None:
        found = list[Difference]()
    else:
        others, step = [{"": each} for each in moved], len(case.batches) - 1
        found = compare_values(
            step, EVALUATION, {"": made.cpu()}, {"": expected}, others, case.torch_dtype
        )
    of_all = [each for of_rank in gather_objects(found) for each in of_rank]
    return [worst(of_all)]


def _sent(case: Case, strategy: Strategy, comm: Ranks, entries: Sequence[Entry]) -> list[Sent]:
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
    for e in (*plan.traffic(sizes), *first_time):
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
