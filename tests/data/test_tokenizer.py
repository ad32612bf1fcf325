"""The tokenizer: every byte accounted for, and a clear word on a file that is none."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from phalanx.data import tokenizer as tk
from phalanx.errors import ConfigError, DataError

TEXTS = ["def f(x):\n    return x + 1\n\n\nclass A:\n    pass\n", "naïve café ☕ 𝄞\n" * 5]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return tk.train_tokenizer(TEXTS, 300)


@given(text=st.text(max_size=200))
def test_token_bytes_of_a_text_sum_to_its_bytes(trained: Tokenizer, text: str) -> None:
    (ids,) = tk.encode_pieces(trained, [text])
    num_bytes = tk.count_token_bytes(trained)
    assert num_bytes[ids].sum() == len(text.encode())
    assert trained.decode(ids.tolist(), skip_special_tokens=False) == text


def test_text_that_spells_the_separator_is_text(trained: Tokenizer) -> None:
    text = f"a{tk.END_OF_TEXT}b"
    (ids,) = tk.encode_pieces(trained, [text])
    assert tk.end_of_text_id(trained) not in ids
    assert trained.decode(ids.tolist()) == text
    assert tk.count_token_bytes(trained)[tk.end_of_text_id(trained)] == 0


def test_training_is_deterministic_and_within_size(trained: Tokenizer) -> None:
    assert tk.count_ids(trained) <= 300
    assert tk.train_tokenizer(TEXTS, 300).to_str() == trained.to_str()
    assert tk.count_ids(tk.train_tokenizer(TEXTS, 257)) == 257


def test_load_gives_the_same_tokens(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = tk.load_tokenizer(path)
        for text in (*TEXTS, tk.END_OF_TEXT):
            assert loaded.encode(text).ids == trained.encode(text).ids


def test_truncation_and_padding_of_a_file_are_switched_off(
    trained: Tokenizer, tmp_path: Path
) -> None:
    copy = Tokenizer.from_str(trained.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=64)
    copy.save(str(tmp_path / "t.json"))
    (ids,) = tk.encode_pieces(tk.load_tokenizer(tmp_path / "t.json"), [TEXTS[0]])
    assert ids.tolist() == trained.encode(TEXTS[0]).ids


@pytest.mark.parametrize("content", [b"", b"{}", b'{"a": 1}', b"\xff\xfe", b"[1, 2]"])
def test_file_that_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=r"t\.json.*tokenizer\.json"):
        tk.load_tokenizer(tmp_path / "t.json")


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.json does not exist"):
        tk.load_tokenizer(tmp_path / "nowhere.json")


def test_vocabulary_that_does_not_fit_names_both_numbers_and_the_fix(trained: Tokenizer) -> None:
    size = tk.count_ids(trained)
    tk.check_vocabulary(trained, size)
    with pytest.raises(ConfigError, match=rf"ids up to {size - 1}.* {size - 1} rows.* to {size} "):
        tk.check_vocabulary(trained, size - 1)


def test_tokenizer_without_separator_is_refused() -> None:
    plain = Tokenizer(models.BPE())
    plain.add_special_tokens(["<pad>"])
    with pytest.raises(DataError, match=r"no end-of-text token.*<pad>"):
        tk.end_of_text_id(plain)
    plain.add_special_tokens(["</s>"])
    assert tk.end_of_text_id(plain) == 1


def test_bytes_of_other_kinds() -> None:
    vocabulary = {"<0x0A>": 0, "▁": 1, "é": 2, "▁é": 3}
    piece = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "é")], byte_fallback=True))
    piece.pre_tokenizer = pre_tokenizers.Metaspace()
    piece.decoder = decoders.Metaspace()
    piece.add_special_tokens(["</s>"])
    assert tk.count_token_bytes(piece).tolist() == [1, 1, 2, 3, 0]
    word = Tokenizer(models.WordLevel(vocab={"a": 0}))
    with pytest.raises(DataError, match="WordLevel"):
        tk.count_token_bytes(word)


@given(
    text=st.text(alphabet="ab \n\té.", max_size=300),
    size=st.integers(2, 40),
)
def test_pieces_make_the_whole(text: str, size: int) -> None:
    pieces = list(tk.cut_pieces(text, size))
    assert "".join(pieces) == text
    assert all(len(piece) <= size for piece in pieces)
    assert all(pieces) or not text


def test_pieces_have_the_tokens_of_the_whole() -> None:
    """Not after every newline: blanks on either side of it may be one token together with it."""
    text = "def f(x):\n    return x\n\n\nclass A:\n    pass\ny = 1 \nz = 2\n" * 20
    tokenizer = tk.train_tokenizer([text], 300)
    expected = tokenizer.encode(text).ids

    def encode(pieces: Iterable[str]) -> list[int]:
        return [i for ids in tk.encode_pieces(tokenizer, pieces) for i in ids]

    for size in (60, 70, 500):
        pieces = list(tk.cut_pieces(text, size))
        assert len(pieces) > 2 and encode(pieces) == expected
    assert encode(text.splitlines(keepends=True)) != expected
    # Where no newline is between two lines of text, it is cut anyway.
    assert encode(tk.cut_pieces(text, 10)) != expected


@pytest.mark.parametrize("num_cores", [1, 7])
def test_encoding_keeps_the_order_over_many_calls(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_cores: int
) -> None:
    monkeypatch.setattr(tk, "_CALL_CHARACTERS", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)), raising=False)
    texts = [f"text number {n}" for n in range(200)]
    encoded = tk.encode_pieces(trained, iter(texts))
    assert [trained.decode(ids.tolist()) for ids in encoded] == texts


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_no_threads_are_left_for_a_fork_to_lose() -> None:
    code = (
        "import os, time\n"
        "from phalanx.data.tokenizer import encode_pieces, train_tokenizer\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "t = train_tokenizer(['some text'] * 100, 300)\n"
        "list(encode_pieces(t, ['some text'] * 100))\n"
        # A joined thread may stand in /proc for an instant more; the library's own would stay.
        "end = time.monotonic() + 60\n"
        "while len(os.listdir('/proc/self/task')) > before:\n"
        "    assert time.monotonic() < end, 'the library started threads'\n"
        "    time.sleep(0.01)\n"
        "assert 'TOKENIZERS_PARALLELISM' not in os.environ\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    t.encode('a'); os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_token_bytes_are_by_id(trained: Tokenizer) -> None:
    num_bytes = tk.count_token_bytes(trained)
    assert num_bytes.dtype == np.int32
    for token, index in trained.get_vocab().items():
        assert num_bytes[index] == (0 if token == tk.END_OF_TEXT else len(token))


def test_long_words_are_learnt_from_in_parts() -> None:
    """The library takes time quadratic in a word; what is encoded is still the whole text."""
    word = "".join(random.Random(0).choices("ACGT", k=40_000))
    parts = list(tk._cut_words(f"some words {word}, and{' ' * 3000}blanks"))
    assert "".join(parts) == f"some words {word}, and{' ' * 3000}blanks"
    assert max(map(len, parts)) <= 1020
    plain = "no word of this is long\n" * 1000
    assert list(tk._cut_words(plain)) == [plain]
    trained = tk.train_tokenizer([word], 300)
    (ids,) = tk.encode_pieces(trained, [word])
    assert trained.decode(ids) == word


def test_waiting_for_the_merges_is_reported_and_can_be_interrupted() -> None:
    """The library's own call obeys no Ctrl-C; the thread that waits for it does."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(4, 20))) for _ in range(60_000)]
    with pytest.raises(KeyboardInterrupt):
        tk.train_tokenizer([" ".join(words)], 8000, interrupt)


def test_an_error_of_the_texts_is_raised() -> None:
    def texts() -> Iterator[str]:
        yield "some text"
        raise DataError("a broken file")

    with pytest.raises(DataError, match="a broken file"):
        tk.train_tokenizer(texts(), 300)


def test_a_named_pipe_is_no_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a file"):
        tk.load_tokenizer(tmp_path / "tokenizer.json")


def of_sentencepiece(**model: Any) -> Tokenizer:
    letters = {"<unk>": 0, "▁": 1, **{letter: 2 + n for n, letter in enumerate("abcdéñ")}}
    tokenizer = Tokenizer(models.BPE(letters, [], unk_token="<unk>", **model))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def byte_level(*, add_prefix_space: bool, normalizer: Any = None) -> Tokenizer:
    tokenizer = tk.train_tokenizer(["words"], 257)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text", "lost"),
    [
        (byte_level(add_prefix_space=False), "déjà vu, 数 ▁", None),
        (byte_level(add_prefix_space=True), "déjà vu, 数", None),
        (byte_level(add_prefix_space=False, normalizer=normalizers.NFC()), "de\u0301ja", None),
        (of_sentencepiece(), "abc déñ a", None),
        (of_sentencepiece(), "abc\nxyz dé x", "'\\n'"),
        (of_sentencepiece(), "abc déx", "'x'"),
    ],
)
def test_tokens_stand_for_all_of_a_text(tokenizer: Tokenizer, text: str, lost: str | None) -> None:
    spelling = tk.CoverageCheck(tokenizer)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
    if lost is None:
        assert spelling.check(text, ids, "a.txt") == len(text.encode())
    else:
        with pytest.raises(DataError, match=f"in a.txt .* it has no token for {re.escape(lost)};"):
            spelling.check(text, ids, "a.txt")
