"""Steps of workers of parameter servers, of which some are lost between two requests."""

from __future__ import annotations

import threading
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.comm.comm import SingleRankComm
from phalanx.config import OptimizerConfig
from phalanx.config.schema import ServerConfig
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.processes import LocalRoles, local_roles, log_of
from phalanx.server.task_scheduler import Tasks
from phalanx.train import served_step
from phalanx.train.local_step import LocalStep
from phalanx.train.optimizer import build_optimizer, learning_rate
from phalanx.train.served_step import AsyncStep, ClockedStep, ServedStep
from workers_in_threads import allowed_connections, connections, lose_group

NUM_STEPS = 4
AS_SET = ServerConfig()


class Squares:
    """The sum of the squares of what a linear map gives."""

    def loss_sum(self, model: nn.Module, microbatch: torch.Tensor, step: int) -> torch.Tensor:
        return model(microbatch).square().sum()

    def num_valid(self, microbatch: torch.Tensor) -> int:
        return len(microbatch)


def worker(
    made: LocalRoles,
    kind: type[ServedStep],
    consistency: Consistency,
    server: ServerConfig = AS_SET,
    number: int = 0,
) -> ServedStep:
    """Return the step of a worker of a job, by default of the first, which has joined the job."""
    torch.manual_seed(0)
    model, config = nn.Linear(3, 2).double(), OptimizerConfig(lr=1e-2)
    given: Any = (model, build_optimizer(model, config), Squares(), config)
    step = kind(*given, comm=SingleRankComm(), num_steps=NUM_STEPS)
    client = Client(made.meeting, number, consistency, (0, NUM_STEPS), timeout_s=10)
    step.join(client, server, is_first=number == 0)
    return step


@pytest.mark.parametrize(("kind", "consistency"), [
    (ClockedStep, Consistency("ps", 1)), (LocalStep, Consistency("local", 1, 1)),
])  # fmt: skip
def test_who_joins_applies_what_those_who_are_lost_had_pushed(
    kind: type[ServedStep], consistency: Consistency
) -> None:
    """All workers are lost after the last push of a clock, so that nobody is left to pull."""
    batches = torch.randn(NUM_STEPS, 5, 3, dtype=torch.float64)
    found: list[torch.Tensor] = []
    for lost_at in (None, 2):
        with local_roles(1) as made:
            step = worker(made, kind, consistency)
            for clock in range(NUM_STEPS):
                if clock == lost_at:
                    with pytest.MonkeyPatch.context() as patched:
                        patched.setattr(step.client, "pull", _killed)
                        with pytest.raises(KeyboardInterrupt):
                            step([batches[clock]])
                    step.client.close()
                    moments = step.optimizer.state_dict()
                    step = worker(made, kind, consistency)
                    assert step.steps_done == clock + 1
                    if kind is LocalStep:
                        step.optimizer.load_state_dict(moments)
                else:
                    step([batches[clock]])
            found.append(step.flat.weights[0].clone())
            step.client.close()
    torch.testing.assert_close(found[1], found[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize(("kind", "consistency", "num_steps"), [
    (ClockedStep, Consistency("ps", 2), 1), (ClockedStep, Consistency("ssp", 2, 1), 2),
    (AsyncStep, Consistency("async", 2), NUM_STEPS),
])  # fmt: skip
def test_who_joins_computes_the_tasks_of_others_that_it_waits_for(
    kind: type[ServedStep], consistency: Consistency, num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Worker 1 never comes, and worker 0 is lost when it waits after its last push.

    Each is a group of its own.
    """
    batch = torch.randn(5, 3, dtype=torch.float64)
    with local_roles(1, 2) as made:
        step = worker(made, kind, consistency)
        for _ in range(num_steps - 1):
            step([batch])
        step.help = _killed
        with pytest.raises(KeyboardInterrupt):
            step([batch])
        step.client.close()
        monkeypatch.setattr(Tasks, "is_lost", lambda *_: True)  # both are lost from now on
        monkeypatch.setattr(ServedStep, "batch_of", staticmethod(lambda *_: [batch]))
        step = worker(made, kind, consistency)
        assert step.steps_done == num_steps
        step.client.totals(0)
        if kind is AsyncStep:
            assert step.client.done == {0: NUM_STEPS, 1: NUM_STEPS}
            assert step.version == 2 * NUM_STEPS
        else:
            assert step.version == step.client.done[1] == 1
        step.client.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_checkpoint_of_rounds_has_the_state_of_who_was_lost_before_it(lost: int) -> None:
    """The new process of the worker has no moments: it sends zeros."""
    batch = torch.randn(5, 3, dtype=torch.float64)
    with local_roles(1) as made:
        steps = [worker(made, LocalStep, Consistency("local", 2, 1), AS_SET, n) for n in range(2)]
        threads = [threading.Thread(target=step, args=([batch],)) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if lost == 0:
            steps[1].before_save()
        steps[lost].client.close()
        steps[lost] = worker(made, LocalStep, Consistency("local", 2, 1), AS_SET, lost)
        first = steps[0]
        first.before_save()
        assert isinstance(first, LocalStep) and len(first.rounds.moments) == 2
        for number, moments in enumerate(first.rounds.moments):
            assert [len(each) for each in moments] == [6, 6, 2, 2]
            assert all(bool(each.any()) == (number != lost) for each in moments)
        for step in steps:
            step.client.close()


@pytest.mark.parametrize(("kind", "consistency"), [
    (ClockedStep, Consistency("ssp", 1, 2)), (AsyncStep, Consistency("async", 1)),
])  # fmt: skip
def test_a_step_whose_samples_another_has_pushed_records_their_loss(
    kind: type[ServedStep], consistency: Consistency, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = torch.randn(5, 3, dtype=torch.float64)
    with local_roles(1) as made:
        step = worker(made, kind, consistency)
        monkeypatch.setattr(step.client, "ask_scheduler", lambda *_, **__: {"is_mine": False})
        before = step.flat.weights[0].clone()
        result = step([batch])
        loss = step.model(batch).detach().square().sum() / 5
        assert result.loss == pytest.approx(float(loss))
        assert torch.equal(step.flat.weights[0], before)
        step.client.close()


def test_three_workers_take_thirty_steps_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one group, or in two: one loses its scheduler, gets another, and is lost as a whole.

    Two servers; float64, so that the order of sums alone is left: 1e-12.
    """
    num_steps, consistency, config = 30, Consistency("ps", 3), OptimizerConfig(lr=1e-2)
    lost_from = 20
    monkeypatch.setattr(served_step, "HELP_S", 0.02)
    batches = torch.randn(num_steps, 12, 3, dtype=torch.float64)
    parts = [[batch[:3], batch[3:5], batch[5:]] for batch in batches]  # rows of no one number
    found: dict[int, list[torch.Tensor]] = {}

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).double()

    def work(made: LocalRoles, number: int, model: nn.Module, num_of_last: int) -> None:
        given: Any = (model, build_optimizer(model, config), Squares(), config)
        step = ClockedStep(*given, comm=SingleRankComm(), num_steps=num_steps)
        step.batch_of = lambda clock, slot: [parts[clock][slot]]
        log = log_of(f"worker {number}", made.log)
        client = Client(made.meeting, number, consistency, (0, num_steps), 60.0, log)
        step.join(client, AS_SET, is_first=number == 0)
        for clock, each in enumerate(parts[: num_of_last if number == 2 else num_steps]):
            if number == 0 and clock == lost_from and num_of_last < num_steps:
                lose_group(made, 1)  # worker 2 waits, and the others compute its tasks
            if number == 0 and clock == lost_from + 3 and num_of_last < num_steps:
                made.start("scheduler1")
            step(each[number : number + 1])
        found[number] = [p.detach().clone() for p in model.parameters()]
        client.close()
        if number == 2 and num_of_last < num_steps:
            lose_group(made, 1)

    def train(num_groups: int, num_of_last: int = num_steps) -> list[list[torch.Tensor]]:
        with local_roles(2, num_groups) as made:
            given = [(made, n, net(), num_of_last) for n in range(3)]
            threads = [threading.Thread(target=work, args=each) for each in given]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            due = allowed_connections([n * num_groups // 3 for n in range(3)])
            assert connections(made.log.read_text()) == due
        return [found[0], found[1], found[2 if num_of_last == num_steps else 0]]

    one, two = train(1), train(2, num_steps - 3)
    assert all(map(torch.equal, chain(*one), chain(*two)))
    alone = net()
    optimizer = build_optimizer(alone, config)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        (alone(batch).square().sum() / len(batch)).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, number, num_steps)
        optimizer.step()
    due = [p.detach() for p in alone.parameters()]
    for number in range(3):
        for ours, theirs in zip(one[number], due, strict=True):
            assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-12
    assert all(torch.equal(a, b) for a, b in zip(one[0], one[2], strict=True))


@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_servers_update_as_the_optimizer_of_the_rule_does(rule: str) -> None:
    server, consistency = ServerConfig(rule=rule), Consistency("ps", 1)  # pyright: ignore[reportArgumentType]
    batches = torch.randn(NUM_STEPS, 5, 3, dtype=torch.float64)
    with local_roles(2) as made:
        step = worker(made, ClockedStep, consistency, server)
        torch.manual_seed(0)
        alone = nn.Linear(3, 2).double()
        decays = {"weight": 0.1, "bias": 0.0}
        groups = [{"params": [p], "weight_decay": decays[n]} for n, p in alone.named_parameters()]
        optimizer = torch.optim.SGD(groups, 1e-2, 0.9 if rule == "momentum" else 0.0)
        for number, batch in enumerate(batches):
            step([batch])
            optimizer.zero_grad()
            (alone(batch).square().sum() / 5).backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = step.rate(number)
            optimizer.step()
        for ours, theirs in zip(step.model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)
        step.client.close()


def test_rounds_without_outer_momentum_take_the_mean() -> None:
    """At a rate of 1 servers then hold the workers' own weights, if there is one worker."""
    server, batches = ServerConfig(outer_lr=1.0, outer_momentum=0.0), torch.randn(2, 5, 3).double()
    with local_roles(1) as made:
        step = worker(made, LocalStep, Consistency("local", 1, 2), server)
        first = step.flat.weights[0].clone()
        for batch in batches:
            before = step.flat.weights[0].clone()
            step([batch])
        assert not torch.equal(first, before)
        step.before_save()
        assert isinstance(step, LocalStep) and step.rounds.momentum == ()
        step.client.close()


def _killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
