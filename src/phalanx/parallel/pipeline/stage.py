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
    """Stands for a module that other ranks have."""


class Stages:
    """The stages of a decoder that this rank runs.

    Attributes:
        model: the decoder, of which only what these stages need is left.
        cut: the links of the chain in each stage of the whole model; see above.
    """

    def __init__(self, model: Decoder, cut: Sequence[range], here: Sequence[int]) -> None:
        """Remove from `model`, in place, what the stages `here` do not run."""
        self.model = model
        self.cut = list(cut)
        self._num_links = len(model.blocks) + 2
        kept = {link for stage in here for link in cut[stage]}
        last = self._num_links - 1
        if 0 not in kept and not (model.shape.tied and last in kept):
            model.embedding = Absent()  # pyright: ignore[reportAttributeAccessIssue]
        if 0 not in kept and model.position_embedding is not None:
            model.position_embedding = None
        for index in range(len(model.blocks)):
            if index + 1 not in kept:
                model.blocks[index] = Absent()
        if last not in kept:
            model.norm, model.output = Absent(), Absent()  # pyright: ignore[reportAttributeAccessIssue]

    def weights(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters that a stage reads."""
        model, links = self.model, self.cut[stage]
        modules: list[nn.Module] = [
            model.blocks[link - 1] for link in links if 0 < link < self._num_links - 1
        ]
        if 0 in links:
            modules += [model.embedding]
            modules += [model.position_embedding] if model.position_embedding is not None else []
        if self._num_links - 1 in links:
            modules += [model.norm, model.output, *([model.embedding] if model.shape.tied else [])]
        found = [p for module in modules for p in module.parameters() if p.requires_grad]
        return list(dict.fromkeys(found))

    @contextmanager
    def running(self, stage: int, received: Tensor | None) -> Generator[None]:
        """Let a forward of the model be that of one stage, on what the one before has sent."""
        links, last = self.cut[stage], self._num_links - 1
        blocks = range(max(links.start - 1, 0), min(links.stop, last) - 1)
        self.model.stage = Stage(blocks, received, last in links)
        try:
            yield
        finally:
            self.model.stage = None
