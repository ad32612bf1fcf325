"""Prove a script that has its own loop: compare its first steps on all ranks with one process.

    ranks          write a record of each step to a folder: loss, gradients, weights
    one process    runs the same script as a job of one rank, beside the ranks; reads the records,
                   compares, takes over the ranks' gradients, and ends after the last compared step

Since one process takes over the gradients after it has compared them, each step begins with equal
weights on both sides. So rounding does not grow from step to step, and AdamW, whose first step
moves a weight by the rate in the direction of the gradient's sign, gets equal signs.

`phalanx verify` compares in float64, ends the ranks too, and lets nobody save. `phalanx run` leaves
the script as it is: `run.save` of the ranks waits until one process has reached the same call, and
one process does nothing that the first rank does for all: it neither prints nor saves.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import os
import pickle
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from phalanx.account.host import free_memory_bytes
from phalanx.data.cache import fingerprint
from phalanx.data.rows import map_tensors, tensors_of
from phalanx.errors import ConfigError, RankFailed, ScriptError, TrainingError
from phalanx.launch.failure import report
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import Beside, run_ranks
from phalanx.launch.rank import end_children
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.parallel.batch_norm import batch_norms
from phalanx.script.init import OVERRIDES, refuse_in_own_loop
from phalanx.script.launch import run_script
from phalanx.script.loader import RankLoader
from phalanx.script.run import Run
from phalanx.strategy import Strategy
from phalanx.verify.compare import EXACT, Difference, compare_step
from phalanx.verify.judge import unequal_replicas, verdict_of
from phalanx.verify.plain_loop import PlainLoop
from phalanx.verify.record import Shards, assembled, bits_of, shards_to_send, state_of
from phalanx.verify.reference import BitsKey, RankFacts
from phalanx.verify.verdict import Place, Verdict, Whereabouts, failed

NUM_STEPS: Final = 4
"""Steps that `phalanx run` compares: more than one, because the second batch may be uneven."""

_LIMITS: Final = {
    torch.float64: EXACT, torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 0.1,
}  # fmt: skip
"""Largest relative error of a gradient or loss computed in a type.

A step of rounding differs by about 1e-6 in float32. But a ReLU or a maximum of pooling whose input
rounds to the other side moves a gradient by the part of one position.
"""

_NORMED: Final = 0.3
"""Error of a gradient that rounding may explain in a model with BatchNorm, if the losses agree.

BatchNorm amplifies rounding where a channel varies little. Gradients of ResNet-50 at its first step
move by 3e-2 if each weight moves by one rounding, and two ranks differ from one process by 0.15.
"""

_NOISE: Final = 1e-2
"""Fraction of the largest gradient below which float32 and narrower types have mostly rounding."""

_LEAST_LOSS: Final = 1e-2
"""Smallest divisor of a loss's error, for a loss that is a small difference of large terms."""

_COPIES: Final = 8
"""Copies of its weights that one process needs: gradients, optimizer states, and records."""

_WITHOUT: Final = "phalanx run --no-proof runs the script without this comparison"

_VERDICT: Final = "verdict"


class _Record(NamedTuple):
    """What a rank records at one place of a step.

    Attributes:
        step: number of the step, from 0; -1 before the first.
        place: "prepared", "gradients" after the last backward, "weights" after an optimizer's step,
            a call that may "save", "end" of the script, or "signal" if a signal has ended it.
        numbers: see `RankFacts`.
        shards: quantity -> shards of tensors.
        bits: see `RankFacts`.
        rows: number of a loader, position in its data -> hash of the values of the row, of the
            batches of the step.
        states: name of a random generator -> hash of its state.
        sums: results of `run.sum` since the record before; of tensors their sums.
    """

    step: int
    place: str
    numbers: dict[str, dict[str, float]]
    shards: dict[str, Shards]
    bits: dict[BitsKey, str]
    rows: dict[tuple[int, int], str]
    states: dict[str, str]
    sums: list[float]


@dataclasses.dataclass(frozen=True)
class _Proof:
    """What ranks and one process know of the proof.

    Attributes:
        folder: folder of the records, of the verdict, and of a file for each call that may save.
        strategy: strategy of the ranks.
        steps: number of steps to compare.
        is_wide: whether models and batches are in float64, and the script ends after `steps`.
    """

    folder: Path
    strategy: Strategy
    steps: int
    is_wide: bool

    def put(self, name: str, value: object) -> None:
        """Give a value to the other processes, under a name."""
        partial = self.folder / f"{name} {os.getpid()}"
        try:
            partial.write_bytes(pickle.dumps(value))
        except OSError as error:  # no space is left
            partial.write_bytes(b"")
            name, why = _VERDICT, f"the folder of temporary files: {error.strerror}"
            partial.write_bytes(pickle.dumps((None, why, {})))
        partial.replace(self.folder / name)

    @property
    def is_over(self) -> bool:
        """Whether there is a verdict."""
        return (self.folder / _VERDICT).exists()

    def conclude(self, verdict: Verdict | None, why: str = "") -> NoReturn:
        """Give the verdict, or why there is none, and end this process, which is the one process.

        No `finally` of the script runs, which might save or print.
        """
        if not self.is_over:
            self.put(_VERDICT, (verdict, why, _modules_beside(sys.argv[0])))
        end_children()
        os._exit(0)

    def verdict(self, code: int | None = None) -> tuple[Verdict | None, str, dict[str, str]]:
        """Return what `conclude` was given, and fingerprints of the modules beside the script.

        `code` is the exit code of the one process.
        """
        if not self.is_over:
            self.put(_VERDICT, (None, f"one process ended by itself, with exit code {code}", {}))
        return pickle.loads((self.folder / _VERDICT).read_bytes())

    def take(self, name: str) -> Any:
        """Return what a rank puts under a name, once it has, and remove it."""
        while not (path := self.folder / name).exists():
            if self.is_over:  # a rank had no space for a record
                self.conclude(None)
            time.sleep(0.002)
        value = pickle.loads(path.read_bytes())
        path.unlink()
        return value


def prove_script(path: str, words: Sequence[str], strategy: Strategy, steps: int) -> Verdict:
    """Compare the steps of a script on the ranks of `strategy` with its steps on one rank."""
    if is_under_torchrun():
        raise ConfigError(
            "verify starts a script on one rank and on several, but this is a rank of a job "
            "already; start phalanx verify itself, without torchrun"
        )
    refuse_in_own_loop(strategy)
    with tempfile.TemporaryDirectory(prefix="phalanx-proof-") as folder:
        proof = _Proof(Path(folder), strategy, steps, is_wide=True)
        given = (path, list(words), None, proof)
        beside = Beside(_run_alone, given, proof.verdict)
        try:
            run_ranks(_run_recorded, strategy.num_ranks, *given, beside=beside)
        except RankFailed as failure:
            return failed(str(strategy), failure)
        except ScriptError as error:  # one rank ran, so this is a difference
            return Verdict(str(strategy), [], failure=str(error))
        verdict, why, _ = proof.verdict()
    if verdict is None:
        raise ConfigError(why)
    return verdict


def run_proved(
    path: str, words: list[str], strategy: Strategy, given: str | None, **options: Any
) -> tuple[list[Any], dict[str, str] | None]:
    """Run a script on ranks, and prove its first steps.

    `given` is the strategy of the command line, and `options` are options of `run_ranks`.

    Returns:
        The results of the ranks, and the fingerprints of the imported modules beside the script;
        None in their place if there was no comparison.

    Raises:
        TrainingError: a step differs from one process.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-proof-") as folder:
        proof = _Proof(Path(folder), strategy, NUM_STEPS, is_wide=False)
        proved: list[dict[str, str]] = []

        def ended(code: int | None) -> None:
            verdict, why, modules = proof.verdict(code)
            if verdict is not None and not verdict.is_equal:
                lines = [verdict.headline(), *verdict.replicas[:1], _WITHOUT]
                raise TrainingError("\n".join(lines))
            proved.extend([modules] if verdict is not None else [])
            report(_sentence(verdict) if verdict is not None else f"not proved: {why}")

        arguments = (path, words, given, proof)
        ends = run_ranks(
            _run_recorded, strategy.num_ranks, *arguments,
            beside=Beside(_run_alone, arguments, ended), **options,
        )  # fmt: skip
    return ends, proved[0] if proved else None


def _sentence(verdict: Verdict) -> str:
    errors = verdict.largest_errors()
    steps = 1 + max(row.step for row in verdict.differences)
    found = ", ".join(
        f"{what} {errors[what]:.0e}" for what in ("loss", "gradient", "weight") if what in errors
    )
    return f"{steps} step{'s' * (steps > 1)} agree with one process, relative errors: {found}"


def _run_recorded(path: str, words: list[str], given: str | None, proof: _Proof) -> tuple[int, str]:
    """Run a script on this rank of the job, and record its first steps."""
    rank = int(os.environ["RANK"])
    numbers = iter(range(1 << 62))

    def deliver(step: _Record, _: object) -> None:
        if not proof.is_over:
            proof.put(f"{next(numbers)}.{rank}", step)

    def wait(number: int) -> None:
        with PULSE.waiting("the comparison with one process"):
            while not (proof.folder / f"save {number}").exists():
                if proof.is_over:
                    verdict, *_ = proof.verdict()
                    if verdict is None or verdict.is_equal:
                        return  # else the launcher ends this rank
                time.sleep(0.002)

    with ExitStack() as stack:
        at = Whereabouts()
        if proof.is_wide:
            for each in (at, redirect_stdout(io.StringIO()), warnings.catch_warnings()):
                stack.enter_context(each)
        recorder = stack.enter_context(_overridden(_Recorder(proof, at, deliver, wait)))
        end = run_script(path, words, given)
        recorder.end()
    return end


def _run_alone(path: str, words: list[str], given: str | None, proof: _Proof) -> None:
    """Run a script as a job of one rank, compare it with the records, and end this process."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    with suppress(OSError):  # if memory ends, this process ends first
        Path("/proc/self/oom_score_adj").write_text("1000")
    judge = _Judge(proof)
    recorder = _Recorder(
        proof, Whereabouts(), judge.compare, lambda number: proof.put(f"save {number}", None)
    )
    recorder.is_alone = True
    try:
        with _overridden(recorder):
            run_script(path, words, given)
            recorder.end()
    except BaseException as error:
        first = next(iter(str(error).splitlines()), "")
        proof.conclude(None, f"on one process {path} ends by {type(error).__name__}: {first}")


@contextmanager
def _overridden(recorder: _Recorder) -> Generator[_Recorder]:
    before = torch.get_default_dtype()
    if recorder.proof.is_wide:
        torch.set_default_dtype(torch.float64)
    split = recorder.proof.strategy if recorder.proof.is_wide else None
    OVERRIDES.append((Strategy() if recorder.is_alone else split, recorder.attach))
    try:
        yield recorder
    finally:
        OVERRIDES.pop()
        torch.set_default_dtype(before)


class _Recorder:
    """Records the steps of a script's `Run`.

    Attributes:
        is_alone: whether this is the one process.
    """

    is_alone = False

    def __init__(
        self,
        proof: _Proof,
        at: Whereabouts,
        deliver: Callable[[_Record, _Recorder], None],
        reach_save: Callable[[int], None],
    ) -> None:
        """Call `deliver` with each record, and `reach_save` with the number of a call to save."""
        self.proof = proof
        self.dtype = torch.float64
        self.model: nn.Module | None = None
        self.loaders: list[RankLoader] = []
        self._at, self._deliver, self._reach_save = at, deliver, reach_save
        self._step = 0
        self._num_saves = 0
        self._losses: dict[str, float] = {}
        self._rows: dict[tuple[int, int], str] = {}
        self._sums: list[float] = []
        self._is_on = True

    def attach(self, run: Run) -> None:
        """Record the steps of `run`, which `phalanx.init` has made."""
        if self.is_alone:
            PlainLoop(run)
        self._run: Any = run
        self._run._prepared.deals_unevenly = True
        self._run.backward = functools.partial(self._backward, run.backward)
        self._run.prepare = functools.partial(self._prepare, run.prepare)
        self._run.sum = functools.partial(self._sum, run.sum)
        self._run._may_save = self._may_save
        self._run._prepared.reading.note = functools.partial(
            self._note, self._run._prepared.reading.note
        )
        if self.proof.is_wide:
            self._run.resume = _unresumed
        if self.is_alone:
            self._run._is_mute = True

    def __deepcopy__(self, memo: Any) -> _Recorder:
        return self  # a copy of the model has its hooks

    def end(self) -> None:
        """Record that the script has ended."""
        if self._is_on:
            self._send("signal" if PULSE.handled_signal else "end", {}, {})

    def _sum(self, add_up: Any, value: Any) -> Tensor:
        total: Tensor = add_up(value)
        if self._is_on:
            self._sums.append(float(total.double().sum()))
        return total

    def _may_save(self) -> bool:
        self._num_saves += 1
        if not self.proof.is_wide:
            if self._is_on:  # so that ranks which save earlier than one process are found
                self._send("save", {}, {})
            self._reach_save(self._num_saves)
        return not (self.is_alone or self.proof.is_wide)

    def _note(self, note: Any, loader: RankLoader, given: Any) -> None:
        note(loader, given)
        if self._is_on and torch.is_grad_enabled():
            if loader not in self.loaders:
                self.loaders.append(loader)
            rows = [t for t in tensors_of(given) if t.ndim and len(t) == len(loader.rows)]
            shapes, of_loader = [tuple(t.shape[1:]) for t in rows], self.loaders.index(loader)
            for number, at in enumerate(loader.rows.tolist()):
                self._rows[of_loader, at] = f"{shapes} {_digest([t[number] for t in rows])}"

    def _prepare(self, prepare: Any, *objects: Any, **options: Any) -> Any:
        if self.proof.is_wide:
            for each in objects:
                if isinstance(each, nn.Module):
                    each.double()
                elif isinstance(each, DataLoader):
                    loader: Any = each
                    loader.collate_fn = functools.partial(_wide, loader.collate_fn)
        if self.is_alone:
            for model in (each for each in objects if isinstance(each, nn.Module)):
                self._refuse(model, options.get("batch_norm"))
        prepared = prepare(*objects, **options)
        for each in objects:
            if isinstance(each, nn.Module):
                self.model = each
                if self.proof.is_wide:
                    self._at.follow(each)
                self._note_dtype(each, (), [*each.parameters()])
                for module in each.modules() if self.is_alone else ():
                    module.register_forward_hook(self._note_dtype)
                self._send("prepared", {}, {"first weight": dict(each.named_parameters())})
            elif isinstance(each, torch.optim.Optimizer):
                each.register_step_post_hook(self._after)
        return prepared

    def _refuse(self, model: nn.Module, batch_norm: str | None) -> None:
        needed = _COPIES * sum(p.nbytes for p in model.parameters())
        if needed > (free := free_memory_bytes()):
            self.proof.conclude(
                None,
                f"one process needs {needed / 2**30:.3g} GiB for the model, its gradients and "
                f"states, and this host has {free / 2**30:.3g} GiB free",
            )
        is_chosen = batch_norm == "local" and self.proof.strategy.data_ranks > 1
        if is_chosen and batch_norms(model) and not self.proof.is_wide:
            self.proof.conclude(
                None, "batch_norm='local' computes other numbers than one process, as asked"
            )

    def _note_dtype(self, _module: nn.Module, _args: object, output: Any) -> None:
        types = {each.dtype for each in tensors_of(output)} & _LIMITS.keys()
        self.dtype = max(self.dtype, *types, key=_LIMITS.__getitem__)

    def _backward(self, backward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._step == self.proof.steps:
            self._finish()
        made = backward(*args, **kwargs)
        if self._is_on:
            self._at.step = self._step
            call = len(self._losses)
            self._losses[f"call {call + 1}" if call else ""] = float(made)
            if self._run.is_step_end:
                gradients = {n: p.grad for n, p in self._parameters() if p.grad is not None}
                dense = {n: g.to_dense() if g.is_sparse else g for n, g in gradients.items()}
                self._send("gradients", {"loss": self._losses}, {"gradient": dense})
                self._losses, self._rows = {}, {}
                self._step += 1
        return made

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the weights after an optimizer's step, and its learning rates."""
        if not self._is_on or not self._step:
            return
        groups = optimizer.param_groups
        mine = {p for group in groups for p in group["params"]}
        rates = {f"group {number}": float(group["lr"]) for number, group in enumerate(groups)}
        weights = {name: p.detach() for name, p in self._parameters() if p in mine}
        held: dict[str, dict[str, Tensor]] = {"weight": weights}
        if self.proof.is_wide:
            assert self.model is not None
            held = {"buffer": dict(self.model.named_buffers()), **state_of(self.model, optimizer)}
        self._send("weights", {"learning rate": rates}, held)

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [] if self.model is None else list(self.model.named_parameters())

    def _finish(self) -> None:
        if self._is_on:
            self._send("end", {}, {})
        if self.proof.is_wide:
            raise SystemExit
        self._is_on = False

    def _send(
        self,
        place: str,
        numbers: dict[str, dict[str, float]],
        held: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        bits: dict[BitsKey, str] = {}
        for quantity, tensors in held.items():
            bits.update(bits_of(quantity, tensors))
        shards = {what: shards_to_send(each, self._run.comm) for what, each in held.items()}
        step = self._step if place == "gradients" else self._step - 1
        if place == "prepared":
            step = 0
        rows, sums, self._sums = self._rows, self._sums, []
        self._deliver(_Record(step, place, numbers, shards, bits, rows, _states(), sums), self)


class _Judge:
    """Compares the records of one process with the records of the ranks, as they are made."""

    def __init__(self, proof: _Proof) -> None:
        self._proof = proof
        self._number = 0
        self._first: tuple[_Record, _Record] | None = None
        self.differences: list[Difference] = []

    def compare(self, mine: _Record, recorder: _Recorder) -> None:
        """Compare a record with the ranks' records, take over gradients; raise if it is the end."""
        ranks: list[_Record] = [
            self._proof.take(f"{self._number}.{rank}")
            for rank in range(self._proof.strategy.num_ranks)
        ]
        self._number += 1
        ours = {
            what: assembled([rank.shards.get(what, {}) for rank in ranks]) for what in mine.shards
        }
        if mine.place == "prepared":
            self._first = self._first or (ranks[0], mine)
        problems = self._problems(mine, ranks)
        facts = [
            RankFacts(bits={k: v for k, v in rank.bits.items() if k[0] != "buffer"})
            for rank in ranks
        ]
        unequal = unequal_replicas(mine.step, facts)
        due = {what: assembled([shards]) for what, shards in mine.shards.items()}
        rows = self._compared(mine, ranks[0], ours, due, recorder.dtype)
        if mine.place != "prepared":
            self.differences += rows
        title = str(self._proof.strategy)
        verdict = verdict_of(title, self.differences, problems, unequal)
        if not verdict.is_equal or any(not row.passes for row in rows):
            self._refuse_irreproducible(mine, ranks, recorder)
            odd = [row for row in rows if not row.passes]
            has_norm = recorder.model is not None and batch_norms(recorder.model)
            # Rounding shows in the first step; mistakes of uneven batches begin with the second.
            may_be_rounding = has_norm and mine.step == 0 and not self._proof.is_wide
            is_small = all(row.quantity == "gradient" and row.error < _NORMED for row in odd)
            if odd and may_be_rounding and is_small and not (problems or unequal):
                worst = max(odd, key=lambda row: row.error)
                self._proof.conclude(
                    None,
                    f"the losses agree; the gradient of {worst.name} differs by {worst.error:.0e}, "
                    "as BatchNorm amplifies rounding; compare in float64: phalanx verify "
                    f"{title} --script {sys.argv[0]}",
                )
            self._proof.conclude(verdict_of(title, [*self.differences, *rows], problems, unequal))
        if mine.place in ("end", "signal"):
            why = "" if self.differences else "the script takes no step that follows run.backward"
            self._proof.conclude(verdict if self.differences else None, why)
        if mine.place == "gradients" and recorder.model is not None:
            for name, p in recorder.model.named_parameters():
                if p.grad is not None and not p.grad.is_sparse:
                    # `.data`, so that this is no write of the script.
                    p.grad.data.copy_(ours["gradient"][name])

    def _compared(
        self,
        mine: _Record,
        first: _Record,
        ours: dict[str, dict[str, Tensor]],
        due: dict[str, dict[str, Tensor]],
        dtype: torch.dtype,
    ) -> list[Difference]:
        """Return the differences of a record, with limits for the type that is computed in."""
        if self._proof.is_wide:
            return compare_step(mine.step, {**first.numbers, **ours}, {**mine.numbers, **due})
        found: list[Difference] = []
        pairs = compare_step(
            mine.step, {**first.numbers, **ours}, {**mine.numbers, **due}, noise=_NOISE
        )
        for row in pairs:
            limit = _LIMITS[dtype]
            if row.quantity in ("weight", "learning rate", "first weight"):
                types = [each.dtype for each in due.get(row.quantity, {}).values()]
                limit = 32 * max(torch.finfo(each).eps for each in [*types, torch.float32])
                limit = 0.0 if row.quantity == "first weight" else limit
            if row.quantity == "loss":
                size = abs(mine.numbers["loss"][row.name])
                row = dataclasses.replace(row, error=row.error * min(1.0, size / _LEAST_LOSS))
            found.append(dataclasses.replace(row, limit=limit))
        return found

    def _problems(self, mine: _Record, ranks: Sequence[_Record]) -> list[Place]:
        """Return faults other than numbers: other steps than one process's, or other rows."""
        for rank, theirs in enumerate(ranks):
            if theirs.place == mine.place:
                continue
            if "signal" in (mine.place, theirs.place):
                equal = verdict_of(str(self._proof.strategy), self.differences, [], [])
                why = "" if self.differences else "the script ends before its first step"
                self._proof.conclude(equal if self.differences else None, why)
            what = f"rank {rank} is at {theirs.place}, where one process is at {mine.place}"
            return [Place(None, what, mine.step, rank)]
        num_ranks = self._proof.strategy.data_ranks
        for many, one in zip(ranks[0].sums, mine.sums, strict=False):
            is_one = one in (0, 1)  # run.sum(1) counts the ranks
            if not is_one and abs(many / one - num_ranks) < 1e-6 < num_ranks - 1:
                what = f"run.sum returns {many:g} on the ranks, {one:g} on one process"
                return [Place(None, f"{what}: it adds up gathered rows again", mine.step)]
        used = {at for rank in ranks for at in rank.rows}
        if used and mine.rows and (odd := sorted(used ^ mine.rows.keys())):
            what = (
                f"the ranks read {len(used)} rows in this step, one process reads {len(mine.rows)}"
            )
            return [
                Place(None, f"{what}; the first that only one side reads is {odd[0][1]}", mine.step)
            ]
        return []

    def _refuse_irreproducible(
        self, mine: _Record, ranks: Sequence[_Record], recorder: _Recorder
    ) -> None:
        """Conclude without a verdict if each start of the script computes other numbers."""
        theirs, own = self._first or (ranks[0], mine)
        for name, state in own.states.items():
            if theirs.states.get(name) != state and mine.states[name] != state:
                self._proof.conclude(
                    None, f"two starts of the script draw other numbers: seed {name}"
                )
        if mine.place == "prepared":  # where all ranks have the first rank's weights
            self._proof.conclude(None, "two starts of the script make other first weights")
        odd = [
            rank
            for rank, each in enumerate(ranks)
            if any(_values(mine.rows.get(at, row), row) for at, row in each.rows.items())
        ]
        if odd and (odd[0] == 0 or not all(map(_is_fixed, recorder.loaders))):
            self._proof.conclude(
                None,
                "the data have other values on one process than on the ranks; draw augmentations "
                "from a generator that the sample's index seeds, to compare them",
            )


def _unresumed(_: str | Path) -> bool:
    return False


def _values(mine: str, theirs: str) -> bool:
    """Return whether two rows of one shape, so with equal padding, have other values."""
    (a, one), (b, other) = (each.rsplit(" ", 1) for each in (mine, theirs))
    return a == b and one != other


def _is_fixed(loader: RankLoader) -> bool:
    """Return whether a loader's samples are the same each time; True only if this can be seen."""
    data = loader.plain.dataset
    if isinstance(data, IterableDataset):
        return False
    try:
        first, second = (
            pickle.dumps([data[at] for at in range(min(4, len(cast("Any", data))))])
            for _ in range(2)
        )
    except Exception:  # of the script's dataset, which cannot be read here
        return False
    return first == second


def _modules_beside(script: str) -> dict[str, str]:
    """Return the fingerprints of the imported files in the folder of a script and below."""
    folder = Path(script).resolve().parent
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    own = {path for f in files if f and (path := Path(f).resolve()).is_relative_to(folder)}
    return {
        str(path): fingerprint(path.read_bytes())
        for path in own
        if "site-packages" not in path.parts and path.is_file()
    }


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _states() -> dict[str, str]:
    """Return hashes of the states of the generators that scripts draw from."""
    states = {
        "torch (torch.manual_seed)": torch.get_rng_state().numpy().tobytes(),
        "numpy (np.random.seed)": pickle.dumps(np.random.get_state()),
        "Python's random (random.seed)": pickle.dumps(random.getstate()),
    }
    return {name: hashlib.blake2b(state).hexdigest() for name, state in states.items()}


def _wide(collate: Any, samples: Any) -> Any:
    return map_tensors(collate(samples), lambda t: t.double() if t.is_floating_point() else t)
