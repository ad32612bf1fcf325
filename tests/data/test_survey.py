"""A corpus that the cache knows is not read again, unless a file of it has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.config import CorpusConfig
from phalanx.data import corpus as corpus_module
from phalanx.data import survey
from phalanx.data.tokens import TokenFiles, prepare
from phalanx.errors import DataError

HOUR_NS = 3600 * 10**9


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.txt"):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / name).write_text(f"the text of {name}, line after line\n" * 50)
    return tmp_path / "corpus"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read, from here on."""
    names: list[str] = []
    read = corpus_module._read_bytes

    def count(file: Path) -> bytes:
        names.append(file.name)
        return read(file)

    monkeypatch.setattr(corpus_module, "_read_bytes", count)
    return names


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take files for settled however new they are."""
    monkeypatch.setattr(survey, "SETTLED_S", -1.0)


def prepared(corpus: Path, *, is_follower: bool = False, tokens: int = 300) -> TokenFiles:
    settings = CorpusConfig(cache=str(corpus.parent / "cache"), validation=0.2, vocab_size=tokens)
    return prepare(str(corpus), settings, model_vocab_size=400, is_follower=is_follower)


@pytest.mark.usefixtures("settled")
def test_a_known_corpus_is_not_read(corpus: Path, reads: list[str]) -> None:
    first = prepared(corpus)
    assert reads == ["a.txt", "b.txt"] * 3  # what it is, a tokenizer, tokens
    assert prepared(corpus) == first
    assert len(reads) == 6
    prepared(corpus, tokens=270)  # known, but not in these tokens
    assert len(reads) == 6 + 4 + 2


@pytest.mark.usefixtures("settled")
def test_a_change_that_keeps_size_and_time_is_seen(corpus: Path) -> None:
    file = corpus / "a.txt"
    first = prepared(corpus)
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text(file.read_text().replace("text", "TEXT"))
    os.utime(file, ns=times)
    assert file.stat().st_mtime_ns == times[1]
    second = prepared(corpus)
    assert second.num_bytes == first.num_bytes and second.text_digest != first.text_digest


@pytest.mark.parametrize("change", ["grow", "remove", "add", "rename"])
@pytest.mark.usefixtures("settled")
def test_every_change_is_seen(corpus: Path, change: str) -> None:
    first = prepared(corpus)
    if change == "grow":
        with (corpus / "a.txt").open("a") as file:
            file.write("more\n")
    elif change == "remove":
        (corpus / "a.txt").unlink()
    elif change == "add":
        (corpus / "c.txt").write_text("one more\n")
    else:
        (corpus / "a.txt").rename(corpus / "z.txt")
    assert prepared(corpus).text_digest != first.text_digest


def test_files_that_have_just_changed_are_read_again(corpus: Path, reads: list[str]) -> None:
    """But not by those that follow at once, the other ranks of the host."""
    prepared(corpus)
    reads.clear()
    followers = {prepared(corpus, is_follower=True) for _ in range(3)}
    assert len(followers) == 1 and reads == []
    prepared(corpus)
    assert reads == ["a.txt", "b.txt"]


@pytest.mark.usefixtures("settled")
def test_the_tokens_are_hashed_once_a_host(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.data import cache

    hashed: list[str] = []
    digest = cache._checksum
    prepared(corpus)
    monkeypatch.setattr(cache, "_checksum", lambda path: hashed.append(path.name) or digest(path))
    prepared(corpus)
    tokens = [name for name in hashed if name.endswith(".bin")]
    assert sorted(tokens) == ["train.bin", "validation.bin"]
    for _ in range(3):
        prepared(corpus, is_follower=True)
    assert [name for name in hashed if name.endswith(".bin")] == tokens


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 0}', '{"text": {"digest": 3}}'])
@pytest.mark.usefixtures("settled")
def test_a_damaged_record_is_not_believed(corpus: Path, reads: list[str], damage: str) -> None:
    first = prepared(corpus)
    (record,) = (corpus.parent / "cache" / "texts").iterdir()
    record.write_text(damage)
    reads.clear()
    assert prepared(corpus) == first
    assert reads == ["a.txt", "b.txt"]


@pytest.mark.usefixtures("settled")
def test_a_record_that_is_wrong_makes_no_tokens(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were a change ever missed, its text would not pass for the old one."""
    prepared(corpus)
    monkeypatch.setattr(survey.Corpus, "_stamp", lambda _: ("the same", 0.0))
    prepared(corpus)
    (corpus / "a.txt").write_text("another text\n" * 20)
    with pytest.raises(DataError, match="the corpus changed while it was read"):
        prepared(corpus, tokens=270)
