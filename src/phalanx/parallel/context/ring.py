"""Ring attention for context parallelism: keys and values circulate, queries stay.

Idea      A rank holds 1/N of the positions. Only attention reads other ranks' positions, so blocks
          of keys and values circulate: each rank receives every block once, attends to it with its
          queries, and meanwhile sends it to the next rank. The results are merged by the
          log-sum-exp of their scores (Liu, Zaharia, Abbeel, Ring Attention, 2023,
          arXiv 2310.01889, section 3; partial.py). Under a causal mask the first positions attend
          to few keys and the last to many. So a row is 2N chunks and rank r holds chunks r and
          2N - 1 - r (zig-zag): for each block of another rank it computes two of the four pairs of
          chunks, and for its own block one full pair and two half pairs (the diagonal).
Layout    x[B, T_cp, D]  q[B, T_cp, H, K]  k, v[B, T_cp, G, K]; weights are replicated
Forward   for hop in N: send k, v to the next rank; o, lse += q with this block; receive the next
Backward  k, v circulate again. p = exp(q k^T - lse) is recomputed, dq stays, and dk, dv follow
          their block: each rank adds its terms and sends them on, until they reach their owner.
Cost      With S = 2 B T/N G K elements, keys and values of one rank, a rank sends (N-1) S forward
          and (N-1) S backward, and (N-1) S of gradients in float32 or float64. A rank holds two
          blocks at a time, and in backward up to four blocks of gradients. No memory grows with
          T^2: scores are computed for at most 256 queries at a time.
Limits    Any N, any number of heads. T is padded to a multiple of 2N. Each hop is a message of S
          elements; with few positions its latency exceeds the time of the products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.comm import Comm
from phalanx.comm.pending import Pending
from phalanx.models.attention import Documents, first_attended
from phalanx.parallel.composite import Composite, once_differentiable
from phalanx.parallel.context.partial import AttentionMask, BackwardState, Chunk, PartialAttention
from phalanx.parallel.context.positions import PositionOrder, zig_zag


@dataclass(frozen=True)
class Ring:
    """Attention of this rank's queries to the keys of all ranks of cp, called like `attend`.

    Attributes:
        comm: communicator of the job, or a counting one.
        is_causal: whether positions after a query are masked.
    """

    comm: Comm
    is_causal: bool = True

    @property
    def order(self) -> PositionOrder:
        """Assignment of positions to ranks."""
        return zig_zag(self.comm.size("cp"))

    def __call__(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        documents: Documents | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(K)) v over the keys of all ranks, a tensor like q_BTHK.

        q, k, v and the starts in `documents` are at this rank's positions, in zig-zag order; the
        ends in `documents` are of the full rows.
        """
        assert self.is_causal or window is None
        num_rows, num_held = q_BTHK.shape[:2]
        positions_T = self.order.positions(self.comm.coord("cp"), num_held, q_BTHK.device)
        window = None if window is None or window >= num_held * self.comm.size("cp") else window
        starts_BT1 = first_attended(positions_T, documents, window)
        starts_BT = None if starts_BT1 is None else starts_BT1[..., 0].expand(num_rows, -1)
        ends_BT = None
        if documents is not None and not self.is_causal:
            # The end of each query's document, as a position in the full row.
            ends_BN = documents[1][..., 0].contiguous()
            positions_BT = positions_T.expand(num_rows, -1).contiguous()
            number_BT = torch.searchsorted(ends_BN, positions_BT, right=True)
            ends_BT = ends_BN.gather(1, number_BT.clamp_(max=ends_BN.shape[1] - 1))
        return cast(Tensor, _RingAttention.apply(self, q_BTHK, k_BTGK, v_BTGK, starts_BT, ends_BT))

    def ring_attention(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        starts_BT: Tensor | None,
        ends_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention output, like q_BTHK, and its log-sum-exp lse_BTH over all keys."""
        mixed, sight = PartialAttention(q_BTHK), AttentionMask(self.is_causal, starts_BT, ends_BT)
        for hop in self._hops(torch.stack((k_BTGK, v_BTGK))):
            for queries, keys in self.pairs(hop.source, k_BTGK.shape[1]):
                mixed.add(q_BTHK, hop.kv[0], hop.kv[1], queries, keys, sight)
        return mixed.o_BTHK.to(q_BTHK.dtype), mixed.lse_BTH

    def backward(
        self, state: BackwardState, k_BTGK: Tensor, v_BTGK: Tensor, sight: AttentionMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of this rank's q, k and v, each in the dtype of its tensor."""
        # Gradients follow their block, one hop behind, so a rank has them when the block's terms
        # are computed. Of block 0, N = 3:
        #
        #   hop 0   rank 0 computes its terms, and keeps them
        #   hop 1   rank 1 computes its terms                          -> rank 2
        #   hop 2   rank 2 computes its terms, adds rank 1's terms     -> rank 0
        #   end     rank 0 adds its own
        kv = torch.stack((k_BTGK, v_BTGK))
        own_d_kv: Tensor | None = None
        arriving: Pending | None = None
        for number, hop in enumerate(self._hops(kv)):
            d_kv = torch.zeros_like(kv, dtype=state.dq_BTHK.dtype)
            # On the meta device only peak memory counts, and no hop holds more than the third.
            is_computed = number < 3 or not kv.is_meta
            for queries, keys in self.pairs(hop.source, k_BTGK.shape[1]) if is_computed else ():
                state.add(hop.kv[0], hop.kv[1], d_kv[0], d_kv[1], queries, keys, sight)
            if own_d_kv is None:
                own_d_kv = d_kv  # gradients of this rank's own block, which are not sent
                continue
            if arriving is not None:
                d_kv += arriving.wait()
                arriving = None  # free its two blocks before the next shift allocates one
            arriving = self._shift(d_kv, torch.empty_like(d_kv))
        assert own_d_kv is not None
        if arriving is not None:
            own_d_kv += arriving.wait()
        d_k_BTGK, d_v_BTGK = own_d_kv.to(kv.dtype)
        return state.dq_BTHK.to(state.q_BTHK.dtype), d_k_BTGK, d_v_BTGK

    def pairs(self, source: int, num_held: int) -> Iterator[tuple[Chunk, Chunk]]:
        """Yield (own query chunk, key chunk of rank `source`) pairs; if causal, no future keys.

        Each rank holds `num_held` positions.
        """
        key_chunks = _chunks(self.order.chunks[source], num_held)
        for queries in _chunks(self.order.chunks[self.comm.coord("cp")], num_held):
            for keys in key_chunks:
                # Chunks, N = 2; / is half a pair, x a full one. Rank 0 has queries 0 and 3, rank 1
                # has 1 and 2, and each computes three full pairs and two halves:
                #
                #   queries 0    /
                #           1    x  /
                #           2    x  x  /
                #           3    x  x  x  /
                #          keys  0  1  2  3
                if not self.is_causal or keys.first <= queries.first:
                    yield queries, keys

    def _hops(self, kv: Tensor) -> Iterator[_KeyValueBlock]:
        """Yield the block of every rank, this rank's first, and receive the next one meanwhile."""
        num_ranks, rank = self.comm.size("cp"), self.comm.coord("cp")
        # Blocks at each rank, N = 3; each rank sends its block to the next rank while it attends:
        #
        #             hop 0   hop 1   hop 2
        #   rank 0    kv 0    kv 2    kv 1
        #   rank 1    kv 1    kv 0    kv 2
        #   rank 2    kv 2    kv 1    kv 0
        #
        # Two buffers take turns: the block that has been sent and attended to receives the next
        # one.
        other = torch.empty_like(kv) if num_ranks > 1 else kv
        for distance in range(num_ranks):
            is_last = distance == num_ranks - 1
            coming = None if is_last else self._shift(kv, other)
            yield _KeyValueBlock((rank - distance) % num_ranks, kv)
            if coming is not None:
                kv, other = coming.wait(), kv

    def _shift(self, tensor: Tensor, received: Tensor) -> Pending:
        """Start to send a contiguous tensor to the next rank and receive the previous rank's."""
        comm, rank, num_ranks = self.comm, self.comm.coord("cp"), self.comm.size("cp")
        after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        # NCCL runs them in order: if all ranks sent first, they would deadlock.
        if rank % 2 == 0:
            sending = comm.send_start(tensor, "cp", after)
            return _Shift(tensor, sending, comm.recv_start(received, "cp", before))
        receiving = comm.recv_start(received, "cp", before)
        return _Shift(tensor, comm.send_start(tensor, "cp", after), receiving)


class _KeyValueBlock(NamedTuple):
    """A block of keys and values, [2, B, T, G, K], and the rank `source` that owns it."""

    source: int
    kv: Tensor


class _Shift(Pending):
    """A pending send and receive of a block; keeps the sent block alive until both complete."""

    def __init__(self, sent: Tensor, sending: Pending, receiving: Pending) -> None:
        super().__init__(sent)
        self._sending, self._receiving = sending, receiving

    def wait(self) -> Tensor:
        """Wait for both, and return the received block."""
        self._sending.wait()
        return self._receiving.wait()


def _chunks(numbers: Sequence[int], num_held: int) -> list[Chunk]:
    size = num_held // len(numbers)
    return [
        # Local positions, and the first one in the full row: chunks (0, 3) of 2 positions each are
        # slices 0:2 and 2:4 of this rank's tensor, from positions 0 and 6 on.
        Chunk(slice(at * size, (at + 1) * size), number * size)
        for at, number in enumerate(numbers)
    ]


def _flops(q_shape: Sequence[int], *args: Any, **kwargs: Any) -> int:
    num_rows, _, num_heads, width = q_shape
    num_pairs: int = args[-1]
    return 4 * num_rows * num_heads * width * num_pairs


_ATTENTION: Composite[Ring] = Composite(
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor? ends, int num_pairs)"
    " -> (Tensor, Tensor)",
    _flops,
)


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        starts_BT: Tensor | None,
        ends_BT: Tensor | None,
    ) -> Tensor:
        num_held, num_ranks = q_BTHK.shape[1], ring.comm.size("cp")
        num_pairs = num_held * num_held * num_ranks
        o_BTHK, lse_BTH = _ATTENTION(
            ring, q_BTHK, k_BTGK, v_BTGK, starts_BT, ends_BT,
            # Zig-zag leaves every rank half of its pairs under a causal mask.
            math.ceil(num_pairs / 2) if ring.is_causal else num_pairs,
        )  # fmt: skip
        ctx.ring = ring
        ctx.save_for_backward(q_BTHK, k_BTGK, v_BTGK, starts_BT, ends_BT, o_BTHK, lse_BTH)
        return o_BTHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q_BTHK, k_BTGK, v_BTGK, starts_BT, ends_BT, o_BTHK, lse_BTH = ctx.saved_tensors
        state = BackwardState.of(q_BTHK, o_BTHK, lse_BTH, grad_outputs[0])
        sight = AttentionMask(ctx.ring.is_causal, starts_BT, ends_BT)
        # The circulation starts anew: no rank has kept the blocks of the others.
        return None, *ctx.ring.backward(state, k_BTGK, v_BTGK, sight), None, None
