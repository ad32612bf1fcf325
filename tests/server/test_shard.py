"""A shard: what it computes, what it takes once, and that a copy of it is the same."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.server.consistency import Consistency
from phalanx.server.shard import MOST_TOTALS, Shard


def shard_of(
    consistency: Consistency, rule: dict[str, object], weights: list[torch.Tensor]
) -> Shard:
    spec = {"sizes": [len(w) for w in weights], "dtype": "float64", "rule": rule, "p": 2.0}
    return Shard({**spec, "consistency": vars(consistency)}, weights)


def push(shard: Shard, clock: int, slot: int, value: float, base: int = 0) -> bool:
    fields = {"clock": clock, "slot": slot, "base": base, "tokens": 1.0, "loss": 0.0, "rate": 1.0}
    return shard.push(fields, [torch.full_like(flat, value) for flat in shard.weights])


def zeros(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("name", ["adamw", "momentum", "nesterov", "sgd"])
def test_rules_compute_what_torch_does(name: str) -> None:
    torch.manual_seed(0)
    first = torch.randn(40, dtype=torch.float64)
    rule = {"name": name, "betas": [0.9, 0.95], "eps": 1e-8, "decays": [0.1], "momentum": 0.9}
    shard = shard_of(Consistency("ps", 2), rule, [first.clone()])
    ours = first.clone().requires_grad_()
    settings_of = {
        "adamw": lambda: torch.optim.AdamW([ours], 1e-2, (0.9, 0.95), 1e-8, weight_decay=0.1),
        "sgd": lambda: torch.optim.SGD([ours], 1e-2, weight_decay=0.1),
        "momentum": lambda: torch.optim.SGD([ours], 1e-2, 0.9, weight_decay=0.1),
        "nesterov": lambda: torch.optim.SGD([ours], 1e-2, 0.9, weight_decay=0.1, nesterov=True),
    }
    optimizer = settings_of[name]()
    for clock in range(5):
        grads, tokens = torch.randn(2, 40, dtype=torch.float64), (3.0, 5.0)
        for slot in (1, 0):
            fields = {"clock": clock, "slot": slot, "base": clock, "tokens": tokens[slot]}
            shard.push({**fields, "loss": 1.0}, [grads[slot][:7], grads[slot][7:]])
        assert shard.completed() == clock + 1
        shard.apply(clock, 1e-2, 0.5)
        ours.grad = (grads[0] * 3 + grads[1] * 5) / 8 * 0.5
        optimizer.step()
        torch.testing.assert_close(shard.weights[0], ours.detach(), rtol=1e-14, atol=1e-15)


@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_pushes_doubled_and_in_any_order_add_up_once(seed: int, slots: int, staleness: int) -> None:
    """Whole numbers make the sum exact."""
    rng = random.Random(seed)
    shard = shard_of(Consistency("ssp", slots, staleness), {"name": "sgd"}, zeros(3))
    tasks = [(clock, slot) for clock in range(6) for slot in range(slots)]
    rng.shuffle(tasks)
    for clock, slot in tasks:
        for again in range(rng.choice((1, 1, 2))):
            taken = push(shard, clock, slot, float(10 * clock + slot))
            assert taken == (again == 0)
        if shard.completed() > shard.version:
            shard.apply(shard.version, -float(slots), 1.0)
    while shard.completed() > shard.version:
        shard.apply(shard.version, -float(slots), 1.0)
    assert shard.weights[0].tolist() == [float(sum(10 * c + s for c, s in tasks))] * 3


@pytest.mark.parametrize(
    ("changed", "sizes", "dtype"),
    [
        ({"tokens": "many"}, [3], torch.float64),
        ({"base": "first"}, [3], torch.float64),
        ({}, [2], torch.float64),
        ({}, [4], torch.float64),
        ({}, [2, 1, 1], torch.float64),
        ({}, [3], torch.float32),
    ],
)
def test_a_malformed_push_changes_nothing(
    changed: dict[str, str], sizes: list[int], dtype: torch.dtype
) -> None:
    shard = shard_of(Consistency("ps", 2), {"name": "sgd"}, zeros(3))
    fields = {"clock": 0, "slot": 1, "base": 0, "tokens": 1.0, "loss": 0.0, "num_live": 1}
    with pytest.raises((ValueError, KeyError)):
        shard.push({**fields, **changed}, [torch.zeros(size, dtype=dtype) for size in sizes])
    assert not shard.done.has(0, 1) and not shard.open
    assert push(shard, 0, 0, 1.0) and push(shard, 0, 1, 1.0) and shard.completed() == 1


def test_a_push_to_float32_weights_may_be_rounded() -> None:
    """Workers of dp:local round what their steps changed to bfloat16."""
    spec = {"sizes": [3], "dtype": "float32", "rule": {"name": "sgd"}, "p": 2.0}
    shard = Shard({**spec, "consistency": vars(Consistency("ps", 1))}, [torch.zeros(3)])
    fields = {"clock": 0, "slot": 0, "base": 0, "tokens": 1.0, "loss": 0.0, "rate": 1.0}
    assert shard.push(fields, [torch.full((3,), 1.5, dtype=torch.bfloat16)])
    shard.apply(0, 1.0, 1.0)
    assert shard.weights[0].tolist() == [-1.5] * 3


@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_no_worker_is_further_ahead_than_the_staleness(seed: int, bound: int, slots: int) -> None:
    """Random delays; a read at clock c has every update of a clock up to c - S - 1."""
    rng = random.Random(seed)
    consistency = Consistency("ssp", slots, bound)
    shard = shard_of(consistency, {"name": "sgd"}, zeros(1))
    clocks, busy = [0] * slots, [rng.randint(1, 20) for _ in range(slots)]
    bases = [0] * slots
    for _ in range(600):
        for worker in range(slots):
            if busy[worker] > 0:
                busy[worker] -= 1
                continue
            if busy[worker] == 0:
                push(shard, clocks[worker], worker, 1.0, bases[worker])
                clocks[worker], busy[worker] = clocks[worker] + 1, -1
            while shard.completed() > shard.version:
                shard.apply(shard.version, -1.0, 1.0)
            if shard.version >= consistency.needs(clocks[worker]):
                bases[worker] = shard.version
                assert bases[worker] >= clocks[worker] - bound
                assert shard.weights[0].item() == shard.version
                busy[worker] = rng.choice((1, 2, 30))
        working = [clock for clock, left in zip(clocks, busy, strict=True) if left >= 0]
        assert not working or max(working) - min(clocks) <= bound
    assert max(shard.ages, default=0) <= bound
    assert shard.version > 3


def test_totals_are_the_same_to_the_bit_in_whatever_order_pushes_come() -> None:
    found = list[list[list[float]]]()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        shard = shard_of(Consistency("ps", 3), {"name": "sgd"}, zeros(1))
        for slot in order:
            numbers = {"tokens": (0.1, 0.2, 0.3)[slot], "loss": (0.3, 0.1, 0.7)[slot]}
            grads = [torch.ones(1, dtype=torch.float64)]
            shard.push({"clock": 0, "slot": slot, "base": 0, **numbers}, grads)
        found.append(shard.totals())
    assert found[0] == found[1] == found[2]


def test_staleness_of_zero_is_the_synchronous_trace() -> None:
    def trace(consistency: Consistency) -> list[float]:
        shard, values = shard_of(consistency, {"name": "sgd"}, zeros(1)), list[float]()
        for clock in range(5):
            for slot in range(3):
                push(shard, clock, slot, shard.weights[0].item() + slot, shard.version)
            shard.apply(clock, 0.1, 1.0)
            values.append(shard.weights[0].item())
        return values

    assert trace(Consistency("ssp", 3, 0)) == trace(Consistency("ps", 3))


def test_a_quorum_is_applied_with_who_came_and_the_late_one_joins_the_next() -> None:
    shard = shard_of(Consistency("quorum", 4, 3), {"name": "sgd"}, zeros(1))
    for slot in range(3):
        push(shard, 0, slot, 1.0)
    assert shard.completed() == 1
    shard.apply_asynchronous()
    assert shard.weights[0].item() == -0.75  # the mean of three, at 3/4 of the rate
    push(shard, 0, 0, 1.0)  # again: its answer was lost
    assert (shard.version, shard.update_of(0, 0)) == (1, 0), "or its worker waits for one more"
    push(shard, 0, 3, 1.0)
    assert shard.update_of(0, 3) == 1
    assert shard.completed() == 1  # while nobody knows who is left
    shard.num_workers = 4
    assert shard.completed() == 1
    shard.num_workers = 1
    assert shard.completed() == 2  # a quorum of those who are left
    shard.apply_asynchronous()
    assert dict(shard.ages) == {0: 3, 1: 1}


def test_a_copy_made_in_the_middle_ends_with_the_same_bits() -> None:
    torch.manual_seed(1)
    rule = {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8, "decays": [0.1, 0.0]}
    shard = shard_of(
        Consistency("ssp", 3, 2), rule, [torch.randn(30).double(), torch.randn(5).double()]
    )

    def step(target: list[Shard], clock: int, slots: list[int]) -> None:
        for slot in slots:
            grads = [torch.randn(len(flat)).double() for flat in shard.weights]
            fields = {"clock": clock, "slot": slot, "base": clock, "tokens": 2.0, "loss": 1.0}
            for each in target:
                each.perform("push", fields, grads)

    step([shard], 0, [2, 0, 1])
    noted, totals = {"noted": shard.noted(0)}, shard.totals()
    shard.perform("apply", {"version": 0, "rate": 0.1, "scale": 1.0, **noted}, [])
    step([shard], 1, [2, 0])
    fields, tensors = shard.state()
    copy = Shard.of_state(json.loads(json.dumps(fields)), tensors)
    assert copy.totals() == shard.totals() == totals != []  # a worker may ask it, late
    step([shard, copy], 1, [1])
    for each in (shard, copy):
        each.perform("apply", {"version": 1, "rate": 0.1, "scale": 0.5}, [])
    ours, theirs = shard.state(), copy.state()
    assert ours[0] == theirs[0]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


def test_a_backup_keeps_the_totals_of_the_latest_updates_alone() -> None:
    backup = shard_of(Consistency("ps", 1), {"name": "sgd", "decays": [0.0]}, zeros(1))
    for version in range(3 * MOST_TOTALS):
        push(backup, version, 0, 1.0)
        backup.apply(version, 0.1, None, [1.0, 1.0, 1.0, 0.0])
    kept = [version for version, *_ in backup.totals()]
    assert kept == list(range(2 * MOST_TOTALS, 3 * MOST_TOTALS))


@pytest.mark.parametrize(("kind", "due"), [("async", 1), ("quorum", 0)])
def test_only_a_quorum_waits_for_its_grace_time(kind: str, due: int) -> None:
    shard = shard_of(Consistency(kind, 3, 1, grace_s=1e6), {"name": "sgd"}, zeros(4))
    assert shard.completed() == 0
    push(shard, 0, 2, 1.0)
    assert shard.completed() == due
    assert bool(shard.totals()) == (kind == "async")
    for slot in (0, 1):  # all tasks of a clock: nothing is left to wait for
        push(shard, 0, slot, 1.0)
    assert shard.completed() == 1
