"""Where layouts of tensor parallelism cross with one dimension, and whether overlap helps.

python benchmarks/tensor/main.py [crossing] [overlap] [--repeats 10] [--out FOLDER]

`crossing` counts the bytes of each layout on both sides of its crossing with one dimension;
`overlap` times layouts that wait beside those that do not, in turns. Both if none is named.
Float32 on CPU ranks of this host.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

from account import collectives, crossing_tokens, sent_line
from layouts import TensorConfig, measure_tensor, parse_layout
from overlap import overlap_rank
from phalanx.launch.local import run_ranks
from phalanx.models.registry import shape_of
from phalanx.parallel.batch_shape import BatchShape
from phalanx.report.output import values_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import spread, write_result

CROSSINGS = {
    "tp4:2d": ("512x8x64", "512x8x192"),
    "tp16:2d": ("1024x8x64", "1024x8x192"),
    "tp8:2.5d/2": ("512x8x64", "512x8x192"),
    "tp8:3d": ("512x8x32", "512x8x128"),
}
"""Of each layout, a size below its crossing with one dimension, and one above."""

SHAPE = "llama2-7b"
GRIDS = (
    "tp4", "tp4:2d", "tp8", "tp8:2.5d/2", "tp8:3d", "tp16", "tp16:2d",
    "tp64", "tp64:2d", "tp64:2.5d/4", "tp64:3d",
)  # fmt: skip
TOKENS = (1024, 4096, 16384, 65536)
OVERLAP = {"tp4:2d": ("512x8x128", "512x8x512"), "tp2": ("512x8x128", "512x8x512"),
           "tp4": ("512x8x128", "512x8x512")}  # fmt: skip
MIB = 2**20


def crossing() -> dict[str, object]:
    shape, computed = shape_of(SHAPE), {}
    columns = " | ".join(f"{tokens:,}" for tokens in TOKENS)
    print(f"\n{SHAPE}, a block, bfloat16 with float32 masters: MiB sent by a rank\n")
    print(f"| layout | calls | {columns} tokens | from tokens | float32: from |")
    print("|---|---:|" + "---:|" * (len(TOKENS) + 2))
    for text in GRIDS:
        strategy = parse_layout(text)
        fixed, per_token = sent_line(strategy, shape, "bfloat16")
        sent = [fixed + per_token * tokens for tokens in TOKENS]
        cells = [f"{value / MIB:,.0f}" for value in sent]
        of = computed[text] = {"sent_bytes": dict(zip(TOKENS, sent, strict=True))}
        if strategy.tp.kind == "1d":
            cells += ["", ""]
        else:
            of["bfloat16"] = crossing_tokens(strategy, shape, "bfloat16")
            of["float32"] = crossing_tokens(strategy, shape, "float32")
            cells += [f"{of['bfloat16']:,.0f}", f"{of['float32']:,.0f}"]
        entries = collectives(strategy, shape, BatchShape(64, 64), "bfloat16")
        num_calls = sum(entry.calls for entry in entries)
        print(f"| `{text}` | {num_calls} | {' | '.join(cells)} |")
    print("\n| layout | size | tokens | crossing | 1d sends MiB | it sends MiB |")
    print("|---|---|---:|---:|---:|---:|")
    counted = {}
    for text, sizes in CROSSINGS.items():
        strategy = parse_layout(text)
        both = (f"tp{strategy.tp.degree}", text)
        run = measure_tensor(TensorConfig(layouts=both, sizes=sizes, dtype="float32", repeats=0))
        (found,) = run.crossings
        counted[text] = values_of(run)
        for plain, point in zip(run.points[::2], run.points[1::2], strict=True):
            assert plain.measured == plain.theory and point.measured == point.theory
            is_above = point.size.num_tokens > found.num_tokens
            sent = [p.measured.sent_bytes for p in (plain, point)]
            assert is_above == (sent[1] < sent[0])
            print(
                f"| `{text}` | {point.size} | {point.size.num_tokens} | {found.num_tokens:,.0f} "
                f"| {sent[0] / MIB:.2f} | {sent[1] / MIB:.2f} |",
                flush=True,
            )
    return {"computed": computed, "counted": counted}


def overlap(repeats: int) -> dict[str, object]:
    print("\n| layout | size | | ms, median | min | max | against as it is, turn by turn |")
    print("|---|---|---|---:|---:|---:|---:|")
    rows = {}
    for text, sizes in OVERLAP.items():
        num_ranks = parse_layout(text).num_ranks
        rows[text] = run_ranks(overlap_rank, num_ranks, text, sizes, "float32", repeats)[0]
        for size, times_s in rows[text].items():
            plain_s = next(iter(times_s.values()))
            for name, own_s in times_s.items():
                ratio = statistics.median(a / b for a, b in zip(own_s, plain_s, strict=True))
                times = spread([1e3 * time_s for time_s in own_s], ".0f")
                print(f"| `{text}` | {size} | {name} | {times} | {ratio:.2f}x |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", choices=[[], "crossing", "overlap"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for what in args.what or ("crossing", "overlap"):
        load = os.getloadavg()[0]
        print(f"load of the machine when it began: {load:.1f}", file=sys.stderr)
        rows = {
            "crossing": crossing,
            "overlap": lambda: overlap(args.repeats),
        }[what]()
        if args.out is not None:
            path = args.out / f"{what}-cpu-float32.json"
            command = f"benchmarks/tensor/main.py {what} --repeats {args.repeats}"
            write_result(path, {"command": command, "load": load, "rows": rows})


if __name__ == "__main__":
    main()
