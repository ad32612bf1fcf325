"""`phalanx.init` and the run that it returns: a training loop of one's own, on many ranks.

    run = phalanx.init()                                   join the job, or be one process
    model, optimizer, loader = run.prepare(...)            split the model, deal the batches out
    for inputs, labels in loader:                          this rank's rows of the global batch
        loss = cross_entropy(model(inputs), labels, reduction="sum")
        run.backward(loss, len(labels))                    gradients of the global batch's mean
        optimizer.step()
        optimizer.zero_grad()

Loss law: the sum of the losses over the global batch / the samples (or tokens) in it. `backward`
adds counts and losses up over the ranks before it divides, so neither uneven batches nor the number
of ranks change a gradient. The gradients are whole when the last `backward` of a step returns, so
all that reads them (clipping, a scheduler, an optimizer of any kind) stays as it was.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.together import gather_objects
from phalanx.data.rows import map_batch, tensors_of
from phalanx.debug.check import CollectiveCheck
from phalanx.errors import ConfigError, ScriptError, StrategyError
from phalanx.launch.attach import attach
from phalanx.parallel.accumulate import Accumulate, Runner
from phalanx.parallel.batch_norm import Statistics, settle_batch_norms
from phalanx.parallel.dropout import Place, can_be_keyed, key_dropouts, name_draws
from phalanx.parallel.plan import Plan
from phalanx.script import checkpoint
from phalanx.script.buffers import refuse_max_norm, warn_of_buffers
from phalanx.script.loader import Draws, RankLoader
from phalanx.script.loss import check_sum
from phalanx.script.optimizer import Names, guard, rebind
from phalanx.strategy import Strategy
from phalanx.train.clip import gradient_norm, scale_to

STRATEGY: Final = "PHALANX_STRATEGY"
"""Variable in which `phalanx run --strategy` hands the strategy to the script."""


def init(
    strategy: str | Strategy | None = None,
    *,
    accumulation: int = 1,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout_s: float = 600.0,
    debug_comm: bool = False,
) -> Run:
    """Join the job of `phalanx run`, torchrun or Slurm; without one, be a job of one process.

    Args:
        strategy: how to split the work, such as "dp2,fsdp2"; that of `phalanx run --strategy` if
            None, else dp over all ranks that there are.
        accumulation: how many times `backward` is called for each step of the optimizer. The last
            step of a pass over the data may have fewer.
        seed: of the masks of dropout.
        device: what to compute on, "cuda" where there is a GPU if "auto".
        timeout_s: longest wait for another rank in one collective, in seconds.
        debug_comm: compare each collective of all ranks before it runs, see docs/debugging.md.

    Raises:
        ConfigError: the strategy cannot be read, or needs another number of ranks, or is for
            pipelines or context parallelism, which need a trainer's loop; or the job is incomplete.
    """
    parsed = _strategy(strategy)
    if accumulation < 1:
        raise ConfigError(f"init: accumulation is {accumulation}; expected at least 1")
    facts = {"strategy": parsed and str(parsed), "accumulation": accumulation, "seed": seed}
    kind = attach(facts, device=device, timeout_s=timeout_s)
    num_ranks = dist.get_world_size()
    if parsed is None:
        parsed = Strategy.parse(f"dp{num_ranks}")
    if parsed.num_ranks != num_ranks == 1:
        raise StrategyError(
            f"init: strategy '{parsed}' needs {parsed.num_ranks} ranks, but this is one process; "
            f"start the script by: phalanx run {Path(sys.argv[0]).name} --nproc {parsed.num_ranks}"
        )
    run = Run(Ranks(parsed, kind), parsed, accumulation, seed)
    if debug_comm:
        CollectiveCheck(run.comm.mesh).__enter__()  # for as long as the process lasts
    return run


def _strategy(given: str | Strategy | None) -> Strategy | None:
    """Return the strategy of the script, or of its command line."""
    told = os.environ.get(STRATEGY)
    strategy = Strategy.parse(given) if isinstance(given, str) else given
    if told and strategy is not None and str(strategy) != str(Strategy.parse(told)):
        raise StrategyError(
            f"init: the script asks for strategy '{strategy}' and its command line for '{told}'; "
            "leave one of them out"
        )
    strategy = Strategy.parse(told) if told and strategy is None else strategy
    for axis, what in (("pp", "a pipeline"), ("cp", "context parallelism")):
        if strategy is not None and getattr(strategy, axis).degree > 1:
            raise StrategyError(
                f"init: strategy '{strategy}' has {axis}: {what} runs the forward itself, which a "
                "loop of one's own calls; use dp, fsdp and tp here"
            )
    return strategy


class Run:
    """A training loop's part in a job: what is split, and the step under way.

    Attributes:
        comm: the ranks.
        strategy: how the work is split.
        accumulation: calls of `backward` for each step.
        steps_done: steps that an optimizer has taken, those before `resume` too.
    """

    def __init__(self, comm: Ranks, strategy: Strategy, accumulation: int, seed: int) -> None:
        self.comm = comm
        self.strategy = strategy
        self.accumulation = accumulation
        self.steps_done = 0
        self._seed = seed
        self._draws = Draws()
        self._loaders: list[RankLoader] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[Any] = []
        self._folders: dict[Path, Path] = {}
        self._yielded: RankLoader | None = None
        self._leading: RankLoader | None = None
        self._read: RankLoader | None = None
        self._model: nn.Module | None = None
        self._before: Names = {}
        self._runner: Runner = Accumulate()
        self._parameters: dict[str, nn.Parameter] = {}
        self._kept: dict[str, str] = {}
        self._totals = torch.zeros(2, dtype=torch.float64, device=comm.device)
        self._divisor = self._totals[1]
        self._agreed = torch.ones(2, dtype=torch.bool)
        self._num_batches = 0
        self._num_backwards = 0
        self._is_whole = False
        self._stepped: set[int] = set()
        self._made: list[weakref.ref[Tensor]] = []
        self._calls: dict[str, int] = {}
        self._is_warned = False
        self._num_begun = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        return dist.get_rank() == 0

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self.comm.device

    @property
    def is_step_end(self) -> bool:
        """Whether the gradients are those of a whole step, so that optimizers may step."""
        return self._is_whole

    def print(
        self, *values: object, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = True
    ) -> None:
        """Print on the first rank alone."""
        if self.is_first:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def prepare(
        self,
        *objects: Any,
        batch_norm: Statistics | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> Any:
        """Split a model, and fit optimizers, schedulers and loaders to it; all ranks call this.

        The model is split in place, on this rank's device; optimizers keep their groups, settings
        and schedulers, and update this rank's shards. A DataLoader comes back as one that yields
        this rank's rows of each of its batches, on this rank's device.

        Args:
            *objects: one nn.Module, and any number of optimizers, schedulers and DataLoaders; None
                stays None.
            batch_norm: over what BatchNorm takes its mean and variance in training: "global", the
                rows of all ranks, as one process does, or "local", each rank's own. A model that
                has a BatchNorm must say.
            roles: patterns of module names to roles for tp, see docs/tensor.md.

        Returns:
            The objects, in their order; one by itself.

        Raises:
            ScriptError: an object is none of those, or was prepared, or is of another model.
            ConfigError: the strategy does not split the model, or a loader's batches.
        """
        for model in [each for each in objects if isinstance(each, nn.Module)]:
            self._take_model(model, batch_norm, roles)
        prepared = [self._prepared(each) for each in objects]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def backward(self, loss_sum: Tensor, count: float | Tensor | None = None) -> Tensor:
        """Add up the gradients of the global batch's loss; every rank calls this together.

        After the last call of a step each `.grad` is the gradient of the mean over the global
        batch, or this rank's shard of it. The first call of a step clears the gradients.

        Args:
            loss_sum: sum of the losses of this rank's samples, a number with its graph; 0-d.
            count: samples (or tokens) of this rank that it is a sum over; it has to be given.

        Returns:
            The mean loss over all ranks of the step so far, of all its microbatches where it
            accumulates; 0-d, float64, without a graph.

        Raises:
            ScriptError: the loss is a mean or has no graph, or the model has been changed.
        """
        model = self._prepared_model("backward")
        check_sum(loss_sum, count)
        if self._num_backwards == 0:
            self._begin_step(model, loss_sum.detach())
        found = self._totals.new_tensor([0.0, 0.0, self.steps_done, self._num_batches])
        found[1] = cast("float | Tensor", count)
        # The mean over no row, times 0 rows, is not a number.
        found[0] = torch.where(found[1] > 0, loss_sum.detach().double(), 0.0)
        self.comm.all_reduce(found, "data")
        self._totals += found[:2]
        own = found.new_tensor([self.steps_done, self._num_batches])
        self._agreed = found[2:] == own * self.comm.size("data")
        if self._num_backwards == 0:
            # Most steps have as many samples in each call, so that nothing is left to correct.
            self._divisor = _nonzero(found[1] * self.accumulation)
        self._num_backwards += 1
        is_pass_over = self._leading is not None and self._leading.is_last
        is_last = is_pass_over or self._num_backwards == self.accumulation
        reducer = self._runner.reducer
        wide = torch.promote_types(loss_sum.dtype, torch.float32)
        try:
            if reducer is not None:
                reducer.before_backward(reducer.parameters if is_last else ())
            (loss_sum.to(wide) / self._divisor.to(wide)).backward()
        except BaseException:  # a script may catch it, and begin the step again
            self._num_backwards = 0
            self._clear()
            raise
        if self._yielded is not None:
            self._yielded.is_used = True
        self._leading = None
        if is_last:
            if reducer is not None:
                reducer.finish()
            self._end_step()
        return self._totals[0] / _nonzero(self._totals[1])

    def clip(self, max_norm: float, p: float = 2.0) -> Tensor:
        """Scale the gradients so that their p-norm is at most `max_norm`; all ranks call this.

        Between the last `backward` of a step and `optimizer.step()`. Returns the norm of the whole
        gradient before, each element counted once however the model is split; 0-d, float64.

        Raises:
            ScriptError: the gradients are not whole.
        """
        self._prepared_model("clip")
        if not self._is_whole:
            raise ScriptError(
                "clip: there are no gradients of a whole step; call it after the last run.backward "
                "of a step and before optimizer.step()"
            )
        gradients = self._gradients()
        norm = gradient_norm(gradients, self.comm, p)
        if (value := float(norm)) > max_norm:
            scale_to(gradients, value, max_norm)
        return norm

    def sum(self, value: float | Tensor) -> Tensor:
        """Return the sum of `value` over the ranks that have different samples; all call this.

        It is float64, or int64 where all ranks give whole numbers or truth values.
        """
        own = torch.as_tensor(value, device=self.comm.device).detach()
        # A rank without rows may have the integer 0 where others have a number.
        is_float = torch.tensor(own.is_floating_point(), dtype=torch.uint8, device=own.device)
        is_float = bool(self.comm.all_reduce(is_float, "data", "max"))
        return self.comm.all_reduce(
            own.to(torch.float64 if is_float else torch.int64, copy=True), "data"
        )

    def gather(self, batch: Any) -> Any:
        """Return the rows of all ranks, in the order of one process; all ranks call this.

        Args:
            batch: a tensor, or mappings, lists or tuples of tensors, with this rank's rows of a
                batch of a prepared loader first; their numbers may differ between ranks.

        Returns:
            The same with all rows, on the CPU, so that metrics count each sample once.
        """
        own = map_batch(batch, lambda tensor: tensor.detach().cpu())
        if any(tensor.ndim == 0 for tensor in tensors_of(own)):
            raise ScriptError(
                "gather: a tensor has no rows; give one number for each sample, or use run.sum"
            )
        rows = {len(tensor) for tensor in tensors_of(own)}
        if self._read is not None and rows - {len(self._read.rows)}:
            raise ScriptError(
                f"gather: {sorted(rows)} rows, while the batch that this rank has read last has "
                f"{len(self._read.rows)}; call it for each batch, which keeps the order of one "
                "process, and put those results together"
            )
        # Ranks that differ on tp alone have the same rows.
        parts = gather_objects((self.comm.coord("data"), own))
        by_rank = {number: tensors_of(part) for number, part in parts}
        pieces = [by_rank[number] for number in sorted(by_rank)]
        wholes = iter([_rows_of_all(each) for each in zip(*pieces, strict=True)])
        return map_batch(own, lambda _: next(wholes))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights and buffers on the CPU; every rank calls this together.

        They are those of the plain model, for `torch.save` on the first rank, say; the other ranks
        get them too.

        Raises:
            ScriptError: no model is prepared.
        """
        state = self._prepared_model("state_dict").state_dict()
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in whole.items()}

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Save a checkpoint that any strategy on any number of ranks goes on from; all call this.

        It has weights, the state and settings of the optimizers, the schedulers, and where the
        loaders stand; it lies in `folder`/checkpoints/step-N and is whole when this returns. The
        latest `keep` stay, all if None. A folder that has checkpoints of another run is left as it
        is: then `folder`-2 is taken, and the first rank says so.

        Raises:
            CheckpointError: it cannot be written.
        """
        model, wanted = self._prepared_model("save"), Path(folder)
        is_unused = self._is_whole and not self._stepped and self._gradients()
        if self._num_backwards or is_unused:
            raise ScriptError(
                "save: between run.backward and optimizer.step(), whose gradients no checkpoint "
                "keeps, while their batches count as taken; save after the step"
            )
        self._warn_of_schedules()
        if wanted not in self._folders:
            self._folders[wanted] = checkpoint.free_folder(wanted)
            if self._folders[wanted] != wanted:
                self.print(
                    f"{folder} holds checkpoints of another run, and this one saves in "
                    f"{self._folders[wanted]}; run.resume would have gone on from them"
                )
        return checkpoint.save(
            self._folders[wanted], model, self._optimizers, self._standing(), keep=keep
        )

    def resume(self, folder: str | Path) -> bool:
        """Go on from the latest checkpoint in `folder`, if there is one; all ranks call this.

        The next pass over a loader that stood within one yields the rest of it, and
        `loader.epoch` says how many passes have ended.

        Returns:
            Whether there was one; the first rank prints which.

        Raises:
            CheckpointError: it is damaged, or of another model, optimizer or script.
        """
        model = self._prepared_model("resume")
        found = checkpoint.load(Path(folder), model, self._optimizers, self._standing())
        if found is None:
            self.print(f"no checkpoint in {folder} yet: begins anew")
            return False
        self._folders[Path(folder)] = Path(folder)
        where, standing = found
        self.steps_done = standing["steps_done"]
        self._draws.state = checkpoint.from_text(standing["draws"])
        for loader, state in zip(self._loaders, standing["loaders"], strict=True):
            loader.set_state(state)
        for scheduler, state in zip(self._schedulers, standing["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self._num_backwards, self._is_whole = 0, False
        self.print(f"goes on from {where}, after step {self.steps_done}")
        return True

    # What optimizers ask and tell (optimizer.py).

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step whose gradients are not those of the global batch."""
        if 0 < self._num_backwards < self.accumulation and not self._is_whole:
            raise ScriptError(
                f"optimizer.step() after {self._num_backwards} of {self.accumulation} calls of "
                "run.backward: the gradients are not added up over the ranks yet; step when all "
                f"are made, or say accumulation={self._num_backwards} to phalanx.init"
            )
        if self._is_whole and id(optimizer) not in self._stepped:
            if not self._gradients():
                raise ScriptError(
                    "optimizer.step() without a gradient: zero_grad() came between run.backward "
                    "and the step; call it after the step, or before run.backward"
                )
            return
        if self._is_whole or not self._gradients():
            raise ScriptError(
                "optimizer.step() without a run.backward since its last step; call "
                "run.backward(loss_sum, count) before it"
            )
        raise ScriptError(
            "optimizer.step() with gradients of this rank alone: loss.backward() was called, which "
            "adds nothing up over the ranks; call run.backward(loss_sum, count) in its place"
        )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the step."""
        self.steps_done += not self._stepped
        self._stepped.add(id(optimizer))

    # Parts of the above.

    def _take_model(
        self, model: nn.Module, batch_norm: Statistics | None, roles: Mapping[str, str] | None
    ) -> None:
        if self._model is not None:
            again = "it again" if model is self._model else f"a {type(model).__name__} too"
            raise ScriptError(
                f"prepare: {type(self._model).__name__} is prepared already, and this prepares "
                f"{again}; call it once, with several models as parts of one nn.Module"
            )
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ScriptError(
                f"prepare: the model is a {type(model).__name__}, which adds gradients up itself; "
                "give the module that it wraps, model.module"
            )
        meta = next((n for n, p in model.named_parameters() if p.is_meta), None)
        if meta is not None:
            raise ScriptError(
                f"prepare: {meta} is on the meta device, without first weights; build the model on "
                "the CPU, or give it to phalanx.Trainer"
            )
        _check_alike(model)
        refuse_max_norm(model)
        self._before = {p: name for name, p in model.named_parameters()}
        settle_batch_norms(model, self.comm, batch_norm)
        plan = Plan(self.strategy, model.to(self.comm.device), roles=roles)
        self._runner = plan.build(self.comm)
        self._model = model
        # Those that optimizers know: in the middle of a step, FSDP2 has gathered ones in the model.
        self._parameters = dict(model.named_parameters())
        self._kept = _kept(self._parameters)
        if can_be_keyed(self.strategy):
            key_dropouts(model, self._seed, self._place)
        name_draws(model)

    def _prepared(self, each: Any) -> Any:
        if isinstance(each, nn.Module) or each is None:
            return each
        if isinstance(each, torch.optim.Optimizer):
            rebind(each, self._before, self._prepared_model("prepare"))
            guard(each, self)
            self._optimizers.append(each)
            return each
        if isinstance(each, DataLoader):
            self._loaders.append(RankLoader(each, self.comm, self._draws, self._note_batch))
            return self._loaders[-1]
        if all(hasattr(each, name) for name in ("step", "state_dict", "load_state_dict")):
            self._schedulers.append(each)
            return each
        raise ScriptError(
            f"prepare: cannot prepare a {type(each).__name__}; expected an nn.Module, optimizers, "
            "schedulers and DataLoaders"
        )

    def _prepared_model(self, call: str) -> nn.Module:
        if self._model is None:
            raise ScriptError(
                f"{call}: no model is prepared; call model, optimizer, loader = "
                "run.prepare(model, optimizer, loader) first, with the model among them"
            )
        return self._model

    def _begin_step(self, model: nn.Module, loss: Tensor) -> None:
        """Clear what the step before has left, and see that all is as it was prepared."""
        if not self._optimizers:
            raise ScriptError(
                "backward: no optimizer is prepared, so that it may update parameters that are not "
                "split, and its steps would not be checked; give it to run.prepare too"
            )
        has_steps, has_batches = self._agreed.tolist()  # of the step before: no GPU is waited for
        if not has_batches:
            raise ScriptError(
                "backward: the ranks have read unlike numbers of batches before the last one, so "
                "that rows of several global batches were added up; each rank must read, or leave "
                "out, a batch when the others do"
            )
        if not has_steps:
            raise ScriptError(
                f"backward: after {self.steps_done} steps of this rank, others have taken more or "
                "fewer, so their weights differ; each rank must step, or skip a step, when the "
                "others do"
            )
        if self.steps_done < 2 and self._yielded is None:
            self._check_own_batches(float(loss))
        now = _kept(dict(model.named_parameters()))
        if now != self._kept:
            name = next(name for name in now | self._kept if now.get(name) != self._kept.get(name))
            was, is_now = (kept.get(name, "not in the model") for kept in (self._kept, now))
            raise ScriptError(
                f"backward: {name} was {was} when the model was prepared, and is {is_now}; move, "
                "cast, freeze or extend the model before run.prepare"
            )
        self._num_begun += 1
        if self._num_begun == 2:  # and not by the steps, of which a rank may have taken another
            warn_of_buffers(model, self.comm)
        self._check_gradients()
        self._clear()
        self._totals = torch.zeros_like(self._totals)
        self._is_whole = False
        self._stepped.clear()

    def _clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _check_gradients(self) -> None:
        """Refuse to clear gradients that no step has used."""
        is_used = {id(ref()) for ref in self._made} if self._stepped else set[int]()
        left = [g for g in self._gradients() if id(g) not in is_used]
        if any(bool(local_shard(gradient).any()) for gradient in left):
            raise ScriptError(
                "backward: there are gradients already that no optimizer.step() has used, of "
                "another run.backward or of loss.backward(); say accumulation=N to phalanx.init "
                "for N calls a step, add losses up before one call, or call zero_grad() to leave "
                "them out"
            )

    def _check_own_batches(self, loss: float) -> None:
        """Refuse batches of no prepared loader that are the same on all ranks."""
        losses = gather_objects(loss)
        if self.comm.size("data") == 1 or len({repr(each) for each in losses}) > 1:
            return
        if self.steps_done:  # the first may be alike: an output that begins with zeros
            raise ScriptError(
                f"backward: the loss is {loss:g} on every rank, to the last bit, so each has the "
                "same samples; give the DataLoader to run.prepare, which deals them out"
            )

    def _end_step(self) -> None:
        """Scale the gradients by what was not known when backward began."""
        if self.accumulation > 1:
            factor = self._divisor / _nonzero(self._totals[1])
            for gradient in self._gradients():
                local_shard(gradient).mul_(factor)
        self._num_backwards, self._is_whole = 0, True
        self._made = [weakref.ref(gradient) for gradient in self._gradients()]

    def _gradients(self) -> list[Tensor]:
        """Return the gradients that there are."""
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def _note_batch(self, loader: RankLoader) -> None:
        self._read = loader
        if torch.is_grad_enabled():  # a batch of an evaluation ends no pass of the training
            self._yielded, self._calls = loader, {}
            if self._leading is None:  # of several read in turns the first
                self._leading = loader
            self._num_batches += 1

    def _warn_of_schedules(self) -> None:
        """Say once that a checkpoint lacks a schedule that moves the rate of an optimizer."""
        known = {id(getattr(each, "optimizer", None)) for each in self._schedulers}
        # Set by torch's schedulers on their optimizer; tests/script/test_mistakes.py pins it.
        left = [o for o in self._optimizers if hasattr(o, "_opt_called") and id(o) not in known]
        if left and self.is_first and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"save: a schedule moves the learning rate of {type(left[0]).__name__} and is not "
                "prepared, so no checkpoint has it; give it to run.prepare too",
                stacklevel=3,
            )

    def _place(self) -> Place | None:
        """Return where the forward under way stands."""
        if self._yielded is None:
            return None
        return Place(self.steps_done, self._yielded.rows, self._calls)

    def _standing(self) -> checkpoint.Standing:
        return checkpoint.Standing(
            strategy=str(self.strategy),
            steps_done=self.steps_done,
            draws=self._draws.state,
            loaders=[loader.state() for loader in self._loaders],
            schedulers=[scheduler.state_dict() for scheduler in self._schedulers],
        )


def _rows_of_all(pieces: Sequence[Tensor]) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks."""
    filled = [piece for piece in pieces if len(piece)] or list(pieces[:1])
    shapes = {tuple(piece.shape[1:]) for piece in filled}
    if len(shapes) > 1:
        raise ScriptError(
            f"gather: the rows of ranks have unlike shapes, {sorted(shapes)}; pad them to one "
            "length, the same on all ranks"
        )
    return torch.cat(filled)


def _nonzero(total: Tensor) -> Tensor:
    """Return a divisor: 1 where there is nothing to divide."""
    return torch.where(total > 0, total, 1.0)


def _check_alike(model: nn.Module) -> None:
    """Refuse models of ranks that are not of one form: their collectives would not meet."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    all_of = gather_objects(own)
    for rank, theirs in enumerate(all_of):
        if theirs != all_of[0]:
            name = next(n for n in {**all_of[0], **theirs} if all_of[0].get(n) != theirs.get(n))
            there, here = theirs.get(name, "not there"), all_of[0].get(name, "not there")
            raise ScriptError(
                f"prepare: the model of rank {rank} is not that of rank 0: {name} is {there} and "
                f"{here}; build the same model on every rank"
            )


def _kept(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return in words what must not change of each parameter once the model is prepared."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}, "
        f"{'trained' if p.requires_grad else 'frozen'}"
        for name, p in parameters.items()
    }
