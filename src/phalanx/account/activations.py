"""Bytes of activations that one rank holds for backward, by recompute policy.

[Note: What a rank holds]
`count` returns the bytes that one block of each kind saves in forward, and the bytes that backward
rebuilds when it recomputes the block. A model of L blocks in segments of K therefore holds

    none        L blocks
    segments    L / K residuals; plus K blocks less one residual while backward runs a segment
    selective   L blocks, which save the results of products; plus one block's recomputed bytes

In addition to blocks, a rank holds the token ids, the rotary angles, the document boundaries and
the dropout mask of the embedding; and the input of the last norm with the gradients that the loss
computes in forward. Under tp and cp, all these sizes are the rank's own shards.

During the backward of ring attention, blocks of keys and values and their gradients are in transit,
in addition to the saved bytes. `ring_buffers` has a closed form here, because a count cannot
separate these buffers from gradients inside the block.

`most` also includes temporary buffers of the head or of a block. The counts do not hold for
compiled blocks, which save the tensors that the compiler chooses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.account.count import Case, Device, count, one_block_shape
from phalanx.account.parameters import block_kinds
from phalanx.account.planned import DecoderModel, InFlight, PlannedStep
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import cut_of, schedule_of
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.strategy import Recompute, Strategy


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes that one rank holds for the backward of one microbatch."""

    blocks: int
    """Saved by all blocks from forward until their backward."""
    recomputed: int
    """Rebuilt in backward for the current segment; 0 without recomputation."""
    inputs: int
    """Saved by the embedding, and shared by all blocks; held until the end of backward."""
    head: int
    """Saved by the last norm and the loss; freed before backward reaches the blocks."""
    gradient: int
    """The gradient of the residual stream."""
    ring_buffers: int = 0
    """Ring buffers in transit during attention's backward, less the MLP's bytes freed by then."""
    head_peak: int = 0
    """Peak while the head runs, forward and backward, `head` included."""
    tied: int = 0
    """Part of `block_peak`: a tied embedding's gradient from the head, held until the embedding
    adds its own."""
    block_peak: int = 0
    """Peak in the backward of a block, in addition to bytes that blocks saved; includes
    `recomputed` and `gradient`."""
    shares: tuple[int, ...] = ()
    """Each block's part of `blocks`, in any unit: blocks with experts save other bytes."""

    @property
    def kept(self) -> int:
        """Bytes held at the end of forward."""
        return self.blocks + self.inputs + self.head

    @property
    def peak(self) -> int:
        """Peak bytes held for backward, without temporary buffers of the head and of blocks."""
        in_backward = (
            self.blocks + self.recomputed + self.inputs + self.gradient + self.ring_buffers
        )
        return max(self.kept, in_backward)

    @property
    def most(self) -> int:
        """Peak bytes held at any time, temporary buffers and ring buffers included."""
        return self.blocks + self.inputs + max(self.head_peak, self.block_peak + self.ring_buffers)


def activations(
    shape: ModelShape,
    strategy: Strategy,
    seq_len: int,
    num_sequences: int,
    precision: str,
    *,
    device: Device = "cpu",
    has_documents: bool = False,
    has_casts: bool | None = None,
    imbalance: float = 1.0,
) -> Activations:
    """Count the activation bytes of one rank; see [Note: What a rank holds].

    Args:
        shape: the decoder.
        strategy: the parallel layout, and which blocks are recomputed.
        seq_len: tokens in one sequence.
        num_sequences: sequences in one microbatch of one rank.
        precision: data type of the arithmetic, such as "bfloat16".
        device: device type whose kernels run.
        has_documents: whether a sequence packs several documents.
        has_casts: whether blocks cast their weights where they use them; None means True if
            neither tp nor fsdp splits the model.
        imbalance: rows of the rank of ep whose experts get the most, as a multiple of the mean.

    Raises:
        StrategyError: the strategy cannot split a block, or a segment exceeds the model.
    """
    is_segmented = strategy.recompute.segment_size(shape.num_layers) is not None
    kept = Recompute("none") if is_segmented else strategy.recompute
    is_plain = strategy.tp.degree == strategy.fsdp.degree == 1
    case = Case(
        *(shape, dataclasses.replace(strategy.of_block, recompute=kept)),
        *(seq_len, num_sequences, precision, device),
        has_documents=has_documents,
        has_casts=is_plain if has_casts is None else has_casts,
    )
    kinds = block_kinds(shape)
    of_kind = {
        each: count(dataclasses.replace(case, shape=one_block_shape(shape, each, seq_len)))
        for each in dict.fromkeys(kinds)
    }
    counted = [of_kind[kind] for kind in kinds]
    more = _busiest_rows(case, imbalance)
    blocks = [
        each.block + more * kind.has_experts for kind, each in zip(kinds, counted, strict=True)
    ]
    first, held, shares = counted[0], sum(blocks), blocks
    again = max(each.recompute for each in counted)
    block_at_work = max(each.block_at_work for each in counted)
    segment_size = strategy.recompute.segment_size(shape.num_layers)
    if segment_size is not None:
        starts = range(0, shape.num_layers, segment_size)
        held, shares = len(starts) * first.stream, [1] * shape.num_layers
        again = max(sum(blocks[at : at + segment_size]) for at in starts) - first.stream
        block_at_work += again
    item_bytes = max(4, getattr(torch, precision).itemsize)
    is_tied = shape.tied and shape.lora is None  # a frozen one has no gradient
    tied = shape.vocab_size * shape.hidden * item_bytes // strategy.tp.degree if is_tied else 0
    return Activations(
        blocks=held,
        recomputed=again,
        inputs=max(each.inputs for each in counted),
        head=first.head,
        gradient=first.stream,
        ring_buffers=_ring_buffers(case),
        head_peak=max(first.head, first.head_at_work),
        tied=tied,
        block_peak=block_at_work,
        shares=tuple(shares),
    )


def _busiest_rows(case: Case, imbalance: float) -> int:
    """Return the bytes that experts save of the rows that a rank of ep gets beyond the mean.

    Of a row an expert saves its input, four inner activations (gate, up, silu and their product),
    and its output, which the router's weight multiplies.
    """
    experts = case.shape.experts
    if experts is None or case.strategy.ep.degree == 1:
        return 0
    tokens = case.num_sequences * case.seq_len // case.strategy.sample_shards
    row = 2 * case.shape.hidden + 4 * experts.ffn // case.strategy.tp.degree
    more = (imbalance - 1) * tokens * experts.top_k * row
    return int(more * getattr(torch, case.precision).itemsize)


def _ring_buffers(case: Case) -> int:
    """Return the ring's bytes in transit in backward, less the MLP's bytes freed before then."""
    shape, tp, ranks = case.shape, case.strategy.tp, case.strategy.ring_ranks
    if ranks == 1:
        return 0
    item_bytes = getattr(torch, case.precision).itemsize
    num_held = 2 * -(-case.seq_len // (2 * ranks))  # two chunks of equal length
    pair = 2 * shape.num_kv_heads * shape.head_dim  # a key and a value of one position
    # With two ranks, no gradient is computed while another is sent.
    num_gradients = 3 if ranks == 2 else 4
    passing = 2 * pair * item_bytes + num_gradients * pair * max(4, item_bytes)
    inner = shape.ffn
    if (experts := shape.experts) is not None:
        of_experts = experts.top_k * experts.ffn + experts.shared_ffn
        inner = min(inner, of_experts) if experts.first_dense else of_experts
    freed = (2 if shape.mlp == "gelu" else 4) * inner * item_bytes
    return max(0, passing - freed) * num_held * case.num_sequences // tp.degree


def peak_on_rank(
    of: Activations,
    num_layers: int,
    cut: Sequence[range] | None,
    schedule: Schedule | None,
    pp_rank: int,
) -> int:
    """Return the peak bytes of activations on a rank, temporary buffers included.

    Args:
        of: bytes of one microbatch on a rank that runs the whole model.
        num_layers: number of blocks of the model.
        cut: links of each pipeline stage, where 0 is the embedding, 1 to num_layers are blocks and
            num_layers + 1 is the head; None without a pipeline.
        schedule: pipeline schedule of one step; None without a pipeline.
        pp_rank: coordinate of the rank on pp.
    """
    if cut is None or schedule is None:
        return of.most
    # What a stage keeps for one microbatch, and the peak while its backward runs:
    #
    #     stage          kept until backward                at work
    #     first, middle  inputs, blocks, sent output        + a block's temporaries
    #     last           inputs, blocks, head               the larger peak, head's or block's
    kept, at_work = list[int](), list[int]()
    for links in cut:
        share = sum(of.shares[link - 1] for link in links if 0 < link <= num_layers)
        # A stage saves its inputs, its blocks, and at its end what the head saves, or the sent
        # output, which is as large as its gradient.
        held = of.blocks * share // sum(of.shares) + of.inputs
        if num_layers + 1 in links:
            kept.append(held + of.head)
            at_work.append(held + max(of.head_peak, of.block_peak + of.ring_buffers))
        else:
            kept.append(held + of.gradient)
            at_work.append(kept[-1] + of.block_peak - of.tied + of.ring_buffers)
    return peak_in_flight(kept, at_work, schedule, pp_rank)


def peak_in_flight(
    kept: Sequence[int], at_work: Sequence[int], schedule: Schedule | None, pp_rank: int
) -> int:
    """Return the peak bytes of all microbatches in flight on a rank.

    Args:
        kept: bytes that each stage saves for one microbatch until its backward ends.
        at_work: peak bytes of each stage for one microbatch while its backward runs.
        schedule: pipeline schedule of one step; None if there is one stage.
        pp_rank: coordinate of the rank on pp.
    """
    if schedule is None:
        return at_work[0]
    # 1f1b on the first of three ranks, 4 microbatches (kept k, at work w > k):
    #
    #     action   F  F  F  B        F  B        B     B
    #     held     k  2k 3k 2k       3k 2k       k     0
    #     peak              2k + w      2k + w   ...           W frees what I only used
    held = peak = 0
    for op, stage, _ in schedule.orders[pp_rank]:
        if op == "F":
            held += kept[stage]
            peak = max(peak, held)
        elif op != "W":
            peak = max(peak, held - kept[stage] + at_work[stage])
        if op in ("B", "W"):
            held -= kept[stage]
    return peak


def microbatches_for_peak(strategy: Strategy, num: int) -> int:
    """Return a number of microbatches, at most `num`, whose schedule has the same peak in flight.

    About two microbatches per rank are enough, and a shorter schedule is faster to build. gpipe has
    all microbatches in flight, and a schedule file may: these need all `num` microbatches.
    """
    pp = strategy.pp
    if pp.kind == "gpipe" or strategy.schedule:
        return num
    return min(num, 2 * pp.degree + num % pp.degree)


@functools.lru_cache(maxsize=1 << 12)
def in_flight(
    step: PlannedStep[DecoderModel], device: str, kept: float, logit_bytes: int
) -> list[InFlight]:
    """Return the bytes in flight at each pp coordinate of a decoder; see `rank_memory.memory`."""
    strategy, model = step.strategy, step.model
    shape, tp = model.shape, strategy.tp.degree

    def of_one(has_casts: bool | None) -> Activations:
        """Count one microbatch, scaled to the training program, with its logits in the head."""
        of = activations(
            *(shape, strategy, model.seq_len, step.microbatch, model.precision),
            device="cpu" if device == "cpu" else "cuda",
            has_documents=model.has_documents,
            has_casts=has_casts,
            imbalance=model.imbalance,
        )
        head = of.head_peak
        if logit_bytes:
            tokens = step.microbatch * model.seq_len // strategy.sample_shards
            head = of.head + tokens * (shape.vocab_size // tp) * logit_bytes
        blocks, recomputed = int(of.blocks * kept), int(of.recomputed * kept)
        return dataclasses.replace(of, blocks=blocks, recomputed=recomputed, head_peak=head)

    # Three runs separate the causes by differences: with casts, without, and without logits. A cast
    # weight is an activation of its block if neither tp nor fsdp splits the model.
    cast, uncast = of_one(None), of_one(False)
    cut = schedule = None
    if strategy.pp.degree > 1:  # of the strategy, since a plan with one data axis may be illegal
        cut = cut_of(strategy, shape)
        schedule = schedule_of(strategy, microbatches_for_peak(strategy, step.accumulation))
    # fsdp gathers the output projection of the loss in the data type in which others cast it.
    item_bytes = getattr(torch, model.precision).itemsize
    head_casts = shape.vocab_size * shape.hidden * item_bytes // tp if item_bytes < 4 else 0
    ranks: list[InFlight] = []
    alike: dict[tuple[tuple[int, int, bool, bool], ...], int] = {}
    with_experts = [link for link, kind in enumerate(block_kinds(shape), 1) if kind.has_experts]
    last = shape.num_layers + 1
    for pp_rank in range(strategy.pp.degree):
        stages = schedule.stages_of(pp_rank) if schedule is not None else ()
        cuts = [cut[stage] for stage in stages] if cut is not None else []
        parts = tuple(
            (len(links), len({*links}.intersection(with_experts)), 0 in links, last in links)
            for links in cuts
        )
        most, without_casts, without_logits = (
            peak_on_rank(of, shape.num_layers, cut, schedule, pp_rank)
            for of in (cast, uncast, dataclasses.replace(uncast, head_peak=uncast.head))
        )
        logits = without_casts - without_logits
        of_head = min(logits, head_casts)
        casts = max(most - without_casts + of_head, cast.block_peak - uncast.block_peak)
        like = alike.setdefault(parts, pp_rank)
        ranks.append(InFlight(casts, without_logits, logits - of_head, like))
    return ranks
