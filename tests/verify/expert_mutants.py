"""Faults of experts, their losses and their optimizers, planted as those of mutants.py."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from mutants import Mutant, on_rank

from phalanx.comm import comm
from phalanx.models import experts as model_experts
from phalanx.models.experts import Load, MoE, Router
from phalanx.models.layers import MLP
from phalanx.parallel import expert_split, reduce
from phalanx.parallel.whole_matrix import Owners
from phalanx.train import balance, optimizer, step
from phalanx.train.step import Step


def _own_counts(right: Any) -> Any:
    """The counts of the load stay a rank's own."""

    def wrong(self: Any, tensor: Any, name: str, *rest: Any) -> Any:
        is_load = name == "loss" and tensor.ndim == 2
        return tensor if is_load else right(self, tensor, name, *rest)

    return wrong


def _of_each_microbatch(right: Any) -> Any:
    return lambda self, scale: right(self, 3 * scale)


def _without_losses(right: Any) -> Any:
    return staticmethod(lambda ctx, *grads: (grads[0], None, None))


def _always_counting(right: Any) -> Any:
    """Forwards count although the step has counted all tokens."""

    @contextmanager
    def wrong(self: Any) -> Any:
        for router in self._routers:
            router.load.is_counting = True
        yield

    return wrong


def _with_padding(right: Any) -> Any:
    """Tokens without a label count too."""
    return lambda self, experts, counted, sums: right(self, experts, torch.ones_like(counted), sums)


def _with_ep(right: Any) -> Any:
    def wrong(self: Any, tensor: Any, name: str, reduction: str = "sum") -> Any:
        return right(self, tensor, "grad" if name == "expert_grad" else name, reduction)

    return wrong


def _times_ep(right: Any) -> Any:
    def wrong(self: Any, tensor: Any, name: str, reduction: str = "sum") -> Any:
        tensor = tensor.mul_(2) if (name, reduction) == ("expert_grad", "sum") else tensor
        return right(self, tensor, name, reduction)

    return wrong


def _without_dp(right: Any) -> Any:
    def wrong(self: Any, tensor: Any, name: str, reduction: str = "sum") -> Any:
        if (name, reduction) == ("expert_grad", "sum"):
            return comm.Pending(tensor)
        return right(self, tensor, name, reduction)

    return wrong


def _norm_without_experts(right: Any) -> Any:
    return lambda grads, *how: right([grad for grad in grads if grad.ndim < 3], *how)


def _norm_of_each_ep(right: Any) -> Any:
    def wrong(grads: Any, *how: Any) -> Any:
        return right([*grads, *(grad for grad in grads if grad.ndim == 3)], *how)

    return wrong


def _unsummed_router(right: Any) -> Any:
    def wrong(parameter: Any) -> Any:
        return () if parameter.ndim == 2 and len(parameter) == 6 else right(parameter)

    return wrong


def _in_bfloat16(right: Any) -> Any:
    return lambda self, x, *rest: right(self, x.bfloat16().to(x.dtype), *rest)


def _detached(right: Any) -> Any:
    def wrong(self: Any, *args: Any) -> Any:
        experts_Nk, weights_Nk = right(self, *args)
        return experts_Nk, weights_Nk.detach()

    return wrong


def _one_more(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        places_BTk, length = right(*args)
        return places_BTk - 1, length

    return wrong


def _last_first(right: Any) -> Any:
    def wrong(experts_BTk: Any, num_experts: int) -> Any:
        places_BTk, length = right(experts_BTk.flip(1), num_experts)
        return places_BTk.flip(1), length

    return wrong


def _of_the_other_slot(right: Any) -> Any:
    return staticmethod(lambda ctx, rows, weights, *at: right(ctx, rows, weights.flip(1), *at))


def _of_the_next_token(right: Any) -> Any:
    return staticmethod(lambda ctx, rows, weights, *at: right(ctx, rows, weights.roll(1, 0), *at))


def _softmax_again(right: Any) -> Any:
    def wrong(self: Any, x: Any, *rest: Any) -> Any:
        experts_Nk, weights_Nk = right(self, x, *rest)
        again = torch.nn.functional.linear(x, self.weight).softmax(-1).softmax(-1)
        return experts_Nk, again.gather(1, experts_Nk) + 0 * weights_Nk

    return wrong


def _renormalized(is_so: bool) -> Any:
    def make(right: Any) -> Any:
        def wrong(self: Any, *args: Any) -> Any:
            shape = self.experts
            self.experts = dataclasses.replace(shape, renormalizes=is_so)
            try:
                return right(self, *args)
            finally:
                self.experts = shape

        return wrong

    return make


def _weighs_bias(right: Any) -> Any:
    def wrong(self: Any, *args: Any) -> Any:
        experts_Nk, weights_Nk = right(self, *args)
        return experts_Nk, weights_Nk + self.bias[experts_Nk]

    return wrong


def _without_groups(right: Any) -> Any:
    def wrong(self: Any, scores_NE: Any) -> Any:
        return model_experts._best(scores_NE + self.bias, self.experts.top_k)

    return on_rank(1, wrong, right)


def _scaled(right: Any) -> Any:
    return lambda self, x: 2 * right(self, x)


def _without_shared_gate(right: Any) -> Any:
    def wrong(self: Any, *args: Any) -> Any:
        gate, self.shared_gate = self.shared_gate, None
        try:
            return right(self, *args)
        finally:
            self.shared_gate = gate

    return wrong


def _of_other_ranks(right: Any) -> Any:
    """Received rows are taken for those that another rank has sent."""
    return lambda groups, device: right(groups[::-1], device)


def _of_the_row_before(right: Any) -> Any:
    """Gradients of rows return each to the row before."""
    return lambda x, there, back: right(x, there, lambda grad: back(grad.roll(1, 0)))


def _experts_of_the_first(right: Any) -> Any:
    """Every rank of ep keeps the experts of the first one."""

    def wrong(parameter: Any, comm: Any) -> Any:
        made = right(parameter, comm)
        local = made.data.to_local()
        dist.broadcast(local, 0)
        return made

    return wrong


def _idle_without_gradient(right: Any) -> Any:
    """Rank 1 takes its experts for unused ones."""

    def wrong(self: Any, *args: Any) -> Any:
        for name, parameter in self.model.named_parameters() if dist.get_rank() == 1 else ():
            if name.endswith("experts.gate"):
                parameter.grad = None
        return right(self, *args)

    return wrong


def _by_rows(right: Any) -> Any:
    """Newton-Schulz steps of each half of the rows, as if it were a matrix."""
    return lambda matrix, *how: torch.cat([right(half, *how) for half in matrix.chunk(2)])


def _of_another(right: Any) -> Any:
    """Owners return the update of another of their matrices of the same shape."""

    def wrong(self: Any, each: Any, wholes: Any, dtype: Any) -> Any:
        shapes: dict[Any, list[Any]] = {}
        for matrix in wholes:
            shapes.setdefault(matrix.shape, []).append(matrix)
        turned = {
            matrix: wholes[of[number - 1]]
            for of in shapes.values()
            for number, matrix in enumerate(of)
        }
        return right(self, each, turned, dtype)

    return wrong


ROUTER = "blocks.0.mlp.router"

OF_EP: dict[str, Mutant] = {
    "balancing losses of each rank": (
        "llama", [(comm.Comm, "all_reduce", _own_counts)], "blocks.1.mlp.router",
        "the gradient of its input differs though its output gradient agrees",
    ),
    "balancing losses of each microbatch": (
        "llama", [(balance.Balance, "reduce", _of_each_microbatch)], "blocks.1.mlp.router",
        "the gradient of its input differs though its output gradient agrees",
    ),
    "balancing losses without gradient": (
        "llama", [(model_experts._WithLosses, "backward", _without_losses)], "blocks.1.mlp.router",
        "the gradient of its input differs though its output gradient agrees",
    ),
    "a load that is counted in each forward": (
        "llama", [(balance.Balance, "counting", _always_counting)], None,
        "or in the losses of experts",
    ),
    "a load of tokens without a label": (
        "llama", [(Load, "count", _with_padding)], "blocks.1.mlp.router",
        "the gradient of its input differs though its output gradient agrees",
    ),
    "a norm without experts": (
        "llama", [(step, "gradient_norm", _norm_without_experts)], None,
        "the fault is in their norm over shards",
    ),
    "a norm that counts experts once a rank of ep": (
        "llama", [(step, "gradient_norm", _norm_of_each_ep)], None,
        "the fault is in their norm over shards",
    ),
    "a router that reads bfloat16": (
        "llama", [(Router, "forward", _in_bfloat16)], ROUTER,
        "its output differs though its inputs agree",
    ),
    "weights of experts without gradient": (
        "llama", [(Router, "forward", _detached)], "blocks.1.mlp",
        "blocks.0.mlp.router.weight: the gradient is missing",
    ),
    "a dropped token that is kept": (
        "capacity", [(model_experts, "places_in_rows", _one_more)], "blocks.0.mlp",
        "its output differs though its inputs agree",
    ),
    "a capacity for the last tokens of a row": (
        "capacity", [(model_experts, "places_in_rows", _last_first)], "blocks.0.mlp",
        "its output differs though its inputs agree",
    ),
    "the weight of another slot": (
        "llama", [(model_experts._Combine, "forward", _of_the_other_slot)], "blocks.0.mlp",
        "its output differs though its inputs agree",
    ),
    "the weight of another token": (
        "llama", [(model_experts._Combine, "forward", _of_the_next_token)], "blocks.0.mlp",
        "its output differs though its inputs agree",
    ),
    "softmax of softmax": (
        "llama", [(Router, "forward", _softmax_again)], ROUTER,
        "its output differs though its inputs agree",
    ),
    "weights that sum to 1": (
        "llama", [(Router, "forward", _renormalized(True))], ROUTER,
        "its output differs though its inputs agree",
    ),
    "weights that do not sum to 1": (
        "windowed", [(Router, "forward", _renormalized(False))], ROUTER,
        "its output differs though its inputs agree",
    ),
    "a bias that weighs": (
        "windowed", [(Router, "forward", _weighs_bias)], ROUTER,
        "its output differs though its inputs agree",
    ),
    "a bias that follows a rank's own load": (
        "windowed", [(comm.Comm, "all_reduce", _own_counts)], ROUTER,
        "router.bias on rank 1 differs from its replica",
    ),
    "a selection among all groups on rank 1": (
        "windowed", [(Router, "_select", _without_groups)], ROUTER,
        "its integers differ",
    ),
    "a shared expert times k": (
        "llama", [(MLP, "forward", _scaled)], "blocks.0.mlp.shared",
        "its output differs though its inputs agree",
    ),
    "a shared expert without its gate": (
        "llama", [(MoE, "forward", _without_shared_gate)], "blocks.0.mlp.shared_gate",
        "it is never called",
    ),
    "rows of other ranks": (
        "llama", [(expert_split, "_by_expert", _of_other_ranks)], "blocks.0.mlp",
        "its output differs though its inputs agree",
    ),
    "gradients of the rows before": (
        "llama", [(expert_split, "mapped", _of_the_row_before)], "blocks.1.mlp",
        "the gradient of its input differs though its output gradient agrees",
    ),
    "the first rank's experts on all ranks": (
        "llama", [(expert_split, "_own_experts", _experts_of_the_first)], "blocks.0.mlp.experts",
        "first weight of blocks.0.mlp.experts.gate",
    ),
    "idle experts without gradient": (
        "llama", [(Step, "apply_gradients", _idle_without_gradient)], "blocks.1.mlp.experts",
        "has a gradient on some ranks, but none on rank 1",
    ),
}  # fmt: skip

OF_RECOMPUTED: dict[str, Mutant] = {
    "a load that a second forward counts": (
        "llama", [(balance.Balance, "counting", _always_counting)], None,
        "or in the losses of experts",
    ),
}  # fmt: skip

OF_EP_DP: dict[str, Mutant] = {
    "gradients of experts summed over ep too": (
        "llama", [(comm.Comm, "all_reduce_start", _with_ep)], "blocks.1.mlp.experts",
        "add up, so the fault is in the sum over ranks",
    ),
    "gradients of experts times ep": (
        "llama", [(comm.Comm, "all_reduce_start", _times_ep)], "blocks.1.mlp.experts",
        "is 2 times what it should be",
    ),
    "gradients of experts not summed over dp": (
        "llama", [(comm.Comm, "all_reduce_start", _without_dp)], "blocks.1.mlp.experts",
        "on rank 2 differs from its replica",
    ),
}  # fmt: skip

OF_EP_TP: dict[str, Mutant] = {
    "a router's gradient not summed over tp": (
        "llama", [(reduce, "partial_axes", _unsummed_router)], "blocks.1.mlp.router",
        "add up, so the fault is in the sum over ranks",
    ),
    "a shared expert times k": (  # a rank of tp has a term of its output
        "llama", [(MLP, "forward", _scaled)], "blocks.0.mlp",
        "its output differs though its inputs agree",
    ),
    "softmax of softmax": (
        "llama", [(Router, "forward", _softmax_again)], ROUTER,
        "its output differs though its inputs agree",
    ),
}  # fmt: skip

OF_MUON: dict[str, Mutant] = {
    "Muon of halves of a matrix": (
        "llama", [(optimizer, "orthogonalize", _by_rows)], "blocks.0.attention.q",
        "so the optimizer's update is wrong",
    ),
    "Muon's update of another matrix": (
        "llama", [(Owners, "scatter", _of_another)], "blocks.0.mlp.experts",
        "so the optimizer's update is wrong",
    ),
}  # fmt: skip

JOBS: list[dict[str, dict[str, Mutant]]] = [
    {"ep2": OF_EP, "ep2,recompute:full": OF_RECOMPUTED},
    {"dp2,ep2": OF_EP_DP, "ep2,tp2": OF_EP_TP, "fsdp2,ep2": OF_MUON},
]
"""Of each: strategies of as many ranks, and the mutants of each."""

QUICK = ("balancing losses of each rank", "a norm without experts", "rows of other ranks")
"""Mutants that run by default."""
