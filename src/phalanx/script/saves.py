"""`run.save` and `run.resume`: checkpoints of a script, and the folders that contain them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.checkpoint import manifest
from phalanx.checkpoint.adapters import save_adapters
from phalanx.checkpoint.files import find_whole
from phalanx.checkpoint.in_memory import pace_of, recover
from phalanx.checkpoint.manifest import Checkpoint, Manifest
from phalanx.checkpoint.optimizer_state import CombinedOptimizer, OptimizerSettings, SavedSchedule
from phalanx.checkpoint.registered import Registered
from phalanx.checkpoint.run_state import RunState, Several, Stateful
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.untrusted import brief
from phalanx.comm.together import on_first_rank
from phalanx.errors import CheckpointError, ScriptError
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.launched import launched
from phalanx.object_store import path_of
from phalanx.script.checks import check_arguments
from phalanx.script.loader import RankLoader
from phalanx.script.order import JobGenerator
from phalanx.script.prepare import Prepared
from phalanx.train.job.run_folder import check_unused


class Saves:
    """Saves and resumes the prepared and the registered objects."""

    def __init__(self, prepared: Prepared, strategy: str, show: Callable[[str], None]) -> None:
        """Start without registered objects; `show` prints a line on the first rank."""
        self.registered = Registered()
        self._is_extra_known = False
        self._prepared, self._strategy, self._show = prepared, strategy, show
        self._folders: dict[Path, Path] = {}
        self._starts: dict[Path, Checkpoint] = {}  # checkpoints that were resumed, by their runs
        self._savers: dict[Path, Saver] = {}  # each locks its folder until the process ends
        self._finish_in_memory: Callable[[], None] = lambda: None

    def save(self, folder: str | Path, keep: int | None) -> Path:
        """Save a checkpoint, see `Run.save`."""
        prepared = self._prepared
        check_arguments("save", keep=keep)
        (model, step), path = prepared.require_model("save"), _folder_of("save", folder)
        # First, because later checks use collectives that a rank which skipped a step may not call.
        prepared.check_replicas("save")
        step.refuse_unused()
        prepared.refuse_average("save")
        prepared.warn_of_schedules(list(self.registered.objects))
        wanted = on_first_rank(partial(manifest.run_folder, path), f"cannot save in {path}")
        saver = self._savers.get(self._folders.get(wanted, wanted)) or self._locked(wanted)
        saver.keep = keep
        with PULSE.doing(f"the checkpoint after step {step.steps_done}"):
            about = manifest_of(self._strategy, prepared.steps_done)
            self._state(model).begin_save(saver, about, replaces=True)
            saver.finish()
            save_adapters(model, saver.run)
        saved = manifest.folder_of(saver.run, about.steps_done)
        _note_position(saver.run, saved)
        return saved

    def _locked(self, wanted: Path) -> Saver:
        """Lock the folder of the resumed run, or one without checkpoints, and return its saver.

        Raises:
            CheckpointError: another process saves there, or has saved since the run was resumed.
        """
        start = self._starts.get(wanted)
        while True:
            # A new run must not mix its checkpoints with another run's, nor fail because of them:
            # it takes `wanted`, or the first `wanted`-N without any.
            names = itertools.chain([wanted], (Path(f"{wanted}-{n}") for n in itertools.count(2)))
            # A state in memory is this run's own.
            free = (n for n in names if start is not None or not manifest.complete_checkpoints(n))
            here = on_first_rank(partial(next, free), f"cannot save in {wanted}")
            saver = Saver(here)
            try:
                # Now that it is locked: another run may have saved there and ended meanwhile.
                on_first_rank(partial(check_unused, here, start), f"cannot save in {here}")
                break
            except CheckpointError:
                saver.__exit__(None, None, None)
                if start is not None:
                    raise
        self._folders[wanted], self._savers[here] = here, saver
        if here != wanted:
            self._show(
                f"{wanted} holds checkpoints of another run, or later than the resumed one, so "
                f"this run saves in {here}; to continue the other run, call run.resume first"
            )
        return saver

    def resume(self, folder: str | Path) -> bool:
        """Load the checkpoint that a folder names, see `Run.resume`."""
        prepared = self._prepared
        model, step = prepared.require_model("resume")
        path = _folder_of("resume", folder)
        recover()
        found = on_first_rank(lambda: latest(path), f"cannot resume from {path}")
        if found is not None:
            self._state(model).load(found)
        self.registered.is_closed = True
        if found is None:
            self._show(f"no checkpoint in {folder} yet: starts from scratch")
            self._save_in_memory(path)
            return False
        where, about, damaged = found
        run = manifest.run_folder(path)
        there = on_first_rank(lambda: manifest.saved_states(run), f"cannot resume {run}")
        whole = [step for step, each in there.items() if each not in damaged]
        if is_last := max(whole, default=0) == about.steps_done:
            self._folders[run], self._starts[run] = run, found
        step.steps_done = about.steps_done
        step.reset()
        if not found.is_in_memory:  # which the job does not leave
            _note_position(run if is_last else where, where)
        for line in [*found.words(), f"resumes from {where}, after step {step.steps_done}"]:
            self._show(line)
        self._save_in_memory(run)
        return True

    def _save_in_memory(self, run: Path) -> None:
        """Save in memory between steps from now on, if the job is launched so."""
        if launched() is None:
            return
        of, (model, step) = self._prepared, self._prepared.require_model("resume")
        self._finish_in_memory()  # of an earlier resume, which saves in the same folder
        run = on_first_rank(run.absolute, f"cannot resume {run}")
        where = (run, of.job.memory_every, model, CombinedOptimizer(of.optimizers))
        if (pace := pace_of(*where, step.steps_done, self._show)) is None:
            return

        def save() -> None:
            of.refuse_average("save")
            about = manifest_of(self._strategy, of.steps_done, is_passing=True)
            self._state(model).begin_save(pace.saver, about, replaces=True)

        self._finish_in_memory = pace.saver.finish
        of.between_steps = lambda: pace.after_step(of.steps_done, save)

    def _state(self, model: nn.Module) -> RunState:
        """Return the objects to save; register the extra state of the model's modules once."""
        if not self._is_extra_known:
            self._is_extra_known = True
            self.registered.add_extra_state(model)
        of = self._prepared
        parts = parts_of(of.optimizers, of.schedulers, of.loaders, of.generator)
        return RunState(model, of.optimizers, parts, self.registered, of.frozen)


def parts_of(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    loaders: Sequence[RankLoader],
    generator: JobGenerator,
) -> dict[str, Stateful]:
    """Return the parts of a training loop that a checkpoint has, besides its tensors."""
    return {
        "settings": Several("optimizers", [OptimizerSettings(each) for each in optimizers]),
        "schedulers": Several("schedulers", [SavedSchedule(each) for each in schedulers]),
        "loaders": Several("loaders", loaders),
        "draws": generator,
    }


def manifest_of(
    strategy: Any, steps_done: int, num_steps: int | None = None, *, is_passing: bool = False
) -> Manifest:
    """Return the manifest of a script's checkpoint, without states."""
    return Manifest(
        steps_done=steps_done,
        num_steps=num_steps or steps_done,  # a loop of one's own does not give its total
        consumed=0,
        num_ranks=dist.get_world_size(),
        strategy=str(strategy),
        shape={},
        stream={},
        is_passing=is_passing,
    )


def latest(folder: Path) -> Checkpoint | None:
    """Return the checkpoint that `folder` names, or the latest of the run; None in a new run.

    Raises:
        CheckpointError: it is damaged, contains only weights, or is of `phalanx train`.
    """
    if manifest.run_folder(folder) == folder and not _has_checkpoint(folder):
        return None
    found = find_whole(folder, compares=True)
    where, about, _ = found
    if not about.has_optimizer:
        raise CheckpointError(
            f"{where} contains only the weights; start a new run and load them by "
            f"run.load_state_dict{manifest.older_checkpoints_hint(where)}"
        )
    if about.is_of_decoder:
        raise CheckpointError(f"{where} was saved by `phalanx train`; resume it by --resume")
    return found


def _has_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or a run with complete ones."""
    return (folder / manifest.NAME).exists() or bool(manifest.saved_states(folder))


def _note_position(folder: Path, where: Path) -> None:
    """Set the hint on how to resume that is printed when the job ends."""
    PULSE.saved(f"last checkpoint: {where}; run.resume({str(folder)!r}) resumes it")


def _folder_of(call: str, folder: Any) -> Path:
    """Return the folder argument of `call` as a path, after checks."""
    if not isinstance(folder, str | Path) or not str(folder):
        raise ScriptError(f"{call}: the folder is {brief(folder)}; expected a path")
    path = path_of(folder)
    if path.is_file():
        raise ScriptError(f"{call}: {path} is a file; expected the folder of a run")
    return path
