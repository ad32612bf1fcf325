"""FSDP2's all-gather and reduce-scatter on CPUs, run by the engine of its group (comm.transfer).

On GPUs FSDP2 uses its default collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import Shard
from typing_extensions import override

from phalanx.comm.ranges import named
from phalanx.comm.transfer import CommEngine, Transfer
from phalanx.errors import StrategyError


def param_groups(module: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups of a module, one for each set of axes that shards them."""
    # Private; tests/parallel/test_overlap.py pins it. Before torch 2.13 there is at most one.
    state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def check_placements() -> None:
    """Check that FSDP2 can shard the parameters of one module over several sets of axes.

    Raises:
        StrategyError: PyTorch is older than 2.13.
    """
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        raise StrategyError(
            f"fsdp with ep needs PyTorch 2.13 or newer, and this is {torch.__version__}; use dp "
            "with ep"
        )


def placement_on(mesh: DeviceMesh, dims: Any) -> Callable[[int], Any]:
    """Return a function that returns FSDP2's placement of dimension `dim` over the axes `dims`.

    Args:
        mesh: the mesh of the parameters, which are DTensors.
        dims: the axes of `mesh` that shard and replicate, a `DataParallelMeshDims`.
    """
    # Private, as is the only way to give FSDP2 a second mesh; tests/parallel/test_sharded.py
    # pins both. FSDP2 wants one object for all parameters of a process group.
    common, init = cast(Any, _fsdp_common), cast(Any, _fsdp_init)
    info = init._get_mesh_info(mesh, dims)
    return lambda dim: common.ShardPlacementResult(Shard(dim), info)


class ShardGather(AllGather):
    """The all-gather that FSDP2 calls for one parameter group.

    Attributes:
        transfer: latest asynchronous all-gather; None before the first.
    """

    def __init__(self, engine: CommEngine, part: str = "") -> None:
        """Gather through `engine`; `part` of the model labels traces."""
        self._engine, self._part = engine, part
        self.transfer: Transfer | None = None

    @override
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialized all-gather output; this rank's slice of it is the input."""
        return self._engine.gather_output([int(length) for length in size], dtype, device)

    @property
    def is_under_way(self) -> bool:
        """Whether the latest asynchronous all-gather has not been waited for."""
        return self.transfer is not None and not self.transfer.is_waited_for

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Transfer | None:
        """Gather; with `async_op`, return the running transfer instead of waiting for it."""
        with named("all_gather fsdp", output_tensor, of=self._part):
            work = self._engine.begin("all_gather", output_tensor, input_tensor, is_spent=True)
        assert isinstance(work, Transfer)
        work.axis, work.tensor = self._engine.axis, output_tensor
        if async_op:
            self.transfer = work
            return work
        work.wait()
        return None


class LastReduction:
    """The one asynchronous reduction that a backward may leave running."""

    def __init__(self) -> None:
        self._transfer: Transfer | None = None

    def leave(self, transfer: Transfer) -> None:
        """Leave a reduction running until `end`, which also runs when this backward ends."""
        self.end()
        self._transfer = transfer
        # Private, and the only way to run code when backward ends, as FSDP2 does;
        # tests/parallel/test_overlap.py pins it.
        engine: Any = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
        engine.queue_callback(self.end)

    def end(self) -> None:
        """Wait for the running reduction, if any."""
        #   backward      block 3 |    block 2    |    block 1    |
        #   reductions             --- 3 ---       --- 2 ---       --- 1 ---
        #   `end`                                 3               2         1, by the callback
        #
        # The next reduction allocates its input only after the one before has ended.
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()


class ShardReduction(ReduceScatter):
    """The reduce-scatter that FSDP2 calls; only sums.

    FSDP2 does not wait for a reduction, because on a GPU stream order makes it complete in time.
    On a CPU one reduction runs while backward computes the next block (the one before in the
    model), unless FSDP2 or a parameter's hook reads the output at once. It is waited for when the
    next reduction allocates, or when backward ends.
    """

    def __init__(
        self,
        engine: CommEngine,
        last: LastReduction | None = None,
        is_read_at_once: Callable[[], bool] = lambda: True,
        part: str = "",
    ) -> None:
        """Reduce gradients of one or more parameter groups.

        Args:
            engine: engine of the ranks that hold the shards.
            last: running reduction, common to all parameter groups of the model.
            is_read_at_once: called at the start of a reduction; returns whether the output is
                read immediately.
            part: part of the model, which labels traces.
        """
        self._engine, self._part = engine, part
        self._has_input = False
        self._last = last or LastReduction()
        self._is_read_at_once = is_read_at_once

    @override
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Wait for the previous reduction, so that its memory can be reused; return a buffer.

        FSDP2 calls this for the input, then for the output, which becomes the gradients. Only the
        input comes from the engine.
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
        """Reduce-scatter; with `async_op` return the running transfer, else leave it or wait."""
        self._has_input = False
        if op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"reduce_scatter of fsdp only sums; its op is {op}")
        with named("reduce_scatter fsdp", input_tensor, of=self._part):
            work = self._engine.begin("reduce_scatter", output_tensor, input_tensor, is_spent=True)
        assert isinstance(work, Transfer)
        work.axis, work.tensor = self._engine.axis, output_tensor
        if async_op:
            return work
        if self._is_read_at_once():
            work.wait()
        else:
            self._last.leave(work)
        return None
