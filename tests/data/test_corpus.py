"""The corpus: fixed order, and one clear message for each fault."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest

from phalanx.data.corpus import Document, absolute, documents, left_out, mixture_of
from phalanx.errors import DataError


def read(path: object, max_bytes: int | None = None) -> list[Document]:
    return list(documents(str(path), max_bytes))


def refuses(path: object, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        read(path)
    for word in words:
        assert re.search(word, str(caught.value)), (word, str(caught.value))


def test_folder_is_read_through_in_sorted_order_with_relative_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "z.md").write_text("zed")
    (tmp_path / "b" / "a.TXT").write_text("ay\r\n", newline="")
    (tmp_path / "a.py").write_text("pass")
    (tmp_path / "c.rst").write_text("not read")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    assert read(tmp_path) == [
        Document("a.py", "pass"),
        Document("b/a.TXT", "ay\r\n"),
        Document("b/z.md", "zed"),
    ]
    assert left_out(str(tmp_path)) == "1 file of unknown format (c.rst)"
    for name in ("d.gz", "e.parquet.gz", "f.tar.zst"):
        (tmp_path / "b" / name).write_bytes(b"")
    (tmp_path / "package.json").write_text('{"name": "x"}')
    assert left_out(str(tmp_path)) == (
        "4 files of unknown format (b/d.gz, b/e.parquet.gz, b/f.tar.zst, ...); "
        "1 file without a list of records (package.json)"
    )
    assert left_out(str(tmp_path / "a.py")) == left_out(None) == ""


def test_glob_and_single_file(tmp_path: Path) -> None:
    for name in ("x/1.txt", "x/y/2.txt", "x/3.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [d.name for d in read(tmp_path / "x" / "**" / "*.txt")] == ["1.txt", "y/2.txt"]
    assert [d.name for d in read(tmp_path / "*")] == ["x/1.txt", "x/3.md", "x/y/2.txt"]
    assert read(tmp_path / "x" / "3.md") == [Document("3.md", "x/3.md")]
    refuses(tmp_path / "*.md", "no file matches")


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "one \\u0000 \xc3\xa9"}\n\n{"id": 3, "text": "two\\nlines"}\n')
    expected = [Document("a.jsonl:1", "one \0 é"), Document("a.jsonl:3", "two\nlines")]
    assert read(file) == expected
    with file.open("a") as lines:
        lines.write('{"text": null}\n')  # as a row of parquet without text
    assert read(file) == expected


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": [1, 2, 3], "text": ["one", None, "three"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [(d.name, d.text) for d in read(tmp_path)] == [
        ("a.parquet:1", "one"),
        ("a.parquet:3", "three"),
    ]
    parquet.write_table(arrow.table({"texts": ["one"]}), tmp_path / "a.parquet")
    refuses(tmp_path, "no field 'text'", "did you mean 'texts'", "fields are 'texts'")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    refuses(tmp_path, "a.parquet is not a parquet file")
    parquet.write_table(table, tmp_path / "a.parquet")
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    raw[len(raw) // 3] ^= 0xFF
    raw[-12] ^= 0xFF
    (tmp_path / "a.parquet").write_bytes(raw)
    refuses(tmp_path, "a.parquet is not a parquet file, or it is damaged")
    latin = arrow.array([b"one", b"caf\xe9"]).cast(arrow.string(), safe=False)
    parquet.write_table(arrow.table({"text": latin}), tmp_path / "a.parquet")
    refuses(tmp_path, "a.parquet, rows 1 to 2: a string is not UTF-8")


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    refuses(tmp_path, r"pip install 'phalanx-train\[parquet\]'")


def compressed(text: bytes, kind: str) -> bytes:
    if kind == ".gz":
        return gzip.compress(text)
    return pytest.importorskip("pyarrow").Codec("zstd").compress(text, asbytes=True)


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_compressed_files_have_the_documents_of_plain_ones(tmp_path: Path, kind: str) -> None:
    lines = "".join(json.dumps({"text": f"line {n} é"}) + "\n" for n in range(4000))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.json").write_text('\n [{"text": "one"}, {"id": 1, "text": "two"}]')
    (tmp_path / "c.txt").write_text("text")
    plain = read(tmp_path)
    assert len(plain) == 4003 and plain[4001] == Document("b.json:2", "two")
    for file in list(tmp_path.iterdir()):
        raw = file.read_bytes()  # in two frames, as parallel compressors write
        half = compressed(raw[: len(raw) // 2], kind) + compressed(raw[len(raw) // 2 :], kind)
        file.with_name(file.name + kind).write_bytes(half)
        file.unlink()
    assert [d.text for d in read(tmp_path)] == [d.text for d in plain]
    whole = (tmp_path / f"a.jsonl{kind}").read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, len(whole) // 3, 3):
        (tmp_path / f"a.jsonl{kind}").write_bytes(whole[:cut])
        refuses(tmp_path, f"a.jsonl{kind} is not a {kind} file, or it is damaged")
    (tmp_path / f"a.jsonl{kind}").write_bytes(b"no such file")
    refuses(tmp_path, f"a.jsonl{kind} is not a {kind} file, or it is damaged")


def test_of_files_with_splits_train_is_read(tmp_path: Path) -> None:
    for name in ("train-0-of-2.jsonl", "train-1-of-2.jsonl.gz", "test-0-of-1.jsonl", "more.jsonl"):
        raw = json.dumps({"text": name}).encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    (tmp_path / "test.py").write_text("pass")  # of a program
    names = ["more.jsonl:1", "test.py", "train-0-of-2.jsonl:1", "train-1-of-2.jsonl.gz:1"]
    assert [document.name for document in read(tmp_path)] == names
    assert left_out(str(tmp_path)) == "1 file of another split than train (test-0-of-1.jsonl)"
    assert [d.name for d in read(tmp_path / "test-*")] == ["test-0-of-1.jsonl:1"]


def test_a_json_file_without_a_list_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "x"}')
    refuses(tmp_path / "a.json", "a.json is a dict; expected a list of records")
    (tmp_path / "a.json").write_text('[{"text": "x"}, 3]')
    refuses(tmp_path, "a.json, record 2 is a int")


def saved(folder: Path, texts: list[str], num_tables: int = 1) -> None:
    """Write what `Dataset.save_to_disk` writes."""
    arrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{num_tables:05}.arrow" for n in range(num_tables)]
    for number, name in enumerate(names):
        table = arrow.table({"text": texts[number::num_tables], "id": texts[number::num_tables]})
        with arrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    listed = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": listed, "_split": None}))
    (folder / "dataset_info.json").write_text("{}")


def test_datasets_saved_to_disk_are_read(tmp_path: Path) -> None:
    saved(tmp_path / "a", ["one", "two", "three", "four"], num_tables=2)
    (tmp_path / "a" / "cache-0123.arrow").write_bytes(b"of an earlier map")
    assert [d.text for d in read(tmp_path / "a")] == ["one", "three", "two", "four"]
    assert read(tmp_path / "a")[2].name == "data-00001-of-00002.arrow:1"
    assert left_out(str(tmp_path / "a")).endswith("(cache-0123.arrow)")
    saved(tmp_path / "d" / "train", ["train"])
    saved(tmp_path / "d" / "test", ["test"])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    assert [d.text for d in read(tmp_path / "d")] == ["train"]
    assert "or of another split (test/data-00000-of-00001.arrow)" in left_out(str(tmp_path / "d"))
    refuses("wikimedia/wikipedia", r"does not exist.*save_to_disk")
    (tmp_path / "a" / "data-00000-of-00002.arrow").write_bytes(b"ARROW1 no")
    refuses(tmp_path / "a", "00000-of-00002.arrow is not a arrow file, or it is damaged")


@pytest.mark.slow
def test_datasets_own_writer(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(10)]})
    chosen = whole.shuffle(seed=1).select(range(5))
    both = datasets.DatasetDict(train=chosen, test=whole)
    both.save_to_disk(str(tmp_path / "d"))
    assert [d.text for d in read(tmp_path / "d")] == chosen["text"][:]
    chosen.to_parquet(str(tmp_path / "a.parquet"))
    assert [d.text for d in read(tmp_path / "a.parquet")] == chosen["text"][:]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "x"', ["line 2 is not valid JSON", "column"]),
        ('{"txt": "x", "id": 1}', ["line 2 has no field 'text'", "did you mean 'txt'", "'id'"]),
        ('{"text": 3}', ["line 2: 'text' is a int"]),
        ('["x"]', ["line 2 is a list"]),
        ('{"text": "\\ud800"}', ["line 2", "surrogate"]),
        ('{"id": ' + "1" * 5000 + "}", ["line 2 is not valid JSON", "one object a line"]),
        ("[" * 100_000, ["line 2 is not valid JSON", "one object a line"]),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: str, words: list[str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    refuses(tmp_path, "a.jsonl", *words)


def test_a_file_name_of_two_lines_is_shown_in_one(tmp_path: Path) -> None:
    (tmp_path / "a\nb.txt").write_bytes(b"abc\0def")
    refuses(tmp_path, r"a\\nb.txt is not text: it has a NUL")


def test_binary_files_are_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\0def")
    refuses(tmp_path, "a.txt is not text", "NUL at byte 3")
    (tmp_path / "a.txt").write_bytes(b"abcd\xffdef")
    refuses(tmp_path, "a.txt is not UTF-8", "byte 4 is 0xff")
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    refuses(tmp_path, "a.jsonl is not UTF-8", "byte 24 is 0xff")


def test_missing_and_empty_paths(tmp_path: Path) -> None:
    (tmp_path / "novels.txt").write_text("x")
    refuses(tmp_path / "novel.txt", "does not exist", "did you mean '.*novels.txt'")
    refuses(tmp_path / "novels" / "deep" / "a.txt", "did you mean '.*novels.txt'")
    refuses(tmp_path / "zzz", "does not exist", "no similar name")
    refuses("", "is empty")
    (tmp_path / "sub").mkdir()
    refuses(tmp_path / "sub", "no file that can be read", "found nothing")
    (tmp_path / "sub" / "a.rst").write_text("x")
    refuses(tmp_path / "sub", r"expected one of \.txt", r"found \.rst")
    refuses(tmp_path / "sub" / "a.rst", r"found \.rst")
    (tmp_path / "sub" / "a.txt").write_text("\n \n")
    refuses(tmp_path / "sub", "holds no text")


def test_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    refuses(tmp_path, "no file that can be read")


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")

    def deny(path: Path, _mode: str) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", deny)
    refuses(tmp_path, "cannot read .*a.txt: Permission denied")


def test_max_bytes_cuts_the_last_document_at_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("éé")
    (tmp_path / "c.txt").write_text("never")
    assert [d.text for d in read(tmp_path, 6)] == ["abc", "é"]
    assert [d.text for d in read(tmp_path, 3)] == ["abc"]
    assert [d.text for d in read(tmp_path, 100)] == ["abc", "éé", "never"]


def test_standard_library_has_topics_and_sources_but_no_tests() -> None:
    names = [document.name for document in documents(None)]
    assert len(names) == len(set(names)) > 300
    assert {"topics/if", "json/decoder.py", "argparse.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert folders.isdisjoint({"test", "tests", "site-packages", "idlelib"})


def test_links_do_not_lead_in_circles(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "a.txt").write_text("a")
    (tmp_path / "x" / ".hidden").mkdir()
    (tmp_path / "x" / ".hidden" / "b.txt").write_text("b")
    for name in ("once", "again"):
        (tmp_path / "x" / name).symlink_to(tmp_path / "x")
    for pattern in ("x/**/*.txt", "**/y/*.txt", "x/**", "**/**/a.txt"):
        assert [document.text for document in read(tmp_path / pattern)] == ["a"]
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    refuses(tmp_path / "self.txt", r"does not exist: it is a link to .*self.txt, which leads nowh")


def test_a_mixture_has_whole_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data, expected in {
        "0.7*web/, 0.3*code/": [(7, "web/"), (3, "code/")],
        "2*a,1*b*.txt,.5*s3://c/d": [(4, "a"), (2, "b*.txt"), (1, "s3://c/d")],
        "0.333333*a,0.666667*b": [(333_333, "a"), (666_667, "b")],
        "3*.txt": [(1, "3*.txt")],  # a glob
        "a,b": [(1, "a,b")],
    }.items():
        assert mixture_of(data) == expected
    assert mixture_of(None) == [(1, None)]
    for data, words in {
        "0.7*a,b": "b of the mixture 0.7.a,b has no weight",
        "0.7*a,": "a source of the mixture 0.7.a, has no weight",
        "0.7*a,0*b": r"0.b of the mixture .* has no weight; expected a number above 0",
        "0.1234567*a,0.8765433*b": "exact only over 10,000,000 samples; expected at most 1,000,000",
    }.items():
        with pytest.raises(DataError, match=words):
            mixture_of(data)
    monkeypatch.chdir(tmp_path)
    assert absolute("0.7*web/, 3*s3://c/d") == f"0.7*{tmp_path}/web/, 3*s3://c/d"
    assert absolute("s3://c/d") == "s3://c/d" and absolute("a/*.txt") == f"{tmp_path}/a/*.txt"
    (tmp_path / "0.5*a,0.5*b").mkdir()
    assert mixture_of("0.5*a,0.5*b") == [(1, "0.5*a,0.5*b")]
