"""The least change that makes a loop data parallel: average the gradients before each step.

    loss.backward()
    phalanx.average_gradients(model)         g = sum over ranks (count_r g_r) / sum (count_r)
    optimizer.step()

Every rank holds the whole model, computes the mean loss of its own samples, and takes the same
step. It is what naive data parallelism is, for those who teach or port. `Run.prepare` and
`Run.backward` do the same while backward still runs, in buckets, and check what this cannot.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm.comm import Ranks
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.launch.attach import at_end, attach, check_end
from phalanx.parallel.reduce import sum_in_buckets
from phalanx.script.drift import STEPS, are_alike, digest_of, first_odd, with_squares, words_of
from phalanx.script.replicas import Replicas

_averaging: weakref.WeakKeyDictionary[nn.Module, _Averaging] = weakref.WeakKeyDictionary()
"""Of the models whose gradients have been averaged."""

_NUMBERS = itertools.count()


def average_gradients(model: nn.Module, count: int | None = None) -> None:
    """Replace each gradient by its mean over the ranks; every rank calls this together.

    A parameter that only some ranks used has a gradient of zeros on the others; one that no rank
    used keeps none. The process joins the job that it was started for, if it has not.

    Under a GradScaler call it before `scaler.unscale_` and `scaler.step`, so that all ranks skip
    the same steps.

    Args:
        model: each rank has computed gradients of the mean loss of its own samples.
        count: of these samples, where ranks have unlike numbers; each counts alike if None.

    Raises:
        ScriptError: the ranks began with other weights, average other models, or have drifted
            apart.
    """
    if model not in _averaging:
        _averaging[model] = _Averaging(model, _ranks(attach({})))
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    _averaging[model].average(parameters, count)


class _Averaging:
    """Averages gradients over ranks, and compares what must be alike on them."""

    def __init__(self, model: nn.Module, comm: Ranks) -> None:
        """Watch the parameters of a model, all tensors of which have to be alike at first."""
        self._replicas = Replicas(comm, dict(model.named_parameters()), ())
        self._comm = comm
        self._first = (*model.parameters(), *model.buffers())  # frozen ones too
        self._num_calls = 0
        self._name = f"average {next(_NUMBERS)}"
        check_end(f"{self._name} of the script begins")

    @torch.no_grad()
    def average(self, parameters: Mapping[str, nn.Parameter], count: int | None) -> None:
        """Average the gradients of parameters."""
        comm = self._comm
        own = 1.0 if count is None else count
        total = self._agree(parameters, own)
        used = torch.tensor([p.grad is not None for p in parameters.values()], device=comm.device)
        used = comm.all_reduce(used.byte(), "job", "max")
        gradients: dict[torch.dtype, list[Tensor]] = {}
        for parameter, is_used in zip(parameters.values(), used.tolist(), strict=True):
            if is_used:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                # A dense one: ranks have other rows of a sparse one.
                parameter.grad = grad.to_dense() * (own / total).to(grad)
                gradients.setdefault(parameter.dtype, []).append(parameter.grad)
        for alike in gradients.values():
            sum_in_buckets(alike, comm, comm.axes)
        self._num_calls += 1
        at_end(self._name, self._check_end)

    def _agree(self, parameters: Mapping[str, nn.Parameter], own: float) -> Tensor:
        """Return the count of all ranks, where they average the gradients of one model.

        The words sent have one size whatever a rank averages, so that unlike models are named.
        """
        comm = self._comm
        self._replicas.judge("average_gradients")
        form = repr([(tuple(p.shape), str(p.dtype)) for p in parameters.values()])
        words = words_of(form)
        is_new = bool(self._first)
        given = [own, is_new, *with_squares(words)]
        found = torch.tensor(given, dtype=torch.float64, device=comm.device)
        found = torch.cat([found, self._replicas.words({STEPS: self._num_calls})])
        comm.all_reduce(found, "job")
        num_words = 2 * len(words)
        total, num_new = found[0], float(found[1])
        if not are_alike(found[2 : 2 + num_words].tolist(), comm.size("job")):
            size = sum(parameter.numel() for parameter in parameters.values())
            shapes = ", ".join(
                str(tuple(p.shape)) for p in itertools.islice(parameters.values(), 3)
            )
            forms = gather_objects(
                f"{len(parameters)} parameters of {size} elements ({shapes}, ...)"
            )
            odd = first_odd(forms) or 0
            raise ScriptError(
                f"average_gradients: rank {odd} averages {forms[odd]} and rank 0 {forms[0]}; give "
                "the same model on every rank, in the same order of calls"
            )
        self._replicas.take(found[2 + num_words :])
        if num_new:
            digests = gather_objects(digest_of(self._first))
            if (odd := first_odd(digests)) is not None:
                raise ScriptError(
                    f"average_gradients: rank {odd} has other weights than rank 0, and averaged "
                    "gradients do not make them equal; call torch.manual_seed(0) before the model "
                    "is made"
                )
            self._first = ()
        return torch.where(total > 0, total, 1.0)

    def _check_end(self, where: str) -> None:
        self._replicas.check_end(where, self._name, self._num_calls)


@functools.cache
def _ranks(device: str) -> Ranks:
    return Ranks({"dp": dist.get_world_size()}, device)
