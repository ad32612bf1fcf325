"""Host time of an operation on a GPU: steps of decoders so small that launches bound them.

python benchmarks/gpu/launches.py [--device cuda]

Prints a row for each number of layers: the median step, and the operations that the planner counts.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from main import time_steps
from phalanx.account.count import Case, one_block_shape, work_of
from phalanx.account.parameters import BlockKind
from phalanx.launch.local import run_ranks
from phalanx.models.shape import ModelShape
from phalanx.strategy import Strategy

SHAPE = ModelShape(
    vocab_size=4096, num_layers=2, hidden=256, num_heads=4, num_kv_heads=2, head_dim=64, ffn=688,
    max_seq_len=256,
)  # fmt: skip


def num_operations(shape: ModelShape, has_documents: bool) -> int:
    """Return the operations of a step, as the planner counts them."""
    one = one_block_shape(shape, BlockKind(None, has_experts=False), shape.max_seq_len)
    case = Case(
        *(one, Strategy.parse("dp1"), shape.max_seq_len, 1, "bfloat16", "cuda"),
        has_documents=has_documents,
        has_casts=True,
    )
    of = work_of(case)
    in_block = len(of.block) + len(of.backward)
    return len(of.inputs) + len(of.head) + shape.num_layers * in_block


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    print("| layers | documents | compiled | operations | step ms | us an operation |")
    print("|---:|---:|---|---:|---:|---:|")
    for is_compiled in (False, True):
        for num_documents in (1, 2):
            for num_layers in (2, 8, 16):
                shape = dataclasses.replace(SHAPE, num_layers=num_layers)
                chosen = (shape, shape.max_seq_len, "none", is_compiled, num_documents, 20.0)
                (found,) = run_ranks(time_steps, 1, *chosen, device, device=device)
                num, step_s = num_operations(shape, num_documents > 1), found["step_s"]
                each_us = 1e6 * step_s / num
                print(
                    f"| {num_layers} | {num_documents} | {is_compiled} | {num} | "
                    f"{1e3 * step_s:.1f} | {each_us:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
