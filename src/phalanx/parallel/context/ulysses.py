"""DeepSpeed Ulysses: context parallelism by heads, with an all-to-all before and after attention.

Idea      A rank holds 1/N of the positions, and attention treats each head independently. So before
          attention an all-to-all exchanges positions for heads: each rank then has all positions of
          1/N of the heads and attends as a single process does; a second all-to-all reverses the
          exchange (Jacobs et al., DeepSpeed Ulysses, 2023, arXiv 2309.14509, section 3).
Layout    x[B, T_cp, D]  q[B, T_cp, H, K] -> q[B, T, H_cp, K];  o[B, T, H_cp, K] -> o[B, T_cp, H, K]
Forward   all_to_all of q, k, v together; attention, with the same kernel as a single process;
          all_to_all of o
Backward  the reverse exchanges, for do and for dq, dk, dv
Cost      A rank sends (N-1)/N of B T/N (2 H + 2 G') K elements forward, and as many backward. This
          decreases with N, unlike the traffic of a ring. G' is G if N divides G, otherwise the
          least common multiple of both: each key head is repeated for the ranks whose queries use
          it.
Limits    N must divide the query heads that tp leaves. T is padded to a multiple of N.
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
from phalanx.parallel.context.positions import PositionOrder, contiguous


@dataclass(frozen=True)
class Ulysses:
    """Attention with heads split over the ranks of cp, called like `attend`.

    Attributes:
        comm: communicator of the job, or a counting one.
        attend: attention function that each rank runs on all positions of its heads.
    """

    comm: Comm
    attend: Callable[..., Tensor] = attend

    @property
    def order(self) -> PositionOrder:
        """Assignment of positions to ranks."""
        return contiguous(self.comm.size("cp"))

    def __call__(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        documents: Documents | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(K)) v over the keys of all ranks, a tensor like q_BTHK.

        q, k and v are at this rank's positions; `documents` are of the full rows.
        """
        mixed_BTHK = self.attend(*self.by_heads(q_BTHK, k_BTGK, v_BTGK), documents, window)
        return _all_to_all(mixed_BTHK, self.comm, 1, 2)

    def by_heads(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of this rank's heads, at all positions."""
        num_ranks = self.comm.size("cp")
        num_groups = k_BTGK.shape[2]
        # One key head on two ranks is repeated twice, k0 k0, so that each rank gets the one it
        # reads.
        repeats = math.lcm(num_groups, num_ranks) // num_groups
        if repeats > 1:
            k_BTGK, v_BTGK = (x.repeat_interleave(repeats, 2) for x in (k_BTGK, v_BTGK))
        # The heads for one rank are concatenated, so that one all-to-all sends q, k and v.
        # N = 2, H = 4, G = 2:  q0 q1 k0 v0 | q2 q3 k1 v1,  left of the bar for rank 0, right for
        # rank 1
        #
        #   q[B, T/N, H, K], k, v -> parts [B, T/N, N, H/N, K], ... -> [B, T/N, H + 2 G', K]
        #   all-to-all -> [B, T, (H + 2 G')/N, K] -> q[B, T, H/N, K], k, v[B, T, G'/N, K]
        parts = [x.unflatten(2, (num_ranks, -1)) for x in (q_BTHK, k_BTGK, v_BTGK)]
        sizes = [part.shape[3] for part in parts]
        return _all_to_all(torch.cat(parts, 3).flatten(2, 3), self.comm, 2, 1).split(sizes, 2)


def padded_documents(documents: Documents, length: int) -> Documents:
    """Extend documents to rows of `length` positions; the padding is one additional document."""
    starts_BT1, ends_BN1, longest = documents
    before = starts_BT1.shape[1]
    if before == length:
        return documents
    starts_BT1 = F.pad(starts_BT1, (0, 0, 0, length - before), value=before)
    ends_BN1 = F.pad(ends_BN1, (0, 0, 0, 1), value=length)
    return starts_BT1, ends_BN1, max(longest, length - before)


def _all_to_all(x: Tensor, comm: Comm, split_dim: int, join_dim: int) -> Tensor:
    """Run an all-to-all over cp whose backward is the reverse all-to-all."""
    return mapped(
        x,
        lambda x: comm.all_to_all(x, "cp", split_dim, join_dim),
        lambda d_x: comm.all_to_all(d_x, "cp", join_dim, split_dim),
    )
