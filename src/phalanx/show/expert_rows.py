"""Experts on two ranks: the way of the rows of one block in a training step, drawn from the run.

A cell is a row of D numbers, named by its token. Rows lie by expert, then by rank, then by token:

    x_ND -> router -> sort by expert -> all-to-all -> experts -> all-to-all -> y_ND
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any, Final, NamedTuple

from torch import Tensor

from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.ledger import Ledger
from phalanx.comm.row_counts import RowCounts, noted
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.plan import Plan
from phalanx.show.one_step import Journal, StepEvent
from phalanx.show.shown import Shown, ShowTopic, Sketch
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches, split

RANKS: Final = 2
EXPERTS: Final = ExpertShape(num_experts=4, top_k=2, ffn=16)
LENGTH: Final = 5
"""Tokens of a rank; with two of each rank's rows for each, both ranks fit into 100 columns."""

SHAPE: Final = ModelShape(
    vocab_size=32, num_layers=1, hidden=8, num_heads=2, num_kv_heads=2, head_dim=4, ffn=16,
    max_seq_len=LENGTH, experts=EXPERTS,
)  # fmt: skip
SEED: Final = 4
"""Of weights that send more rows to one rank than to the other."""

GUTTER: Final = 4
"""Columns between the pictures of two ranks."""


@dataclass(frozen=True, kw_only=True)
class ShowExperts(ShowTopic):
    """Train a small decoder with experts on two ranks for a step, and draw the way of its rows."""


class RoutedStep(NamedTuple):
    """What a rank did in a training step.

    Attributes:
        experts: selected experts of each token, best first.
        counts: the rows that the ranks send each other, as they have notified each other.
        events: collectives of ep, in order.
        shapes: name -> shape of a tensor in the block.
        losses: the loss of the step, and of the same step in one process.
    """

    experts: list[list[int]]
    counts: RowCounts
    events: list[StepEvent]
    shapes: dict[str, list[int]]
    losses: tuple[float, float]


def show_experts(config: ShowExperts) -> Shown:
    """Run the step, and draw its rows: router, sort, dispatch, experts, combine."""
    del config
    ranks: list[RoutedStep] = run_ranks(take_step, RANKS, threads=1)
    gap = max(abs(one - other) for one, other in (each.losses for each in ranks))
    sent = [sum(e.sent for e in each.events if e.what == "all_to_all") for each in ranks]
    back = [e for e in ranks[0].events if e.phase == "backward"]
    return Shown(
        f"experts on {RANKS} ranks (ep{RANKS}): {EXPERTS.num_experts} experts, {EXPERTS.top_k} for "
        "each token",
        [
            "Each rank has its own tokens and half of the experts. A row of a token travels to the "
            "rank of its expert, and the result travels back."
        ],
        [
            Sketch("forward of a block, as it ran", sketch(ranks)),
            f"Backward makes {len(back)} more all-to-alls, of gradients, over the same ways. In "
            f"the step rank 0 sends {sent[0]:,.0f} bytes in all-to-alls, and rank 1 "
            f"{sent[1]:,.0f}.",
            f"The loss differs by {gap:.1e} from the loss of one process, in float64.",
        ],
        "dist.all_to_all_single(out, rows, output_split_sizes, input_split_sizes)",
    )


def take_step() -> RoutedStep:
    """Take a training step on this rank, and note the way of the rows in its block."""
    strategy = Strategy.parse(f"ep{RANKS}")
    comm, model, whole = Ranks(strategy), Decoder(SHAPE).double(), Decoder(SHAPE).double()
    for each in (model, whole):
        each.initialize(SEED)
    runner = Plan(strategy, model).build(comm)
    (batch,) = decoder_batches(SHAPE, 1, RANKS, LENGTH, 1)
    objective, config = NextToken(), OptimizerConfig()
    alone = objective.loss_sum(whole, batch, 0) / objective.num_valid(batch)
    step = Step(
        model, build_optimizer(model, config), objective, config, comm=comm, num_steps=1,
        run=runner,
    )  # fmt: skip
    branch: Any = model.blocks[0].mlp
    shapes, chosen = dict[str, list[int]](), list[Tensor]()

    def choose(_: object, __: object, out: tuple[Tensor, Tensor]) -> None:
        chosen.append(out[0])

    def note(_: object, args: tuple[Tensor, ...], y_BTD: Tensor) -> None:
        shapes.update(x=[*args[0].flatten(0, 1).shape], y=[*y_BTD.flatten(0, 1).shape])

    branch.router.register_forward_hook(choose)
    branch.register_forward_hook(note)
    for name in ("gate", "down"):
        shapes[name] = [*local_shard(getattr(branch.experts, name)).shape]
    journal = Journal()
    ledger = Ledger(comm, journal)
    with noted() as counts, step.watched(ledger.phase), ledger:
        result = step(split(batch, comm.coord("data"), RANKS, 1))
    return RoutedStep(
        chosen[0].tolist(),
        counts[0],
        [event for event in journal.events if event.axis == "ep" and "all_to" in event.what],
        shapes,
        (result.loss, float(alone.detach())),
    )


def sketch(ranks: Sequence[RoutedStep]) -> list[str]:
    """Return the lines of the picture: the ranks side by side, and what travels between them."""
    k, each = EXPERTS.top_k, EXPERTS.num_experts // RANKS
    own = [range(rank * each, (rank + 1) * each) for rank in range(RANKS)]
    letters = iter(ascii_letters)
    tokens = [["".join(next(letters) for _ in rank.experts)] for rank in ranks]
    # rows[r][e]: tokens of rank r that selected expert e, in their order
    rows = [
        [
            "".join(token for token, of in zip(name, rank.experts, strict=True) if expert in of)
            for expert in range(EXPERTS.num_experts)
        ]
        for (name,), rank in zip(tokens, ranks, strict=True)
    ]
    matrix = ranks[0].counts.matrix
    received = [[of[expert] for of in rows for expert in experts] for experts in own]
    by_expert = [["".join(of[expert] for of in rows) for expert in experts] for experts in own]
    hidden = ranks[0].shapes["x"][1]
    gate, down = (ranks[0].shapes[name] for name in ("gate", "down"))
    lines = list[tuple[str, Sequence[str]]]()  # label, and a part a rank, or one over all ranks

    def draw(label: str, groups: Sequence[Sequence[str]], below: Sequence[str]) -> None:
        """Draw rows in groups, and their shapes or a sentence below."""
        upper, middle, lower = zip(*map(boxes, groups), strict=True)
        lines.extend([("", upper), (label, middle), ("", lower), ("", below)])

    def shapes(groups: Sequence[Sequence[str]]) -> list[str]:
        return [f"[{sum(map(len, of))}, {hidden}]" for of in groups]

    def travel(label: str, number: int) -> None:
        """Draw both ways of an all-to-all of the forward, with the bytes that the ledger has."""
        for source, rank in enumerate(ranks):
            sent = [e.sent for e in rank.events if e.what == "all_to_all"][number]
            way = (source, 1 - source) if number == 0 else (1 - source, source)
            line = f" {matrix[way[0]][way[1]]} rows, {sent:,.0f} bytes ".center(48, "─")
            lines.append(("" if source else label, ["◄" + line if source else line + "►"]))
        lines.append(("", []))

    lines.append(("", [f"rank {r}: experts {', '.join(map(str, of))}" for r, of in enumerate(own)]))
    draw("tokens", tokens, [str(rank.shapes["x"]) for rank in ranks])
    for slot in range(k):
        of_slot = (" ".join(str(of[slot]) for of in rank.experts) for rank in ranks)
        lines.append(("" if slot else "router", [f" {text}   slot {slot}" for text in of_slot]))
    lines += [("", []), ("", [heads(of, range(EXPERTS.num_experts)) for of in rows])]
    draw("sort", rows, shapes(rows))
    travel("dispatch", 0)
    lines.append(("", [heads(of, [*own[r]] * RANKS) for r, of in enumerate(received)]))
    draw("received", received, [f"{of}, by rank, then expert" for of in shapes(received)])
    lines.append(("", [heads(of, own[r]) for r, of in enumerate(by_expert)]))
    draw("compute", by_expert, [f"{of}, by expert" for of in shapes(by_expert)])
    lines.append(("", [f"gate, up {gate}; down {down}"] * RANKS))
    travel("return", 1)
    draw("combine", tokens, [f"{rank.shapes['y']}, sums of {k} slots" for rank in ranks])
    name = max(len(label) for label, _ in lines) + 2
    width = max(len(part) for _, parts in lines if len(parts) == RANKS for part in parts) + GUTTER
    return [
        f"{label:<{name}}{''.join(part.ljust(width) for part in parts)}".rstrip()
        for label, parts in lines
    ]


def boxes(groups: Sequence[str]) -> tuple[str, str, str]:
    """Return three lines that draw a box for each group, with a cell for each letter."""
    lines = ("┌┬┐", "│││", "└┴┘")
    drawn = ["", "", ""]
    for at, (left, between, right) in enumerate(lines):
        for group in groups:
            cells = [*group] if at == 1 else ["─"] * len(group)
            drawn[at] += left + between.join(cells) + right
    return drawn[0], drawn[1], drawn[2]


def heads(groups: Sequence[str], numbers: Sequence[int]) -> str:
    """Return a line with the number of its expert above each group of `boxes`."""
    pairs = zip(groups, numbers, strict=True)
    return "".join(f" {n}".ljust(len(boxes([group])[0])) for group, n in pairs)
