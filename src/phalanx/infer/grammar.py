"""Constrained generation: which tokens may come next, by a JSON schema, a regex or a grammar.

The package llguidance (MIT, Microsoft) compiles grammars and computes masks: an Earley parser over
a lexer of regex derivatives, and a trie of the vocabulary. A step computes the mask of a request
that has a grammar on the first rank; the sampler applies it, and other requests cost nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
        self._state, self.failure = state, None if not state.is_error() else state.get_error()

    def copy(self) -> Self:
        """Return an independent matcher in the same state."""
        return type(self)(self._state.deep_copy())

    def masks(self, draft: Sequence[int] = ()) -> list[Tensor]:
        """Return whether each id may come next, bool [ids], and again after each legal guess."""
        state, masks, num_taken = self._state, list[Tensor](), 0
        for token in (*draft, None):
            bits = np.frombuffer(state.compute_bitmask(), np.uint8)
            masks.append(torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool())
            if token is None or state.try_consume_tokens([token]) == 0:
                break
            num_taken += 1
            if state.is_stopped():
                break
        state.rollback(num_taken)
        return masks

    def take(self, token: int) -> bool:
        """Go on after `token`, and return whether nothing but the end of the text may follow."""
        state = self._state
        state.consume_token(token)
        if state.is_stopped() and not state.is_accepting():
            why = _brief(state.get_error()) or "the vocabulary has no token that may follow"
            self.failure = f"the grammar cannot go on: {why}"
        return state.is_stopped()


class Grammars:
    """Compiles the grammars of requests for one tokenizer, and keeps them. Any thread may call."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        self._tokenizer, self._end_ids = tokenizer, list(end_ids)
        self._compiled: OrderedDict[tuple[Kind, str], Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, field: str, kind: Kind, text: str) -> Matcher:
        """Return the matcher of a constraint, before the first token; copy it for each completion.

        `field` is the field of the request that has the constraint.

        Raises:
            ConfigError: the constraint is invalid or uses what is not supported, or llguidance is
                not installed.
        """
        try:
            import llguidance
        except ImportError:
            raise ConfigError(
                f"{field} needs llguidance, which is not installed: "
                "pip install 'phalanx-train[serve]'"
            ) from None
        with self._lock:
            if (matcher := self._compiled.get((kind, text))) is not None:
                self._compiled.move_to_end((kind, text))
                return matcher
        new = llguidance.LLMatcher
        try:
            if kind == "json":
                source = new.grammar_from_json_schema(text, defaults=WHITESPACE)
            else:
                source = llguidance.grammar_from(kind, text)
        except ValueError as error:
            raise ConfigError(f"{field} is invalid: {_brief(str(error))}") from None
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = Matcher(new(self._vocabulary, source, log_level=0, limits=limits))
        if matcher.failure is None and not matcher.masks()[0].any():
            matcher.failure = "no token of the vocabulary can begin the text"
        if matcher.failure is not None:
            raise ConfigError(f"{field} is invalid: {_brief(matcher.failure)}")
        with self._lock:
            self._compiled[kind, text] = matcher
            if len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    @cached_property
    def _vocabulary(self) -> Any:
        """The bytes of all tokens, as an `llguidance.LLTokenizer`; takes a second for 100,000."""
        from llguidance import LLTokenizer, TokenizerWrapper

        tokenizer, ids = self._tokenizer, self._tokenizer.get_vocab(with_added_tokens=True).values()
        end_ids = self._end_ids or [max(ids) + 1]  # no token of the model: never sampled
        added = tokenizer.get_added_tokens_decoder()
        is_special = {id for id, token in added.items() if token.special} | set(end_ids)
        vocabulary = _Vocabulary(
            [bytes_of(tokenizer, id) for id in range(max(*ids, *end_ids) + 1)],
            sorted(is_special),
            end_ids[0],
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        )
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=end_ids)


@dataclass
class _Vocabulary:
    """What `llguidance.TokenizerWrapper` reads of a tokenizer."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    bos_token_id: int | None = None

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def _brief(message: str) -> str:
    return " ".join(message.split())[:300]
