"""Speculative decoding by prompt lookup: guess the next tokens from earlier ones of the request.

A step computes the logits after each guess (Saxena 2023, Prompt Lookup Decoding; Leviathan et al.
2023). The sampler then chooses token by token, and the engine keeps the choices up to the first one
that differs from its guess:

    tokens      .. a b c d .. a b     the last 2-gram `a b` occurred before
    draft       c d                   what followed it
    computed    b c d                 logits after each
    chosen      c x .                 c was right, so x is valid too; the third row is dropped

The sampler's draw depends on the logits, the seed and the token's index alone, so the tokens are
the ones without speculation, greedy or drawn. Does not import torch.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from phalanx.errors import ConfigError
from phalanx.infer.scheduler import Completion


@dataclass(frozen=True)
class Ngrams:
    """Guesses tokens from the latest earlier occurrence of a completion's last n tokens.

    Attributes:
        tokens: most tokens of a guess.
        longest, shortest: values of n, which are tried in this order.
    """

    tokens: int = 4
    longest: int = 4
    shortest: int = 2

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the setting `speculative`; None for "none".

        Args:
            text: `ngram,TOKENS,LONGEST,SHORTEST`, whose numbers may be left out, or vLLM's JSON.

        Raises:
            ConfigError: the text is none of these.
        """
        if text == "none":
            return None
        keys = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            if text.lstrip().startswith("{"):
                values: dict[str, Any] = json.loads(text)
            else:
                method, *words = text.split(",")
                values = dict(zip((*keys, "more"), map(int, words), strict=False))
                values["method"] = method
            method, defaults = values.pop("method"), (cls.tokens, cls.longest, cls.shortest)
            numbers = [values.pop(*pair) for pair in zip(keys, defaults, strict=True)]
            tokens, longest, shortest = numbers
            is_legal = method == "ngram" and not values and {*map(type, numbers)} == {int}
            if is_legal and tokens >= 1 and 1 <= shortest <= longest:
                return cls(tokens, longest, shortest)
        raise ConfigError(
            f"speculative is {text!r:.200}; expected none, ngram, ngram,TOKENS,LONGEST,SHORTEST "
            f"with LONGEST >= SHORTEST >= 1, or JSON with the method ngram and {', '.join(keys)}; "
            "the nearest is ngram"
        )

    def draft(self, completion: Completion, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the tokens of a completion."""
        tokens, ends, most = completion.tokens, completion.ngrams, min(most, self.tokens)
        # n-gram -> the index after its latest occurrence that is not the end of the tokens.
        for end in range(ends.setdefault((), self.shortest), len(tokens)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                ends[tuple(tokens[end - n : end])] = end
        ends[()] = max(len(tokens), self.shortest)
        for n in range(self.longest, self.shortest - 1, -1):
            if (at := ends.get(tuple(tokens[-n:]))) is not None and n <= len(tokens):
                # `a b` after `a b a b`: the guess continues into itself, a b a b ..
                text = tokens[at : at + most]
                while len(text) < most:
                    text += text
                return text[:most]
        return []
