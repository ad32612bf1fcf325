"""Random numbers for the rows of a batch: drawn as on one process, then split over the ranks.

    noise = torch.randn_like(x)                            equal numbers on all ranks with one seed
    noise = run.draw(lambda rows: torch.randn(rows, 8))    this rank's rows of one process's numbers

The loaders of a job and `run.draw` share a generator. At first use it copies the state of torch's
own generator on rank 0, so one process draws the same numbers in the same order. Other draws of a
loop come from each rank's own generator, and cause a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.comm import Comm
from phalanx.data.rows import map_batch
from phalanx.errors import ScriptError
from phalanx.script.checks import check_arguments
from phalanx.script.deal import shard_rows
from phalanx.script.loader import RankLoader
from phalanx.script.order import JobGenerator
from phalanx.script.replicas import is_compared


def draw_rows(
    make: Callable[[int], Any],
    generator: JobGenerator,
    loader: RankLoader | None,
    comm: Comm,
    num_rows: int | None,
) -> Any:
    """Return this rank's rows of the numbers that `make` draws for a batch, see `Run.draw`.

    `loader` yielded the last batch; it is None before the first batch. `num_rows` are the rows of
    all ranks, or None for the rows of the last batch.
    """
    if num_rows is not None:
        check_arguments("draw", rows=num_rows)
        (own,) = shard_rows(range(num_rows), comm.coord("data"), comm.size("data"), 1)
    elif loader is None:
        raise ScriptError(
            "draw: no batch of a prepared DataLoader has been read, so the number of rows is "
            "unknown; call run.draw inside the loop over batches, or give rows=, the rows of all "
            "ranks"
        )
    else:
        num_rows, own = loader.num_batch_rows, loader.own_rows
    with generator.as_torch_generator():
        whole = make(num_rows)

    def take(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            raise ScriptError(
                f"draw: the function returns a tensor on {tensor.device.type}, drawn by this "
                "rank's own generator there; draw on the CPU: run.draw moves the rows to "
                "run.device"
            )
        if tensor.ndim == 0 or len(tensor) != num_rows:
            raise ScriptError(
                f"draw: the function returns a tensor of shape {tuple(tensor.shape)}; expected "
                f"{num_rows} rows, the number that is passed to it: the rows of the batch on all "
                "ranks"
            )
        return tensor[own.start : own.stop].to(comm.device)

    return map_batch(whole, take)


class DrawWatch:
    """Detects, on the first rank, that a loop draws from torch's own generators in a step.

    It prevents equal numbers for the different rows of ranks. It looks in the first steps, and then
    in some: see `replicas.is_compared`.
    """

    def __init__(self, comm: Comm, num_tickets: Callable[[], int]) -> None:
        """Start; `num_tickets()` returns how many numbers the model's dropouts have drawn."""
        self._is_on = comm.size("data") > 1 and comm.coord("job") == 0
        self._device = comm.device
        self._num_tickets = num_tickets
        self._states: list[Tensor] = []
        self._num_before = self._num_marks = 0

    def mark(self) -> None:
        """Record the generator states, after a batch was read or a backward has ended."""
        self._num_marks += 1
        is_due = self._is_on and is_compared(self._num_marks // 2)  # two marks a step
        # Else states of a batch whose backward never came, as in an evaluation, would be compared.
        self._states = self._own_states() if is_due else []
        self._num_before = self._num_tickets()

    def look(self) -> None:
        """Warn once if the loop has drawn numbers since the last `mark`."""
        states, self._states = self._states, []
        if not states or all(map(torch.equal, self._expected(states), self._own_states())):
            return
        self._is_on = False
        warnings.warn(
            "since the last batch, or the last run.backward, numbers were drawn from this rank's "
            "own generator, as by torch.randn, torch.randint or Categorical.sample: ranks with one "
            "seed draw the same numbers for different rows, and one process draws different "
            "numbers; draw numbers for rows by run.draw(lambda rows: torch.randn(rows, ...)), and "
            "other numbers from a torch.Generator with a seed",
            stacklevel=4,
        )

    def stop(self) -> None:
        """Stop watching, because another warning has named the module that draws."""
        self._is_on, self._states = False, []

    def _own_states(self) -> list[Tensor]:
        of_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *of_device]

    def _expected(self, states: list[Tensor]) -> list[Tensor]:
        """Return `states` advanced by the draws of the model's dropouts since the last `mark`."""
        generator = torch.Generator()
        generator.set_state(states[0])
        for _ in range(self._num_tickets() - self._num_before):
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        return [generator.get_state(), *states[1:]]
