"""Faults planted in the ranks of a job, for `verify` to find: each is a patch of one function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.comm import comm, fsdp
from phalanx.comm.comm import Ranks
from phalanx.models import attention, decoder, layers
from phalanx.parallel import data, reduce, sharded
from phalanx.parallel.context import partial
from phalanx.parallel.context import split as context_split
from phalanx.parallel.tensor import layers as tensor_layers
from phalanx.parallel.tensor.one_d import OneD
from phalanx.train import objective, step
from phalanx.verify import record

Patch = tuple[Any, str, Callable[[Any], Any]]
"""An owner, the name of what it has, and what makes the wrong one of the right one."""


@contextmanager
def planted(*patches: Patch) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, make in patches:
            right = getattr(owner, name)
            had = vars(owner).get(name)
            setattr(owner, name, make(right))
            if had is None:  # it inherits what is replaced
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, had)
        yield


def on_rank(rank: int, wrong: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (wrong if dist.get_rank() == rank else right)(*args, **kwargs)


def _norm_without_weight(right: Any) -> Any:
    return on_rank(1, lambda self, x: right(self, x) / self.weight, right)


def _shifted_dropout(right: Any) -> Any:
    return lambda x, p, keys, salt, places: right(x, p, keys, salt, places + 1)


def _gelu_gate(right: Any) -> Any:
    def wrong(self: Any, x: Any) -> Any:
        if self.gate is None:
            return right(self, x)
        return self.down(F.gelu(self.gate(x)) * self.up(x))

    return wrong


def _unturned_gradient(right: Any) -> Any:
    return staticmethod(lambda ctx, grad: (grad.clone(), None, None))


def _wider_window(right: Any) -> Any:
    return lambda places, documents, window: right(places, documents, window and window + 1)


def _without_k_norm(right: Any) -> Any:
    def wrong(self: Any, *args: Any) -> Any:
        norm, self.k_norm = self.k_norm, torch.nn.Identity()
        try:
            return right(self, *args)
        finally:
            self.k_norm = norm

    return wrong


def _same_keys(right: Any) -> Any:
    return lambda keys, layer: right(keys, 0)


def _cut_tie(right: Any) -> Any:
    return lambda self, x, labels=None, tied=None: right(
        self, x, labels, None if tied is None else tied.detach()
    )


def _last_token_twice(right: Any) -> Any:
    return on_rank(
        1,
        lambda x, weight, labels, **how: right(x, weight, labels, **how)
        + right(x[-1:], weight, labels[-1:], **how),
        right,
    )  # fmt: skip


def _frozen_bias(right: Any) -> Any:
    def wrong(self: Any, x: Any) -> Any:
        if self.bias is None:
            return right(self, x)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias.detach(), self.eps)

    return wrong


def _shifted_positions(right: Any) -> Any:
    def wrong(self: Any, ids: Any) -> Any:
        return right(self, ids + 1 if len(self.weight) == 32 else ids)  # the table of positions

    return on_rank(1, wrong, right)


def _nan_in_gradient(right: Any) -> Any:
    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * float("nan")

    def wrong(self: Any, x: Any) -> Any:
        return right(self, Poison.apply(x))

    return on_rank(1, wrong, right)


def _forgets_microbatches(right: Any) -> Any:
    def wrong(self: Any, last: Any, reached: Any = None) -> None:
        right(self, last, reached)
        if last:
            for parameter in self.parameters:
                parameter.grad = None

    return wrong


def _decay_everywhere(right: Any) -> Any:
    def wrong(model: Any, config: Any) -> Any:
        made = right(model, config)
        for group in made.param_groups:
            group["weight_decay"] = config.weight_decay
        return made

    return wrong


def _local_loss(right: Any) -> Any:
    """The sums of the losses are not reduced; the count of tokens is."""

    def wrong(self: Any, tensor: Any, name: str, *rest: Any) -> Any:
        is_loss = name == "loss" and tensor.dtype == torch.float64
        return tensor if is_loss else right(self, tensor, name, *rest)

    return wrong


def _unreduced(right: Any) -> Any:
    """Gradients are not reduced; what the ranks agree on is."""

    def wrong(self: Any, tensor: Any, name: str, reduction: str = "sum") -> Any:
        if (name, reduction) == ("grad", "sum"):
            return comm.Pending(tensor)
        return right(self, tensor, name, reduction)

    return wrong


def _moment_on_rank_1(key: str) -> Callable[[Any], Any]:
    """Only after the last step, so that no weight shows it."""

    def make(right: Any) -> Any:
        def wrong(self: Any, *args: Any) -> Any:
            result = right(self, *args)
            if dist.get_rank() == 1 and self.steps_done == self.num_steps:
                next(iter(self.optimizer.state.values()))[key].mul_(1 + 1e-12)
            return result

        return wrong

    return make


def _divided(right: Any) -> Any:
    def wrong(self: Any, module: Any) -> None:
        right(self, module)
        module.set_gradient_divide_factor(2.0)

    return wrong


def _swapped_shards(right: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = right(self, *args, **kwargs)
        if done is not None:
            done.wait()
        output = args[0] if args else kwargs["output_tensor"]
        output.copy_(output.roll(len(output) // 2, 0))
        return done

    return wrong


def _flipped(right: Any) -> Any:
    return lambda self, x, weight: right(self, x, weight).flip(1)


def _dropout_without_place(right: Any) -> Any:
    return lambda x, p, keys, salt, places, feature: right(x, p, keys, salt, None, feature)


def _unsummed_input_gradient(right: Any) -> Any:
    def wrong(self: Any, x: Any, weights: Any, d_ys: Any) -> Any:
        d_x, d_weights = right(self, x, weights, d_ys)
        return (d_x if len(weights) != 2 else d_x / 2), d_weights

    return wrong


def _unsummed_exponentials(right: Any) -> Any:
    return lambda self, tensor, axis, reduction="sum": (
        tensor if tensor.ndim == 2 else right(self, tensor, axis, reduction)
    )


Mutant = tuple[str, list[Patch], str | None, str]
"""Which case, the patches, the module that is to be named, and words of the verdict."""

OF_DP: dict[str, Mutant] = {
    "a norm on rank 1 without its weight": (
        "llama", [(layers.Norm, "forward", _norm_without_weight)],
        "blocks.0.attention_norm", "its output differs",
    ),
    "dropout that begins at the second position": (
        "llama", [(layers, "dropout", _shifted_dropout)], "dropout", "its output differs",
    ),
    "attention across documents": (
        "llama", [(objective, "documents_of", lambda right: lambda documents, device: None)],
        "blocks.0.attention", "its input to blocks.0.attention.output",
    ),
    "a rotation whose gradient is not turned back": (
        "llama", [(attention._Rotation, "backward", _unturned_gradient)],
        "blocks.1.attention", "backward passes a different gradient",
    ),
    "a window that is one position too wide": (
        "windowed", [(attention, "first_attended", _wider_window)],
        "blocks.0.attention", "its input to blocks.0.attention.output",
    ),
    "GELU in place of SiLU": (
        "llama", [(decoder.MLP, "forward", _gelu_gate)], "blocks.0.mlp", "blocks.0.mlp.down",
    ),
    "keys that are not normalised": (
        "llama", [(attention.Attention, "forward", _without_k_norm)],
        "blocks.0.attention.k_norm", "never called",
    ),
    "the same dropout in all blocks": (
        "llama", [(decoder, "layer_keys", _same_keys)], "", "its input to blocks.1",
    ),
    "a tie that gives no gradient from the head": (
        "llama", [(decoder.Head, "forward", _cut_tie)], "embedding", "embedding.weight",
    ),
    "a token that counts twice": (
        "llama", [(decoder, "token_loss_sum", _last_token_twice)], "output", "output differs",
    ),
    "a bias of norms without gradient": (
        "gpt2", [(layers.Norm, "forward", _frozen_bias)], "norm", "gradient is missing",
    ),
    "positions of rank 1 shifted by one": (
        "gpt2", [(decoder.Embedding, "forward", _shifted_positions)],
        "position_embedding", "its output differs",
    ),
    "NaN in a gradient of rank 1": (
        "gpt2", [(decoder.MLP, "forward", _nan_in_gradient)], "blocks.1.mlp", "not finite",
    ),
    "gradients of all microbatches but the last lost": (
        "llama", [(data.BucketedReducer, "before_backward", _forgets_microbatches)],
        "norm", "in the sum over ranks or microbatches",
    ),
    "gradients that stay a rank's own": (
        "llama",
        [(comm.Comm, "all_reduce_start", _unreduced)],
        "norm", "in the sum over ranks or microbatches",
    ),
    "decay of vectors": (
        "llama", [(record, "build_optimizer", _decay_everywhere)],
        "blocks.0.attention_norm", "so the optimizer's update is wrong",
    ),
    "a rate of the step after": (
        "llama",
        [(step, "learning_rate", lambda right: lambda config, n, num: right(config, n + 1, num))],
        None, "the learning rate",
    ),
    "a loss that is not summed over ranks": (
        "llama", [(comm.Comm, "all_reduce", _local_loss)], None, "sum of the losses over ranks",
    ),
    "a norm that counts each gradient twice": (
        "gpt2",
        [(step, "gradient_norm", lambda right: lambda *args: 2 * right(*args))],
        None, "norm over shards and stages",
    ),
    "a first moment that differs on rank 1 alone": (
        "gpt2", [(step.Step, "apply_gradients", _moment_on_rank_1("exp_avg"))],
        "embedding", "the first moment of embedding.weight on rank 1 differs from its replica",
    ),
    "a second moment that differs on rank 1 alone": (
        "llama", [(step.Step, "apply_gradients", _moment_on_rank_1("exp_avg_sq"))],
        "embedding", "the second moment of embedding.weight on rank 1 differs from its replica",
    ),
}  # fmt: skip

OF_FSDP: dict[str, Mutant] = {
    "gradients averaged over the ranks": (
        "llama", [(sharded.ShardedReducer, "_set_up", _divided)], "norm", "a mean instead of a sum",
    ),
    "shards gathered in the order of other ranks": (
        "gpt2", [(fsdp.ShardGather, "__call__", _swapped_shards)],
        "embedding", "its output differs",
    ),
}  # fmt: skip

OF_TP: dict[str, Mutant] = {
    "positions flipped after a row product": (
        "llama", [(OneD, "row_parallel_linear", _flipped)],
        "blocks.0.attention.output", "its output differs",
    ),
    "dropout of the first positions on all ranks": (
        "llama", [(tensor_layers, "dropout", _dropout_without_place)],
        "dropout", "most on rank 1",
    ),
    "half the gradient to the input of the MLP": (
        "llama", [(OneD, "column_parallel_linear_backward", _unsummed_input_gradient)],
        "blocks.1.mlp", "gradient of its input differs",
    ),
    "exponentials of one rank's part of the vocabulary": (
        "gpt2", [(Ranks, "all_reduce", _unsummed_exponentials)], "output", "its output differs",
    ),
    "norms whose gradients stay a rank's own": (
        "gpt2", [(reduce, "partial_axes", lambda right: lambda parameter: ())],
        "norm", "differs from its replica",
    ),
}  # fmt: skip


def _dropped_hop(right: Any) -> Any:
    """A block of keys takes the place of those before it instead of joining them."""

    def wrong(self: Any, at: Any, o: Any, lse: Any) -> None:
        self.o_BTHK[at], self.lse_BTH[at] = o, lse

    return wrong


def _without_delta(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        made = right(*args)
        zeros = {name: torch.zeros_like(getattr(made, name)) for name in ("o_BTHK", "delta_BTH")}
        return dataclasses.replace(made, **zeros)  # flash attention computes delta of o

    return wrong


def _first_positions_alone(right: Any) -> Any:
    return lambda x, p, keys, salt, places: right(x, p, keys, salt)


def _unshifted_labels(right: Any) -> Any:
    """Labels stay in the order of the row."""

    def wrong(x: Any, attention: Any, comm: Any, padding: int = 0) -> Any:
        cut = right(x, attention, comm, padding)
        return cut if padding == 0 else cut.flip(1)

    return wrong


OF_CP: dict[str, Mutant] = {
    "keys after a query that it looks at": (
        "llama", [(partial, "_block_mask", lambda right: lambda *args: None)],
        "blocks.0.attention", "its input to blocks.0.attention.output",
    ),
    "a hop that is not merged with those before": (
        "gpt2", [(partial.PartialAttention, "_merge", _dropped_hop)],
        "blocks.0.attention", "its input to blocks.0.attention.output",
    ),
    "gradients of keys that are summed without delta": (
        "llama", [(partial.BackwardState, "of", _without_delta)],
        "blocks.1.attention", "backward passes a different gradient",
    ),
    "dropout of the first positions on all ranks": (
        "llama", [(layers, "dropout", _first_positions_alone)], "dropout", "most on rank 1",
    ),
    "labels in another order than tokens": (
        "gpt2", [(context_split, "cut_positions", _unshifted_labels)],
        "", "its input to output",
    ),
}  # fmt: skip

SLOW = frozenset(
    {
        "attention across documents",
        "keys that are not normalised",
        "exponentials of one rank's part of the vocabulary",
        "a hop that is not merged with those before",
        "a microbatch's gradients lost in one stage",
        "a gradient of other rows",
        "norms of a stage whose gradients stay a rank's own",
        "GELU in place of SiLU",
        "the same dropout in all blocks",
        "a token that counts twice",
        "positions of rank 1 shifted by one",
        "gradients that stay a rank's own",
        "a rate of the step after",
        "a norm that counts each gradient twice",
        "a first moment that differs on rank 1 alone",
        "shards gathered in the order of other ranks",
        "dropout of the first positions on all ranks",
        "a norm that counts the tied copy twice",
        "a loss that stays with the last stage",
        "an activation for another microbatch, under tp",
        "weights read as float32",
        "an optimizer without the last norm",
        "a norm that only the run changes",
        "a position in the data by the present batch",
        "a schedule that begins anew",
        "evaluation with dropout",
        "labels that are not shifted",
        "dropout that begins at the second position",
        "a tie that gives no gradient from the head",
        "half the gradient to the input of the MLP",
        "labels in another order than tokens",
        "dropout of a block by its number in the stage",
        "gradients times the microbatches",
        "one buffer for all that is received",
        "gradients of a stage that stay a data rank's own",
        "first weights that begin anew on each rank",
        "evaluation that leaves the model in eval mode",
        "reads that begin at the first element of a shard",
        "rank 1 with the rows of rank 0",
        "a bias of norms without gradient",
        "a window that is one position too wide",
        "decay of vectors",
        "a loss that counts once a stage",
        "a stage without its last block",
        "a second moment that differs on rank 1 alone",
        "gradients of keys that are summed without delta",
        "norms whose gradients stay a rank's own",
    }
)
"""Mutants whose kind another shows too."""
