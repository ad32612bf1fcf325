"""Generate text with the model in training, under any strategy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from phalanx.comm.together import first_object
from phalanx.data.tokens import TokenFiles
from phalanx.infer.detokenize import BROKEN
from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling
from phalanx.infer.paged import FlatStep
from phalanx.infer.pool import BlockPool
from phalanx.infer.scheduler import Scheduler
from phalanx.models.decoder import Decoder
from phalanx.parallel.accumulate import Runner

_PROMPT_CHARACTERS = 24
_OPENING_TOKENS = 64
TEMPERATURE = 0.8


def opening(tokens: TokenFiles, tokenizer: Tokenizer) -> str:
    """Return the first words of the validation text; of the training text if there is none."""
    file = tokens.validation if tokens.validation.num_tokens > 1 else tokens.train
    text = tokenizer.decode(file.leaves[0].map()[1:_OPENING_TOKENS].tolist()).strip(BROKEN)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if len(line) <= _PROMPT_CHARACTERS:
        return line
    words, _, _ = line[: _PROMPT_CHARACTERS + 1].rpartition(" ")
    return words or line[:_PROMPT_CHARACTERS]


class _PlainForward:
    """Computes the next token's logits by a forward over the whole text, without a key-value cache.

    This works under every strategy. All ranks of the job call it together, because the weights may
    be sharded. The first rank with logits broadcasts them, so that all ranks sample the same token.
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
    ids: Sequence[int] | None = None,
    end_ids: Sequence[int],
    num_tokens: int = 64,
    seed: int,
) -> str:
    """Return `prompt` and the model's continuation; all ranks of the job call this together.

    Bytes that do not form a whole character, as an untrained model may write, are left out. The
    engine is the one of `phalanx generate`, with a full forward in place of the key-value cache.

    `run` runs the model's forward. `ids` are the tokens of the prompt; if None, the first of
    `end_ids`, the tokens that end a text, and the tokens of `prompt`. The number of generated
    tokens is limited by `num_tokens` and the model's maximum sequence length.
    """
    most = model.shape.max_seq_len
    if ids is None:
        ids = [end_ids[0], *tokenizer.encode(prompt, add_special_tokens=False).ids]
    num_tokens = max(min(num_tokens, most - len(ids)), 1)
    engine = Engine(
        _PlainForward(model, run),
        Scheduler(BlockPool(1, most), budget=most),
        max_seq_len=most,
        end_ids=[*end_ids],
        tokenizer=tokenizer,
    )
    sampling = Sampling(max_tokens=num_tokens, temperature=TEMPERATURE, seed=seed)
    (completion,) = engine.add([*ids][-(most - num_tokens) :], sampling)
    model.eval()
    while completion.finish_reason is None:
        engine.step()
    model.train()
    return prompt + completion.text
