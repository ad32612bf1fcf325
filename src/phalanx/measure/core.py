"""Rates of one CPU core on the products, attention and operators of training, in about a second.

The peak rate of matrix products does not predict training: a weight's gradient has a transposed
operand, attention has small operands, and every operator has a fixed overhead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.measure.environment import has_fast_bfloat16
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape

_TOKENS, _WIDTH, _INNER = 1024, 512, 1408
_HEADS: Final = 4, 8, 256, 64
"""Batch size, heads, positions and head_dim of the timed attention."""

_BUDGET_S: Final = 0.15
_STEPS: Final = 7
_CHAIN: Final = 32
"""Number of small operators in the chain that `operator_s` times."""


def measure_core() -> tuple[dict[str, float], dict[str, float], float]:
    """Return FLOP/s of products and of attention by data type, and the seconds of one operator."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        types = {"float32": torch.float32}
        if has_fast_bfloat16("cpu"):
            types["bfloat16"] = torch.bfloat16
        products = {of: products_rate(dtype) for of, dtype in types.items()}
        attention = {of: attention_rate(dtype) for of, dtype in types.items()}
        return products, attention, operator_s()
    finally:
        torch.set_num_threads(num_threads)


def products_rate(dtype: torch.dtype) -> float:
    """Return FLOP/s of a layer's products: forward, input gradient and weight gradient."""
    x, w, dy = (
        torch.randn(shape).to(dtype)
        for shape in ((_TOKENS, _WIDTH), (_INNER, _WIDTH), (_TOKENS, _INNER))
    )

    def layer() -> None:
        _ = x @ w.T, dy @ w, dy.T @ x

    return 3 * 2 * _TOKENS * _WIDTH * _INNER / _best_s(layer)


def attention_rate(dtype: torch.dtype) -> float:
    """Return FLOP/s of causal attention, forward and backward, counting unmasked pairs only."""
    q, k, v = (torch.randn(_HEADS).to(dtype).requires_grad_() for _ in range(3))

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    rows, heads, positions, width = _HEADS
    pairs = rows * heads * positions * (positions + 1) // 2
    return 3.5 * 4 * pairs * width / _best_s(attend)


def operator_s() -> float:
    """Return the seconds of one operator on a small tensor, under autograd."""
    x = torch.ones(8, requires_grad=True)

    def chain() -> None:
        y: Tensor = x
        for _ in range(_CHAIN):
            y = y * y
        y.sum().backward()

    return _best_s(chain) / (4 * _CHAIN)  # one forward, three backward


SMALL: Final = ModelShape(
    vocab_size=4096,
    num_layers=2,
    hidden=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn=1408,
    max_seq_len=256,
    tied=True,
)
"""Decoder of `small_step`, which shows the cost of operators in a step compared with alone."""

SMALL_ROWS: Final = 4


def small_step() -> tuple[Decoder, Callable[[], None]]:
    """Return a small decoder, and a function that runs its forward and backward.

    It computes in bfloat16 if the CPU has fast bfloat16, else in float32.
    """
    model, seq_len = Decoder(SMALL), SMALL.max_seq_len
    model.compute_dtype = torch.bfloat16 if has_fast_bfloat16("cpu") else torch.float32
    tokens_BT = torch.arange(SMALL_ROWS * seq_len).view(SMALL_ROWS, seq_len) % SMALL.vocab_size

    def run() -> None:
        model.zero_grad()
        model(tokens_BT, tokens_BT).backward()

    return model, run


def step_s() -> float:
    """Return the median seconds of `small_step`, after one warm-up step."""
    _, run = small_step()
    times_s: list[float] = []
    for _ in range(1 + _STEPS):
        begun_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - begun_s)
    return statistics.median(times_s[1:])


def _best_s(run: Callable[[], None]) -> float:
    """Return the shortest time of repeated runs, after one warm-up run."""
    run()
    times_s, begun_s = list[float](), time.perf_counter()
    while not times_s or time.perf_counter() - begun_s < _BUDGET_S:
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
