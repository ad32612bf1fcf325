"""Files and folders that are whole or absent, whatever happens."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx import storage
from phalanx.errors import ConfigError


def write_folder(final: Path, error: BaseException | None = None) -> None:
    with storage.new_folder(final) as partial:
        (partial / "a.txt").write_text("half")
        if error is not None:
            raise error
        (partial / "a.txt").write_text("whole")


@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()])
def test_a_folder_is_whole_or_absent(tmp_path: Path, error: BaseException) -> None:
    final = tmp_path / "deep" / "x"
    with pytest.raises(type(error)):
        write_folder(final, error)
    assert list(final.parent.iterdir()) == []
    write_folder(final)
    assert [path.name for path in final.parent.iterdir()] == ["x"]
    assert (final / "a.txt").read_text() == "whole"


def test_a_folder_that_is_there_stays(tmp_path: Path) -> None:
    write_folder(tmp_path / "x")
    with pytest.raises(OSError, match="not empty"):
        write_folder(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_is_removed_is_whole_for_others_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, was_there = tmp_path / ("x" * 250), list[bool]()
    rmtree = shutil.rmtree

    def note(path: Path, **options: bool) -> None:
        was_there.append(folder.exists())
        rmtree(path, **options)

    (folder / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(storage.shutil, "rmtree", note)
    storage.remove_folder(folder)
    assert was_there == [False] and list(tmp_path.iterdir()) == []
    storage.remove_folder(folder)  # which is not there


def test_what_a_crash_left_a_day_ago_is_removed(tmp_path: Path) -> None:
    names = ["x.00112233", "x.44556677", "x.8899aabb", "step-00000001", "x.thesis12"]
    old, new, busy, *foreign = (tmp_path / f"{name}.partial" for name in names)
    for left in (old, new, busy, *foreign):
        left.mkdir()
    (busy / "a.txt").write_text("made a while ago, still written to")
    for left in (old, busy, *foreign):
        os.utime(left, (0, 0))
    write_folder(tmp_path / "y")
    assert not old.exists()
    assert all(left.exists() for left in (new, busy, *foreign))


def write_file(path: Path) -> None:
    storage.replace_file(path, b"whole")


@pytest.mark.parametrize("write", [write_folder, write_file])
def test_a_file_that_a_crash_left_a_day_ago_is_removed(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    names = ["run.toml.00112233", "run.toml.44556677", "run.toml"]
    old, new, foreign = (tmp_path / f"{name}.partial" for name in names)
    for left in (old, new, foreign):
        left.write_text("half")
    for left in (old, foreign):
        os.utime(left, (0, 0))
    write(tmp_path / "y")
    assert not old.exists()
    assert new.exists() and foreign.exists()


def test_a_file_stays_whole_until_the_new_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    storage.replace_file(file, b"first")

    def fail(path: Path) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "sync", fail)
        with pytest.raises(OSError, match="full"):
            storage.replace_file(file, b"second")
    assert file.read_bytes() == b"first"
    storage.replace_file(file, b"third")
    assert file.read_bytes() == b"third"
    assert list(tmp_path.iterdir()) == [file]


def test_a_destination_below_a_circle_of_links_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "source").mkdir()
    storage.check_free(tmp_path / "source", tmp_path / "circle" / "x")
    with pytest.raises(ConfigError, match="is inside"):
        storage.check_free(tmp_path / "source", tmp_path / "source" / "x")


def test_a_file_that_a_user_names_is_read_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has no end, and a pipe is waited for."""
    monkeypatch.setattr(storage, "MOST_TEXT_BYTES", 4)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_text("12345")
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "short").write_text("1234")
    (tmp_path / "link").symlink_to("short")
    for path, words in {
        Path("/dev/zero"): "is no regular file",
        tmp_path / "pipe": "is no regular file",
        tmp_path: "Is a directory",
        tmp_path / "none": "No such file",
        tmp_path / "long": "it has more than",
        tmp_path / "bytes": "it is not UTF-8",
    }.items():
        with pytest.raises(ConfigError, match=f"cannot read {path}: .*{words}"):
            storage.read_text(path)
    assert storage.read_text(tmp_path / "link") == "1234"
