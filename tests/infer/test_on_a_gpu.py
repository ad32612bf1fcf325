"""On a GPU one flash call attends for all sequences of a step: to blocks in place, or gathered."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from models_and_prompts import prompts, twins
from torch import Tensor

from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling
from phalanx.infer.paged import READS_TABLES, KVCache, PagedAttention
from phalanx.infer.pool import BlockPool
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Scheduler
from phalanx.models.decoder import Decoder

NAMES = pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])


def scores(model: Decoder, block_size: int, is_int8: bool = False) -> list[dict[int, float]]:
    """Continue eight prompts greedily, and return the best five tokens' logprobs of each step."""
    weight = next(model.parameters())
    pool = BlockPool(4096 // block_size, block_size)
    sizes = model.shape, pool, weight.dtype, weight.device
    cache = KVCache(*sizes, stored=torch.int8) if is_int8 else KVCache(*sizes)
    engine = Engine(ModelRunner(model, cache), Scheduler(pool, budget=20), max_seq_len=128)
    found: list[dict[int, float]] = []
    sampling = Sampling(max_tokens=8, temperature=0, logprobs=5)
    for prompt in prompts(8):
        engine.add(prompt, sampling)
    while engine.scheduler.has_work:
        found += [dict(new.score.top if new.score else ()) for new in engine.step()]
    return found


def on_a_cpu(
    q_NHK: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    *,
    max_q: int,
    max_k: int,
    window_size: tuple[int, int],
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Return what varlen_attn returns, sequence by sequence."""
    assert others.keys() <= {"enable_gqa", "num_splits"}
    left, right = window_size
    assert right == 0
    mixed: list[Tensor] = []
    for n, (begin, end) in enumerate(zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False)):
        if block_table is None:
            assert cu_seq_k is not None
            part = slice(int(cu_seq_k[n]), int(cu_seq_k[n + 1]))
            k, v = key[part], value[part]
        else:
            assert seqused_k is not None
            k, v = (x[block_table[n]].flatten(0, 1)[: int(seqused_k[n])] for x in (key, value))
        assert end - begin <= max_q
        assert len(k) <= max_k
        queries = torch.arange(len(k) - (end - begin), len(k))[:, None]
        keys = torch.arange(len(k))
        sees = keys <= queries
        if left >= 0:
            sees &= keys >= queries - left
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK[begin:end], k, v))
        mixed.append(F.scaled_dot_product_attention(q, k, v, sees, enable_gqa=True)[0])
    return torch.cat(mixed, 1).transpose(0, 1)


@NAMES
@pytest.mark.parametrize("reads_tables", [False, True], ids=["gathered", "in place"])
@pytest.mark.parametrize("most_keys", [1 << 18, 20])
@pytest.mark.parametrize("is_int8", [False, True], ids=["full", "int8"])
def test_the_flash_call_gets_the_keys_of_each_sequence(
    name: str, reads_tables: bool, most_keys: int, is_int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = twins(name)
    block_size = 8 if reads_tables else 4
    expected = scores(model, block_size, is_int8)
    calls: list[bool] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append("block_table" in kwargs)
        assert kwargs.get("seqused_k") is not None or len(args[1]) <= max(
            most_keys, kwargs["max_k"]
        )
        return on_a_cpu(*args, **kwargs)

    monkeypatch.setattr("phalanx.infer.paged.runs_flash", Mock(return_value=True))
    monkeypatch.setattr("phalanx.infer.paged.varlen_attn", counted)
    monkeypatch.setattr("phalanx.infer.paged.READS_TABLES", reads_tables)
    monkeypatch.setattr("phalanx.infer.paged.FLASH_BLOCK", 8)
    monkeypatch.setattr("phalanx.infer.paged._GATHERED", most_keys)
    found = scores(model, block_size, is_int8)
    assert set(calls) == {reads_tables and not is_int8}
    # Without flash a prompt's first chunk attends to its own keys, before they are rounded.
    near = 0.02 if is_int8 else 1e-4
    for ours, theirs in zip(found, expected, strict=True):
        both = ours.keys() & theirs.keys()
        assert len(both) >= (4 if is_int8 else 5)
        assert all(ours[token] == pytest.approx(theirs[token], abs=near) for token in both)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@NAMES
@pytest.mark.parametrize(
    "block_size",
    [
        16,
        pytest.param(
            256,
            marks=pytest.mark.skipif(not READS_TABLES, reason="torch 2.11 reads no block tables"),
        ),
    ],
)
@pytest.mark.parametrize("is_int8", [False, True], ids=["full", "int8"])
def test_the_flash_call_agrees_with_attention_sequence_by_sequence(
    name: str, block_size: int, is_int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, _ = twins(name)
    model = Decoder(small.shape).to("cuda", torch.bfloat16).eval()
    model.load_state_dict({name: p.to(torch.bfloat16) for name, p in small.state_dict().items()})
    calls: list[int] = []
    at_once = PagedAttention._attend_flash  # pyright: ignore[reportPrivateUsage]

    def counted(
        self: PagedAttention, layer: int, window: int | None, q: torch.Tensor
    ) -> torch.Tensor:
        calls.append(layer)
        return at_once(self, layer, window, q)

    monkeypatch.setattr(PagedAttention, "_attend_flash", counted)
    by_flash = scores(model, block_size, is_int8)
    assert calls
    monkeypatch.setattr("phalanx.infer.paged.runs_flash", Mock(return_value=False))
    for ours, theirs in zip(by_flash, scores(model, block_size, is_int8), strict=True):
        assert len(ours.keys() & theirs.keys()) >= 4
