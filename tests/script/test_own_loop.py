"""A loop of one's own computes on any ranks what it computes in plain PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import math
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
import torch.distributed as dist
from jobs import Dropping
from loops import Case, Numbers, Stream, Twice, Views, as_rows, normed, of_groups
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import DataLoader, Subset, TensorDataset

import phalanx
from marks import by_hand
from phalanx.errors import PhalanxError, RankFailed
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import run_ranks
from phalanx.parallel import data, reduce

LIMIT = 1e-10

CASES: dict[str, Case] = {
    "adam": Case(),
    "sgd": Case(optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1)),
    "momentum": Case(optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, nesterov=True)),
    "adagrad": Case(optimizer=lambda m: torch.optim.Adagrad(m.parameters(), 0.1)),
    "rmsprop": Case(optimizer=lambda m: torch.optim.RMSprop(m.parameters(), 0.01, centered=True)),
    "nadam": Case(optimizer=lambda m: torch.optim.NAdam(m.parameters(), 0.01)),
    "fused": Case(optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True)),
    "foreach": Case(optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=True)),
    "groups": Case(optimizer=of_groups, schedules=True),
    "clipped": Case(max_norm=0.1),
    "accumulated": Case(accumulation=3, max_norm=0.2),
    "one row left": Case(batch_size=9, accumulation=2),
    "dicts": Case(dataset=lambda: Numbers("dict")),
    "dataclasses": Case(dataset=lambda: Numbers("dict"), collate=as_rows),
    "stream": Case(dataset=Stream, shuffle=False),
    "twice": Case(build=Twice),
    "views": Case(build=Views),
    "batch norm": Case(build=normed, options={"batch_norm": "global"}),
}


def results(strategies: list[str], names: Sequence[str]) -> dict[tuple[str, str], Any]:
    """Run cases under every strategy, on the ranks of one job."""
    warnings.filterwarnings("error", "FSDP2-wrapped module")  # of gradients, which are right here
    return {
        (strategy, name): loops.distributed(CASES[name], strategy)
        for strategy in strategies
        for name in names
    }


@pytest.mark.parametrize(
    ("num_ranks", "strategies", "names"),
    [
        (2, ["dp2"], tuple(CASES)),
        (2, ["fsdp2"], ("accumulated", "twice", "views", "groups")),
        (3, ["fsdp3"], ("one row left", "batch norm")),
        by_hand(1, ["dp1"], tuple(CASES)),
        by_hand(2, ["dp2:naive", "fsdp2", "fsdp2:zero1", "fsdp2:zero2"], tuple(CASES)),
        by_hand(3, ["dp3", "fsdp3"], tuple(CASES)),
        by_hand(4, ["dp2,fsdp2"], tuple(CASES)),
    ],
)
def test_every_rank_computes_what_one_process_does(
    num_ranks: int, strategies: list[str], names: Sequence[str]
) -> None:
    found = run_ranks(results, num_ranks, strategies, names, threads=1)
    for name in names:
        expected = loops.plain(CASES[name])
        for strategy in strategies:
            for rank in found:
                error = loops.largest_error(rank[strategy, name], expected)
                assert error < LIMIT, (strategy, name, error)


def losses_before(folder: Path, strategy: str, num_steps: int) -> list[float]:
    loop = loops.Distributed(CASES["groups"], strategy)
    loop.train(num_steps)
    loop.run.save(folder)
    return loop.losses


def losses_after(folder: Path, strategy: str) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    loop = loops.Distributed(CASES["groups"], strategy)
    assert loop.run.resume(folder)
    steps_done = loop.run.steps_done
    loop.train()
    return steps_done, loop.losses, loop.weights()


@pytest.mark.parametrize("num_steps", [by_hand(3), 5, by_hand(7)])
def test_a_loop_that_is_stopped_goes_on_under_another_strategy(
    tmp_path: Path, num_steps: int
) -> None:
    """A pass has five steps: it stops within the first, at its end, and within the second."""
    run_ranks(losses_before, 2, tmp_path, "fsdp2", num_steps, threads=1)
    losses, weights = loops.plain(CASES["groups"])
    for num_ranks, strategy in ((2, "dp2"), (3, "fsdp3:zero1"), (1, "dp1")):
        found = run_ranks(losses_after, num_ranks, tmp_path, strategy, threads=1)
        for steps_done, after, after_weights in found:
            assert steps_done == num_steps
            assert (
                loops.largest_error((after, after_weights), (losses[num_steps:], weights)) < LIMIT
            )


def folders_of_runs_begun_anew(folder: Path) -> list[str]:
    names: list[str] = []
    for _ in range(2):
        loop = loops.Distributed(CASES["adam"], "dp2")
        loop.train(1)
        names += [loop.run.save(folder).parents[1].name for _ in range(2)]
    return names


def test_a_run_begun_anew_leaves_the_checkpoints_of_another_alone(tmp_path: Path) -> None:
    for names in run_ranks(folders_of_runs_begun_anew, 2, tmp_path / "run", threads=1):
        assert names == ["run", "run", "run-2", "run-2"]


def losses_of_small_counts() -> list[tuple[float, float]]:
    """Give weights as counts, whose sum is below 1, and a last batch of fewer rows than ranks."""
    run = phalanx.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.arange(9, dtype=torch.float64)[:, None]
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(TensorDataset(x), 4))
    found: list[tuple[float, float]] = []
    for (rows,) in loader:
        weights = torch.full_like(rows, 0.05)
        loss = (model(rows).square() * weights).sum() / weights.sum() * weights.sum()
        mean = run.backward(sum_of_rows=loss, count=weights.sum())
        found.append((float(mean), float(model.weight.grad.sum())))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_counts_below_one_and_no_rows_are_divided_by_what_they_are() -> None:
    expected = run_ranks(losses_of_small_counts, 1, threads=1)[0]
    for found in run_ranks(losses_of_small_counts, 2, threads=1):
        assert all(map(math.isfinite, itertools.chain(*found)))
        assert found == [pytest.approx(each, rel=LIMIT) for each in expected]


def weights_of_multistep(folder: Path, num_steps: int | None) -> list[float]:
    case = dataclasses.replace(CASES["adam"], schedules=False)
    loop = loops.Distributed(case, "dp1")
    steps = torch.optim.lr_scheduler.MultiStepLR(loop.optimizer, [3, 6], 0.5)
    loop.scheduler = loop.run.prepare(steps)
    loop.run.resume(folder)
    loop.train(num_steps)
    if num_steps is not None:
        loop.run.save(folder)
    return [steps.last_epoch, *steps.get_last_lr()]


def test_a_schedule_whose_state_has_numbers_for_keys_goes_on(tmp_path: Path) -> None:
    assert run_ranks(weights_of_multistep, 1, tmp_path, 4, threads=1)[0] == [4, 0.005]
    assert run_ranks(weights_of_multistep, 1, tmp_path, None, threads=1)[0] == [10, 0.0025]


def blocks_without_dropout() -> nn.Module:
    model = Dropping()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a second run of a batch has other masks
    return model


def weights_after_an_error(strategy: str, *, is_failing: bool) -> dict[str, torch.Tensor]:
    """Fail within a backward, when some gradients are reduced already, and begin the step again."""
    data.buckets = lambda sizes, bucket_bytes: reduce.buckets(sizes, 64)
    case = Case(build=blocks_without_dropout, accumulation=2)
    loop = loops.Distributed(case, strategy)
    batches = list(itertools.islice(loop.loader, 2))

    def fail(_grad: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    def have_it_fail(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    def backward(*, is_failing: bool = False) -> None:
        x, y = batches[0]
        if is_failing:
            with loop.model.blocks[0].register_forward_hook(have_it_fail):
                logits = loop.model(x)
        else:
            logits = loop.model(x)
        loop.run.backward(sum_of_rows=cross_entropy(logits, y, reduction="sum"), count=len(y))

    for number_failing in (1, 2) if is_failing else ():
        if number_failing == 2:
            backward()
        with pytest.raises(RuntimeError, match="out of memory"):
            backward(is_failing=True)
    for _ in range(2):
        backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loop.weights()


@pytest.mark.parametrize(
    "strategy", ["dp2", by_hand("fsdp2"), by_hand("fsdp2:zero2"), by_hand("fsdp2:zero1")]
)
def test_a_step_that_failed_can_be_taken_again(strategy: str) -> None:
    ours, theirs = (
        run_ranks(functools.partial(weights_after_an_error, is_failing=how), 2, strategy, threads=1)
        for how in (True, False)
    )
    for own, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(own[name], other[name]) for name in other)


def fail_on_first_rank(strategy: str) -> None:
    """Fail on rank 0 within a backward, where rank 1 waits for a gradient that both sum."""
    loop = loops.Distributed(Case(build=blocks_without_dropout), strategy)

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("a bad row")

    def have_it_fail(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    if dist.get_rank() == 0:
        loop.model.blocks[0].register_forward_hook(have_it_fail)
    loop.train(1)


@pytest.mark.parametrize("strategy", ["fsdp2", by_hand("fsdp2:zero1"), by_hand("dp2")])
def test_an_error_in_the_backward_of_one_rank_is_reported(strategy: str) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 0 failed first.*ValueError: a bad row"):
        run_ranks(fail_on_first_rank, 2, strategy, threads=1)


def states(strategy: str) -> dict[str, torch.Tensor]:
    loop = loops.Distributed(CASES["adam"], strategy)
    loop.train()
    return loop.run.state_dict()


def test_whole_weights_are_those_of_the_plain_model() -> None:
    _, expected = loops.plain(CASES["adam"])
    for state in run_ranks(states, 2, "fsdp2", threads=1):
        assert list(state) == list(expected)
        assert all(type(tensor) is torch.Tensor for tensor in state.values())
        assert loops.largest_error(([0.0], state), ([0.0], expected)) < LIMIT


def scaled_losses(strategy: str, folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses of steps whose third overflows, and the scales after each."""
    run = phalanx.init(strategy)
    torch.manual_seed(0)
    model = loops.perceptron().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Numbers(), 8))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses: list[float] = []
    scales: list[float] = []
    for number, (x, y) in enumerate(loader):
        factor = 1e308 if number == 2 else 1.0
        loss_sum = factor * cross_entropy(model(x), y, reduction="sum")
        losses.append(
            float(run.backward(sum_of_rows=scaler.scale(loss_sum), count=len(y)))
            / scaler.get_scale()
        )
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        run.save(folder)  # after a step that was left out too
    return losses, scales


def test_a_scaler_skips_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    """Of shards, some of which are finite, too."""
    ((losses, scales),) = run_ranks(scaled_losses, 1, "dp1", tmp_path, threads=1)
    assert scales == [64, 64, 32, 32, 32]
    for strategy in ("dp2", "fsdp2"):
        for found, found_scales in run_ranks(scaled_losses, 2, strategy, tmp_path, threads=1):
            assert found_scales == scales, strategy
            assert found == pytest.approx(losses, rel=1e-9, nan_ok=True), strategy


def leave_a_step_out(strategy: str) -> None:
    """Leave out the second optimizer step on rank 1."""
    loop = loops.Distributed(Case(), strategy)
    for number, (x, y) in enumerate(loop.loader):
        loop.run.backward(
            sum_of_rows=cross_entropy(loop.model(x), y, reduction="sum"), count=len(y)
        )
        if number != 1 or loop.run.is_first:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["fsdp2", by_hand("dp2")])
def test_a_step_that_one_rank_leaves_out_is_named(strategy: str) -> None:
    with pytest.raises(PhalanxError, match="rank 0 has taken 2 steps and rank 1 has"):
        run_ranks(leave_a_step_out, 2, strategy, threads=1)


def two_models(strategy: str | None) -> list[float]:
    """Return the losses of a generator and a discriminator; of plain PyTorch without a strategy."""
    torch.manual_seed(0)
    data = TensorDataset(*torch.randn(2, 40, 3, dtype=torch.float64))
    loader: Any = DataLoader(data, batch_size=9)
    both = nn.ModuleDict({name: nn.Linear(3, k) for name, k in (("g", 3), ("d", 1))}).double()
    of_g, of_d = (torch.optim.Adam(both[name].parameters(), lr=0.05) for name in ("g", "d"))
    run = None
    if strategy is not None:
        run = phalanx.init(strategy)
        both, of_g, of_d, loader = run.prepare(both, of_g, of_d, loader)

    def step(optimizer: torch.optim.Optimizer, loss_sum: torch.Tensor, count: int) -> float:
        if run is None:
            (loss_sum / count).backward()
            loss = float(loss_sum.detach() / count)
        else:
            loss = float(run.backward(sum_of_rows=loss_sum, count=count))
        optimizer.step()
        both.zero_grad()
        return loss

    losses: list[float] = []
    for x, z in loader:
        fake = both["g"](z)
        wrong = softplus(both["d"](fake.detach())) + softplus(-both["d"](x))
        losses.append(step(of_d, wrong.sum(), len(x)))
        losses.append(step(of_g, softplus(-both["d"](fake)).sum(), len(x)))
    return losses


def test_two_models_take_turns() -> None:
    for losses in run_ranks(two_models, 2, "dp2", threads=1):
        assert losses == pytest.approx(two_models(None), rel=LIMIT)


def weights_of_skipped_steps() -> list[float]:
    """Return a weight before and after steps of two optimizers; the first loss is not finite."""
    run = phalanx.init("dp2", nonfinite="skip")
    torch.manual_seed(0)
    model = nn.Linear(6, 5).double()
    optimizers = [torch.optim.AdamW([p]) for p in model.parameters()]
    model, *optimizers, loader = run.prepare(model, *optimizers, DataLoader(Numbers(), 8))
    weights = [float(model.weight.detach().sum())]
    for number, (x, y) in zip(range(2), loader, strict=False):
        loss = cross_entropy(model(x), y) * (float("nan") if number == 0 else 1.0)
        run.backward(mean_of_rows=loss, count=len(y))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        weights.append(float(model.weight.detach().sum()))
    return weights


def test_a_step_whose_loss_is_not_finite_can_be_skipped() -> None:
    for before, skipped, after in run_ranks(weights_of_skipped_steps, 2, threads=1):
        assert before == skipped != after and math.isfinite(after)


def autocast_losses(strategy: str) -> list[float]:
    run = phalanx.init(strategy)
    torch.manual_seed(0)
    model = loops.perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Numbers(), 8))
    losses: list[float] = []
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x.float())
        assert logits.dtype == torch.bfloat16
        losses.append(
            float(
                run.backward(
                    sum_of_rows=cross_entropy(logits.float(), y, reduction="sum"), count=len(y)
                )
            )
        )
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_autocast_is_that_of_torch() -> None:
    (expected,) = run_ranks(autocast_losses, 1, "dp1", threads=1)
    for strategy in ("dp2", "fsdp2"):
        for losses in run_ranks(autocast_losses, 2, strategy, threads=1):
            assert losses == pytest.approx(expected, rel=5e-3), strategy


def mixed_sums() -> list[torch.Tensor]:
    run = phalanx.init("dp2")
    own = 0 if run.is_first else torch.tensor(1.5)
    return [run.sum(own), run.sum(torch.tensor(True)), run.sum(3)]


def test_sums_of_unlike_types() -> None:
    for found in run_ranks(mixed_sums, 2, threads=1):
        assert [float(each) for each in found] == [1.5, 2, 6]
        assert [each.dtype for each in found] == [torch.float64, torch.int64, torch.int64]


def with_a_closure(strategy: str | None) -> float:
    """Return the last loss of steps of L-BFGS; of plain PyTorch without a strategy."""
    torch.manual_seed(0)
    model = loops.perceptron().double()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=3)
    loader: Any = DataLoader(Numbers(), 8)
    run = None
    if strategy is not None:
        run = phalanx.init(strategy)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
    loss = 0.0
    for x, y in loader:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss_sum = cross_entropy(model(x), y, reduction="sum")
            if run is not None:
                return float(run.backward(sum_of_rows=loss_sum, count=len(y)))
            (loss_sum / len(y)).backward()
            return float(loss_sum.detach()) / len(y)

        loss = float(optimizer.step(closure))
    return loss


def test_an_optimizer_that_calls_the_forward_itself() -> None:
    for loss in run_ranks(with_a_closure, 2, "dp2", threads=1):
        assert loss == pytest.approx(with_a_closure(None), rel=1e-8)


def steps_of_passes() -> list[int]:
    """Return the steps done after each of two passes, with a look at other data before the last."""
    run = phalanx.init("dp2", accumulation=2)
    model = loops.perceptron().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader, held_back = DataLoader(Numbers(), 8), DataLoader(Numbers(), 16)
    model, optimizer, loader, held_back = run.prepare(model, optimizer, loader, held_back)
    steps: list[int] = []
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            run.backward(sum_of_rows=cross_entropy(model(x), y, reduction="sum"), count=len(y))
            if run.is_step_end:
                optimizer.step()
                optimizer.zero_grad()
            if number == 3:
                assert [len(model(x)) for x, _ in held_back]  # outside torch.no_grad
        steps.append(run.steps_done)
    return steps


def test_an_evaluation_with_gradients_ends_no_pass() -> None:
    assert run_ranks(steps_of_passes, 2, threads=1) == [[3, 6], [3, 6]]


class Moving(nn.Module):
    """Keeps the mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 5)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean.lerp(x.mean(0).detach(), 0.1)
        return self.last(x - self.mean)


def with_buffers(batch_norm: str | None) -> tuple[list[str], list[float]]:
    """Return the warnings of buffers, and what the buffers of floats add up to."""
    run = phalanx.init("dp2")
    torch.manual_seed(0)
    model = (Moving() if batch_norm is None else normed()).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared = run.prepare(model, optimizer, DataLoader(Numbers(), 8), batch_norm=batch_norm)
    model, optimizer, loader = prepared
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in loader:
            run.backward(sum_of_rows=cross_entropy(model(x), y, reduction="sum"), count=len(y))
            optimizer.step()
            optimizer.zero_grad()
    words = [str(each.message) for each in caught if "buffers" in str(each.message)]
    return words, [float(b.sum()) for b in model.buffers() if b.is_floating_point()]


def test_buffers_that_move_apart_are_told() -> None:
    (words, first), (_, other) = run_ranks(with_buffers, 2, None, threads=1)
    assert first != other
    assert len(words) == 1
    assert words[0].startswith("the buffers mean differ between ranks after a step")


@pytest.mark.parametrize("statistics", ["local", "global"])
def test_ranks_have_the_same_running_statistics(statistics: str) -> None:
    (words, first), (_, other) = run_ranks(with_buffers, 2, statistics, threads=1)
    assert words == []
    assert first == other


def whole_pass(loader: Iterable[Any]) -> Iterator[Any]:
    yield from list(loader)


def one_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    batches = iter(loader)
    ahead = next(batches)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        yield batch


def by_steps(loader: Iterable[Any]) -> Iterator[Any]:
    batches = iter(loader)
    while group := list(itertools.islice(batches, 3)):
        yield from group


def losses_ahead(read: Callable[[Iterable[Any]], Iterator[Any]]) -> Any:
    loop = loops.Distributed(Case(accumulation=3), "dp2")
    for _ in range(2):
        for x, y in read(loop.loader):
            loss = cross_entropy(loop.model(x), y, reduction="sum")
            loop.run.backward(sum_of_rows=loss / 3, count=len(y))
            if loop.run.is_step_end:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                loop.losses.append(float(loop.run.loss_of_step))
    return loop.losses, loop.weights()


def step_of_a_count(strategy: str | None) -> list[float]:
    """Return a step's loss, gradients and weights: a mean over the rows of two unequal batches."""
    batches: list[Any]
    if strategy is None:
        model, *_ = loops.parts_of(Case())
        batches = [Numbers()[:8], Numbers()[8:11]]
        sums: Any = [cross_entropy(model(x), y, reduction="sum") for x, y in batches]
        (loss := sum(sums) / 11).backward()
    else:
        run = phalanx.init(strategy, accumulation=2)
        model, optimizer, *_ = loops.parts_of(Case())
        loader = DataLoader(Subset(Numbers(), range(11)), 8)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        batches = [*loader]
        for x, y in batches:
            loss_sum = cross_entropy(model(x), y, reduction="sum")
            run.backward(sum_of_rows=loss_sum, count=sum(len(y) for _, y in batches))
        loss = run.loss_of_step
    gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
    return [float(loss.detach()), *torch.cat([g.flatten() for g in gradients]).tolist()]


def test_calls_may_be_divided_by_the_count_of_the_step() -> None:
    for strategy in ("dp2", "fsdp2", "fsdp2:zero1"):
        for numbers in run_ranks(step_of_a_count, 2, strategy, threads=1):
            assert numbers == pytest.approx(step_of_a_count(None), rel=1e-10)


def all_losses_ahead() -> list[Any]:
    return [losses_ahead(read) for read in (whole_pass, one_ahead, by_steps)]


def test_batches_that_are_read_ahead_are_accumulated_as_others() -> None:
    expected = loops.plain(Case(accumulation=3))
    for found in run_ranks(all_losses_ahead, 2, threads=1):
        for each in found:
            assert loops.largest_error(each, expected) < LIMIT


def step_ends_without(left_out: Sequence[int]) -> list[bool]:
    loop = loops.Distributed(Case(accumulation=2), "dp2")
    for vx, vy in loop.run.prepare(DataLoader(Numbers(), 8)):  # with gradients, by mistake
        cross_entropy(loop.model(vx), vy)
    ends: list[bool] = []
    for _ in range(2):
        for number, (x, y) in enumerate(loop.loader):
            if number not in left_out:
                loop.run.backward(
                    sum_of_rows=cross_entropy(loop.model(x), y, reduction="sum"), count=len(y)
                )
                ends.append(loop.run.is_step_end)
                if ends[-1]:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
    return ends


def test_batches_that_are_left_out_move_no_end_of_a_pass() -> None:
    for ends in run_ranks(step_ends_without, 2, [0, 3], threads=1):
        assert ends == 2 * [False, True, True]


class Itself:
    """A batch in a reference cycle, which lives until Python collects garbage."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.itself = x, y, self


def step_ends_of_cycles(left_out: Sequence[int]) -> list[bool]:
    """Leave batches out, of which only the second rank collects the garbage."""
    loop = loops.Distributed(Case(accumulation=2), "dp2")
    ends: list[bool] = []
    gc.disable()
    try:
        for number, (x, y) in enumerate(loop.loader):
            batch = Itself(x, y)
            if number in left_out:
                continue
            if not loop.run.is_first:
                gc.collect()
            loss_sum = cross_entropy(loop.model(batch.x), batch.y, reduction="sum")
            loop.run.backward(sum_of_rows=loss_sum, count=len(y))
            ends.append(loop.run.is_step_end)
            if ends[-1]:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    finally:
        gc.enable()
    return ends


def test_a_batch_that_is_left_out_waits_for_no_collection_of_garbage() -> None:
    for ends in run_ranks(step_ends_of_cycles, 2, [0, 3], threads=1):
        assert ends == [False, True, True]


def stops_of_an_accumulation() -> list[bool]:
    """Return, after each backward, whether a signal that one rank has heard of is to be obeyed."""
    run = phalanx.init("dp2", accumulation=2)
    model = loops.perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Numbers(), 8))
    PULSE.stop_signal = 0 if run.is_first else signal.SIGTERM
    stops: list[bool] = []
    for x, y in loader:
        run.backward(sum_of_rows=cross_entropy(model(x.float()), y, reduction="sum"), count=len(y))
        stops.append(run.should_stop)
        if run.is_step_end:
            optimizer.step()
            optimizer.zero_grad()
    return stops


def test_a_signal_is_obeyed_where_a_loop_can_save() -> None:
    for stops in run_ranks(stops_of_an_accumulation, 2, threads=1):
        assert stops == [False, True, False, True, True]


def saved_twice(folder: Path) -> list[float]:
    """Save, step a schedule and save again without a step; return the rates that come back."""
    rates: list[float] = []
    for is_again in (False, True):
        loop = loops.Distributed(Case(schedules=True), "dp2")
        if is_again:
            loop.run.resume(folder)
        else:
            loop.train(2)
            first = loop.run.save(folder)
            loop.scheduler.step()
            assert loop.run.save(folder, keep=2) == first
        rates += [group["lr"] for group in loop.optimizer.param_groups]
    return rates


def test_a_save_takes_the_place_of_one_after_the_same_step(tmp_path: Path) -> None:
    for first, resumed in run_ranks(saved_twice, 2, tmp_path, threads=1):
        assert first == resumed == pytest.approx(0.005)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]


def profiled(folder: Path) -> set[str]:
    """Profile a loop as the docs have it, and return what happened in its trace."""
    run = phalanx.init("dp2")
    plain = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    rows = DataLoader(TensorDataset(torch.randn(16, 6), torch.randn(16, 5)), 8)
    model, optimizer, loader = run.prepare(plain, optimizer, rows)
    with torch.profiler.profile() as profile:
        for x, y in loader:
            run.backward(sum_of_rows=(model(x) - y).square().sum(), count=len(y))
            optimizer.step()
            optimizer.zero_grad()
    path = folder / f"trace-{torch.distributed.get_rank()}.json"
    profile.export_chrome_trace(str(path))
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


@pytest.mark.slow
def test_a_loop_is_profiled_on_each_rank(tmp_path: Path) -> None:
    for names in run_ranks(profiled, 2, tmp_path, threads=1):
        assert {"aten::addmm", "gradient bucket 0", "all_reduce dp"} <= names
    assert len(list(tmp_path.glob("trace-*.json"))) == 2
