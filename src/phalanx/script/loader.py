"""A DataLoader whose batches are dealt out to the data ranks, in the order of one process.

    DataLoader            global batch 0: rows 4 1 7 2 0        global batch 1: rows 5 3 6
    rank 0 of 2                           4 1 7                                  5 3
    rank 1 of 2                           2 0                                    6

A batch of the plain loader is the global batch, whatever the number of ranks. Each rank takes a run
of its rows, as even as can be, and fetches only those. A rank without rows gets a batch of no rows,
so that every rank takes the same steps and each row counts once.

What is shuffled is drawn from a generator that the loaders of a job share (`Draws`). It begins as
torch's own generator is on rank 0 when the first of them is iterated. So the order is that of the
plain script as long as only loaders draw there, and never depends on what a model or a transform
draws. Its state and the number of batches taken say where a loader stands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from phalanx.checkpoint.standing import LoaderStanding
from phalanx.comm.comm import Comm
from phalanx.comm.together import broadcast_object, gather_objects
from phalanx.data.rows import count_rows, map_batch, map_tensors, tensors_of
from phalanx.errors import CheckpointError, ConfigError, DataError, ScriptError
from phalanx.models.attention import to_device
from phalanx.script.checkpoint import from_text, to_text


class Draws:
    """The generator that the loaders of a job draw from, in place of torch's own.

    Attributes:
        state: as `torch.get_rng_state` gives it, alike on all ranks; None before the first use.
    """

    def __init__(self, state: Tensor | None = None) -> None:
        self.state = state

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Have torch's own generator of the CPU be this one, inside."""
        if self.state is None:
            self.state = cast(Tensor, broadcast_object(torch.get_rng_state()))
        theirs = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
            self.state = torch.get_rng_state()
        finally:
            torch.set_rng_state(theirs)


class _Fetched(NamedTuple):
    """This rank's rows of a global batch.

    Attributes:
        rows: the batch.
        own: where its rows stand among those of the pass, in each piece of the batch.
        is_last: whether no batch of the pass follows.
        num_rows: of the global batch.
    """

    rows: Any
    own: list[range]
    is_last: bool
    num_rows: int


_LOADERS: weakref.WeakSet[RankLoader] = weakref.WeakSet()


def has_empty_batch() -> bool:
    """Return whether a loader of this process stands at a batch of which this rank has no row."""
    return any(loader.is_at_empty for loader in _LOADERS)


class RankLoader:
    """This rank's rows of the batches of a DataLoader, whose length and attributes it has.

    Attributes:
        plain: that loader; its batches are the global ones.
        epoch: passes that have ended.
        num_begun: passes that have begun.
        batches_done: batches yielded in the pass under way.
        is_last: whether the batch that was yielded last is the last of its pass.
        rows: where the rows of that batch stand in the order of the samples, which counts on from
            pass to pass: int64 on this rank's device.
        is_at_empty: whether the batch that was yielded last has no row here.
        is_used: whether a gradient was made in the pass under way; to be set from outside.
        is_dataset_read: whether a script has read `dataset` after the pass; reset from outside.
        piece_sizes: how many of these rows are in each piece of the batch.
        num_batch_rows: rows of that batch on all ranks.
    """

    def __init__(
        self,
        plain: DataLoader[Any],
        comm: Comm,
        draws: Draws,
        on_batch: Callable[[RankLoader], None] = lambda _: None,
        pieces: int = 1,
        has_spares: bool = False,
    ) -> None:
        """Deal the batches out over the data ranks of `comm`; `on_batch` is told of each.

        A batch is cut into `pieces`, and a rank has its share of each: then what all ranks have of
        a microbatch is what one process has that cuts the batch into as many. If `has_spares`, a
        rank without a row of a batch, see `is_at_empty`, is given one of another rank.

        Raises:
            ConfigError: the loader makes no batches, or deals them out itself, or they are small.
            DataError: its dataset has no length.
        """
        _check(plain, comm.size("data"))
        self.plain = plain
        self.epoch = self.batches_done = 0
        self.is_last = self.is_used = self.is_at_empty = self.is_dataset_read = False
        self.rows = torch.zeros(0, dtype=torch.int64)
        self.piece_sizes: list[int] = []
        self.num_batch_rows = 0
        self._has_spares = has_spares
        self._comm = comm
        self._draws = draws
        self._on_batch = on_batch
        self._pieces = pieces
        self._first_row = self._num_rows = 0
        self._before: dict[str, Tensor] = {}
        self._skip = self.num_begun = 0
        self._digest = ""
        self._fetcher = None
        _LOADERS.add(self)
        if not isinstance(plain.dataset, IterableDataset):
            self._fetcher = _Fetcher(plain)

    def __len__(self) -> int:
        return len(self.plain)

    def __getattr__(self, name: str) -> Any:
        if "plain" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        if name == "dataset" and not self.batches_done:
            self.is_dataset_read = True
        return getattr(self.plain, name)

    def __iter__(self) -> Iterator[Any]:
        if self.batches_done:  # the pass before was left early
            self.epoch += 1
        skip = self._skip
        self.batches_done, self._skip, self.is_used = skip, 0, False
        self.num_begun += 1
        number = self.num_begun
        batches = self._of_stream() if self._fetcher is None else self._of_dataset(self._fetcher)
        for batch, own, is_last, self.num_batch_rows in batches:
            if number != self.num_begun:
                raise ScriptError(
                    "a pass over the loader goes on after another over it has begun; prepare a "
                    "DataLoader for each"
                )
            self.is_last = is_last
            self.batches_done += 1
            self.piece_sizes = [len(piece) for piece in own]
            rows = self._first_row + torch.tensor([at for piece in own for at in piece]).long()
            self.rows = to_device(rows, self._comm.device)
            self.is_at_empty = not len(self.rows)
            self._on_batch(self)
            try:
                yield map_tensors(batch, lambda t: t.to(self._comm.device, non_blocking=True))
            except GeneratorExit:
                if (
                    not self.is_used and number == self.num_begun
                ):  # a look at it: the pass is to come
                    self.batches_done, self._skip = 0, skip
                raise
        self._first_row += self._num_rows
        self.epoch, self.batches_done = self.epoch + 1, 0
        self.is_last = self.is_at_empty = False

    @property
    def seen(self) -> str:
        """Which batch of a stream was the last to be looked at, and a digest of it; else empty."""
        return "" if self._fetcher is not None else self._digest

    def state(self) -> LoaderStanding:
        """Return where the loader stands."""
        return LoaderStanding(
            epoch=self.epoch,
            row=self._first_row,
            batches=self._skip or self.batches_done,
            order=self._digest,
            generators={name: to_text(state) for name, state in self._before.items()},
        )

    def set_state(self, state: LoaderStanding) -> None:
        """Stand where a loader stood, so that the next pass is the rest of that one.

        Raises:
            CheckpointError: a pass over this loader cannot stand there.
        """
        before = {name: from_text(text) for name, text in state.generators.items()}
        if self._fetcher is not None and state.batches:
            needed = {"draws", *_generators(self.plain)}
            if {*before} != needed or None in before.values():
                raise CheckpointError(
                    f"the loader stood at batch {state.batches} of a pass drawn from generators "
                    f"{sorted(before)}, and this one draws from {sorted(needed)}; make the same "
                    "DataLoader"
                )
            if state.batches > len(self.plain):
                raise CheckpointError(
                    f"the loader stood after batch {state.batches} of a pass, and this one has "
                    f"{len(self.plain)} batches; give the same samples in batches of the same size"
                )
        self.epoch, self._skip = state.epoch, state.batches
        self._first_row, self._digest = state.row, state.order
        self.batches_done = 0
        self._before = {name: each for name, each in before.items() if each is not None}

    def _of_dataset(self, fetcher: _Fetcher) -> Iterator[_Fetched]:
        first = self.batches_done
        order = self._order(Draws(self._before["draws"]) if first else self._draws)
        ends = list(itertools.accumulate(map(len, order)))
        owns = [self._share(end - len(batch), end) for batch, end in zip(order, ends, strict=True)]
        self._num_rows = ends[-1] if ends else 0
        wanted = [
            # A sample is fetched for a share without rows too: it tells what a batch is made of.
            [batch[at - end] for piece in own for at in piece] or batch[-1:]
            for batch, own, end in zip(order, owns, ends, strict=True)
        ]
        with Draws(self._before["draws"]).in_place():
            # Workers of other ranks draw apart from those of the first.
            skip = self._comm.coord("data")
            fetched = fetcher.iterate(wanted[first:], self._before.get("0"), skip)
        for number, rows in enumerate(fetched, first):
            own = owns[number]
            rows = rows if any(own) or self._has_spares else _no_rows(rows)
            yield _Fetched(rows, own, number == len(order) - 1, len(order[number]))

    def _order(self, draws: Draws) -> list[list[Any]]:
        """Draw the samples of each batch of a pass, as the plain loader would."""
        sampler = cast(Any, self.plain.batch_sampler)
        generators = _generators(self.plain)
        with draws.in_place():
            for name, generator in generators.items() if self.batches_done else ():
                generator.set_state(self._before[name])
            self._before = {"draws": torch.get_rng_state()}
            self._before |= {name: each.get_state() for name, each in generators.items()}
            length = len(sampler)
            batches = iter(sampler)  # one that draws at once does so before the plain loader's seed
            # By which that seeds its workers; those that stay have theirs.
            if not (self.plain.persistent_workers and (self.epoch or self.num_begun > 1)):
                torch.empty((), dtype=torch.int64).random_(generator=self.plain.generator)
            order = [list(batch) for batch in itertools.islice(batches, length + 1)]
        if len(order) > length:
            raise DataError(
                f"{type(sampler).__name__} gives more than the {length} batches that its __len__ "
                "says; correct its __len__"
            )
        self._check(order)
        return order

    def _check(self, order: list[list[Any]]) -> None:
        """Refuse an order that is not that of all ranks, or of the pass that is gone on with."""
        digest = hashlib.blake2b(repr(order).encode(), digest_size=16).hexdigest()
        if len(set(gather_objects(digest))) > 1:
            raise DataError(
                f"{type(self.plain.sampler).__name__} draws another order on each rank: their "
                "datasets have unlike lengths, or it draws from something else than torch's "
                "generator or one with a seed that the DataLoader has"
            )
        if self.batches_done and digest != self._digest:
            raise DataError(
                f"{type(self.plain.sampler).__name__} draws another order than in the pass that is "
                "gone on with: the number of samples or the batch size is another, or it draws "
                "from something else than torch's generator or that of the DataLoader"
            )
        self._digest = digest

    def _of_stream(self) -> Iterator[_Fetched]:
        if self.batches_done and "draws" in self._before:
            self._draws.state = self._before["draws"]
        with self._draws.in_place():
            self._before = {"draws": torch.get_rng_state()}
            stream = iter(self.plain)
        end, was, skipped = 0, self._digest, self.batches_done
        batch = self._next_of(stream)
        if self.num_begun == 1:
            self._compare_streams(batch)
        for number in itertools.count(1):
            if batch is None:
                break
            following = self._next_of(stream)
            begin, end = end, end + count_rows(batch)
            own = self._share(begin, end)
            is_skipped = number <= skipped
            if _is_sampled(number) or following is None:
                self._digest = f"batch {number}, {_digest(batch)}"
            if is_skipped and was.startswith(f"batch {number},") and was != self._digest:
                raise DataError(
                    f"{type(self.plain.dataset).__name__} gives another stream than in the pass "
                    "that is gone on with; draw from torch's generator alone, or from one that is "
                    "seeded in __iter__"
                )
            if not is_skipped:
                places = [at - begin for piece in own for at in piece]
                here = torch.tensor(places or [0] * self._has_spares).long()
                rows = map_batch(batch, lambda t, here=here: t[here.to(t.device)])
                yield _Fetched(rows, own, following is None, end - begin)
            batch = following
        self._num_rows = end

    def _next_of(self, stream: Iterator[Any]) -> Any:
        """Return the next batch of a stream, which draws what it shuffles by as it goes."""
        if self.plain.num_workers:
            return next(stream, None)
        with self._draws.in_place():
            return next(stream, None)

    def _compare_streams(self, batch: Any) -> None:
        """Warn of streams of which each rank has another first batch."""
        if len(set(gather_objects(_digest(batch)))) > 1:
            self.warn_of_streams("begins with")

    def warn_of_streams(self, how: str = "gives") -> None:
        """Warn, on the first data rank, that each rank has another stream."""
        if self._comm.coord("data") == 0:
            warnings.warn(
                f"{type(self.plain.dataset).__name__} {how} another batch on each rank; each "
                "reads all of the stream and keeps its rows, so samples are lost if it deals them "
                "out itself, or splits at random: give the same stream on every rank",
                stacklevel=3,
            )

    def _share(self, begin: int, end: int) -> list[range]:
        """Return this rank's rows of each piece of a batch that has those from `begin` to `end`."""
        rank, num_ranks = self._comm.coord("data"), self._comm.size("data")
        rows = range(begin, end)
        return [_part(_part(rows, at, self._pieces), rank, num_ranks) for at in range(self._pieces)]


def _is_sampled(number: int) -> bool:
    """Return whether a batch of a stream is compared: the 1st, 2nd, 4th ..., and each 64th."""
    return number & (number - 1) == 0 or number % 64 == 0


def _digest(batch: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in [] if batch is None else tensors_of(batch):
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _part(rows: range, number: int, num_parts: int) -> range:
    """Return one of parts of nearly the same size, the larger ones first."""
    least, more = divmod(len(rows), num_parts)
    first = number * least + min(number, more)
    return rows[first : first + least + (number < more)]


class _Fetcher:
    """A DataLoader like a plain one, told which samples to fetch for each batch."""

    def __init__(self, plain: DataLoader[Any]) -> None:
        self._batches: Sequence[list[Any]] = ()
        self._generator = None if plain.generator is None else torch.Generator()
        has_workers = plain.num_workers > 0
        self._loader: DataLoader[Any] = DataLoader(
            plain.dataset,
            batch_sampler=cast(Any, self),
            num_workers=plain.num_workers,
            collate_fn=plain.collate_fn,
            pin_memory=plain.pin_memory,
            timeout=plain.timeout,
            worker_init_fn=plain.worker_init_fn,
            multiprocessing_context=plain.multiprocessing_context if has_workers else None,
            generator=self._generator,
            prefetch_factor=plain.prefetch_factor,
            persistent_workers=plain.persistent_workers,
        )

    def iterate(
        self, batches: Sequence[list[Any]], state: Tensor | None, skip: int
    ) -> Iterator[Any]:
        """Begin to fetch.

        Args:
            batches: the samples of each.
            state: of the plain loader's own generator.
            skip: draws to leave out before the one by which workers are seeded.
        """
        self._batches = batches
        if self._generator is not None and state is not None:
            self._generator.set_state(state)
        for _ in range(skip):
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        return iter(self._loader)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _generators(plain: DataLoader[Any]) -> dict[str, torch.Generator]:
    """Return the generators of a loader and its samplers, by a number; "0" is the loader's own."""
    inner = getattr(plain.batch_sampler, "sampler", None)
    found: dict[str, torch.Generator] = {}
    for number, holder in enumerate((plain, plain.sampler, plain.batch_sampler, inner)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found.values():
            found[str(number)] = generator
    return found


def _no_rows(batch: Any) -> Any:
    """Return a batch of one row without it.

    Raises:
        ConfigError: its form does not say what a row is.
    """
    if isinstance(batch, Tensor) and batch.ndim and len(batch) == 1:
        return batch[:0]
    if batch is None or (isinstance(batch, list | tuple) and _is_column(batch)):
        return None if batch is None else []
    if isinstance(batch, list | tuple) and batch:
        parts = cast("Sequence[Any]", batch)
        # Named tuples take their fields one by one.
        cut = [_no_rows(part) for part in parts]
        return type(batch)(*cut) if hasattr(batch, "_fields") else type(batch)(cut)
    if isinstance(batch, Mapping):
        return {key: _no_rows(part) for key, part in cast("Mapping[Any, Any]", batch).items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = {f.name: _no_rows(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **parts)
    what = f"a tensor of shape {list(batch.shape)}" if isinstance(batch, Tensor) else repr(batch)
    raise ConfigError(
        f"a rank has no row of the last batch, and a batch of one sample holds {what}, which does "
        "not say what a row is; have collate_fn put samples first, or say drop_last=True"
    )


def _is_column(batch: Any) -> bool:
    """Return whether a list has one text or number for each of its one row."""
    return len(batch) == 1 and isinstance(batch[0], str | int | float)


def _check(plain: DataLoader[Any], num_ranks: int) -> None:
    if type(plain).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"prepare: {type(plain).__name__} has an __iter__ of its own, which would not run; "
            "give a DataLoader, and do that work in the dataset or in collate_fn"
        )
    if plain.batch_size is None and plain.batch_sampler is None:
        raise ConfigError(
            "prepare: the DataLoader has batch_size=None, so it makes no batches whose rows could "
            "be dealt out; give it the global batch_size"
        )
    if isinstance(plain.sampler, DistributedSampler):
        raise ConfigError(
            "prepare: the DataLoader has a DistributedSampler, but prepare deals the batches out "
            "to the ranks itself; give DataLoader(..., shuffle=True) and the global batch_size"
        )
    if plain.batch_size is not None and plain.batch_size < num_ranks:
        raise ConfigError(
            f"prepare: batch_size is {plain.batch_size}, the global batch, which {num_ranks} data "
            f"ranks share, so that some would never have a row; give at least {num_ranks}"
        )
    if isinstance(plain.dataset, IterableDataset):
        return
    try:
        len(plain)
    except TypeError as error:
        raise DataError(
            f"prepare: {type(plain.dataset).__name__}, or the loader's sampler, has no length, so "
            "no rank could tell where a pass ends; give it __len__, or make the dataset a "
            "torch.utils.data.IterableDataset"
        ) from error
