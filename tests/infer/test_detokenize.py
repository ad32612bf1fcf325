"""Texts come in whole characters, and end before the first stop text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from phalanx.infer.detokenize import TextStream


class ByteTokens:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


def stream(*stops: str) -> TextStream:
    tokenizer: Any = ByteTokens()
    return TextStream(tokenizer, stops)


def test_a_character_comes_once_it_is_whole() -> None:
    taken = stream()
    pieces = [taken.take(token) for token in "aé☃!".encode()]
    assert pieces == ["a", "", "é", "", "", "☃", "!"]
    assert taken.end() == "" and taken.text == "aé☃!"


def test_bytes_that_make_no_character_are_left_out() -> None:
    taken = stream()
    for token in b"a\xffb\xc3":
        taken.take(token)
    assert taken.end() == "" and taken.text == "ab"


def test_the_first_word_behind_a_prompt_keeps_its_space() -> None:
    words = {"\u2581Once": 0, "\u2581upon": 1, "\u2581a": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="\u2581a"))
    tokenizer.decoder = decoders.Metaspace()
    taken = TextStream(tokenizer, [], [0] * 20)
    assert [taken.take(1), taken.take(2), taken.end()] == [" upon", " a", ""]
    alone = TextStream(tokenizer)
    assert [alone.take(1), alone.take(2)] == ["upon", " a"]


@pytest.mark.parametrize("seed", range(30))
def test_nothing_of_a_stop_text_is_given_out(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("abé") for _ in range(40))
    stops = ["".join(draw.choice("abé") for _ in range(draw.randint(1, 5))) for _ in range(2)]
    taken = stream(*stops)
    pieces: list[str] = []
    for token in text.encode():
        pieces.append(taken.take(token))
        if taken.is_stopped:
            break
    pieces.append(taken.end())
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if taken.is_stopped:  # at the stop text that was whole first
        assert any(text.startswith(stop, len(taken.text)) for stop in stops)
        assert not any(stop in taken.text for stop in stops)
    else:
        assert not found and taken.text == text
    assert "".join(pieces) == taken.text
