"""Constrained generation: which tokens may come next, by a JSON schema, a regex or a grammar.

The package llguidance (MIT, Microsoft) compiles grammars and computes masks: an Earley parser over
a lexer of regex derivatives, and a trie of the vocabulary. A step computes the mask of a request
that has a grammar on the first rank; the sampler applies it, and other requests cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.infer.detokenize import bytes_of

Kind = Literal["json", "regex", "choice", "grammar", "lark"]
"""What a constraint is: a JSON schema, a regex, a JSON list of texts, GBNF or Lark, Lark."""

WHITESPACE: Final[Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
"""Option of JSON schemas: bounded, because a model may prefer whitespace to any content forever."""

MOST_GRAMMARS: Final = 256
"""Number of compiled grammars that are kept; the one used longest ago is dropped."""


class Matcher:
    """State of a grammar after the tokens of one completion.

    Attributes:
        failure: why no further token can be matched; None while it can.
    """

    def __init__(self, state: Any) -> None:
        """Wrap an `llguidance.LLMatcher`."""
        self._state = state
        self.failure: str | None = state.get_error() or None

    def copy(self) -> Self:
        """Return an independent matcher in the same state."""
        return type(self)(self._state.deep_copy())

    def masks(self, draft: Sequence[int] = ()) -> list[Tensor]:
        """Return whether each id may come next, bool [ids], and again after each legal guess."""
        state, masks = self._state, list[Tensor]()
        num_legal = state.validate_tokens(list(draft)) if draft else 0
        for token in (*draft[:num_legal], None):
            bits = np.frombuffer(state.compute_bitmask(), np.uint8)
            masks.append(torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool())
            if token is not None:
                state.consume_token(token)
        state.rollback(num_legal)
        return masks

    def take(self, token: int) -> bool:
        """Take `token` into the state; return whether only the end of the text may follow."""
        state = self._state
        state.consume_token(token)
        if state.is_stopped() and not state.is_accepting():
            why = _brief(state.get_error()) or "the vocabulary has no token that may follow"
            self.failure = f"the grammar cannot continue: {why}"
        return state.is_stopped()


class Grammars:
    """Compiles the grammars of requests for one tokenizer, and keeps the latest. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        self._tokenizer, self._end_ids = tokenizer, list(end_ids)
        self._compile = lru_cache(MOST_GRAMMARS)(self._compiled)

    def compile(self, field: str, kind: Kind, text: str) -> Matcher:
        """Return the matcher of a constraint, before the first token; copy it for each completion.

        `field` is the field of the request that has the constraint.

        Raises:
            ConfigError: the constraint is invalid or not supported, or llguidance is not installed.
        """
        try:
            matcher = self._compile(kind, text)
            if matcher.failure is None and not matcher.copy().masks()[0].any():
                matcher.failure = "no token of the vocabulary can begin the text"
        except ImportError:
            raise ConfigError(
                f"{field} needs llguidance, which is not installed: "
                "pip install 'phalanx-train[serve]'"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{field} is invalid: {_brief(str(error))}") from None
        if matcher.failure is not None:
            raise ConfigError(f"{field} is invalid: {_brief(matcher.failure)}")
        return matcher

    def _compiled(self, kind: Kind, text: str) -> Matcher:
        import llguidance

        matcher, limits = llguidance.LLMatcher, llguidance.LLParserLimits(verbose_errors=False)
        if kind == "json":
            source = matcher.grammar_from_json_schema(text, defaults=WHITESPACE)
        else:
            source = llguidance.grammar_from(kind, text)
        return Matcher(matcher(self._vocabulary, source, log_level=0, limits=limits))

    @cached_property
    def _vocabulary(self) -> Any:
        """The bytes of all tokens, as an `llguidance.LLTokenizer`; takes a second for 100,000."""
        from llguidance import LLTokenizer, TokenizerWrapper

        tokenizer, ids = self._tokenizer, self._tokenizer.get_vocab(with_added_tokens=True).values()
        end_ids = self._end_ids or [max(ids) + 1]  # no token of the model: never sampled
        added = tokenizer.get_added_tokens_decoder()

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        vocabulary: Any = encode
        vocabulary.tokens = [bytes_of(tokenizer, id) for id in range(max(*ids, *end_ids) + 1)]
        vocabulary.special_token_ids = [*end_ids, *(id for id in added if added[id].special)]
        vocabulary.eos_token_id, vocabulary.bos_token_id = end_ids[0], None
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=end_ids)


def _brief(message: str) -> str:
    return " ".join(message.split())[:300]
