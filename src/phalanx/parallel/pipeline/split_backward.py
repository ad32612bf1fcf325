"""Backward in two passes: first the gradient of the input, later the gradients of the weights.

The stage before waits for the gradient of its output, and nobody for the gradients of the weights
(Qi et al. 2023, arXiv 2401.10241). Autograd makes both in one, so the graph is cut:

    output <- ... <- node <-+- ... <- input      `backward_input` walks this path, and keeps the
                            |                    gradient that reaches each node which also leads
                            +- weight            to a weight; `backward_weights` starts there

PyTorch finds those nodes (torch.distributed.pipelining). The weights get their gradients through
their own nodes, so that hooks on them run as in any backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

# Private, of a part that is public; tests/parallel/pipeline/test_split_backward.py pins it.
from torch.distributed.pipelining._backward import stage_backward_input

from phalanx.parallel.pipeline.awaited import StandIn

Groups = Sequence[dict[str, Any]]
"""What `backward_weights` needs: nodes of the graph, what reached them, and their weights."""


def backward_input(
    output: Tensor,
    gradient: Tensor | None,
    received: Tensor | None,
    weights: Iterable[nn.Parameter],
) -> Groups:
    """Leave the gradient in `received.grad`, and return what `backward_weights` needs.

    The graph of the stage's output is only good for `backward_weights` afterwards. The gradient of
    a loss is None, and so is the input of the first stage, which has only weights.
    """
    if received is None:
        edge = get_gradient_edge(output)
        reached: list[Tensor | None] = [None] * edge.output_nr
        reached.append(torch.ones_like(output) if gradient is None else gradient)
        nodes = [get_gradient_edge(weight).node for weight in weights]
        return [{"intermediates": [edge.node], "grads": [tuple(reached)], "params": nodes}]
    gradients = None if gradient is None else [gradient]
    if output._is_view():  # pyright: ignore[reportPrivateUsage]
        output = cast(Tensor, StandIn.apply(output))  # torch detaches it in place, but no view
    _, groups = stage_backward_input([output], gradients, [received], iter(weights))
    return groups


def backward_weights(groups: Groups, weights: Iterable[nn.Parameter]) -> None:
    """Add the gradients of the weights to their `.grad`."""
    weight_of = {get_gradient_edge(weight).node: weight for weight in weights}
    for group in groups:
        reached = list(zip(group["intermediates"], group["grads"], strict=True))
        edges = [
            (GradientEdge(node, at), gradient)
            for node, gradients in reached
            for at, gradient in enumerate(gradients)
            if gradient is not None
        ]
        # One node may lead to another: what reached each is known, and is not added up again.
        hooks = [node.register_prehook(partial(_known, all_of)) for node, all_of in reached]
        try:
            torch.autograd.backward(
                [edge for edge, _ in edges],
                [gradient for _, gradient in edges],
                retain_graph=True,  # groups may share nodes; all of it goes with `groups`
                inputs=[weight_of[node] for node in group["params"]],
            )
        finally:
            for hook in hooks:
                hook.remove()


def _known(all_of: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    return all_of
