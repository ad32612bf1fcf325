"""Run a few steps on the ranks of a job and write down all that training depends on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.comm.ledger import Entry, Ledger
from phalanx.config import OptimizerConfig
from phalanx.errors import ConfigError
from phalanx.mesh import build_mesh, data_coordinate, device_of
from phalanx.parallel.compose import parallelize
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
    """

    build: Callable[[], nn.Module]
    objective: Objective
    batches: Sequence[Any]
    accumulation: int = 1
    dtype: str = "float64"
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)


@dataclass(frozen=True)
class StepRecord:
    """One step: loss, whole gradients before clipping, their norm, and the weights after."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class RankReport:
    """What one rank says at the end: a hash of each weight it holds, and what it sent last."""

    weights: dict[str, str]
    entries: list[Entry]


def run_case(case: Case, strategy_text: str, folder: str) -> RankReport:
    """Run the case on this rank; rank 0 writes step K's record to `folder`/K.pt.

    Returns:
        What this rank holds and sent.
    """
    strategy = Strategy.parse(strategy_text)
    mesh = build_mesh(strategy)
    model = case.build().to(device_of(mesh), getattr(torch, case.dtype))
    model.train()
    reducer = parallelize(model, strategy, mesh)
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
    entries: list[Entry] = []
    for step, batch in enumerate(case.batches):
        microbatches = split(batch, place, size, case.accumulation)
        with Ledger(mesh) as trainer.ledger:
            loss, num_valid = trainer.compute_gradients(microbatches)
            entries = trainer.ledger.entries()
        gradients = {
            name: _whole(parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        result = trainer.apply_gradients(loss, num_valid)
        weights = {name: _whole(parameter) for name, parameter in model.named_parameters()}
        if torch.distributed.get_rank() == 0:
            record = StepRecord(result.loss, result.grad_norm, gradients, weights)
            torch.save(dataclasses.asdict(record), Path(folder) / f"{step}.pt")
    hashes = {name: _hash(parameter) for name, parameter in model.named_parameters()}
    return RankReport(hashes, entries)


def load_step(folder: str, step: int) -> StepRecord:
    """Read what rank 0 wrote for one step."""
    return StepRecord(**torch.load(Path(folder) / f"{step}.pt", weights_only=True))


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
    if batch is None:
        return None
    if isinstance(batch, torch.Tensor):
        return batch[rows]
    if isinstance(batch, Mapping):
        return {name: _take(value, rows) for name, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: _take(getattr(batch, f.name), rows) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return [_take(value, rows) for value in cast("Sequence[Any]", batch)]


def _num_rows(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return len(batch)
    if isinstance(batch, Mapping):
        return _num_rows(next(iter(batch.values())))
    if dataclasses.is_dataclass(batch):
        return _num_rows(getattr(batch, dataclasses.fields(batch)[0].name))
    return _num_rows(batch[0])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole tensor on the CPU, gathered if it is sharded."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu().clone()


def _hash(tensor: torch.Tensor) -> str:
    """Hash the bits of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    data = local.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
