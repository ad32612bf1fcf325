"""The interface of a rank's pipeline stages, `Stages`, and its implementation for the decoder.

A model is a chain of links. A rank removes from its model all modules outside of its stages, with
their parameters. The other modules keep their names in the full model, so that initial weights,
checkpoints and gradients are matched by name. A weight that the first and the last link read, such
as a tied embedding, is stored on the ranks of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import override

from phalanx.models.decoder import Decoder, Stage

Outline = tuple[int, ...]
"""Shapes and dtypes of the outputs of all layers of some stages, encoded as integers."""


class Stages(ABC):
    """The stages of a model that this rank runs.

    Attributes:
        cut: the links of each stage of the full model.
        local_stages: numbers of the stages of this rank.
        first_trained: the first stage of the full model that has a trained parameter.
        outline: outline of the layers before a stage, which the caller sets before `run`; after
            `run`, it includes the layers of that stage.
        has_fixed_sizes: whether the shapes of a microbatch determine the shapes of its activations.
    """

    has_fixed_sizes: ClassVar[bool] = False

    def __init__(self, cut: Sequence[range], here: Sequence[int]) -> None:
        self.cut = list(cut)
        self.local_stages = list(here)
        self.first_trained = 0
        self.outline: Outline = ()

    @property
    def num_stages(self) -> int:
        """Number of stages of the full model."""
        return len(self.cut)

    @abstractmethod
    def weights(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters that a stage of this rank reads."""

    def prepare(self) -> None:  # noqa: B027
        """Install hooks and the like; called once, after all axes have split the model."""

    @abstractmethod
    def run(self, stage: int, received: Tensor | None, forward: Callable[[], Tensor]) -> Tensor:
        """Run the forward of a stage and return its output.

        Args:
            stage: number of a stage of this rank.
            received: the stage's input; None in the first stage.
            forward: runs the full model, and returns the caller's result, such as a loss.

        Returns:
            The result of `forward` in the last stage; else the input of the next stage.
        """


class Absent(nn.Module):
    """Placeholder for a block that only other ranks have."""


class DecoderStages(Stages):
    """The stages of `Decoder`, with links `embedding, block 0, ..., block L - 1, norm + output`."""

    has_fixed_sizes: ClassVar[bool] = True

    def __init__(self, model: Decoder, cut: Sequence[range], here: Sequence[int]) -> None:
        """Remove from `model`, in place, the modules outside of the stages `here`."""
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
        weights = (p for m in modules if m is not None for p in m.parameters())
        return list(dict.fromkeys(weights))

    @override
    def run(self, stage: int, received: Tensor | None, forward: Callable[[], Tensor]) -> Tensor:
        links, last = self.cut[stage], self._last_link
        #   link     0            1 ... L              L + 1
        #   module   embedding    block 0 ... L - 1    norm + output
        blocks = range(max(links.start - 1, 0), min(links.stop, last) - 1)
        self._model.stage = Stage(blocks, received, last in links)
        try:
            return forward()
        finally:
            self._model.stage = None
