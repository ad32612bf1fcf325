"""Replicas that drift apart are noticed, at the latest when saving or at the end, and named."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import loops
import pytest
import torch
import torch.distributed as dist
from loops import Numbers, Twice, normed, perceptron
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

import phalanx
from phalanx.errors import PhalanxError
from phalanx.launch.attach import check_end
from phalanx.launch.local import run_ranks
from phalanx.script.guards import replicas

NUM_STEPS = 6


def is_odd() -> bool:
    """Return whether this rank makes the mistake: those that hold the second replica do."""
    return dist.get_rank() >= dist.get_world_size() // 2


class Loop:
    """A prepared loop, which a mistake may change on odd ranks before, within and after a step."""

    def __init__(
        self,
        strategy: str,
        make: Callable[[Any], torch.optim.Optimizer],
        build: Callable[[], nn.Module] = perceptron,
        dtype: torch.dtype = torch.float64,
        accumulation: int = 1,
        batch_size: int = 8,
        **options: Any,
    ) -> None:
        self.run = phalanx.init(strategy, accumulation=accumulation)
        self.dtype = dtype
        torch.manual_seed(0)
        model = build().to(dtype)
        given = make(model)
        loader = DataLoader(Numbers(), batch_size, shuffle=True)
        self.model, self.optimizer, self.loader = self.run.prepare(model, given, loader, **options)
        self.held_back = self.run.prepare(DataLoader(Numbers(), batch_size))
        self.scheduler: Any = None
        self.own_loss = 0.0
        self.is_skipped = False

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    @property
    def weight(self) -> torch.Tensor:
        first = next(self.model.parameters())
        return getattr(first, "to_local", lambda: first)()

    def gradients(self) -> list[torch.Tensor]:
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [getattr(gradient, "to_local", lambda g=gradient: g)() for gradient in found]

    def train(self, mistake: Callable[[Loop, int], None], num_steps: int = NUM_STEPS) -> None:
        self.batches = itertools.chain(self.loader, self.loader)
        for number, (x, y) in enumerate(self.batches):
            if number == num_steps:
                return
            loss = cross_entropy(self.model(x.to(self.dtype)), y, reduction="sum")
            self.own_loss = float(loss.detach()) / max(len(y), 1)
            self.run.backward(sum_of_rows=loss, count=len(y))
            self.is_skipped = False
            mistake(self, number)
            if self.run.is_step_end:
                if not self.is_skipped:
                    self.optimizer.step()
                self.optimizer.zero_grad()


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), 0.1, momentum=0.5)


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), 0.01)


Mistake = Callable[[Loop, int], None]


def once(change: Callable[[Loop], Any], at: int = 2) -> Mistake:
    """Do something on odd ranks in one step."""

    def mistake(loop: Loop, number: int) -> None:
        if number == at and is_odd():
            with torch.no_grad():
                change(loop)

    return mistake


def always(change: Callable[[Loop], Any]) -> Mistake:
    return lambda loop, number: once(change, number)(loop, number)


def setting(name: str, value: Any, at: int = 2) -> Mistake:
    return once(lambda loop: loop.group.update({name: value}), at)


def scheduled(make: Callable[[Any], Any], step: Callable[[Loop], None]) -> Mistake:
    def mistake(loop: Loop, number: int) -> None:
        loop.scheduler = loop.scheduler or make(loop.optimizer)
        step(loop)

    return mistake


def on_odd(loop: Loop) -> None:
    if is_odd():
        loop.scheduler.step()


def skip(loop: Loop) -> None:
    loop.is_skipped = True


def of_rank(odd: Callable[[Any], torch.optim.Optimizer], even: Any) -> Any:
    return lambda model: (odd if is_odd() else even)(model)


def nothing(loop: Loop, number: int) -> None:
    pass


def scaled_state(loop: Loop) -> None:
    state = loop.optimizer.state_dict()
    state["state"] = {
        key: {name: 2 * value for name, value in each.items()}
        for key, each in state["state"].items()
    }
    loop.optimizer.load_state_dict(state)


def loaded(loop: Loop) -> None:
    loop.model.load_state_dict({n: 0.5 * value for n, value in loop.model.state_dict().items()})


def new_gradients(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = None if parameter.grad is None else 2 * parameter.grad


def without_a_gradient(loop: Loop) -> None:
    next(loop.model.parameters()).grad = None


def data_of(loop: Loop) -> None:
    first = next(loop.model.parameters())
    first.data = first.data * 1.5


def state_of_first(loop: Loop) -> dict[str, torch.Tensor]:
    return loop.optimizer.state[next(loop.model.parameters())]


RATE = r"lr of group 0 of \w+ is .* on rank \d and .* on rank \d; step the scheduler on every rank"
SETTING = r"of group 0 of \w+ is .* on rank \d and .* on rank \d; give it the same value on every"
KIND = r"the kind of optimizer 0 is .* on rank \d and .* on rank \d; make the same optimizer"
STEPS = r"rank \d has taken \d steps and rank \d has taken \d, so their weights differ; each rank"
CLIPS = r"run.clip was called \d times on rank \d and \d times on rank \d"
CHANGED = r"differs: its elements add up to .*on every rank"

Variant = tuple[str, Callable[[Any], torch.optim.Optimizer], Mistake, str]

OF_ONE_OPTIMIZER: list[tuple[Callable[[Any], torch.optim.Optimizer], Mistake, str]] = [
    (sgd, setting("lr", 0.05), RATE),
    (sgd, setting("lr", 0.05, NUM_STEPS - 1), RATE),
    (adamw, setting("lr", torch.tensor(0.002)), RATE),
    (sgd, setting("momentum", 0.9), SETTING),
    (sgd, setting("weight_decay", 0.1), SETTING),
    (sgd, setting("dampening", 0.1), SETTING),
    (sgd, setting("nesterov", True), SETTING),
    (sgd, setting("maximize", True), SETTING),
    (adamw, setting("betas", (0.8, 0.999)), SETTING),
    (adamw, setting("eps", 1e-4), SETTING),
    (adamw, setting("amsgrad", None), SETTING),
    (loops.of_groups, once(lambda loop: loop.optimizer.param_groups[1].update(lr=1.0)),
     r"lr of group 1 of AdamW is 0.03 on rank \d and 1.0 on rank \d"),
    (sgd, scheduled(lambda o: ReduceLROnPlateau(o, patience=0, threshold=0.0),
     lambda loop: loop.scheduler.step(loop.own_loss)), RATE),
    (sgd, scheduled(lambda o: StepLR(o, 2), on_odd), RATE),
    (adamw, scheduled(lambda o: StepLR(o, 2 + is_odd()), lambda loop: loop.scheduler.step()), RATE),
    (adamw, scheduled(lambda o: LambdaLR(o, lambda n: 1 / (1 + n + is_odd())),
     lambda loop: loop.scheduler.step()), r"lr of group 0 .* on rank 0 and .*; step the scheduler"),
    (sgd, scheduled(lambda o: OneCycleLR(o, 0.2, total_steps=10), on_odd),
     r"of group 0 of SGD is .* on rank \d and .* on rank \d"),
    (of_rank(sgd, adamw), nothing, KIND),
    (of_rank(adamw, lambda model: Adam(model.parameters(), 0.01)), nothing, KIND),
    (of_rank(sgd, lambda model: SGD(model.parameters(), 0.2, momentum=0.5)), nothing, RATE),
    (of_rank(sgd, lambda model: SGD(model[0].parameters(), 0.1, momentum=0.5)), nothing,
     r"the number of parameters of group 0 of SGD is [26] on rank \d and [26] on rank \d"),
    (sgd, once(skip), STEPS),
    (sgd, once(skip, NUM_STEPS - 1), STEPS),
    (adamw, always(skip), STEPS),
    (sgd, once(lambda loop: loop.run.clip(1e-3)), CLIPS),
    (adamw, always(lambda loop: loop.run.clip(1e-3)), CLIPS),
    (sgd, once(lambda loop: loop.run.clip(1e-3), NUM_STEPS - 1), CLIPS),
    (sgd, lambda loop, number: float(loop.run.clip(0.1 + is_odd())),
     r"the arguments of run.clip is .*1, p=2.0 on rank \d and .*1, p=2.0.*give run.clip the same"),
    (sgd, always(lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)), CHANGED),
    (adamw, once(lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)), CHANGED),
    (sgd, once(lambda loop: nn.utils.clip_grad_value_(loop.model.parameters(), 1e-3)), CHANGED),
    (adamw, once(lambda loop: [g.add_(0.1) for g in loop.gradients()]), CHANGED),
    (adamw, once(lambda loop: loop.gradients()[0].zero_()), CHANGED),
    (sgd, once(new_gradients), CHANGED),
    (sgd, once(without_a_gradient), CHANGED),
    (sgd, once(lambda loop: [g.mul_(3.0) for g in loop.gradients()], NUM_STEPS - 1), CHANGED),
    (sgd, once(loaded), CHANGED),
    (adamw, once(loaded, 0), CHANGED),
    (adamw, once(lambda loop: nn.init.normal_(loop.weight)), CHANGED),
    (sgd, once(lambda loop: nn.init.zeros_(loop.weight[0])), CHANGED),
    (sgd, always(lambda loop: loop.weight.mul_(0.99)), CHANGED),
    (sgd, always(lambda loop: loop.weight.clamp_(-0.1, 0.1)), CHANGED),
    (adamw, once(lambda loop: loop.weight.add_(1e-5)), CHANGED),
    (adamw, once(lambda loop: loop.weight.copy_(loop.weight.flip(0))), CHANGED),
    (sgd, once(lambda loop: loop.weight[0, 0].add_(1.0), NUM_STEPS - 1), CHANGED),
    (adamw, once(data_of), CHANGED),
    (sgd, once(lambda loop: loop.weight.data.add_(0.1)), CHANGED),
    (adamw, once(scaled_state), CHANGED),
    (sgd, once(scaled_state), CHANGED),
    (adamw, once(lambda loop: loop.optimizer.state.clear()), CHANGED),
    (adamw, once(lambda loop: state_of_first(loop)["exp_avg"].zero_()), CHANGED),
    (adamw, once(lambda loop: state_of_first(loop)["step"].add_(5)), CHANGED),
]  # fmt: skip


def words_of(variants: list[int], strategy: str) -> list[str]:
    """Return how each loop ends; half of them by a checkpoint."""
    words: list[str] = []
    for number in variants:
        make, mistake, _ = OF_ONE_OPTIMIZER[number]
        try:
            loop = Loop(strategy, make)
            loop.train(mistake)
            if number % 2:
                with tempfile.TemporaryDirectory() as folder:
                    loop.run.save(folder)
            check_end()
            words.append("passed")
        except PhalanxError as error:
            words.append(str(error))
    return words


def check_named(variants: list[int], strategy: str, num_ranks: int) -> None:
    ranks = run_ranks(words_of, num_ranks, variants, strategy, threads=1)
    for number, words in zip(variants, zip(*ranks, strict=True), strict=True):
        pattern = OF_ONE_OPTIMIZER[number][2]
        named = [each for each in words if each != "passed"]
        # At the end, which waits for no rank, the last of a shard to come there names it; else all.
        is_end = bool(named) and named[0].startswith("the script ends")
        is_named = 0 < len(named) < num_ranks if is_end else len(named) == num_ranks
        assert is_named, (number, pattern, words)
        assert all(re.search(pattern, each) for each in named), (number, pattern, words)


ELSEWHERE = [0, 3, 8, 12, 13, 17, 20, 22, 24, 32, 35, 37, 38, 42, 47, 50]
"""Some of them, under strategies that hold other replicas."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("strategy", "num_ranks", "variants"), [
    ("dp2", 2, list(range(len(OF_ONE_OPTIMIZER)))),
    ("dp2,fsdp2", 4, ELSEWHERE),
])  # fmt: skip
def test_replicas_that_drift_apart_are_named(
    strategy: str, num_ranks: int, variants: list[int]
) -> None:
    check_named(variants, strategy, num_ranks)


def kinds(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return optimizers of many kinds; half precision and unlike rates are in their own cases."""
    return [
        SGD(model.parameters(), 0.1),
        SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True),
        AdamW(model.parameters(), 0.01, fused=True),
        AdamW(model.parameters(), 0.01, foreach=True),
        torch.optim.Adagrad(model.parameters(), 0.1),
        torch.optim.NAdam(model.parameters(), 0.01),
        torch.optim.RMSprop(model.parameters(), 0.01, centered=True),
        loops.of_groups(model),
    ]


BUILDS: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (perceptron, {}),
    (Twice, {}),
    (normed, {"batch_norm": "global"}),
    (normed, {"batch_norm": "local"}),
]


def evaluate(loop: Loop) -> None:
    with torch.no_grad():
        for x, y in loop.held_back:
            right = (loop.model(x.to(loop.dtype)).argmax(1) == y).sum()
            loop.run.sum(right)
            loop.run.gather(y)


def num_clean(strategies: list[str]) -> int:
    """Run clean loops, whose weights are compared in each step; return how many there were."""
    number = 0
    # BatchNorm over a rank's own rows needs two of them in the last batch too.
    batch_size = 8 if dist.get_world_size() == 2 else 14
    with patch.object(replicas, "NUM_ALWAYS_CHECKED", 10**9):
        for strategy, (build, options), kind, dtype in itertools.product(
            strategies, BUILDS, range(8), (torch.float32, torch.float64)
        ):
            number += 1
            accumulation = 1 + number % 3
            make = lambda m, k=kind: kinds(m)[k]  # noqa: E731
            loop = Loop(strategy, make, build, dtype, accumulation, batch_size, **options)
            loop.train(lambda loop, _: loop.run.is_step_end and loop.run.clip(0.5), 10)
            evaluate(loop)
            assert len(loop.run.state_dict()) > 0
            if number % 8 == 0:
                with tempfile.TemporaryDirectory() as folder:
                    loop.run.save(folder)
            check_end()
    return number


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "strategies"), [
    (2, ["dp2", "dp2:naive", "fsdp2", "fsdp2:zero1", "fsdp2:zero2"]),
    (3, ["dp3"]),
    (4, ["dp2,fsdp2", "dp4"]),
])  # fmt: skip
def test_clean_runs_raise_no_alarm(num_ranks: int, strategies: list[str]) -> None:
    found = run_ranks(num_clean, num_ranks, strategies, threads=1)
    assert found == [64 * len(strategies)] * num_ranks


def leave_out_a_batch(loop: Loop, number: int) -> None:
    if number == 3 and is_odd():
        next(loop.batches)


LATE = {
    r"lr of group 0 of SGD is 0\.1 on rank 0 and 0\.2 on rank 1": setting("lr", 0.2, at=3),
    "the ranks have read different numbers of batches": leave_out_a_batch,
}


def drift_between_comparisons(words: str) -> None:
    """Make a mistake on a rank where no backward compares, and save."""
    with patch.object(replicas, "NUM_ALWAYS_CHECKED", 2):
        loop = Loop("dp2", sgd, batch_size=4)  # so that a pass has more batches than are read
        loop.train(LATE[words], NUM_STEPS - 1)
        with tempfile.TemporaryDirectory() as folder:
            loop.run.save(folder)


@pytest.mark.parametrize("words", LATE)
def test_drift_between_comparisons_is_named_at_a_save(words: str) -> None:
    with pytest.raises(PhalanxError, match=f"save: {words}"):
        run_ranks(drift_between_comparisons, 2, words, threads=1)


def drift_of_accumulated_steps() -> None:
    """Change weights after the second step of two microbatches; the fourth step compares."""
    with patch.multiple(replicas, NUM_ALWAYS_CHECKED=1, STEPS_APART=4):
        loop = Loop("dp2", sgd, accumulation=2, batch_size=4)
        loop.train(once(lambda loop: loop.weight.data.add_(0.1), at=3), 14)


def test_an_even_accumulation_is_compared_after_the_first_steps_too() -> None:
    with pytest.raises(PhalanxError, match=f"backward: 0.weight {CHANGED}"):
        run_ranks(drift_of_accumulated_steps, 2, threads=1)


def drift_in_a_run(odd: int) -> None:
    """Train twice; the replicas of one run drift apart in its last step."""
    loops_of_script: list[Loop] = []
    for number in range(2):
        loop = Loop("dp2", sgd)
        mistake = once(lambda loop: loop.weight.data.add_(0.1), NUM_STEPS - 1)
        loop.train(mistake if number == odd else nothing)
        loops_of_script.append(loop)
    check_end()


@pytest.mark.parametrize(("odd", "where"), [(0, r"run \d+ of the script begins"),
    (1, "the script ends")])  # fmt: skip
def test_each_run_of_a_script_is_compared_at_its_end(odd: int, where: str) -> None:
    with pytest.raises(PhalanxError, match=f"^{where} with ranks that differ: .*{CHANGED}"):
        run_ranks(drift_in_a_run, 2, odd, threads=1)
