"""The moments of Muon's matrices in the account, beside a real optimizer's state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from phalanx.account.planned import DecoderModel, decoder_step
from phalanx.account.rank_memory import memory
from phalanx.models.registry import shape_of
from phalanx.strategy import Strategy


@pytest.mark.parametrize("name", ["demo", "olmoe-1b-7b", "deepseek-v3-671b"])
def test_muon_has_one_moment_of_the_matrices_that_it_updates(name: str) -> None:
    """The names are Muon's own; a stack of experts and projections of latents are among them."""
    from phalanx.models.decoder import Decoder
    from phalanx.train.optimizer import hidden_matrices

    shape = shape_of(name)
    num_layers = 2 if shape.experts is None else shape.experts.first_dense + 1
    shape = dataclasses.replace(shape, num_layers=num_layers)
    import torch

    parameters = dict(Decoder.on_meta(shape, torch.float32, torch.bfloat16).named_parameters())
    hidden = {n: parameters[n] for n in hidden_matrices(parameters)}
    one = sum(p.numel() for p in hidden.values())
    both = sum(p.numel() for p in parameters.values())
    for text, num in (("dp2", 1), ("fsdp2", 2), ("fsdp2:zero1", 2)):
        step = decoder_step(shape, Strategy.parse(text), 64, 1, 1, is_muon=True)
        (held,) = memory(step, "cpu")
        assert math.isclose(held.optimizer, 4 * (2 * both - one) / num, rel_tol=1e-6), text
    matrices = step.model.muon_matrices(step, 0)
    assert sum(of.number * math.prod(of.shape) for of in matrices) == one


def test_ranks_of_ep_have_moments_of_their_own_experts() -> None:
    shape = dataclasses.replace(shape_of("olmoe-1b-7b"), num_layers=2)

    def held(text: str, *, is_muon: bool) -> int:
        step: Any = decoder_step(shape, Strategy.parse(text), 64, 1, 1, is_muon=is_muon)
        return memory(step, "cpu")[0].optimizer

    whole, split = (held(text, is_muon=False) - held(text, is_muon=True) for text in ("dp2", "ep2"))
    of_experts = 4 * shape.num_layers * shape.experts.num_experts * 3  # pyright: ignore
    of_experts *= shape.hidden * shape.experts.ffn  # pyright: ignore
    assert whole - split == of_experts // 2
    assert held("fsdp2,ep2", is_muon=True) == pytest.approx(held("dp4", is_muon=True) / 4, rel=1e-6)
    assert not DecoderModel(shape, 64).is_muon
