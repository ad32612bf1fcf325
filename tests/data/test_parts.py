"""Parts of a run: each token once an epoch over several lengths, and text kept as it stands."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.config import BatchPlan, Part
from phalanx.data.loader import Loader, Tail, stream_length, total_steps
from phalanx.data.order import Order
from phalanx.data.parts import Rest, order_of
from phalanx.data.samples import Samples
from phalanx.data.token_file import TokenFile, TokenWriter, open_token_file
from phalanx.models.loss import IGNORE

MOST = 90
END = MOST + 9


def numbered(folder: Path, num_tokens: int) -> TokenFile:
    """Write a file whose tokens are 0, 1, 2 ... and END, so that each says where it stands."""
    path = folder / str(num_tokens)
    if not path.exists():
        with TokenWriter(path, num_ids=END + 1, end_id=END) as writer:
            writer.write(list(range(num_tokens - 1)))
    return open_token_file(path)


def loader_of(
    file: TokenFile,
    parts: list[Part],
    global_size: int,
    shuffled: bool,
    tail: Tail,
    epochs: float,
) -> tuple[Loader, Order]:
    order, rest = order_of(parts, file.num_tokens - 1, 7, shuffled)
    samples = Samples(file, parts[-1].seq_len, rest=rest)
    plan = BatchPlan(global_size, global_size, 1, 1)
    end = stream_length(order, epochs)
    consumed = parts[-1].consumed
    return Loader(samples, order, plan, 0, end=end, tail=tail, consumed=consumed), order


sizes = st.lists(st.tuples(st.integers(2, 9), st.integers(1, 4), st.integers(1, 5)), min_size=2,
                   max_size=4)  # fmt: skip


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(
    num_tokens=st.integers(12, MOST),
    sizes=sizes,
    taken=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    shuffled=st.booleans(),
    tail=st.sampled_from(["keep", "drop"]),
    epochs=st.integers(1, 3),
)
def test_each_token_is_predicted_once_an_epoch_over_all_parts(
    tmp_path: Path,
    num_tokens: int,
    sizes: list[tuple[int, int, int]],
    taken: list[int],
    shuffled: bool,
    tail: Tail,
    epochs: int,
) -> None:
    """Of whatever lengths, in whatever order, wherever each ends; ends are uneven."""
    file = numbered(tmp_path, num_tokens)
    parts: list[Part] = []
    seen: list[int] = []
    for number, (seq_len, together, global_size) in enumerate(sizes):
        parts.append(Part(seq_len, seq_len * together, 0))
        loader, order = loader_of(file, parts, global_size, shuffled, tail, epochs)
        num_steps = total_steps(order, global_size, epochs, tail)
        if number < len(sizes) - 1:
            num_steps = min(num_steps, taken[number])
        with loader:
            for _ in range(num_steps):
                (batch,) = next(loader)
                valid = batch.labels_BT != IGNORE
                tokens, labels = batch.tokens_BT[valid], batch.labels_BT[valid]
                assert ((labels == tokens + 1) | (labels == END)).all()
                seen += tokens.tolist()
        parts[-1] = parts[-1]._replace(consumed=loader.consumed)
    once = list(range(num_tokens - 1))
    if tail == "drop":
        left = epochs * len(once) - len(seen)
        assert 0 <= left < sizes[-1][0] * sizes[-1][2]
        assert np.bincount(seen, minlength=len(once)).max() <= epochs
    else:
        assert sorted(seen) == sorted(once * epochs)
        for epoch in range(epochs):  # one after the other, not only in sum
            assert sorted(seen[len(once) * epoch :][: len(once)]) == once


def test_what_is_left_is_cut_from_the_beginning_of_each_stretch(tmp_path: Path) -> None:
    """The picture of the module: samples of 4, of which the first and the fourth are gone."""
    file = numbered(tmp_path, 28)
    line = Rest(np.array([0]), np.array([0, 27]))
    rest = line.after(np.array([6, 1, 5, 2, 4]), 4, 6)
    assert (rest.begins_S.tolist(), rest.offsets.tolist()) == ([4, 16, 10, 22], [0, 6, 12, 14, 19])
    assert rest.count_joined(6) == 1 and rest.count_joined(2) == 0 and rest.count_joined(4) == 2
    samples = Samples(file, 6, rest=rest)
    assert len(samples) == 5  # of an epoch; those of the rest come after
    rows = np.arange(5, 9)
    batch = samples.batch(rows, rows)
    x = IGNORE
    assert batch.tokens_BT.tolist() == [
        [4, 5, 6, 7, 8, 9], [16, 17, 18, 19, 20, 21], [10, 11, 22, 23, 24, 25], [26, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    assert batch.labels_BT.tolist() == [
        [5, 6, 7, 8, 9, 10], [17, 18, 19, 20, 21, 22], [11, 12, 23, 24, 25, 26],
        [END, x, x, x, x, x],
    ]  # fmt: skip
    assert batch.documents_BT is not None
    assert batch.documents_BT.tolist() == [[0] * 6, [0] * 6, [0, 0, 1, 1, 1, 1], [0] * 6]
    assert batch.positions_BT[2].tolist() == [0, 1, 0, 1, 2, 3]
    plain = Samples(file, 6, document_mask=False, rest=rest).batch(rows, rows)
    assert plain.documents_BT is None and plain.positions_BT[2].tolist() == list(range(6))
    table = np.ones(END + 1, dtype=np.int32)
    assert samples.count_bytes(np.append(rows, -1), table) == 19


@pytest.mark.parametrize("consumed", [64, 67])
def test_what_a_shuffle_keeps_together_is_whole_in_the_next_part(consumed: int) -> None:
    """1,000 samples of 10 tokens; at most the group under way and the end of the data are cut."""
    order, _ = order_of([Part(10, 80, 0)], 10_000, 3)
    first = order.samples(np.arange(1000))
    assert sorted(first.tolist()) == list(range(1000))
    groups = first.reshape(-1, 8)
    assert (np.diff(groups, axis=1) == 1).all() and (groups[:, 0] % 8 == 0).all()
    assert (np.diff(groups[:, 0]) != 8).sum() > 100
    order, rest = order_of([Part(10, 80, consumed), Part(80, 80, 0)], 10_000, 3)
    assert rest is not None and len(rest) == 10_000 - 10 * consumed
    whole = np.arange(order.num_rest - 1)[:, None] * 80 + np.arange(80)
    steps = np.diff(rest.places(whole), axis=1)
    joined = (steps != 1).any(axis=1).sum()
    assert joined == rest.count_joined(80) <= (consumed % 8 > 0)
    alone, rest = order_of([Part(10, 10, consumed), Part(80, 80, 0)], 10_000, 3)
    assert rest is not None and rest.count_joined(80) > 20 and alone.num_rest == order.num_rest


def test_a_part_that_begins_with_an_epoch_has_nothing_left_before_it() -> None:
    for consumed, epoch in ((0, 0), (13, 1), (26, 2)):
        order, rest = order_of([Part(8, 8, consumed), Part(16, 16, 0)], 100, 1)
        assert rest is None and order == Order(7, 1, first_epoch=epoch)
        assert order.samples(np.arange(7)).tolist() != list(range(7))
    # A part of which nothing was consumed changes nothing.
    parts = [Part(8, 8, 5), Part(16, 16, 0), Part(16, 16, 0)]
    (order, rest), (other, same) = order_of(parts, 100, 1), order_of(parts[:2], 100, 1)
    assert rest is not None and same is not None
    assert order == other and len(rest) == len(same)
    assert rest.begins_S.tolist() == same.begins_S.tolist()


def test_a_stream_without_shuffling_goes_on_where_it_stopped() -> None:
    order, rest = order_of([Part(8, 8, 5), Part(24, 24, 0)], 100, is_shuffled=False)
    assert rest is not None
    assert rest.places(np.arange(60)).tolist() == list(range(40, 100))
    assert order.samples(np.arange(8)).tolist() == [5, 6, 7, 0, 1, 2, 3, 4]


def test_lengths_in_epochs_count_from_the_beginning_of_the_run() -> None:
    order, _ = order_of([Part(10, 10, 50), Part(20, 20, 0)], 1000)
    assert [stream_length(order, epochs) for epochs in (0.25, 0.5, 0.75, 1, 3)] == [
        0, 0, 13, 25, 125,
    ]  # fmt: skip
    assert stream_length(order, None) is None


def test_padding_comes_from_the_last_epoch_or_what_is_left_of_it(tmp_path: Path) -> None:
    parts = [Part(4, 4, 3), Part(8, 8, 0)]
    loader, order = loader_of(numbered(tmp_path, 42), parts, 3, True, "pad", 1)
    assert (order.num_samples, order.num_rest) == (6, 4)
    with loader:
        steps = [batch.tokens_BT[:, 0].tolist() for (batch,) in loader]
    flat = list(itertools.chain(*steps))
    assert len(flat) == 6 and flat[4:] == flat[:2] and len(set(flat)) == 4
