"""What the text of a corpus is, without reading it again where it was read before.

What a reading found is kept in the cache beside a stamp of the files: names, sizes, and the times
of their last change. Of these the system sets `ctime` itself, at every change of content or times,
so that a copy which keeps size and `mtime` does not pass for the old file. A stamp that was taken
within moments of a change proves nothing yet: another change may get the same time (the "racy"
entries of git's index). Such a record is only for those that follow the reader at once, the other
ranks of its host.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from phalanx.data.cache import FORMAT, fingerprint, storage_errors
from phalanx.data.corpus import documents, sources
from phalanx.errors import DataError
from phalanx.storage import replace_file

Progress = Callable[[str, int, int], None]
"""Called with the work under way, bytes done, and bytes in all (0 while they are not known)."""


def unheard(what: str, done_bytes: int, all_bytes: int) -> None:
    """Stand in for a Progress that nobody asked for."""


SETTLED_S: Final = 2.0
"""How long files must have been left alone for their times to show every change."""


@dataclass(frozen=True)
class Text:
    """Hash of the documents of a corpus in their order, names and text; their bytes and number."""

    digest: str
    num_bytes: int
    num_documents: int


@dataclass
class Corpus:
    """A corpus whose text is read when it must be, and at most once for the same purpose.

    For `data` and `max_bytes` see `corpus.documents`; `report` is called as a reading proceeds.
    """

    data: str | None
    max_bytes: int | None
    report: Progress
    _names_and_sizes: tuple[list[str], list[int]] | None = None
    _text: Text | None = None

    def text(self, cache: Path, *, is_follower: bool = False) -> Text:
        """Return what the text is: as the cache knows it, or by reading it.

        Followers of a process of this host that has just made the same call believe what it left,
        however new the files are.

        Raises:
            DataError: the corpus cannot be read, or the cache not be written.
        """
        begun_s = time.time()
        stamp, changed_s = self._stamp()
        path = os.path.abspath(os.path.expanduser(self.data)) if self.data is not None else ""
        record = cache / "texts" / f"{fingerprint('text', path, self.max_bytes)}.json"
        known = _read_record(record)
        if known.get("stamp") == stamp and (is_follower or known.get("is_settled")):
            self._text = Text(**known["text"])
        else:
            self._text = self._read()
            is_settled = begun_s - changed_s > SETTLED_S
            values = {"stamp": stamp, "is_settled": is_settled}
            _write_record(record, {**values, "text": dataclasses.asdict(self._text)})
        return self._text

    def names_and_sizes(self) -> tuple[list[str], list[int]]:
        """Return name and bytes of each document; reads the text unless `text` has.

        Raises:
            DataError: it is no longer what `text` has said.
        """
        if self._names_and_sizes is None:
            before = self._text
            if before is not None and self._read() != before:
                raise DataError(
                    f"the corpus changed while it was prepared; it had {before.num_bytes} bytes; "
                    "start again when nothing writes to it"
                )
        assert self._names_and_sizes is not None, "names_and_sizes() before text()"
        return self._names_and_sizes

    def _stamp(self) -> tuple[str, float]:
        """Return a hash of the files' names, sizes and times, and the time of the last change."""
        digest, changed_ns = hashlib.blake2b(digest_size=16), 0
        for name, file in sources(self.data):
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

    def _read(self) -> Text:
        digest = hashlib.blake2b(digest_size=16)
        names: list[str] = []
        sizes: list[int] = []
        num_bytes = 0
        for document in documents(self.data, self.max_bytes):
            raw = document.text.encode()
            name = document.name.encode("utf-8", "surrogateescape")
            # The lengths keep two documents apart from one that holds the text of both.
            digest.update(f"{len(name)} {len(raw)} ".encode() + name)
            digest.update(raw)
            names.append(document.name)
            sizes.append(len(raw))
            num_bytes += len(raw)
            self.report("read the text", num_bytes, 0)
        self._names_and_sizes = names, sizes
        return Text(digest.hexdigest(), num_bytes, len(names))


def _read_record(file: Path) -> dict[str, Any]:
    """Return what a file of the cache says; nothing if it is missing, damaged or outdated."""
    try:
        values = json.loads(file.read_text("utf-8"))
        Text(**values["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return values if values.get("format") == FORMAT else {}


def _write_record(file: Path, values: dict[str, Any]) -> None:
    """Write a file of the cache, all of it or nothing."""
    with storage_errors(file, 1000):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps({"format": FORMAT, **values}).encode())
