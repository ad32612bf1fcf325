"""Let the model write: one token after the other, by the plain forward pass."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from phalanx.comm.together import first_object
from phalanx.data.tokenizer import count_ids
from phalanx.data.tokens import TokenFiles
from phalanx.infer.detokenize import BROKEN
from phalanx.infer.options import Sampling
from phalanx.infer.sampler import choose
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


@torch.no_grad()
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
    """Return `prompt` as the model continues it, in whole characters.

    A model that has learned little writes bytes that make none; those are left out.

    Each token is computed from the whole text before it, by the plain forward: that runs under
    every strategy, and `phalanx generate`, whose sampler this is, agrees with it. Every rank of the
    job calls this together, since the weights may be spread over them; the first that has the
    logits samples, so all continue alike.

    `run` is what runs the model. `first_id` is the token that opens a document.
    """
    device = next(model.parameters()).device
    num_ids = count_ids(tokenizer)
    sampling = Sampling(temperature=TEMPERATURE, seed=seed)
    ids = [first_id, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    model.eval()
    for position in range(num_tokens):
        window = torch.tensor([ids[-model.shape.max_seq_len :]], device=device)
        logits_BTV = run.infer(window, model)
        chosen = None
        if logits_BTV is not None:
            (chosen,), _ = choose(logits_BTV[0, -1:, :num_ids], [sampling], [position])
        chosen = first_object(chosen)
        if chosen in (first_id, -1):
            break
        ids.append(chosen)
    model.train()
    return tokenizer.decode(ids[1:]).replace(BROKEN, "")
