"""Full tensors that rank 0 puts together are those that PyTorch gathers, to the bit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from mutants import on_rank, planted
from torch import nn
from torch.distributed.tensor import DTensor

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.parallel.reduce import is_fused
from phalanx.strategy import Strategy
from phalanx.verify import snapshot
from phalanx.verify.snapshot import full_tensors

# Of eight ranks the last have no rows of some, and 66 rows over two and then two are uneven.
SHAPE = ModelShape(
    vocab_size=66, num_layers=1, hidden=32, num_heads=8, num_kv_heads=4, head_dim=4, ffn=48,
    max_seq_len=32, tied=True,
)  # fmt: skip
OF_FOUR = ("fsdp2,tp2", "tp4", "tp4:2d")
OF_EIGHT = (
    *("fsdp8", "fsdp4,tp2", "dp2,fsdp2,tp2", "fsdp2,tp4:2d"),
    *("tp8", "tp8:2.5d/2", "tp8:3d"),
)


class Fused(nn.Module):
    """Two maps in one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GLU(), nn.Linear(32, 16))


def split_in(text: str) -> nn.Module:
    strategy, roles = Strategy.parse(text), None
    if text in ("tp4", "tp8"):
        model: nn.Module = Fused()
        roles = {"net": "branch", "net.0": "column/2", "net.2": "row"}
    else:
        model = Decoder(SHAPE).double()
        model.initialize(0)
    Plan(strategy, model, roles=roles).build(Ranks(strategy))
    return model


def differing_on_ranks(layouts: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Return what differs, whether a weight was fused, and what lacks a part that none brings."""
    # It warns that it gathers axis by axis.
    of_torch = logging.getLogger("torch.distributed.tensor._redistribute")
    before = of_torch.level
    of_torch.setLevel(logging.ERROR)
    found: list[str] = []
    fused = False
    lacking: list[str] = []
    for text in layouts:
        comm = Ranks(Strategy.parse(text))
        named = dict(split_in(text).named_parameters())
        due = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
            for name, p in named.items()
        }
        ours = full_tensors(named, comm)
        if dist.get_rank() == 0:
            found += [f"{text} {name}" for name in due if not torch.equal(ours[name], due[name])]
        fused |= any(map(is_fused, named.values()))
        with planted((snapshot, "_sends_shard", lambda right: on_rank(1, lambda *_: False, right))):
            if any(tensor.isnan().any() for tensor in full_tensors(named, comm).values()):
                lacking.append(text)
    of_torch.setLevel(before)  # ranks that stay begin the next job with it
    return found, fused, lacking


@pytest.mark.parametrize(("num_ranks", "layouts"), [(4, OF_FOUR), by_hand(8, OF_EIGHT)])
def test_full_tensors_are_those_of_pytorch_and_what_none_brings_is_nan(
    num_ranks: int, layouts: Sequence[str]
) -> None:
    found, fused, lacking = run_ranks(differing_on_ranks, num_ranks, layouts, threads=1)[0]
    assert not found
    assert fused
    assert lacking == list(layouts)
