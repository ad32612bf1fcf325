"""Optimizers of whole matrices in a loop of one's own, and what the trainer says of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_adapters import OnRanks, Plain
from plain_loop import perceptron_loop, step, sum_of_losses
from plain_models import mlp, rows_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

import phalanx
from marks import by_hand
from phalanx.comm.comm import Ranks, SingleRankComm, local_shard
from phalanx.errors import CheckpointError, ScriptError
from phalanx.launch.local import run_ranks
from phalanx.parallel.plan import Plan
from phalanx.script.optimizer import rebind
from phalanx.strategy import Strategy
from phalanx.train.optimizer import Muon, TorchMuon, bind, muon_groups


def factored(on: Plain) -> None:
    """Adafactor, whose state is means over rows and columns of a whole matrix."""
    model = mlp(6, 10, 5)
    optimizer: Any = torch.optim.Adafactor(model.parameters(), 0.02)
    optimizer.whole_matrix = True
    perceptron_loop(on, model, optimizer)


def muon_and_adamw(on: Plain) -> None:
    """Muon of the inner matrix, AdamW of all else; the schedule is older than the split."""
    model = mlp(6, 10, 12, 5)
    inner = model[2].weight
    others = [p for p in model.parameters() if p is not inner]
    optimizer = Muon([{"params": [inner]}, {"params": others, "use_muon": False}], 0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, schedule, loader = on.prepare(
        model, optimizer, schedule, DataLoader(rows_of(6), 9)
    )
    for x, y in loader:
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        step(optimizer)
        schedule.step()


def torchs_muon(on: Plain) -> None:
    """torch.optim.Muon beside AdamW, in float64, where both sides iterate in float64."""
    model = mlp(6, 10, 12, 5)
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], 0.05, nesterov=False)
    if type(on) is Plain:
        bind(muon, SingleRankComm())  # else it would iterate in bfloat16
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], 0.02)
    schedule = torch.optim.lr_scheduler.StepLR(muon, 2, 0.5)
    prepared = on.prepare(model, muon, adamw, schedule, DataLoader(rows_of(6), 9))
    model, first, second, schedule, loader = prepared
    assert first is muon
    for x, y in loader:
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        step(first)
        step(second)
        schedule.step()


SCRIPTS: dict[str, Callable[[Plain], None]] = {
    "factored": factored,
    "muon and adamw": muon_and_adamw,
    "torch's muon": torchs_muon,
}


def printed(strategies: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for strategy in strategies:
        for name, script in SCRIPTS.items():
            on = OnRanks(strategy)
            script(on)
            found[strategy, name] = on.printed
    return found


@pytest.mark.parametrize(("num_ranks", "strategies"), [(2, ("dp2", "fsdp2")), (4, ("dp2,fsdp2",))])
def test_losses_are_those_of_one_process(num_ranks: int, strategies: Sequence[str]) -> None:
    expected: dict[str, list[float]] = {}
    for name, script in SCRIPTS.items():
        on = Plain()
        script(on)
        expected[name] = on.printed
    for found in run_ranks(printed, num_ranks, strategies, threads=1):
        for (strategy, name), losses in found.items():
            assert losses == pytest.approx(expected[name], rel=1e-10), (strategy, name)


def kinds(strategy: str) -> tuple[str, str, str]:
    """Prepare torch's Muon and one that has stepped; return its class and what is refused."""
    run = phalanx.init(strategy)
    model = mlp(6, 10, 5)
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], 0.05)
    stepped: Any = torch.optim.Adafactor(model.parameters(), 0.02)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepped.step()
    model.zero_grad()
    stepped.state.clear()
    stepped.state[model[0].bias] = {"step": torch.zeros(())}
    stepped.whole_matrix = True
    run.prepare(model, muon)
    with pytest.raises(ScriptError) as refused:
        run.prepare(stepped)
    return type(muon).__name__, str(refused.value), str(isinstance(muon, torch.optim.Muon))


def test_what_becomes_of_them() -> None:
    for kind, words, is_torchs in run_ranks(kinds, 2, "fsdp2", threads=1):
        assert (kind, is_torchs) == (TorchMuon.__name__, "True")
        assert "is whole_matrix, and has stepped already" in words


def with_a_later_group(strategy: str, name: str) -> Any:
    """Add a weight to a prepared optimizer; return by how much it moves, or what is refused."""
    model = mlp(6, 10, 5)
    optimizer: Any = {"Muon": Muon, "Adafactor": torch.optim.Adafactor}[name]([model[0].weight])
    optimizer.whole_matrix = True
    before = {parameter: name for name, parameter in model.named_parameters()}
    Plan(Strategy.parse(strategy), model).build(comm := Ranks(Strategy.parse(strategy)))
    rebind(optimizer, before, model, comm)
    later = model.get_parameter("2.weight")
    optimizer.add_param_group({"params": [later]})
    for parameter in (model.get_parameter("0.weight"), later):
        parameter.grad = torch.ones_like(parameter)
    if strategy == "fsdp2":
        with pytest.raises(ScriptError) as refused:
            optimizer.step()
        return str(refused.value)
    begin = later.detach().clone()
    optimizer.step()
    return float((later - begin).abs().max())


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_a_group_that_is_added_later(name: str) -> None:
    assert all(moved > 0 for moved in run_ranks(with_a_later_group, 2, "dp2", name, threads=1))
    for words in run_ranks(with_a_later_group, 2, "fsdp2", name, threads=1):
        assert f"{name}: a parameter of shape" in words and "give the optimizer to run.pre" in words


def saved(folder: Path) -> tuple[list[str], str]:
    on = OnRanks("fsdp2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        factored(on)
    with pytest.raises(CheckpointError) as raised:
        on.run.save(folder)
    return [str(each.message) for each in caught], str(raised.value)


def test_no_checkpoint_has_state_at_owners(tmp_path: Path) -> None:
    (first, words), (other, _) = run_ranks(saved, 2, tmp_path, threads=1)
    assert (len(first), other) == (1, [])
    assert "Adafactor keeps its state at the owners of whole matrices" in first[0]
    assert "the Adafactor keeps its state at the owners of whole matrices" in words
    assert "only the weights are saved" in words


class Fused(nn.Module):
    """Modules of a layer whose first map fuses queries, keys and values; none of them is run."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(5, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)})
        self.classes = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x


ROLES = {
    "patches": "scatter",
    "norm": "norm",
    "attention": "branch",
    "attention.qkv": "column/3",
    "attention.out": "row",
    "classes": "full",
}


def filled(seed: int) -> nn.Module:
    model = Fused().double()
    for parameter in model.parameters():
        generator = torch.Generator().manual_seed(seed + parameter.numel())
        parameter.data.normal_(generator=generator)
    return model


def fused(texts: Sequence[str]) -> dict[tuple[str, str], float]:
    """Step weights that fuse queries, keys and values by parts; return errors by split and name.

    Gradients, and the weights of one process, are split as the weights of a model are.
    """
    whole = filled(0)
    alone = Muon(muon_groups(whole, ROLES), 0.05)
    gradients = dict(filled(1).named_parameters())
    for _ in range(2):
        for name, parameter in whole.named_parameters():
            parameter.grad = gradients[name].detach().clone()
        alone.step()
    errors: dict[tuple[str, str], float] = {}
    for text in texts:
        strategy = Strategy.parse(text)
        model, expected, gradient = filled(0), filled(0), filled(1)
        expected.load_state_dict(whole.state_dict())
        optimizer = Muon(muon_groups(model, ROLES), 0.05)
        before = {parameter: name for name, parameter in model.named_parameters()}
        for each in (model, expected, gradient):
            Plan(strategy, each, roles=ROLES).build(comm := Ranks(strategy))
        rebind(optimizer, before, model, comm)
        given = dict(gradient.named_parameters())
        for _ in range(2):
            for name, parameter in model.named_parameters():
                parameter.grad = given[name].detach()
            optimizer.step()
        right = dict(expected.named_parameters())
        for name, parameter in model.named_parameters():
            difference = local_shard(parameter.detach()) - local_shard(right[name].detach())
            errors[text, name] = float(difference.abs().max()) if difference.numel() else 0.0
    return errors


@pytest.mark.parametrize(
    ("num_ranks", "texts"), [(2, ["tp2", "fsdp2"]), by_hand(4, ["tp4:2d", "dp2,tp2"])]
)
def test_fused_weights_are_stepped_by_parts(num_ranks: int, texts: list[str]) -> None:
    for errors in run_ranks(fused, num_ranks, texts, threads=1):
        assert any("qkv.weight" in name for _, name in errors)
        assert max(errors.values()) < 1e-12, max(errors, key=errors.__getitem__)
