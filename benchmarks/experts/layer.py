"""A layer of experts, forward and backward, beside loops over experts, in turns, one thread.

python benchmarks/experts/layer.py [--experts 64] [--top-k 8] [--ffn 176] [--tokens 2048]
    [--rounds 9] [--precision float32] [--out FILE.json]

Four ways get the same weights, tokens and upstream gradient; outputs are compared in float32 first:
the grouped path of Phalanx; its product for each expert, which other types take; and the module of
transformers with its loop over experts (eager) and its grouped products. transformers' matrices are
in the type of the tokens, as a loop of one's own holds them after a cast.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from phalanx.models import experts
from phalanx.models.shape import ExpertShape, ModelShape

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import SHAPE, spread, write_result

OURS, LOOP, EAGER, GROUPED = (
    "grouped products", "product for each expert", "transformers, eager", "transformers, grouped_mm"
)  # fmt: skip


def layers(args: argparse.Namespace) -> dict[str, torch.nn.Module]:
    """Return the layer of Phalanx and those of transformers, with the same weights, float32."""
    shape = ExpertShape(num_experts=args.experts, top_k=args.top_k, ffn=args.ffn, renormalizes=True)
    ours = experts.MoE(ModelShape(**{**vars(SHAPE), "experts": shape}), shape, 0)
    torch.manual_seed(0)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    theirs = {}
    for name, implementation in ((EAGER, "eager"), (GROUPED, "grouped_mm")):
        config = MixtralConfig(
            hidden_size=SHAPE.hidden, intermediate_size=args.ffn, num_local_experts=args.experts,
            num_experts_per_tok=args.top_k, experts_implementation=implementation,
        )  # fmt: skip
        module = theirs[name] = MixtralSparseMoeBlock(config)
        weights = ours.experts.gate.data, ours.experts.up.data
        module.gate.weight.data.copy_(ours.router.weight.data)
        module.experts.gate_up_proj.data.copy_(torch.cat(weights, 1))
        module.experts.down_proj.data.copy_(ours.experts.down.data)
    return {OURS: ours, **theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=176)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.precision)
    modules = layers(args)
    x_BTD = torch.randn(8, args.tokens // 8, SHAPE.hidden)
    with torch.no_grad():
        expected_BTD = modules[OURS](x_BTD)
        for name, module in modules.items():
            apart = float((module(x_BTD) - expected_BTD).abs().max() / expected_BTD.abs().max())
            assert apart < 1e-5, f"the outputs of {name} are {apart:.1e} apart"
            module.to(dtype)
    x_BTD = x_BTD.to(dtype)
    upstream_BTD = torch.randn_like(x_BTD)

    def run(module: torch.nn.Module) -> None:
        module.zero_grad(set_to_none=True)
        module(x_BTD.detach().requires_grad_()).backward(upstream_BTD)

    def run_each_expert() -> None:
        with patch.object(experts, "_ALIGNMENT", 1 << 40):  # no width is a multiple of it
            run(modules[OURS])

    ways: dict[str, Callable[[], None]] = {
        OURS: lambda: run(modules[OURS]),
        LOOP: run_each_expert,
        EAGER: lambda: run(modules[EAGER]),
        GROUPED: lambda: run(modules[GROUPED]),
    }
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds):
        names = [*ways]
        for name in names[number % 4 :] + names[: number % 4]:
            begin_s = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begin_s)
    print("| way | ms, median | min | max | time against grouped, round by round: median |")
    print("|---|---:|---:|---:|---:|")
    for name, row in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(row, seconds[OURS], strict=True))
        cells = spread([1e3 * s for s in row], ",.1f")
        print(f"| {name} | {cells} | {ratio:.2f} |")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write_result(args.out, {**settings, "seconds": seconds})


if __name__ == "__main__":
    main()
