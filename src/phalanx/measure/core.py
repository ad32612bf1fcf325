"""Rates of CPU cores on the products, attention, memory and operators of training.

The peak rate of matrix products does not predict training: a weight's gradient has a transposed
operand, attention has small operands, and every operator has a fixed overhead. Each rate is of the
median repeat: ranks that measure at once share cores and caches as in training, and the fastest
repeat would be one that ran alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from phalanx.measure.environment import has_fast_bfloat16
from phalanx.models.attention import attend
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape

_TOKENS, _WIDTH, _INNER = 512, 512, 1408
_HEADS: Final = 4, 256, 8, 64
"""Batch size, positions, heads and head_dim of the timed attention."""

_BUDGET_S: Final = 0.1
_STEPS: Final = 3
_CHAIN: Final = 32
"""Number of small operators in the chain that `operator_s` times."""

_STREAM_BYTES: Final = 64 << 20
"""Bytes of the tensor that `memory_rate` reads and writes; more than the caches of a core."""


def measure_core(*also: str) -> tuple[dict[str, float], dict[str, float], float]:
    """Return FLOP/s of products and of attention by data type, and the seconds of one operator.

    The data types are float32, bfloat16 if the CPU has fast bfloat16, and `also`.
    """
    fast = ["bfloat16"] if has_fast_bfloat16("cpu") else []
    types = {of: getattr(torch, of) for of in dict.fromkeys(["float32", *fast, *also])}
    products = {of: products_rate(dtype) for of, dtype in types.items()}
    attention = {of: attention_rate(dtype) for of, dtype in types.items()}
    return products, attention, operator_s()


def memory_rate(device: str = "cpu") -> float:
    """Return the bytes/s, read plus written, of the median of passes that scale a large tensor."""
    x, times_s = torch.ones(_STREAM_BYTES // 4, device=device), list[float]()
    for _ in range(5):
        begun_s = time.perf_counter()
        x.mul_(1.0)  # in place: a new result would be read before it is written, too
        if device == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - begun_s)
    return 2 * _STREAM_BYTES / statistics.median(times_s)


def products_rate(dtype: torch.dtype) -> float:
    """Return FLOP/s of a layer's products: forward, input gradient and weight gradient."""
    x, w, dy = (
        torch.randn(shape).to(dtype)
        for shape in ((_TOKENS, _WIDTH), (_INNER, _WIDTH), (_TOKENS, _INNER))
    )

    def layer() -> None:
        _ = x @ w.T, dy @ w, dy.T @ x

    return 3 * 2 * _TOKENS * _WIDTH * _INNER / _median_s(layer)


def attention_rate(dtype: torch.dtype) -> float:
    """Return FLOP/s of causal attention, forward and backward, counting unmasked pairs only."""
    q, k, v = (torch.randn(_HEADS).to(dtype).requires_grad_() for _ in range(3))

    def run() -> None:
        attend(q, k, v).sum().backward()

    rows, positions, heads, width = _HEADS
    pairs = rows * heads * positions * (positions + 1) // 2
    return 3.5 * 4 * pairs * width / _median_s(run)


def operator_s() -> float:
    """Return the seconds of one operator on a small tensor, under autograd."""
    x = torch.ones(8, requires_grad=True)

    def chain() -> None:
        y: Tensor = x
        for _ in range(_CHAIN):
            y = y * y
        y.sum().backward()

    return _median_s(chain) / (4 * _CHAIN)  # one forward, three backward


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

SMALL_ROWS: Final = 2


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


def _median_s(run: Callable[[], None]) -> float:
    """Return the median time of repeated runs, after one warm-up run."""
    run()
    times_s, begun_s = list[float](), time.perf_counter()
    while not times_s or time.perf_counter() - begun_s < _BUDGET_S:
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)
