"""The stages that a rank has of a model, and of a decoder: what it keeps, and what runs at a time.

A model is a chain of links. What a rank has no stage of is removed from its model, parameters and
all; what stays keeps its names in the whole model, so that first weights, checkpoints and
gradients go by name as ever. A weight that the first and the last link read, as a tied embedding,
is held by the ranks of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import override

from phalanx.models.decoder import Decoder, Stage

Outline = tuple[int, ...]
"""Shapes and data types of what the layers of some stages give, as `Stages` write it."""


class Stages(ABC):
    """The stages of a model that this rank runs.

    Attributes:
        cut: the links of the chain in each stage of the whole model.
        here: numbers of the stages of this rank.
        first_trained: the first stage of the whole model that has a trained parameter.
        outline: of what the layers before a stage give, to be set before the stage runs; then of
            what those give that it has run, too.
        has_fixed_sizes: whether the shapes of a microbatch decide the shapes of its activations.
    """

    has_fixed_sizes: ClassVar[bool] = False

    def __init__(self, cut: Sequence[range], here: Sequence[int]) -> None:
        self.cut = list(cut)
        self.here = list(here)
        self.first_trained = 0
        self.outline: Outline = ()

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.cut)

    @abstractmethod
    def weights(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters that a stage of this rank reads."""

    def prepare(self) -> None:  # noqa: B027
        """Get ready to run, once all axes have split the model."""

    @abstractmethod
    def run(self, stage: int, received: Tensor | None, forward: Callable[[], Tensor]) -> Tensor:
        """Return what a stage makes of what the one before has sent.

        Args:
            stage: of this rank.
            received: the stage's input; None in the first stage.
            forward: runs the whole model, and returns what the caller makes of its output.

        Returns:
            What `forward` does, from the last stage; else the input of the next stage.
        """


class Absent(nn.Module):
    """Stands for a block that other ranks have."""


class DecoderStages(Stages):
    """The stages of our decoder: `embedding, block 0, ..., block L - 1, norm and output`."""

    has_fixed_sizes: ClassVar[bool] = True

    def __init__(self, model: Decoder, cut: Sequence[range], here: Sequence[int]) -> None:
        """Remove from `model`, in place, what the stages `here` do not run."""
        super().__init__(cut, here)
        self._model = model
        self._last_link = len(model.blocks) + 1
        kept = {link for stage in here for link in cut[stage]}
        absent = ["position_embedding"] if 0 not in kept else []
        if 0 not in kept and not (model.shape.tied and self._last_link in kept):
            absent += ["embedding"]
        if self._last_link not in kept:
            absent += ["norm", "output"]
        for name in absent:
            setattr(model, name, None)
        for index in range(len(model.blocks)):
            if index + 1 not in kept:
                model.blocks[index] = Absent()

    @override
    def weights(self, stage: int) -> list[nn.Parameter]:
        model, links = self._model, self.cut[stage]
        modules: list[nn.Module | None] = [
            model.blocks[link - 1] for link in links if 0 < link < self._last_link
        ]
        if 0 in links:
            modules += [model.embedding, model.position_embedding]
        if self._last_link in links:
            modules += [model.norm, model.output, model.embedding if model.shape.tied else None]
        found = [p for m in modules if m is not None for p in m.parameters()]
        return list(dict.fromkeys(found))

    @override
    def run(self, stage: int, received: Tensor | None, forward: Callable[[], Tensor]) -> Tensor:
        links, last = self.cut[stage], self._last_link
        blocks = range(max(links.start - 1, 0), min(links.stop, last) - 1)
        self._model.stage = Stage(blocks, received, last in links)
        try:
            return forward()
        finally:
            self._model.stage = None
