"""Backward in two passes: first the gradient of the input, later the gradients of the weights.

The previous stage waits for the gradient of its output, but no stage waits for the gradients of
weights (Qi et al. 2023, arXiv 2401.10241). Autograd computes both at once, so the graph is cut:

    output <- ... <- node <-+- ... <- input      `backward_input` follows this path, and stores the
                            |                    gradient at each node that also leads to a weight;
                            +- weight            `backward_weights` starts from these nodes

PyTorch finds those nodes (torch.distributed.pipelining). The weights get their gradients through
their own accumulation nodes, so that hooks on weights run as in any backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

# Private, in a public package; tests/parallel/pipeline/test_split_backward.py pins it.
from torch.distributed.pipelining._backward import stage_backward_input

from phalanx.parallel.pipeline.unknown_tensor import StandIn

Groups = Sequence[dict[str, Any]]
"""Input of `backward_weights`: nodes of the graph, their gradients, and their weights."""


def backward_input(
    output: Tensor,
    gradient: Tensor | None,
    received: Tensor | None,
    weights: Iterable[nn.Parameter],
) -> Groups:
    """Compute the gradient of the input into `received.grad`; return the work for the weights.

    Afterwards only `backward_weights` can use the graph of the stage's output. `gradient` is None
    if `output` is a loss. `received`, the stage's input, is None if it needs no gradient, as in the
    first stage.
    """
    if received is None:
        # Nothing is before this stage: I is empty, and W runs the whole backward from the output.
        edge = get_gradient_edge(output)
        reached: list[Tensor | None] = [None] * edge.output_nr
        reached.append(torch.ones_like(output) if gradient is None else gradient)
        nodes = [get_gradient_edge(weight).node for weight in weights]
        return [{"intermediates": [edge.node], "grads": [tuple(reached)], "params": nodes}]
    gradients = None if gradient is None else [gradient]
    if output._is_view():  # pyright: ignore[reportPrivateUsage]
        output = cast(Tensor, StandIn.apply(output))  # torch calls detach_, which refuses views
    _, groups = stage_backward_input([output], gradients, [received], iter(weights))
    return groups


def backward_weights(groups: Groups, weights: Iterable[nn.Parameter]) -> None:
    """Add the gradients of the weights to their `.grad`."""
    weight_of = {get_gradient_edge(weight).node: weight for weight in weights}
    for group in groups:
        reached = list(zip(group["intermediates"], group["grads"], strict=True))
        # A group has nodes of the graph between input and weights, each with the gradients that I
        # left there. Backward starts at all of them at once, and accumulates into the weights of
        # the group only:
        #
        #   node n  --- gradient --->  weight a        I has passed n on its way to the input
        edges = [
            (GradientEdge(node, at), gradient)
            for node, gradients in reached
            for at, gradient in enumerate(gradients)
            if gradient is not None
        ]
        # One node may lead to another: the hooks replace each gradient by the stored total.
        hooks = [node.register_prehook(partial(_known, all_of)) for node, all_of in reached]
        try:
            torch.autograd.backward(
                [edge for edge, _ in edges],
                [gradient for _, gradient in edges],
                retain_graph=True,  # groups may share nodes; the graph is freed with `groups`
                inputs=[weight_of[node] for node in group["params"]],
            )
        finally:
            for hook in hooks:
                hook.remove()


def _known(all_of: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    return all_of
