"""Operations and saved bytes of any module, by link of its chain, counted on the meta device.

A copy of the module runs one microbatch forward and backward on the meta device. Each operation
counts for the link (parallel/pipeline/links.py) whose modules run it; a module that is no chain is
one link. The backward of a link begins when the gradient of its output is available; the loss is a
part of the last link. The parts of the recorded run are numbered as they follow:

    forward   0 -> 1 -> ... -> L - 1                L links
    backward  2L - 1 <- ... <- L + 1 <- L
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx.account.recorder import Operation, Recorder, storage_id
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
    recorder, outputs, last = Recorder(), [0] * len(links), len(links) - 1
    recorder.enter(0)

    def advance(part: int, *_: Any) -> None:
        if part > recorder.part:
            recorder.enter(part)

    def leave(number: int, _module: Any, _args: Any, out: Any) -> None:
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        sizes = {storage_id(x): x.untyped_storage().nbytes() for x in results}
        outputs[number] = sum(sizes.values())
        for x in results:
            if x.requires_grad and number < last:
                x.register_hook(functools.partial(advance, 2 * last + 1 - number))

    try:
        shapes, of_shapes = copied_on_meta((model, objective))
        for number, names in enumerate(links):
            for module in map(shapes.get_submodule, names):
                module.register_forward_pre_hook(functools.partial(advance, number))
                module.register_forward_hook(functools.partial(leave, number))
        with recorder:
            loss = of_shapes.loss_sum(shapes, microbatch, 0)
            recorder.enter(last + 1)
            loss.backward()
    except Exception as error:
        words = text_of(error).strip().splitlines() or [""]
        raise ConfigError(
            f"{name} cannot be counted on the meta device, where tensors have shapes and no "
            f"numbers: {type(error).__name__}: {words[0][:200]}"
        ) from error
    levels = recorder.levels([p.grad for p in shapes.parameters() if p.grad is not None])
    begins: dict[Any, int] = recorder.begins
    # A part that was not entered is empty: it begins with the next.
    begin_of = [
        next((begins[later] for later in range(part, 2 * last + 2) if later in begins), -1)
        for part in range(2 * last + 2)
    ]
    blocks = {path for path, _ in blocks_of(model)}
    links_found: list[CountedLink] = []
    for number, names in enumerate(links):
        back = 2 * last + 1 - number
        before, kept = levels[begin_of[number]], levels[begin_of[number + 1]]
        end = begin_of[back + 1] if number else -1
        peak = max(levels[begin_of[back] : end + 1 or None]) if back in begins else kept
        links_found.append(
            CountedLink(
                modules=tuple(names),
                forward=tuple(recorder.operations[number]),
                backward=tuple(recorder.operations[back]),
                kept=kept - before,
                output=outputs[number],
                peak=max(peak, kept) - before,
                is_block=set(names) <= blocks,
            )
        )
    return links_found
