"""What a script registers is saved and resumed with its run, and what no file holds is refused."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Numbers, perceptron
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from marks import by_hand
from phalanx.errors import CheckpointError, ScriptError
from phalanx.launch.local import run_ranks


class Kept:
    """An object with a state, as a counter, a metric or early stopping is."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def prepared(strategy: str) -> tuple[phalanx.Run, nn.Module, Any, Any]:
    run = phalanx.init(strategy)
    torch.manual_seed(0)
    model = perceptron().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return run, *run.prepare(model, optimizer, DataLoader(Numbers(), 8))


def take_step(run: phalanx.Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
    x, y = next(iter(loader))
    run.backward(sum_of_rows=cross_entropy(model(x), y, reduction="sum"), count=len(y))
    optimizer.step()
    optimizer.zero_grad()


def full_state() -> dict[str, Any]:
    return {
        "best": -math.inf, "patience": 3, "is_over": False, "name": "früh", "nothing": None,
        "seen": Counter({("a", "b"): 2}), "of_epoch": {0: 1.5, 7: [1, 2.5]}, "a tuple": [[1]],
        "of_pair": {(1, (2, "c")): torch.arange(2)}, "pair": (1, torch.arange(3), (2.5,)),
        "tensors": [torch.arange(4), {"deep": torch.eye(2, dtype=torch.bfloat16)}],
        "count": torch.tensor(7), "empty": torch.zeros(0, 3), "many": torch.randn(70000),
    }  # fmt: skip


def saved_states(folder: Path, strategy: str) -> list[str]:
    """Save objects of many kinds, and how the dict of a hand-made average lies."""
    run, *parts = prepared(strategy)
    take_step(run, *parts)
    torch.manual_seed(1)
    run.register("kept", Kept(**full_state()))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run.register("scaler", scaler)
    run.register("by_hand", Kept(**OrderedDict(parts[0].state_dict())))
    run.register("later", Kept(nothing=None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.save(folder)
    return [str(each.message) for each in caught]


def resumed_states(folder: Path, strategy: str) -> tuple[dict[str, Any], float, list[bool]]:
    run, model, *_ = prepared(strategy)
    kept, by_hand_made = Kept(), Kept(**OrderedDict(model.state_dict()))
    scaler = torch.amp.GradScaler("cpu")
    run.register("kept", kept)
    run.register("scaler", scaler)
    run.register("by_hand", by_hand_made)
    run.register("later", Kept())
    assert run.resume(folder)
    own = model.state_dict()
    are_alike = [torch.equal(by_hand_made.state[name], own[name]) for name in own]
    return kept.state, scaler.get_scale(), are_alike


@pytest.mark.parametrize(("first", "then"), [
    ("fsdp2", "dp2"), by_hand("dp2", "fsdp2"), by_hand("fsdp3", "dp1"), by_hand("dp1", "fsdp2"),
])  # fmt: skip
def test_registered_objects_go_on(tmp_path: Path, first: str, then: str) -> None:
    assert run_ranks(saved_states, int(first[-1]), tmp_path, first, threads=1)[0] == []
    torch.manual_seed(1)
    expected = full_state()
    for state, scale, are_alike in run_ranks(
        resumed_states, int(then[-1]), tmp_path, then, threads=1
    ):
        assert repr(state) == repr(expected)
        assert torch.equal(state["many"], expected["many"])
        assert scale == 8.0
        assert all(are_alike)


class Lost(nn.Module):
    """No state_dict that could be held."""

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {"function": print}


def mistakes_of_registration(folder: Path) -> list[str]:
    run, *parts = prepared("dp2")
    run.register("counter", Kept(n=1))
    words: list[str] = []
    around: list[Any] = []
    around.append(around)
    for mistake in (
        lambda: run.register("counter", Kept()),
        lambda: run.register("a/b", Kept()),
        lambda: run.register(3, Kept()),  # pyright: ignore[reportArgumentType]
        lambda: run.register("list", []),
        lambda: run.register("lost", Lost()),
        lambda: run.register("sparse", Kept(tensor=torch.eye(2).to_sparse())),
        lambda: run.register("round", Kept(of=around)),
        lambda: run.register("deep", Kept(of=[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]])),
    ):
        try:
            mistake()
        except ScriptError as error:
            words.append(str(error))
        else:
            words.append("passed")
    take_step(run, *parts)
    run.save(folder)
    later, *_ = prepared("dp2")
    later.register("more", Kept())
    with pytest.raises(CheckpointError) as raised:
        later.resume(folder)
    words.append(str(raised.value))
    later.register("counter", counter := Kept())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert later.resume(folder)
    assert counter.state == {"n": 1}
    assert len(caught) == run.is_first
    return [*words, *(str(each.message) for each in caught)]


def test_what_cannot_be_registered_is_told_at_once(tmp_path: Path) -> None:
    expected = [
        r"register: 'counter' is already a Kept; give another name",
        r"register: the name is 'a/b'; expected letters, digits and underscores",
        r"register: the name is 3; expected letters",
        r"register: 'list' is a list without state_dict",
        r"register: cannot save the state of 'lost', a Lost: .*expected numbers, text, lists",
        r"register: .*'sparse', a Kept: tensor is a torch.sparse_coo tensor of torch.float32",
        r"register: cannot save the state of 'round', a Kept: it contains itself",
        r"register: cannot save the state of 'deep', a Kept: it is nested too deeply",
        r"it has the registered objects \['counter'\], and this script has \['more'\]",
        r"resume: the checkpoint has no state of \['more'\], which starts from scratch",
    ]
    for rank, words in enumerate(run_ranks(mistakes_of_registration, 2, tmp_path, threads=1)):
        for pattern, said in zip(expected[: len(expected) - rank], words, strict=True):
            assert re.search(pattern, said), said
            assert len(said.splitlines()) == 1


def a_state_that_breaks(kept: Kept, model: nn.Module, optimizer: Any) -> None:
    kept.state["n"] = print


def a_state_of_an_optimizer(kept: Kept, model: nn.Module, optimizer: Any) -> None:
    state: dict[Any, Any] = optimizer.state
    state[next(model.parameters())]["row"] = torch.zeros(3)


def weights_saved_alone(folder: Path, spoil: Callable[[Kept, nn.Module, Any], None]) -> str:
    run, *parts = prepared("dp2")
    run.register("kept", kept := Kept(n=1))
    take_step(run, *parts)
    first = run.save(folder, keep=1)
    take_step(run, *parts)
    spoil(kept, parts[0], parts[1])
    with pytest.raises(CheckpointError) as raised:
        run.save(folder, keep=1)
    before = run.state_dict()
    with torch.no_grad():
        for parameter in parts[0].parameters():
            parameter.zero_()
    run.load_state_dict(folder / "checkpoints" / "weights-00000002")
    after = run.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # The checkpoint before is still there, and is found by each name of it.
    for named in (first, folder / "checkpoints", folder):
        kept.state = {"n": 2}
        assert run.resume(named)
        assert (run.steps_done, kept.state) == (1, {"n": 1})
    with pytest.raises(CheckpointError, match=f"does not exist.*the latest of this run is {first}"):
        run.resume(first.with_name("step-00000009"))
    take_step(run, *parts)
    assert run.save(folder / "checkpoints") == first.with_name("step-00000002")
    run, *parts = prepared("dp2")
    run.register("kept", kept)
    assert run.resume(first)
    assert run.save(folder).parent.parent == folder.with_name(f"{folder.name}-2")
    return str(raised.value)


@pytest.mark.parametrize(("spoil", "reason"), [
    (a_state_that_breaks, r"state of 'kept', a Kept: .*not JSON serializable"),
    by_hand(a_state_of_an_optimizer, r"the optimizer's row of 0.weight has the shape \[3\]"),
])  # fmt: skip
def test_the_weights_are_saved_whatever_else_cannot_be(
    tmp_path: Path, spoil: Callable[..., None], reason: str
) -> None:
    for words in run_ranks(weights_saved_alone, 2, tmp_path / "run", spoil, threads=1):
        assert re.search(f"{reason}.*only the weights.*load_state_dict.*step-00000001$", words)


def saved_unlike(folder: Path) -> list[str]:
    run, *parts = prepared("dp2")
    run.register("meter", Kept(right=3 if run.is_first else 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            take_step(run, *parts)
            run.save(folder)
    return [str(each.message) for each in caught if "meter" in str(each.message)]


def test_a_state_that_is_not_alike_on_all_ranks_is_told_once(tmp_path: Path) -> None:
    first, other = run_ranks(saved_unlike, 2, tmp_path, threads=1)
    assert other == []
    assert len(first) == 1
    assert re.search(r"the state of 'meter' on rank 1 differs from rank 0's.*run.sum", first[0])


def saved_by_adafactor(folder: Path) -> tuple[list[str], str]:
    run = phalanx.init("dp2")
    model = perceptron().double()
    prepared = run.prepare(
        model, torch.optim.Adafactor(model.parameters()), DataLoader(Numbers(), 8)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            take_step(run, *prepared)
    with pytest.raises(CheckpointError) as raised:
        run.save(folder)
    return [str(each.message) for each in caught], str(raised.value)


def test_an_optimizer_that_no_checkpoint_holds_is_told_after_its_first_step(tmp_path: Path) -> None:
    (first, words), (other, _) = run_ranks(saved_by_adafactor, 2, tmp_path, threads=1)
    assert other == []
    assert len(first) == 1
    assert re.search(r"Adafactor keeps a row_var of shape \[10, 1\] of a parameter", first[0])
    assert "only the weights are saved" in words
    assert [path.name for path in (tmp_path / "checkpoints").glob("*-*")] == ["weights-00000002"]


class Refusing(Kept):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state != {"n": 0}:
            raise KeyError("epoch")


def refused_resume(folder: Path) -> None:
    run, *parts = prepared("fsdp2")
    run.register("first", Kept(n=1))
    run.register("second", Kept(n=1))
    take_step(run, *parts)
    run.save(folder)
    run, _, optimizer, _ = prepared("fsdp2")
    optimizer.param_groups[0]["lr"] = 0.07
    run.register("first", first := Kept(n=0))
    run.register("second", second := Refusing(n=0))
    before = run.state_dict()
    with pytest.raises(CheckpointError, match="cannot resume 'second', a Refusing"):
        run.resume(folder)
    after = run.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (run.steps_done, optimizer.param_groups[0]["lr"]) == (0, 0.07)
    assert first.state == second.state == {"n": 0}
    assert not optimizer.state


def test_a_refused_resume_leaves_all_as_it_was(tmp_path: Path) -> None:
    run_ranks(refused_resume, 2, tmp_path, threads=1)
