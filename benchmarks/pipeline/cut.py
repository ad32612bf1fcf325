"""Steps of an uneven model under pp2, cut by its parameters and by the times of its layers.

python benchmarks/pipeline/cut.py [--rounds 15] [--out FILE.json]

The model is a chain: an embedding with most of the parameters, seven blocks of which one runs its
layer three times, and a head. Both cuts take turns, step by step, in the same two processes.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import spread, write_result
from phalanx.comm.comm import Ranks
from phalanx.comm.together import barrier
from phalanx.launch.local import run_ranks
from phalanx.launch.process_memory import keep_freed_memory
from phalanx.parallel.pipeline.cut import ranges_of
from phalanx.parallel.pipeline.links import chain_by, cost_of, links_of
from phalanx.parallel.pipeline.measured import link_times, with_best_cut
from phalanx.parallel.pipeline.modules import ModuleStages
from phalanx.parallel.pipeline.partition import imbalance
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import skeleton_of
from phalanx.strategy import Strategy

WIDTH, WORDS, ROWS, LENGTH, MICROBATCHES = 512, 20_000, 2, 128, 8


class Block(nn.Module):
    """A residual block that runs its layer `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(3 if at == 1 else 1) for at in range(7)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, 1000))


def loss_sum(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 1000, reduction="sum")


def tokens_of(number: int) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randint(WORDS, (ROWS, LENGTH), generator=draw)


def step_times(texts: list[str], rounds: int) -> dict[str, list[float]]:
    runs: dict[str, Any] = {}
    for text in texts:
        strategy, model = Strategy.parse(text), build()
        comm = Ranks(strategy)
        runs[text] = model, Plan(strategy, model, pp_rank=comm.coord("pp")).build(comm)
    found: dict[str, list[float]] = {text: [] for text in texts}
    microbatches = [tokens_of(number) for number in range(MICROBATCHES)]
    for _ in range(1 + rounds):
        for text, (model, run) in runs.items():
            model.zero_grad(set_to_none=True)
            barrier()
            begin_s = time.perf_counter()
            run(
                microbatches, lambda tokens, model=model: loss_sum(model, tokens), lambda loss: loss
            )
            barrier()
            found[text].append(time.perf_counter() - begin_s)
    return {text: times[1:] for text, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    keep_freed_memory()  # as ranks do
    torch.set_num_threads(1)
    strategy, model = Strategy.parse("pp2"), build()
    links = links_of(model)
    costs = [float(cost_of([model.get_submodule(name) for name in link])) for link in links]
    whole, num_links = build(), len(links)
    stages = ModuleStages(
        whole, chain_by(skeleton_of(whole), links, ranges_of([1] * num_links)), range(num_links)
    )
    times = [sum(t) for t in link_times(stages, lambda: loss_sum(whole, tokens_of(0)), 7)]
    cuts = {
        "parameters": str(with_best_cut(strategy, costs)),
        "times": str(with_best_cut(strategy, times)),
    }
    steps: dict[str, list[float]] = run_ranks(
        step_times, 2, list(cuts.values()), args.rounds, threads=1
    )[0]
    print("layers, ms:", ", ".join(f"{each * 1e3:.1f}" for each in times))
    print("\n| cut by | | slowest / mean, by times | ms a step, median | min | max | ratio |")
    print("|---|---|---:|---:|---:|---:|---:|")
    rows = {}
    for by, text in cuts.items():
        parts = ranges_of(Strategy.parse(text).cut)
        ratio = statistics.median(
            a / b for a, b in zip(steps[text], steps[cuts["parameters"]], strict=True)
        )
        uneven = imbalance(times, parts)
        ms = [each * 1e3 for each in steps[text]]
        print(f"| {by} | `{text}` | {uneven:.2f} | {spread(ms, '.0f')} | {ratio:.2f} |")
        rows[by] = {"strategy": text, "imbalance": uneven, "step_s": steps[text], "ratio": ratio}
    write_result(args.out, {"layer_s": times, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
