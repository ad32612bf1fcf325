"""Prove a script with a loop of its own: on one rank and on all, step by step.

The script runs as it is, but for four things: `phalanx.init` is told the strategy, the model and
the batches are in float64, `run.save` and `run.resume` leave files alone, and the script ends after
some steps.
Its one rank knows of no split, so what differs beside it comes of the split. That one rank computes
what plain PyTorch does is no part of this: see `Trainer.verify` for a job without a loop.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx.comm.comm import local_shard
from phalanx.data.rows import map_tensors
from phalanx.errors import ConfigError, RankFailed
from phalanx.launch.local import run_ranks
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.script import run as script_run
from phalanx.script.launch import run_script
from phalanx.script.run import Run
from phalanx.strategy import Strategy
from phalanx.verify.compare import Difference, compare_step
from phalanx.verify.record import (
    RankFacts,
    bits_of,
    full_tensors,
    owner,
    unequal_ranks,
)
from phalanx.verify.reference import StepRecord, Values, kept_by
from phalanx.verify.verdict import Place, Verdict
from phalanx.verify.whereabouts import Whereabouts, failed


@dataclass
class Seen:
    """What a script has done on a rank, by the number of the step; records are rank 0's alone."""

    records: dict[int, StepRecord] = field(default_factory=dict[int, StepRecord])
    facts: dict[int, RankFacts] = field(default_factory=dict[int, RankFacts])


def prove_script(path: str, words: Sequence[str], strategy: Strategy, steps: int) -> Verdict:
    """Compare the steps of a script on the ranks of a strategy with those on one rank.

    Raises:
        ConfigError: this is a rank of a job already, or the script takes no step.
    """
    if is_under_torchrun():
        raise ConfigError(
            "verify starts a script on one rank and on several, but this is a rank of a job "
            "already; start phalanx verify itself, without torchrun"
        )
    (alone,) = run_ranks(record_script, 1, path, list(words), Strategy(), steps)
    if not alone.records:
        raise ConfigError(f"{path} takes no step on one rank, so there is nothing to compare")
    try:
        ranks = run_ranks(record_script, strategy.num_ranks, path, list(words), strategy, steps)
    except RankFailed as failure:
        return failed(str(strategy), failure)
    return _compared(str(strategy), ranks, alone)


def _compared(name: str, ranks: Sequence[Seen], alone: Seen) -> Verdict:
    """Compare up to the end of the first step that differs."""
    differences, unequal = list[Difference](), list[Place]()
    place: Place | None = None
    if list(ranks[0].records) != list(alone.records):
        what = f"{name} takes {len(ranks[0].records)} steps, one rank {len(alone.records)}"
        place = Place(None, what)
    for step in sorted(set(alone.records) & set(ranks[0].records)):
        differences += compare_step(step, ranks[0].records[step], alone.records[step])
        unequal += unequal_ranks(step, [rank.facts[step] for rank in ranks])
        if unequal or not all(d.passes for d in differences):
            break
    first = next((d for d in differences if not d.passes), None)
    if first is not None:
        module = None if first.quantity in ("loss", "norm", "learning rate") else owner(first.name)
        what = f"{first.what} is the first that differs, and all before agrees"
        place = Place(module, what, first.step)
    elif unequal:
        place = unequal[0]
    replicas = [f"step {each.step}: {each.what}" for each in unequal]
    if place is not None and first is None and not unequal:
        replicas = [place.what]
    return Verdict(name, differences, replicas, place=place, case="")


def record_script(path: str, words: list[str], strategy: Strategy, steps: int) -> Seen:
    """Run a script on this rank, with the others of the job, and take down its first steps."""
    torch.set_default_dtype(torch.float64)
    with Whereabouts() as at:
        watch = _Watch(steps, at)
        script_run.IN_PLACE.append((strategy, watch.attach))
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            run_script(path, words, None)
    return watch.seen


class _Watch:
    """Takes down what a script does with its run, and ends the script after some steps."""

    def __init__(self, steps: int, at: Whereabouts) -> None:
        self.seen = Seen()
        self._steps, self._at = steps, at
        self._number = -1
        self._loss = 0.0

    def attach(self, run: Run) -> None:
        """Watch a run that `phalanx.init` has made."""
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
                each.register_step_pre_hook(functools.partial(self._before, run))
                each.register_step_post_hook(functools.partial(self._after, run))
        return prepared

    def _backward(self, run: Run, backward: Any, *args: Any, **kwargs: Any) -> Any:
        if self._number + 1 == self._steps and run.steps_done == self._steps:
            raise SystemExit  # all ranks come here together
        self._at.step = self._number + 1
        made = backward(*args, **kwargs)
        self._loss = float(made.of_step)
        self._number += run.is_step_end
        return made

    def _before(self, run: Run, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Take down the gradients as an optimizer takes them, and its rates."""
        named = {p: name for name, p in self._model.named_parameters()}
        gradients = {
            named[p]: p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p in named and p.grad is not None
        }
        rates = {
            f"group {number}": float(group["lr"])
            for number, group in enumerate(optimizer.param_groups)
        }
        self._keep(run, {"gradient": gradients}, {"learning rate": rates})

    def _after(self, run: Run, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Take down what an optimizer leaves."""
        model = self._model
        named = {n: p for n, p in model.named_parameters() if p in optimizer.state}
        kept = kept_by({name: optimizer.state[p] for name, p in named.items()})
        weights = {name: p.detach() for name, p in model.named_parameters()}
        buffers = dict(model.named_buffers())
        self._keep(run, {**kept, "buffer": buffers, "weight": weights}, {})

    def _keep(
        self, run: Run, held: dict[str, dict[str, Tensor]], numbers: dict[str, dict[str, float]]
    ) -> None:
        before = self.seen.facts.get(self._number)
        bits = dict(before.bits) if before else {}
        nonfinite = list(before.nonfinite) if before else []
        for quantity, tensors in held.items():
            bits |= bits_of(quantity, tensors)
        for name, gradient in held.get("gradient", {}).items():
            if not local_shard(gradient).isfinite().all():
                nonfinite.append(name)
        self.seen.facts[self._number] = RankFacts(self._loss, {}, bits, nonfinite)
        full: dict[str, Values] = {
            what: full_tensors(tensors, run.comm) for what, tensors in held.items()
        }
        if run.comm.is_first:
            record: dict[str, Values] = {"loss": {"": self._loss}}
            record |= self.seen.records.get(self._number, {})
            for what, values in {**full, **numbers}.items():
                record[what] = {**record.get(what, {}), **values}
            self.seen.records[self._number] = record


def _unsaved(folder: str | Path, *, keep: int | None = None) -> Path:
    del keep
    return Path(folder)


def _unresumed(folder: str | Path) -> bool:
    del folder
    return False


def _wide(collate: Any, samples: Any) -> Any:
    return map_tensors(collate(samples), lambda t: t.double() if t.is_floating_point() else t)
