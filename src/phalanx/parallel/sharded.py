"""Sharded data parallelism: ZeRO 1-3 and HSDP, on PyTorch's FSDP2.

Idea      Ranks that hold the same thing N times can hold a share each and gather it where it is
          used (Rajbhandari et al., ZeRO, SC 2020, section 5; Zhao et al., PyTorch FSDP, VLDB 2023).
          The stages say what is left whole: `zero1` parameters and gradients, `zero2` parameters,
          `zero3` nothing. With dp > 1 it is HSDP: shares within fsdp, copies of them across dp.
          A group is what travels together: the parameters of one block, and those of all the rest.
Layout    X[B_dp,fsdp, ...]  W[I_fsdp, ...]  dW[I_fsdp, ...]: rows of each parameter, and its AdamW
          moments, split over fsdp; a parameter of uneven rows is padded on its way only.
Forward   all_gather: W[I_fsdp] -> W, in the data type that the block computes in; zero3 frees it
          after each block but the last and the rest, whose backward follows at once
Backward  zero3: all_gather again. dW{sum dp,fsdp} = f'(X, W), reduce_scatter over fsdp
          -> dW[I_fsdp]{sum dp}, all_reduce over dp -> dW[I_fsdp]
Cost      With P bytes of parameters, padded, and A microbatches a step, a rank sends (N-1)/N times
              zero1  P + P              gathers once, reduces once: adds up whole gradients
              zero2  P + A P            gathers once, reduces each microbatch: adds up shares
              zero3  (2 P - K) A + A P  K: the last block and the rest, gathered once and kept
          and across dp 2 (M-1)/M P/N. One byte a parameter besides, see `GradientReducer.agree`.
          With a narrower data type of the arithmetic, gathers of blocks shrink to it.
Limits    Any N and M. A parameter that two blocks share, or a block and the rest, is refused. Every
          rank must run the same blocks, and before torch 2.13 use the same parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.comm.exchange import ExchangeAllGather, ExchangeReduceScatter
from phalanx.comm.join import DATA_AXES
from phalanx.comm.ledger import Entry, Phase, no_phase, sent_bytes
from phalanx.comm.primitives import broadcast, local_part
from phalanx.errors import StrategyError
from phalanx.parallel.blocks import blocks_of
from phalanx.parallel.holding import Holding
from phalanx.parallel.reduce import GradientReducer, add_up_in_parts

Kind = Literal["zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Parameter:
    """What sharding asks of a parameter: its shape, and whether it is trained."""

    shape: tuple[int, ...]
    is_trained: bool = True

    def padded(self, num_ranks: int) -> int:
        """Return the elements when the rows are padded to a multiple of `num_ranks`."""
        rows = -(-self.shape[0] // num_ranks) * num_ranks
        return rows * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Group:
    """Parameters that travel together.

    Attributes:
        name: of the block; "" for all that is in no block.
        parameters: in the order of the module.
        master: data type of the parameters, gradients and moments that a rank keeps.
        gathered: data type of the parameters as they are gathered.
        is_kept: zero3 keeps it from forward to backward: the last block and what is in none.
    """

    name: str
    parameters: tuple[Parameter, ...]
    master: torch.dtype
    gathered: torch.dtype
    is_kept: bool

    def parameter_bytes(self, num_ranks: int) -> int:
        """Return the bytes of the parameters of all ranks, padding included."""
        return sum(p.padded(num_ranks) for p in self.parameters) * self.master.itemsize

    def gathered_bytes(self, num_ranks: int) -> int:
        """Return the bytes of the parameters once they are gathered."""
        return sum(p.padded(num_ranks) for p in self.parameters) * self.gathered.itemsize

    def reduced_bytes(self, num_ranks: int) -> int:
        """Return the bytes of the gradients as they are reduced."""
        return sum(p.padded(num_ranks) for p in self.parameters if p.is_trained) * (
            self.master.itemsize
        )

    def unreduced_bytes(self) -> int:
        """Return the bytes of the gradients as backward makes them."""
        return sum(p.padded(1) for p in self.parameters if p.is_trained) * self.gathered.itemsize


def layout(
    groups: Sequence[Group],
    num_ranks: int,
    kind: Kind,
    *,
    accumulation: int = 1,
    segment_size: int = 1,
) -> Holding:
    """Return what each rank holds.

    Args:
        groups: see `groups_of`.
        num_ranks: N, the degree of fsdp.
        kind: the stage.
        accumulation: microbatches a step; with one, zero1 reduces each group's gradients as soon as
            they are made, and holds no more than zero2.
        segment_size: blocks that recomputation runs again together.
    """
    gathered_bytes = sum(g.gathered_bytes(num_ranks) for g in groups)
    share_bytes = sum(g.reduced_bytes(num_ranks) for g in groups) // num_ranks
    if kind == "zero3":
        gathered_bytes = _most_gathered(groups, num_ranks, segment_size)
    has_sums = accumulation > 1
    if kind == "zero1" and has_sums:
        gradient_bytes, unreduced_bytes = sum(g.reduced_bytes(1) for g in groups), 0
    else:
        gradient_bytes = share_bytes
        unreduced_bytes = _most_gradients(groups, num_ranks, has_sums) - share_bytes
    return Holding(
        parameter_bytes=sum(g.parameter_bytes(num_ranks) for g in groups) // num_ranks,
        gathered_bytes=gathered_bytes,
        gradient_bytes=gradient_bytes,
        unreduced_bytes=unreduced_bytes,
        optimizer_bytes=2 * share_bytes,
    )


def _most_gathered(groups: Sequence[Group], num_ranks: int, segment_size: int) -> int:
    """Return the bytes of the blocks at work, of the next, gathered before they end, and the rest.

    The block that zero3 keeps after forward is free again when backward has left it.
    """
    blocks = [g.gathered_bytes(num_ranks) for g in groups if g.name]
    rest = sum(g.gathered_bytes(num_ranks) for g in groups if not g.name)
    starts = range(max(1, len(blocks) - segment_size))
    return rest + max(sum(blocks[start : start + segment_size + 1]) for start in starts)


def _most_gradients(groups: Sequence[Group], num_ranks: int, has_sums: bool) -> int:
    """Return the bytes of gradients, whole ones and shares, when they are the most.

    Backward goes from the last block to the first. A block's gradients are whole until it is left;
    the shares of those behind it are there already, and of all if there are sums of earlier
    microbatches. What is in no block is whole until the end; to count it from the beginning is too
    much for an embedding that is not tied.
    """
    blocks, rest = [g for g in groups if g.name], [g for g in groups if not g.name]
    shares = [g.reduced_bytes(num_ranks) // num_ranks for g in blocks]
    sums = sum(g.reduced_bytes(num_ranks) // num_ranks for g in rest) if has_sums else 0
    at_block = [
        block.unreduced_bytes() + (sum(shares) if has_sums else sum(shares[number + 1 :]))
        for number, block in enumerate(blocks)
    ]
    return sums + sum(g.unreduced_bytes() for g in rest) + max([*at_block, sum(shares)])


def traffic(
    groups: Sequence[Group],
    num_ranks: int,
    kind: Kind,
    *,
    num_copies: int = 1,
    accumulation: int = 1,
) -> list[Entry]:
    """Return what one rank sends in one step.

    Args:
        groups: see `groups_of`.
        num_ranks: N, the degree of fsdp.
        kind: the stage.
        num_copies: M, the degree of dp; above 1 it is HSDP.
        accumulation: microbatches a step.
    """
    gathered = [g.gathered_bytes(num_ranks) for g in groups]
    again = [g.gathered_bytes(num_ranks) for g in groups if kind == "zero3" and not g.is_kept]
    reduced = [size for g in groups if (size := g.reduced_bytes(num_ranks))]
    shares = [size // num_ranks for size in reduced]
    flags = sum(p.is_trained for g in groups for p in g.parameters)
    times_gathered = accumulation if kind == "zero3" else 1
    times_reduced = 1 if kind == "zero1" else accumulation
    rows = [
        ("forward", "fsdp", "all_gather", gathered * times_gathered),
        ("backward", "fsdp", "all_gather", again * accumulation),
        ("backward", "fsdp", "reduce_scatter", reduced * times_reduced),
        ("backward", "dp", "all_reduce", shares),
        ("agree", "dp", "all_reduce", [flags]),
        ("agree", "fsdp", "all_reduce", [flags]),
    ]
    degree = {"fsdp": num_ranks, "dp": num_copies}
    return [
        Entry(phase, axis, op, len(sizes), sum(sizes), sent_bytes(op, sum(sizes), degree[axis]))
        for phase, axis, op, sizes in rows
        if sizes and degree[axis] > 1
    ]


def groups_of(model: nn.Module, compute: torch.dtype | None = None) -> list[Group]:
    """Return the groups of a model that is not split yet: its blocks in order, then the rest.

    Args:
        model: any module, on any device, meta too.
        compute: data type of the blocks' arithmetic, that of their parameters if None. What is in
            no block is gathered as it is: the rows of an embedding add up many small gradients,
            which a narrow type would lose.

    Raises:
        StrategyError: the model has no forward, a parameter belongs to two groups or cannot be
            split by rows, or a group has parameters of several data types.
    """
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise StrategyError(
            f"fsdp: the model is a {type(model).__name__}, which has no forward to gather for; "
            "wrap it in a module that has one, or use dp"
        )
    names = [name for name, _ in blocks_of(model)]
    members = _members(model, names)
    groups: list[Group] = []
    for name in (*names, ""):
        own = members[name]
        if not own:
            continue
        dtypes = {parameter.dtype for parameter in own}
        if len(dtypes) > 1:
            raise StrategyError(
                f"fsdp: the parameters of '{name or 'the model'}' are of several data types, "
                f"{', '.join(sorted(map(str, dtypes)))}, and travel together; cast them to one"
            )
        master = dtypes.pop()
        groups.append(
            Group(
                name=name,
                parameters=tuple(Parameter(tuple(p.shape), p.requires_grad) for p in own),
                master=master,
                gathered=compute if compute is not None and name else master,
                is_kept=name in ("", *names[-1:]),
            )
        )
    return groups


def _members(model: nn.Module, names: Sequence[str]) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each named block, and under "" those of no block."""
    members: dict[str, list[nn.Parameter]] = {name: [] for name in (*names, "")}
    homes: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ends = [end for end, letter in enumerate(name) if letter == "."]
        block = next((name[:end] for end in ends if name[:end] in members), "")
        if parameter not in homes:
            homes[parameter] = (block, name)
            members[block].append(parameter)
        elif homes[parameter][0] != block:
            raise StrategyError(
                f"fsdp: '{homes[parameter][1]}' and '{name}' are one parameter, in two blocks or "
                "in one and outside, and can be gathered with one alone; hold it outside the "
                "blocks, or use dp"
            )
        if parameter.ndim == 0 or parameter.numel() == 0:
            raise StrategyError(
                f"fsdp: the parameter '{name}' of shape {tuple(parameter.shape)} has no rows that "
                "could be split; make it of shape (1,), or use dp"
            )
        if not parameter.is_contiguous():
            raise StrategyError(
                f"fsdp: the parameter '{name}' is not contiguous, so its rows cannot travel as "
                "they lie; make it `nn.Parameter(weight.contiguous())`, or use dp"
            )
    return members


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    kind: Kind = "zero3",
    *,
    compute: torch.dtype | None = None,
) -> ShardedReducer:
    """Split every parameter over fsdp, in place, and return what steers its gathers and reductions.

    Parameters become DTensors of the axis fsdp (and dp, if the mesh has it) and keep their names.

    Args:
        model: a module with its first weights, or on the meta device.
        mesh: has the axis fsdp.
        kind: the stage.
        compute: data type of the blocks' arithmetic; see `groups_of`.

    Raises:
        StrategyError: see `groups_of`.
    """
    groups = {group.name: group for group in groups_of(model, compute)}
    axes = tuple(axis for axis in DATA_AXES if axis in (mesh.mesh_dim_names or ()))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            for axis in axes if not tensor.is_meta else ():
                broadcast(local_part(tensor), mesh, axis)
    where = _where(model, mesh, axes)
    for name, module in (*blocks_of(model), ("", model)):
        group = groups.get(name)
        is_freed = kind == "zero3" and group is not None and not group.is_kept
        fully_shard(
            module,
            reshard_after_forward=is_freed,
            mp_policy=_precision(group),
            **where,
        )
    return ShardedReducer(model, mesh, kind)


def _where(model: nn.Module, mesh: DeviceMesh, axes: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments by which FSDP2 knows its axes among those that split parameters."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return {"mesh": mesh["fsdp"] if axes == ("fsdp",) else mesh[axes]}
    copies = "dp" if "dp" in axes else None
    return {"mesh": mesh, "dp_mesh_dims": mesh_dims()(shard="fsdp", replicate=copies)}


def mesh_dims() -> type[Any]:
    """Return the type by which FSDP2 is told its axes of a mesh that has others too.

    Raises:
        StrategyError: this PyTorch is older than 2.12, whose FSDP2 splits few layouts further.
    """
    try:
        from torch.distributed.fsdp import DataParallelMeshDims
    except ImportError:
        raise StrategyError(
            f"fsdp beside tp needs PyTorch 2.12 or newer, and this is {torch.__version__}; use dp "
            "beside tp"
        ) from None
    return DataParallelMeshDims


def _precision(group: Group | None) -> MixedPrecisionPolicy:
    """Gather in the group's own data type; gradients are always added up in that of the masters."""
    if group is None or group.gathered == group.master:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(group.gathered, group.master, cast_forward_inputs=False)


class ShardedReducer(GradientReducer):
    """Tells FSDP2 which microbatch is the last, and finds out which parameters were used.

    When backward ends, FSDP2 has reduced the gradients already, to sums.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, kind: Kind) -> None:
        axes = [axis for axis in DATA_AXES if axis in (mesh.mesh_dim_names or ())]
        trained = [p for p in model.parameters() if p.requires_grad]
        super().__init__(trained, mesh, axes)
        self._root = cast(FSDPModule, model)
        self._kind = kind
        self._used: set[nn.Parameter] = set()
        self._adders: list[Node] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._set_up(module)
        model.register_forward_hook(_free_after_inference)

    def _set_up(self, module: FSDPModule) -> None:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # A rank reduces zeros for what only others used; `finish` drops what nobody used. Before
        # torch 2.13 there is no such setting, and all ranks must use the same parameters.
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
        if self.mesh.device_type == "cpu":
            module.set_custom_all_gather(ExchangeAllGather())
            module.set_custom_reduce_scatter(ExchangeReduceScatter())
        self._watch(cast(nn.Module, module))

    def _watch(self, module: nn.Module) -> None:
        """Note for each parameter of an FSDP2 group when autograd makes a gradient for it.

        What adds its gradients up is kept (see reduce.py). Autograd sees only the
        gathered parameters, which FSDP2 makes once, at the first forward.
        """
        blocks = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
        elsewhere = {parameter for block in blocks for parameter in block.parameters()}
        places = [
            (submodule, name, parameter)
            for submodule in module.modules()
            for name, parameter in submodule.named_parameters(recurse=False)
            if parameter.requires_grad and parameter not in elsewhere
        ]

        def on_first_forward(*_: Any) -> None:
            handle.remove()
            for submodule, name, parameter in places:
                gathered: nn.Parameter = getattr(submodule, name)
                note = functools.partial(self._note_used, parameter)
                gathered.register_post_accumulate_grad_hook(note)
                self._adders += add_up_in_parts([gathered])

        handle = module.register_forward_pre_hook(on_first_forward)

    def _note_used(self, parameter: nn.Parameter, _gathered: torch.Tensor) -> None:
        self._used.add(parameter)

    def before_backward(self, *, is_last: bool) -> None:
        """Say that a backward follows, and whether it is the last of this global batch."""
        if self._kind == "zero1":
            self._root.set_requires_gradient_sync(is_last)
        else:
            self._root.set_requires_all_reduce(is_last)
        if self._kind != "zero3":
            self._root.set_reshard_after_backward(is_last)

    def finish(self, phase: Phase = no_phase) -> None:
        """Drop the gradients, all zeros, of parameters that no rank used."""
        with phase("agree"):
            is_used = self.agree([parameter in self._used for parameter in self.parameters])
        for parameter in itertools.compress(self.parameters, map(operator.not_, is_used)):
            parameter.grad = None
        self._used.clear()


def _free_after_inference(model: nn.Module, *_: Any) -> None:
    """Free what a forward without gradients leaves gathered: no backward will."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
