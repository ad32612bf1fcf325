"""Sizes of the messages between the stages of any module, found by a run on the meta device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.parallel.pipeline.links import CutChain
from phalanx.parallel.pipeline.outline import Form, form_of, write
from phalanx.parallel.pipeline.stage import Outline
from phalanx.parallel.skeleton import copied_on_meta

Microbatch = tuple[int, int]
"""Rows and positions of a microbatch."""

RunOnShapes = Callable[[nn.Module, Microbatch], object]
"""Runs a module on the meta device as the objective does, on a microbatch of that size."""


class Border(NamedTuple):
    """The messages from a stage to the next one for a microbatch.

    Attributes:
        nbytes: bytes of the activation, which equal the bytes of its gradient.
        outline: outline that is sent before the activation if it is new.
    """

    nbytes: int
    outline: Outline


class Borders:
    """The borders between the stages of a chain."""

    def __init__(self, model: nn.Module, chain: CutChain, run: RunOnShapes) -> None:
        """Copy the model to the meta device; `run` runs only the copy."""
        (self._copy,) = copied_on_meta((model,))
        self._chain, self._run = chain, run
        self.after = functools.cache(self._after)

    def _after(self, microbatch: Microbatch) -> list[Border] | None:
        """Return the border after each stage but the last; None if the run on `meta` fails."""
        names = [self._chain.names(stage) for stage in range(len(self._chain.cut))]
        forms = dict[str, Form]()
        inputs = dict[int, Tensor]()  # stage -> its input

        def before(stage: int, _module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs.setdefault(stage, [*args, *kwargs.values()][0])

        def after(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            if (form := form_of(output)) is not None:
                forms[name] = form

        handles: list[RemovableHandle] = []
        for stage, name in ((stage, name) for stage, of in enumerate(names) for name in of):
            module, enters = self._copy.get_submodule(name), functools.partial(before, stage)
            handles.append(module.register_forward_pre_hook(enters, with_kwargs=True))
            handles.append(module.register_forward_hook(functools.partial(after, name)))
        try:
            self._run(self._copy, microbatch)
            return [
                Border(
                    inputs[stage].numel() * inputs[stage].itemsize,
                    write([name for of_stage in names[:stage] for name in of_stage], forms),
                )
                for stage in range(1, len(names))
            ]
        except Exception:  # any error of a module that needs values, which `meta` does not have
            return None
        finally:
            for handle in handles:
                handle.remove()
