"""Clipping, the learning rate, and what a loss that is not finite does."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from phalanx.config import OptimizerConfig
from phalanx.errors import TrainingError
from phalanx.launch.local import run_ranks
from phalanx.parallel import data
from phalanx.train.clip import gradient_norm, scale_to
from phalanx.train.optimizer import build_optimizer, learning_rate
from phalanx.train.step import StepResult, Trainer


def norms_of_mixed_gradients() -> dict[float, tuple[float, float]]:
    """Gradients that are plain, sharded on one axis, on both, unevenly, and replicated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "col"))
    torch.manual_seed(0)
    wholes = [torch.randn(6, 5, dtype=torch.float64) for _ in range(5)]
    wholes[1] = torch.randn(1, 5, dtype=torch.float64)  # one rank of the axis has no row
    placements = [
        None,
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Replicate(), Replicate()],
    ]
    parts = [
        whole if places is None else distribute_tensor(whole, mesh, places)
        for whole, places in zip(wholes, placements, strict=True)
    ]
    everything = torch.cat([whole.flatten() for whole in wholes])
    return {
        p: (float(gradient_norm(parts, p)), float(everything.norm(p))) for p in (1.0, 2.0, math.inf)
    }


def test_each_element_counts_once_in_every_norm() -> None:
    for norms in run_ranks(norms_of_mixed_gradients, 4):
        for ours, expected in norms.values():
            assert ours == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_scaling_gives_the_limit_and_leaves_small_gradients_alone(p: float) -> None:
    gradients = [torch.tensor([3.0, -4.0], dtype=torch.float64), torch.zeros(0)]
    norm = float(gradient_norm(gradients, p))
    scale_to(gradients, norm, 0.5)
    assert float(gradient_norm(gradients, p)) == pytest.approx(0.5, rel=1e-5)
    before = gradients[0].clone()
    scale_to(gradients, 0.5, 2.0)
    assert torch.equal(gradients[0], before)
    assert float(gradient_norm([], p)) == 0


def test_learning_rate_rises_in_a_line_and_falls_by_half_a_cosine() -> None:
    config = OptimizerConfig(lr=2.0, min_lr_ratio=0.1, warmup_steps=3)
    rates = [learning_rate(config, step, 14) for step in range(14)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[8] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[-1] == pytest.approx(0.2)
    assert sorted(rates[3:], reverse=True) == rates[3:]
    assert learning_rate(config, 50, 14) == pytest.approx(0.2)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert [decays[id(p)] for p in model.parameters()] == [0.3, 0.0, 0.0, 0.0]


class Sum:
    """The sum of the outputs; a microbatch is a tensor of rows."""

    def loss_sum(self, model: nn.Module, microbatch: torch.Tensor, step: int) -> torch.Tensor:
        return model(microbatch).sum()

    def num_valid(self, microbatch: torch.Tensor) -> int:
        return len(microbatch)


def step_over_a_nan(nonfinite: str) -> tuple[str, bool, list[float]]:
    """Only rank 1 sees the NaN; returns what happened, whether weights moved, and the next loss."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    trainer = Trainer(
        model,
        build_optimizer(model, OptimizerConfig()),
        Sum(),
        OptimizerConfig(),
        mesh=mesh,
        num_steps=4,
        reducer=data.apply(model, mesh),
        nonfinite=nonfinite,  # type: ignore[arg-type]
    )
    rows = torch.ones(2, 4)
    before = model.weight.detach().clone()
    bad = rows * (math.nan if dist.get_rank() == 1 else 1.0)
    try:
        outcome = trainer.step([bad])
        words = "skipped" if outcome.is_skipped else "taken"
    except TrainingError as error:
        words = str(error)
    has_moved = not torch.equal(before, model.weight)
    losses: list[StepResult] = [trainer.step([rows])]
    return words, has_moved, [result.loss for result in losses]


def test_a_nan_on_one_rank_stops_all_alike() -> None:
    outcomes = run_ranks(step_over_a_nan, 2, "stop")
    for words, has_moved, losses in outcomes:
        assert words.startswith("step 0: the loss is nan and the norm of the gradient nan")
        assert not has_moved
        assert losses == outcomes[0][2]


def test_a_nan_on_one_rank_is_skipped_on_all_alike() -> None:
    outcomes = run_ranks(step_over_a_nan, 2, "skip")
    for words, has_moved, losses in outcomes:
        assert (words, has_moved) == ("skipped", False)
        assert math.isfinite(losses[0])
        assert losses == outcomes[0][2]
