r"""Random numbers that are equal on all ranks: the rows of the ranks would get the same noise.

A loop that draws by `torch.randn` draws from its rank's own generator, and ranks begin with one
seed. The first rank looks at the states of its generators, after the first batches and then after
some:

    batch read   forward, draws of the loop   backward   ...   next batch read
       mark                                     look           mark
                  \__ any draw shows here __/   mark    \__ and here __/ look
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.comm.comm import Comm
from phalanx.script.guards.replicas import is_compared


class DrawGuard:
    """Warns once of draws from torch's own generators in a step."""

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
        is_due = self._is_on and is_compared(self._num_marks // 2)  # two marks a batch
        # Else states of a batch whose backward never came, as in an evaluation, would be compared.
        self._states = self._own_states() if is_due else []
        self._num_before = self._num_tickets()

    def look(self) -> None:
        """Warn once if the loop has drawn numbers since the last `mark`."""
        states, self._states = self._states, []
        if not states:
            return
        # The dropouts of the model have drawn their tickets, which are no mistake.
        generator = torch.Generator()
        generator.set_state(states[0])
        for _ in range(self._num_tickets() - self._num_before):
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        if all(map(torch.equal, [generator.get_state(), *states[1:]], self._own_states())):
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
