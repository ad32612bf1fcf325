"""Run a few steps on the ranks of a job and write down all that training depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.comm.ledger import Entry, Ledger
from phalanx.config import OptimizerConfig
from phalanx.errors import ConfigError
from phalanx.mesh import build_mesh, data_coordinate, device_of
from phalanx.parallel.compose import parallelize, part_of
from phalanx.strategy import Strategy
from phalanx.train.objective import Objective
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Trainer


@dataclass(frozen=True)
class Case:
    """What is run; every field can be pickled.

    Attributes:
        build: returns the model with its first weights, the same in every process.
        objective: how a microbatch becomes a loss.
        batches: the global batch of each step: a tensor, a mapping or list of tensors, or a
            dataclass of them, the first dimension being the samples.
        accumulation: microbatches that each rank cuts its share into.
        dtype: data type of the weights and the arithmetic.
        optimizer: AdamW's settings.
        roles: patterns of module names to roles for tp; those known for the model if None.
    """

    build: Callable[[], nn.Module]
    objective: Objective
    batches: Sequence[Any]
    accumulation: int = 1
    dtype: str = "float64"
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    roles: Mapping[str, str] | None = None


@dataclass(frozen=True)
class StepRecord:
    """One step: loss, whole gradients before clipping, their norm, and the weights after."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class RankReport:
    """What one rank says at the end.

    Attributes:
        visited: what the visitor returned for each step; empty but on rank 0.
        weights: a hash of each part of a weight that the rank holds, by its name and by where it
            begins in the whole.
        entries: what it sent in the last step.
    """

    visited: list[Any]
    weights: dict[tuple[str, tuple[int, ...]], str]
    entries: list[Entry]


def run_case(case: Case, strategy_text: str, visit: Callable[[int, StepRecord], Any]) -> RankReport:
    """Run the case on this rank.

    Args:
        case: what is run.
        strategy_text: how it is split.
        visit: called on rank 0 with the number and record of each step.
    """
    # It warns, once a layout, that it gathers a weight axis by axis; here that is as good.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    strategy = Strategy.parse(strategy_text)
    mesh = build_mesh(strategy)
    dtype: torch.dtype = getattr(torch, case.dtype)
    model = case.build().to(device_of(mesh), dtype)
    model.train()
    # Before the optimizer takes the parameters.
    reducer = parallelize(model, strategy, mesh, roles=case.roles)
    trainer = Trainer(
        model,
        build_optimizer(model, case.optimizer),
        case.objective,
        case.optimizer,
        mesh=mesh,
        num_steps=len(case.batches),
        reducer=reducer,
    )
    place, size = data_coordinate(mesh)
    ledger = Ledger(mesh)
    visited: list[Any] = []
    for step, batch in enumerate(case.batches):
        microbatches = split(_cast(batch, dtype), place, size, case.accumulation)
        with ExitStack() as watching:
            if step == len(case.batches) - 1:
                watching.enter_context(ledger)
                watching.enter_context(trainer.watched(ledger.phase))
            loss, num_valid = trainer.compute_gradients(microbatches)
        gradients = {
            name: _whole(parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        result = trainer.apply_gradients(loss, num_valid)
        weights = {name: _whole(parameter) for name, parameter in model.named_parameters()}
        if dist.get_rank() == 0:
            record = StepRecord(result.loss, result.grad_norm, gradients, weights)
            visited.append(visit(step, record))
    hashes: dict[tuple[str, tuple[int, ...]], str] = {}
    for name, parameter in model.named_parameters():
        part, offset = part_of(parameter)
        hashes[name, offset] = _hash(part)
    return RankReport(visited, hashes, ledger.entries())


def write_step(folder: str, step: int, record: StepRecord) -> None:
    """Write the record of one step to `folder`."""
    torch.save(dataclasses.asdict(record), Path(folder) / f"{step}.pt")


def take_step(folder: str, step: int) -> StepRecord:
    """Read the record of one step from `folder` and remove it."""
    path = Path(folder) / f"{step}.pt"
    record = StepRecord(**torch.load(path, weights_only=True))
    path.unlink()
    return record


def check_rows(case: Case, num_places: int) -> None:
    """Refuse batches with fewer rows than microbatches.

    Raises:
        ConfigError: names the batch.
    """
    for step, batch in enumerate(case.batches):
        num_rows, least = _num_rows(batch), num_places * case.accumulation
        if num_rows < least:
            raise ConfigError(
                f"batch {step} has {num_rows} rows, which cannot be cut into {case.accumulation} "
                f"microbatches on each of {num_places} data ranks; give at least {least} rows"
            )


def split(batch: Any, place: int, num_places: int, accumulation: int) -> list[Any]:
    """Return the microbatches of one data rank: rows place, place + num_places, ..., cut."""
    rows = torch.arange(place, _num_rows(batch), num_places)
    return [_take(batch, cut) for cut in rows.tensor_split(accumulation)]


def _take(batch: Any, rows: torch.Tensor) -> Any:
    """Return the given rows of every tensor of a batch."""
    return _map(batch, lambda tensor: tensor[rows])


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating-point tensors in `dtype`."""
    return _map(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _map(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to every tensor of a batch, and keep its form."""
    if batch is None:
        return None
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        named = cast("Mapping[str, Any]", batch)
        return {name: _map(value, function) for name, value in named.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: _map(getattr(batch, f.name), function) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    if isinstance(batch, list | tuple):
        values = [_map(value, function) for value in cast("Sequence[Any]", batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else values
    raise ConfigError(
        f"a batch holds a {type(batch).__name__}; expected tensors, and mappings, lists, tuples or "
        "dataclasses of them, or None"
    )


def _num_rows(batch: Any) -> int:
    """Return the first dimension of the first tensor of a batch.

    Raises:
        ConfigError: there is no tensor in it, or something else is.
    """
    sizes: list[int] = []
    _map(batch, lambda tensor: (sizes.append(len(tensor)), tensor)[1])
    if len(set(sizes)) != 1:
        raise ConfigError(
            f"the tensors of a batch have {sorted(set(sizes))} rows; expected one number for all, "
            "the samples"
        )
    return sizes[0]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole tensor on the CPU, gathered if it is sharded."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu().clone()


def _hash(part: torch.Tensor) -> str:
    data = part.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
