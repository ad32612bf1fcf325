"""Hash and size of the text of a corpus, cached so that unchanged files are not read again.

The cache stores the result of a read with a stamp of the files: names, sizes, `mtime` and `ctime`.
The operating system sets `ctime` at every change of content or times, so a replaced file with the
same size and `mtime` is detected. A stamp taken within SETTLED_S of a change is not reliable,
because a later change may get the same time (the "racy" entries of git's index). Only followers,
the other ranks of the same host that call right after the reader, accept such a record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from phalanx.data.cache import FORMAT, fingerprint, storage_errors
from phalanx.data.corpus import Document, documents, left_out, sources
from phalanx.errors import DataError
from phalanx.storage import replace_file

Progress = Callable[[str, int, int], None]
"""Callback with the name of the current work, bytes done, and total bytes (0 if unknown)."""


def no_progress(what: str, done_bytes: int, all_bytes: int) -> None:
    """Do nothing: the Progress callback of callers that want no reports."""


SETTLED_S: Final = 2.0
"""Seconds without a change after which the times of files are taken to show every later change."""


@dataclass(frozen=True)
class TextStats:
    """Hash of the names and texts of a corpus's documents in order, their bytes and number.

    `num_tokens` is the number of ids of a source of ids, and 0 for text.
    """

    digest: str
    num_bytes: int
    num_documents: int
    num_tokens: int = 0


@dataclass
class Corpus:
    """A corpus whose text is read lazily, and not at all if the cache has its hash.

    For `data`, `max_bytes` and `has_rows` see `corpus.documents`; `report` is called while the text
    is read.
    """

    data: str | None
    max_bytes: int | None
    report: Progress
    has_rows: bool = False
    _names_and_sizes: tuple[list[str], list[int]] | None = None
    _text: TextStats | None = None

    def text(self, cache: Path, *, is_follower: bool = False) -> TextStats:
        """Return hash and size of the text, from the cache if the files have not changed.

        With `is_follower`, a process of this host has just made the same call, and its cached
        result is accepted even if the files changed less than SETTLED_S before that call.

        Raises:
            DataError: the corpus cannot be read, or the cache cannot be written.
        """
        begun_s = time.time()
        stamp, changed_s = self._stamp()
        path = os.path.abspath(os.path.expanduser(self.data)) if self.data is not None else ""
        record = cache / "texts" / f"{fingerprint('text', path, *self._key())}.json"
        self._text = None
        with suppress(OSError, ValueError, KeyError, TypeError):  # missing, damaged or outdated
            known: dict[str, Any] = json.loads(record.read_text("utf-8"))
            is_current = (known["format"], known["stamp"]) == (FORMAT, stamp)
            if is_current and (is_follower or known["is_settled"]):
                self._text = TextStats(**known["text"])
        if self._text is None:
            self._text = self._read()
            is_settled = begun_s - changed_s > SETTLED_S
            marks = {"format": FORMAT, "stamp": stamp, "is_settled": is_settled}
            values = {**marks, "text": dataclasses.asdict(self._text)}
            with storage_errors(record, 1000):
                record.parent.mkdir(parents=True, exist_ok=True)
                replace_file(record, json.dumps(values).encode())
        return self._text

    def names_and_sizes(self) -> tuple[list[str], list[int]]:
        """Return the name and bytes of each document; read the text unless `text` has read it.

        Raises:
            DataError: the text has changed since `text` returned.
        """
        if self._names_and_sizes is None:
            before = self._text
            if before is not None and (now := self._read()) != before:
                raise self._changed(now.num_bytes)
        assert self._names_and_sizes is not None, "names_and_sizes() before text()"
        return self._names_and_sizes

    def check_bytes(self, num_bytes: int) -> None:
        """Raise DataError if the documents that were encoded had other bytes than the text."""
        if self._text is not None and num_bytes != self._text.num_bytes:
            raise self._changed(num_bytes)

    def _changed(self, num_bytes: int) -> DataError:
        before = "" if self._text is None else f", from {self._text.num_bytes} bytes"
        return DataError(
            f"the corpus changed while it was read{before} to {num_bytes}; start again when no "
            "process writes to it"
        )

    def documents(self) -> Iterator[Document]:
        """Read the documents, see `corpus.documents`."""
        return documents(self.data, self.max_bytes, has_rows=self.has_rows)

    def left_out(self) -> str:
        """Return the files that are not read, see `corpus.words_on`."""
        return left_out(self.data)

    def _sources(self) -> list[tuple[str, Path]]:
        return sources(self.data)

    def _key(self) -> tuple[object, ...]:
        """What the stored result depends on, beside the files."""
        return (self.max_bytes, self.has_rows)

    def _stamp(self) -> tuple[str, float]:
        """Return a hash of the files' names, sizes and times, and the latest of the times."""
        digest, changed_ns = hashlib.blake2b(digest_size=16), 0
        for name, file in self._sources():
            try:
                about = file.stat()
            except OSError as error:
                raise DataError(f"cannot read {file}: {error.strerror}") from error
            times = (about.st_size, about.st_mtime_ns, about.st_ctime_ns)
            digest.update(
                f"{len(name)} {times} ".encode() + name.encode("utf-8", "surrogateescape")
            )
            changed_ns = max(changed_ns, about.st_mtime_ns, about.st_ctime_ns)
        return digest.hexdigest(), changed_ns / 1e9

    def _read(self) -> TextStats:
        digest = hashlib.blake2b(digest_size=16)
        names: list[str] = []
        sizes: list[int] = []
        num_bytes = 0
        for document in self.documents():
            raw = document.text.encode()
            name = document.name.encode("utf-8", "surrogateescape")
            # With the lengths, two documents have another hash than one with the text of both.
            digest.update(f"{len(name)} {len(raw)} ".encode() + name)
            digest.update(raw)
            names.append(document.name)
            sizes.append(len(raw))
            num_bytes += len(raw)
            self.report("read the text", num_bytes, 0)
        self._names_and_sizes = names, sizes
        return TextStats(digest.hexdigest(), num_bytes, len(names))
