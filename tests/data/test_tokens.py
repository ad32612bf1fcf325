"""Token files: exact bytes, both parts, and a cache that is never believed wrongly."""

import itertools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from phalanx.config import CorpusConfig
from phalanx.data import tokenizer as tokenizer_module
from phalanx.data import tokens as tokens_module
from phalanx.data.token_file import TokenWriter, open_token_file
from phalanx.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from phalanx.data.tokens import TokenFiles, open_tokens, prepare
from phalanx.errors import ConfigError, DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        text = f"document {number} of a small corpus, with {END_OF_TEXT} é\n" * (1 + number % 5)
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def settings(tmp_path: Path, **changes: object) -> CorpusConfig:
    return CorpusConfig(**{"cache": str(tmp_path / "cache"), "validation": 0.2, **changes})


def texts_of(files: TokenFiles, part: str) -> list[str]:
    tokenizer = load_tokenizer(files.tokenizer)
    ids = getattr(files, part).map().astype(np.int64)
    ends = np.flatnonzero(ids == getattr(files, part).end_id)
    assert ends[0] == 0 and ends[-1] == len(ids) - 1
    return [
        tokenizer.decode(ids[a + 1 : b].tolist(), skip_special_tokens=False)
        for a, b in itertools.pairwise(ends)
    ]


def test_files_hold_each_document_once_between_separators(corpus: Path, tmp_path: Path) -> None:
    files = prepare(str(corpus), settings(tmp_path), model_vocab_size=400)
    train, validation = texts_of(files, "train"), texts_of(files, "validation")
    expected = [path.read_text() for path in sorted(corpus.iterdir())]
    assert sorted(train + validation) == sorted(expected)
    # Within a part, the order is that of the corpus.
    assert train == [text for text in expected if text in set(train)]
    num_bytes = sum(len(text.encode()) for text in expected)
    assert (files.num_documents, files.num_bytes) == (40, num_bytes)
    table = files.token_bytes()
    for part, texts in (("train", train), ("validation", validation)):
        ids = getattr(files, part).map()
        assert table[ids].sum() == sum(len(text.encode()) for text in texts)
    share = sum(len(text.encode()) for text in validation) / num_bytes
    assert 0.15 < share < 0.25


def test_the_files_are_the_same_on_any_number_of_cores(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_CALL_CHARACTERS", 50)
    files: list[dict[str, bytes]] = []
    for num_cores in (1, 2, 7):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=num_cores: set(range(n)))
        config = settings(tmp_path, cache=str(tmp_path / f"{num_cores}"))
        folder = prepare(str(corpus), config, model_vocab_size=400).folder
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1] == files[2] and len(files[0]["train.bin"]) > 1000


def test_second_preparation_reads_the_cache(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    config = settings(tmp_path)
    first = prepare(
        str(corpus),
        config,
        model_vocab_size=400,
        progress=lambda *what: told.append(what),
    )
    assert [part for part in dict.fromkeys(what for what, _, _ in told) if part[:5] != "merge"] == [
        "read the text",
        "count the words for a tokenizer",
        "encode",
    ]
    assert told[-1] == ("encode", first.num_bytes, first.num_bytes)

    def refuse(*_: object) -> None:
        raise AssertionError("encoded again")

    monkeypatch.setattr(tokens_module, "_encode", refuse)
    monkeypatch.setattr(tokens_module, "train_tokenizer", refuse)
    assert prepare(str(corpus), config, model_vocab_size=400) == first
    assert open_tokens(first.folder) == first


def test_cache_is_by_content_and_settings_not_by_place(corpus: Path, tmp_path: Path) -> None:
    base = prepare(str(corpus), settings(tmp_path), model_vocab_size=400).folder
    moved = corpus.rename(tmp_path / "elsewhere")
    assert prepare(str(moved), settings(tmp_path), model_vocab_size=400).folder == base
    others = [
        prepare(str(moved), settings(tmp_path, validation=0.1), model_vocab_size=400).folder,
        prepare(str(moved), settings(tmp_path, vocab_size=300), model_vocab_size=400).folder,
        prepare(str(moved), settings(tmp_path, max_bytes=500), model_vocab_size=400).folder,
    ]
    (moved / "00.txt").write_text("changed")
    others.append(prepare(str(moved), settings(tmp_path), model_vocab_size=400).folder)
    assert len({base, *others}) == 5


def test_half_written_and_damaged_files_are_made_anew(corpus: Path, tmp_path: Path) -> None:
    config = settings(tmp_path)
    files = prepare(str(corpus), config, model_vocab_size=400)
    good = files.train.path.read_bytes()
    files.train.path.write_bytes(good[:-2])
    with pytest.raises(DataError, match="no complete token files"):
        open_tokens(files.folder)
    assert prepare(str(corpus), config, model_vocab_size=400) == files
    assert files.train.path.read_bytes() == good
    (tokenizer,) = (tmp_path / "cache" / "tokenizers").iterdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    assert prepare(str(corpus), config, model_vocab_size=400) == files


def _prepare_in_process(corpus: str, cache: str) -> str:
    config = CorpusConfig(cache=cache, validation=0.2)
    return str(prepare(corpus, config, model_vocab_size=400).folder)


def test_processes_that_start_together_agree(corpus: Path, tmp_path: Path) -> None:
    args = [str(corpus)] * 2, [str(tmp_path / "cache")] * 2
    with ProcessPoolExecutor(2, multiprocessing.get_context("forkserver")) as processes:
        (folder,) = set(processes.map(_prepare_in_process, *args))
    assert sorted(p.name for p in Path(folder).parent.iterdir()) == [Path(folder).name]
    open_tokens(folder)


def test_corpus_of_one_file_has_both_parts(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(2000))
    (tmp_path / "all.txt").write_text(text)
    files = prepare(str(tmp_path / "all.txt"), settings(tmp_path), model_vocab_size=300)
    (train,), (validation,) = texts_of(files, "train"), texts_of(files, "validation")
    assert train + validation == text
    assert 0.18 < len(validation) / len(text) < 0.22


def test_long_documents_are_encoded_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "some words and more words\n" * 40_000
    (tmp_path / "all.txt").write_text(text)
    monkeypatch.setattr(tokens_module, "_TRAINING_BYTES", 1 << 18)
    config = settings(tmp_path, validation=0.0)
    files = prepare(str(tmp_path / "all.txt"), config, model_vocab_size=300)
    assert texts_of(files, "train") == [text]
    assert files.validation.num_tokens == 0
    assert len(files.validation.map()) == 0


def test_tokenizer_of_the_user(corpus: Path, tmp_path: Path) -> None:
    mine = train_tokenizer(["document small corpus"] * 3, 270)
    mine.save(str(tmp_path / "mine.json"))
    name = str(tmp_path / "mine.json")
    config = settings(tmp_path)
    files = prepare(str(corpus), config, model_vocab_size=300, tokenizer=name)
    assert json.loads(files.tokenizer.read_text()) == json.loads(mine.to_str())
    assert len(texts_of(files, "train")) > 20
    with pytest.raises(ConfigError, match=r"mine\.json has ids up to .* 100 rows"):
        prepare(str(corpus), config, model_vocab_size=100, tokenizer=name)


def test_wrong_sizes_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    for changes, model_vocab_size, words in (
        ({"vocab_size": 500}, 400, r"vocab_size is 500, but the model's .* 400 rows"),
        ({}, 61, r"vocab_size is 61; .*at least 257"),
    ):
        with pytest.raises(ConfigError, match=words):
            prepare("/nowhere", settings(tmp_path, **changes), model_vocab_size=model_vocab_size)


def test_corpus_too_small_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="nothing is left to train on"):
        prepare(str(tmp_path / "a.txt"), settings(tmp_path, validation=0.9), model_vocab_size=300)


def test_corpus_that_changes_while_it_is_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = tokens_module.train_tokenizer

    def train_then_grow(*args: object) -> Tokenizer:
        trained = train(*args)
        (corpus / "zz.txt").write_text("new")
        return trained

    monkeypatch.setattr(tokens_module, "train_tokenizer", train_then_grow)
    with pytest.raises(DataError, match="the corpus changed while it was read"):
        prepare(str(corpus), settings(tmp_path), model_vocab_size=300)
    assert not list((tmp_path / "cache" / "tokens").iterdir())


@pytest.mark.parametrize(("num_ids", "width_bytes"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_width_follows_the_vocabulary(tmp_path: Path, num_ids: int, width_bytes: int) -> None:
    path = tmp_path / "a.bin"
    with TokenWriter(path, num_ids=num_ids, end_id=7) as writer:
        writer.begin_document()
        writer.write([1, num_ids - 1])
    file = open_token_file(path)
    assert (file.num_tokens, file.end_id, file.width_bytes) == (4, 7, width_bytes)
    assert file.map().tolist() == [7, 1, num_ids - 1, 7]


def test_faulty_token_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with pytest.raises(DataError, match=r"cannot read tokens .*a\.bin"):
        open_token_file(path)
    with pytest.raises(RuntimeError), TokenWriter(path, num_ids=9, end_id=0) as writer:
        writer.begin_document()
        raise RuntimeError
    with pytest.raises(DataError, match="not a complete token file"):
        open_token_file(path)  # the header comes last, so a crash leaves no readable file
    with TokenWriter(path, num_ids=9, end_id=0) as writer:
        writer.begin_document()
    raw = path.read_bytes()
    path.write_bytes(raw + b"\0")
    with pytest.raises(DataError, match="not a complete token file"):
        open_token_file(path)
    path.write_bytes(raw[:8] + b"\x02" + raw[9:])
    with pytest.raises(DataError, match="of version 1; remove it"):
        open_token_file(path)


def test_tokenizer_that_loses_letters(corpus: Path, tmp_path: Path) -> None:
    """Without a token for every byte the loss in bits per byte would be of another text."""
    parts = json.loads(train_tokenizer(["words"], 257).to_str())
    for letter in "om":
        del parts["model"]["vocab"][letter]
    for index, token in enumerate(parts["model"]["vocab"]):
        parts["model"]["vocab"][token] = index
    (tmp_path / "lossy.json").write_text(json.dumps(parts))
    with pytest.raises(
        DataError,
        match=r"loses text: .* bytes, but its tokens represent \d+; it h"
        r"as no token for '[om]', '[om]'; give a tokenizer that covers every byte",
    ):
        prepare(
            str(corpus), settings(tmp_path), model_vocab_size=300,
            tokenizer=str(tmp_path / "lossy.json"),
        )  # fmt: skip
    assert not list((tmp_path / "cache" / "tokens").iterdir())
