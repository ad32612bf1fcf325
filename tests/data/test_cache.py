"""The cache: whole or absent, whatever happens."""

import errno
import os
from pathlib import Path

import pytest

from phalanx.data import cache
from phalanx.errors import DataError


def write_hello(place: Path) -> dict[str, object]:
    (place / "a.txt").write_text("hello")
    return {"n": 1}


def test_published_folder_gives_its_facts_back(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "x"
    assert cache.read_facts(folder) is None
    assert cache.find_or_make(folder, write_hello, needed_bytes=5) == {"n": 1}
    assert cache.read_facts(folder) == {"n": 1}
    assert [p.name for p in folder.parent.iterdir()] == ["x"]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "manifest", "version", "file"])
def test_damaged_folder_is_not_believed_and_is_made_anew(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "x"
    cache.find_or_make(folder, write_hello, needed_bytes=5)
    file, manifest = folder / "a.txt", folder / "manifest.json"
    if damage == "cut":
        file.write_text("hell")
    elif damage == "flip":
        file.write_text("hellx")
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-3])
    elif damage == "version":
        manifest.write_text(
            manifest.read_text().replace(f'"format": {cache.FORMAT}', '"format": 0')
        )
    else:
        file.unlink()
        manifest.unlink()
        folder.rmdir()
        folder.write_text("a file where a folder should be")
    assert cache.read_facts(folder) is None
    assert cache.find_or_make(folder, write_hello, needed_bytes=5) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_first_of_two_processes_wins(tmp_path: Path) -> None:
    folder = tmp_path / "x"

    def second(place: Path) -> dict[str, object]:
        cache.find_or_make(folder, write_hello, needed_bytes=5)
        (place / "a.txt").write_text("other")
        return {"n": 2}

    assert cache.find_or_make(folder, second, needed_bytes=5) == {"n": 1}
    assert (folder / "a.txt").read_text() == "hello"


@pytest.mark.parametrize("is_damaged", [False, True])
def test_folder_that_another_process_has_just_completed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    folder = tmp_path / "x"
    if is_damaged:
        folder.mkdir()
        (folder / "a.txt").write_text("half")
    read_facts = cache.read_facts

    def read_before_it_is_complete(folder: Path, **settings: bool) -> dict[str, object] | None:
        monkeypatch.setattr(cache, "read_facts", read_facts)
        facts = read_facts(folder, **settings)
        cache.find_or_make(folder, write_hello, needed_bytes=5)
        return facts

    monkeypatch.setattr(cache, "read_facts", read_before_it_is_complete)
    assert cache.find_or_make(folder, lambda _: {"n": 2}, needed_bytes=5) == {"n": 1}
    assert (folder / "a.txt").read_text() == "hello"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_folder_completed_after_the_damaged_one_was_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that had the lock removes the damaged one, and completes its own."""
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "a.txt").write_text("half")
    lock, is_dir = cache.lock, Path.is_dir

    def removed_first(descriptor: int, *, waits: bool) -> bool | None:
        monkeypatch.setattr(Path, "is_dir", completed_next)
        cache.remove_folder(folder)
        return lock(descriptor, waits=waits)

    def completed_next(path: Path) -> bool:
        found = is_dir(path)
        if path == folder and not found:
            monkeypatch.undo()
            cache.find_or_make(folder, write_hello, needed_bytes=5)
        return found

    monkeypatch.setattr(cache, "lock", removed_first)
    assert cache.find_or_make(folder, lambda _: {"n": 2}, needed_bytes=5) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_names_path_and_bytes_and_leaves_nothing(tmp_path: Path, code: int) -> None:
    def fail(place: Path) -> dict[str, object]:
        (place / "a.txt").write_text("half")
        raise OSError(code, "no space")

    with pytest.raises(DataError, match=r"no space left for .*x: it needs about 12,345 bytes"):
        cache.find_or_make(tmp_path / "x", fail, needed_bytes=12345)
    assert list(tmp_path.iterdir()) == []


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/x.*corpus\.cache"):
        cache.find_or_make(tmp_path / "file" / "x", write_hello, needed_bytes=5)


def test_cache_folder_follows_the_setting_then_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert cache.cache_folder("/a/b") == Path("/a/b")
    assert cache.cache_folder(None) == Path("/some/where/phalanx")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache.cache_folder(None) == Path("/home/me/.cache/phalanx")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(DataError, match=r"set corpus\.cache"):
        cache.cache_folder(None)


def test_fingerprint_tells_parts_apart() -> None:
    assert cache.fingerprint("a", "b") != cache.fingerprint("ab")
    assert cache.fingerprint("a", 1) == cache.fingerprint("a", 1)
