"""Sharded data parallelism: ZeRO 1-3 and HSDP, on PyTorch's FSDP2.

Idea      N ranks that would hold equal replicas hold one shard each, and gather a parameter when it
          is used (Rajbhandari et al., ZeRO, SC 2020, section 5; Zhao et al., PyTorch FSDP, VLDB
          2023). `zero1` leaves parameters and gradients unsharded, `zero2` only parameters, `zero3`
          nothing. With dp > 1 it is HSDP: shards within fsdp, replicas of them across dp. Ranks
          with other positions of the same samples shard together, and so do ranks of ep,
          except experts: below, fsdp means all axes of a group's shards (`comm.axes`), and N
          their ranks. One gather fetches one group (groups.py): a block, its experts if `ep` has
          split them, the embedding, the head, or the rest, which is every other parameter (the root
          group of FSDP2).
Layout    X[B_dp,fsdp, ...]  W[I_fsdp, ...]  dW[I_fsdp, ...]: the rows of each parameter and of its
          AdamW moments are split over fsdp; uneven rows are padded in messages only.
Forward   all_gather: W[I_fsdp] -> W, in the dtype that the block computes in. zero3 frees W after
          each group except the last block, the head and the rest, whose backward comes soon.
Backward  zero3: all_gather again, except for the embedding, whose backward does not read W.
          dW{sum dp,fsdp} = f'(X, W), reduce_scatter over fsdp -> dW[I_fsdp]{sum dp},
          all_reduce over dp -> dW[I_fsdp]
Cost      With P bytes of parameters, padded, and A microbatches a step, a rank sends (N-1)/N times
              zero1  P + P              gathers once, reduces once: accumulates full gradients
              zero2  P + A P            gathers once, reduces every microbatch: accumulates shards
              zero3  (2 P - K) A + A P  K: bytes of embedding, last block, head, rest: gathered once
          and across M ranks of dp 2 (M-1)/M P/N. One byte a parameter besides, see `any_rank_used`.
          Blocks that compute in a narrower dtype are gathered in it.
Limits    Any N and M. A parameter of two groups is refused; tied weights belong to the rest. Every
          rank must run the same blocks, and before torch 2.13 use the same parameters.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves

from phalanx.comm.axes import DENSE, EXPERT, axes_of, single_axis
from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.fsdp import check_placements, param_groups, placement_on
from phalanx.comm.ledger import Entry, Phase, no_phase
from phalanx.errors import StrategyError
from phalanx.parallel import overlap
from phalanx.parallel.groups import (
    AccumulatedGradients,
    groups_of,
    peak_gathered_bytes,
    peak_gradient_bytes,
    shard_dim,
)
from phalanx.parallel.reduce import (
    GradientReducer,
    Parameters,
    accumulate_by_shard,
    broadcast_parameters,
)
from phalanx.parallel.skeleton import experts_of
from phalanx.parallel.sparse import sparse_tables
from phalanx.parallel.split import Shape, Split, StateBytes, Target, TensorKind, entries_of
from phalanx.parallel.views import allow_outputs
from phalanx.strategy import Strategy

Kind = Literal["zero1", "zero2", "zero3"]


class ShardedSplit(Split):
    """The axes that shard parameters, fsdp above all, and dp, which replicates the shards."""

    axis = "fsdp"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        strategy = target.strategy
        # A pipeline stage runs other microbatches between the forward and the backward of one.
        keeps = strategy.pp.degree == 1
        self._groups = groups_of(target, keeps=keeps)
        self._kind: Kind = cast(Kind, strategy.fsdp.kind)
        self._degree = {name: axis.degree for name, axis in strategy.axes()}
        if strategy.tp.degree > 1:
            mesh_dims()
        if strategy.ep.degree > 1:
            check_placements()

    @classmethod
    def shard_shape(cls, strategy: Strategy, part: TensorKind, shape: Shape) -> Shape:
        """Return the shape of a rank's shard: a table is split by rows, other tensors stay."""
        rows, *rest = shape
        return (-(-rows // strategy.num_shards), *rest) if part == "table" else shape

    def holds(self, held: StateBytes, accumulation: int) -> StateBytes:
        """Return the bytes of shards, of gathered parameters and of unreduced gradients.

        With one microbatch a step, zero1 reduces the gradients of a group as soon as backward has
        made them, and so holds the same bytes as zero2.
        """
        groups = self._groups
        gathered_bytes = sum(g.gathered_bytes for g in groups)
        if self._kind == "zero3":
            num_blocks = max(1, sum(g.place == "block" for g in groups))
            segment_size = self.target.strategy.recompute.segment_size(num_blocks) or 1
            gathered_bytes = peak_gathered_bytes(groups, segment_size)
        shard_bytes = sum(g.shard_bytes for g in groups)
        sums: AccumulatedGradients = "full" if self._kind == "zero1" else "shards"
        sums = "none" if accumulation == 1 else sums
        full_bytes = sum(sum(g.full_bytes(g.master)) for g in groups)
        gradient_bytes = full_bytes if sums == "full" else shard_bytes
        return StateBytes(
            parameter_bytes=sum(g.parameter_bytes // g.num_shards for g in groups),
            gathered_bytes=gathered_bytes,
            gradient_bytes=gradient_bytes,
            unreduced_bytes=peak_gradient_bytes(groups, sums) - gradient_bytes,
            optimizer_bytes=2 * shard_bytes,
        )

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        """Return the gathers, the reductions and the agreement on used parameters."""
        groups, times, is_zero3 = self._groups, len(microbatches), self._kind == "zero3"
        times_gathered, times_again = (times, times) if is_zero3 else (1, 0)
        times_reduced = 1 if self._kind == "zero1" else times
        rows: list[tuple[str, str, str, int, int]] = []
        degree, mesh_axes = dict(self._degree), self.target.strategy.mesh_axes()
        for g in groups:
            axis = single_axis(g.axes.shards, mesh_axes)
            size, shard = g.gathered_bytes, g.shard_bytes
            degree[axis] = g.num_shards
            # Every stage gathers the rest; only the first and the last reduce its gradients.
            is_rest = g.place == "rest"
            runs, ends = (self.target.num_stages, self.target.num_end_stages) if is_rest else (1, 1)
            # zero1 and zero2 gather once a step and keep; zero3 gathers for each microbatch and
            # each stage.
            gathers = times_gathered * (runs if is_zero3 else 1)
            again = times_again * runs * g.is_gathered_again
            reductions = times_reduced * (1 if self._kind == "zero1" else ends) if shard else 0
            rows += [
                ("forward", axis, "all_gather", gathers, gathers * size),
                ("backward", axis, "all_gather", again, again * size),
                ("backward", axis, "reduce_scatter", reductions, reductions * shard * g.num_shards),
                ("backward", "dp", "all_reduce", int(shard > 0), shard),
            ]
        flags = sum(p.is_trained for g in groups for p in g.parameters)
        rows += [
            ("agree", axis, "all_reduce", 1, flags) for axis in axes_of(DENSE.sums, self._degree)
        ]
        return entries_of(rows, degree.__getitem__)

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Shard every parameter in place by FSDP2: over fsdp, with replicas over dp."""
        for name in sparse_tables(model):
            raise StrategyError(
                f"{self.target.strategy}: the gradient of '{name}' is sparse, and fsdp reduces "
                "only dense gradients; make the module without sparse=True, or use dp"
            )
        broadcast_parameters(model, comm)
        strategy = self.target.strategy
        experts = {p for each in experts_of(model).values() for p in each.parameters(recurse=False)}

        where: dict[str, Any] = {"mesh": comm.sharding_mesh}
        replicas = "dp" if "dp" in comm.axes else None
        if strategy.tp.degree > 1:
            dims = mesh_dims()(shard=comm.axes_of(DENSE.shards), replicate=replicas)
            # tp has made DTensors on this mesh, and FSDP2 must split them on the same one.
            where = {"mesh": comm.model_mesh, "dp_mesh_dims": dims}
        if experts:
            num_shards, on_mesh = comm.size(EXPERT.shards), Shard
            if strategy.ep.degree > 1:
                dims = mesh_dims()(shard=comm.axes_of(EXPERT.shards), replicate=replicas)
                on_mesh = placement_on(comm.model_mesh, dims)

            def placement(parameter: nn.Parameter) -> Any:
                dim = shard_dim(local_shard(parameter).shape, num_shards)
                return on_mesh(dim) if parameter in experts else None

            where["shard_placement_fn"] = placement
        for group in self._groups:
            if group.axes != DENSE:  # FSDP2 splits them with the group of the same modules
                continue
            # Gathered in the dtype of the group, reduced in the master dtype; experts of a block,
            # whose other parameters may be frozen in a narrower type, decide about all of it.
            here = [g for g in self._groups if g.names == group.names]
            types = next(((g.gathered, g.master) for g in here if g.gathered != g.master), ())
            sharded = fully_shard(
                [model.get_submodule(name) for name in group.names],
                reshard_after_forward=self._kind == "zero3" and not group.stays_gathered,
                mp_policy=MixedPrecisionPolicy(*types, cast_forward_inputs=False),
                **where,
            )
            for module in sharded:
                module.set_unshard_in_backward(group.place != "embedding")
        if not isinstance(model, FSDPModule):  # the rest has no parameters
            fully_shard(model, **where)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                cast(Any, type(module)).__deepcopy__ = _refuse_copy  # torch's raises as well
        if strategy.pp.degree > 1:
            # FSDP2 prefetches the group whose forward ran before, perhaps for another microbatch.
            # A rank with one stage prefetches the preceding group of the stage, any other nothing:
            # to prefetch `module` itself, which is gathered, does nothing.
            modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
            for before, module in zip([None, *modules], modules, strict=False):
                ahead = module if before is None or self.target.num_stages > 1 else before
                module.set_modules_to_backward_prefetch([ahead])

    def reducer(
        self, model: nn.Module, comm: Ranks, inner: GradientReducer | None
    ) -> GradientReducer:
        """Return the reducer, which controls the gathers and reductions of FSDP2."""
        if comm.device.type == "cpu":
            groups = self._groups
            overlap.use_engine(model, comm, has_replicas=self._degree["dp"] > 1)
            if self.target.num_stages == 1:  # else the next block may belong to another stage
                overlap.gather_ahead(model, groups)
        return ShardedReducer(model, comm, self._kind)


def mesh_dims() -> type[Any]:
    """Return the type that selects the axes of FSDP2 in a mesh that also has other axes.

    Raises:
        StrategyError: PyTorch is older than 2.12; its FSDP2 can shard few layouts of DTensors.
    """
    try:
        from torch.distributed.fsdp import DataParallelMeshDims
    except ImportError:
        raise StrategyError(
            f"fsdp with tp needs PyTorch 2.12 or newer, and this is {torch.__version__}; use dp "
            "with tp"
        ) from None
    return DataParallelMeshDims


class ShardedReducer(GradientReducer):
    """Sets when FSDP2 reduces and frees, and records which parameters the ranks used.

    FSDP2 itself reduces the gradients, to sums and not means, before backward ends.
    """

    def __init__(self, model: nn.Module, comm: Ranks, kind: Kind) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        super().__init__(trained, comm)
        self._root = cast(FSDPModule, model)
        self._kind = kind
        self._used: set[nn.Parameter] = set()
        self._not_yet_last = set(trained)
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._gathered: dict[nn.Parameter, str] = {}
        self._adders: list[Node] = []
        self._parameters_of: dict[FSDPModule, frozenset[nn.Parameter]] = {}
        self._has_failed = False
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._set_up(module)

        def gather_first(*_: Any) -> None:
            # FSDP2 makes its tensors at the first gather. Those made inside of
            # torch.inference_mode() could not be trained later, so gather outside of it.
            handle.remove()
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(mode=False), torch.no_grad():
                    for module in self._parameters_of:
                        module.unshard()
                        module.reshard()

        def free_after_inference(*_: Any) -> None:
            if not torch.is_grad_enabled():  # no backward frees what this forward has gathered
                free_gathered(model)

        model.register_forward_hook(free_after_inference)
        model.register_forward_hook(_refuse_second_derivative)
        handle = model.register_forward_pre_hook(gather_first, prepend=True)
        model.register_forward_pre_hook(self._refuse_others, prepend=True)
        model.register_forward_pre_hook(self._end_gathers, prepend=True)

    def _set_up(self, module: FSDPModule) -> None:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # A rank contributes zeros for parameters that only other ranks used; `finish` drops the
        # gradients that no rank used. Before torch 2.13 there is no such setting, and all ranks
        # must use the same parameters.
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
        allow_outputs(module)
        self._watch(cast(nn.Module, module))

    def _watch(self, module: nn.Module) -> None:
        """Install hooks that record which parameters of an FSDP2 module receive a gradient.

        Model, optimizer and checkpoints use the shard, autograd only uses the gathered tensor:

            shard ---all_gather---> gathered ---forward---> loss
                                       |<---autograd-----------|   the hooks are here
            shard.grad <--reduce_scatter-- gathered.grad

        FSDP2 makes the gathered tensors once, at the first forward, and empties them between uses.
        So the hooks are installed at the first forward, as are the nodes of `accumulate_by_shard`.
        """
        # The parameters of FSDP2 modules inside belong to those: a block of the root, for example.
        blocks = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
        elsewhere = {parameter for block in blocks for parameter in block.parameters()}
        places = [
            (submodule, name, parameter)
            for submodule in module.modules()
            for name, parameter in submodule.named_parameters(recurse=False)
            if parameter.requires_grad and parameter not in elsewhere
        ]
        self._places += places
        self._parameters_of[cast(FSDPModule, module)] = frozenset(
            parameter for *_, parameter in places
        )
        module.register_forward_pre_hook(_begin_again_in_backward, prepend=True)

        def on_first_forward(*_: Any) -> None:
            handle.remove()
            for submodule, name, parameter in places:
                gathered: nn.Parameter = getattr(submodule, name)
                self._gathered[gathered] = self._names[parameter]
                if gathered.requires_grad:  # else frozen since the split, which callers refuse

                    def note_used(_: torch.Tensor, used: nn.Parameter = parameter) -> None:
                        self._used.add(used)

                    gathered.register_post_accumulate_grad_hook(note_used)
                self._adders += accumulate_by_shard([gathered])

        handle = module.register_forward_pre_hook(on_first_forward)

    def _refuse_others(self, *_: Any) -> None:
        """Refuse weights that replace parameters for one forward: FSDP2 would overwrite them."""
        known = {id(gathered) for gathered in self._gathered}
        for module, name, parameter in self._places:
            weight: object = getattr(module, name)
            if weight is not parameter and id(weight) not in known:
                raise StrategyError(
                    f"fsdp: the {name} of a {type(module).__name__} is not the parameter that fsdp "
                    "split, as within torch.func.functional_call, and the forward would run with "
                    "the split one; use dp"
                )

    def before_backward(self, last: Parameters, reached: Parameters | None = None) -> None:
        """Set which groups FSDP2 reduces and frees in the next backward."""
        # The four switches of a group that every microbatch of a step reaches:
        #
        #                                          zero1        zero2        zero3
        #     backward of the step                 1st  last    1st  last    1st  last
        #     1 ends the step of FSDP2 (model)     .    x       .    x       .    x
        #     2 reduce_scatter of the gradients    .    x       x    x       x    x
        #     3 all_reduce of the shards over dp   .    x       .    x       .    x
        #     4 frees the gathered parameters      .    x       .    x       x    x
        #
        # "last" is a group's own: no later backward of the step reaches any of its parameters.
        self._end_gathers()
        self._not_yet_last.difference_update(last)
        if reached is not None:  # else keep FSDP2's default, which treats each backward as the last
            self._root.set_is_last_backward(not self._not_yet_last)
        for module, trained in self._parameters_of.items():
            with_grad = trained if reached is None else trained.intersection(reached)
            is_last = with_grad.issubset(last) if with_grad else not (trained or self._not_yet_last)
            is_reduced = is_last if self._kind == "zero1" else bool(with_grad)
            module.set_requires_gradient_sync(is_reduced, recurse=False)
            module.set_requires_all_reduce(is_last, recurse=False)
            # Every stage of this rank gathers the rest, even a stage that does not read it.
            is_done = not self._not_yet_last if module is self._root else is_last
            module.set_reshard_after_backward(is_done or self._kind == "zero3", recurse=False)

    def finish(self, phase: Phase = no_phase) -> None:
        """Set to None the gradients (all zeros) of parameters that no rank used.

        Raises:
            StrategyError: a gradient would be wrong, because a part of it is not reduced.
        """
        for gathered, name in self._gathered.items():
            if gathered.grad is not None:
                raise StrategyError(
                    f"fsdp: the gradient of '{name}' would lack a part, which was computed after "
                    "the gradients of its block had been reduced; use the parameter only in the "
                    "forward of its block, or use dp"
                )
        with phase("agree"):
            is_used = self.any_rank_used([parameter in self._used for parameter in self.parameters])
        for parameter in itertools.compress(self.parameters, map(operator.not_, is_used)):
            parameter.grad = None
        self._used.clear()
        self._not_yet_last = set(self.parameters)

    def keep(self) -> None:
        """Let the next backward neither reduce gradients nor free gathered parameters."""
        for module in self._parameters_of:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)

    def reset_step(self) -> None:
        """Free the gathered parameters, and reset the step; the next forward ends the gathers."""
        self._used.clear()
        self._not_yet_last = set(self.parameters)
        self._has_failed = True
        self.after_step()
        for gathered in self._gathered:
            gathered.grad = None

    def _end_gathers(self, *_: Any) -> None:
        """Wait for the gathers that a failed backward has left running, and drop their results."""
        if not self._has_failed:
            return
        self._has_failed = False
        if hasattr(self._root, "reset_iter_state"):  # from torch 2.13
            self._root.reset_iter_state()
            return
        for module in self._parameters_of:  # `unshard` waits for a gather in progress, or makes one
            module.unshard()
            module.reshard()

    def after_step(self) -> None:
        """Free parameters that a forward without backward left gathered: they are now outdated."""
        for module in self._parameters_of:
            module.reshard()


def _begin_again_in_backward(module: nn.Module, *_: Any) -> None:
    """Let FSDP2 reduce a group again that reentrant checkpointing recomputes after its reduction.

    FSDP2 takes a forward during backward for a recomputation within the block's own backward, which
    ends with the reduction. A second recomputation in one backward, of a block that is applied
    twice, would get no reduction of its own.
    """
    # Private; tests/parallel/test_sharded.py pins both states.
    state: Any = cast(FSDPModule, module)._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    ended = TrainingState.POST_BACKWARD
    if any(g._training_state == ended for g in param_groups(cast(FSDPModule, module))):
        state._training_state = TrainingState.IDLE


def _refuse_copy(module: nn.Module, _memo: object) -> nn.Module:
    name = type(module).__name__.removeprefix("FSDP")
    raise StrategyError(
        f"fsdp: a {name} that is split cannot be copied; average its weights by "
        "run.average(decay), take full weights from run.state_dict(), or use dp"
    )


def _refuse_second_derivative(_model: nn.Module, _inputs: Any, output: Any) -> None:
    """Add hooks that refuse a backward with create_graph=True through the model."""

    def check_order(_grad: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # in backward this holds only with create_graph=True
            raise StrategyError(
                "fsdp: a gradient is computed with create_graph=True, as for a gradient penalty; "
                "its derivative needs weights that fsdp has freed by then; use dp"
            )

    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(check_order)


def free_gathered(model: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered; the next forward gathers the current shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
