"""Measure how unevenly tokens are spread over ranks of experts while a small decoder trains.

    python benchmarks/planner/imbalance.py [--steps 200] [--aux 0.01]

A decoder of four blocks with 16 experts, of which a token visits two, learns bytes of this
project, in one process. Each 50 steps a row shows, for 2, 4 and 8 ranks of ep, the rows
of the rank with the most rows / the mean: in each block, then the mean over blocks. `phalanx plan
--imbalance` takes such a factor.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape

RANKS = (2, 4, 8)
NUM_EXPERTS, ROWS, LENGTH = 16, 16, 256


def imbalance(load_E: Tensor, num_ranks: int) -> float:
    """Return the load of the rank with the most / the mean, with consecutive experts on a rank."""
    return (load_E.view(num_ranks, -1).sum(1).max() * num_ranks / load_E.sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--aux", type=float, default=0.01, help="coefficient of the balancing loss")
    args = parser.parse_args()
    torch.manual_seed(0)
    root = Path(__file__).parents[2]
    files = sorted([*root.glob("docs/*.md"), *root.glob("src/phalanx/*/*.py")])
    bytes_N = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    shape = ModelShape(
        vocab_size=256, num_layers=4, hidden=128, num_heads=4, num_kv_heads=4, head_dim=32, ffn=352,
        max_seq_len=LENGTH,
        experts=ExpertShape(num_experts=NUM_EXPERTS, top_k=2, ffn=176, renormalizes=True),
    )  # fmt: skip
    model = Decoder(shape)
    model.initialize(0)
    loads: list[Tensor] = []
    losses: list[Tensor] = []

    def watch(router: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        load_E = torch.bincount(outputs[0].flatten(), minlength=NUM_EXPERTS)
        share_E = nn.functional.linear(inputs[0], router.weight).softmax(-1).mean(0)
        loads.append(load_E)
        losses.append(NUM_EXPERTS * (load_E / len(inputs[0]) * share_E).sum())

    for block in model.blocks:
        block.get_submodule("mlp.router").register_forward_hook(watch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    print(f"{'step':>6}{'loss':>8}" + "".join(f"{f'ep{n}':>8}" for n in RANKS))
    for step in range(args.steps + 1):
        starts = torch.randint(0, len(bytes_N) - LENGTH - 1, (ROWS,)).tolist()
        rows_BT = torch.stack([bytes_N[at : at + LENGTH + 1] for at in starts])
        loads.clear()
        losses.clear()
        loss = model(rows_BT[:, :-1], rows_BT[:, 1:]) / (ROWS * LENGTH)
        (loss + args.aux * sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            of = [
                statistics.mean(map(functools.partial(imbalance, num_ranks=n), loads))
                for n in RANKS
            ]
            print(f"{step:>6}{loss.item():>8.3f}" + "".join(f"{each:>8.2f}" for each in of))


if __name__ == "__main__":
    main()
