"""Token ids as they lie: mapped where they are, checked once, held out from a separator on."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.config import CorpusConfig
from phalanx.data import pretokenised
from phalanx.data.tokens import TokenFiles, prepare
from phalanx.errors import DataError
from small_run import tokenizer_of

END = 256
NUM_IDS = 300
DOCUMENTS = [list(range(n, n + 5 + n % 7)) for n in range(40)]


@pytest.fixture(autouse=True)
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_of(NUM_IDS))
    return path


def prepared(path: Path, tmp_path: Path, validation: float = 0.0, **changes: Any) -> TokenFiles:
    corpus = CorpusConfig(cache=str(tmp_path / "cache"), validation=validation, **changes)
    tokenizer = str(tmp_path / "tokenizer.json")
    return prepare(str(path), corpus, model_vocab_size=NUM_IDS, tokenizer=tokenizer)


def ids_of(files: TokenFiles, part: str = "train") -> list[int]:
    return [int(i) for leaf in getattr(files, part).leaves for i in leaf.map()]


def closed(documents: list[list[int]]) -> list[int]:
    """Return the documents as nanoGPT and Megatron write them, a separator after each."""
    return [i for document in documents for i in [*document, END]]


def raw(path: Path, kind: str) -> Path:
    path.write_bytes(np.array(closed(DOCUMENTS), dtype=kind).tobytes())
    return path


def index(path: Path, code: int, lengths: list[int], documents: list[int], width: int) -> None:
    """Write a Megatron index, as its documentation gives the format."""
    begins = np.cumsum([0, *lengths[:-1]]) * width
    path.write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
        + np.array(lengths, "<i4").tobytes()
        + np.array(begins, "<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )


def nano_gpt(folder: Path) -> Path:
    return raw(folder / "train.bin", "<u2")


def wide(folder: Path) -> Path:
    return raw(folder / "train.bin", "<u4")


def numpy_array(folder: Path) -> Path:
    np.save(folder / "a.npy", np.array(closed(DOCUMENTS)))
    return folder / "a.npy"


def megatron(folder: Path) -> Path:
    raw(folder / "a.bin", "<u2")
    index(folder / "a.idx", 8, [len(d) + 1 for d in DOCUMENTS], list(range(41)), 2)
    return folder / "a.bin"


@pytest.mark.parametrize("write", [nano_gpt, wide, numpy_array, megatron])
def test_ids_are_mapped_where_they_are(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    (tmp_path / "data").mkdir()
    path = write(tmp_path / "data")
    for source in (path, tmp_path / "data"):
        files = prepared(source, tmp_path)
        assert ids_of(files) == closed(DOCUMENTS) and files.train.path == path
        assert (files.num_documents, files.train.end_id) == (40, END)
        assert files.num_bytes == sum(map(len, DOCUMENTS))  # each id below 256 is a byte


def test_documents_without_separators_are_copied_between_separators(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    opened = [i for document in DOCUMENTS for i in [END, *document]] + [END]
    for name in ("megatron", "parquet", "arrow"):
        (tmp_path / name).mkdir()
    ids = np.array([i for document in DOCUMENTS for i in document], "<i4")
    (tmp_path / "megatron" / "a.bin").write_bytes(ids.tobytes())
    # Document 0 has three sequences.
    lengths = [1, 2, len(DOCUMENTS[0]) - 3, *map(len, DOCUMENTS[1:])]
    index(tmp_path / "megatron" / "a.idx", 4, lengths, [0, *range(3, 43)], 4)
    rows = [[END, *d, END] if n % 2 else d for n, d in enumerate(DOCUMENTS)]
    table = arrow.table({"input_ids": rows, "attention_mask": rows})
    parquet.write_table(table, tmp_path / "parquet" / "a.parquet")
    with arrow.ipc.new_stream(str(tmp_path / "arrow" / "a.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    for name in ("megatron", "parquet", "arrow"):
        files = prepared(tmp_path / name, tmp_path)
        assert ids_of(files) == opened and files.num_documents == 40
        held = prepared(tmp_path / name, tmp_path, 0.25)
        train, validation = ids_of(held), ids_of(held, "validation")
        assert train + validation[1:] == opened and train[-1] == validation[0] == END
        assert 0.2 < len(validation) / len(opened) < 0.3
    # Beside ids with separators, which are split there; the file "val" is held out whole.
    raw(tmp_path / "megatron" / "b.bin", "<u2")
    held = prepared(tmp_path / "megatron", tmp_path, 0.25)
    train, validation = ids_of(held), ids_of(held, "validation")
    assert train + validation[1:] == [*opened, *closed(DOCUMENTS)] and held.num_documents == 80
    assert 0.2 < len(validation) / (2 * len(opened)) < 0.3
    (tmp_path / "megatron" / "b.bin").rename(tmp_path / "megatron" / "val.bin")
    held = prepared(tmp_path / "megatron", tmp_path, 0.01)
    assert ids_of(held) == ids_of(held, "validation") == opened
    assert ids_of(prepared(tmp_path / "megatron", tmp_path)) == opened


def test_the_end_is_held_out_from_a_separator_on(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    whole = closed(DOCUMENTS)
    raw(tmp_path / "data" / "a.bin", "<u2")
    raw(tmp_path / "data" / "b.bin", "<u2")
    files = prepared(tmp_path / "data", tmp_path, 0.2)
    train, validation = ids_of(files), ids_of(files, "validation")
    assert train + validation[1:] == 2 * whole and train[-1] == validation[0] == END
    assert [leaf.path.name for leaf in files.train.leaves] == ["a.bin", "b.bin"]
    assert 0.2 <= len(validation) / len(2 * whole) < 0.25
    (tmp_path / "data" / "b.bin").rename(tmp_path / "data" / "val.bin")
    (tmp_path / "data" / "a.bin").rename(tmp_path / "data" / "train.bin")
    (tmp_path / "data" / "prepare.py").write_text("pass")
    files = prepared(tmp_path / "data", tmp_path, 0.02)
    assert ids_of(files) == ids_of(files, "validation") == whole
    assert files.validation.path.name == "val.bin"
    assert files.left_out == "1 file beside the ids (prepare.py)"


def test_ids_that_do_not_fit_are_named(tmp_path: Path) -> None:
    def refuses(path: Path, words: str, **changes: Any) -> None:
        with pytest.raises(DataError, match=words):
            prepared(path, tmp_path, **changes)

    path = raw(tmp_path / "a.bin", "<u2")
    path.write_bytes(path.read_bytes()[:100] + struct.pack("<H", NUM_IDS))
    refuses(path, r"a.bin has the id 300 at token 50; expected ids below 300")
    refuses(path, "leave corpus.max_bytes out", max_bytes=10)
    with pytest.raises(DataError, match="give their tokenizer by --tokenizer"):
        prepare(str(path), CorpusConfig(cache=str(tmp_path / "c")), model_vocab_size=NUM_IDS)
    path.write_bytes(b"abc")
    refuses(path, "a.bin has 3 bytes; expected ids of 2 bytes each")
    np.save(tmp_path / "a.npy", np.ones(3))
    refuses(tmp_path / "a.npy", "is not an .npy array of ids: it is of float64; expected integers")
    (tmp_path / "a.npy").write_bytes(b"no")
    refuses(tmp_path / "a.npy", "is not an .npy array of ids")
    (tmp_path / "m").mkdir()
    megatron(tmp_path / "m")
    (tmp_path / "m" / "a.bin").write_bytes(b"\0" * 10)
    refuses(tmp_path / "m", "a.idx is not a Megatron index of version 1 of a.bin")


def test_ids_are_read_again_only_if_a_file_or_the_tokenizer_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.data.survey.SETTLED_S", -1.0)
    reads: list[Path] = []
    groups = pretokenised.Pretokenised._groups
    monkeypatch.setattr(
        pretokenised.Pretokenised, "_groups", lambda *a: reads.append(a[1]) or groups(*a)
    )
    path = raw(tmp_path / "a.bin", "<u2")
    first = prepared(path, tmp_path)
    assert prepared(path, tmp_path) == first and len(reads) == 1
    (tmp_path / "tokenizer.json").write_text(tokenizer_of(NUM_IDS - 1))
    assert prepared(path, tmp_path).text_digest == first.text_digest and len(reads) == 2
    path.write_bytes(path.read_bytes()[:-2])
    assert prepared(path, tmp_path).text_digest != first.text_digest and len(reads) == 3
