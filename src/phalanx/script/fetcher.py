"""A DataLoader like a plain one, told which samples to fetch for each batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader


class Fetcher:
    """Fetches this rank's samples by the workers, and with the settings, of a plain loader."""

    def __init__(self, plain: DataLoader[Any]) -> None:
        self._batches: Iterable[list[Any]] = ()
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
        self, batches: Iterable[list[Any]], state: Tensor | None, skip: int
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
