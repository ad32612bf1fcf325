"""A prepared loader deals out the batches of the plain one, in its order, and can go on."""

from __future__ import annotations

import functools
import io
import itertools
import random
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import phalanx
from marks import by_hand
from phalanx.errors import PhalanxError
from phalanx.launch.attach import check_end
from phalanx.launch.local import run_ranks
from phalanx.script.loader import CollateWhole, RankLoader

NUM_ROWS = 23


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([index, index + 100]), "name": f"row {index}"}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(NUM_ROWS))


def with_generator() -> DataLoader[Any]:
    return DataLoader(
        Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(5), num_workers=0
    )


class DrawnAtOnce:
    """Batches of an order that is drawn when they are asked for, not when the first is."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(NUM_ROWS)[:20].view(5, 4).tolist())


LOADERS = {
    "in order": lambda: DataLoader(Numbers(), 4),
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "with a generator": with_generator,
    "last batch dropped": lambda: DataLoader(Numbers(), 4, shuffle=True, drop_last=True),
    "one row left": lambda: DataLoader(Numbers(), 11, shuffle=True),
    "with replacement": lambda: DataLoader(
        Numbers(), 4, sampler=RandomSampler(Numbers(), replacement=True, num_samples=30)
    ),
    "by a generator of its sampler": lambda: DataLoader(
        Numbers(),
        4,
        sampler=RandomSampler(Numbers(), generator=torch.Generator().manual_seed(9)),
    ),
    "weighted": lambda: DataLoader(
        Numbers(), 4, sampler=WeightedRandomSampler(range(1, NUM_ROWS + 1), 17)
    ),
    "a subset": lambda: DataLoader(Numbers(), 3, sampler=SubsetRandomSampler(range(5, 14))),
    "a sampler of batches": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 5, False)
    ),
    "a sampler of batches that draws at once": lambda: DataLoader(
        Numbers(), batch_sampler=DrawnAtOnce()
    ),
    "by workers": lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=2),
    "by workers that stay": lambda: DataLoader(
        Numbers(), 4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "a stream": lambda: DataLoader(Stream(), 4),
}


def rows_of(batch: Any) -> Tensor:
    return batch["x"][:, 0] if isinstance(batch, dict) else batch


def passes(loader: Any, gather: Any, num_passes: int = 2) -> list[list[int]]:
    """Return the rows of each batch."""
    return [gather(rows_of(batch)).tolist() for _ in range(num_passes) for batch in loader]


def plain_passes(name: str) -> list[list[int]]:
    torch.manual_seed(3)
    return passes(LOADERS[name](), lambda rows: rows)


def dealt_out() -> dict[str, Any]:
    """Return what the ranks get together, and where each stands, for every loader."""
    found: dict[str, Any] = {}
    for name, make in LOADERS.items():
        run = phalanx.init()
        torch.manual_seed(3 if run.is_first else 4)  # the order is that of the first rank
        loader = run.prepare(make())
        torch.rand(7 * run.comm.coord("dp"))  # and nobody's own draws change it
        positions: list[int] = []
        batches: list[list[int]] = []
        lasts: list[bool] = []
        for _ in range(2):
            for batch in loader:
                torch.rand(3)
                batches.append(run.gather(rows_of(batch), dim=0).tolist())
                positions += run.gather(loader.rows).tolist()
                lasts.append(loader.is_last)
                assert len(rows_of(batch)) == len(loader.rows)
        found[name] = batches, positions, lasts, loader.epoch
    return found


@pytest.mark.parametrize("num_ranks", [by_hand(1), 2, by_hand(3)])
def test_the_batches_are_those_of_the_plain_loader(num_ranks: int) -> None:
    expected = {name: plain_passes(name) for name in LOADERS}
    for found in run_ranks(dealt_out, num_ranks, threads=1):
        for name, (batches, positions, lasts, epoch) in found.items():
            assert batches == expected[name], name
            assert positions == list(range(len(positions))), name
            half = len(batches) // 2
            assert [i for i, is_last in enumerate(lasts) if is_last] == [
                half - 1,
                2 * half - 1,
            ], name
            assert epoch == 2


def gone_on(num_done: int | None) -> dict[str, list[list[int]]]:
    """Take some batches, a pass if None, and the rest with loaders that are told where it ended."""
    found: dict[str, list[list[int]]] = {}
    for name, make in LOADERS.items():
        run = phalanx.init()
        torch.manual_seed(3)
        loader: RankLoader = run.prepare(make())
        batches: list[list[int]] = []
        state, draws = loader.state_dict(), run._prepared.generator.state
        while loader.epoch < (1 if num_done is None else 2) and len(batches) != num_done:
            for batch in loader:
                batches.append(run.gather(rows_of(batch), dim=0).tolist())
                state, draws = loader.state_dict(), run._prepared.generator.state
                if len(batches) == num_done:
                    break
        if num_done is None:
            state, draws = loader.state_dict(), run._prepared.generator.state
        again = phalanx.init()
        torch.manual_seed(77)
        other: RankLoader = again.prepare(make())
        again._prepared.generator.state = draws
        other.load_state_dict(state)
        while other.epoch < 2:
            batches += [again.gather(rows_of(batch)).tolist() for batch in other]
        found[name] = batches
    return found


@pytest.mark.parametrize("num_done", [by_hand(2), by_hand(5), 7, by_hand(None)])
def test_a_loader_goes_on_where_another_stood(num_done: int) -> None:
    expected = {name: plain_passes(name) for name in LOADERS}
    for found in run_ranks(gone_on, 2, num_done, threads=1):
        for name, batches in found.items():
            assert batches == expected[name], name


def after_a_break() -> list[list[int]]:
    run = phalanx.init()
    torch.manual_seed(3)
    loader = run.prepare(DataLoader(Numbers(), 4, shuffle=True))
    for _batch in loader:
        break
    return passes(loader, functools.partial(run.gather, dim=0), 1)


def test_a_pass_that_is_broken_off_is_followed_by_a_whole_one() -> None:
    torch.manual_seed(3)
    plain = DataLoader(Numbers(), 4, shuffle=True)
    for _batch in plain:
        break
    expected = passes(plain, lambda rows: rows, 1)
    assert run_ranks(after_a_break, 2, threads=1) == [expected, expected]


class Odd(Sampler[int]):
    """Draws from what each rank draws from by itself."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUM_ROWS))
        random.Random(dist.get_rank()).shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return NUM_ROWS


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()

    def __len__(self) -> int:
        return NUM_ROWS


class Other(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([100])


def nested(loader: RankLoader) -> None:
    for _ in loader:
        for _ in loader:
            pass


def tuple_of_pairs(samples: list[Any]) -> Any:
    return [sample["x"] for sample in samples]


def words_of_what_cannot_be_dealt_out() -> list[str]:
    run = phalanx.init()
    words: list[str] = []
    endless = BatchSampler(Endless(), 3, True)
    for work in (
        lambda: list(run.prepare(DataLoader(Numbers(), 4, sampler=Odd()))),
        lambda: run.prepare(Other(Numbers(), 4)),
        lambda: nested(run.prepare(DataLoader(Numbers(), 4))),
        lambda: list(run.prepare(DataLoader(Numbers(), 11, collate_fn=tuple_of_pairs))),
        lambda: list(run.prepare(DataLoader(Numbers(), batch_sampler=endless))),
    ):
        try:
            work()
            words.append("")
        except PhalanxError as error:
            words.append(str(error))
    return words


def test_what_cannot_be_dealt_out_right_is_refused_by_name() -> None:
    for rank, words in enumerate(run_ranks(words_of_what_cannot_be_dealt_out, 2, threads=1)):
        assert words[0].startswith("Odd yields a different order on each rank")
        assert words[1].startswith("prepare: Other overrides __iter__")
        assert words[2].startswith("a pass over the loader continues after another")
        assert ("a rank has no row of the last batch" in words[3]) == (rank == 1)
        assert words[4].startswith("BatchSampler yields more than the 7 batches that its __len__")


def odd_ones(batch: Any) -> Any:
    return [torch.tensor(index) if index % 2 else index for index in batch]


class Mixed(BatchSampler):
    """Gives tensors among the whole numbers."""

    def __iter__(self) -> Iterator[Any]:
        return map(odd_ones, super().__iter__())


def kinds_of_samples() -> list[tuple[int, bool]]:
    class Kinds(Dataset[Any]):
        def __getitem__(self, index: Any) -> Tensor:
            return torch.tensor([int(index), isinstance(index, Tensor)])

    run = phalanx.init()
    batches = Mixed(RandomSampler(range(NUM_ROWS)), 4, False)
    loader = run.prepare(DataLoader(Kinds(), batch_sampler=batches))
    return [tuple(row) for batch in loader for row in run.gather(batch, dim=0).tolist()]


def test_a_dataset_is_asked_for_what_the_sampler_gives() -> None:
    for rows in run_ranks(kinds_of_samples, 2, threads=1):
        assert sorted(rows) == [(index, index % 2) for index in range(NUM_ROWS)]


def of_a_zip() -> list[DataLoader[Any]]:
    """Return two loaders that draw from torch's generator, and one that draws from its own."""
    torch.manual_seed(3)
    own = torch.Generator().manual_seed(4)
    return [
        DataLoader(Numbers(), 4, shuffle=True, generator=generator)
        for generator in (None, own, None)
    ]


def rows_of_a_zip(loaders: list[Any], gather: Any, most: int = 100) -> list[list[int]]:
    rounds = itertools.islice(zip(*loaders, strict=True), most)
    return [gather(rows_of(batch)).tolist() for batches in rounds for batch in batches]


def rows_of_prepared_zips() -> list[list[int]]:
    """Return the rows of two passes; the second is left, and resumed by other loaders."""
    run = phalanx.init()
    loaders: list[RankLoader] = list(run.prepare(*of_a_zip()))

    def used(rows: Tensor) -> Tensor:
        for loader in loaders:
            loader.is_used = True  # no look, then
        return run.gather(rows, dim=0)

    rows = rows_of_a_zip(loaders, run.gather) + rows_of_a_zip(loaders, used, 2)
    states, draws = [loader.state_dict() for loader in loaders], run._prepared.generator.state
    again = phalanx.init()
    others = list(again.prepare(*of_a_zip()))
    again._prepared.generator.state = draws
    for other, state in zip(others, states, strict=True):
        other.load_state_dict(state)
    return rows + rows_of_a_zip(others, again.gather)


def test_loaders_that_are_read_in_turns_draw_as_the_plain_ones() -> None:
    plain = of_a_zip()
    expected = [row for _ in range(2) for row in rows_of_a_zip(plain, lambda rows: rows)]
    for rows in run_ranks(rows_of_prepared_zips, 2, threads=1):
        assert rows == expected


def of_unlike_batches() -> list[DataLoader[Any]]:
    return [DataLoader(Numbers(), size) for size in (4, 7)]


def rows_of_unlike_batches() -> list[list[int]]:
    run = phalanx.init()
    return rows_of_a_zip(list(run.prepare(*of_unlike_batches())), run.gather, 2)


def test_batches_of_unlike_sizes_are_gathered_in_turns() -> None:
    expected = rows_of_a_zip(of_unlike_batches(), lambda rows: rows, 2)
    for rows in run_ranks(rows_of_unlike_batches, 2, threads=1):
        assert rows == expected


def after_a_look(is_resumed: bool, folder: str) -> list[int]:
    """Return the first row of each batch of a pass that was looked at first."""
    run = phalanx.init()
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.arange(8), 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    if is_resumed:
        batches = iter(loader)
        next(batches)
        run.backward(sum_of_rows=model(torch.ones(1, 1)).sum() * (1 + dist.get_rank()), count=1)
        optimizer.step()
        optimizer.zero_grad()
        run.save(folder)
        run.resume(folder)
    next(iter(loader))
    assert loader.epoch == 0
    return [int(row) for batch in loader for row in batch]


def test_a_look_at_the_first_batch_is_no_pass(tmp_path: Path) -> None:
    for is_resumed, first in ((False, 0), (True, 2)):
        found = run_ranks(after_a_look, 2, is_resumed, str(tmp_path), threads=1)
        assert found == [list(range(first + rank, 8, 2)) for rank in range(2)]


def of_accumulated_passes() -> tuple[list[int], list[str]]:
    """Return where the loaders of a zip stand that is left, and what was warned of."""
    run = phalanx.init(accumulation=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, *loaders = run.prepare(
        model, optimizer, *(DataLoader(torch.arange(n).float()[:, None], 2) for n in (10, 8, 8))
    )

    def train(passes: Iterable[Any], most: int = 100) -> None:
        for x, *_ in itertools.islice(passes, most):
            run.backward(sum_of_rows=model(x).sum(), count=len(x))
            if run.is_step_end:
                optimizer.step()
                optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(iter(loaders[0]))  # a look
        for _ in range(2):  # which the second loader ends, when a batch of the first is read
            train(zip(*loaders[:2], strict=False))
        train(zip(*loaders[1:], strict=True))
        run.print("warns of passes", file=io.StringIO())
        train(zip(*loaders[1:], strict=True), 2)
        if run.is_first:
            model.half()  # to export it
        check_end()
    batches = [loader.state_dict()["batches"] for loader in loaders[1:]]
    return batches, [str(each) for each in caught]


def test_passes_that_a_script_may_make_raise_no_alarm() -> None:
    for stands, told in run_ranks(of_accumulated_passes, 2, threads=1):
        assert (stands, told) == ([2, 2], [])


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(())


def draws_of_workers() -> list[float]:
    run = phalanx.init()
    torch.manual_seed(0)
    loader = run.prepare(DataLoader(Drawing(), 4, num_workers=1))
    return [float(x) for batch in loader for x in run.gather(batch)]


def test_workers_of_different_ranks_draw_different_numbers() -> None:
    for draws in run_ranks(draws_of_workers, 2, threads=1):
        assert len(set(draws)) == 8


class Shuffled(IterableDataset[Any]):
    """Gives rows at random out of a buffer."""

    def __iter__(self) -> Iterator[Tensor]:
        held: list[int] = []
        for number in range(NUM_ROWS):
            held.append(number)
            if len(held) == 5:
                yield torch.tensor(held.pop(int(torch.randint(5, ()))))
        yield from torch.tensor(held)


def shuffled_rows(folder: str, num_before: int) -> list[int]:
    """Return the rows of two passes; a model draws in between, and the loop begins anew once."""
    rows: list[int] = []
    for is_again in (False, True):
        run = phalanx.init()
        torch.manual_seed(9 if is_again else 3)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(Shuffled(), 9)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        if is_again:
            run.resume(folder)
        while loader.epoch < 2:
            for batch in loader:
                torch.rand(len(batch))  # of which ranks have unlike numbers
                rows += run.gather(batch).tolist()
                run.backward(sum_of_rows=model(batch[:, None].float()).sum(), count=len(batch))
                optimizer.step()
                optimizer.zero_grad()
                if len(rows) == num_before and not is_again:
                    run.save(folder)
                    break
            if len(rows) == num_before and not is_again:
                break
    return rows


def test_a_stream_that_draws_as_it_goes_gives_each_row_once(tmp_path: Path) -> None:
    torch.manual_seed(3)
    torch.nn.Linear(1, 1)
    expected = [int(row) for _ in range(2) for batch in DataLoader(Shuffled(), 9) for row in batch]
    for num_before in (18, NUM_ROWS):
        folder = str(tmp_path / str(num_before))
        for rows in run_ranks(shuffled_rows, 2, folder, num_before, threads=1):
            assert rows == expected


class OfOneRank(Stream):
    """Deals its rows out itself."""

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(super().__iter__(), dist.get_rank(), None, dist.get_world_size())


def words_of_streams() -> list[int]:
    run = phalanx.init()
    numbers: list[int] = []
    for dataset in (Stream(), OfOneRank()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in run.prepare(DataLoader(dataset, 8)):
                pass
        numbers.append(sum("with a different batch on each rank" in str(w.message) for w in caught))
    return numbers


def test_a_stream_that_deals_itself_out_is_told() -> None:
    assert run_ranks(words_of_streams, 2, threads=1) == [[0, 1], [0, 0]]


def batches_of_a_distributed_sampler() -> list[tuple[list[list[int]], list[list[int]]]]:
    """Return what a prepared and the plain loader of this rank yield, for some loaders."""
    found: list[tuple[list[list[int]], list[list[int]]]] = []
    for drop_last in (False, True):
        run = phalanx.init()
        sampler = DistributedSampler(Numbers(), drop_last=drop_last)
        plain = DataLoader(Numbers(), 4, sampler=sampler, drop_last=drop_last)
        loader = run.prepare(plain)
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            found.append(tuple(passes(each, lambda rows: rows, 1) for each in (loader, plain)))
        assert len(loader) == len(plain)
    return found


def test_a_distributed_sampler_keeps_the_order_of_torch_on_each_rank() -> None:
    for found in run_ranks(batches_of_a_distributed_sampler, 2, threads=1):
        for batches, expected in found:
            assert batches == expected
        assert found[0] != found[1]


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.stack(ys)


class MeanOfPositions(nn.Module):
    """Counts padding, and fails on 0 rows, as many models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().mean(1)
        return self.last(h.reshape(len(h), -1))


def rows_of_many_lengths() -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(0)
    lengths = [1 + number * 7 % 11 for number in range(9)]  # the last of 3 batches has one row
    rows = [torch.randn(n, 4, generator=numbers, dtype=torch.float64) for n in lengths]
    return DataLoader([(x, x[0, :2]) for x in rows], 4, collate_fn=padded)


def squares(output: Tensor, y: Tensor) -> Tensor:
    return ((output - y) ** 2).sum()


def losses_of_padded_rows(strategy: str | None) -> list[float]:
    torch.manual_seed(0)
    model, loader = MeanOfPositions().double(), rows_of_many_lengths()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = None if strategy is None else phalanx.init(strategy)
    if run is not None:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
    losses: list[float] = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = squares(model(x), y)
        if run is None:
            (loss / len(y)).backward()
            losses.append(loss.item() / len(y))
        else:
            losses.append(float(run.backward(sum_of_rows=loss, count=len(y))))
        optimizer.step()
    total, count = torch.zeros(()), 0
    with torch.no_grad():
        for x, y in loader:
            total, count = total + squares(model(x), y), count + len(y)
    return [*losses, float(total / count if run is None else run.mean(total, count))]


@pytest.mark.parametrize("strategy", ["dp2", "fsdp2"])
def test_rows_are_padded_to_the_longest_of_the_whole_batch(strategy: str) -> None:
    """And a model that fails on 0 rows trains and is evaluated where a rank has none."""
    expected = losses_of_padded_rows(None)
    for losses in run_ranks(losses_of_padded_rows, 2, strategy):
        assert losses == pytest.approx(expected, rel=1e-12)


def draw_a_row_each(samples: list[int]) -> torch.Tensor:
    drawn = [(random.random(), np.random.rand(), float(torch.rand(()))) for _ in samples]
    return torch.tensor(drawn)


def test_a_collate_that_draws_gives_the_rows_of_one_process() -> None:
    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    whole = draw_a_row_each([0, 1, 2, 3])
    seed()
    (own,) = CollateWhole(draw_a_row_each, (1, 2, 1), False)([0, 1, 2, 3])
    torch.testing.assert_close(own, whole[2:])
