"""How the tokens of a step were routed to experts, over the global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from phalanx.report.units import percent


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The load of each expert in a step, equal on all ranks; lists have an entry for each layer.

    Attributes:
        layers: numbers of the blocks with experts.
        counts: selections of each expert, also dropped ones.
        entropy: entropy of the load / ln E: 1 if each expert has as many, 0 if one has all.
        expert_load: selections of the busiest expert / the mean of all experts.
        rank_load: selections of the busiest rank of ep / the mean of these ranks, also dropped
            ones; 1 without ep. Without a capacity these are the rows that ranks compute. Groups of
            ep that have the same experts count as one.
        dropped: part of the selections that a capacity dropped.
        aux_loss: the balancing loss, with its coefficient, which the loss contains.
        z_loss: the z loss, likewise.
    """

    layers: Sequence[int]
    counts: Sequence[Sequence[int]]
    entropy: Sequence[float]
    expert_load: Sequence[float]
    rank_load: Sequence[float]
    dropped: Sequence[float]
    aux_loss: float
    z_loss: float

    @staticmethod
    def of(
        layers: Sequence[int],
        counts: Sequence[Sequence[int]],
        num_dropped: Sequence[float],
        num_ranks: int,
        losses: tuple[float, float],
    ) -> Routing | None:
        """Return the routing of a step; None if no token was routed.

        Args:
            layers: numbers of the blocks with experts.
            counts: selections of each expert, for each layer.
            num_dropped: dropped selections of each layer.
            num_ranks: ranks of ep, each with as many consecutive experts.
            losses: the balancing loss and the z loss.
        """
        if not all(map(sum, counts)):
            return None
        each = len(counts[0]) // num_ranks
        of_ranks = [[sum(of[at : at + each]) for at in range(0, len(of), each)] for of in counts]
        return Routing(
            layers=layers,
            counts=counts,
            entropy=[_entropy(of) for of in counts],
            expert_load=[max(of) / fmean(of) for of in counts],
            rank_load=[max(of) / fmean(of) for of in of_ranks],
            dropped=[num / sum(of) for num, of in zip(num_dropped, counts, strict=True)],
            aux_loss=losses[0],
            z_loss=losses[1],
        )

    def means(self) -> dict[str, float]:
        """Return the mean over layers of each figure: of ranks that wait in each layer, the sum."""
        names = ("entropy", "expert_load", "rank_load", "dropped")
        return {name: fmean(getattr(self, name)) for name in names}

    def brief(self) -> str:
        """Return the mean load of the busiest expert, or under ep rank, and the dropped share."""
        means = self.means()
        whose = "rank" if max(self.rank_load) > 1 else "expert"
        dropped = f", {percent(means['dropped'])} dropped" if any(self.dropped) else ""
        return f"busiest {whose} {means[f'{whose}_load']:.2f}x{dropped}"

    def text(self) -> str:
        """Return all figures, as means over layers, and the least even layer."""
        means, least = self.means(), min(self.entropy)
        layer = self.layers[self.entropy.index(least)]
        words = [
            f"entropy {means['entropy']:.3f} (1 is even; layer {layer}: {least:.3f})",
            f"busiest expert {means['expert_load']:.2f}x the mean, rank {means['rank_load']:.2f}x",
            f"{percent(means['dropped'])} dropped",
        ]
        if self.aux_loss or self.z_loss:
            words.append(f"balancing loss {self.aux_loss:.4g}, z loss {self.z_loss:.4g}")
        return ", ".join(words)


def _entropy(counts: Sequence[int]) -> float:
    """Return the entropy of the load of one layer's experts, as a part of the largest one."""
    shares = [num / sum(counts) for num in counts if num]
    return -sum(p * math.log(p) for p in shares) / math.log(len(counts)) if counts[1:] else 1.0
