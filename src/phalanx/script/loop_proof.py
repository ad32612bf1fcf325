"""Verify a script that has its own loop: compare its steps on one rank with those on all ranks.

The script runs unchanged except for four things: `phalanx.init` gets the strategy to verify, the
model and the batches are in float64, `run.save` and `run.resume` do nothing, and the script ends
after a number of steps. The run on one rank has no split, so any difference comes from the split.
The run on one rank is not compared with plain PyTorch; `Trainer.verify` does this for a trainer.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from phalanx.data.rows import map_tensors
from phalanx.errors import ConfigError, RankFailed, ScriptError
from phalanx.launch.local import run_ranks
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.script.init import VERIFY_OVERRIDES, refuse_in_own_loop
from phalanx.script.launch import run_script
from phalanx.script.run import Run
from phalanx.strategy import Strategy
from phalanx.verify.judge import judge
from phalanx.verify.record import Witness, state_of
from phalanx.verify.reference import History
from phalanx.verify.verdict import Verdict, Whereabouts, failed


def prove_script(path: str, words: Sequence[str], strategy: Strategy, steps: int) -> Verdict:
    """Compare the steps of a script on the ranks of `strategy` with its steps on one rank."""
    if is_under_torchrun():
        raise ConfigError(
            "verify starts a script on one rank and on several, but this is a rank of a job "
            "already; start phalanx verify itself, without torchrun"
        )
    refuse_in_own_loop(strategy)
    (alone,) = run_ranks(record_script, 1, path, list(words), Strategy(), steps)
    if not alone.records:
        raise ConfigError(
            f"{path} takes no step of phalanx.init's run on one rank, so there is nothing to "
            "compare; verify sees the steps that follow run.backward"
        )
    try:
        ranks = run_ranks(record_script, strategy.num_ranks, path, list(words), strategy, steps)
    except RankFailed as failure:
        return failed(str(strategy), failure)
    except ScriptError as error:  # one rank ran, so this is a difference
        return Verdict(str(strategy), [], failure=str(error))
    return judge(str(strategy), ranks, alone)


def record_script(path: str, words: list[str], strategy: Strategy, steps: int) -> History:
    """Run a script on this rank of the job, and record its first `steps` steps."""
    torch.set_default_dtype(torch.float64)
    with Whereabouts() as at:
        watch = _Watch(steps, at)
        VERIFY_OVERRIDES.append((strategy, watch.attach))
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                run_script(path, words, None)
        finally:
            VERIFY_OVERRIDES.pop()
    return watch.history


class _Watch:
    """Records the steps of a script's `Run`, and ends the script after `steps` steps."""

    def __init__(self, steps: int, at: Whereabouts) -> None:
        self.history = History()
        self._steps, self._at = steps, at
        self._number = -1

    def attach(self, run: Run) -> None:
        """Record the steps of `run`, which `phalanx.init` has made."""
        self._witness = Witness(run.comm)
        self._witness.history = self.history  # one history for all runs of the script
        handles: Any = run
        handles.backward = functools.partial(self._backward, run, run.backward)
        handles.prepare = functools.partial(self._prepare, run, run.prepare)
        handles.save, handles.resume = _unsaved, _unresumed

    def _prepare(self, run: Run, prepare: Any, *objects: Any, **options: Any) -> Any:
        for each in objects:
            if isinstance(each, nn.Module):
                each.double()
            elif isinstance(each, DataLoader):
                loader: Any = each
                loader.collate_fn = functools.partial(_wide, loader.collate_fn)
        prepared = prepare(*objects, **options)
        for each in objects:
            if isinstance(each, nn.Module):
                self._model = each
                self._at.follow(each)
            elif isinstance(each, torch.optim.Optimizer):
                each.register_step_pre_hook(self._before)
                each.register_step_post_hook(self._after)
        return prepared

    def _backward(self, run: Run, backward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._number + 1 == self._steps and run.steps_done == self._steps:
            raise SystemExit  # all ranks end in the same call
        self._at.step = self._number + 1
        made = backward(*args, **kwargs)
        self._number += run.is_step_end
        self._loss = {"loss": {"": float(made.of_step)}}
        return made

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the loss, the gradients before an optimizer's step, and the learning rates."""
        named = {p: name for name, p in self._model.named_parameters()}
        groups = optimizer.param_groups
        taken = [p for group in groups for p in group["params"] if p in named]
        gradients = {named[p]: p.grad for p in taken if p.grad is not None}
        rates = {f"group {number}": float(group["lr"]) for number, group in enumerate(groups)}
        self._witness.note(self._number, {}, self._loss)
        self._witness.note(self._number, {"gradient": gradients}, {"learning rate": rates})

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record weights, buffers and optimizer state after an optimizer's step."""
        buffers = dict(self._model.named_buffers())
        held = {"buffer": buffers, **state_of(self._model, optimizer)}
        self._witness.note(self._number, held, {})


def _unsaved(folder: str | Path, *, keep: int | None = None) -> Path:
    del keep
    return Path(folder)


def _unresumed(folder: str | Path) -> bool:
    del folder
    return False


def _wide(collate: Any, samples: Any) -> Any:
    return map_tensors(collate(samples), lambda t: t.double() if t.is_floating_point() else t)
