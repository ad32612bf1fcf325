"""The prover: a run opened on the ranks of a job goes in, a verdict comes out.

    ranks     open the run ── step ── step ── ... ── evaluation     the loop that trains it
                                │       │               │
    Witness          snapshots of each step, gathered on rank 0
                                │       │               │
    rank 0          plain PyTorch takes the same step; compare      until a step differs
                                        │
    ranks     repeat the run up to this step, and record its modules: locate.py

`phalanx verify` proves cases (harness.py), `--train` a training on text (training.py), and
`--script` a `Trainer` (script/proof.py). A loop that calls the model itself has no objective that
plain PyTorch could call: script/loop_proof.py compares it with a second start of the script.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from phalanx.comm import reductions, shared_memory
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Phase, no_phase
from phalanx.comm.together import (
    broadcast_object,
    gather_objects,
    gather_on_first,
    on_first_rank,
)
from phalanx.data.rows import count_rows
from phalanx.errors import CheckpointError, PhalanxError, RankFailed
from phalanx.launch.local import run_ranks
from phalanx.parallel import reduce
from phalanx.parallel.skeleton import blocks_of
from phalanx.strategy import Strategy
from phalanx.train.evaluate import Evaluation
from phalanx.train.loop import take_steps
from phalanx.train.session import Session
from phalanx.train.step import StepResult
from phalanx.verify.causes import likely_causes
from phalanx.verify.compare import (
    NARROW_ERROR,
    Difference,
    StepwiseReference,
    compare_step,
    compare_values,
    within,
    worst,
)
from phalanx.verify.locate import Recorded, locate, positions_of
from phalanx.verify.record import Case, CaseRun, Observer
from phalanx.verify.reference import MOMENTS, NORMS, StepRecord, evaluating
from phalanx.verify.routing import Route, RouteRecorder, compare_routes, joined
from phalanx.verify.settings import EVALUATION, ROUTING, VALIDATION
from phalanx.verify.snapshot import (
    Snapshot,
    gradients_of,
    hash_of,
    merged,
    state_of,
)
from phalanx.verify.trace import Recorder
from phalanx.verify.verdict import (
    Place,
    Verdict,
    Whereabouts,
    failed,
    unequal_ranks,
    verdict_of,
)

WAIT_S = 3600.0
"""Longest wait for rank 0, which computes the reference, in seconds."""

_SMALL = (
    (reduce, "BUCKET_BYTES", 64),
    (shared_memory, "SMALL_BYTES", 64),
    (reductions, "_PIECE", 8),
)


@dataclass(frozen=True)
class Proof:
    """A run to prove, and the steps that plain PyTorch takes; every field can be pickled.

    Attributes:
        title: name of the run in the verdict.
        strategy: strategy of the ranks.
        case: the steps of plain PyTorch, from the first step on, even if the run resumes later.
        open: opens the run on a rank; with True, to repeat it, in another folder.
        rows: function of (run, microbatches) -> each one's rows, numbered over all steps.
        take: takes the steps of a run, and notifies an observer of them.
        start: steps before the run resumes.
        every: steps between evaluations of validation data.
        validate: mean loss of a model on the validation data; None without such data.
        precision: narrow type of a run whose data types and losses alone are compared.
        is_repeatable: whether the modules of a repeated run can be recorded; not if compiled.
    """

    title: str
    strategy: Strategy
    case: Case
    open: Callable[[bool], Any]
    rows: Callable[[Any, Sequence[Any]], Sequence[Tensor]]
    take: Callable[[Any, Observer], object] = take_steps
    start: int = 0
    every: int = 1
    validate: Callable[[nn.Module], float] | None = None
    precision: torch.dtype | None = None
    is_repeatable: bool = True


def prove_in_order(
    proofs: Iterable[Proof], *, timeout_s: float = WAIT_S, **options: Any
) -> list[Verdict]:
    """Prove runs, each on new processes, until one differs; `options` are options of `run_ranks`.

    A later proof may resume what an earlier run has saved, so it is made after that run.
    In an existing job, its ranks perform the runs, and all of them call this together.
    """
    verdicts: list[Verdict] = []
    for proof in proofs:
        num_ranks, options = proof.strategy.num_ranks, {**options, "timeout_s": timeout_s}
        try:
            verdicts.append(run_ranks(prove_on_rank, num_ranks, proof, **options)[0])
        except RankFailed as failure:
            verdicts.append(failed(proof.title, failure))
        if not verdicts[-1].is_equal:
            break
    return verdicts


def prove_on_rank(proof: Proof) -> Verdict:
    """Return the verdict on a run; every rank of a job calls this together."""
    with small_pieces(), Whereabouts() as at:
        return prove(proof, at)


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


def once(function: Callable[[], Any]) -> Any:
    """Return `function()`; in a job, call it only on rank 0 and return its result on all ranks."""
    if not dist.is_initialized():
        return function()
    try:
        return on_first_rank(function, "cannot verify the run")
    except CheckpointError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, PhalanxError | OSError):
            raise
        raise cause from None  # an error of the program keeps its traceback


def prove(proof: Proof, at: Whereabouts) -> Verdict:
    """Return the verdict on a run; every rank calls this together.

    `at` tracks the step, phase and module in which this rank is.
    """
    verdict, first, begin, comm = _compared(proof, at)
    if first is None:
        return verdict
    place = locate(proof.case, proof.strategy, comm, first, partial(_repeat, proof), begin)
    return broadcast_object(replace(verdict, place=place))


def _compared(
    proof: Proof, at: Whereabouts
) -> tuple[Verdict, Difference | None, StepRecord | None, Ranks]:
    """Compare a run; also return the difference to locate, and what `locate` needs for that."""
    with proof.open(False) as run:
        at.follow(run.step.model)
        at.step = 0
        witness = Witness(run, proof, at)
        with run.step.watched(witness.phase), run.step.watched(at.phase):
            proof.take(run, witness)
        witness.compare_evaluation()
        verdict, first = witness.conclude()
    return verdict, first, witness.begin, run.comm


def _repeat(proof: Proof, first: Difference) -> Recorded:
    """Repeat a run on this rank up to a difference; record its step, or the evaluation."""
    with proof.open(True) as run:
        recorder = Recorder(
            run.step.model,
            run.step.run,
            copies=proof.strategy.tp.degree == 1,
            suspect=first.name if first.quantity == "gradient" else None,
        )
        observer = _StepRecorder(run, proof, first, recorder)
        with run.step.watched(recorder.phase):
            proof.take(run, observer)
        if first.quantity == EVALUATION:
            recorder.is_on = True
            _evaluate(run, proof.case, observer.latest, recorder.phase)
    begin = _num_rows(proof.case, first.step)
    return recorder, [rows.cpu() - begin for rows in observer.rows]


def _num_rows(case: Case, num_steps: int) -> int:
    return sum(count_rows(batch) for batch in case.batches[:num_steps])


def _evaluate(
    run: Session | CaseRun, case: Case, microbatches: Sequence[Any], phase: Phase = no_phase
) -> Tensor | None:
    """Return `case.infer` of microbatches in `eval()`: their sum, or all their rows.

    None on ranks that do not have the last stage of a pipeline. Every rank calls this together.
    """
    step = run.step

    def forward(batch: Any) -> Tensor:
        with phase("forward"):
            return case.infer(step.objective, step.model, batch)

    outputs: list[Tensor] = []
    with evaluating(step.model):
        for step.run.microbatch, microbatch in enumerate(microbatches):
            output = step.run.infer(microbatch, forward)
            outputs += [] if output is None else [output]
    if not outputs:
        return None
    return torch.stack(outputs).sum() if outputs[0].ndim == 0 else torch.cat(outputs)


class Witness(Observer):
    """Records the steps and evaluations of a run on this rank; on rank 0, compares them.

    Attributes:
        begin: state from which the reference began the latest step, see `StepwiseReference`.
    """

    begin: StepRecord | None = None

    def __init__(self, run: Session | CaseRun, proof: Proof, at: Whereabouts) -> None:
        """Compare the first weights, and the state that a resume has read."""
        self._run, self._proof, self._at = run, proof, at
        self._step, self._comm = run.step, run.comm
        self._snapshot, self._facts = Snapshot.empty(), list[Snapshot]()
        self._microbatches: Sequence[Any] = []
        self._rows: Sequence[Tensor] = []
        # Of this rank, to be compared when the run has ended.
        self._steps, self._evaluations, self._idle = list[int](), list[int](), list[str]()
        self._is_kept = True
        positions = positions_of(proof.strategy, run.comm)
        self._routes = RouteRecorder(run.step.model, run.step.run, positions)
        self._training, self._weights = self._in_training(), self._bits_of_weights()
        self._block_types = set[torch.dtype]()
        for _, block in blocks_of(run.step.model) if proof.precision else ():
            # Blocks of other pipeline stages are never called.
            block.register_forward_hook(lambda _, __, y: self._block_types.add(y.dtype))
        # Of rank 0.
        self._differences, self._unequal, self._problems = (
            list[Difference](), list[Place](), list[Place](),
        )  # fmt: skip
        self._beside: StepwiseReference | None = None
        if self._comm.is_first:
            self._beside = StepwiseReference(proof.case, self._comm.device, proof.start)
        if proof.precision is None:
            self._compare_begin()

    @override
    @contextmanager
    def watching(self, microbatches: Sequence[Any]) -> Generator[None]:
        """Note the rows of a step, and modules that are no longer in training mode."""
        self._note_idle()
        self._microbatches, self._rows = microbatches, self._proof.rows(self._run, microbatches)
        yield

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Record gradients and norms before clipping, and the learning rates before the update.

        In a forward, record the experts of its tokens.
        """
        step = self._step
        self._routes.is_on = name == "forward"
        if name == "clip" and not self.is_over:
            norms = {f"{p:g}": float(step.norm(p)) for p in NORMS}
            tensors = {"gradient": gradients_of(step.model)}
            self._snapshot.add(self._comm, tensors, {"norm": norms})
        if name == "optimizer" and step.num_steps is None:  # the user's scheduler sets the rates
            groups = enumerate(step.optimizer.param_groups)
            rates = {str(number) if number else "": float(group["lr"]) for number, group in groups}
            self._snapshot.add(self._comm, {}, {"learning rate": rates})
        yield
        self._routes.is_on = False

    @override
    def keep(self, result: StepResult) -> None:
        """Record the step that has ended, and compare it unless one differed before."""
        step, done = self._step, self._step.steps_done
        self._steps.append(done)
        self._at.step = done
        if self._proof.validate is not None:
            self._weights = self._bits_of_weights()
        if self.is_over:
            return
        numbers = {"loss": {"": result.loss}, "norm": {f"{step.config.clip_p:g}": result.grad_norm}}
        if step.num_steps is not None:
            numbers["learning rate"] = {"": result.learning_rate}
        snapshot = self._snapshot.add(self._comm, state_of(step.model, step.optimizer), numbers)
        self._snapshot = Snapshot.empty()
        rows = [row for rows in self._rows for row in rows.tolist()]
        ranks = gather_on_first((snapshot, rows, self._routes.take(self._rows)))
        if self._beside is not None:
            self._facts = [of_rank for of_rank, _, _ in ranks]
            read = {row for _, rows, _ in ranks for row in rows}
            self._compare(self._beside, done - 1, read, [routes for _, _, routes in ranks])
        self.is_over = broadcast_object(self.is_over)

    @override
    def evaluation(self, evaluation: Evaluation | None) -> None:
        """Compare an evaluation, and note whether it changed module modes or weights."""
        if evaluation is not None:
            done, beside, validate = evaluation.step, self._beside, self._proof.validate
            self._evaluations.append(done)
            self._note_idle()
            self._is_kept &= self._weights == self._bits_of_weights()
            if beside and validate and beside.steps_done == done and not self.is_over:
                sides = ({"": evaluation.loss}, {"": beside.validated(validate)})
                found = compare_values(done, VALIDATION, *sides)
                limit = NARROW_ERROR if self._proof.precision else found[0].limit
                self._differences.append(within(limit, found[0]))

    def compare_evaluation(self) -> None:
        """Compare the last batch in `eval()`, if no step differs; every rank calls this."""
        case, beside = self._proof.case, self._beside
        if self.is_over or self._proof.precision is not None:
            return
        made = _evaluate(self._run, case, self._microbatches, self.phase)
        routes = gather_on_first(self._routes.take(self._rows))
        expected, moved = torch.empty(0), list[Tensor]()
        if beside is not None:
            first = _num_rows(case, len(case.batches) - 1)
            expected, moved = beside.evaluated(joined(routes, first))
        expected, moved = broadcast_object((expected, moved))
        if expected.ndim == 0:
            total = torch.zeros((), dtype=torch.float64, device=self._comm.device)
            made = self._comm.all_reduce(total if made is None else made.double().to(total), "loss")
        elif made is not None:
            rows = torch.cat([*self._rows]) - _num_rows(case, len(case.batches) - 1)
            expected, moved = expected[rows], [each[rows] for each in moved]
        found: list[Difference] = []
        if made is not None:
            sides = ({"": made.cpu()}, {"": expected}, [{"": each} for each in moved])
            found = compare_values(len(case.batches) - 1, EVALUATION, *sides, case.torch_dtype)
        self._differences.append(worst([*itertools.chain(*gather_objects(found))]))

    def conclude(self) -> tuple[Verdict, Difference | None]:
        """Return the verdict, and the difference to locate; every rank calls this together."""
        of_rank = self._steps, self._evaluations, self._idle, self._is_kept, self._block_types
        ranks = gather_on_first(of_rank)
        if self._beside is None:
            return broadcast_object(None)
        self.begin = self._beside.begin
        problems = [*self._problems_of(ranks), *self._problems]
        proof, wrong = self._proof, [row for row in self._differences if not row.passes]
        in_steps = [row for row in wrong if row.quantity != VALIDATION]
        is_step = any(row.quantity == "loss" for row in self._differences)  # else what it began at
        is_located = not problems and bool(in_steps) and is_step and proof.is_repeatable
        verdict = verdict_of(proof.title, self._differences, problems, self._unequal)
        if not verdict.is_equal:
            causes = likely_causes(proof.case, proof.strategy, self._differences, self._facts)
            verdict.causes.extend(causes)
        return broadcast_object((verdict, in_steps[0] if is_located else None))

    def _compare_begin(self) -> None:
        number = self._step.steps_done
        state = state_of(self._step.model, self._step.optimizer)
        ranks = gather_on_first(Snapshot.empty().add(self._comm, state))
        if self._beside is not None and number == self._beside.steps_done:
            ours, due = merged(ranks), dict(self._beside.state)
            self._differences += compare_values(
                number, "first weight", ours["weight"], due.pop("weight")
            )
            if number:
                self._differences += compare_step(number, ours, due)
            self.is_over = not all(row.passes for row in self._differences)
        self.is_over = broadcast_object(self.is_over)

    def _compare(
        self,
        beside: StepwiseReference,
        number: int,
        rows: set[int],
        routes: Sequence[Sequence[Route]],
    ) -> None:
        """Compare a step, on rank 0, of which the ranks have read `rows`."""
        proof = self._proof
        due = range(_num_rows(proof.case, number), _num_rows(proof.case, number + 1))
        if rows and rows != {*due}:
            what = f"its {len(rows)} rows are {min(rows)} to {max(rows)}"
            what += f"; expected {due[0]} to {due[-1]}" if due else ""
            self._problems.append(Place(None, f"{proof.title}, step {number}: {what}"))
        if number != beside.steps_done or not due:
            return  # `_problems_of` says so
        ours = {**merged(self._facts), ROUTING: joined(routes, due[0])}
        found = beside.compare(number, ours)
        routed, *moved = beside.routed
        dtype = proof.case.torch_dtype
        of_routes = compare_routes(number, routes, due[0], routed, moved, dtype)
        ties = [row for row in of_routes if row.problem and row.passes]
        if ties and dtype == torch.float64 and proof.precision is None:
            what = f"{ties[0]}: a tie, which rounding decides; change the seed or the weights"
            self._problems.append(Place(ties[0].name, what))
            self._differences += of_routes
            self.is_over = True
            return
        found = of_routes + found
        if proof.precision is not None:
            found = [within(NARROW_ERROR, row) for row in found if row.quantity == "loss"]
            self._compare_types(ours)
        self._differences += found
        self._unequal += unequal_ranks(number, self._facts)
        self.is_over = bool(self._unequal) or not all(row.passes for row in found)

    def _compare_types(self, ours: StepRecord) -> None:
        """Check that a run in a narrow type keeps what the optimizer has in float32."""
        quantities = {"weights": ("weight",), "gradients": ("gradient",), "moments": (*MOMENTS,)}
        for what, each in quantities.items():
            tensors = [t for q in each for t in ours.get(q, {}).values() if isinstance(t, Tensor)]
            types = {tensor.dtype for tensor in tensors}
            if types - {torch.float32} and not self._problems:
                names = ", ".join(sorted(map(str, types)))
                self._problems.append(Place("", f"the {what} are in {names}; expected float32"))

    def _problems_of(self, ranks: Sequence[Any]) -> Iterator[Place]:
        """Yield faults other than numeric differences: of steps, evaluations and module modes."""
        proof, last = self._proof, len(self._proof.case.batches)
        done = [*range(proof.start, last + 1)]
        evaluated = [n for n in done if proof.validate and (n % proof.every == 0 or n == last)]
        for rank, (steps, evaluations, idle, is_kept, block_types) in enumerate(ranks):
            where = f"{proof.title}, rank {rank}"
            pairs = {
                "takes the steps": (steps, done[1:]),
                "evaluates after the steps": (evaluations, evaluated),
            }
            for what, (ours, due) in pairs.items():
                # A run of a case ends at the first step that differs.
                if ours != (due[: len(ours)] if self.is_over else due):
                    yield Place(None, f"{where}: it {what} {ours}; expected {due}", None, rank)
            if idle:
                what = f"an evaluation leaves {idle[0] or 'the model'} in eval mode"
                yield Place(idle[0], f"{where}: {what}", None, rank)
            if block_types - {proof.precision}:
                names = ", ".join(sorted(map(str, block_types)))
                what = f"the outputs of blocks are in {names}; expected {proof.precision}"
                yield Place("blocks.0", f"{where}: {what}", None, rank)
            if not is_kept:
                yield Place("", f"{where}: an evaluation changes the weights", None, rank)

    def _in_training(self) -> set[str]:
        return {name for name, module in self._step.model.named_modules() if module.training}

    def _note_idle(self) -> None:
        self._idle += sorted(self._training - self._in_training())

    def _bits_of_weights(self) -> list[str]:
        # From the optimizer, which has the shards: a model under FSDP2 may have full parameters.
        return [hash_of(p) for group in self._step.optimizer.param_groups for p in group["params"]]


class _StepRecorder(Observer):
    """Records the modules' tensors in the step of a difference."""

    def __init__(
        self, run: Session | CaseRun, proof: Proof, first: Difference, recorder: Recorder
    ) -> None:
        self._run, self._proof, self._first, self._recorder = run, proof, first, recorder
        self.latest: Sequence[Any] = []
        self.rows: Sequence[Tensor] = []

    @override
    @contextmanager
    def watching(self, microbatches: Sequence[Any]) -> Generator[None]:
        """Record the step if it is the one that differs."""
        self.latest, number = microbatches, self._run.step.steps_done
        if number == self._first.step:
            self.rows = self._proof.rows(self._run, microbatches)
            self._recorder.is_on = self._first.quantity != EVALUATION
        yield
        self._recorder.is_on = False
        self.is_over = number >= self._first.step
