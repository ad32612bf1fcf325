"""Operations and saved bytes of any module, by link of its chain, counted on the meta device.

A copy of the module runs one microbatch forward and backward on the meta device. Each operation
counts for the link (parallel/pipeline/links.py) whose modules run it; a module that is no chain is
one link. The backward of a link begins when the gradient of its output is available.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx.account.count import AllocationTrace, storage_id
from phalanx.account.work import Operation, operation_of
from phalanx.errors import ConfigError, StrategyError, text_of
from phalanx.parallel.blocks import blocks_of
from phalanx.parallel.pipeline.links import Links, links_of
from phalanx.parallel.skeleton import copied_on_meta


@dataclass(frozen=True)
class CountedLink:
    """Operations and bytes of one link for one microbatch.

    Attributes:
        modules: names of its modules.
        forward, backward: its operations, without recomputation.
        kept: bytes saved for backward, its output included.
        output: bytes of its output.
        peak: peak bytes in its backward, in addition to bytes that earlier links saved.
        is_block: whether recomputation can run it again.
    """

    modules: tuple[str, ...]
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    kept: int
    output: int
    peak: int
    is_block: bool

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward."""
        return sum(each.flops for each in (*self.forward, *self.backward))


def count_module(model: nn.Module, objective: Any, microbatch: Any, name: str) -> list[CountedLink]:
    """Count one microbatch by link, on a copy of `model`, which may be on any device.

    Args:
        model: the whole model, not split.
        objective: an object with `loss_sum(model, microbatch, step)`.
        microbatch: the samples, on the meta device.
        name: name of the job, for error messages.

    Raises:
        ConfigError: the module does not run on the meta device; the message has the cause.
    """
    try:
        links: Links = links_of(model)
    except StrategyError:  # it is no chain
        links = [[""]]
    try:
        shapes, of_shapes = copied_on_meta((model, objective))
        run = _Run(shapes, links)
        with run:
            loss = of_shapes.loss_sum(shapes, microbatch, 0)
            run.begin_backward()
            loss.backward()
    except Exception as error:
        words = text_of(error).strip().splitlines() or [""]
        raise ConfigError(
            f"{name} cannot be counted on the meta device, where tensors have shapes and no "
            f"numbers: {type(error).__name__}: {words[0][:200]}"
        ) from error
    gradients = [p.grad for p in shapes.parameters() if p.grad is not None]
    blocks = {path for path, _ in blocks_of(model)}
    return run.counted(gradients, blocks)


class _Run(AllocationTrace):
    """A dispatch mode that records operations and storages by link."""

    def __init__(self, model: nn.Module, links: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self._links = links
        self._part, self._is_backward = 0, False
        self._forward: list[list[Operation]] = [[] for _ in links]
        self._backward: list[list[Operation]] = [[] for _ in links]
        self._begins = [0] * len(links)
        self._output = [0] * len(links)
        self._backs: list[tuple[int, int]] = []
        for number, names in enumerate(links):
            for each in names:
                module = model.get_submodule(each)
                module.register_forward_pre_hook(functools.partial(self._enter, number))
                module.register_forward_hook(functools.partial(self._leave, number))

    def _enter(self, number: int, *_: Any) -> None:
        if number > self._part:
            for between in range(self._part + 1, number + 1):
                self._begins[between] = len(self.events)
            self._part = number

    def _leave(self, number: int, _module: Any, _args: Any, out: Any) -> None:
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        sizes = {storage_id(x): x.untyped_storage().nbytes() for x in results}
        self._output[number] = sum(sizes.values())
        for x in results:
            if x.requires_grad and number < len(self._links) - 1:
                x.register_hook(functools.partial(self._back, number))

    def begin_backward(self) -> None:
        """Record the end of forward; the loss counts for the last link."""
        self._is_backward, self._part = True, len(self._links) - 1
        self.mark("backward")
        self._backs.append((len(self.events), self._part))

    def _back(self, number: int, _gradient: Tensor) -> None:
        if number < self._part:
            self._part = number
            self._backs.append((len(self.events), number))

    def on_operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Record an operator for the current link."""
        if (found := operation_of(func, args, kwargs, out)) is not None:
            (self._backward if self._is_backward else self._forward)[self._part].append(found)

    def counted(self, gradients: list[Tensor], blocks: set[str]) -> list[CountedLink]:
        """Return the counts of each link; `gradients` of parameters do not count as saved bytes."""
        levels = self.levels(gradients)
        begins = [*self._begins, self.marks["backward"]]
        ends = [at for at, _ in self._backs[1:]] + [len(levels) - 1]
        most = dict.fromkeys(range(len(self._links)), 0)
        for (begin, number), end in zip(self._backs, ends, strict=True):
            most[number] = max(levels[begin : end + 1]) - levels[begins[number]]
        return [
            CountedLink(
                modules=tuple(names),
                forward=tuple(self._forward[number]),
                backward=tuple(self._backward[number]),
                kept=levels[begins[number + 1]] - levels[begins[number]],
                output=self._output[number],
                peak=max(most[number], levels[begins[number + 1]] - levels[begins[number]]),
                is_block=set(names) <= blocks,
            )
            for number, names in enumerate(self._links)
        ]
