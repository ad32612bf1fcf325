"""The smallest change that makes a loop data parallel: average the gradients before each step.

    loss.backward()
    phalanx.average_gradients(model)         g = sum over ranks (count_r g_r) / sum (count_r)
    optimizer.step()

Every rank has the whole model, computes the mean loss of its own samples, and takes the same step.
This is naive data parallelism, for teaching and for porting scripts. `Run.prepare` and
`Run.backward` overlap the all-reduce with backward, in buckets, and make more checks.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from phalanx.comm.comm import Ranks
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.launch.attach import at_end, attach, check_end
from phalanx.parallel.reduce import sum_in_buckets
from phalanx.script.checksums import (
    digest_of,
    first_unequal_rank,
    sums_show_equal,
    with_squares,
    words_of,
)
from phalanx.script.guards.replicas import STEPS, Replicas

_averaging: weakref.WeakKeyDictionary[nn.Module, _Averaging] = weakref.WeakKeyDictionary()
"""Model -> state of its gradient averaging."""

_NUMBERS = itertools.count()


def average_gradients(model: nn.Module, count: int | None = None) -> None:
    """Replace each gradient by its mean over the ranks; every rank calls this together.

    A parameter that only some ranks used counts as a gradient of zeros on the other ranks. A
    parameter that no rank used keeps no gradient. The first call joins the job that the process was
    started for, unless the process has joined already.

    With a GradScaler, call this before `scaler.unscale_` and `scaler.step`, so that all ranks skip
    the same steps.

    Args:
        model: model whose gradients are of the mean loss of this rank's samples.
        count: number of these samples, the weight of this rank; equal weights if None.

    Raises:
        ScriptError: the ranks started with different weights, average different models, or their
            replicas differ.
    """
    comm = _comm()
    if model not in _averaging:
        tensors = [*model.parameters(), *model.buffers()]  # frozen parameters too
        _averaging[model] = _Averaging(
            "average_gradients", comm, tensors, dict(model.named_parameters())
        )
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    _averaging[model].average(parameters, count)


def DistributedOptimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make each step of an optimizer average the gradients over the ranks first.

    The optimizer's parameters are broadcast from the first rank. Parameters that it does not update
    and buffers are not, and must be equal on all ranks already. The learning rate is not scaled,
    although N ranks have a global batch N times as large; the gradient is a mean. After each call
    of a closure given to `step` the gradients are averaged, and the closure returns the mean of the
    ranks' losses.

    Returns:
        The optimizer itself.

    Raises:
        ScriptError: raised by `step`: replicas differ, or a GradScaler calls the step.
    """
    comm = _comm()
    parameters = _parameters_of(optimizer)
    for parameter in parameters.values():
        comm.broadcast(parameter, "job")
    averaging = _Averaging("DistributedOptimizer", comm, [], parameters, [optimizer])

    def before(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame.f_globals.get("__name__") == GradScaler.__module__:
                # Each rank would skip the steps in which its own gradients overflow.
                raise ScriptError(
                    "DistributedOptimizer: a GradScaler calls this step, and would skip it only on "
                    "the ranks whose own gradients overflow; call "
                    "phalanx.average_gradients(model) after backward and leave "
                    "DistributedOptimizer out, or use run.prepare"
                )
            frame = frame.f_back
        if not any(callable(each) for each in (*args[1:], *kwargs.values())):
            averaging.average(_parameters_of(own), None)
            return None

        def averaged(closure: Any) -> Any:
            if not callable(closure):
                return closure

            def compute() -> Any:
                loss = closure()
                averaging.average(_parameters_of(own), None)
                if loss is None:
                    return None
                # Their mean, so that optimizers decide equally on all ranks.
                mean = torch.as_tensor(loss, dtype=torch.float64, device=comm.device)
                mean = comm.all_reduce(mean.detach().clone(), "job") / comm.size("job")
                return mean.to(loss) if isinstance(loss, Tensor) else float(mean)

            return compute

        wrapped = {name: averaged(each) for name, each in kwargs.items()}
        return (*args[:1], *map(averaged, args[1:])), wrapped

    def after(*_: Any) -> None:
        averaging.replicas.note_step()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


class _Averaging:
    """Averages gradients over ranks, and checks that the replicas are equal."""

    def __init__(
        self,
        call: str,
        comm: Ranks,
        first: Sequence[Tensor],
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Watch `parameters`; `first` are the tensors to compare between ranks at first call."""
        self.replicas = Replicas(comm, parameters, optimizers)
        self._call = call
        self._comm = comm
        self._first = first or None
        self._num_calls = 0
        self._name = f"average {next(_NUMBERS)}"
        check_end(f"{self._name} of the script begins")

    @torch.no_grad()
    def average(self, parameters: Mapping[str, nn.Parameter], count: int | None) -> None:
        """Average the gradients of `parameters`, weighted by each rank's `count`."""
        comm = self._comm
        own = 1.0 if count is None else count
        total = self._agree(parameters, own)
        used = torch.tensor([p.grad is not None for p in parameters.values()], device=comm.device)
        used = comm.all_reduce(used.byte(), "job", "max")
        gradients: dict[torch.dtype, list[Tensor]] = {}
        for parameter, is_used in zip(parameters.values(), used.tolist(), strict=True):
            if is_used:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                # Dense, because sparse gradients have different rows on each rank.
                parameter.grad = grad.to_dense() * (own / total).to(grad)
                gradients.setdefault(parameter.dtype, []).append(parameter.grad)
        for alike in gradients.values():
            sum_in_buckets(alike, comm, comm.axes)
        self._num_calls += 1
        at_end(
            self._name,
            lambda where: self.replicas.check_end(where, self._name, self._num_calls),
        )

    def _agree(self, parameters: Mapping[str, nn.Parameter], own: float) -> Tensor:
        """Return the sum of the ranks' counts; refuse ranks that average different models.

        The all-reduced message has the same size for every model, so that ranks with different
        models get an error that names the difference.
        """
        comm = self._comm
        self.replicas.check_last_step(self._call)
        form = repr([(tuple(p.shape), str(p.dtype)) for p in parameters.values()])
        words = words_of(form)
        is_new = self._first is not None
        given = [own, is_new, *with_squares(words)]
        found = torch.tensor(given, dtype=torch.float64, device=comm.device)
        found = torch.cat([found, self.replicas.words({STEPS: self._num_calls})])
        comm.all_reduce(found, "job")
        num_words = 2 * len(words)
        total, num_new = found[0], float(found[1])
        if not sums_show_equal(found[2 : 2 + num_words].tolist(), comm.size("job")):
            size = sum(parameter.numel() for parameter in parameters.values())
            shapes = ", ".join(
                str(tuple(p.shape)) for p in itertools.islice(parameters.values(), 3)
            )
            forms = gather_objects(
                f"{len(parameters)} parameters of {size} elements ({shapes}, ...)"
            )
            odd = first_unequal_rank(forms) or 0
            raise ScriptError(
                f"{self._call}: rank {odd} averages {forms[odd]} and rank 0 {forms[0]}; give the "
                "same model on every rank, in the same order of calls"
            )
        self.replicas.store_sums(found[2 + num_words :])
        if num_new:
            digests = gather_objects(digest_of(self._first or ()))
            if (odd := first_unequal_rank(digests)) is not None:
                raise ScriptError(
                    f"{self._call}: rank {odd} has different weights than rank 0, and averaging "
                    "gradients does not make them equal; call torch.manual_seed(0) before the "
                    "model is made"
                )
            self._first = None
        return torch.where(total > 0, total, 1.0)


def _parameters_of(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters of an optimizer, named by group and by index in the group."""
    return {
        f"parameter {number} of group {at}": parameter
        for at, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
    }


def _comm() -> Ranks:
    device = attach({})
    return _ranks(dist.get_world_size(), device)


@functools.cache
def _ranks(num_ranks: int, device: str) -> Ranks:
    return Ranks({"dp": num_ranks}, device)
