"""From a corpus to two files of tokens, made once and kept in the cache.

The corpus is read twice: first to see what it is (a hash of its content, the size of each
document), then, if the cache does not have its tokens, to encode it. Nothing but one group of
documents is held in memory.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from phalanx.config import CorpusConfig
from phalanx.data.cache import cache_folder, fingerprint, publish, read_facts
from phalanx.data.corpus import documents
from phalanx.data.split import Split, split_documents
from phalanx.data.token_file import TokenFile, TokenWriter, open_token_file
from phalanx.data.tokenizer import (
    check_vocabulary,
    check_wanted_size,
    count_ids,
    count_token_bytes,
    cut_pieces,
    encode_pieces,
    end_of_text_id,
    load_tokenizer,
    train_tokenizer,
)
from phalanx.errors import ConfigError, DataError

Progress = Callable[[str, int, int], None]
"""Told what is being done ("read", "train the tokenizer" or "encode"), bytes done, bytes in all (0
while those are not known)."""

_LARGEST_TRAINED_VOCABULARY = 8192
_TRAINING_BYTES = 64 << 20

_TRAIN = "train.bin"
_VALIDATION = "validation.bin"
_TOKENIZER = "tokenizer.json"
_TOKEN_BYTES = "token_bytes.npy"


@dataclass(frozen=True)
class TokenFiles:
    """The prepared data: a folder that any process can open with `open_tokens`.

    Attributes:
        folder: where it lies.
        train: tokens to train on.
        validation: tokens kept aside; none if the share was 0.
        num_documents: documents of the corpus.
        num_bytes: bytes of its text.
        text_digest: hash of the documents, names and text.
        tokenizer_digest: hash of the tokenizer.
    """

    folder: Path
    train: TokenFile
    validation: TokenFile
    num_documents: int
    num_bytes: int
    text_digest: str
    tokenizer_digest: str

    @property
    def tokenizer(self) -> Path:
        """The tokenizer.json that the tokens come from."""
        return self.folder / _TOKENIZER

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Read how many bytes of text each id stands for, by id."""
        return np.load(self.folder / _TOKEN_BYTES)


@dataclass(frozen=True)
class _Survey:
    """What one reading of the corpus tells."""

    names: list[str]
    sizes_bytes: list[int]
    digest: str
    num_bytes: int


def prepare(
    data: str | None,
    corpus: CorpusConfig,
    *,
    model_vocab_size: int,
    tokenizer: str | None = None,
    progress: Progress | None = None,
) -> TokenFiles:
    """Make the tokens of a corpus, or find them in the cache.

    One process of a host should call this, and the others `open_tokens` on the folder afterwards;
    several that call it at the same time do the work several times and agree on the result.

    Args:
        data: a file, folder or glob; None is the standard library of the running Python.
        corpus: how text becomes tokens.
        model_vocab_size: rows of the model's embedding.
        tokenizer: a tokenizer.json; None trains one on the corpus.
        progress: called now and then.

    Raises:
        DataError: the corpus or tokenizer is missing, unreadable or empty; the cache cannot be
            written.
        ConfigError: a size is out of range, or the tokenizer does not fit the model.
    """
    if not 0.0 <= corpus.validation < 1.0:
        split_documents((), (), corpus.validation)  # says what is wrong with it
    if tokenizer is not None and corpus.vocab_size is not None:
        raise ConfigError(
            f"corpus.vocab_size {corpus.vocab_size} is for a tokenizer that is trained on the "
            f"data, but tokenizer {tokenizer} is given; leave one of the two out"
        )
    wanted = _wanted_vocabulary(corpus, model_vocab_size)
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    if given is None:
        is_given = corpus.vocab_size is not None
        check_wanted_size(wanted, "corpus.vocab_size" if is_given else "shape.vocab_size")
    else:
        check_vocabulary(given, model_vocab_size, f"tokenizer {tokenizer}")
        end_of_text_id(given)
    report = progress or _ignore_progress
    survey = _survey(data, corpus.max_bytes, report)
    cache = cache_folder(corpus.cache)
    if given is None:
        given = _trained_tokenizer(cache, data, corpus.max_bytes, wanted, survey, report)
    split = split_documents(survey.names, survey.sizes_bytes, corpus.validation)
    name = fingerprint("tokens", survey.digest, given.to_str(), corpus.validation)
    folder = cache / "tokens" / name
    if read_facts(folder) is None:

        def write(place: Path) -> dict[str, object]:
            # Through Python's own files: the libraries' writers hide that a disk is full.
            (place / _TOKENIZER).write_text(given.to_str(), "utf-8")
            buffer = io.BytesIO()
            np.save(buffer, count_token_bytes(given))
            (place / _TOKEN_BYTES).write_bytes(buffer.getvalue())
            _encode(place, data, corpus.max_bytes, given, split, survey, report)
            return {
                "num_documents": len(survey.names),
                "num_bytes": survey.num_bytes,
                "text_digest": survey.digest,
                "tokenizer_digest": fingerprint("tokenizer", given.to_str()),
            }

        width_bytes = 2 if count_ids(given) <= 1 << 16 else 4
        # A byte-level token of a text stands for about four bytes of it.
        publish(folder, write, needed_bytes=survey.num_bytes * width_bytes // 4)
    files = open_tokens(folder)
    if files.train.num_tokens == 0:
        raise DataError(
            f"nothing is left to train on: the corpus has {survey.num_bytes} bytes, all kept aside "
            f"by corpus.validation = {corpus.validation}; lower it, or give more text"
        )
    return files


def open_tokens(folder: str | Path) -> TokenFiles:
    """Open prepared tokens; checks sizes, not hashes, so it costs nothing.

    Raises:
        DataError: the folder is missing or incomplete.
    """
    folder = Path(folder)
    facts = read_facts(folder, is_hashed=False)
    if facts is None:
        raise DataError(f"{folder} holds no complete tokens; prepare the data again")
    return TokenFiles(
        folder,
        open_token_file(folder / _TRAIN),
        open_token_file(folder / _VALIDATION),
        **cast("dict[str, Any]", facts),
    )


def _wanted_vocabulary(corpus: CorpusConfig, model_vocab_size: int) -> int:
    if corpus.vocab_size is None:
        return min(model_vocab_size, _LARGEST_TRAINED_VOCABULARY)
    if corpus.vocab_size > model_vocab_size:
        raise ConfigError(
            f"corpus.vocab_size is {corpus.vocab_size}, but the model's vocabulary has "
            f"{model_vocab_size} rows; set corpus.vocab_size to at most {model_vocab_size}, or "
            f"shape.vocab_size to at least {corpus.vocab_size}"
        )
    return corpus.vocab_size


def _ignore_progress(what: str, done_bytes: int, all_bytes: int) -> None:
    """Stand in for a progress callback."""


def _survey(data: str | None, max_bytes: int | None, report: Progress) -> _Survey:
    digest = hashlib.blake2b(digest_size=16)
    names: list[str] = []
    sizes_bytes: list[int] = []
    num_bytes = 0
    for document in documents(data, max_bytes):
        raw = document.text.encode()
        name = document.name.encode("utf-8", "surrogateescape")
        # The lengths keep two documents apart from one that holds the text of both.
        digest.update(f"{len(name)} {len(raw)} ".encode() + name)
        digest.update(raw)
        names.append(document.name)
        sizes_bytes.append(len(raw))
        num_bytes += len(raw)
        report("read", num_bytes, 0)
    return _Survey(names, sizes_bytes, digest.hexdigest(), num_bytes)


def _trained_tokenizer(
    cache: Path,
    data: str | None,
    max_bytes: int | None,
    vocab_size: int,
    survey: _Survey,
    report: Progress,
) -> Tokenizer:
    """Return the tokenizer of a corpus, training it unless the cache has it."""
    folder = cache / "tokenizers" / fingerprint("tokenizer", survey.digest, vocab_size)
    if read_facts(folder) is None:

        def write(place: Path) -> dict[str, object]:
            pieces = (
                p for document in documents(data, max_bytes) for p in cut_pieces(document.text)
            )
            # A few dozen megabytes, spread over the corpus, give the tokenizer of the whole.
            stride = -(-survey.num_bytes // _TRAINING_BYTES)
            chosen = _watch(islice(pieces, 0, None, stride), stride, survey, report)
            trained = train_tokenizer(chosen, vocab_size)
            (place / _TOKENIZER).write_text(trained.to_str(), "utf-8")
            return {}

        publish(folder, write, needed_bytes=64 * vocab_size)
    return load_tokenizer(folder / _TOKENIZER)


def _watch(texts: Iterator[str], stride: int, survey: _Survey, report: Progress) -> Iterator[str]:
    done_bytes = 0
    for text in texts:
        yield text
        done_bytes += len(text.encode()) * stride
        report("train the tokenizer", min(done_bytes, survey.num_bytes), survey.num_bytes)


def _encode(
    place: Path,
    data: str | None,
    max_bytes: int | None,
    tokenizer: Tokenizer,
    split: Split,
    survey: _Survey,
    report: Progress,
) -> None:
    """Encode the corpus into the two files of `place`."""
    num_ids, end_id = count_ids(tokenizer), end_of_text_id(tokenizer)
    # What to do with each piece that is on its way through the encoder, in order.
    waiting: deque[tuple[bool, bool, int]] = deque()

    def pieces() -> Iterator[str]:
        for number, document in enumerate(documents(data, max_bytes)):
            for is_validation, text in split.parts(number, document):
                for index, piece in enumerate(cut_pieces(text)):
                    waiting.append((is_validation, index == 0, len(piece.encode())))
                    yield piece

    with (
        TokenWriter(place / _TRAIN, num_ids=num_ids, end_id=end_id) as train,
        TokenWriter(place / _VALIDATION, num_ids=num_ids, end_id=end_id) as validation,
        closing(encode_pieces(tokenizer, pieces())) as encoded,
    ):
        done_bytes = 0
        for ids in encoded:
            is_validation, is_first, num_bytes = waiting.popleft()
            writer = validation if is_validation else train
            if is_first:
                writer.begin_document()
            writer.write(ids)
            done_bytes += num_bytes
            report("encode", done_bytes, survey.num_bytes)
    if done_bytes != survey.num_bytes:
        raise DataError(
            f"the corpus changed while it was read, from {survey.num_bytes} bytes to {done_bytes}; "
            f"start again when nothing writes to it"
        )
