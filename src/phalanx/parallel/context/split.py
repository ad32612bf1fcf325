"""The `Split` of axis cp on a decoder: inputs are cut by position at the start of a forward.

Labels are shifted beforehand, so positions may be distributed in any order: tokens, labels,
positions and documents are cut in the same way, and the rest of the forward runs as on shorter
rows. Only four parts differ: attention, which reads the keys of other ranks; dropout, whose masks
depend on positions in the full row; the limit of an expert, which is of the full row; and logits,
which are gathered if no labels are given.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm.comm import Comm, Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.comm.ledger import Entry
from phalanx.errors import StrategyError
from phalanx.models.attention import Attention, Documents, LatentAttention, documents_of
from phalanx.models.decoder import Decoder
from phalanx.models.experts import MoE, places_in_rows
from phalanx.models.layers import Dropout
from phalanx.models.loss import IGNORE
from phalanx.parallel.batch_shape import BatchShape, batch_scope
from phalanx.parallel.context import account
from phalanx.parallel.context.ring import Ring
from phalanx.parallel.context.ulysses import Ulysses, padded_documents
from phalanx.parallel.split import Shape, Split, Target, TensorKind
from phalanx.strategy import Axis, Strategy

KINDS: dict[str, type[Ring] | type[Ulysses]] = {"ring": Ring, "ulysses": Ulysses}


class ContextSplit(Split):
    """Context parallelism of the kind that the strategy selects.

    Raises:
        StrategyError: the model is not a `Decoder`, or its heads cannot be divided for Ulysses.
    """

    axis = "cp"
    compiles = False  # attention communicates in the middle of a block

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.attention = attention_of(target.strategy)
        self.position_shards = self.attention.order.num_chunks
        check(target)

    @classmethod
    def shard_shape(cls, strategy: Strategy, part: TensorKind, shape: Shape) -> Shape:
        """Return `shape` with the positions that one rank holds; tables are not split."""
        if part == "table":
            return shape
        num_rows, length, size = shape
        return num_rows, attention_of(strategy).order.num_held(length), size

    def local_microbatch(self, microbatch: tuple[int, int]) -> tuple[int, int]:
        """Return the rows of the microbatch, and the number of positions that one rank holds."""
        num_rows, length = microbatch
        return num_rows, self.attention.order.num_held(length)

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        """Return the communication of attention."""
        return account.traffic(self.target, self.attention, microbatches)

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Cut the forward's inputs, and replace attention and the positions of dropout."""
        apply(model, comm, attention_of(self.target.strategy, comm))


def attention_of(strategy: Strategy, comm: Comm | None = None) -> Ring | Ulysses:
    """Return the attention of a strategy; without `comm`, one for planning that only counts."""
    return _planning_attention(strategy) if comm is None else KINDS[strategy.cp.kind](comm)


@functools.cache
def _planning_attention(strategy: Strategy) -> Ring | Ulysses:
    return KINDS[strategy.cp.kind](CountingComm(strategy.mesh_axes()))


def check(target: Target) -> None:
    """Raise a StrategyError for a model that cp cannot split."""
    model, strategy = target.skeleton.model, target.strategy
    name = str(Strategy(cp=strategy.cp))
    if not isinstance(model, Decoder):
        raise StrategyError(
            f"{name}: cp supports only phalanx's Decoder, and the model is a "
            f"{type(model).__name__}; the nearest is dp{strategy.cp.degree}"
        )
    if strategy.cp.kind != "ulysses":
        return
    num_heads = model.shape.num_heads
    *_, left = target.shard_shape_after_later("heads", (1, 1, num_heads))
    if left and left % strategy.cp.degree:
        beside = f", {left} on each rank of tp{strategy.tp.degree}" if left < num_heads else ""
        degree, nearest = strategy.cp.degree, Axis(strategy.cp.degree, "ring")
        if legal := [n for n in range(2, left + 1) if left % n == 0]:  # the smaller if tied
            nearest = Axis(min(legal, key=lambda n: (abs(n - degree), n)), "ulysses")
        raise StrategyError(
            f"{name}: the model has {num_heads} heads{beside}, which is not a multiple of "
            f"{degree}; the nearest is {Strategy(cp=nearest)}"
        )


_ROW_LENGTH: ContextVar[int] = ContextVar("positions of a full row")
"""Of the latest forward; a block that backward runs again sees its own forward's, see `carried`."""


def apply(model: nn.Module, comm: Comm, attention: Ring | Ulysses) -> None:
    """Split a decoder's inputs by position over the ranks of cp; changes the decoder in place."""
    assert isinstance(model, Decoder)
    positions = functools.partial(attention.order.positions, comm.coord("cp"))

    def places(experts_BTk: Tensor, num_experts: int) -> tuple[Tensor, int]:
        num_held = experts_BTk.shape[1]
        gathered_BTk = comm.all_gather(experts_BTk.int(), "cp", 1)
        index_T = attention.order.gathered_index(num_held, gathered_BTk.device)
        # Padding follows the row, so it takes no place before one of the row.
        placed_BTk, _ = places_in_rows(gathered_BTk.index_select(1, index_T).long(), num_experts)
        return placed_BTk.index_select(1, positions(num_held, index_T.device)), _ROW_LENGTH.get()

    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.attend = attention
        elif isinstance(module, Dropout):
            module.row_positions = positions
        elif isinstance(module, MoE):
            module.places = places
    whole = model.forward

    @functools.wraps(whole)
    def forward(
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | Documents | None = None,
        dropout_keys_B: Tensor | None = None,
    ) -> Tensor:
        length = tokens_BT.shape[1]
        _ROW_LENGTH.set(length)
        model.check_length(length)
        if positions_BT is None:
            positions_BT = torch.arange(length, device=tokens_BT.device)[None]
        cut = functools.partial(cut_positions, attention=attention, comm=comm)
        held_BT = cut(tokens_BT)
        with batch_scope(BatchShape(*held_BT.shape)):  # tp splits the microbatch that cp leaves
            out = whole(
                held_BT,
                None if labels_BT is None else cut(labels_BT, padding=IGNORE),
                positions_BT=cut(positions_BT),
                documents_BT=cut_documents(documents_BT, tokens_BT, attention, comm),
                dropout_keys_B=dropout_keys_B,
            )
        if labels_BT is not None or (model.stage is not None and not model.stage.is_last):
            return out
        if torch.is_grad_enabled():
            raise StrategyError(
                "cp: each rank has only a part of the positions, so a loss of these logits must be "
                "summed over ranks; pass labels to the model, or compute logits under "
                "torch.no_grad()"
            )
        index_T = attention.order.gathered_index(out.shape[1], out.device)
        return comm.all_gather(out, "cp", 1).index_select(1, index_T)[:, :length]

    model.forward = forward


def cut_positions(x_BT: Tensor, attention: Ring | Ulysses, comm: Comm, padding: int = 0) -> Tensor:
    """Return this rank's positions of x_BT, padded first, in the order of `attention`."""
    order, length = attention.order, x_BT.shape[1]
    # Zig-zag, N = 2, length 6, padded to 8:  rank 0 has positions 0 1 6 7,  rank 1 has 2 3 4 5.
    padded_BT = F.pad(x_BT, (0, order.padded(length) - length), value=padding)
    positions_T = order.positions(comm.coord("cp"), order.num_held(length), x_BT.device)
    return padded_BT.index_select(1, positions_T)


def cut_documents(
    documents: Tensor | Documents | None,
    tokens_BT: Tensor,
    attention: Ring | Ulysses,
    comm: Comm,
) -> Documents | None:
    """Return documents as `attention` needs them: starts of this rank's queries for a ring.

    Ulysses gets the starts of all positions. Both get ends of the full, padded rows.
    """
    if not isinstance(documents, tuple):
        documents = documents_of(documents, tokens_BT.device)
    if documents is None:
        return None
    padded = padded_documents(documents, attention.order.padded(tokens_BT.shape[1]))
    if isinstance(attention, Ulysses):
        return padded
    starts_BT1, ends_BN1, longest = padded
    return cut_positions(starts_BT1[..., 0], attention, comm)[..., None], ends_BN1, longest
