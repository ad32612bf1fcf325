"""Rows of tables on servers: each push is in them once, whoever is lost; and copies of them."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lossy_messages import lose_messages
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.placement import PlacedWeights
from phalanx.server.processes import LocalRoles, local_roles
from phalanx.server.shard import Shard
from phalanx.server.table import flat_parts, sparse_of
from workers_in_threads import fast_clocks, lose, run_workers

__all__ = ["fast_clocks"]  # a fixture

TABLES = [(97, 3), (40, 1)]
RULE = {"name": "sgd", "tables": "sgd", "tables_rate": 1.0}


def grads_of(worker: int, clock: int) -> list[torch.Tensor]:
    """Return whole numbers for a flat weight and for some rows of each table."""
    value = float(3**worker + clock)
    found = [torch.full((50,), value, dtype=torch.float64)]
    for number, (num_rows, width) in enumerate(TABLES):
        rows = torch.arange(worker + number, num_rows, 2 + clock % 3)
        values = torch.full((len(rows), width), value, dtype=torch.float64)
        found.append(sparse_of(rows, values, (num_rows, width)))
    return found


def work(
    made: LocalRoles, worker: int, consistency: Consistency, num_steps: int, out: dict[int, Any],
    at: dict[int, Callable[[], Any]],
) -> None:  # fmt: skip
    """Push whole numbers; read what the last rows pushed have become; `at` a clock act first."""
    try:
        client = Client(made.meeting, worker, consistency, (0, num_steps), timeout_s=60)
        client.is_shared = worker > 0
        client.lay_out([50], torch.float64, chunk_bytes=160, tables=TABLES)
        flats = [torch.zeros(50, dtype=torch.float64)]
        tables = [torch.zeros(shape, dtype=torch.float64) for shape in TABLES]
        if worker == 0:
            client.create([*flats, *(table.view(-1) for table in tables)], RULE, 2.0)
        version, rate = client.pull(flats, 0), -float(consistency.num_slots)
        for clock in range(num_steps):
            if worker == 0 and clock in at:
                at[clock]()
            assert client.ask_scheduler("claim", clock=clock)["is_mine"]
            grads = grads_of(worker, clock)
            numbers = {"base": version, "tokens": 1.0, "loss": 1.0, "rate": rate}
            client.push(clock, worker, grads, **numbers)
            needed = consistency.needs(clock + 1)
            totals = client.totals(needed) if not consistency.is_asynchronous else {}
            recipes = [(v, rate, 1.0) for v in sorted(totals) if v >= client.applied]
            version = client.pull(flats, needed, recipes)
            for number, table in enumerate(tables):
                rows = grads[1 + number].indices()[0]
                client.pull_rows(number, rows, table, version)
        client.ask_scheduler("leave")
        out[worker] = client, flats, tables
    except BaseException:
        out[worker] = traceback.format_exc()


def run(made: LocalRoles, consistency: Consistency, num_steps: int, at: dict[int, Any]) -> None:
    """Run the workers; check that each push is in each row that it had once, and in no other."""
    out = run_workers(work, made, consistency, num_steps, at)
    due = [torch.zeros(50, dtype=torch.float64)]
    due += [torch.zeros(shape, dtype=torch.float64) for shape in TABLES]
    for worker in range(consistency.num_slots):
        for clock in range(num_steps):
            for total, grad in zip(due, grads_of(worker, clock), strict=True):
                total += grad
    rate = -float(consistency.num_slots)
    for client, flats, tables in out.values():
        totals = client.totals(0)
        client.pull(flats, 0, [(v, rate, 1.0) for v in sorted(totals)])
        for number, table in enumerate(tables):
            client.pull_rows(number, torch.arange(len(table)), table, 0)
        for ours, theirs in zip([*flats, *tables], due, strict=True):
            assert torch.equal(ours, theirs), made.log.read_text()
    for client, *_ in out.values():
        client.close()


@pytest.mark.slow
@pytest.mark.usefixtures("fast_clocks")
@pytest.mark.parametrize(
    "consistency", [Consistency("ps", 3), Consistency("ssp", 3, 2), Consistency("async", 3)]
)
def test_rows_survive_lost_doubled_and_reordered_messages(
    consistency: Consistency, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_messages(monkeypatch, drop=0.1, double=0.05, reorder=0.05, seed=5)
    with local_roles(2) as made:
        run(made, consistency, 4, {})


@pytest.mark.usefixtures("fast_clocks")
def test_rows_of_a_lost_server_are_its_backups_and_come_back() -> None:
    with local_roles(2) as made:
        at = {3: lambda: lose(made, "server1"), 6: lambda: made.start("server1")}
        run(made, Consistency("ps", 2), 9, at)
        assert "shard 1 is lost" not in made.log.read_text()


def shard_of(consistency: Consistency) -> Shard:
    """Return a shard of a flat weight and two tables, by AdamW and row-wise Adagrad."""
    torch.manual_seed(1)
    rule = {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8, "decays": [0.1]}
    rule |= {"tables": "adagrad", "tables_rate": 2.0}
    sizes = [30, *(rows * width for rows, width in TABLES)]
    spec = {
        "sizes": sizes,
        "dtype": "float64",
        "rule": rule,
        "p": 2.0,
        "consistency": vars(consistency),
    }
    spec["tables"] = [width for _, width in TABLES]
    return Shard(spec, [torch.randn(size, dtype=torch.float64) for size in sizes])


def push(target: list[Shard], clock: int, slots: list[int]) -> None:
    for slot in slots:
        grads = [torch.randn(30, dtype=torch.float64)]
        for num_rows, width in TABLES:
            rows = torch.randperm(num_rows)[:7].sort()[0]
            grad = sparse_of(rows, torch.randn(7, width).double(), (num_rows, width))
            grads += flat_parts(grad)
        fields = {"clock": clock, "slot": slot, "base": clock, "tokens": 2.0, "loss": 1.0}
        for each in target:
            each.perform("push", fields, grads)


def test_a_copy_of_tables_made_in_the_middle_ends_with_the_same_bits() -> None:
    shard = shard_of(Consistency("ssp", 3, 2))
    push([shard], 0, [2, 0, 1])
    shard.perform("apply", {"version": 0, "rate": 0.1, "scale": 1.0}, [])
    push([shard], 1, [2, 0])
    fields, tensors = shard.state()
    copy = Shard.of_state(json.loads(json.dumps(fields)), tensors)
    push([shard, copy], 1, [1])
    assert shard.totals() == copy.totals()
    for each in (shard, copy):
        each.perform("apply", {"version": 1, "rate": 0.1, "scale": 0.5}, [])
    ours, theirs = shard.state(), copy.state()
    assert ours[0] == theirs[0]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


@pytest.mark.parametrize(
    ("rows", "words"),
    [([3, 1], "ascending numbers from 0 to 96"), ([1, 1], "ascending"), ([-1, 2], "ascending"),
     ([5, 97], "ascending"), ([1, 2, 3], "6 values; expected 3 rows of 3")],
)  # fmt: skip
def test_rows_that_are_none_of_the_table_are_refused_before_anything_changes(
    rows: list[int], words: str
) -> None:
    shard = shard_of(Consistency("ps", 1))
    grads = [torch.zeros(30).double(), torch.tensor(rows), torch.zeros(6).double()]
    grads += [torch.tensor([0]), torch.zeros(1).double()]
    fields = {"clock": 0, "slot": 0, "base": 0, "tokens": 1.0, "loss": 0.0}
    with pytest.raises(ValueError, match=words):
        shard.push(fields, grads)
    assert not shard.done.has(0, 0) and not shard.open


def test_each_row_is_on_one_shard_and_chunks_keep_rows_whole() -> None:
    placed = PlacedWeights([1000], TABLES, 8, 80, {"a": 1.0, "b": 2.0, "c": 1.0})
    for number, (num_rows, width) in enumerate(TABLES):
        table = torch.arange(num_rows * width).view(num_rows, width)
        parts = [placed.cut(s, 1 + number, table.view(-1)).view(-1, width) for s in range(3)]
        assert sum(len(part) for part in parts) == num_rows
        found = torch.zeros_like(table)
        for shard, which, there in placed.places[number].deal(torch.arange(num_rows)):
            assert bool((there.diff() > 0).all())
            found[which] = parts[shard][there]
        assert torch.equal(found, table)
        sums = torch.arange(num_rows)  # a number for each row is where the row is
        for shard in range(3):
            cut = placed.cut(shard, 1 + number, sums)
            assert torch.equal(cut, parts[shard][:, 0] // width)
