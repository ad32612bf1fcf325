"""Prove a script that has its own loop: compare its first steps on all ranks with one process.

    ranks          write a record of each step to a folder: loss, gradients, weights
    one process    runs the same script as a job of one rank, beside the ranks; reads the records,
                   compares, takes over the ranks' gradients, and ends after the last compared step

    ranks          backward ── gradients ──────────────── step ── weights ── backward ...
                                 ↓ compare     ↓ copy               ↓ compare
    one process    backward ── gradients ── the ranks' ── step ── weights ── backward ...

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
import json
import os
import pickle
import random
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from phalanx.account.host import free_memory_bytes
from phalanx.data.cache import fingerprint
from phalanx.data.rows import tensors_of
from phalanx.errors import ConfigError, RankFailed, ScriptError, TrainingError
from phalanx.launch.failure import report
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import Beside, run_ranks
from phalanx.launch.pipe import end_children
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.parallel.batch_norm import batch_norms
from phalanx.script.checksums import digest_of
from phalanx.script.init import OVERRIDES, refuse_in_own_loop
from phalanx.script.loader import RankLoader
from phalanx.script.proof import wide_batch
from phalanx.script.run import Run
from phalanx.script.script_rank import run_script
from phalanx.storage import replace_file
from phalanx.strategy import Strategy
from phalanx.verify.compare import NOISE, Difference, compare_rounded, compare_step
from phalanx.verify.plain_loop import PlainLoop
from phalanx.verify.reference import StepRecord
from phalanx.verify.rounding import RoundingProbe
from phalanx.verify.snapshot import Snapshot, gradients_of, merged, state_of
from phalanx.verify.verdict import (
    Place,
    Verdict,
    Whereabouts,
    failed,
    unequal_replicas,
    verdict_of,
)

NUM_STEPS: Final = 4
"""Steps that `phalanx run` compares: more than one, because the second batch may be uneven."""

_COPIES: Final = 8
"""Copies of its weights that one process needs: gradients, optimizer states, and records."""

_DIVIDED: Final = "; batch_size is the global batch, on any number of ranks"

_RESULT: Final = "result"

_CONTENT_BYTES: Final = 1 << 24
"""Largest file that is known by its content; a larger one by its size and time of change."""


class _Record(NamedTuple):
    """What a rank records at one place of a step.

    A place is "prepared", "gradients" after the last backward, "weights" after an optimizer's step,
    a call that may "save", "end" of the script, or "signal" if a signal has ended it.
    """

    step: int  # from 0; -1 before the first
    place: str
    snapshot: Snapshot
    # Number of a loader, position in its data -> shape and hash of a row of the step's batches.
    rows: dict[tuple[int, int], tuple[str, str]]
    states: dict[str, str]  # name of a random generator -> hash of its state
    sums: list[float]  # results of `run.sum` of integers since the record before


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
            name, why = _RESULT, f"the folder of temporary files: {error.strerror}"
            partial.write_bytes(pickle.dumps((why, {})))
        partial.replace(self.folder / name)

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return (self.folder / _RESULT).exists()

    def conclude(self, result: Verdict | str) -> NoReturn:
        """Give the verdict, or why there is none, and end this process, which is the one process.

        No `finally` of the script runs, which might save or print.
        """
        if not self.is_over:
            self.put(_RESULT, (result, _inputs(Path(sys.argv[0]), self.folder)))
        end_children()
        os._exit(0)

    def result(self, code: int | None = None) -> tuple[Verdict | str, dict[str, str]]:
        """Return what `conclude` was given, and the signatures of the script's modules and data.

        `code` is the exit code of the one process.
        """
        if not self.is_over:
            self.put(_RESULT, (f"one process ended by itself, with exit code {code}", {}))
        return pickle.loads((self.folder / _RESULT).read_bytes())

    def take(self, name: str) -> Any:
        """Return what a rank puts under a name, once it has, and remove it."""
        while not (path := self.folder / name).exists():
            if self.is_over:  # a rank had no space for a record
                self.conclude("")
            time.sleep(0.002)
        value = pickle.loads(path.read_bytes())
        path.unlink()
        return value

    def run(self, path: str, words: list[str], given: str | None, **options: Any) -> list[Any]:
        """Run a script on the ranks and on one process; return the results of the ranks.

        `given` is the strategy of the command line, and `options` are options of `run_ranks`.
        """
        ended = options.pop("ended", self.result)
        beside = Beside(_Judge(self).run, (path, words, given), ended)
        run, num_ranks = _Recorder(self).run, self.strategy.num_ranks
        return run_ranks(run, num_ranks, path, words, given, beside=beside, **options)


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
        try:
            proof.run(path, [*words], None)
        except RankFailed as failure:
            return failed(str(strategy), failure)
        except ScriptError as error:  # one rank ran, so this is a difference
            return Verdict(str(strategy), [], failure=str(error))
        result, _ = proof.result()
    if isinstance(result, str):
        raise ConfigError(result)
    return result


def run_proved(
    path: str, words: list[str], strategy: Strategy, given: str | None, file: Path, **options: Any
) -> list[Any]:
    """Run a script on ranks, and prove its first steps; return the results of the ranks.

    If NUM_STEPS steps agree, `file` gets the signatures of the script's modules and data. For
    `given` and `options` see `_Proof.run`.

    Raises:
        TrainingError: a step differs from one process.
    """
    inputs: dict[str, str] | None = None

    def ended(code: int | None) -> None:
        nonlocal inputs
        result, read = proof.result(code)
        if isinstance(result, str):
            report(f"not proved: {result}")
            return
        if not result.is_equal:
            without = "phalanx run --no-proof runs the script without this comparison"
            raise TrainingError("\n".join([result.headline(), *result.replicas[:1], without]))
        if result.num_steps == NUM_STEPS:  # else a signal ended it before an uneven batch
            inputs = read
        notes = "".join(f"; {note}" for note in result.notes)
        report(f"proof over {result.num_steps} steps: {result.headline()}{notes}")

    with tempfile.TemporaryDirectory(prefix="phalanx-proof-") as folder:
        proof = _Proof(Path(folder), strategy, NUM_STEPS, is_wide=False)
        ends = proof.run(path, words, given, ended=ended, **options)
    if inputs is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(inputs).encode())
    return ends


def is_proved(file: Path) -> bool:
    """Return whether `run_proved` wrote a file, and the script's modules and data are as then."""
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {"": ""}
    return all(_signature(Path(path)) == signature for path, signature in known.items())


def _signature(path: Path) -> str | None:
    """Return a text that differs for a file of other content; None if there is no file."""
    if not path.is_file():
        return None
    about = path.stat()
    if about.st_size > _CONTENT_BYTES:
        return f"{about.st_size} {about.st_mtime_ns}"
    return fingerprint(path.read_bytes())


_READ: Final = set[str]()
"""Paths that this process has opened to read, see `_note_read`."""


def _note_read(event: str, arguments: tuple[Any, ...]) -> None:
    """Note a file that Python code opens to read, such as the data; an audit hook.

    Files that a worker of a DataLoader or code in another language opens are not seen.
    """
    if event == "open" and isinstance(arguments[0], str):
        is_written = arguments[2] & (os.O_WRONLY | os.O_RDWR)
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        is_import = frame.f_code.co_filename.startswith("<frozen")
        # A run changes its own checkpoints.
        while frame.f_back and "/phalanx/checkpoint/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if not (is_written or is_import or frame.f_back):
            _READ.add(os.path.abspath(arguments[0]))


def _inputs(script: Path, records: Path) -> dict[str, str]:
    """Return the signatures of the imported files beside a script, and of files it has read."""
    folder = script.resolve().parent
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    own = {path for f in files if f and (path := Path(f).resolve()).is_relative_to(folder)}
    libraries = (sysconfig.get_path("stdlib"), "/proc", "/sys", "/dev", str(records))
    own |= {Path(name) for name in [*_READ] if not name.startswith(libraries)}
    known = {str(path): _signature(path) for path in own if "site-packages" not in path.parts}
    return {path: signature for path, signature in known.items() if signature is not None}


class _Recorder:
    """Records the steps of a script's `Run` on a rank."""

    is_alone = False

    def __init__(self, proof: _Proof) -> None:
        self._at = Whereabouts()
        self.proof = proof
        self._run: Any = None
        self._model: nn.Module | None = None
        self._loaders: list[RankLoader] = []
        self._step = self._num_records = self._num_saves = 0
        self._losses: dict[str, float] = {}
        self._rows: dict[tuple[int, int], tuple[str, str]] = {}
        self._sums: list[float] = []
        self._is_on = True

    def __deepcopy__(self, memo: Any) -> _Recorder:
        return self  # a copy of the model has its hooks

    def run(self, path: str, words: list[str], given: str | None) -> tuple[int, str]:
        """Run a script, see `run_script`, and record its first steps."""
        with ExitStack() as stack:
            if self.proof.is_wide:
                for each in (self._at, redirect_stdout(io.StringIO()), warnings.catch_warnings()):
                    stack.enter_context(each)
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            split = Strategy() if self.is_alone else self.proof.strategy
            is_split = self.is_alone or self.proof.is_wide  # else the script may name a strategy
            OVERRIDES.append((split if is_split else None, self._attach))
            stack.callback(OVERRIDES.pop)
            end = run_script(path, words, given)
            if self._is_on:
                self._send("signal" if PULSE.handled_signal else "end")
        return end

    def _deliver(self, record: _Record) -> None:
        """Give a record to the one process."""
        if not self.proof.is_over:
            self.proof.put(f"{self._num_records}.{os.environ['RANK']}", record)

    def _reach_save(self) -> None:
        """Wait until one process has reached the same call, or has found a difference."""
        with PULSE.waiting("the comparison with one process"):
            while not (self.proof.folder / f"save {self._num_saves}").exists():
                if self.proof.is_over:
                    result, _ = self.proof.result()
                    if isinstance(result, str) or result.is_equal:
                        return  # else the launcher ends this rank
                time.sleep(0.002)

    def _attach(self, run: Run) -> None:
        """Record the steps of `run`, which `phalanx.init` has made."""
        self._run = run
        prepared = self._run._prepared
        prepared.deals_unevenly = True
        for name in ("backward", "prepare", "sum", "resume", "note"):
            each: Any = prepared.reading if name == "note" else run
            own = functools.partial(getattr(self, f"_{name}"), getattr(each, name))
            setattr(each, name, own)
        self._run._may_save = self._may_save

    def _resume(self, resume: Any, folder: str | Path) -> bool:
        return False if self.proof.is_wide else resume(folder)

    def _sum(self, add_up: Any, value: Any) -> Tensor:
        total: Tensor = add_up(value)
        if self._is_on and not total.is_floating_point():  # a mean of losses divides their sum
            self._sums.append(float(total.sum()))
        return total

    def _may_save(self) -> bool:
        self._num_saves += 1
        if not self.proof.is_wide:
            if self._is_on:  # so that ranks which save earlier than one process are found
                self._send("save")
            self._reach_save()
        return not (self.is_alone or self.proof.is_wide)

    def _note(self, note: Any, loader: RankLoader, batch: Any) -> None:
        note(loader, batch)
        if self._is_on and torch.is_grad_enabled():
            if loader not in self._loaders:
                self._loaders.append(loader)
            number = self._loaders.index(loader)
            rows = [t for t in tensors_of(batch) if t.ndim and len(t) == len(loader.rows)]
            shapes = str([tuple(t.shape[1:]) for t in rows])
            for at, row in enumerate(loader.rows.tolist()):
                self._rows[number, row] = shapes, digest_of([t[at] for t in rows])

    def _prepare(self, prepare: Any, *objects: Any, **options: Any) -> Any:
        for each in objects if self.proof.is_wide else ():
            if isinstance(each, nn.Module):
                each.double()
            elif isinstance(each, DataLoader):
                loader: Any = each
                loader.collate_fn = functools.partial(wide_batch, loader.collate_fn)
        prepared = prepare(*objects, **options)
        for each in objects:
            if isinstance(each, nn.Module):
                self._model = each
                if self.proof.is_wide:
                    self._at.follow(each)
                self._send("prepared", {"first weight": dict(each.named_parameters())})
            elif isinstance(each, torch.optim.Optimizer):
                each.register_step_post_hook(self._after)
        return prepared

    def _backward(self, backward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._step == self.proof.steps and self._is_on:
            self._send("end")
            self._is_on = False
            if self.proof.is_wide:
                raise SystemExit
        loss = backward(*args, **kwargs)
        if self._is_on:
            self._at.step = self._step
            call = len(self._losses)
            self._losses[f"call {call + 1}" if call else ""] = float(loss)
            if self._run.is_step_end:
                gradients = gradients_of(self._model) if self._model is not None else {}
                self._send("gradients", {"gradient": gradients}, {"loss": self._losses})
                self._losses, self._rows = {}, {}
                self._step += 1
        return loss

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the weights after an optimizer's step, and its learning rates."""
        if not self._is_on or not self._step:
            return
        groups = optimizer.param_groups
        rates = {f"group {number}": float(group["lr"]) for number, group in enumerate(groups)}
        stepped = {p for group in groups for p in group["params"]}
        model = nn.Module() if self._model is None else self._model
        weights = {n: p for n, p in model.named_parameters() if p in stepped}
        tensors = state_of(model, optimizer) if self.proof.is_wide else {"weight": weights}
        self._send("weights", tensors, {"learning rate": rates})

    def _send(
        self,
        place: str,
        tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
        numbers: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        snapshot = Snapshot.empty().add(self._run and self._run.comm, tensors or {}, numbers)
        step = 0 if place == "prepared" else self._step - (place != "gradients")
        sums, self._sums = self._sums, []
        self._deliver(_Record(step, place, snapshot, self._rows, _states(), sums))
        self._num_records += 1


class _Judge(_Recorder):
    """Records the steps on one process, and compares each record with the records of the ranks."""

    is_alone = True

    def __init__(self, proof: _Proof) -> None:
        super().__init__(proof)
        self._first: tuple[_Record, _Record] | None = None
        self._differences: list[Difference] = []
        self._plain: PlainLoop | None = None

    @override
    def run(self, path: str, words: list[str], given: str | None) -> NoReturn:
        """Run a script as a job of one rank, compare it with the records, and end this process."""
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silence, stream)
        with suppress(OSError):  # if memory ends, this process ends first
            Path("/proc/self/oom_score_adj").write_text("1000")
        sys.addaudithook(_note_read)
        try:
            super().run(path, words, given)
        except BaseException as error:
            what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            self.proof.conclude(f"on one process {path} ends by {what}")
        raise AssertionError("the record of the script's end concludes")

    @override
    def _attach(self, run: Run) -> None:
        self._plain = PlainLoop(run)
        super()._attach(run)
        self._run._is_mute = True

    @override
    def _reach_save(self) -> None:
        self.proof.put(f"save {self._num_saves}", None)

    @override
    def _prepare(self, prepare: Any, *objects: Any, **options: Any) -> Any:
        for model in (each for each in objects if isinstance(each, nn.Module)):
            needed = _COPIES * sum(p.nbytes for p in model.parameters())
            if needed > (free := free_memory_bytes()):
                self.proof.conclude(
                    f"one process needs {needed / 2**30:.3g} GiB for the model, its gradients and "
                    f"states, and this host has {free / 2**30:.3g} GiB free",
                )
            is_local = options.get("batch_norm") == "local" and self.proof.strategy.data_ranks > 1
            if is_local and batch_norms(model) and not self.proof.is_wide:
                self.proof.conclude(
                    "batch_norm='local' computes other numbers than one process, as asked"
                )
            self._probe = RoundingProbe(model)
        return super()._prepare(prepare, *objects, **options)

    @override
    def _deliver(self, record: _Record) -> None:
        """Compare a record with the ranks' records, and take over their gradients."""
        ranks: list[_Record] = [
            self.proof.take(f"{self._num_records}.{rank}")
            for rank in range(self.proof.strategy.num_ranks)
        ]
        if record.place == "prepared":
            self._first = self._first or (ranks[0], record)
        snapshots = [rank.snapshot for rank in ranks]
        theirs = merged(snapshots)
        rows = self._compared(record, theirs)
        problems = self._problems(record, ranks)
        unequal = unequal_replicas(record.step, snapshots, but="buffer")
        if problems or unequal or not all(row.passes for row in rows):
            self._refuse_irreproducible(record, ranks, problems)
            self._differences += rows
            self.proof.conclude(self._verdict(problems, unequal))
        if record.place != "prepared":
            self._differences += rows
        if record.place in ("end", "signal"):
            self._end("the script takes no step that follows run.backward")
        if record.place == "gradients":
            self._probe.clear()
            for name, p in self._model.named_parameters() if self._model is not None else ():
                if p.grad is not None and not p.grad.is_sparse:
                    # `.data`, so that this is no write of the script.
                    p.grad.data.copy_(torch.as_tensor(theirs["gradient"][name]))

    def _end(self, why: str) -> NoReturn:
        """Conclude that the steps agree, or without a verdict if there were none."""
        self.proof.conclude(self._verdict() if self._differences else why)

    def _verdict(self, problems: Sequence[Place] = (), unequal: Sequence[Place] = ()) -> Verdict:
        notes = [self._plain.why] if self._plain and self._plain.why else []
        strategy = str(self.proof.strategy)
        return verdict_of(strategy, self._differences, problems, unequal, notes)

    def _compared(self, mine: _Record, theirs: StepRecord) -> list[Difference]:
        """Return the differences of a record, with limits for the type that is computed in."""
        expected = merged([mine.snapshot])
        if self.proof.is_wide or not expected:
            return compare_step(mine.step, theirs, expected)
        reading = self._run._prepared.reading
        counts = {} if reading.current is None else reading.current.calls

        def movement(dtype: torch.dtype) -> dict[str, float]:
            with suppress(Exception):  # of a module that cannot be called again
                return self._probe.movement(dtype, counts, NOISE)
            return {}

        return compare_rounded(mine.step, theirs, expected, self._probe.dtypes, movement)

    def _problems(self, mine: _Record, ranks: Sequence[_Record]) -> list[Place]:
        """Return faults other than numbers: other steps than one process's, or other rows."""
        for rank, theirs in enumerate(ranks):
            if theirs.place == mine.place:
                continue
            if "signal" in (mine.place, theirs.place):
                self._end("the script ends before its first step")
            what = f"rank {rank} is at {theirs.place}, where one process is at {mine.place}"
            return [Place(None, what, mine.step, rank)]
        num_ranks = self.proof.strategy.data_ranks
        for many, one in zip(ranks[0].sums, mine.sums, strict=False):
            is_one = one in (0, 1)  # run.sum(1) counts the ranks
            if not is_one and abs(many / one - num_ranks) < 1e-6 < num_ranks - 1:
                what = f"run.sum returns {many:g} on the ranks, {one:g} on one process"
                return [Place(None, f"{what}: it adds up gathered rows again", mine.step)]
        used = {at for rank in ranks for at in rank.rows}
        if used and mine.rows and (odd := sorted(used ^ mine.rows.keys())):
            what = (
                f"the ranks read {len(used)} rows in this step, one process reads "
                f"{len(mine.rows)}; the first that only one side reads is {odd[0][1]}"
            )
            if len(used) * num_ranks == len(mine.rows):
                what += _DIVIDED
            return [Place(None, what, mine.step)]
        return []

    def _refuse_irreproducible(
        self, mine: _Record, ranks: Sequence[_Record], problems: Sequence[Place]
    ) -> None:
        """Conclude without a verdict if each start of the script computes other numbers."""
        theirs, own = self._first or (ranks[0], mine)
        for name, state in own.states.items():
            if theirs.states.get(name) != state and mine.states[name] != state:
                self.proof.conclude(f"two starts of the script draw other numbers: seed {name}")
        if mine.place == "prepared" and not problems:  # all ranks have the first rank's weights
            self.proof.conclude("two starts of the script make other first weights")
        # Rows of one shape, so with equal padding, that have other values.
        odd = [
            rank
            for rank, each in enumerate(ranks)
            for at, (shape, digest) in each.rows.items()
            if (known := mine.rows.get(at)) and known[0] == shape and known[1] != digest
        ]
        num_rows = len({at for rank in ranks for at in rank.rows})
        is_larger = num_rows == self.proof.strategy.data_ranks * len(mine.rows) > len(mine.rows)
        has_sampler = any(isinstance(each.sampler, DistributedSampler) for each in self._loaders)
        if is_larger or (odd and has_sampler):
            self.proof.conclude(
                "the batches grow with the number of ranks, or a DistributedSampler deals them; "
                "give DataLoader(..., shuffle=True) and the global batch_size, to compare them",
            )
        is_random = odd and (odd[0] == 0 or not all(map(_is_fixed, self._loaders)))
        if is_random and not any(_DIVIDED in each.what for each in problems):
            self.proof.conclude(
                "the data have other values on one process than on the ranks; draw augmentations "
                "from a generator that the sample's index seeds, to compare them",
            )


def _is_fixed(loader: RankLoader) -> bool:
    """Return whether a loader's samples are the same each time; True only if this can be seen."""
    data: Any = loader.plain.dataset
    with suppress(Exception):  # of the script's dataset, which cannot be read here
        first, second = (pickle.dumps([data[at] for at in range(2)]) for _ in range(2))
        return first == second
    return False


def _states() -> dict[str, str]:
    """Return hashes of the states of the generators that scripts draw from."""
    states = {
        "torch (torch.manual_seed)": torch.get_rng_state().numpy().tobytes(),
        "numpy (np.random.seed)": pickle.dumps(np.random.get_state()),
        "Python's random (random.seed)": pickle.dumps(random.getstate()),
    }
    return {name: hashlib.blake2b(state).hexdigest() for name, state in states.items()}
