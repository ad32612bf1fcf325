"""Numbers that everyone knows, from the planner's own counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from phalanx.account.activations import activations
from phalanx.account.count import Case, count, one_block_shape
from phalanx.account.parameters import BlockKind, num_parameters
from phalanx.account.planned import PURE_BYTES, STATE_BYTES, decoder_step
from phalanx.account.rank_memory import least_bytes
from phalanx.models.registry import shape_of
from phalanx.models.shape import ModelShape
from phalanx.planner.hardware import device
from phalanx.strategy import Strategy

GIB = 2**30


def test_the_weights_of_gpt3() -> None:
    """Brown et al. 2020: 175 B parameters, 700 GB in 32 bits; not on one H100."""
    weights = 4 * num_parameters(shape_of("gpt3-175b")).total
    assert weights / 1e9 == pytest.approx(700, rel=0.005)
    assert weights / GIB == pytest.approx(652, rel=0.005)
    h100 = device("h100")
    assert weights > 8 * h100.usable_bytes  # nor on the eight of a server
    assert h100.memory_bytes == 80e9 and h100.usable_bytes / GIB == pytest.approx(79.6, abs=0.05)


@pytest.mark.parametrize("billions", [1, 10, 100])
def test_parameters_in_16_bits_alone(billions: int) -> None:
    """Weights, gradients and two moments in 16 bits: 8, 80, 800 GB; on 80 devices 0.1 to 10 GB."""
    assert PURE_BYTES * billions == 8 * billions and STATE_BYTES == 2 * PURE_BYTES
    assert PURE_BYTES * 100e9 / 80 == 10e9


def zero_shape() -> ModelShape:
    """Return 7.5 B parameters."""
    gpt = shape_of("gpt2-1.5b")
    sizes = {"num_layers": 36, "hidden": 4096, "num_heads": 32, "num_kv_heads": 32}
    return dataclasses.replace(gpt, **sizes, head_dim=128, ffn=16384)


@pytest.mark.parametrize(
    ("text", "gigabytes", "held_more"),
    [
        ("dp64", 120, 0.0),
        ("fsdp64:zero1", 31.4, 15.0),  # gradients are added up in 32 bits here, not in 16
        ("fsdp64:zero2", 16.6, 0.0),
        ("fsdp64:zero3", 1.9, 0.0),
    ],
)
def test_figure_1_of_zero(text: str, gigabytes: float, held_more: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 devices, 120 to 1.9 GB."""
    shape = zero_shape()
    parameters = num_parameters(shape).total
    planned = decoder_step(shape, Strategy.parse(text), 1024, 1, 2)
    held = planned.plan.holds(2)
    state = held.parameter_bytes + held.gradient_bytes + held.optimizer_bytes
    if planned.strategy.fsdp.kind != "zero3":  # zero3 gathers a block at a time
        state += held.gathered_bytes
    assert state / 1e9 == pytest.approx((gigabytes + held_more) * parameters / 7.5e9, rel=0.06)
    assert least_bytes(planned) <= state


def test_the_feed_forward_activations_of_llama_3() -> None:
    """405 B at 4,096 tokens: 63.0 GiB of each tensor of the MLP with 4 h, 51.2 with its own width.

    SwiGLU keeps four: two products, the SiLU of one, and what they make together.
    """
    shape = shape_of("llama3-405b")

    def kept(ffn: int) -> int:
        of_one = one_block_shape(dataclasses.replace(shape, ffn=ffn), BlockKind(None, False), 4096)
        one = Case(of_one, Strategy(), 4096, 1, "bfloat16", "cuda")
        return shape.num_layers * count(one).block

    for ffn, gibibytes in ((4 * shape.hidden, 63.0), (shape.ffn, 51.2)):
        of_mlp = kept(ffn) - kept(ffn // 2)
        assert of_mlp / GIB == pytest.approx(4 * gibibytes / 2, rel=0.002)


def test_the_perceptron_of_8_layers_of_8192() -> None:
    """26.4 TFLOP of a step of 8,192 rows, 26.7 ms at the peak of an H100."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False) for _ in range(8)))
        rows = torch.empty(8192, 8192, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(rows).sum().backward()
    flops = counter.get_total_flops()
    assert flops / 1e12 == pytest.approx(26.4, abs=0.05)
    assert 1000 * flops / device("h100").flops == pytest.approx(26.7, abs=0.05)


@pytest.mark.parametrize(
    ("text", "published"),
    [  # of a layer over s b h, without the scores, 5 a s / h; t ranks
        ("dp1", lambda t: 34),  # equation 1; without scores also 5
        ("tp8:megatron", lambda t: 10 + 24 / t),  # equation 2
        ("tp8", lambda t: 34 / t),  # equation 4, with sequence parallelism; 6 without scores
        ("tp2", lambda t: 34 / t),
        ("recompute:full", lambda t: 2),  # section 5
        ("tp8,recompute:full", lambda t: 2 / t),
    ],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_activations_of_a_layer(text: str, published: Callable[[int], float], rows: int) -> None:
    """Korthikanti et al. 2022, in bfloat16 with dropout, to the byte but for 8 of each row's keys.

    Flash attention keeps no scores, 5 a s^2 b bytes, of which it keeps the log-sum-exp in 32 bits:
    what the paper calls selective recomputation is how it runs. Two norms keep mean and deviation
    in 32 bits.
    """
    strategy, seq_len = Strategy.parse(text), 1024
    shape = dataclasses.replace(shape_of("gpt3-175b"), num_layers=3, dropout=0.1)
    tokens, t = seq_len * rows, strategy.tp.degree
    held = activations(shape, strategy, seq_len, rows, "bfloat16", device="cuda", has_casts=False)
    beside = 4 * shape.num_heads * tokens / t + 2 * 8 * tokens / (1 if ":meg" in text else t)
    layer = tokens * shape.hidden * published(t)
    layer += 0 if strategy.recompute.kind == "full" else beside
    assert held.blocks == pytest.approx(3 * layer, abs=3 * 8 * rows)


def test_selective_recomputation_keeps_products() -> None:
    """Of 34 bytes the results of six products, 20, and the input; what is between is made again."""
    shape = dataclasses.replace(shape_of("gpt3-175b"), num_layers=3, dropout=0.1)
    selective = Strategy.parse("recompute:selective")
    held = activations(shape, selective, 1024, 1, "bfloat16", device="cuda", has_casts=False)
    of_layer = 1024 * shape.hidden
    log_sum_exp = 4 * shape.num_heads * 1024
    assert held.blocks == pytest.approx(3 * (22 * of_layer + log_sum_exp), abs=3 * 16)
    assert held.recomputed == pytest.approx(12 * of_layer, rel=2e-4)
