"""The collectives of FSDP2 on a CPU, by the engine of its group (comm.transfer).

On a GPU FSDP2's own stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from typing_extensions import override

from phalanx.comm.ranges import named
from phalanx.comm.transfer import CommEngine, Transfer


class ShardGather(AllGather):
    """`all_gather` as FSDP2 asks for it, for one group of parameters.

    Attributes:
        transfer: the latest that is to be waited for.
    """

    def __init__(self, engine: CommEngine) -> None:
        self._engine = engine
        self.transfer: Transfer | None = None

    @override
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an empty tensor to gather into, a slice of which is this rank's shard."""
        return self._engine.empty([int(length) for length in size], dtype, device)

    @property
    def is_under_way(self) -> bool:
        """Whether nobody has waited for the latest."""
        return self.transfer is not None and not self.transfer.is_waited_for

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Transfer | None:
        """Gather; with `async_op` only begin to, and return what to wait for."""
        with named("all_gather fsdp"):
            work = self._engine.begin("all_gather", output_tensor, input_tensor, is_spent=True)
        assert isinstance(work, Transfer)
        if async_op:
            self.transfer = work
            return work
        work.wait()
        return None


class LastReduction:
    """The reduction that a backward has left under way; at most one."""

    def __init__(self) -> None:
        self._transfer: Transfer | None = None

    def leave(self, transfer: Transfer) -> None:
        """Let a reduction run until `end`, which comes by itself when this backward ends."""
        self.end()
        self._transfer = transfer
        # Private, and the only way to know that backward ends; tests/parallel/test_overlap.py
        # pins it. FSDP2 does the same.
        engine: Any = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
        engine.queue_callback(self.end)

    def end(self) -> None:
        """Return when the output of the reduction is there."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()


class ShardReduction(ReduceScatter):
    """`reduce_scatter` as FSDP2 asks for it; only sums.

    FSDP2 never waits for a reduction: on a GPU the order of a stream does. Here one runs while
    backward computes the block before, unless FSDP2 reads its output at once. It has ended when the
    buffers of the next are made, or else when backward ends.
    """

    def __init__(
        self,
        engine: CommEngine,
        last: LastReduction | None = None,
        is_read_at_once: Callable[[], bool] = lambda: True,
    ) -> None:
        """Reduce for one group of parameters, or for any.

        Args:
            engine: of the ranks that hold the shards.
            last: of all groups of the model.
            is_read_at_once: says, as a reduction begins, whether its output is read right after.
        """
        self._engine = engine
        self._has_input = False
        self._last = last or LastReduction()
        self._is_read_at_once = is_read_at_once

    @override
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an empty tensor, in the place of what the reduction before has needed.

        FSDP2 asks for the input first, and then for the output, which will be gradients.
        """
        self._last.end()
        lengths = [int(length) for length in size]
        if self._has_input:
            return torch.empty(lengths, dtype=dtype, device=device)
        self._has_input = True
        return self._engine.empty(lengths, dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Transfer | None:
        """Reduce, or begin to; with `async_op` return what to wait for."""
        self._has_input = False
        if op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"reduce_scatter of fsdp only sums; asked for {op}")
        with named("reduce_scatter fsdp"):
            work = self._engine.begin("reduce_scatter", output_tensor, input_tensor, is_spent=True)
        assert isinstance(work, Transfer)
        if async_op:
            return work
        if self._is_read_at_once():
            work.wait()
        else:
            self._last.leave(work)
        return None
