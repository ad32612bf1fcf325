"""The tokenizer: a byte-level BPE trained on the corpus, or the user's tokenizer.json.

A byte-level tokenizer encodes every text, and the tokens of a text stand for exactly its bytes. So
a loss can be reported in bits per byte, which is comparable across tokenizers.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.errors import ConfigError, DataError
from phalanx.object_store import fetch, path_of

END_OF_TEXT = "<|endoftext|>"
"""Token that precedes each document and follows the last."""

# Names of the end-of-text token in published tokenizers, the most common first.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")

_WORD_CHARACTERS = 1000
"""Longest word for BPE training, whose time in the library is quadratic in the word length."""

MOST_BYTES = 1 << 28
"""Largest tokenizer.json to read, bytes; the library needs several times its size in memory."""

_HEARTBEAT_S = 0.5

_PIECE_CHARACTERS = 1 << 18
_CALL_CHARACTERS = 1 << 20


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, waiting: Callable[[], object] | None = None
) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; over bytes, Radford et al. 2019).

    The tokenizer has at least one token for each byte; on a small corpus it has fewer than
    `vocab_size` tokens.

    The library's training ignores Ctrl-C, so a daemon thread runs it while this thread waits. After
    all texts are read, this thread calls `waiting` every `_HEARTBEAT_S` seconds. After an interrupt
    the daemon thread runs until the process ends.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    done: Future[None] = Future()
    is_read = threading.Event()

    def words() -> Iterator[str]:
        for text in texts:
            for piece in cut_pieces(text):
                yield from _cut_words(piece)
        is_read.set()

    def train() -> None:
        try:
            tokenizer.train_from_iterator(words(), trainer=trainer)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    with _sequential_library():
        threading.Thread(target=train, daemon=True).start()
        while not wait([done], _HEARTBEAT_S).done:
            if is_read.is_set() and waiting is not None:
                waiting()
        done.result()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _cut_words(text: str) -> Iterator[str]:
    """Split a text inside words and runs of whitespace longer than _WORD_CHARACTERS."""
    start = 0
    if max(map(len, text.split()), default=0) > _WORD_CHARACTERS or " " * _WORD_CHARACTERS in text:
        for match in _LONG_WORD.finditer(text):
            yield text[start : match.end()]
            start = match.end()
    yield text[start:]


_LONG_WORD = re.compile(rf"\S{{{_WORD_CHARACTERS}}}|\s{{{_WORD_CHARACTERS}}}")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json.

    Text that spells a special token is encoded as plain text, so that a corpus cannot contain
    separators.

    Raises:
        DataError: the file does not exist, is too large, or is not a tokenizer.json.
    """
    file = fetch(path_of(os.path.expanduser(path)))
    if file.is_dir():
        file = file / "tokenizer.json"
    if not os.path.isfile(file):  # a read from a named pipe would block
        problem = "is not a file" if os.path.exists(file) else "does not exist"
        raise DataError(
            f"tokenizer {file} {problem}; expected a tokenizer.json, or leave the setting out to "
            "train one on the data"
        )
    if (num_bytes := file.stat().st_size) > MOST_BYTES:
        raise DataError(
            f"tokenizer {file} has {num_bytes:,} bytes; expected a tokenizer.json of at most "
            f"{MOST_BYTES:,}"
        )
    try:
        tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
    except Exception as error:  # the library raises plain Exception for every error in the file
        raise DataError(
            f"cannot read {file}: {error}; expected a tokenizer.json of the `tokenizers` library"
        ) from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id of the end-of-text token, which separates documents.

    Raises:
        DataError: the tokenizer has none of the names in _END_NAMES.
    """
    for name in _END_NAMES:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return token
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    raise DataError(
        f"the tokenizer has no end-of-text token: expected one of {', '.join(_END_NAMES)}; "
        f"its special tokens are {', '.join(special[:8]) or 'none'}"
    )


def count_ids(tokenizer: Tokenizer) -> int:
    """Return the largest id + 1: the number of rows that an embedding needs."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, name: str = "the tokenizer") -> None:
    """Raise ConfigError if the tokenizer has an id of at least `vocab_size`."""
    num_ids = count_ids(tokenizer)
    if num_ids > vocab_size:
        raise ConfigError(
            f"{name} has ids up to {num_ids - 1}, but the model's vocabulary has {vocab_size} "
            f"rows; set shape.vocab_size to {num_ids} or more, or leave the tokenizer out to "
            f"train one of at most {vocab_size} tokens on the data"
        )


def count_token_bytes(tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    """Return the number of bytes of text that each id stands for, by id; 0 for special tokens.

    The counts are exact for byte-level tokenizers. SentencePiece tokenizers add a space before each
    document, which counts as one byte more per document.

    Raises:
        DataError: the tokenizer is neither byte-level nor SentencePiece.
    """
    config = cast("dict[str, Any]", json.loads(tokenizer.to_str()))
    kinds = _kinds(config)
    is_byte_level = '"ByteLevel"' in kinds
    if not is_byte_level and "▁" not in kinds:
        raise DataError(
            f"the tokenizer is a {config['model']['type']} whose tokens do not spell the bytes of "
            f"the text; expected a byte-level or SentencePiece tokenizer"
        )
    num_bytes = np.zeros(count_ids(tokenizer), dtype=np.int32)
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        if is_byte_level:
            num_bytes[index] = len(token)  # each character of a byte-level token is one byte
        elif len(token) == 6 and token.startswith("<0x"):
            num_bytes[index] = 1
        else:
            num_bytes[index] = len(token.replace("▁", " ").encode())
    for index, added in tokenizer.get_added_tokens_decoder().items():
        num_bytes[index] = 0 if added.special else len(added.content.encode())
    unknown = config["model"].get("unk_token") or config["model"].get("unk_id")
    index = tokenizer.token_to_id(unknown) if isinstance(unknown, str) else unknown
    if index is not None:
        num_bytes[index] = 0  # the unknown token has no known text
    return num_bytes


def _kinds(config: dict[str, Any]) -> str:
    """Return normalizer, pre-tokenizer and decoder of a tokenizer's config as JSON text."""
    parts = [config.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    return json.dumps(parts, ensure_ascii=False)


class CoverageCheck:
    """Checks that the tokens of a text represent all of its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = count_token_bytes(tokenizer)
        config = json.loads(tokenizer.to_str())
        # SentencePiece writes a space as "▁", and so counts one in the text as a space.
        self._space = "▁" if '"ByteLevel"' in _kinds(config) else " "
        before = json.dumps(config.get("pre_tokenizer"))
        self._has_prefix = any(
            words in before
            for words in ('"add_prefix_space": true', '"prepend_scheme": "always"', '"first"')
        )

    def check(self, text: str, ids: npt.NDArray[np.uint32], name: str) -> int:
        """Return the number of bytes of `text`, after a check that its tokens `ids` represent all.

        Raises:
            DataError: characters are lost, so that a loss in bits per byte would be wrong.
        """
        if self._is_whole(text, ids):
            return len(text.encode())
        line = next((line for line in text.splitlines(True) if not self._is_whole(line)), text)
        lost = [letter for letter in dict.fromkeys(line) if not self._is_whole(letter)]
        words = f"it has no token for {', '.join(map(repr, lost[:5]))}; " if lost else ""
        raise DataError(
            f"the tokenizer loses text: {line[:60]!r} in {name} has {len(line.encode())} bytes, "
            f"but its tokens represent {self._count(self._encode(line))}; {words}give a tokenizer "
            "that covers every byte, or leave it out to train one"
        )

    def _is_whole(self, text: str, ids: npt.NDArray[np.uint32] | None = None) -> bool:
        """Return whether the tokens represent all bytes of the text after normalization."""
        found = self._count(self._encode(text) if ids is None else ids)
        normalizer: Any = self._tokenizer.normalizer
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        expected = len(text.replace("▁", self._space).encode())
        return found >= expected if self._has_prefix else found == expected

    def _encode(self, text: str) -> npt.NDArray[np.uint32]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.uint32)

    def _count(self, ids: npt.NDArray[np.uint32]) -> int:
        return int(self._token_bytes[ids].sum())


def cut_pieces(text: str, num_characters: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Split a long text into pieces of at most `num_characters` that can be encoded separately.

    Split after a single newline between two lines with text. Words of byte-level tokenizers end
    there, so the pieces have the same tokens as the whole text. Only a text without such a newline
    is split elsewhere.
    """
    start = 0
    while len(text) - start > num_characters:
        end = start + num_characters
        cut = text.rfind("\n", start, end - 1) + 1
        while cut > start + 1 and (text[cut - 2].isspace() or text[cut].isspace()):
            cut = text.rfind("\n", start, cut - 1) + 1
        if cut <= start + 1:
            cut = end
        yield text[start:cut]
        start = cut
    yield text[start:]


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[str]) -> Generator[npt.NDArray[np.uint32]]:
    """Encode texts on all cores, in order, with a bounded read-ahead: `pieces` are read meanwhile.

    The threads are Python threads that end with this generator. The library's own threads would
    stay alive and be lost in a later fork of this process; some versions of the library warn of it.
    """
    is_bound = hasattr(os, "sched_getaffinity")  # to some of the host's cores
    num_threads = len(os.sched_getaffinity(0)) if is_bound else os.cpu_count() or 1
    waiting: deque[Future[list[npt.NDArray[np.uint32]]]] = deque()
    with _sequential_library(), ThreadPoolExecutor(num_threads) as executor:

        def encode(texts: list[str]) -> list[npt.NDArray[np.uint32]]:
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

        for texts in _group(pieces):
            waiting.append(executor.submit(encode, texts))
            if len(waiting) > 2 * num_threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _group(pieces: Iterable[str]) -> Iterator[list[str]]:
    """Group pieces into lists of about _CALL_CHARACTERS characters."""
    group: list[str] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece)
        if size >= _CALL_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


@contextmanager
def _sequential_library() -> Generator[None]:
    """Disable the threads of the tokenizers library inside the context."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
