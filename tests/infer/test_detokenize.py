"""Texts come in whole characters, and end before the first stop text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from phalanx.infer.detokenize import TextStream, bytes_of


class ByteTokens:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def id_to_token(self, id: int) -> str:
        return f"<0x{id:02X}>"


def stream(*stops: str) -> TextStream:
    tokenizer: Any = ByteTokens()
    return TextStream(tokenizer, stops)


def test_a_character_comes_once_it_is_whole() -> None:
    taken = stream()
    pieces = [taken.take(token) for token in "aé☃!".encode()]
    assert pieces == ["a", "", "é", "", "", "☃", "!"]
    assert taken.end() == "" and taken.text == "aé☃!"


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_gives_what_the_decoder_makes_of_all_bytes(seed: int) -> None:
    draw, taken = random.Random(seed), stream()
    parts = [b"a", b"\xff", b"\xc3", "\ufffd".encode(), "\u2603".encode(), b"\xf0\x9f\x98", b"\x80"]
    content = b"".join(draw.choice(parts) for _ in range(40))
    pieces = [taken.take(token) for token in content]
    text = content.decode(errors="replace")
    assert "".join(pieces) + taken.end() == taken.text == text
    assert len("".join(pieces)) >= len(text) - 1  # only an incomplete character is held back


def test_the_first_word_behind_a_prompt_keeps_its_space() -> None:
    words = {"\u2581Once": 0, "\u2581upon": 1, "\u2581a": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="\u2581a"))
    tokenizer.decoder = decoders.Metaspace()
    taken = TextStream(tokenizer, [], [0] * 20)
    assert [taken.take(1), taken.take(2), taken.end()] == [" upon", " a", ""]
    alone = TextStream(tokenizer)
    assert [alone.take(1), alone.take(2)] == ["upon", " a"]


def test_a_prompt_that_ends_inside_a_character_leaves_it_to_the_text() -> None:
    tokenizer: Any = ByteTokens()
    for prompt, new, text in (
        (b"ab\xe2\x98", b"\x83!", "\u2603!"),
        (b"\xe2", b"\x98\x83", "\u2603"),
        (b"a\xf0\x9f\x98", b"\x80", "\U0001f600"),
        (b"a\xff", b"b", "b"),  # no character has this byte
        ("a\ufffd".encode(), b"b", "b"),
        (b"ab\xc3\xa9", b"c", "c"),
    ):
        taken = TextStream(tokenizer, [], list(prompt))
        assert "".join(map(taken.take, new)) + taken.end() == text


def test_the_bytes_of_a_token_have_the_space_of_its_word() -> None:
    words = {"\u2581Once": 0, "\u2581upon": 1, "on": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="on"))
    tokenizer.decoder = decoders.Metaspace()
    assert [bytes_of(tokenizer, token) for token in range(3)] == [b" Once", b" upon", b"on"]


def test_the_bytes_of_a_token_that_is_a_part_of_a_character() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "a \u00e9\u2603\n\ufffd\x00" + "".join(map(chr, range(0x80, 0x250)))
    found = [bytes_of(tokenizer, token) for token in tokenizer.encode(text).ids]
    assert found == [bytes([byte]) for byte in text.encode()]
    fallback = Tokenizer(models.BPE({"<0xE2>": 0, "a": 1}, [], byte_fallback=True))
    fallback.decoder = decoders.ByteFallback()
    assert [bytes_of(fallback, token) for token in (0, 1)] == [b"\xe2", b"a"]


@pytest.mark.parametrize("seed", range(30))
def test_nothing_of_a_stop_text_is_given_out(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("abé") for _ in range(40))
    stops = ["".join(draw.choice("abé") for _ in range(draw.randint(1, 5))) for _ in range(2)]
    taken = stream(*stops)
    pieces: list[str] = []
    for token in text.encode():
        pieces.append(taken.take(token))
        if taken.stopped_by is not None:
            break
    pieces.append(taken.end())
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if taken.stopped_by is not None:  # at the stop text that was whole first
        assert any(text.startswith(stop, len(taken.text)) for stop in stops)
        assert not any(stop in taken.text for stop in stops)
    else:
        assert not found and taken.text == text
    assert "".join(pieces) == taken.text
