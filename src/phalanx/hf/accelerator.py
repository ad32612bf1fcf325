"""The accelerator of a trainer: accelerate's for one process, whose work the ranks share.

A trainer of transformers asks its `Accelerator` for all that depends on the number of processes.
Here it finds one process, so its own sums, counts, orders and positions are the ones of one
process, and this class shares the work where a batch, a loss or a metric passes through:

    collate      the rows of the whole batch -> the rows of this rank (`Rows`)
    prepare      model and optimizer -> split by the strategy
    backward     the loss of own rows -> the gradient of the whole batch
    gather       metrics and predictions of own rows -> of all rows, in the order of one process

Every rank but the first has a process index above 0, so only the first writes and prints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad as pad_tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from phalanx.comm.together import barrier, gather_objects
from phalanx.data.rows import map_tensors, tensors_of
from phalanx.errors import ScriptError
from phalanx.launch.rank_env import read_rank_env
from phalanx.parallel.dropout import MaskPosition
from phalanx.parallel.plan import Plan
from phalanx.script.deal import shard_rows
from phalanx.script.loader import CollateWhole
from phalanx.script.loop_step import Reading
from phalanx.script.run import Run

WHOLE: Final = (1, 1)
"""Weight and count of a loss of the whole batch."""


class Rows(dict[str, Any]):
    """This rank's rows of a batch, as a collator returns them.

    A rank without rows has one row of another rank, which counts nowhere.

    Attributes:
        own: this rank's rows, as positions in the batch.
        total: rows of the whole batch.
    """

    def __init__(
        self, batch: Mapping[str, Any] = MappingProxyType({}), own: range = range(0), total: int = 0
    ) -> None:
        super().__init__(batch)
        self.own, self.total = own, total

    def to(self, device: Any, non_blocking: bool = False) -> Rows:
        """Return the rows on a device; accelerate moves batches by this method."""
        moved = map_tensors(dict(self), lambda t: t.to(device, non_blocking=non_blocking))
        return Rows(moved, self.own, self.total)


class Deal:
    """A collate function that returns this rank's `Rows` of what a collator returns."""

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, num_ranks: int) -> None:
        self._collate = CollateWhole(collate, (rank, num_ranks, 1), deals_unevenly=False)
        self._rank, self._num_ranks = rank, num_ranks

    def __call__(self, samples: list[Any]) -> Rows:
        """Return this rank's rows of the batch of `samples`."""
        (batch,) = self._collate(samples)
        if not isinstance(batch, Mapping):
            raise ScriptError(
                f"the data collator returns a {type(batch).__name__}; expected a dict of tensors"
            )
        (own,) = shard_rows(range(len(samples)), self._rank, self._num_ranks, 1)
        return Rows(cast("Mapping[str, Any]", batch), own, len(samples))


class TrainerReading(Reading):
    """The batches that a trainer reads: it says itself which of them ends a step."""

    def __init__(self, accelerator: RankAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._first = 0  # rows of the step's earlier microbatches
        self._calls: dict[str, int] = {}

    @override
    def is_pass_over(self) -> bool:
        return self._accelerator.sync_gradients

    @override
    def use(self, *, is_step_end: bool) -> None:
        self._first = 0 if is_step_end else self._first + self._accelerator.rows.total
        self._calls = {}

    @override
    def position(self, steps_done: int) -> MaskPosition:
        rows = torch.tensor(self._accelerator.rows.own or [0]) + self._first
        return MaskPosition(steps_done, rows, self._calls)


class RankAccelerator(Accelerator):
    """An `Accelerator` of one process that is a rank of a run.

    Attributes:
        rows: the rows that the trainer computes.
        share: weight of the loss of `rows` in a sum over the ranks, and count that divides the sum
            if it is added up in the same way; `WHOLE` if the loss is of the whole batch.
        loss: latest loss that was passed to `backward`, of the whole batch.
        trained: the trainer's model, once it is split.
    """

    run: Run
    rows: Rows
    share: tuple[Any, Any]
    loss: Tensor
    _trainer: Any

    @classmethod
    def adopt(cls, trainer: Any, run: Run) -> None:
        """Make the accelerator of a `RankTrainer` one of this class."""
        own = trainer.accelerator
        own.__class__ = cls
        own.dataloader_config.dispatch_batches = False  # the first rank would read for the others
        own._trainer, own.rows, own.share = trainer, Rows(), WHOLE
        own._begin(run)

    def _begin(self, run: Run) -> None:
        self.run, self.trained = run, cast("nn.Module | None", None)
        run._prepared.reading = TrainerReading(self)  # pyright: ignore[reportPrivateUsage]

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that share the rows of a batch."""
        return self.run.comm.size("data")

    # Models, optimizers and data.

    @override
    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        prepared: Any = super().prepare(*args, device_placement=device_placement)
        models = [each for each in args if isinstance(each, nn.Module)]
        every = prepared if isinstance(prepared, tuple) else (prepared,)
        known = self.run._prepared.optimizers  # pyright: ignore[reportPrivateUsage]
        optimizers = [e.optimizer for e in every if isinstance(e, AcceleratedOptimizer)]
        self._split(models, [each for each in optimizers if not any(each is k for k in known)])
        return prepared

    @override
    def prepare_model(
        self, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        prepared: Any = super().prepare_model(model, device_placement, evaluation_mode)
        if not evaluation_mode:  # `prepare` splits it with its optimizer
            return prepared
        strategy = self.run.strategy
        if model is self._trainer.model:
            self._split([model], [])
        elif strategy.fsdp.degree * strategy.tp.degree > 1:  # such as the reference model of DPO
            model.requires_grad_(False)
            with _original_names(model):
                Plan(strategy, model, roles=self._roles(model)).build(self.run.comm)
        return prepared

    def _split(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        new = [model for model in models if model is not self.trained]
        if new and self.trained is not None:  # a trial of a search trains another model
            self._begin(self._trainer.new_run())
        if new or optimizers:
            with _original_names(*new):
                self.run.prepare(*new, *optimizers, roles=self._roles(new[0]) if new else None)
            self.trained = new[0] if new else self.trained

    def _roles(self, model: nn.Module) -> dict[str, str] | None:
        """Return tp's role of the head if TRL has replaced the forward; None: the built-in ones.

        That forward reads the whole weight of the head, and the output of the last norm, itself.
        """
        codes: list[Any] = [getattr(each.forward, "__code__", None) for each in model.modules()]
        is_fused = any("fused_lm_head" in code.co_varnames for code in codes if code is not None)
        if self.run.strategy.tp.degree == 1 or not is_fused:
            return None
        own: Any = model
        head = own.get_output_embeddings()

        def replicated() -> Any:
            if self.run.comm.coord("tp") == 0:  # gradients of replicas are added up
                return head
            parts = (None if p is None else p.detach() + 0 * p for p in (head.weight, head.bias))
            return SimpleNamespace(**dict(zip(("weight", "bias"), parts, strict=True)))

        own.get_output_embeddings = replicated
        return {name: "full" for name, each in model.named_modules() if each is head}

    @override
    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data_loader, DataLoader) and not isinstance(data_loader.collate_fn, Deal):
            data_loader.collate_fn = Deal(
                data_loader.collate_fn, self.run.comm.coord("data"), self.num_data_ranks
            )
            init: Any = data_loader.worker_init_fn
            if isinstance(init, functools.partial) and "rank" in init.keywords:
                init.keywords["rank"] = 0  # workers of all ranks draw what one process's draw
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    # A step.

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        scaled: Any = loss if self.scaler is None else self.scaler.scale(loss)
        weight, count = self.share
        if self.share is WHOLE:
            whole = self.run.backward(scaled, **kwargs)
        else:
            whole = self.run.backward(sum_of_rows=scaled * weight, count=count, **kwargs)
        scale: float = 1.0 if self.scaler is None else self.scaler.get_scale()
        self.loss = (whole / scale).to(loss.dtype)

    def whole_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the whole batch without a graph; every rank calls this together."""
        if self.share is WHOLE:
            return loss.detach()
        weight, count = self.share
        # A mean over 0 labels is NaN.
        total = torch.where(torch.as_tensor(weight, device=loss.device) > 0, loss * weight, 0.0)
        return self.run.mean(total.detach(), count).to(loss.dtype)

    @override
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Tensor:
        self.unscale_gradients()
        return self.run.clip(max_norm, norm_type).float()

    # Values of all rows.

    @override
    def gather(self, tensor: Any) -> Any:
        """Return the rows of all ranks; a number becomes a vector with the numbers of the ranks.

        A rank without rows contributes nothing.
        """
        most = None if self.rows.own or not self.rows else 0

        def own(each: Tensor) -> Tensor:
            return each.detach().reshape(each.shape or (1,))[:most]

        if not tensors_of(tensor):
            return tensor
        return self.run.gather(map_tensors(tensor, own))

    @override
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if not use_gather_object and tensors_of(input_data):
            return self.gather(input_data)
        own: Any = input_data if self.rows.own or not self.rows else []
        every = dict(gather_objects((self.run.comm.coord("data"), own)))  # tp ranks are alike
        return [value for rank in sorted(every) for value in every[rank]]

    @override
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def reduced(each: Tensor) -> Tensor:
            every = self.gather(each[None])
            return (every.sum(0) if reduction == "sum" else every.float().mean(0)) * scale

        return map_tensors(tensor, reduced)

    @override
    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        def padded(each: Tensor) -> Tensor:
            if dim >= each.ndim:
                return each
            longest = max(size for size in gather_objects(each.shape[dim]))
            missing = longest - each.shape[dim]
            widths = [0, 0] * (each.ndim - 1 - dim)
            widths += [missing, 0] if pad_first else [0, missing]
            return pad_tensor(each, widths, value=pad_index)

        return map_tensors(tensor, padded)

    @override
    def wait_for_everyone(self) -> None:
        barrier()

    @override
    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        if model is self.trained:
            return self.run.state_dict()
        return super().get_state_dict(model, unwrap)


def appear_alone(run: Run) -> None:
    """Make accelerate see one process; only the job's first rank is its main process."""
    state: Any = PartialState()
    local = read_rank_env().local_rank
    values = {
        "distributed_type": DistributedType.NO,
        "num_processes": 1,
        "process_index": 0 if run.is_first else max(run.rank, 1),
        "local_process_index": local if run.is_first or local else 1,
        "device": run.device,
        "backend": None,
    }
    for shared in (state.__dict__, cast(Any, AcceleratorState)._shared_state):
        if shared:
            shared.update(values)


@contextmanager
def _original_names(*models: nn.Module) -> Generator[None]:
    """Keep what `_get_name` returns of modules whose class fully_shard replaces.

    transformers finds by it whether label smoothing has to shift the labels.
    """
    names = {module: type(module).__name__ for model in models for module in model.modules()}
    yield
    for module, name in names.items():
        if isinstance(module, FSDPModule):
            cast(Any, module)._get_name = functools.partial(str, name)
