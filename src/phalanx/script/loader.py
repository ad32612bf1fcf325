"""A DataLoader whose batches are split over the data ranks, in the order of one process.

    DataLoader            global batch 0: rows 4 1 7 2 0        global batch 1: rows 5 3 6
    rank 0 of 2                           4 1 7                                  5 3
    rank 1 of 2                           2 0                                    6

A batch of the plain loader is the global batch, for any number of ranks. Each rank takes a range of
its rows, as even as possible. With torch's default collate function a rank fetches only these rows.
Another `collate_fn` gets the whole batch on each rank, as on one process, because its result for a
row may depend on the other rows: it may pad each row to the longest of the batch.

A loader with a DistributedSampler yields on each rank what torch's loader yields there, and its
batch_size counts rows of one rank.

A rank without rows gets a batch of 0 rows, so that every rank takes the same steps and each row
counts once. Many models fail on 0 rows, so the model computes a row of another rank instead, and
its outputs lose that row (`compute_spare_row`).

Module `order` defines the order of the samples, module `deal` the rows of each rank.
"""

from __future__ import annotations

import copy
import itertools
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from phalanx.checkpoint.encoding import from_text, to_text
from phalanx.checkpoint.untrusted import decode
from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.data.rows import count_rows, map_tensors, take_rows, tensors_of
from phalanx.errors import CheckpointError, ConfigError, DataError, ScriptError
from phalanx.models.attention import to_device
from phalanx.script.checksums import digest_of
from phalanx.script.deal import shard_rows, without_rows
from phalanx.script.order import (
    AT_FIRST_BATCH,
    Fetcher,
    JobGenerator,
    PassDraws,
    generators_of,
)


@dataclass(frozen=True)
class _Position:
    """The position of a data loader: its epoch, and the batches yielded in that epoch.

    Attributes:
        epoch: completed passes over the loader.
        row: rows of all previous passes together.
        batches: batches yielded in the current pass.
        order: digest of the samples of each batch of the current pass; for a stream, number and
            digest of the last digested batch.
        generators: states from which that order was drawn, or the next order if `batches` is 0, by
            generator, in hexadecimal digits.
    """

    epoch: int
    row: int
    batches: int
    order: str
    generators: dict[str, str]


class _Fetched(NamedTuple):
    """This rank's rows of a global batch, before they are moved to the device."""

    rows: Any
    own: list[range]
    of_batch: range
    is_last: bool


_LOADERS: weakref.WeakSet[RankLoader] = weakref.WeakSet()


def has_empty_batch() -> bool:
    """Return whether the last batch of some loader in this process has no row on this rank."""
    return any(loader.has_no_rows for loader in _LOADERS)


class RankLoader:
    """Iterates over this rank's rows of a DataLoader's batches; has its length and attributes.

    "Last batch" below is the batch that was yielded last.

    Attributes:
        plain: the DataLoader, whose batches are the global batches.
        epoch: number of passes that have ended.
        num_begun: number of passes that have begun.
        batches_done: batches yielded in the current pass.
        is_last: whether the last batch ends its pass.
        rows: positions of this rank's rows of the last batch in the order of all samples, counted
            over all passes; int64 on this rank's device.
        has_no_rows: whether the last batch has no row on this rank.
        spares: tensors of the last batch, if it has no row on this rank, each with the tensor of
            one row of another rank; empty else.
        is_used: whether a backward has used a batch of the current pass; set by `Reading`.
        own_rows: this rank's rows of the last batch, as positions in the batch; of the first piece.
        piece_sizes: number of this rank's rows in each piece of the last batch.
        num_batch_rows: rows of the last batch on all ranks.
        before_batch: called before a batch is fetched.
        between_batches: called between two batches of a pass, before the second is fetched.
    """

    def __init__(
        self,
        plain: DataLoader[Any],
        comm: Comm,
        generator: JobGenerator,
        on_batch: Callable[[RankLoader, Any], None] | None = None,
        pieces: int = 1,
        has_spares: bool = False,
        deals_unevenly: bool = False,
    ) -> None:
        """Split the batches over the data ranks of `comm`; call `on_batch` with each batch.

        A batch is cut into `pieces`, and each rank takes its rows of each piece. So a microbatch
        has the same rows, over all ranks, as on one process. If `has_spares`, a rank without rows
        of a batch, see `has_no_rows`, gets one row of another rank. If `deals_unevenly`, the second
        batch shows what an uneven batch of the data would, see module `deal`.

        Raises:
            ConfigError: the loader makes no batches, splits them itself, or has fewer rows in a
                batch than there are data ranks.
            DataError: its dataset has no length.
        """
        _check(plain, comm.size("data"))
        self.plain = plain
        self.epoch = self.batches_done = 0
        self.is_last = self.is_used = self.has_no_rows = False
        self.rows = torch.zeros(0, dtype=torch.int64)
        self.spares: list[tuple[Tensor, Tensor]] = []
        self.piece_sizes: list[int] = []
        self.num_batch_rows = 0
        self._has_spares = has_spares
        self._comm = comm
        self._generator = generator
        self._on_batch, self._deals_unevenly = on_batch, deals_unevenly
        self.before_batch: Callable[[], None] = lambda: None
        self.between_batches: Callable[[], None] = lambda: None
        self._pieces = pieces
        self._first_row = self._num_rows = 0
        self.own_rows = range(0)
        self._before: dict[str, Tensor] = {}
        self._skip = self.num_begun = 0
        self._digest = ""
        self._fetcher = None
        _LOADERS.add(self)
        self._is_whole = False
        if not isinstance(plain.dataset, IterableDataset):
            self._is_whole = comm.size("data") > 1 and plain.collate_fn is not default_collate
            collate = plain.collate_fn
            if self._is_whole:
                place = (comm.coord("data"), comm.size("data"), pieces)
                collate = CollateWhole(plain.collate_fn, place, deals_unevenly)
            self._fetcher = Fetcher(plain, collate)

    def __len__(self) -> int:
        return len(self.plain)

    def __getattr__(self, name: str) -> Any:
        if "plain" not in self.__dict__:  # during copy or unpickling
            raise AttributeError(name)
        return getattr(self.plain, name)

    def __iter__(self) -> Iterator[Any]:
        # Draw here what the plain loader draws in `iter`, before any batch is read, because `zip`
        # calls `iter` on all its loaders first.
        states = self._before if self._skip else {}
        if self._fetcher is not None:
            # Persistent workers are seeded in the first pass only.
            stay = self.plain.persistent_workers and (self.epoch or self.num_begun)
            drawing = PassDraws(self.plain, self._generator, not stay, states)
            return self._pass(self._of_dataset(self._fetcher, drawing))
        if "draws" in states:
            self._generator.state = states["draws"]
        with self._generator.as_torch_generator():
            before = {"draws": torch.get_rng_state()}
            return self._pass(self._of_stream(iter(self.plain), before))

    def _pass(self, batches: Iterator[_Fetched]) -> Iterator[Any]:
        if self.batches_done:  # the previous pass was left early
            self.epoch += 1
        skip = self._skip
        self.batches_done, self._skip, self.is_used = skip, 0, False
        self.num_begun += 1
        number = self.num_begun
        self.before_batch()
        for batch, own, of_batch, is_last in batches:
            if number != self.num_begun:
                raise ScriptError(
                    "a pass over the loader continues after another pass over it has begun; "
                    "prepare one DataLoader for each pass"
                )
            self.is_last = is_last
            self.batches_done += 1
            self.num_batch_rows = len(of_batch)
            self.own_rows = range(own[0].start - of_batch.start, own[0].stop - of_batch.start)
            self.piece_sizes = [len(piece) for piece in own]
            rows = self._first_row + torch.tensor([at for piece in own for at in piece]).long()
            self.rows = to_device(rows, self._comm.device)
            self.has_no_rows = not len(self.rows)
            given = map_tensors(batch, lambda t: t.to(self._comm.device, non_blocking=True))
            self.spares = []
            if self.has_no_rows and not self._has_spares:
                spare, given = given, without_rows(given)
                self.spares = list(zip(tensors_of(given), tensors_of(spare), strict=True))
            if self._on_batch is not None:
                self._on_batch(self, given)
            try:
                yield given
            except GeneratorExit:
                # If the script only looked at a batch, the pass starts again.
                if not self.is_used and number == self.num_begun:
                    self.batches_done, self._skip = 0, skip
                raise
            if not is_last:
                self.between_batches()
            self.before_batch()
        self._first_row += self._num_rows
        self.epoch, self.batches_done = self.epoch + 1, 0
        self.is_last = self.has_no_rows = False

    @property
    def stream_digest(self) -> str:
        """Number and digest of the last digested batch of a stream; empty for other datasets."""
        return "" if self._fetcher is not None else self._digest

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of the loader's position, for a checkpoint."""
        batches, states = self._skip or self.batches_done, self._before
        if not batches:  # the next pass draws from the current state of the loader's generators
            states = {name: each.get_state() for name, each in generators_of(self.plain).items()}
        generators = {name: to_text(state) for name, state in states.items()}
        return asdict(_Position(self.epoch, self._first_row, batches, self._digest, generators))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a position, so that the next pass is the rest of the saved pass.

        Raises:
            CheckpointError: the loader has other generators, or too few batches for the position.
        """
        state: _Position = decode(_Position, saved, "a loader's position")
        before = {name: from_text(text) for name, text in state.generators.items()}
        if self._fetcher is not None and state.batches:
            needed = {"draws", *generators_of(self.plain)}
            found = {name.removeprefix(AT_FIRST_BATCH) for name in before}
            if found != needed or "draws" not in before or None in before.values():
                raise CheckpointError(
                    f"the saved position is batch {state.batches} of a pass drawn from generators "
                    f"{sorted(found)}, but this loader draws from {sorted(needed)}; make the same "
                    "DataLoader"
                )
            if state.batches > len(self.plain):
                raise CheckpointError(
                    f"the saved position is after batch {state.batches} of a pass, but this loader "
                    f"has {len(self.plain)} batches; give the same samples in batches of the same "
                    "size"
                )
        self.epoch, self._skip = state.epoch, state.batches
        self._first_row, self._digest = state.row, state.order
        self.batches_done = 0
        self._before = {name: each for name, each in before.items() if each is not None}
        if not state.batches:
            for name, generator in generators_of(self.plain).items():
                if name in self._before:
                    generator.set_state(self._before[name])

    def _of_dataset(self, fetcher: Fetcher, drawing: PassDraws) -> Iterator[_Fetched]:
        first = self.batches_done
        order = drawing.order(self._digest if first else "")
        self._before, self._digest = drawing.states, order.digest
        self._num_rows = order.num_rows
        uneven = None
        if self._deals_unevenly and not self._first_row and len(order) > 1:
            rests = [len(order.rows(each)) % self._comm.size("data") for each in range(len(order))]
            uneven = 1 if any(rests) and not rests[1] else None

        def wanted(number: int) -> list[Any]:  # the samples to fetch for a batch
            rows = order.rows(number)
            if self._is_whole:
                return order.samples(rows)
            pieces = self._own(rows, is_uneven=number == uneven)
            own = [sample for piece in pieces for sample in order.samples(piece)]
            # A rank without rows fetches one sample, which has the structure and dtypes of a batch.
            return own or order.samples(rows[-1:])

        with JobGenerator(self._before["draws"]).as_torch_generator():
            # Skipped draws give the workers of each data rank another seed, unless they compute
            # the same whole batches.
            skip = 0 if self._is_whole else self._comm.coord("data")
            every = map(wanted, range(first, len(order)))
            fetched = fetcher.iterate(every, self._before.get("0"), skip)
        for number, rows in enumerate(fetched, first):
            of_batch, is_uneven = order.rows(number), number == uneven
            batch = rows[is_uneven] if self._is_whole else rows
            own = self._own(of_batch, is_uneven=is_uneven)
            yield _Fetched(batch, own, of_batch, number == len(order) - 1)

    def _of_stream(self, stream: Iterator[Any], before: dict[str, Tensor]) -> Iterator[_Fetched]:
        self._before = before
        end, was, skipped = 0, self._digest, self.batches_done
        batch = self._next_of(stream)
        if self.num_begun == 1 and len(set(gather_objects(digest_of(tensors_of(batch))))) > 1:
            self.warn_of_streams("begins with")
        for number in itertools.count(1):
            if batch is None:
                break
            following = self._next_of(stream)
            of_batch = range(end, end + count_rows(batch))
            end = of_batch.stop
            # A stream does not say whether its last batch is smaller.
            is_uneven = self._deals_unevenly and not (self.plain.drop_last or self._first_row)
            own = self._own(of_batch, is_uneven=is_uneven and number == 2)
            is_skipped = number <= skipped
            # Digests are taken of batches 1, 2, 4, 8, ..., of each 64th batch, and of the last.
            if number & (number - 1) == 0 or number % 64 == 0 or following is None:
                self._digest = f"batch {number}, {digest_of(tensors_of(batch))}"
            if is_skipped and was.startswith(f"batch {number},") and was != self._digest:
                raise DataError(
                    f"{type(self.plain.dataset).__name__} yields a different stream than in the "
                    "pass that is resumed; draw only from torch's generator, or from a generator "
                    "that is seeded in __iter__"
                )
            if not is_skipped:
                places = [at - of_batch.start for piece in own for at in piece]
                rows = take_rows(batch, torch.tensor(places or [0]))
                yield _Fetched(rows, own, of_batch, following is None)
            batch = following
        self._num_rows = end

    def _next_of(self, stream: Iterator[Any]) -> Any:
        """Return the next batch of a stream; without workers, draw from the job's generator."""
        if self.plain.num_workers:
            return next(stream, None)
        with self._generator.as_torch_generator():
            return next(stream, None)

    def warn_of_streams(self, how: str = "yields") -> None:
        """Warn, on the first data rank, that the ranks have different streams."""
        if self._comm.coord("data") == 0:
            warnings.warn(
                f"{type(self.plain.dataset).__name__} {how} a different batch on each rank; each "
                "rank reads the entire stream and keeps its own rows, so samples are lost if the "
                "dataset splits the stream over the ranks itself, or at random: yield the same "
                "stream on every rank",
                stacklevel=3,
            )

    def _own(self, rows: range, *, is_uneven: bool) -> list[range]:
        """Return this rank's rows of each piece of the batch with the rows `rows`."""
        ranks = self._comm.coord("data"), self._comm.size("data")
        return shard_rows(rows, *ranks, self._pieces, is_uneven=is_uneven)


class CollateWhole:
    """A collate function that collates the samples of all ranks, and returns this rank's rows.

    Samples that collate to a batch without rows in the first dimension, such as a graph, cannot be
    cut: of them this rank's are collated alone.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        place: tuple[int, int, int],
        deals_unevenly: bool,
    ) -> None:
        """`place` are rank, ranks and pieces, see `shard_rows`."""
        self._collate, self._place = collate, place
        self._deals = (False, True) if deals_unevenly else (False,)
        self._has_rows: bool | None = None

    def __call__(self, samples: list[Any]) -> list[Any]:
        """Return this rank's rows of the batch of `samples`, in each deal that may be needed.

        If the rank has no row, it gets one row.
        """
        if self._has_rows is None:  # one sample, because a first dimension of time has any size
            states = random.getstate(), np.random.get_state()
            with torch.random.fork_rng(devices=[]):
                self._has_rows = _num_rows(self._collate(copy.deepcopy(samples[:1]))) == 1
            random.setstate(states[0])
            np.random.set_state(states[1])
        owns: list[list[int]] = []
        for is_uneven in self._deals:
            pieces = shard_rows(range(len(samples)), *self._place, is_uneven=is_uneven)
            owns.append([at for piece in pieces for at in piece] or [len(samples) - 1])
        if self._has_rows and _num_rows(batch := self._collate(samples)) == len(samples):
            return [take_rows(batch, torch.tensor(own)) for own in owns]
        return [self._collate([samples[at] for at in own]) for own in owns]


def _num_rows(batch: Any) -> int:
    """Return the number of rows of a batch, 0 if its tensors have different numbers or none."""
    try:
        return count_rows(batch)
    except ConfigError:
        return 0


def compute_spare_row(model: nn.Module, last: Callable[[], RankLoader | None]) -> None:
    """Let a model compute a row of another rank in place of 0 rows, and return 0 rows of it.

    So each rank runs the same blocks, and a gradient gets nothing from the row. `last` returns the
    loader of the last batch.
    """
    is_replaced = False

    def row_of(tensor: Tensor) -> Tensor:
        nonlocal is_replaced
        if not tensor.ndim or len(tensor):
            return tensor
        is_replaced = True
        spares = [] if (loader := last()) is None else loader.spares
        known = (spare for given, spare in spares if given is tensor)
        # Ones in place of what the script has made of the batch: an index, a mask that keeps all.
        row = next(known, tensor.new_ones((1, *tensor.shape[1:])))
        return torch.cat([tensor, row]) if tensor.requires_grad else row  # with its graph

    def before(_model: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal is_replaced
        is_replaced = False
        given = map_tensors((args, kwargs), row_of)
        return given if is_replaced else None

    def after(_model: nn.Module, _args: Any, output: Any) -> Any:
        if not is_replaced:
            return output
        return map_tensors(output, lambda t: t[:0] if t.ndim and len(t) == 1 else t)

    model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    model.register_forward_hook(after, prepend=True)


def _check(plain: DataLoader[Any], num_ranks: int) -> None:
    if type(plain).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"prepare: {type(plain).__name__} overrides __iter__, which would not be called; give "
            "a plain DataLoader, and do that work in the dataset or in collate_fn"
        )
    if plain.batch_size is None and plain.batch_sampler is None:
        raise ConfigError(
            "prepare: the DataLoader has batch_size=None, so it makes no batches whose rows could "
            "be split over the ranks; give it the global batch_size"
        )
    if isinstance(plain.sampler, DistributedSampler):
        if plain.sampler.num_replicas != num_ranks:
            raise ConfigError(
                f"prepare: the DistributedSampler has num_replicas={plain.sampler.num_replicas}, "
                f"and {num_ranks} data ranks share the samples; give num_replicas={num_ranks}, or "
                "DataLoader(..., shuffle=True) and the global batch_size"
            )
    elif plain.batch_size is not None and plain.batch_size < num_ranks:
        raise ConfigError(
            f"prepare: batch_size is {plain.batch_size}, the global batch, which is split over "
            f"{num_ranks} data ranks, so some would never have a row; give at least {num_ranks}"
        )
    if isinstance(plain.dataset, IterableDataset):
        return
    try:
        len(plain)
    except TypeError as error:
        raise DataError(
            f"prepare: {type(plain.dataset).__name__}, or the loader's sampler, has no length, so "
            "the end of a pass is unknown; give it __len__, or make the dataset a "
            "torch.utils.data.IterableDataset"
        ) from error
