"""Models and data of the plain scripts of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from plain_models import mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Recurrent(nn.Module):
    """A recurrent model of rows of unlike lengths, by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(3, 8, 2, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(x.shape[1]) < lengths[:, None]).to(x.dtype)[..., None]
        return self.last((self.cell(x)[0] * mask).sum(1) / mask.sum(1))


class Tied(nn.Module):
    """A language model whose head is its table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(11, 8), mlp(8, 8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.table(tokens)))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(11, 8, 0), nn.Embedding(11, 8, 0)
        self.positions = nn.Parameter(torch.randn(7, 8) * 0.02)
        self.middle = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        x = self.middle(
            self.source(source) + self.positions,
            self.target(target) + self.positions[:length],
            tgt_mask=torch.ones(length, length).triu(1).bool(),
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target.cumsum(1) == 0,
            memory_key_padding_mask=source == 0,
        )
        return self.last(x)


class WordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(11, 8), nn.LSTM(8, 8, 2, batch_first=True)
        self.last = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        x, hidden = self.cell(self.table(tokens), hidden)
        return self.last(x), hidden


class Streams(Dataset[Any]):
    """A text as streams that are read side by side, some tokens of each at a time."""

    def __init__(self, num_streams: int, length: int) -> None:
        draws = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(11, (num_streams, length), generator=draws)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        stream, begin, end = key
        return self.tokens[stream, begin:end], self.tokens[stream, begin + 1 : end + 1]

    def batches(self, num_tokens: int) -> list[list[tuple[int, int, int]]]:
        begins = range(0, self.tokens.shape[1] - 1, num_tokens)
        return [[(stream, at, at + num_tokens) for stream in range(len(self))] for at in begins]


@dataclass
class Output:
    loss: Tensor
    logits: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.loss, self.logits))


class Encoder(nn.Module):
    """Takes what a tokenizer makes, and computes its own loss if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, 0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )
        self.classifier = nn.Linear(8, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[..., None].to(x.dtype)
        logits = self.classifier((x * mask).sum(1) / mask.sum(1))
        return Output(F.cross_entropy(logits, labels), logits)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.EmbeddingBag(11, 8), nn.Linear(8, 5)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.last(self.table(text, offsets))


class Sentences(Dataset[Any]):
    """A class and words of unlike number for each row."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(5)
        self.words = torch.randint(1, 11, (37, 9), generator=draws).tolist()

    def __len__(self) -> int:
        return 37

    def __getitem__(self, row: int) -> tuple[int, list[int]]:
        return row % 5, self.words[row][: 2 + row * 5 % 8]


def as_padded(samples: list[tuple[int, list[int]]]) -> dict[str, Tensor]:
    tokens = pad_sequence([torch.tensor(words) for _, words in samples], batch_first=True)
    labels = torch.tensor([label for label, _ in samples])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def in_one_row(samples: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.tensor([label for label, _ in samples])
    begins = torch.tensor([0, *(len(words) for _, words in samples[:-1])]).cumsum(0)
    return labels, torch.tensor([word for _, words in samples for word in words]), begins
