"""Context parallelism by heads: an all-to-all before attention, and one after it.

Idea      A rank holds 1/N of the positions, and each head attends by itself. So before attention
          the ranks exchange positions for heads: each then has all positions of 1/N of the heads,
          attends as one process does, and gives back (Jacobs et al., DeepSpeed Ulysses, 2023,
          arXiv 2309.14509, section 3).
Layout    x[B, T_cp, D]  q[B, T_cp, H, K] -> q[B, T, H_cp, K];  o[B, T, H_cp, K] -> o[B, T_cp, H, K]
Forward   all_to_all of q, k, v together; attention, by whatever kernel one process uses;
          all_to_all of o
Backward  the same two the other way, of do and of dq, dk, dv
Cost      A rank sends (N-1)/N of B T/N (2 H + 2 G') K elements forward, and as much backward: it
          shrinks with N, where what a ring sends does not. G' is G, or, where N does not divide G,
          the least multiple of both: each key head is repeated for the ranks whose queries use it.
Limits    N divides the query heads that tp leaves. N divides T, or rows are padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.comm.comm import Comm
from phalanx.models.attention import Documents, attend
from phalanx.parallel.composite import mapped
from phalanx.parallel.context.positions import PositionOrder, in_line


@dataclass(frozen=True)
class Ulysses:
    """Attention by heads over the ranks of cp; called as `attend` is.

    Attributes:
        comm: of the job, or one that counts.
        attend: what each rank does with all positions of its heads.
    """

    comm: Comm
    attend: Callable[..., Tensor] = attend

    @property
    def order(self) -> PositionOrder:
        """Which positions each rank holds."""
        return in_line(self.comm.size("cp"))

    def __call__(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        documents: Documents | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(K)) v over the keys of all ranks, a tensor like q_BTHK.

        All are this rank's positions but `documents`, which are of the full rows.
        """
        mixed_BTHK = self.attend(*self.by_heads(q_BTHK, k_BTGK, v_BTGK), documents, window)
        return _all_to_all(mixed_BTHK, self.comm, 1, 2)

    def by_heads(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of all positions, of this rank's heads."""
        num_ranks = self.comm.size("cp")
        num_groups = k_BTGK.shape[2]
        repeats = math.lcm(num_groups, num_ranks) // num_groups
        if repeats > 1:
            k_BTGK, v_BTGK = (x.repeat_interleave(repeats, 2) for x in (k_BTGK, v_BTGK))
        # Beside each other for each rank, so that they travel together.
        parts = [x.unflatten(2, (num_ranks, -1)) for x in (q_BTHK, k_BTGK, v_BTGK)]
        sizes = [part.shape[3] for part in parts]
        return _all_to_all(torch.cat(parts, 3).flatten(2, 3), self.comm, 2, 1).split(sizes, 2)


def padded_documents(documents: Documents, length: int) -> Documents:
    """Let rows of `length` positions follow those that there are: the rest is a document more."""
    starts_BT1, ends_BN1, longest = documents
    before = starts_BT1.shape[1]
    if before == length:
        return documents
    starts_BT1 = F.pad(starts_BT1, (0, 0, 0, length - before), value=before)
    ends_BN1 = F.pad(ends_BN1, (0, 0, 0, 1), value=length)
    return starts_BT1, ends_BN1, max(longest, length - before)


def _all_to_all(x: Tensor, comm: Comm, split_dim: int, join_dim: int) -> Tensor:
    """Exchange, and give gradients back the same way."""
    return mapped(
        x,
        lambda x: comm.all_to_all(x, "cp", split_dim, join_dim),
        lambda d_x: comm.all_to_all(d_x, "cp", join_dim, split_dim),
    )
