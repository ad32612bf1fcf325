"""Let the model that is trained write, whatever strategy splits it."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from phalanx.comm.together import first_object
from phalanx.data.tokenizer import count_ids
from phalanx.data.tokens import TokenFiles
from phalanx.infer.detokenize import BROKEN
from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling
from phalanx.infer.paged import FlatStep
from phalanx.infer.pool import BlockPool
from phalanx.infer.scheduler import Scheduler
from phalanx.infer.texts import TextEngine
from phalanx.models.decoder import Decoder
from phalanx.parallel.accumulate import Runner

_PROMPT_CHARACTERS = 24
_OPENING_TOKENS = 64
TEMPERATURE = 0.8


def opening(tokens: TokenFiles, tokenizer: Tokenizer) -> str:
    """Return the first words of the validation text, or of the training text without one."""
    file = tokens.validation if tokens.validation.num_tokens > 1 else tokens.train
    text = tokenizer.decode(file.map()[1:_OPENING_TOKENS].tolist()).strip(BROKEN)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if len(line) <= _PROMPT_CHARACTERS:
        return line
    words, _, _ = line[: _PROMPT_CHARACTERS + 1].rpartition(" ")
    return words or line[:_PROMPT_CHARACTERS]


class _PlainForward:
    """Computes the logits of a text's next token by the plain forward of the whole text.

    That runs under every strategy. Every rank of the job calls it together, since the weights may
    be spread over them; the first that has the logits gives them to all, so all continue alike.
    """

    def __init__(self, model: Decoder, run: Runner) -> None:
        self._model, self._run = model, run
        self._tokens: list[int] = []

    def __call__(self, step: FlatStep) -> Tensor:
        (span,) = step.spans
        self._tokens[span.start :] = step.tokens
        device = next(self._model.parameters()).device
        logits_BTV = self._run.infer(torch.tensor([self._tokens], device=device), self._model)
        return first_object(None if logits_BTV is None else logits_BTV[0, -1:].cpu())


def write_text(
    model: Decoder,
    run: Runner,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    first_id: int,
    num_tokens: int = 64,
    seed: int,
) -> str:
    """Return `prompt` as the model continues it, within its longest row, in whole characters.

    A model that has learned little writes bytes that make none; those are left out. The engine is
    `phalanx generate`'s, over the plain forward in place of a cache.

    `run` is what runs the model. `first_id` is the token that opens a document.
    """
    most = model.shape.max_seq_len
    ids = [first_id, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    num_tokens = max(min(num_tokens, most - len(ids)), 1)
    engine = Engine(
        _PlainForward(model, run),
        Scheduler(BlockPool(1, most), budget=most),
        max_seq_len=most,
        end_ids=[first_id],
        num_ids=count_ids(tokenizer),
    )
    texts = TextEngine(engine, tokenizer)
    sampling = Sampling(max_tokens=num_tokens, temperature=TEMPERATURE, seed=seed)
    (completion,) = texts.add(ids[-(most - num_tokens) :], sampling)
    model.eval()
    while completion.finish_reason is None:
        texts.step()
    model.train()
    return prompt + completion.stream.text
