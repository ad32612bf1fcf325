"""A small model and its saves, for the tests of checkpoints: functions that run on each rank."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from phalanx.checkpoint import manifest, state
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.saver import Saver
from phalanx.config import OptimizerConfig
from phalanx.errors import CheckpointError
from phalanx.train.optimizer import build_optimizer

ABOUT = Manifest(
    steps_done=2, num_steps=9, consumed=16, num_ranks=2, strategy="dp2", shape={}, stream={}
)


def about(steps_done: int) -> Manifest:
    return dataclasses.replace(ABOUT, steps_done=steps_done, num_ranks=dist.get_world_size())


def folders(run: Path) -> list[str]:
    """Return the names of the folders among a run's checkpoints, whole or not."""
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


class Tied(nn.Module):
    """A tied embedding of 7 rows, which few numbers of ranks divide; a frozen matrix; a buffer."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.middle = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.output = nn.Linear(width, 7, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.frozen(self.middle(self.embedding(tokens))))


def build(
    split: str = "whole", width: int = 5, fused: bool = True
) -> tuple[Tied, torch.optim.Optimizer]:
    """Return a model that every rank holds whole, or in shards, or in shards of replicas."""
    torch.manual_seed(0)
    model = Tied(width)
    num_ranks = dist.get_world_size()
    if split == "fsdp":
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("fsdp",))
    elif split == "hsdp":
        mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("dp", "fsdp"))
    if split != "whole":
        fully_shard(model.middle, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if fused:
        return model, build_optimizer(model, OptimizerConfig(lr=0.1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of all whole tensors but the generators."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in state.state_of(model, optimizer).items()
        if not name.startswith("generators.")
    }


def save(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, steps_done: int) -> None:
    with Saver(run) as saver:
        saver.begin(model, optimizer, about(steps_done))


def save_after(
    run: Path, num_steps: int, split: str = "whole", width: int = 5
) -> dict[str, torch.Tensor]:
    """Save after some steps; return what was saved."""
    model, optimizer = build(split, width)
    for _ in range(num_steps):
        step(model, optimizer)
    torch.manual_seed(7 + dist.get_rank())
    save(run, model, optimizer, num_steps)
    return whole_state(model, optimizer)


def words_of_save(run: Path, num_steps: int) -> str:
    try:
        save_after(run, num_steps)
    except CheckpointError as error:
        return str(error)
    return ""


def words_of_load(folder: Path, split: str = "whole", width: int = 5) -> tuple[str, str]:
    """Load a checkpoint, and its weights alone; return what each had to say."""
    words: list[str] = []
    for load in (state.load, lambda folder, model, _: state.load_weights(folder, model)):
        try:
            load(folder, *build(split, width))
            words.append("")
        except CheckpointError as error:
            words.append(str(error))
    return words[0], words[1]


def load_into(run: Path, split: str, fused: bool = True) -> dict[str, torch.Tensor]:
    """Load the latest checkpoint into a model that has taken a step of its own."""
    model, optimizer = build(split, fused=fused)
    step(model, optimizer)
    state.load(manifest.find(run), model, optimizer)
    loaded = whole_state(model, optimizer)
    step(model, optimizer)  # it can go on
    return loaded


def load_weights_into(run: Path, split: str) -> dict[str, torch.Tensor]:
    model, optimizer = build(split)
    state.load_weights(manifest.find(run), model)
    return whole_state(model, optimizer)


def save_value(run: Path, steps_done: int, value: int, keep: int | None = None) -> None:
    """Save with a number in every weight; the checkpoint may take the name of another."""
    model, optimizer = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    with Saver(run, keep=keep) as saver:
        saver.begin(model, optimizer, about(steps_done), replaces=True)


def value_of(folder: Path) -> int:
    """Return the number that is in every weight of a checkpoint."""
    model, optimizer = build()
    state.load(folder, model, optimizer)
    (value,) = set(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
    return int(value)


def save_for_ever(run: Path) -> None:
    """Save all the time, the number of the step in every weight; note what was published."""
    model, optimizer = build(width=256)
    step(model, optimizer)
    (run / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    steps_done = 0
    with Saver(run, keep=2) as saver:
        while True:
            steps_done += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(steps_done)
            saver.begin(model, optimizer, about(steps_done))
            saver.finish()
            if dist.get_rank() == 0:
                with (run / "published").open("a") as file:
                    file.write(f"{steps_done}\n")


def go_on(run: Path) -> tuple[int, int]:
    """Load the latest checkpoint and save the next; return the step, and what was in it."""
    model, optimizer = build(width=256)
    folder = manifest.find(run)
    steps_done = manifest.read(folder).steps_done
    state.load(folder, model, optimizer)
    (value,) = set(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
    with Saver(run, keep=2) as saver:
        saver.begin(model, optimizer, about(steps_done + 1))
    return steps_done, int(value)


if __name__ == "__main__":
    import sys

    from phalanx.launch.local import run_ranks

    run_ranks(save_for_ever, 2, Path(sys.argv[1]), threads=1)
