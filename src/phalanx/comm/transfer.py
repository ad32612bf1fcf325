"""What runs the collectives of one group of ranks: the interface, and a collective under way.

`exchange.ProcessGroupEngine` runs them over a process group of torch (gloo, NCCL), and
`shared_memory.SharedMemory` through memory that the ranks of one host share.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from phalanx.comm.ranges import named
from phalanx.comm.waits import waiting


class CommEngine(ABC):
    """Runs the collectives of one group.

    Attributes:
        group: its ranks, as torch knows them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @abstractmethod
    def begin(
        self, op: str, out: Tensor, given: Tensor, option: Any = None, *, is_spent: bool = False
    ) -> dist.Work | None:
        """Begin a collective, and return what to wait for; None if it has ended.

        Args:
            op: its name, as in the table of comm.comm.
            out: what it fills, contiguous; of an all_gather perhaps [N, *given.shape] of any
                strides.
            given: what it reads, contiguous; perhaps `out` itself. Of a reduce_scatter perhaps
                [N, *out.shape] of any strides without gaps, the same on all ranks.
            option: the reduction of an all_reduce, or a number in the group: the partner of a swap,
                a send or a recv, where a broadcast starts or a reduce ends.
            is_spent: nobody writes to `given` again, before it is freed.
        """

    def empty(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor from which this engine sends without a copy of its own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def run(
        self, op: str, out: Tensor, given: Tensor, option: Any = None, is_spent: bool = False
    ) -> Transfer:
        """Do what `begin` says, within the op of the dispatcher that `begin` calls."""
        raise NotImplementedError(f"{type(self).__name__} runs no {op}")


LIBRARY: Final = torch.library.Library("phalanx_comm", "FRAGMENT")
"""The ops of the dispatcher that are collectives, for whoever watches them (comm.calls)."""

ENGINES: Final[weakref.WeakValueDictionary[int, CommEngine]] = weakref.WeakValueDictionary()
"""What runs these ops where not the process group does, by its number; comm.meshes holds it."""


class Transfer(dist.Work):
    """A collective under way; its tensors must be left alone until `wait`.

    Attributes:
        is_waited_for: whether `wait` has returned.
        tensor: what it fills, for whoever measures waits; None if that is not known.
    """

    def __init__(
        self, works: Sequence[dist.Work | None], complete: Callable[[], None] | None = None
    ) -> None:
        """Take over sends and receives that have begun.

        Args:
            works: of gloo.
            complete: called once all has been sent and received.
        """
        super().__init__()
        self.is_waited_for = False
        self.tensor: Tensor | None = None
        self._works = list(works)
        self._complete = complete

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the output is there; the timeout of the job holds."""
        works, self._works = self._works, []
        if works:
            with named("wait exchange"), waiting(self.tensor):
                for work in works:
                    assert work is not None  # None is for ranks outside the group
                    work.wait()
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()
        self.is_waited_for = True
        return True


_BEGUN: dict[int, Transfer] = {}
"""What the ops of the dispatcher have begun, by the number that they return."""

_NUMBERS = itertools.count()


def begun(transfer: Transfer) -> int:
    """Return a number for a transfer, as an op of the dispatcher can."""
    number = next(_NUMBERS)
    _BEGUN[number] = transfer
    return number


def taken(number: int) -> Transfer:
    """Return the transfer that an op has begun; only once."""
    return _BEGUN.pop(number)
