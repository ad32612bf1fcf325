"""A small Llama of transformers that learns to continue the source of Python's standard library."""

import os
from pathlib import Path

import phalanx
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM


def build() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads))


def load(num_rows: int, length: int) -> Tensor:
    """Return rows of so many bytes each."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    ids = torch.frombuffer(bytearray(text[: num_rows * length]), dtype=torch.uint8)
    return ids[: len(ids) // length * length].view(-1, length).long()


def main(num_epochs: int = 1, num_rows: int = 1000, length: int = 64) -> nn.Module:
    run = phalanx.init()
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(load(num_rows, length)), batch_size=16, shuffle=True)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in range(num_epochs):
        for number, (x,) in enumerate(loader):
            logits = model(x).logits[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, x[:, 1:].flatten())
            loss = run.backward(mean_of_rows=loss, count=len(logits))
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 0:
                run.print(f"batch {number}: loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    main()
