"""The loader: every sample once an epoch, for any ranks; empty rows; a thread that ends."""

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config import BatchPlan
from phalanx.data.loader import (
    Loader,
    Tail,
    evaluation_batches,
    evaluation_rows,
    stream_length,
    total_steps,
)
from phalanx.data.order import Order
from phalanx.data.samples import Batch, Samples
from phalanx.data.token_file import TokenWriter, joined, open_token_file
from phalanx.models.loss import IGNORE

SEQ_LEN = 2


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory):
    """Make `n` samples; sample i holds the tokens 2 i and 2 i + 1, so its id can be read back."""
    folder = tmp_path_factory.mktemp("samples")
    made: dict[int, Samples] = {}

    def samples(n: int) -> Samples:
        if n not in made:
            path: Path = folder / f"{n}.bin"
            with TokenWriter(path, num_ids=1 << 15, end_id=(1 << 15) - 1) as writer:
                if n:
                    writer.write(list(range(SEQ_LEN * n)))
            made[n] = Samples(open_token_file(path), SEQ_LEN)
            assert len(made[n]) == n
        return made[n]

    return samples


def ids(batches: list[Batch]) -> list[int]:
    """Return the sample of each row, -1 for empty rows, checking that those are empty."""
    found: list[int] = []
    for batch in batches:
        for tokens, labels, row in zip(batch.tokens_BT, batch.labels_BT, batch.rows_B, strict=True):
            is_empty = int(row) < 0
            assert is_empty == bool((labels == IGNORE).all())
            assert not is_empty or not tokens.any()
            found.append(-1 if is_empty else int(tokens[0]) // SEQ_LEN)
    return found


def plan_of(num_ranks: int, accumulation: int, microbatch: int) -> BatchPlan:
    size = num_ranks * accumulation * microbatch
    return BatchPlan(size, microbatch, accumulation, num_ranks)


plans = st.builds(plan_of, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


def interleaved(ranks: list[list[int]]) -> list[int]:
    return [sample for row in zip(*ranks, strict=True) for sample in row]


@given(
    n=st.integers(1, 30),
    schedule=st.lists(plans, min_size=1, max_size=4),
    epochs=st.integers(1, 3),
    shuffled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_sample_once_an_epoch_for_any_ranks_that_change(
    make, n: int, schedule: list[BatchPlan], epochs: int, shuffled: bool, seed: int
) -> None:
    samples, order = make(n), Order(n, seed, shuffled)
    seen: list[int] = []
    consumed, step = 0, 0
    while consumed < n * epochs:
        plan = schedule[step % len(schedule)]
        parts: list[list[int]] = []
        for rank in range(plan.num_data_ranks):
            loader = Loader(samples, order, plan, rank, end=n * epochs, consumed=consumed)
            microbatches = loader.step_at(consumed)
            assert len(microbatches) == plan.accumulation
            assert {len(b.rows_B) for b in microbatches} == {plan.microbatch}
            parts.append(ids(microbatches))
        together = interleaved(parts)
        assert len(together) == plan.global_size
        seen += [sample for sample in together if sample >= 0]
        consumed, step = min(consumed + plan.global_size, n * epochs), step + 1
    assert seen == order.samples(np.arange(n * epochs)).tolist()
    for epoch in range(epochs):
        assert sorted(seen[n * epoch : n * epoch + n]) == list(range(n))


@settings(max_examples=20)
@given(schedule=st.lists(plans, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_mixture_has_one_order_for_any_ranks_and_resumes(
    make, schedule: list[BatchPlan], seed: int
) -> None:
    """Samples of two files, 7 and 3; the second file's are read back with 7 more."""
    files = [make(7).file, make(3).file]
    samples = Samples(joined(files), SEQ_LEN)
    order = Order(len(samples), seed).mixed([7, 3], [2, 3])
    seen, consumed = list[int](), 0
    for plan in schedule:  # each with loaders of its own, which know `consumed` alone
        parts: list[list[int]] = []
        for rank in range(plan.num_data_ranks):
            with Loader(samples, order, plan, rank, consumed=consumed) as loader:
                parts.append(ids(next(loader)))
        seen += interleaved(parts)
        consumed += plan.global_size
    numbers = order.samples(np.arange(consumed))
    assert seen == np.where(numbers < 7, numbers, numbers - 7).tolist()
    second = np.array([1, 0, 1, 0, 1] * (consumed // 5 + 1))[:consumed]
    assert (numbers >= 7).tolist() == second.astype(bool).tolist()


@given(
    n=st.integers(1, 30),
    plan=plans,
    epochs=st.floats(0.1, 3.0),
    tail=st.sampled_from(["keep", "drop", "pad"]),
    resumed_at=st.integers(0, 5),
)
def test_tails_and_number_of_steps(
    make, n: int, plan: BatchPlan, epochs: float, tail: Tail, resumed_at: int
) -> None:
    samples, order = make(n), Order(n, 1)
    end = stream_length(order, epochs)
    assert end is not None
    consumed = min(end, resumed_at)
    ranks: list[list[int]] = []
    for rank in range(plan.num_data_ranks):
        with Loader(samples, order, plan, rank, end=end, tail=tail, consumed=consumed) as loader:
            steps = list(loader)
        size = plan.global_size
        assert len(steps) == total_steps(order, size, epochs, tail, consumed=consumed)
        ranks.append([sample for step in steps for sample in ids(step)])
        left = end - consumed
        assert loader.consumed == (end - left % size if tail == "drop" else end)
    together = interleaved(ranks)
    stream = order.samples(np.arange(consumed, end)).tolist()
    if tail == "drop":
        assert together == stream[: len(stream) // plan.global_size * plan.global_size]
    else:
        assert together[: len(stream)] == stream
        padding = together[len(stream) :]
        assert len(padding) < plan.global_size
        if tail == "keep":
            assert padding == [-1] * len(padding)
        else:
            first = (end - 1) // n * n
            epoch = order.samples(np.arange(first, first + n)).tolist()
            assert padding == (epoch * (len(padding) // n + 1))[: len(padding)]


def test_rows_are_positions_of_the_stream(make) -> None:
    plan = plan_of(2, 2, 2)
    loader = Loader(make(5), Order(5), plan, 1, end=15)
    rows = [[batch.rows_B.tolist() for batch in step] for step in loader]
    assert rows == [[[1, 3], [5, 7]], [[9, 11], [13, -1]]]
    padded = Loader(make(5), Order(5), plan, 1, end=15, tail="pad").step_at(8)
    assert [batch.rows_B.tolist() for batch in padded] == [[9, 11], [13, 15]]


def test_resumed_stream_is_the_same_stream(make) -> None:
    samples, order, plan = make(20), Order(20, 4), plan_of(1, 2, 3)
    with Loader(samples, order, plan, 0) as loader:
        whole = [ids(next(loader)) for _ in range(10)]
        assert loader.consumed == 60  # what is read ahead does not count
    with Loader(samples, order, plan, 0, consumed=24) as loader:
        assert [ids(next(loader)) for _ in range(6)] == whole[4:]


def test_far_resume_is_immediate(make) -> None:
    plan = plan_of(2, 2, 4)
    with Loader(make(30), Order(30), plan, 0, consumed=10**6 * plan.global_size) as loader:
        assert next(loader)[0].rows_B[0] == 10**6 * plan.global_size


def test_error_of_the_thread_reaches_the_consumer_and_the_thread_ends(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    loader = Loader(make(30), Order(30), plan_of(1, 1, 2), 0)
    good = loader.step_at
    monkeypatch.setattr(loader, "step_at", lambda c: good(c) if c < 4 else 1 // 0)
    with loader:
        next(loader)
        next(loader)
        with pytest.raises(ZeroDivisionError):
            next(loader)
        assert loader.consumed == 4
    assert threading.active_count() == before


def test_thread_reads_one_step_ahead_and_closes(make, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    loader = Loader(make(30), Order(30), plan_of(1, 1, 2), 0, end=30)
    asked: list[int] = []
    good = loader.step_at

    def watch(consumed: int) -> list[Batch]:
        asked.append(consumed)
        return good(consumed)

    monkeypatch.setattr(loader, "step_at", watch)
    assert ids(next(loader)) == Order(30).samples(np.arange(2)).tolist()
    loader.close()
    assert asked in ([0], [0, 2])
    assert threading.active_count() == before
    rest = [sample for step in loader for sample in ids(step)]
    assert rest == Order(30).samples(np.arange(2, 30)).tolist()
    assert threading.active_count() == before  # the end closes it too
    with pytest.raises(StopIteration):
        next(loader)


def test_a_stream_has_an_end_or_none() -> None:
    assert stream_length(Order(10), None) is None
    assert stream_length(Order(10), 0.001) == 1


@given(n=st.integers(0, 30), microbatch=st.integers(1, 4), num_ranks=st.integers(1, 5))
def test_evaluation_covers_each_row_once_with_equal_batches(
    make, n: int, microbatch: int, num_ranks: int
) -> None:
    samples = make(n)
    parts = [
        list(
            evaluation_batches(
                samples, evaluation_rows(n), microbatch=microbatch, rank=rank, num_ranks=num_ranks
            )
        )
        for rank in range(num_ranks)
    ]
    assert len({len(part) for part in parts}) == 1
    assert all(len(batch.rows_B) == microbatch for part in parts for batch in part)
    seen = [sample for part in parts for sample in ids(part) if sample >= 0]
    assert sorted(seen) == list(range(n))


def test_evaluation_rows_are_spread_over_the_data() -> None:
    assert evaluation_rows(10).tolist() == list(range(10))
    assert evaluation_rows(10, 20).tolist() == list(range(10))
    assert evaluation_rows(10, 4).tolist() == [0, 2, 5, 7]
    assert evaluation_rows(10, 0).tolist() == []
    assert evaluation_rows(0, 4).tolist() == []
