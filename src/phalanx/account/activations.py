"""Bytes of activations that one rank holds for backward, by recompute policy.

[Note: What a rank holds]
`count` says what one block of each kind keeps, and what backward makes when it runs it again. So of
L blocks in segments of K

    none        L blocks
    segments    L / K residuals; and K blocks less one residual when backward is at a segment
    selective   L blocks, which keep the results of products; and what one block makes again

Besides blocks: the ids, angles of the rotation, where documents begin, the mask of the embedding's
dropout; and the last norm's input with what the loss has made ahead. Under tp and cp all this is a
rank's own shards.

Where backward is at attention, a ring has blocks of keys and values on their way with their
gradients, beyond the kept bytes: `passing`. Its closed form stands here, since a count mixes these
with gradients inside the block.

`most` has too what passes while the head or a block works. Compiled blocks keep what the compiler
chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.account.count import Case, Counted, Device, count, kind_of
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.strategy import Recompute, Strategy


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes that one rank holds for the backward of one microbatch."""

    blocks: int
    """Kept by all blocks from forward on."""
    recomputed: int
    """Made again in backward for the segment at work; 0 where nothing is recomputed."""
    inputs: int
    """What all blocks share, and the embedding's; held until the end."""
    head: int
    """The last norm and the loss; gone before backward reaches the blocks."""
    gradient: int
    """The gradient that flows back along the residual stream."""
    passing: int = 0
    """What passes in a ring while backward is at attention, beyond what it has freed by then."""
    head_at_work: int = 0
    """The most while the head works, `head` included."""
    tied: int = 0
    """Of `block_at_work`, the head's gradient of a tied embedding, which waits for the other."""
    block_at_work: int = 0
    """The most in the backward of a block, beyond what blocks keep; `recomputed` and `gradient`
    included."""

    @property
    def kept(self) -> int:
        """Bytes held when forward is done."""
        return self.blocks + self.inputs + self.head

    @property
    def peak(self) -> int:
        """Most bytes held for backward, without buffers that pass."""
        in_backward = self.blocks + self.recomputed + self.inputs + self.gradient + self.passing
        return max(self.kept, in_backward)

    @property
    def most(self) -> int:
        """Most bytes held at any time, what passes included."""
        return self.blocks + self.inputs + max(self.head_at_work, self.block_at_work + self.passing)


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
) -> Activations:
    """Return what one rank holds; see [Note: What a rank holds].

    Args:
        shape: the decoder.
        strategy: how the work is split, and which blocks run again.
        seq_len: tokens in one sequence.
        num_sequences: sequences in one microbatch of one rank.
        precision: data type of the arithmetic, such as "bfloat16".
        device: whose kernels run.
        has_documents: several documents stand in a row.
        has_casts: whether blocks cast their weights; if None, where neither fsdp nor tp does.

    Raises:
        StrategyError: segments of more blocks than there are.
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
    return _of_blocks(case, strategy.recompute)


def _of_blocks(case: Case, recompute: Recompute) -> Activations:
    """Return what a rank holds of blocks that are each as in a case, by segments if it has some."""
    shape = case.shape
    segment_size = recompute.segment_size(shape.num_layers)
    counted = _count_blocks(case)
    first, blocks = counted[0], [each.block for each in counted]
    held, again = sum(blocks), max(each.again for each in counted)
    block_at_work = first.block_at_work
    if segment_size is not None:
        starts = range(0, shape.num_layers, segment_size)
        held = len(starts) * first.stream
        again = max(sum(blocks[at : at + segment_size]) for at in starts) - first.stream
        block_at_work += again
    return Activations(
        blocks=held,
        recomputed=again,
        inputs=max(each.inputs for each in counted),
        head=first.head,
        gradient=first.stream,
        passing=_passing(case),
        head_at_work=max(first.head, first.head_at_work),
        tied=_tied_bytes(case),
        block_at_work=block_at_work,
    )


def _count_blocks(case: Case) -> list[Counted]:
    """Return the counts of all blocks of a decoder, of which each kind is counted once."""
    shape = case.shape
    windows = [shape.window_of(number) for number in range(shape.num_layers)]
    of_window = {window: count(_of_window(case, window)) for window in dict.fromkeys(windows)}
    return [of_window[window] for window in windows]


def _of_window(case: Case, window: int | None) -> Case:
    return dataclasses.replace(case, shape=kind_of(case.shape, window, case.seq_len))


def _tied_bytes(case: Case) -> int:
    wide = max(4, getattr(torch, case.precision).itemsize)
    shape = case.shape
    return shape.vocab_size * shape.hidden * wide // case.strategy.tp.degree if shape.tied else 0


def _passing(case: Case) -> int:
    """Return the bytes that a ring passes in backward, beyond the MLP's that it has freed."""
    shape, tp, cp = case.shape, case.strategy.tp, case.strategy.cp
    if cp.degree == 1 or cp.kind != "ring":
        return 0
    item_bytes = getattr(torch, case.precision).itemsize
    num_chunks = 2 * cp.degree
    num_held = -(-case.seq_len // num_chunks) * num_chunks // cp.degree
    pair = 2 * shape.num_kv_heads * shape.head_dim  # of keys and values
    num_gradients = 3 if cp.degree == 2 else 4  # of two ranks, none is made while another is sent
    passing = 2 * pair * item_bytes + num_gradients * pair * max(4, item_bytes)
    freed = (2 if shape.mlp == "gelu" else 4) * shape.ffn * item_bytes
    return max(0, passing - freed) * num_held * case.num_sequences // tp.degree


def held_by(
    of: Activations,
    num_layers: int,
    cut: Sequence[range] | None,
    schedule: Schedule | None,
    pp_rank: int,
) -> int:
    """Return the most bytes that a rank holds of activations, what passes included.

    Args:
        of: what a rank that runs the whole model holds of one microbatch.
        num_layers: of the model.
        cut: the links of each stage of a pipeline; None without one.
        schedule: of a step; None without a pipeline.
        pp_rank: coordinate of the rank on pp.
    """
    if cut is None or schedule is None:
        return of.most
    kept = [_kept(links, num_layers, of) for links in cut]
    heads = [*[0] * (len(cut) - 1), of.head]
    at_work = [
        held - head + max(of.head_at_work, of.block_at_work + of.passing)
        if head
        else held + of.block_at_work - of.tied + of.passing
        for held, head in zip(kept, heads, strict=True)
    ]
    return in_flight(kept, at_work, schedule, pp_rank)


def in_flight(
    kept: Sequence[int], at_work: Sequence[int], schedule: Schedule | None, pp_rank: int
) -> int:
    """Return the most bytes that the microbatches of a rank hold.

    Args:
        kept: by each stage of one microbatch, until its backward is over.
        at_work: the same at the most, while backward works.
        schedule: of a step; None where there is one stage.
        pp_rank: coordinate of the rank on pp.
    """
    if schedule is None:
        return at_work[0]
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


def _kept(links: Sequence[int], num_layers: int, of: Activations) -> int:
    """Return what a stage keeps of a microbatch: of its blocks, what it got and what it sent."""
    last = num_layers + 1
    num_blocks = sum(0 < link < last for link in links)
    end = of.head if last in links else of.gradient  # what was sent is as large as its gradient
    return of.blocks * num_blocks // num_layers + of.inputs + end
