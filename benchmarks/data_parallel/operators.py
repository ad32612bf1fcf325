"""Where a step goes on one core: matrix products, attention, the rest; ours beside transformers.

One process of one thread computes a step of either model on the same tokens, in turns. What
matrix products take, both share: it bounds what anything else can gain.

python benchmarks/data_parallel/operators.py [--precision float32] [--turns 5] [--out FILE.json]
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import SHAPE, write_result
from phalanx.hugging_face.config import config_to_hf
from phalanx.launch.process_memory import keep_freed_memory
from phalanx.models.decoder import Decoder

ROWS = 8
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::_addmm_activation"),
    "attention": ("causal_attention", "scaled_dot_product"),
}
"""Parts of the names of operators; what they call counts with them."""


def make_steps(precision: str) -> dict[str, Callable[[], None]]:
    """Return a training step of each model."""
    shape = dataclasses.replace(SHAPE, tied=False)
    dtype = getattr(torch, precision)
    decoder = Decoder(shape)
    decoder.initialize(0)
    decoder.compute_dtype = dtype
    config = AutoConfig.for_model(**config_to_hf(shape, "float32"))
    llama = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    tokens_BT = torch.randint(shape.vocab_size, (ROWS, shape.max_seq_len))

    def of_decoder() -> torch.Tensor:
        return decoder(tokens_BT, tokens_BT.roll(-1, 1)) / tokens_BT.numel()

    def of_llama() -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            return llama(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss

    def training(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

        def step() -> None:
            loss().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {
        "phalanx": training(decoder.train(), of_decoder),
        "transformers": training(llama.train(), of_llama),
    }


def milliseconds(step: Callable[[], None]) -> dict[str, float]:
    """Run a step under the profiler; return the ms of each kind, of the rest and of all."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start_s = time.perf_counter()
        step()
        all_ms = (time.perf_counter() - start_s) * 1e3
    spent = dict.fromkeys(KINDS, 0.0)
    for event in profiler.events():
        kind, parent = _kind(event.name), event.cpu_parent
        while kind is not None and parent is not None:  # count the outermost alone
            if _kind(parent.name) is not None:
                kind = None
            parent = parent.cpu_parent
        if kind is not None:
            spent[kind] += event.cpu_time_total / 1e3
    return {**spent, "the rest": all_ms - sum(spent.values()), "step": all_ms}


def _kind(name: str) -> str | None:
    if name.startswith("autograd::"):  # the node of a backward, which has operators in it
        return None
    return next((kind for kind, parts in KINDS.items() if any(p in name for p in parts)), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    steps = make_steps(args.precision)
    for step in steps.values():
        step()
    turns = [{name: milliseconds(step) for name, step in steps.items()} for _ in range(args.turns)]
    print("| ms, median (least-most) | " + " | ".join(steps) + " |")
    print("|---|" + "---:|" * len(steps))
    for row in (*KINDS, "the rest", "step"):
        cells = []
        for name in steps:
            values = [turn[name][row] for turn in turns]
            middle = statistics.median(values)
            cells.append(f"{middle:,.0f} ({min(values):,.0f}-{max(values):,.0f})")
        print(f"| {row} | " + " | ".join(cells) + " |")
    write_result(args.out, {"precision": args.precision, "rows": ROWS, "turns": turns})


if __name__ == "__main__":
    main()
