"""Averages of the weights, whole weights there and back, and what a script takes shards for."""

from __future__ import annotations

import copy
import functools
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Numbers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from marks import by_hand
from phalanx.errors import CheckpointError, ConfigError, PhalanxError, ScriptError, message_of
from phalanx.launch.local import run_ranks
from phalanx.script.script_rank import run_script

DECAY = 0.8

ROLES = {
    "table": "embedding", "norm": "norm", "mlp": "branch", "mlp.0": "column", "mlp.2": "row",
    "head": "head",
}  # fmt: skip


class Mixer(nn.Module):
    """Splits under tp; its buffer is nobody's shard."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16))
        self.head = nn.Linear(16, 10)
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x + self.mlp(self.norm(x)))


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(5)
    model = nn.Sequential(
        *(nn.Linear(6, 8), nn.Dropout(0.0), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))
    ).double()
    model[0].bias.requires_grad_(False)
    return model, torch.optim.Adam(model.parameters(), 0.02), DataLoader(Numbers(), 8, True)


def plain_average(num_epochs: int) -> tuple[dict[str, Tensor], float]:
    """Return the average that torch makes, and the validation loss of the model with it."""
    model, optimizer, loader = parts()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)
        list(DataLoader(Numbers(), 8))  # as the validation of the other loop draws
    average.module.eval()
    numbers = Numbers()
    with torch.no_grad():
        loss = cross_entropy(average.module(numbers.x), numbers.y)
    return average.module.state_dict(), float(loss)


def evaluated(run: phalanx.Run, model: nn.Module, held_back: Any) -> float:
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for x, y in held_back:
            total += cross_entropy(model(x), y, reduction="sum").item()
            count += len(y)
    model.train()
    return run.mean(total, count).item()


def averaged(folder: Path, strategy: str, num_epochs: int) -> tuple[dict[str, Tensor], float]:
    """Go on for some epochs, from the checkpoint if there is one."""
    run = phalanx.init(strategy)
    model, optimizer, loader, held_back = run.prepare(
        *parts(), DataLoader(Numbers(), 8), batch_norm="global"
    )
    average = run.average(DECAY)
    run.resume(folder)
    while loader.epoch < num_epochs:
        for x, y in loader:
            run.backward(sum_of_rows=cross_entropy(model(x), y, reduction="sum"), count=len(y))
            optimizer.step()
            optimizer.zero_grad()
            average.update()
        before = run.state_dict()
        with average.applied():
            evaluated(run, model, held_back)
        after = run.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
    run.save(folder)
    with average.applied():
        return run.state_dict(), evaluated(run, model, held_back)


@pytest.mark.parametrize("strategies", [
    ["dp2", "fsdp2"], by_hand(["fsdp2:zero1", "dp3"]), by_hand(["fsdp3", "dp1"]),
    by_hand(["fsdp2:zero2", "dp2,fsdp2"]),
])  # fmt: skip
def test_an_average_is_that_of_torch_and_goes_on_under_another_strategy(
    tmp_path: Path, strategies: list[str]
) -> None:
    for num_epochs, strategy in enumerate(strategies, 1):
        num_ranks = phalanx.Strategy.parse(strategy).num_ranks
        expected, loss = plain_average(num_epochs)
        for state, found in run_ranks(
            averaged, num_ranks, tmp_path, strategy, num_epochs, threads=1
        ):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
            assert found == pytest.approx(loss, rel=1e-9)


def initialized_again(strategy: str | None) -> dict[str, Tensor]:
    run = None if strategy is None else phalanx.init(strategy)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)).double()
    if run is not None:
        model = run.prepare(model)
    torch.manual_seed(3)
    nn.init.xavier_normal_(model[0].weight)
    nn.init.trunc_normal_(model[2].weight, std=0.1)
    model[0].bias.data.uniform_(-1, 1)
    nn.init.zeros_(model[2].bias)
    return model.state_dict() if run is None else run.state_dict()


def test_an_initialization_after_prepare_draws_the_numbers_of_one_process() -> None:
    expected = initialized_again(None)
    for state in run_ranks(initialized_again, 2, "fsdp2"):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=0)


def average_by_hand(decay: float, states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the usual EMA with a warm-up, of all floating-point weights and buffers."""
    average = {n: v.clone() for n, v in states[0].items() if v.is_floating_point()}
    for count, state in enumerate(states[1:], 1):
        now = min(decay, (1 + count) / (10 + count))
        average = {name: now * v + (1 - now) * state[name] for name, v in average.items()}
    return average


def with_a_warm_up(*, begins_initially: bool) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    run = phalanx.init("fsdp2")
    model, optimizer, loader = run.prepare(*parts(), batch_norm="global")
    average, states = run.average(0.4, warmup=True, buffers=True), list[dict[str, Tensor]]()
    if begins_initially:
        average.update()
        states.append(run.state_dict())
    for x, y in loader:
        run.backward(mean_of_rows=cross_entropy(model(x), y), count=len(y))
        optimizer.step()
        average.update()
        states.append(run.state_dict())
    with average.applied():
        return run.state_dict(), states


@pytest.mark.parametrize("begins_initially", [False, by_hand(True)])
def test_an_average_with_a_warm_up_has_buffers_too(begins_initially: bool) -> None:
    made = functools.partial(with_a_warm_up, begins_initially=begins_initially)
    for state, states in run_ranks(made, 2, threads=1):
        expected = average_by_hand(0.4, states)
        assert len(states) > 3 and "2.running_var" in expected
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def copied(strategy: str, is_before: bool) -> dict[str, Tensor]:
    """Average by torch's own class, made before or after the model is prepared."""
    run = phalanx.init(strategy)
    model, optimizer, loader = parts()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) if is_before else None
    model, optimizer, loader = run.prepare(model, optimizer, loader, batch_norm="global")
    average = average or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    run.register("ema", average)
    for x, y in loader:
        run.backward(sum_of_rows=cross_entropy(model(x), y, reduction="sum"), count=len(y))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average.module.state_dict()


@pytest.mark.parametrize("is_before", [True, False])
def test_under_dp_the_average_of_torch_itself_is_the_plain_one(is_before: bool) -> None:
    expected, _ = plain_average(1)
    for state in run_ranks(copied, 2, "dp2", is_before, threads=1):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


COPIES = {
    "AveragedModel": "AveragedModel(model)",
    "of a decay": "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))",
    "by hand": "copy.deepcopy(model)",
}


@pytest.mark.parametrize("made", ["AveragedModel", by_hand("of a decay"), by_hand("by hand")])
def test_a_copy_that_meets_shards_names_the_average_to_take(tmp_path: Path, made: str) -> None:
    line = "copied.update_parameters(model)"
    if made == "by hand":
        line = "copied[0].weight.data.lerp_(model[0].weight.data, 0.1)"
    script = tmp_path / "copies.py"
    script.write_text(f"""
import copy, phalanx
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
run = phalanx.init()
model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
copied = {COPIES[made]}
model = run.prepare(model)
{line}
""")
    with pytest.raises(PhalanxError) as raised:
        run_ranks(run_script, 2, str(script), [], "fsdp2", threads=1)
    message = message_of(raised.value)
    assert re.search(r"is a shard.*run.average\(decay\), not by an AveragedModel", message)
    assert message.endswith(f"at {script}:9")


def restored(strategy: str, folder: Path) -> list[bool]:
    """Keep the best weights as a loop does that stops early, and give them back."""
    run = phalanx.init(strategy)
    torch.manual_seed(5)
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    ids = torch.arange(33).view(11, 3) % 10
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(TensorDataset(ids), 4), roles=ROLES
    )
    whole, at_first = run.state_dict(), [p.detach().clone() for p in model.parameters()]
    saved = run.save(folder)
    own = copy.deepcopy(model.state_dict())
    # As loops print them: torch would read the number of this rank's shard.
    for number in (Tensor.norm, Tensor.sum, Tensor.max, Tensor.min):
        read = {name: number(p.detach()).item() for name, p in model.named_parameters()}
        of_all = {name: number(whole[name]).item() for name in read}
        assert read == pytest.approx(of_all, rel=1e-5)
    found: list[bool] = []
    average = run.average(0.5)
    average.update()
    for give_back in (
        lambda: run.load_state_dict(whole),
        lambda: run.load_state_dict(whole if run.is_first else None),
        lambda: run.load_state_dict(saved),
        lambda: run.load_state_dict(folder),
        lambda: model.load_state_dict(own),
    ):
        for (x,) in loader:
            loss = cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="sum")
            run.backward(sum_of_rows=loss, count=x.numel())
            optimizer.step()
            optimizer.zero_grad()
        model.steps += 1
        moved = run.state_dict()
        average.load_state_dict({**average.state_dict(), "num_updates": 1})
        average.update()
        with average.applied():
            halved = run.state_dict()
        for name in whole:
            if name != "steps":  # a buffer is the model's
                torch.testing.assert_close(halved[name], (whole[name] + moved[name]) / 2)
        give_back()
        with average.applied():  # begin again with the first weights
            run.load_state_dict(whole)
        back = run.state_dict()
        found.append(all(not torch.equal(moved[name], whole[name]) for name in whole))
        found.append(all(torch.equal(back[name], whole[name]) for name in whole))
        found.append(
            all(torch.equal(a, b) for a, b in zip(model.parameters(), at_first, strict=True))
        )
    return found


@pytest.mark.parametrize("strategy", [
    "fsdp2", by_hand("dp2"), by_hand("tp2"), by_hand("fsdp2,tp2"), by_hand("fsdp3"),
])  # fmt: skip
def test_the_best_weights_are_restored(tmp_path: Path, strategy: str) -> None:
    num_ranks = phalanx.Strategy.parse(strategy).num_ranks
    for found in run_ranks(restored, num_ranks, strategy, tmp_path, threads=1):
        assert all(found), found


class Counting(nn.Linear):
    """Counts its own calls, as quantized layers keep what they have seen."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen = 0

    def forward(self, input: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(input)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "scales": torch.tensor([float(self.seen)])}

    def set_extra_state(self, state: Any) -> None:
        assert state["scales"].item() == state["seen"]
        self.seen = state["seen"]


def counts(strategy: str, folder: Path) -> list[int]:
    """Return the calls that a module has counted as its state is saved, and given back."""
    run = phalanx.init(strategy)
    model: Any = nn.Sequential(Counting(), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(TensorDataset(torch.randn(8, 3)), 4)
    )
    found: list[int] = []
    whole: Any = None
    for (x,) in loader:
        run.backward(sum_of_rows=model(x).sum(), count=len(x))
        optimizer.step()
        optimizer.zero_grad()
        found.append(model[0].seen)
        if whole is None:
            whole = run.state_dict()
            run.save(folder)
    for state in (whole, whole if run.is_first else None):
        model[0].seen = 7
        run.load_state_dict(state)
        found.append(model[0].seen)
    model[0].seen = 7
    run.resume(folder)
    return [*found, model[0].seen]


@pytest.mark.parametrize("strategy", ["fsdp2", by_hand("dp2")])
def test_the_extra_state_of_a_module_is_returned_and_saved(tmp_path: Path, strategy: str) -> None:
    assert run_ranks(counts, 2, strategy, tmp_path, threads=1) == [[1, 2, 1, 1, 1]] * 2


def mistakes_of_weights(folder: Path) -> list[str]:
    run = phalanx.init("fsdp2")
    model, _, loader = run.prepare(*parts(), batch_norm="global")
    average = run.average()
    whole = run.state_dict()
    no_bias = {name: value for name, value in whole.items() if name != "4.bias"}
    x, y = next(iter(loader))
    loss = cross_entropy(model(x), y, reduction="sum")

    def within(call: Callable[[], Any]) -> None:
        with average.applied():
            call()

    words: list[str] = []
    for mistake in (
        lambda: model.load_state_dict(whole),
        lambda: model[4].load_state_dict({"weight": whole["4.weight"], "bias": whole["4.bias"]}),
        lambda: torch.save({"model": model.state_dict(), "epoch": 1}, io.BytesIO()),
        lambda: torch.save(model[0].state_dict(), io.BytesIO()),
        lambda: run.load_state_dict(None),
        lambda: run.load_state_dict(no_bias),
        lambda: run.load_state_dict({**whole, "more": x}),
        lambda: run.load_state_dict({**whole, "4.bias": x}),
        lambda: run.load_state_dict(model.state_dict()),
        lambda: run.load_state_dict(folder / "nowhere"),
        lambda: run.average(1.5),
        lambda: run.average(0.9),
        lambda: within(average.update),
        lambda: within(lambda: within(lambda: None)),
        lambda: within(lambda: run.backward(sum_of_rows=loss, count=len(y))),
        lambda: within(lambda: run.save(folder)),
    ):
        try:
            mistake()
        except (ScriptError, ConfigError, CheckpointError) as error:
            words.append(str(error))
        else:
            words.append("passed")
    return words


def test_what_takes_shards_for_weights_is_told(tmp_path: Path) -> None:
    expected = [
        r"model.load_state_dict: 0.weight is a whole tensor, but .*call run.load_state_dict",
        r"model.load_state_dict: weight is a whole tensor",
        r"model.state_dict\(\) under fsdp2 has this rank's shards.*state = run.state_dict\(\)",
        r"model.state_dict\(\) under fsdp2 has this rank's shards",
        r"the state is a NoneType on the first rank",
        r"the state has no '4.bias', which the model has",
        r"the state has 'more', which the model does not have",
        r"4.bias is \[\d, 6\] in the state, and \[5\] in the model",
        r"0.weight is a shard of this rank",
        r"no checkpoint in .*nowhere: it does not exist",
        r"decay is 1.5; expected a number in \[0, 1\)",
        r"'average' is already a WeightAverage",
        r"update\(\) within applied\(\)",
        r"applied\(\) within applied\(\)",
        r"backward: called within applied\(\)",
        r"save: called within applied\(\)",
    ]
    for words in run_ranks(mistakes_of_weights, 2, tmp_path, threads=1):
        for pattern, said in zip(expected, words, strict=True):
            assert re.search(pattern, said), said
            assert len(said.splitlines()) == 1
