"""Incremental detokenization: complete characters only, up to the first stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

from tokenizers import Tokenizer

from phalanx.infer.options import TokenScore

BROKEN = "\ufffd"
"""Replacement character: decoders show it for bytes that are not UTF-8, and a text may have it."""

_CONTEXT = 8
"""Number of last prompt tokens that are decoded with the first new tokens, as their context."""

_CHARACTER = 4
"""Largest number of bytes, and therefore of tokens, of one UTF-8 character."""

_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(_OTHERS)
}
"""Letter of the byte-level BPE alphabet (Radford et al. 2019) -> its byte."""


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of text that a token encodes, which may be part of a character."""
    # Decode the token after another one, because decoders drop the space before a first word.
    num_before = len(tokenizer.decode([token], skip_special_tokens=False))
    text = tokenizer.decode([token, token], skip_special_tokens=False)[num_before:]
    piece = tokenizer.id_to_token(token)
    if BROKEN not in text or piece is None:
        return text.encode()
    if (byte := re.fullmatch("<0x([0-9A-F]{2})>", piece)) is not None:  # SentencePiece's fallback
        return bytes.fromhex(byte[1])
    if all(letter in _BYTES for letter in piece):
        return bytes(_BYTES[letter] for letter in piece)
    return text.encode()


def shown(content: bytes) -> str:
    """Return the text of the bytes of a token.

    As in OpenAI's API, the text is "bytes:" and escaped bytes if they are not valid UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def scores_of(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    scores: Sequence[TokenScore | None],
    begin: int = 0,
    *,
    num_top: int | None = None,
    names_ids: bool = False,
) -> tuple[dict[str, Any], int]:
    """Return the `logprobs` object of tokens, as in OpenAI's completions, and the offset after it.

    `begin` is the offset of the first token in the text, in characters. As in OpenAI's API, a token
    is also among its `num_top` alternatives, and the first token of a prompt has no score. With
    `names_ids` tokens are named by their ids.
    """

    def name_of(token: int) -> str:
        return f"token_id:{token}" if names_ids else shown(bytes_of(tokenizer, token))

    def top_of(token: int, score: TokenScore) -> dict[str, float]:
        top: dict[str, float] = {}
        for id, p in (*score.top[:num_top], (token, score.logprob)):
            # Of ids with one text, the most probable is the first.
            top.setdefault(name_of(id), p)
        return top

    contents = [bytes_of(tokenizer, token) for token in tokens]
    # In UTF-8 all bytes of a character but its first are continuation bytes.
    num_characters = (sum(byte & 0xC0 != 0x80 for byte in content) for content in contents)
    *offsets, end = accumulate(num_characters, initial=begin)
    logprobs = {
        "tokens": list(map(name_of, tokens)),
        "token_logprobs": [score and score.logprob for score in scores],
        "top_logprobs": [
            score and top_of(token, score) for token, score in zip(tokens, scores, strict=True)
        ],
        "text_offset": offsets,
    }
    return logprobs, end


class TextStream:
    """Incremental decoder of the tokens of one request.

    Attributes:
        text: all text returned so far.
        stopped_by: the stop string that was found, after which no text is returned; or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
        skips_special: bool = True,
        includes_stop: bool = False,
    ) -> None:
        """Start after the tokens of `prompt`; `stops` are the strings that end the text.

        The text ends with the stop string if `includes_stop`, else before it.
        """
        self._skips_special, self._includes_stop = skips_special, includes_stop
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._ids = list(prompt[-_CONTEXT:])
        self._begin, self._read = 0, self._num_whole()
        self._held = ""
        self.text = ""
        self.stopped_by: str | None = None
        self._may_stop = True

    def take(self, token: int, *, may_stop: bool = True) -> str:
        """Append `token`, and return the text that later tokens cannot change or stop.

        Without `may_stop` a stop string that ends with this token does not end the text.
        """
        self._may_stop = may_stop
        self._ids.append(token)
        return self._release_text(self._decode_pending(is_last=False), is_last=False)

    def end(self) -> str:
        """Return the text that was held back; call it after the last token."""
        if self.stopped_by is not None:
            return ""
        return self._release_text(self._decode_pending(is_last=True), is_last=True)

    def _decode_pending(self, *, is_last: bool) -> str:
        """Return the text of the tokens that have not been decoded yet.

        They are decoded together with the tokens before them, because a decoder may drop the space
        before a first word. An incomplete last character is left to the next call.
        """
        # The new text is what the new tokens add to the text of a context before them:
        #
        #     ids       ... | begin .. context .. read | new ..
        #     before          decode(context)
        #     text            decode(context + new)
        before = self._decode(self._ids[self._begin : self._read])
        text, stop = self._decode(self._ids[self._begin :]), len(self._ids)
        if text.endswith(BROKEN) and not is_last and (num := self._num_whole()) < stop:
            stop = max(num, self._read)
            text = self._decode(self._ids[self._begin : stop])
        if not text.startswith(before):  # SentencePiece shows each byte of an invalid run as BROKEN
            before, text = "", self._decode(self._ids[self._read : stop])
        if stop > self._read:
            self._begin, self._read = self._read, stop
        return text[len(before) :]

    def _num_whole(self) -> int:
        """Return the number of tokens before a last character that is incomplete."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [bytes_of(self._tokenizer, token) for token in self._ids[-_CHARACTER:]]
        decoder.decode(b"".join(pieces))
        num, num_bytes = len(self._ids), len(decoder.getstate()[0])
        while num_bytes > 0:
            num, num_bytes = num - 1, num_bytes - len(pieces.pop())
        return num

    def _release_text(self, new: str, *, is_last: bool) -> str:
        """Return the text before a stop string, and hold back a tail that may start one."""
        text = self._held + new
        stops = self._stops if self._may_stop else ()
        ends = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        if ends:
            end, self.stopped_by = min(ends, key=lambda each: each[0])
            end += len(self.stopped_by) if self._includes_stop else 0
            self._held = ""
        else:
            # stop "END"    text "the E"     release "the ", hold "E"
            #               then "ND"        stop;  then "at": release "Eat"
            # The longest end of the text that is the beginning of a stop string.
            most = 0 if is_last else max((len(stop) - 1 for stop in self._stops), default=0)
            num_held = next(
                (n for n in range(min(len(text), most), 0, -1)
                 if any(len(stop) > n and stop.startswith(text[-n:]) for stop in self._stops)),
                0,
            )  # fmt: skip
            end = len(text) - num_held
            self._held = text[end:]
        self.text += text[:end]
        return text[:end]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)
