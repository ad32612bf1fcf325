"""The four ways of recomputation as they are taught, counted, beside those of Phalanx.

python benchmarks/recompute/four_ways.py [--blocks 16 64] [--out FILE.json] [--picture FILE.svg]

For a chain of N blocks, and C kept inputs, the lecture has

    keep all           time O(N)           memory O(N)
    keep nothing       time O(N^2)         memory O(1)      every block again from the model's start
    keep C inputs      time O(N^2 / C)     memory O(C)      ... from the last input that was kept
    keep sqrt(N)       time O(N sqrt(N))   memory O(sqrt(N))

It holds the activations of one block at a time. `every/K` and `sqrt` (Chen et al. 2016) hold those
of a whole segment, and so run each block only once more. Here all of them run on one decoder: runs
of blocks are counted by hooks, bytes by a dispatch mode that sees storages come and go.
"""

from __future__ import annotations

import argparse
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel import recompute
from phalanx.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import write_result
from phalanx.report.svg import SvgDrawing

NUM_ROWS, SEQ_LEN, NUM_KEPT = 4, 64, 2
MIB = 2**20


class FromStart:
    """Runs blocks for `Decoder.run_segment`, keeping the input of each `length`-th alone.

    Backward computes the input of a block again, from the last one that was kept. Randomness must
    belong to positions, as that of Decoder does: torch's generators are not set back.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._chain: list[Callable[[Tensor], Tensor]] = []
        self._last: weakref.ref[Tensor] | None = None

    def __call__(
        self, function: Callable[..., Tensor], blocks: list[Any], x: Tensor, *args: Any
    ) -> Tensor:
        is_next = self._last is not None and self._last() is x and len(self._chain) < self._length
        if not is_next:
            self._chain, self._start = [], x
        before, start = list(self._chain), self._start

        def run(first: list[Tensor]) -> Tensor:
            if first:  # forward: what the block reads is let go as soon as it is read
                return function(blocks, first.pop(), *args)
            with torch.no_grad():
                again = start
                for block in before:
                    again = block(again)
            return function(blocks, again.detach().requires_grad_(), *args)

        self._chain.append(lambda x: function(blocks, x, *args))
        y = checkpoint(run, [x], use_reentrant=False)
        self._last = weakref.ref(y)
        return y


@dataclass
class Trace(TorchDispatchMode):
    """What a step did, and the most that was held.

    Attributes:
        events: (event, block, most bytes held since the event before), in order.
        kept_bytes: held when forward was done.
        peak_bytes: most held at any time.
    """

    events: list[tuple[str, int, int]] = field(default_factory=list)
    kept_bytes: int = 0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._held, self._most, self._known = 0, 0, set[int]()

    def note(self, event: str, block: int) -> None:
        self.events.append((event, block, self._most))
        self._most = self._held

    def count(self, *events: str) -> int:
        return sum(event in events for event, _, _ in self.events)

    def end_forward(self) -> None:
        self.kept_bytes = self._held

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
        for storage in (x.untyped_storage() for x in _tensors(out)):
            if id(storage) not in inputs | self._known:
                self._known.add(id(storage))
                self._held += storage.nbytes()
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        self._most = max(self._most, self._held)
        self.peak_bytes = max(self.peak_bytes, self._held)
        return out

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._held -= num_bytes


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def ways(num_blocks: int) -> dict[str, int | str]:
    """Return each way: a length of chains that keep one input, or a policy of Phalanx."""
    root = math.isqrt(num_blocks - 1) + 1
    return {
        "keep all": "none",
        "keep nothing": num_blocks,
        f"keep {NUM_KEPT} inputs": -(-num_blocks // NUM_KEPT),
        "keep sqrt(N) inputs": root,
        "recompute:full": "full",
        f"recompute:every/{-(-num_blocks // NUM_KEPT)}": f"every/{-(-num_blocks // NUM_KEPT)}",
        "recompute:sqrt": "sqrt",
    }


def build(num_blocks: int, way: int | str) -> Decoder:
    """Make a narrow decoder that recomputes as `way` says."""
    model = Decoder(
        ModelShape(
            vocab_size=64, num_layers=num_blocks, hidden=32, num_heads=2, num_kv_heads=2,
            head_dim=16, ffn=64, max_seq_len=SEQ_LEN, tied=True,
        )
    )  # fmt: skip
    model.initialize(0)
    if isinstance(way, int):
        model.segment_size, model.run_segment = 1, FromStart(way)
    else:
        recompute.apply(model, Strategy.parse(f"recompute:{way}").recompute)
    return model


def step(model: Decoder) -> Trace:
    """Run forward and backward, and return what happened."""
    trace = Trace()
    is_backward = False

    def note_run(index: int) -> None:
        trace.note("again" if is_backward else "forward", index)

    def watch_backward(index: int, y: Tensor) -> None:
        if y.requires_grad and not is_backward:
            y.register_hook(lambda _: trace.note("backward", index))

    for index, block in enumerate(model.blocks):
        # Inside the block: recomputation may leave out the hooks of the block itself.
        block.attention_norm.register_forward_pre_hook(lambda *_, i=index: note_run(i))
        block.register_forward_hook(lambda m, a, y, i=index: watch_backward(i, y))
    tokens_BT = torch.arange(NUM_ROWS * SEQ_LEN).view(NUM_ROWS, SEQ_LEN) % 64
    for parameter in model.parameters():  # there already, as in a second microbatch
        parameter.grad = torch.zeros_like(parameter)
    with trace:
        loss = model(tokens_BT, tokens_BT.roll(-1, 1))
        trace.end_forward()
        is_backward = True
        loss.backward()
    return trace


COLOURS = {"forward": "#1f5a99", "again": "#8fb8de", "backward": "#b04a2f"}
COLUMN, INNER, BLOCKS, HELD = 215, 175, 170, 100
"""Width of a column and of its panels, and heights of both panels, in pixels."""


def draw(num_blocks: int, path: Path) -> None:
    """Draw which block runs when, and what is held, from traces of real steps."""
    chosen = dict(list(ways(num_blocks).items())[:4]) | {"recompute:sqrt": "sqrt"}
    traces = {name: step(build(num_blocks, way)) for name, way in chosen.items()}
    sizes = [num_bytes for trace in traces.values() for _, _, num_bytes in trace.events]
    span = math.log(min(sizes)), math.log(max(trace.peak_bytes for trace in traces.values()))
    drawing = SvgDrawing(50 + COLUMN * len(traces), BLOCKS + HELD + 125)
    for column, (name, trace) in enumerate(traces.items()):
        draw_way(drawing, 50 + COLUMN * column, num_blocks, name, trace, span)
    drawing.texts([(8, 130, "block"), (8, BLOCKS + 105, "held,"), (8, BLOCKS + 118, "MiB")], 10)
    bottom = BLOCKS + HELD + 115
    drawing.key({{"again": "forward, again"}.get(e, e): c for e, c in COLOURS.items()}, 50, bottom)
    drawing.texts([(330, bottom, "runs and backwards of blocks, in order")])
    drawing.write(path)


def draw_way(
    drawing: SvgDrawing,
    left: float,
    num_blocks: int,
    name: str,
    trace: Trace,
    span: tuple[float, float],
) -> None:
    """Draw one column; `span` has the logarithms of the least and the most bytes of all."""
    runs = trace.count("forward", "again")
    about = f"{runs} runs, at most {trace.peak_bytes / MIB:.2f} MiB"
    drawing.texts([(left, 15, name)], 12, weight="bold")
    drawing.texts([(left, 30, about)])
    width, height = INNER / len(trace.events), BLOCKS / num_blocks
    for event, colour in COLOURS.items():
        boxes = [
            (left + n * width, 40 + BLOCKS - (block + 1) * height, max(width, 1.2), height - 1)
            for n, (each, block, _) in enumerate(trace.events)
            if each == event
        ]
        drawing.boxes(boxes, colour)
    drawing.below(left, 42 + BLOCKS, [(0, "1"), (INNER, str(len(trace.events)))])

    def above(num_bytes: float) -> float:
        return 5 + (HELD - 5) * (math.log(num_bytes) - span[0]) / (span[1] - span[0])

    bottom = 70 + BLOCKS + HELD
    held = [(n, above(num_bytes)) for n, (_, _, num_bytes) in enumerate(trace.events)]
    drawing.boxes([(left + n * width, bottom - y, width, y) for n, y in held], "#bbbbbb")
    ticks = [(bottom - above(mib * MIB), f"{mib:g}") for mib in (0.1, 1, 10)]
    ticks = [(y, words) for y, words in ticks if bottom - HELD <= y <= bottom]
    drawing.boxes([(left, y, INNER, 0.6) for y, _ in ticks], "#5b6470")
    drawing.texts([(left - 4, y + 3, words) for y, words in ticks], 9, "end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print("| N | way | runs of blocks | kept by forward, MiB | most held, MiB |")
    print("|---:|---|---:|---:|---:|")
    for num_blocks in args.blocks:
        for name, way in ways(num_blocks).items():
            trace = step(build(num_blocks, way))
            runs = trace.count("forward", "again")
            kept, peak = trace.kept_bytes, trace.peak_bytes
            rows.append(
                {
                    "blocks": num_blocks,
                    "way": name,
                    "runs": runs,
                    "kept_bytes": kept,
                    "peak_bytes": peak,
                }
            )
            print(
                f"| {num_blocks} | {name} | {runs:,} | {kept / MIB:.2f} | {peak / MIB:.2f} |",
                flush=True,
            )
    if args.picture:
        draw(args.blocks[0], args.picture)
    write_result(args.out, {"command": " ".join(sys.argv), "rows": rows})


if __name__ == "__main__":
    main()
