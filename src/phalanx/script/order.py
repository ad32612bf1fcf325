"""The order of the samples in a pass over a DataLoader, drawn as the plain DataLoader draws it.

    iter(loader)        makes the sampler's iterator, and draws the seed of the workers
    the first batch     a shuffling sampler draws; with workers, it already draws in `iter`

Samplers draw from a generator that all loaders of a job share (`JobGenerator`). It starts with the
state that torch's own generator has on rank 0 when a loader or `run.draw` first uses it. So the
order is the plain script's order if only loaders draw there, and it never depends on draws of a
model or a transform. The generator states at both moments determine a pass; checkpoints store them.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from phalanx.checkpoint.encoding import from_text, to_text
from phalanx.comm.together import broadcast_object, gather_objects
from phalanx.errors import DataError

AT_FIRST_BATCH: Final = "first batch: "
"""Prefix of the names of generator states at the moment when the first batch is read."""


class JobGenerator:
    """The generator that the loaders of a job draw from instead of torch's own.

    Attributes:
        state: as from `torch.get_rng_state`, equal on all ranks; None before the first use.
    """

    def __init__(self, state: Tensor | None = None) -> None:
        self.state = state

    def state_dict(self) -> str:
        """Return the state as hexadecimal text."""
        return to_text(self.state)

    def load_state_dict(self, text: str) -> None:
        """Restore a result of `state_dict`."""
        self.state = from_text(text)

    @contextmanager
    def as_torch_generator(self) -> Generator[None]:
        """Set torch's CPU generator to this state inside the context, and restore it after."""
        if self.state is None:
            self.state = cast(Tensor, broadcast_object(torch.get_rng_state()))
        theirs = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
            self.state = torch.get_rng_state()
        finally:
            torch.set_rng_state(theirs)


class PassOrder:
    """The samples of each global batch in a pass; integer indices take 8 bytes each."""

    def __init__(self, batches: Iterable[Iterable[Any]]) -> None:
        self._samples: array[int] | list[Any] = array("q")
        self._ends = array("q", [0])
        for batch in batches:
            samples = list(batch)
            # Samples of other types, such as integer tensors, are stored unconverted in a list.
            if isinstance(self._samples, array) and not {*map(type, samples)} <= {int}:
                self._samples = self._samples.tolist()
            if isinstance(self._samples, array):
                self._samples.fromlist(samples)
            else:
                self._samples += samples
            self._ends.append(len(self._samples))
        digest = hashlib.blake2b(self._ends, digest_size=16)
        if isinstance(self._samples, array):
            digest.update(self._samples)
        else:
            for sample in self._samples:
                digest.update(f"{sample!r},".encode())
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._ends) - 1

    @property
    def num_rows(self) -> int:
        """Number of samples in all batches."""
        return self._ends[-1]

    def rows(self, number: int) -> range:
        """Return the positions in the pass of the rows of batch `number`."""
        return range(self._ends[number], self._ends[number + 1])

    def samples(self, rows: range) -> list[Any]:
        """Return the samples at consecutive positions in the pass."""
        return list(self._samples[rows.start : rows.stop])


def global_batches(plain: DataLoader[Any]) -> Iterator[Iterable[Any]]:
    """Iterate over the samples of each global batch of a loader.

    With a DistributedSampler these are the batches of all ranks, in rank order.
    """
    batches = cast(BatchSampler, plain.batch_sampler)
    if not isinstance(sampler := plain.sampler, DistributedSampler):
        return iter(batches)
    of_ranks: list[Iterable[list[Any]]] = []
    for rank in range(sampler.num_replicas):
        sampler, of_rank = copy.copy(sampler), copy.copy(batches)
        sampler.rank, of_rank.sampler = rank, sampler
        of_ranks.append(of_rank)
    return map(itertools.chain.from_iterable, zip(*of_ranks, strict=True))


class PassDraws:
    """The random draws of one pass over a DataLoader.

    Attributes:
        states: states of the generators at each moment, by the moment's prefix and a name.
    """

    def __init__(
        self,
        plain: DataLoader[Any],
        generator: JobGenerator,
        is_seeded: bool,
        states: Mapping[str, Tensor],
    ) -> None:
        """Draw what the plain loader draws in `iter`, with the workers' seed if `is_seeded`.

        `states` are the saved states of the pass to resume, else empty.
        """
        self.states = dict(states)
        self._plain = plain
        self._generator = JobGenerator(states["draws"]) if states else generator
        self._order: PassOrder | None = None
        with self._moment(""):
            self._length = len(cast(BatchSampler, plain.batch_sampler))
            self._batches = global_batches(plain)
            if is_seeded:
                torch.empty((), dtype=torch.int64).random_(generator=plain.generator)
        if plain.num_workers:  # workers fetch the first batches at once
            self._order = self._drawn()

    def order(self, digest: str) -> PassOrder:
        """Return the order of the pass; every rank calls this together before the first batch.

        Raises:
            DataError: ranks have different orders, the order has another digest than `digest`, or
                the sampler gives more batches than its length.
        """
        order = self._order = self._order or self._drawn()
        sampler = type(self._plain.sampler).__name__
        if len(set(gather_objects(order.digest))) > 1:
            raise DataError(
                f"{sampler} yields a different order on each rank: the ranks' datasets have "
                "different lengths, or it draws from a generator that is neither torch's nor a "
                "seeded generator of the DataLoader"
            )
        if digest not in ("", order.digest):
            raise DataError(
                f"{sampler} yields a different order than in the pass that is resumed: the number "
                "of samples or the batch size has changed, or it draws from a generator that is "
                "neither torch's nor the DataLoader's"
            )
        return order

    def _drawn(self) -> PassOrder:
        with self._moment(AT_FIRST_BATCH):
            order = PassOrder(itertools.islice(self._batches, self._length + 1))
        if len(order) > self._length:
            raise DataError(
                f"{type(self._plain.batch_sampler).__name__} yields more than the {self._length} "
                "batches that its __len__ returns; correct its __len__"
            )
        return order

    @contextmanager
    def _moment(self, name: str) -> Generator[None]:
        """Draw inside this context; record the generators' states, or set the resumed ones."""
        generators = generators_of(self._plain)
        with self._generator.as_torch_generator():
            if (state := self.states.get(f"{name}draws")) is not None:
                torch.set_rng_state(state)
            self.states[f"{name}draws"] = torch.get_rng_state()
            for number, generator in generators.items():
                if (state := self.states.get(name + number)) is not None:
                    generator.set_state(state)
                self.states[name + number] = generator.get_state()
            yield


def generators_of(plain: DataLoader[Any]) -> dict[str, torch.Generator]:
    """Return the generators of a loader and its samplers by number; "0" is the loader's own."""
    inner = getattr(plain.batch_sampler, "sampler", None)
    found: dict[str, torch.Generator] = {}
    for number, holder in enumerate((plain, plain.sampler, plain.batch_sampler, inner)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found.values():
            found[str(number)] = generator
    return found


class Fetcher:
    """Fetches this rank's samples, with as many workers and the settings of a plain loader."""

    def __init__(self, plain: DataLoader[Any], collate: Callable[[list[Any]], Any]) -> None:
        """Fetch as `plain` does, and collate the samples of a batch by `collate`."""
        self._batches: Iterable[list[Any]] = ()
        self._generator = None if plain.generator is None else torch.Generator()
        has_workers = plain.num_workers > 0
        self._loader: DataLoader[Any] = DataLoader(
            plain.dataset,
            batch_sampler=cast(Any, self),
            num_workers=plain.num_workers,
            collate_fn=collate,
            pin_memory=plain.pin_memory,
            timeout=plain.timeout,
            worker_init_fn=plain.worker_init_fn,
            multiprocessing_context=plain.multiprocessing_context if has_workers else None,
            generator=self._generator,
            prefetch_factor=plain.prefetch_factor,
            persistent_workers=plain.persistent_workers,
        )

    def iterate(
        self, batches: Iterable[list[Any]], state: Tensor | None, skip: int
    ) -> Iterator[Any]:
        """Start fetching `batches` of samples, with the loader's generator set to `state`.

        `skip` draws are discarded before the draw that seeds the workers.
        """
        self._batches = batches
        if self._generator is not None and state is not None:
            self._generator.set_state(state)
        for _ in range(skip):
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        return iter(self._loader)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._batches)
