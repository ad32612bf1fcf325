"""A small BERT that learns which package of the standard library a function comes from."""

import phalanx
import torch
from functions import NUM_IDS, PACKAGES, load
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification


def build(dropout: float = 0.1) -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
    rest = {"vocab_size": NUM_IDS + 1, "intermediate_size": 256, "num_labels": len(PACKAGES)}
    config = BertConfig(**sizes, **drops, **rest)
    return BertForSequenceClassification(config)


@torch.no_grad()
def count_right(model: nn.Module, loader: DataLoader) -> Tensor:
    model.eval()
    return sum((model(x, (x > 0).long()).logits.argmax(1) == y).sum() for x, y in loader)


def main(num_epochs: int = 3, num_rows: int | None = None, dropout: float = 0.1) -> nn.Module:
    run = phalanx.init()
    torch.manual_seed(0)
    ids, labels = load(num_rows)
    split = len(ids) * 9 // 10
    y_held = labels[split:]
    loader = DataLoader(TensorDataset(ids[:split], labels[:split]), batch_size=32, shuffle=True)
    held_back = DataLoader(TensorDataset(ids[split:], y_held), batch_size=32)
    model = build(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader, held_back = run.prepare(model, optimizer, loader, held_back)
    for epoch in range(num_epochs):
        model.train()
        for x, y in loader:
            loss = model(x, attention_mask=(x > 0).long(), labels=y).loss
            run.backward(mean_of_rows=loss, count=len(y))
            optimizer.step()
            optimizer.zero_grad()
        right = run.sum(count_right(model, held_back))
        most = y_held.bincount().max()
        run.print(f"epoch {epoch}: {right} of {len(y_held)} right, the largest package has {most}")
    return model


if __name__ == "__main__":
    main()
