"""Cut a decoder into stages: which blocks a rank keeps, and what it runs of them at a time.

The chain that is cut is `embedding, block 0, ..., block L - 1, norm and output projection`. What a
rank has no stage of is removed from its model, parameters and all; the names of what stays are
those of the whole model, so that first weights, checkpoints and gradients go by name as ever. Where
the embedding is the output projection too, the ranks of the first and of the last stage hold it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from phalanx.models.decoder import Decoder, Stage


class Absent(nn.Module):
    """Stands for a block that other ranks have."""


class Stages:
    """The stages of a decoder that this rank runs.

    Attributes:
        model: the decoder, of which only what these stages need is left.
        cut: the links of the chain in each stage of the whole model; see above.
        here: numbers of the stages of this rank.
    """

    def __init__(self, model: Decoder, cut: Sequence[range], here: Sequence[int]) -> None:
        """Remove from `model`, in place, what the stages `here` do not run."""
        self.model = model
        self.cut = list(cut)
        self.here = list(here)
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

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.cut)

    @property
    def is_tied(self) -> bool:
        """Whether the first and the last stage hold one weight."""
        return self.model.shape.tied and self.num_stages > 1

    def weights(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters that a stage of this rank reads."""
        model, links = self.model, self.cut[stage]
        modules: list[nn.Module | None] = [
            model.blocks[link - 1] for link in links if 0 < link < self._last_link
        ]
        if 0 in links:
            modules += [model.embedding, model.position_embedding]
        if self._last_link in links:
            modules += [model.norm, model.output, model.embedding if model.shape.tied else None]
        found = [p for m in modules if m is not None for p in m.parameters()]
        return list(dict.fromkeys(found))

    @contextmanager
    def running(self, stage: int, received: Tensor | None, microbatch: int) -> Generator[None]:
        """Let a forward of the model be that of one stage, on what the one before has sent."""
        links, last = self.cut[stage], self._last_link
        blocks = range(max(links.start - 1, 0), min(links.stop, last) - 1)
        self.model.stage = Stage(blocks, received, last in links, microbatch)
        try:
            yield
        finally:
            self.model.stage = None
