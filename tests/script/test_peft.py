"""A model of PEFT in a loop of one's own trains its adapters as one process does."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import phalanx
from phalanx.launch.local import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is no dependency: pip install peft"),
]

ROWS, LENGTH, VOCABULARY = 24, 10, 48


def adapted() -> Any:
    """Return a Llama in float64 with adapters, and what reads the adapters alone."""
    import peft  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(LlamaForCausalLM(config), adapters).double()
    return model, peft.get_peft_model_state_dict


def trained(strategy: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of an epoch, and the adapters after it, by one process or by a strategy."""
    model, adapters_of = adapted()
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    rows = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(rows, batch_size=6)  # pyright: ignore[reportArgumentType]
    run = None
    if strategy is not None:
        run = phalanx.init(strategy)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
    losses: list[float] = []
    for ids in loader:
        count = len(ids) * (LENGTH - 1)
        loss_sum = model(input_ids=ids, labels=ids).loss * count
        if run is None:
            loss = loss_sum / count
            loss.backward()
        else:
            loss = run.backward(sum_of_rows=loss_sum, count=count)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = model.state_dict() if run is None else run.state_dict()
    return losses, adapters_of(model, state_dict=whole, save_embedding_layers=False)


@pytest.mark.parametrize("strategy", ["dp2", "fsdp2"])
def test_adapters_are_trained_and_read_as_on_one_process(strategy: str) -> None:
    ((losses, adapters),) = run_ranks(trained, 1, None)
    (found, read), _ = run_ranks(trained, 2, strategy)
    assert len(adapters) == 8
    # Transformers computes the loss in float32, whatever the model's data type.
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(dict(read), dict(adapters), rtol=1e-4, atol=1e-6)
