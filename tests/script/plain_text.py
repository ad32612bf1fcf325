"""Scripts of sequences."""

from __future__ import annotations

from typing import Any

import torch
from plain_adapters import Plain
from plain_loop import Script, step, sum_of_losses
from plain_models import rows_of
from plain_text_models import (
    Bag,
    Encoder,
    Recurrent,
    Sentences,
    Streams,
    Tied,
    Translator,
    WordModel,
    as_padded,
    in_one_row,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader


def recurrent(on: Plain) -> None:
    model = Recurrent().double()
    optimizer = torch.optim.RMSprop(model.parameters(), 0.01)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(7, 3), 8, True))
    for x, y in loader:
        logits = model(x, 1 + (x[:, 0, 0].abs() * 3).long().clamp(max=6))
        on.print(on.backward(sum_of_losses(logits, y), len(y)), on.clip(model, 0.1))
        step(optimizer)


def language_model(on: Plain) -> None:
    """Count tokens, of which rows have unlike numbers."""
    model = Tied().double()
    optimizer = torch.optim.NAdam(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(9), 8, True))
    for x, y in loader:
        tokens = (x.abs() * 3).long().clamp(max=10)
        labels = tokens.roll(-1, 1).masked_fill(torch.arange(9) > y[:, None] + 2, -100)
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)
        on.print(on.backward(loss, (labels != -100).sum()))
        step(optimizer)


def translation(on: Plain) -> None:
    """PyTorch's tutorial: causal and padding masks, perplexity of a pass."""
    model = Translator().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, betas=(0.9, 0.98), eps=1e-9)
    loader = DataLoader(rows_of(7), 8, shuffle=True)
    model, optimizer, loader = on.prepare(model, optimizer, loader)
    for _ in range(2):
        total, count = torch.tensor(0.0), torch.tensor(0)
        for x, y in loader:
            source = (x.abs() * 4).long().clamp(1, 10)
            source = source.masked_fill(torch.arange(7) > y[:, None] + 2, 0)
            target = source.flip(1).roll(1, 1)
            logits = model(source, target[:, :-1])
            labels = target[:, 1:]
            loss = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=0
            )
            num_tokens = (labels != 0).sum()
            on.print(on.backward(loss, num_tokens), on.clip(model, 1.0))
            step(optimizer)
            total, count = total + loss.detach(), count + num_tokens
        on.print((on.sum(total) / on.sum(count)).exp())


def carried_state(on: Plain) -> None:
    """word_language_model: truncated backpropagation, the state carried from batch to batch."""
    model = WordModel().double()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    data = Streams(num_streams=4, length=21)
    loader = DataLoader(data, batch_sampler=data.batches(num_tokens=5))
    model, optimizer, loader = on.prepare(model, optimizer, loader)
    for _ in range(2):
        hidden: Any = None
        total = torch.tensor(0.0)
        for tokens, labels in loader:
            hidden = hidden if hidden is None else tuple(each.detach() for each in hidden)
            optimizer.zero_grad()
            logits, hidden = model(tokens, hidden)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            on.print(on.backward(loss, labels.numel()), on.clip(model, 0.25))
            optimizer.step()
            total = total + loss.detach()
        on.print((on.sum(total) / 80).exp())


def dict_batches(on: Plain) -> None:
    """Batches as tokenizers make them, padded to their longest row; an output as transformers'."""
    model = Encoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    loader = DataLoader(Sentences(), 8, shuffle=True, collate_fn=as_padded)
    model, optimizer, loader = on.prepare(model, optimizer, loader)
    for _ in range(2):
        right = torch.tensor(0)
        for batch in loader:
            optimizer.zero_grad()
            out = model(**batch)
            labels = batch["labels"]
            on.print(on.backward(out.loss * len(labels), len(labels)))
            right = right + (out.logits.argmax(-1) == labels).sum()
            optimizer.step()
        on.print(on.sum(right) / 37)


def bag_of_words(on: Plain) -> None:
    """PyTorch's tutorial: all words of a batch in one row, and where each text begins."""
    model = Bag().double()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    loader = DataLoader(Sentences(), 8, shuffle=True, collate_fn=in_one_row)
    model, optimizer, schedule, loader = on.prepare(model, optimizer, schedule, loader)
    for _ in range(2):
        right, count = torch.tensor(0), torch.tensor(0)
        for labels, text, offsets in loader:
            optimizer.zero_grad()
            logits = model(text, offsets)
            on.print(on.backward(sum_of_losses(logits, labels), len(labels)))
            on.print(on.clip(model, 0.1))
            optimizer.step()
            right, count = right + (logits.argmax(1) == labels).sum(), count + len(labels)
        on.print(on.sum(right) / on.sum(count))
        schedule.step()


SCRIPTS: dict[str, Script] = {
    "recurrent with masks": recurrent,
    "language model": language_model,
    "translation": translation,
    "carried state": carried_state,
    "dict batches": dict_batches,
    "bag of words": bag_of_words,
}
