"""Encode a corpus into two token files, training and validation, and keep them in the cache.

A new corpus is read twice: first for the hash of its content and the size of each document, then,
if the cache does not have its tokens, to encode it. A corpus with unchanged files and cached tokens
is not read (`survey`). Only one group of documents is in memory at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Tokenizer

from phalanx.config import CorpusConfig
from phalanx.config.schema import SMALLEST_VOCABULARY
from phalanx.data.addresses import local_path
from phalanx.data.cache import cache_folder, find_or_make, fingerprint, read_facts
from phalanx.data.chat_rows import layout_of
from phalanx.data.corpus import Document, first_row, mixture_of
from phalanx.data.pretokenised import Pretokenised, files_of_ids
from phalanx.data.survey import Corpus, Progress, TextStats, no_progress
from phalanx.data.token_file import TokenFile, TokenWriter, joined, open_token_file, width_of
from phalanx.data.tokenizer import (
    END_OF_TEXT,
    CoverageCheck,
    check_vocabulary,
    count_ids,
    count_token_bytes,
    cut_pieces,
    encode_pieces,
    end_of_text_id,
    load_tokenizer,
    train_tokenizer,
)
from phalanx.errors import ConfigError, DataError

_LARGEST_TRAINED_VOCABULARY = 8192
_TRAINING_BYTES = 64 << 20

TRAIN = "train.bin"
VALIDATION = "validation.bin"
TOKENIZER = "tokenizer.json"
_TOKEN_BYTES = "token_bytes.npy"


@dataclass(frozen=True)
class TokenFiles:
    """The prepared data: a folder that any process can open with `open_tokens`.

    `validation` is empty if the validation fraction is 0. `num_documents` and `num_bytes` (of text)
    count both files. `text_digest` is the hash of the names and texts of the documents. `left_out`
    names the files that were not read. A mixture has `weights` and `names` of its sources, and
    the parts of its files are the sources; `folder` is the folder of the first. `chat` is what
    `chats` counted, with the format and the `opening` of a conversation, which has the messages and
    tools before its first answer; it is None for text.
    """

    folder: Path
    train: TokenFile
    validation: TokenFile
    num_documents: int
    num_bytes: int
    text_digest: str
    tokenizer_digest: str
    left_out: str = ""
    weights: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    chat: dict[str, Any] | None = None

    @property
    def tokenizer(self) -> Path:
        """The tokenizer.json that encoded the text."""
        return self.folder / TOKENIZER

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Read the number of bytes of text that each id stands for, by id."""
        return np.load(self.folder / _TOKEN_BYTES)


def prepare(
    data: str | None,
    corpus: CorpusConfig,
    *,
    model_vocab_size: int,
    tokenizer: str | None = None,
    is_follower: bool = False,
    progress: Progress | None = None,
) -> TokenFiles:
    """Encode a corpus, or find its tokens in the cache.

    One process of a host should call this first, and the others afterwards with `is_follower`. If
    several call it at the same time, each does all the work, and all return the same result.

    Args:
        data: a file, folder or glob of text or ids, or a mixture of them (`corpus.mixture_of`);
            None is the standard library of the running Python.
        corpus: settings of the corpus.
        model_vocab_size: rows of the model's embedding.
        tokenizer: a tokenizer.json; None trains one on the corpus.
        is_follower: whether another process of this host has just made the same call; hashes of
            its cached token files are not checked again.
        progress: callback with the progress of the work.

    Raises:
        DataError: the corpus or tokenizer is missing, unreadable or empty, or the cache cannot be
            written.
        ConfigError: a size is out of range, or the tokenizer does not fit the model.
    """
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    if given is not None:
        check_vocabulary(given, model_vocab_size, f"tokenizer {tokenizer}")
        end_of_text_id(given)  # raises if it has none
    wanted = _wanted_vocabulary(corpus, model_vocab_size) if given is None else 0
    cache, report = cache_folder(corpus.cache), progress or no_progress
    mixture = mixture_of(data)
    sources: list[Corpus] = []
    for _, path in mixture:
        path = local_path(path, cache, report, is_follower=is_follower)
        if not files_of_ids(path):
            if len(mixture) > 1 and layout_of(first_row(path) or {}) is not None:
                raise DataError(
                    f"{path} has rows of chats, which a mixture cannot have; give one source of "
                    "chats alone, such as a folder with all files"
                )
            sources.append(Corpus(path, corpus.max_bytes, report))
        elif given is None or corpus.max_bytes is not None:
            what = "leave corpus.max_bytes out" if given else "give their tokenizer by --tokenizer"
            raise DataError(f"{path} has token ids, not text; {what}")
        else:
            sources.append(Pretokenised(path, None, report, used=given))
    texts = [source.text(cache, is_follower=is_follower) for source in sources]
    used = _trained_tokenizer(cache, sources, texts, wanted) if given is None else given
    every = [
        _files_of(cache, source, text, used, corpus.validation, is_follower=is_follower)
        for source, text in zip(sources, texts, strict=True)
    ]
    if len(every) == 1:
        return every[0]
    return dataclasses.replace(
        every[0],
        train=joined([files.train for files in every]),
        validation=joined([files.validation for files in every]),
        num_documents=sum(files.num_documents for files in every),
        num_bytes=sum(files.num_bytes for files in every),
        text_digest=fingerprint("mixture", *(files.text_digest for files in every)),
        weights=tuple(weight for weight, _ in mixture),
        names=tuple(str(path) for _, path in mixture),
        left_out="; ".join(filter(None, (files.left_out for files in every))),
    )


def _files_of(
    cache: Path,
    source: Corpus,
    text: TextStats,
    used: Tokenizer,
    fraction: float,
    *,
    is_follower: bool,
) -> TokenFiles:
    """Return the token files of a source, from the cache if they are there."""
    ids = source if isinstance(source, Pretokenised) else None
    is_mapped = ids is not None and not ids.is_copied
    # Another version of the library may split a text into other tokens.
    name = fingerprint("tokens", text.digest, used.to_str(), fraction, tokenizers.__version__)
    folder = cache / "tokens" / name

    def write(partial: Path) -> dict[str, object]:
        # By Python's own files, because the writers of the libraries hide that a disk is full.
        (partial / TOKENIZER).write_text(used.to_str(), "utf-8")
        buffer = io.BytesIO()
        np.save(buffer, count_token_bytes(used))
        (partial / _TOKEN_BYTES).write_bytes(buffer.getvalue())
        num_ids, end_id = count_ids(used), end_of_text_id(used)
        with (
            TokenWriter(partial / TRAIN, num_ids=num_ids, end_id=end_id) as train,
            TokenWriter(partial / VALIDATION, num_ids=num_ids, end_id=end_id) as validation,
        ):
            if ids is None:
                held_out = hold_out(*source.names_and_sizes(), fraction)
                _encode(source, text.num_bytes, used, held_out, train, validation)
            elif not is_mapped:
                ids.copy(text, fraction, train, validation)
        return {
            "num_documents": text.num_documents,
            "num_bytes": text.num_bytes,
            "text_digest": text.digest,
            "tokenizer_digest": fingerprint("tokenizer", used.to_str()),
        }

    # A byte-level token represents about four bytes of text.
    num_tokens = 0 if is_mapped else text.num_tokens or text.num_bytes // 4
    needed_bytes = num_tokens * width_of(count_ids(used))
    find_or_make(folder, write, needed_bytes=needed_bytes, is_hashed=not is_follower)
    files = dataclasses.replace(open_tokens(folder), left_out=source.left_out())
    if ids is not None and is_mapped:
        train, validation = ids.mapped(fraction)
        files = dataclasses.replace(files, train=train, validation=validation)
    if files.train.num_tokens < 2:
        raise DataError(
            f"nothing is left to train on: {source.data} has {text.num_bytes} bytes, all used for "
            f"corpus.validation = {fraction}; lower it, or give more text"
        )
    return files


def open_tokens(folder: str | Path) -> TokenFiles:
    """Open prepared tokens; check the sizes of the files but not their hashes, which is fast.

    Raises:
        DataError: the folder is missing or incomplete.
    """
    folder = Path(folder)
    facts = read_facts(folder, is_hashed=False)
    if facts is None:
        raise DataError(f"{folder} has no complete token files; prepare the data again")
    return TokenFiles(
        folder,
        open_token_file(folder / TRAIN),
        open_token_file(folder / VALIDATION),
        **cast("dict[str, Any]", facts),
    )


def _wanted_vocabulary(corpus: CorpusConfig, model_vocab_size: int) -> int:
    if corpus.vocab_size is None:
        if model_vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"shape.vocab_size is {model_vocab_size}; a byte-level tokenizer needs one token "
                f"for each byte and {END_OF_TEXT}: at least {SMALLEST_VOCABULARY}"
            )
        return min(model_vocab_size, _LARGEST_TRAINED_VOCABULARY)
    if corpus.vocab_size > model_vocab_size:
        raise ConfigError(
            f"corpus.vocab_size is {corpus.vocab_size}, but the model's vocabulary has "
            f"{model_vocab_size} rows; set corpus.vocab_size to at most {model_vocab_size}, or "
            f"shape.vocab_size to at least {corpus.vocab_size}"
        )
    return corpus.vocab_size


def _trained_tokenizer(
    cache: Path, sources: Sequence[Corpus], texts: Sequence[TextStats], vocab_size: int
) -> Tokenizer:
    """Return a tokenizer trained on the text of all sources, from the cache if it is there."""
    digests, num_bytes = [text.digest for text in texts], sum(text.num_bytes for text in texts)
    folder = cache / "tokenizers" / fingerprint("tokenizer", *digests, vocab_size)
    report = sources[0].report

    def write(partial: Path) -> dict[str, object]:
        def chosen() -> Iterator[str]:
            """Yield about _TRAINING_BYTES of text, spread over the corpus: enough to train on."""
            every = (document for source in sources for document in source.documents())
            pieces = (piece for document in every for piece in cut_pieces(document.text))
            stride, done_bytes = -(-num_bytes // _TRAINING_BYTES), 0
            for piece in islice(pieces, 0, None, stride):
                yield piece
                done_bytes = min(done_bytes + len(piece.encode()) * stride, num_bytes)
                report("count the words for a tokenizer", done_bytes, num_bytes)

        trained = train_tokenizer(
            chosen(), vocab_size, lambda: report("merge the most frequent pairs", 0, 0)
        )
        (partial / TOKENIZER).write_text(trained.to_str(), "utf-8")
        return {}

    find_or_make(folder, write, needed_bytes=64 * vocab_size)
    return load_tokenizer(folder / TOKENIZER)


def _encode(
    source: Corpus,
    num_bytes: int,
    tokenizer: Tokenizer,
    held_out: HeldOut,
    train: TokenWriter,
    validation: TokenWriter,
) -> None:
    """Encode the documents of a corpus."""
    spelling = CoverageCheck(tokenizer)
    # (is_validation, is_first_piece, text, document name) of each piece in the encoder, in order.
    waiting: deque[tuple[bool, bool, str, str]] = deque()

    def pieces() -> Iterator[str]:
        for number, document in enumerate(source.documents()):
            for is_validation, part in held_out.parts(number, document):
                for index, piece in enumerate(cut_pieces(part)):
                    waiting.append((is_validation, index == 0, piece, document.name))
                    yield piece

    done_bytes = 0
    with closing(encode_pieces(tokenizer, pieces())) as encoded:
        for ids in encoded:
            is_validation, is_first, piece, name = waiting.popleft()
            done_bytes += spelling.check(piece, ids, name)
            writer = validation if is_validation else train
            if is_first:
                writer.begin_document()
            writer.write(ids)
            source.report("encode", done_bytes, num_bytes)
    source.check_bytes(done_bytes)


@dataclass(frozen=True)
class HeldOut:
    """Numbers of the validation documents; `cut` is (number, bytes) of one held out in part."""

    validation: frozenset[int] = frozenset()
    cut: tuple[int, int] | None = None

    def parts(self, number: int, document: Document) -> Iterator[tuple[bool, str]]:
        """Yield (is_validation, text) for each part of document `number`."""
        if self.cut is not None and number == self.cut[0]:
            raw = document.text.encode()
            at = len(raw) - self.cut[1]
            # Cut after a line if one ends nearby, else at the start of a character.
            line = raw.find(b"\n", at, at + self.cut[1] // 2) + 1
            at = line or at
            while at < len(raw) and raw[at] & 0xC0 == 0x80:
                at += 1
            pieces = ((False, raw[:at].decode()), (True, raw[at:].decode()))
            yield from (piece for piece in pieces if piece[1])
        else:
            yield number in self.validation, document.text


def hold_out(
    names: Sequence[str], sizes_bytes: Sequence[int], fraction: float, *, is_whole: bool = False
) -> HeldOut:
    """Choose about `fraction` of the bytes, in [0, 1), for validation.

    Documents are held out whole, in an order of the hashes of their names, so that a document added
    to the corpus moves few others between the splits. A document is cut if holding it out whole or
    not at all would miss the fraction by over a quarter, or if no other is left to train on; with
    `is_whole`, none is cut.
    """
    wanted = round(fraction * sum(sizes_bytes))
    hashes = [
        hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        for name in names
    ]
    order = sorted(range(len(names)), key=lambda number: (hashes[number], number))
    chosen: set[int] = set()
    taken = 0
    for number in order:
        missing = wanted - taken
        excess = sizes_bytes[number] - missing
        if missing <= 0:
            break
        if excess <= 0:
            chosen.add(number)
            taken += sizes_bytes[number]
        elif not is_whole and (min(missing, excess) > wanted / 4 or len(chosen) + 1 == len(names)):
            return HeldOut(frozenset(chosen), (number, missing))
        else:
            if excess < missing and len(chosen) + 1 < len(names):
                chosen.add(number)
            break
    return HeldOut(frozenset(chosen))
