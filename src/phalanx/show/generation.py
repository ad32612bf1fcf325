"""Rolling batches and paged attention: traces of an engine that serves a small decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling
from phalanx.infer.paged import FlatStep, KVCache
from phalanx.infer.pool import BlockPool
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Completion, Scheduler
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.report.tabular import Table
from phalanx.show.shown import Shown, ShowTopic

SHAPE: Final = ModelShape(
    vocab_size=32, num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn=64,
    max_seq_len=64,
)  # fmt: skip
SLOTS: Final = 3
LENGTHS: Final = (2, 9, 3, 8, 2, 4, 3)
"""Number of new tokens of each request."""

PROMPT: Final = 5
SIZE: Final = 4
SHARED: Final = 8


@dataclass(frozen=True, kw_only=True)
class ShowGeneration(ShowTopic):
    """Let an engine generate with a small decoder, and print what it did in each step."""


class Traced(Engine):
    """An engine with a small decoder of random weights that records its steps.

    Attributes:
        steps: running requests in each step.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        model = Decoder(SHAPE).eval()
        model.initialize(0)
        pool = BlockPool(24, SIZE)
        cache = KVCache(SHAPE, pool, torch.float32, torch.device("cpu"))
        self._runner = ModelRunner(model, cache)
        self.steps: list[list[Completion]] = []
        scheduler = Scheduler(pool, budget=24, slots=slots)
        super().__init__(self._trace, scheduler, max_seq_len=SHAPE.max_seq_len)

    def _trace(self, step: FlatStep) -> torch.Tensor:
        self.steps.append(list(self.scheduler.running))
        return self._runner(step)


def show_rolling_batch(config: ShowGeneration) -> Shown:
    """Serve the same requests with static and with rolling batches."""
    del config
    parts: list[Table | str] = []
    for batching, size in (("static", SLOTS), ("rolling", len(LENGTHS))):
        engine, added = Traced(), list[Completion]()
        for n, length in enumerate(LENGTHS):
            if n % size == 0:  # a static batch begins when all of the batch before have ended
                _run(engine)
            added += engine.add(_prompt(n), Sampling(max_tokens=length, temperature=0))
        _run(engine)
        rows = _slots(engine.steps, {each: chr(65 + n) for n, each in enumerate(added)})
        busy = sum(map(len, engine.steps)) / (SLOTS * len(engine.steps))
        title = f"{batching}: {len(engine.steps)} steps, {busy:.0%} of the slots in use"
        parts.append(Table(title, ["slot", "request in each step"], rows, ["slot"]))
    least = -(-sum(LENGTHS) // SLOTS)
    parts.append(
        f"{sum(LENGTHS)} tokens in {SLOTS} slots take at least {least} steps. A static batch ends "
        "with its longest request; a rolling one admits the next as soon as a slot is free. The "
        "first step of a request computes its prompt, along with one token of each other request."
    )
    lengths = ", ".join(f"{chr(65 + n)} {length}" for n, length in enumerate(LENGTHS))
    about = [f"New tokens of each request: {lengths}; a dot is a slot without a request."]
    return Shown(f"rolling batches (continuous batching), {SLOTS} slots", about, parts)


def _run(engine: Traced) -> None:
    while engine.scheduler.has_work:
        engine.step()


def _slots(steps: list[list[Completion]], letters: dict[Completion, str]) -> list[list[str]]:
    """Return a row for each slot: the letter of its request in each step, or a dot."""
    held: list[Completion | None] = [None] * SLOTS
    rows = [list[str]() for _ in held]
    for running in steps:
        held = [each if each in running else None for each in held]
        for request in running:
            if request not in held:
                held[held.index(None)] = request
        for row, each in zip(rows, held, strict=True):
            row.append("." if each is None else letters[each])
    return [[str(slot), " ".join(row)] for slot, row in enumerate(rows)]


def _prompt(number: int, num_tokens: int = PROMPT) -> list[int]:
    return [(7 * number + at) % SHAPE.vocab_size for at in range(num_tokens)]


def show_paged_attention(config: ShowGeneration) -> Shown:
    """Serve two prompts with a common prefix, and show their block tables."""
    del config
    engine = Traced(slots=2)
    pool = engine.scheduler.pool
    prompts = {"A": [*_prompt(0, SHARED), 9], "B": [*_prompt(0, SHARED), 3, 4]}
    sampling = Sampling(max_tokens=10, temperature=0)
    requests = {name: engine.add(prompt, sampling)[0] for name, prompt in prompts.items()}
    for _ in range(6):
        engine.step()
    tables = {name: request.table.blocks for name, request in requests.items()}
    rows = [
        [
            name,
            str(request.num_computed),
            str(request.num_cached),
            ", ".join(map(str, tables[name])),
        ]
        for name, request in requests.items()
    ]
    heads = ["sequence", "positions", "found in the cache", "its blocks, in order"]
    parts: list[Table | str] = [Table("block tables", heads, rows, heads[1:3])]
    contents: list[list[str]] = []
    for block in sorted({block for table in tables.values() for block in table}):
        holders = [name for name, table in tables.items() if block in table]
        at = tables[holders[0]].index(block) * SIZE
        request = requests[holders[0]]
        tokens = request.tokens[at : min(at + SIZE, request.num_computed)]
        shown = [str(token) for token in tokens] + ["-"] * (SIZE - len(tokens))
        contents.append([str(block), ", ".join(holders), f"{at}-{at + SIZE - 1}", " ".join(shown)])
    heads = ["block", "held by", "positions", "tokens whose keys and values it has"]
    parts.append(Table(f"blocks of {SIZE} positions", heads, contents, heads[:1]))
    used = sum(r.num_computed for r in requests.values()) - SHARED
    longest = SHAPE.max_seq_len
    waste = 1 - sum(r.num_computed for r in requests.values()) / (2 * longest)
    parts.append(
        f"{pool.num_held} blocks have {pool.num_held * SIZE} positions, of which {used} hold a "
        f"token: {engine.scheduler.waste:.0%} waste, the ends of the last blocks. A contiguous "
        f"cache reserves {longest} positions for each sequence: {waste:.0%} waste."
    )
    about = [
        f"Both prompts begin with the same {SHARED} tokens: B finds their blocks by content, and "
        "computes the rest. In each layer a sequence attends to its blocks, which may be "
        "anywhere in the cache."
    ]
    return Shown(
        "paged attention (Kwon et al. 2023)", about, parts, "varlen_attn(..., block_table=...)"
    )
