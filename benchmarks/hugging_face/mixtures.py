"""Mixtures of sources: counts over a million samples, and one order for any ranks and resumes.

python benchmarks/hugging_face/mixtures.py [RESULTS.json]
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np

from phalanx.config import BatchPlan
from phalanx.data.corpus import mixture_of
from phalanx.data.loader import Loader
from phalanx.data.order import Order, pattern_of
from phalanx.data.samples import Samples
from phalanx.data.token_file import TokenWriter, joined, open_token_file

NUM_SAMPLES = 10**6
MIXTURES = (
    "0.7*web,0.3*code",
    "0.5*web,0.25*code,0.2*books,0.05*math",
    "2*web,1*code",
    "0.333333*web,0.333333*code,0.333334*books",
    "0.999999*web,0.000001*code",
    ",".join(f"{number + 1}*s{number}" for number in range(20)),
)
SIZES = (700, 300, 40)
NUM_RUNS, NUM_POSITIONS = 50, 4000


def counts_of(mixture: str) -> dict[str, object]:
    """Count the samples of each source, and compare each prefix with its exact part."""
    weights = tuple(weight for weight, _ in mixture_of(mixture))
    period = sum(weights)
    sizes = [1000 + 7 * number for number in range(len(weights))]
    order = Order(sum(sizes), seed=1).mixed(sizes, weights)
    samples = order.samples(np.arange(NUM_SAMPLES))
    source = np.searchsorted(np.cumsum(sizes), samples, side="right")
    counts = np.bincount(source, minlength=len(weights)).tolist()
    exact = [Fraction(NUM_SAMPLES * weight, period) for weight in weights]
    lengths = np.arange(1, period + 1)  # of prefixes; in whole numbers, so without rounding
    worst = max(
        int(np.abs(np.cumsum(pattern_of(weights)[0] == number) * period - lengths * weight).max())
        for number, weight in enumerate(weights)
    )
    return {
        "mixture": mixture,
        "counts": counts,
        "most from exact": float(max(abs(c - e) for c, e in zip(counts, exact, strict=True))),
        "most in a prefix": worst / period,
    }


def differing_positions(folder: Path) -> tuple[int, int]:
    """Return the positions that are compared, and how many differ, of runs that change ranks."""
    files = []
    for number, size in enumerate(SIZES):
        path = folder / f"{number}.bin"
        with TokenWriter(path, num_ids=1 << 15, end_id=(1 << 15) - 1) as writer:
            # The first token of a sample is its number over all sources.
            writer.write([t for s in range(size) for t in (sum(SIZES[:number]) + s, 0)])
        files.append(open_token_file(path))
    samples = Samples(joined(files), 2)
    order = Order(len(samples), seed=7).mixed(SIZES, (5, 4, 1))
    expected = order.samples(np.arange(NUM_POSITIONS + 1000))
    compared = differing = 0
    draw = random.Random(0)
    for _ in range(NUM_RUNS):
        consumed = 0
        while consumed < NUM_POSITIONS:
            size = draw.randint(1, 4) * draw.randint(1, 3) * draw.randint(1, 8)
            ranks = draw.choice([n for n in range(1, 9) if size % n == 0])
            plan = BatchPlan(size, size // ranks, 1, ranks)
            rows = np.empty(size, dtype=np.int64)
            for rank in range(ranks):  # a loader that knows its position alone
                loader = Loader(samples, order, plan, rank, consumed=consumed)
                (batch,) = loader.step_at(loader.consumed)
                rows[rank::ranks] = batch.tokens_BT[:, 0].numpy()
            differing += int((rows != expected[consumed : consumed + size]).sum())
            compared, consumed = compared + size, consumed + size
    return compared, differing


def main() -> None:
    """Print the figures, and write them to the file that is named."""
    rows = [counts_of(mixture) for mixture in MIXTURES]
    for row in rows:
        print(
            f"{str(row['mixture'])[:42]:42}  {str(row['counts'])[:40]:40}  of {NUM_SAMPLES:,}; "
            f"from exact {row['most from exact']:.3f}, in any prefix {row['most in a prefix']:.3f}"
        )
    with tempfile.TemporaryDirectory() as folder:
        compared, differing = differing_positions(Path(folder))
    print(f"{compared:,} positions of {NUM_RUNS} runs on 1 to 8 ranks: {differing} differ")
    if sys.argv[1:]:
        record = {"mixtures": rows, "compared": compared, "differing": differing}
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
