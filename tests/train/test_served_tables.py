"""Embedding tables under parameter servers: rows alone move, and the steps are one process's."""

from __future__ import annotations

import threading
from typing import Any, Literal

import pytest
import torch
from torch import nn

from phalanx.comm.comm import SingleRankComm
from phalanx.config import OptimizerConfig
from phalanx.config.schema import ServerConfig
from phalanx.errors import ConfigError, TrainingError
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.processes import LocalRoles, local_roles
from phalanx.train.optimizer import build_optimizer, learning_rate
from phalanx.train.served_step import ClockedStep

NUM_ROWS, WIDTH, NUM_WORKERS = 400, 6, 3
CONFIG = OptimizerConfig(lr=0.3, weight_decay=0.0, clip_norm=0.2)
"""Clips about half of the steps."""

ALONE = Consistency("ps", 1)


class Net(nn.Module):
    """Two tables, of which one is looked up as bags, and a linear map."""

    def __init__(self, num_rows: int = NUM_ROWS, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(num_rows, WIDTH, sparse=sparse)
        self.tags = nn.EmbeddingBag(31, 1, mode="sum", sparse=sparse)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.items(ids).tanh().mean(1)) + self.tags(input=ids % 31)


class Squares:
    """The sum of the squares of what a net gives."""

    def loss_sum(self, model: nn.Module, microbatch: torch.Tensor, step: int) -> torch.Tensor:
        return (model(microbatch) - 1).square().sum()

    def num_valid(self, microbatch: torch.Tensor) -> int:
        return len(microbatch)


def step_of(
    made: LocalRoles, model: nn.Module, server: ServerConfig, *, number: int = 0,
    consistency: Consistency = ALONE, num_steps: int = 50, is_shared: bool = True,
) -> ClockedStep:  # fmt: skip
    """Return the step of a worker, which has joined the job."""
    given: Any = (model, build_optimizer(model, CONFIG), Squares(), CONFIG)
    step = ClockedStep(*given, comm=SingleRankComm(), num_steps=num_steps)
    client = Client(made.meeting, number, consistency, (0, num_steps), timeout_s=60)
    client.is_shared = is_shared
    try:
        step.join(client, server, is_first=number == 0)
    except ConfigError:
        client.close()
        raise
    return step


def run_workers(
    made: LocalRoles, batches: torch.Tensor, server: ServerConfig, *, is_shared: bool
) -> list[nn.Module]:
    """Return the models of the workers, with all rows as the servers have them in the end."""
    found: dict[int, nn.Module] = {}

    def work(number: int) -> None:
        model = models[number]
        own: Any = {"number": number, "num_steps": len(batches), "is_shared": is_shared}
        step = step_of(made, model, server, consistency=Consistency("ps", NUM_WORKERS), **own)
        for batch in batches:
            rows = [batch[:3], batch[3:5], batch[5:]][number]
            step([rows[:2], rows[2:]] if number else [rows])  # rows of no one number
        step.before_save()
        found[number] = model
        step.client.close()

    models = [Net().double() for _ in range(NUM_WORKERS)]
    for model in models[1:]:  # what the first gives the servers is what counts
        nn.init.zeros_(model.items.weight)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(NUM_WORKERS)]


def batches_of(num_steps: int) -> torch.Tensor:
    """Return ids of which some come often, several times in a sample and on several workers."""
    torch.manual_seed(1)
    return (NUM_ROWS * torch.rand(num_steps, 12, 4) ** 4).long()


def alone(batches: torch.Tensor, rule: str, table_rule: str, table_lr: float) -> nn.Module:
    """Return the model of one process, by torch's own SGD and AdamW, and Adagrad written out."""
    model = Net().double()
    tables = [model.items.weight, model.tags.weight]
    sums = [torch.zeros(len(table), dtype=torch.float64) for table in tables]
    dense = torch.optim.SGD if rule == "sgd" else torch.optim.AdamW
    more = {} if rule == "sgd" else {"betas": (CONFIG.beta1, CONFIG.beta2), "eps": CONFIG.eps}
    optimizer = dense(model.last.parameters(), CONFIG.lr, weight_decay=0.0, **more)
    sparse = torch.optim.SGD(tables, CONFIG.lr)
    for number, batch in enumerate(batches):
        model.zero_grad()
        ((model(batch) - 1).square().sum() / len(batch)).backward()
        grads = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
        norm = torch.cat([grad.reshape(-1) for grad in grads]).norm()
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= min(1.0, CONFIG.clip_norm / (float(norm) + 1e-6))
        rate = learning_rate(CONFIG, number, len(batches))
        dense_rate, table_rate = rate, rate * table_lr / CONFIG.lr
        optimizer.param_groups[0]["lr"], sparse.param_groups[0]["lr"] = dense_rate, table_rate
        optimizer.step()
        if table_rule == "sgd":
            sparse.step()
        else:
            for table, of_rows in zip(tables, sums, strict=True):
                grad = table.grad.to_dense()
                for row in batch.unique().remainder(len(table)).unique().tolist():
                    of_rows[row] += (grad[row] ** 2).sum() / table.shape[1]
                    with torch.no_grad():
                        table[row] -= table_rate * grad[row] / (of_rows[row] ** 0.5 + CONFIG.eps)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "table_rule", "table_lr", "is_shared"),
    [
        pytest.param("sgd", "sgd", 0.3, False, marks=pytest.mark.slow),
        ("adamw", "adagrad", 0.1, True),
        pytest.param("sgd", "adagrad", 2.0, False, marks=pytest.mark.slow),
    ],
)
def test_three_workers_take_fifty_steps_of_one_process(
    rule: Literal["sgd", "adamw"],
    table_rule: Literal["sgd", "adagrad"],
    table_lr: float,
    is_shared: bool,
) -> None:
    """Two servers; float64, so that the order of sums alone is left: 1e-12."""
    batches = batches_of(50)
    server = ServerConfig(rule=rule, table_rule=table_rule, table_lr=table_lr)
    due = alone(batches, rule, table_rule, table_lr)
    with local_roles(2) as made:
        found = run_workers(made, batches, server, is_shared=is_shared)
    for model in found:
        for (name, ours), theirs in zip(model.named_parameters(), due.parameters(), strict=True):
            apart = float(((ours - theirs).abs().max() / theirs.abs().max()).detach())
            assert apart <= 1e-12, (name, apart)


@pytest.mark.parametrize("num_rows", [200, 20_000])
def test_a_step_moves_the_bytes_of_the_rows_that_it_looks_up(num_rows: int) -> None:
    """Over sockets: 8 bytes of its number and 8 a value of each row, however large the table is."""
    server, model = ServerConfig(rule="sgd", table_rule="sgd"), Net(num_rows).double()
    ids = torch.tensor([[3, 150, 3, 7], [7, 7, 199, 150]])
    with local_roles(2) as made:
        step = step_of(made, model, server, is_shared=False)
        client = step.client
        sent, received = client.sent_bytes, client.received_bytes
        for batch in (ids, ids + num_rows - 200):
            step([batch[:1], batch[1:]])
            rows, tags = batch.unique(), (batch % 31).unique()
            dense = 8 * sum(p.numel() for p in model.last.parameters())
            values = 8 * (len(rows) * WIDTH + len(tags))
            numbers = 8 * (len(rows) + len(tags))
            assert client.received_bytes - received == dense + values
            assert client.sent_bytes - sent == dense + values + 2 * numbers  # asked for, and pushed
            sent, received = client.sent_bytes, client.received_bytes
        client.close()


def test_ids_may_be_of_32_bits_and_are_rows_of_their_table() -> None:
    server, model = ServerConfig(rule="sgd", table_rule="sgd"), Net().double()
    with local_roles(2) as made:
        step = step_of(made, model, server)
        step([torch.tensor([[3, 399]], dtype=torch.int32)])
        for wrong in (NUM_ROWS, -1):
            words = f"has the id {wrong}, but the embedding items has rows from 0 to 399"
            with pytest.raises(TrainingError, match=words):
                step([torch.tensor([[3, wrong]])])
        step.client.close()


def test_a_table_that_cannot_move_by_rows_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids) @ self.table.weight.T

    with local_roles(1) as made:
        with pytest.raises(
            ConfigError, match=r"items has sparse gradients, but server\.table_rule"
        ):
            step_of(made, Net().double(), ServerConfig())
        model = Net().double()
        model.tags.max_norm = 1.0
        with pytest.raises(ConfigError, match=r"tags has max_norm 1, .* is max_norm=None"):
            step_of(made, model, ServerConfig(rule="sgd", table_rule="sgd"))
        step = step_of(made, Tied().double(), ServerConfig(rule="sgd", table_rule="sgd"))
        with pytest.raises(TrainingError, match="the gradient of table is dense: an operation"):
            step([torch.tensor([[1, 2]])])
        step.client.close()
