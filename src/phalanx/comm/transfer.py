"""The interface of engines, which run the collectives of one group, and of running collectives.

`exchange.ProcessGroupEngine` runs collectives over a torch process group (gloo, NCCL), and
`shared_memory.SharedMemory` through memory that the ranks on one host share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from phalanx.comm.calls import Call
from phalanx.comm.ranges import named
from phalanx.comm.row_counts import RowCounts
from phalanx.comm.waits import waiting

_OPTIONS: Final = {
    "all_reduce": "reduce_op",
    "broadcast": "root_rank",
    "reduce": "root_rank",
    "barrier": "option",
    "send": "dst",
    "recv": "src",
}
"""Collective of one tensor -> name of its option, as an argument of torch's operators."""


class CommEngine(ABC):
    """Runs the collectives of one group.

    Attributes:
        group: process group of torch with the group's ranks.
        axis: name of the mesh axis whose collectives it runs.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.axis = "world"

    @abstractmethod
    def begin(
        self, op: str, out: Tensor, given: Tensor, option: Any = None, *, is_spent: bool = False
    ) -> dist.Work | None:
        """Start a collective, and return the work to wait for; None if it is already complete.

        Args:
            op: name of the collective, as in the table of comm.comm.
            out: output, contiguous; for all_gather possibly [N, *given.shape] with any strides.
            given: input, contiguous, possibly `out` itself; for reduce_scatter possibly
                [N, *out.shape] with any strides without gaps that are equal on all ranks.
            option: reduction of an all_reduce; group rank of the peer of a swap, send or recv, or
                of the root of a broadcast or reduce; `RowCounts` of an uneven all_to_all.
            is_spent: whether `given` is not written again until it is freed.
        """

    def described(self, op: str, out: Tensor, given: Tensor, option: Any) -> Call:
        """Return a collective as watches see it, with arguments named as in torch's operators."""
        if op in _OPTIONS:
            tensor = given if op == "send" else out
            return Call(op, self.group, {"tensor": tensor, _OPTIONS[op]: option, "tag": 0})
        sent, received = list[int](), list[int]()
        if op == "swap":
            # gloo and NCCL run a swap as an all-to-all with one piece that is not empty.
            sent = received = [len(out) * (rank == option) for rank in range(self.group.size())]
        elif isinstance(option, RowCounts):
            sent, received = (way(self.group.rank()) for way in (option.sent, option.received))
        arguments: dict[str, Any] = {"output": out, "input": given}
        arguments |= {"output_split_sizes": received, "input_split_sizes": sent}
        if op == "swap":
            return Call("all_to_all", self.group, arguments | {"partner": option})
        return Call(op, self.group, arguments)

    def empty(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor that this engine can send without an internal copy."""
        return torch.empty(*size, dtype=dtype, device=device)

    def gather_output(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialized output for the next all_gather, which every rank begins next.

        Its input is this rank's slice of it, and `is_spent`.
        """
        return self.empty(size, dtype, device)


class Transfer(dist.Work):
    """A running collective; its tensors must not be used before `wait`.

    Attributes:
        is_waited_for: whether `wait` has returned.
        tensor: output, passed to listeners of waits; None if unknown.
        axis: mesh axis of its ranks, passed to listeners of waits.
    """

    def __init__(
        self, works: Sequence[dist.Work | None], complete: Callable[[], None] | None = None
    ) -> None:
        """Take ownership of running sends and receives.

        Args:
            works: gloo works of the messages.
            complete: called in `wait` after all messages are complete.
        """
        super().__init__()
        self.is_waited_for = False
        self.tensor: Tensor | None = None
        self.axis = "world"
        self._works = list(works)
        self._complete = complete

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the output is complete; the timeout is the job's, not the argument."""
        works, self._works = self._works, []
        if works:
            with named("wait exchange"), waiting(self.tensor, self.axis):
                for work in works:
                    assert work is not None  # None is for ranks outside the group
                    work.wait()
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()
        self.is_waited_for, self.tensor = True, None  # later its memory may be freed
        return True
