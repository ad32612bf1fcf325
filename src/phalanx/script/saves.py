"""`run.save` and `run.resume`: checkpoints of a script, and the folders that contain them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Checkpoint
from phalanx.checkpoint.registered import Registered
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.untrusted import brief
from phalanx.comm.together import on_first_rank
from phalanx.errors import CheckpointError, ScriptError
from phalanx.launch.heartbeat import PULSE
from phalanx.script import checkpoint
from phalanx.script.checks import check_arguments
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
        saver = self._savers.get(self._folders.get(wanted, wanted)) or self._claim(wanted)
        saver.keep = keep
        with PULSE.doing(f"the checkpoint after step {step.steps_done}"):
            loop = self._loop(model)
            saved = checkpoint.begin(saver, loop, self._strategy, prepared.steps_done)
            saver.finish()
        _note_position(saver.run, saved)
        return saved

    def _claim(self, wanted: Path) -> Saver:
        """Lock the folder of the resumed run, or one without checkpoints, and return its saver.

        Raises:
            CheckpointError: another process saves there, or has saved since the run was resumed.
        """
        start = self._starts.get(wanted)
        while True:
            here = wanted if start is not None else checkpoint.free_folder(wanted)
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
        found = checkpoint.load(path, self._loop(model))
        self.registered.is_closed = True
        if found is None:
            self._show(f"no checkpoint in {folder} yet: starts from scratch")
            return False
        where, about, damaged = found
        run = manifest.run_folder(path)
        there = on_first_rank(lambda: manifest.complete_checkpoints(run), f"cannot resume {run}")
        whole = [step for step, each in there.items() if each not in damaged]
        if is_last := max(whole, default=0) == about.steps_done:
            self._folders[run], self._starts[run] = run, found
        step.steps_done = about.steps_done
        step.reset()
        _note_position(run if is_last else where, where)
        for line in [*found.words(), f"resumes from {where}, after step {step.steps_done}"]:
            self._show(line)
        return True

    def _loop(self, model: nn.Module) -> checkpoint.LoopObjects:
        """Return the objects to save; register the extra state of the model's modules once."""
        if not self._is_extra_known:
            self._is_extra_known = True
            self.registered.add_extra_state(model)
        made = self._prepared
        fitted = (made.optimizers, made.schedulers, made.loaders, made.generator)
        return checkpoint.LoopObjects(model, *fitted, self.registered)


def _note_position(folder: Path, where: Path) -> None:
    """Set the hint on how to resume that is printed when the job ends."""
    PULSE.saved(f"last checkpoint: {where}; run.resume({str(folder)!r}) resumes it")


def _folder_of(call: str, folder: Any) -> Path:
    """Return the folder argument of `call` as a path, after checks."""
    if not isinstance(folder, str | Path) or not str(folder):
        raise ScriptError(f"{call}: the folder is {brief(folder)}; expected a path")
    path = Path(folder)
    if path.is_file():
        raise ScriptError(f"{call}: {path} is a file; expected the folder of a run")
    return path
