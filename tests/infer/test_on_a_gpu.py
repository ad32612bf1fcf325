"""On a GPU one flash call over block tables attends for all sequences of a step."""

from __future__ import annotations

import pytest
import torch
from models_and_prompts import prompts, twins

from phalanx.infer.assembly import cache_sizes
from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling
from phalanx.infer.paged import READS_TABLES, KVCache, PagedAttention
from phalanx.infer.pool import BlockPool
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Scheduler
from phalanx.models.decoder import Decoder


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.skipif(not READS_TABLES, reason="torch 2.11 reads no block tables")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_the_flash_call_agrees_with_attention_sequence_by_sequence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, _ = twins(name)
    device = torch.device("cuda")
    model = Decoder(small.shape).to(device, torch.bfloat16).eval()
    model.load_state_dict({name: p.to(torch.bfloat16) for name, p in small.state_dict().items()})
    sampling = Sampling(max_tokens=8, temperature=0, logprobs=5)

    def scores() -> list[dict[int, float]]:
        pool = BlockPool(16, 256)
        cache = KVCache(cache_sizes(model.shape, pool), 256, torch.bfloat16, device)
        engine = Engine(ModelRunner(model, cache), Scheduler(pool, budget=20), max_seq_len=128)
        found: list[dict[int, float]] = []
        engine.generate(
            prompts(8), sampling, lambda new: found.append(dict(new.score.top if new.score else ()))
        )
        return found

    calls: list[int] = []
    at_once = PagedAttention._attend_flash  # pyright: ignore[reportPrivateUsage]

    def counted(
        self: PagedAttention, layer: int, window: int | None, q: torch.Tensor
    ) -> torch.Tensor:
        calls.append(layer)
        return at_once(self, layer, window, q)

    monkeypatch.setattr(PagedAttention, "_attend_flash", counted)
    by_flash = scores()
    assert calls
    monkeypatch.setattr("phalanx.infer.paged.runs_flash", lambda q: False)
    for ours, theirs in zip(by_flash, scores(), strict=True):
        assert len(ours.keys() & theirs.keys()) >= 4
