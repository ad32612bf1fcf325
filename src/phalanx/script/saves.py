"""The checkpoints that `run.save` writes and `run.resume` loads, and the folders of a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.checkpoint.registered import Registered
from phalanx.checkpoint.saver import Saver
from phalanx.launch.heartbeat import PULSE
from phalanx.script import checkpoint
from phalanx.script.arguments import check_keep, folder_of
from phalanx.script.prepare import Prepared


class Saves:
    """Saves and resumes what is prepared and what is registered.

    Attributes:
        registered: objects of the script that are saved by name.
    """

    def __init__(self, prepared: Prepared, strategy: str, show: Callable[[str], None]) -> None:
        """Begin; `show` prints a line on the first rank."""
        self.registered = Registered()
        self._is_extra_known = False
        self._prepared, self._strategy, self._show = prepared, strategy, show
        self._folders: dict[Path, Path] = {}
        self._savers: dict[Path, Saver] = {}  # whose locks this process has until it ends

    def save(self, folder: str | Path, keep: int | None) -> Path:
        """Save a checkpoint, see `Run.save`."""
        prepared = self._prepared
        prepared.own_rows.warn()
        check_keep(keep)
        (model, step), wanted = prepared.need("save"), folder_of("save", folder)
        # First: what follows asks all ranks, of which one may have left a step out.
        prepared.check_replicas("save")
        step.refuse_unused()
        prepared.refuse_average("save")
        prepared.warn_of_schedules(list(self.registered.objects))
        if wanted not in self._folders:
            self._folders[wanted] = checkpoint.free_folder(wanted)
            if self._folders[wanted] != wanted:
                self._show(
                    f"{folder} holds checkpoints of another run, and this one saves in "
                    f"{self._folders[wanted]}; run.resume would have gone on from them"
                )
        here = self._folders[wanted]
        saver = self._savers[here] = self._savers.get(here) or Saver(here)
        saver.keep = keep
        with PULSE.doing(f"the checkpoint after step {step.steps_done}"):
            args = (model, prepared.optimizers, self._standing(), self._objects(model))
            saved = checkpoint.begin(saver, *args)
            saver.finish()
        _tell_standing(here, saved)
        return saved

    def resume(self, folder: str | Path) -> bool:
        """Load the latest checkpoint in a folder, see `Run.resume`."""
        prepared = self._prepared
        model, step = prepared.need("resume")
        args = (model, prepared.optimizers, self._standing(), self._objects(model))
        found = checkpoint.load(folder_of("resume", folder), *args)
        self.registered.is_closed = True
        if found is None:
            self._show(f"no checkpoint in {folder} yet: begins anew")
            return False
        self._folders[Path(folder)] = Path(folder)
        where, stood = found
        step.steps_done, prepared.draws.state = stood.steps_done, stood.draws
        for loader, state in zip(prepared.loaders, stood.loaders, strict=True):
            loader.set_state(state)
        step.reset()
        _tell_standing(Path(folder), where)
        self._show(f"goes on from {where}, after step {step.steps_done}")
        return True

    def _objects(self, model: nn.Module) -> Registered:
        """Return what is registered, the extra state of the model's modules with it."""
        if not self._is_extra_known:
            self._is_extra_known = True
            self.registered.add_extra_state(model)
        return self.registered

    def _standing(self) -> checkpoint.Standing:
        prepared: Any = self._prepared
        return checkpoint.Standing(
            strategy=self._strategy,
            steps_done=prepared.steps_done,
            draws=prepared.draws.state,
            loaders=[loader.state() for loader in prepared.loaders],
            schedulers=prepared.schedulers,
        )


def _tell_standing(folder: Path, where: Path) -> None:
    """Have whoever ends the job say how to resume."""
    PULSE.saved(f"{where} stands; run.resume({str(folder)!r}) resumes from it")
