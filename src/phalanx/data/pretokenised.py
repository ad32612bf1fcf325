"""Sources that are token ids already, mapped into memory where their separators are in the file.

    .bin                ids of 2 bytes, or of 4, as nanoGPT writes them
    .npy                an array of integers; rows follow each other
    .bin with .idx      Megatron's index: lengths of documents, and the type of the ids
    .arrow .parquet     a column "input_ids", a document a row: copied, between separators

An index whose documents do not end with the tokenizer's end-of-text token is copied as a table is.
Files whose names begin with "val" are held out; else it is the end of the ids, from a separator on.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from typing_extensions import override

from phalanx.data.corpus import FIELD, choose, find_files, words_on
from phalanx.data.formats import TABLES, batches, require, unreadable
from phalanx.data.survey import Corpus, TextStats
from phalanx.data.token_file import TokenFile, TokenWriter, joined
from phalanx.data.tokenizer import count_ids, count_token_bytes, end_of_text_id
from phalanx.errors import DataError

IDS: Final = "input_ids"
"""Name of a table's column of ids."""

ARRAYS: Final = (".bin", ".npy", ".idx")
"""Suffixes of files of ids and of an index."""

_INDEX: Final = struct.Struct("<9sQBQQ")  # magic, version, type, number of sequences, of documents
_WIDTHS: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}  # Megatron's types of integers
_CHUNK_TOKENS: Final = 1 << 22

Ids = npt.NDArray[Any]


def files_of_ids(path: str | None) -> list[tuple[str, Path]]:
    """Return (name, path) of each file of ids of a source; empty if the source is text.

    A folder is ids if it has a table with the column IDS and none of text, if it has a file of ids
    whose name begins with "train", or if it has no file of text.
    """
    if path is None:
        return []
    root, files = find_files(path)
    chosen = choose(files)[0]
    arrays = [file for file in files if file.suffix.lower() in ARRAYS]
    named = {file.with_suffix(".bin") if file.suffix == ".idx" else file for file in arrays}
    pairs = (each for file in sorted(named) for each in (file, file.with_suffix(".idx")))
    ids = [file for file in pairs if file.is_file()]  # an index counts with its .bin
    tables = [file for file in chosen if file.suffix.lower() in TABLES]
    if tables:
        with batches(tables[0]) as rows:
            columns = next((batch.schema.names for batch in rows), [])
        ids = tables if IDS in columns and FIELD not in columns else []
    elif chosen and not any(f.parent == root and f.name.startswith("train") for f in ids):
        ids = []
    return [(file.relative_to(root).as_posix(), file) for file in ids]


@dataclass
class Pretokenised(Corpus):
    """A source of ids of the tokenizer `used`; `text` reads all ids once, to check them."""

    used: Tokenizer | None = None

    def __post_init__(self) -> None:
        assert self.used is not None
        self._num_ids, self._end_id = count_ids(self.used), end_of_text_id(self.used)

    @override
    def left_out(self) -> str:
        root, files = find_files(str(self.data))
        read = {file for _, file in self._sources()}
        return words_on(root, [(file, "beside the ids") for file in files if file not in read])

    @override
    def _sources(self) -> list[tuple[str, Path]]:
        return files_of_ids(self.data)

    @override
    def _key(self) -> tuple[object, ...]:
        assert self.used is not None
        return "ids", self.used.to_str()

    @override
    def _read(self) -> TextStats:
        assert self.used is not None
        digest, counts = hashlib.blake2b(digest_size=16), np.zeros(self._num_ids, dtype=np.int64)
        num_documents = 0
        for name, file in self._files:
            before = counts.sum()
            digest.update(name.encode("utf-8", "surrogateescape"))
            for ids, lengths in self._groups(file):
                wrong = ids.view(f"u{ids.itemsize}") >= self._num_ids
                if wrong.any():
                    at = int(wrong.argmax())
                    raise DataError(
                        f"{file} has the id {ids[at]} at token {counts.sum() - before + at}; "
                        f"expected ids below {self._num_ids}, of the tokenizer that made them"
                    )
                digest.update(f"{ids.dtype.str} {len(ids)}".encode() + lengths.tobytes())
                digest.update(np.ascontiguousarray(ids).data)
                counts += np.bincount(ids.astype(np.int64), minlength=self._num_ids)
                num_documents += len(lengths)
                self.report("read the ids", int(counts.sum()), 0)
        num_bytes = int(counts @ count_token_bytes(self.used))
        num_documents = num_documents or int(counts[self._end_id])
        return TextStats(digest.hexdigest(), num_bytes, num_documents, int(counts.sum()))

    @property
    def is_copied(self) -> bool:
        """Whether separators are missing, so that the ids are copied into a token file."""
        return any(
            file.suffix.lower() in TABLES or self._lengths(file) is not None
            for _, file in self._files
        )

    def copy(self, text: TextStats, fraction: float, train: TokenWriter, held: TokenWriter) -> None:
        """Write the documents; about a `fraction` of the ids into `held`, as `mapped` divides."""
        seen, kept = 0, text.num_tokens - round(fraction * text.num_tokens)
        is_named = [Path(name).name.lower().startswith("val") for name, _ in self._files]
        has_split = 0 < sum(is_named) < len(is_named)
        for is_held, (_, file) in zip(is_named, self._files, strict=True):
            if has_split:
                kept = 0 if is_held else text.num_tokens
            if has_split and is_held and not fraction:
                continue
            for ids, lengths in self._groups(file):
                for document in np.split(ids, np.cumsum(lengths)[:-1]):
                    writer = train if seen < kept else held
                    seen += len(document)
                    own = np.flatnonzero(document != self._end_id)  # a row may have separators too
                    if len(own):
                        writer.begin_document()
                        writer.write(document[own[0] : own[-1] + 1])
                self.report("copy the ids", seen, text.num_tokens)

    def mapped(self, fraction: float) -> tuple[TokenFile, TokenFile]:
        """Return the ids to train on and those held out, where they lie."""
        every = [(Path(name).name.lower(), self._mapped(file)) for name, file in self._files]
        train = [file for name, file in every if not name.startswith("val")]
        held = [file for name, file in every if name.startswith("val")]
        nothing = replace(every[0][1], num_tokens=0)
        if train and held:
            return joined(train), joined(held) if fraction else nothing
        files, train, held = train or held, list[TokenFile](), list[TokenFile]()
        left = sum(file.num_tokens for file in files)
        left -= round(fraction * left)
        for file in files:
            cut = end = min(left, file.num_tokens)
            left -= cut
            if 0 < cut < file.num_tokens:  # begin with a separator, which ends the text before it
                first = max(0, cut - _CHUNK_TOKENS)
                ends = np.flatnonzero(file.map()[first:cut] == file.end_id) + first
                if len(ends) and ends[-1] > 0:
                    cut, end = int(ends[-1]), int(ends[-1]) + 1
            at = file.offset_bytes + cut * file.width_bytes
            train += [replace(file, num_tokens=end)] if end else []
            rest = replace(file, num_tokens=file.num_tokens - cut, offset_bytes=at)
            held += [rest] if rest.num_tokens else []
        return joined(train or [nothing]), joined(held or [nothing])

    @property
    def _files(self) -> list[tuple[str, Path]]:
        return [(name, file) for name, file in self._sources() if file.suffix != ".idx"]

    def _groups(self, file: Path) -> Iterator[tuple[Ids, npt.NDArray[np.int64]]]:
        """Yield the ids of a file in groups, and the lengths of their documents if it has them."""
        if file.suffix.lower() in TABLES:
            compute = require("pyarrow.compute", "parquet", file)
            with batches(file, [IDS]) as rows:
                for batch in rows:
                    column = batch.column(0)
                    lengths = compute.fill_null(compute.list_value_length(column), 0)
                    yield column.flatten().to_numpy(), lengths.to_numpy().astype(np.int64)
            return
        ids, lengths = self._mapped(file).map(), self._lengths(file)
        # Documents are grouped into about a chunk; without lengths, chunks are the groups.
        if lengths is None and self.is_copied:  # beside files that lack separators
            ends = np.append(np.flatnonzero(ids == self._end_id) + 1, len(ids))
            lengths = np.diff(np.unique(ends), prepend=0).astype(np.int64)
        ends = np.cumsum(lengths) if lengths is not None else None
        begin = first = 0
        while begin < len(ids):
            end, last = begin + _CHUNK_TOKENS, 0
            if ends is not None:
                last = max(first + 1, int(np.searchsorted(ends, end, "right")))
                end = int(ends[last - 1])
            yield ids[begin:end], np.zeros(0, np.int64) if lengths is None else lengths[first:last]
            begin, first = end, last

    def _mapped(self, file: Path) -> TokenFile:
        """Return the ids of a .bin or .npy where they lie."""
        file = file.absolute()
        try:
            if file.suffix.lower() == ".npy":
                array: Any = np.load(file, mmap_mode="r")
                if array.dtype.kind not in "iu" or not array.dtype.isnative or np.isfortran(array):
                    raise ValueError(f"it is of {array.dtype}; expected integers, little-endian")
                width, at = array.itemsize, array.offset
                return TokenFile(file, array.size, self._end_id, width, offset_bytes=at)
            num_bytes = file.stat().st_size
            with file.open("rb") as opened:
                head = opened.read(1024)
        except OSError as error:
            raise unreadable(file, error) from error
        except ValueError as error:
            raise DataError(f"{file} is not an .npy array of ids: {error}") from error
        if file.with_suffix(".idx").is_file():
            width = _index_of(file)[0]
        else:
            # A vocabulary of more ids needs 4 bytes; and small ids in 4 bytes have zeros above.
            is_wide = len(head) == 1024 and not np.frombuffer(head, "<u2")[1::2].any()
            width = 4 if is_wide or self._num_ids > 1 << 16 else 2
        if num_bytes % width:
            raise DataError(f"{file} has {num_bytes:,} bytes; expected ids of {width} bytes each")
        return TokenFile(file, num_bytes // width, self._end_id, width, offset_bytes=0)

    def _lengths(self, file: Path) -> npt.NDArray[np.int64] | None:
        """Return the lengths of documents in an index; None if the file has separators."""
        if file.suffix.lower() != ".bin" or not file.with_suffix(".idx").is_file():
            return None
        lengths = _index_of(file)[1]
        last = self._mapped(file).map()[np.cumsum(lengths)[lengths > 0] - 1]
        return None if (last == self._end_id).all() else lengths


def _index_of(file: Path) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the bytes of an id, and the length of each document, of Megatron's index of a .bin."""
    index = file.with_suffix(".idx")
    try:
        raw, num_bytes = index.read_bytes(), file.stat().st_size
    except OSError as error:
        raise unreadable(index, error) from error
    if len(raw) >= _INDEX.size:
        magic, version, kind, num_sequences, num_documents = _INDEX.unpack_from(raw)
        needed = _INDEX.size + num_sequences * 12 + num_documents * 8
        if (magic, version) == (b"MMIDIDX\0\0", 1) and kind in _WIDTHS and len(raw) >= needed:
            width, at = _WIDTHS[kind], _INDEX.size
            lengths = np.frombuffer(raw, "<i4", num_sequences, at).astype(np.int64)
            begins = np.frombuffer(raw, "<i8", num_sequences, at + 4 * num_sequences)
            first = np.frombuffer(raw, "<i8", num_documents, at + 12 * num_sequences)
            ends = np.concatenate([[0], np.cumsum(lengths)])
            is_whole = ends[-1] * width == num_bytes and (begins == ends[:-1] * width).all()
            if is_whole and len(first) and (first[0], first[-1]) == (0, num_sequences):
                return width, np.diff(ends[first])
    raise DataError(
        f"{index} is not a Megatron index of version 1 of {file.name}, whose documents follow each "
        "other; make the two files again"
    )
