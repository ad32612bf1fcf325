"""The cache: folders that are whole or absent.

A folder is written under a hidden name beside its place, sealed with a manifest of sizes and
hashes, and renamed into place. A crash leaves only a hidden folder that nothing reads; a folder
whose files do not match its manifest is made anew; of several processes that make the same folder,
the first wins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from phalanx.errors import DataError

FORMAT = 2
"""Version of everything in the cache; a change of the law of any file in it raises this number."""

_MANIFEST = "manifest.json"
_STALE_S = 24 * 3600.0


def cache_folder(setting: str | None) -> Path:
    """Return the folder of the cache: `setting`, or the user's own cache folder if it is None.

    Raises:
        DataError: the user has no folder of their own.
    """
    if setting is not None:
        return Path(os.path.expanduser(setting))
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if caches.startswith("~"):
        raise DataError("this user has no home folder for the cache; set corpus.cache to a folder")
    return Path(caches) / "phalanx"


def fingerprint(*parts: object) -> str:
    """Return a short name for the values `parts` and the version of the cache."""
    text = json.dumps([FORMAT, *(str(part) for part in parts)])
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def publish(
    folder: Path, write: Callable[[Path], dict[str, object]], *, needed_bytes: int
) -> dict[str, object]:
    """Make `folder` by `write`, all of it or nothing.

    Args:
        folder: where the files shall be.
        write: writes plain files into the folder it is given and returns the facts to keep in the
            manifest (anything JSON can hold).
        needed_bytes: about what the files take; named when the disk is full.

    Returns:
        The facts, as the manifest gives them back.

    Raises:
        DataError: the disk is full, or the place cannot be written.
    """
    with storage_errors(folder, needed_bytes):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        temporary = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
        try:
            temporary.mkdir()
            _seal(temporary, write(temporary))
            _move(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    facts = read_facts(folder)
    if facts is None:
        raise DataError(f"{folder} was damaged while it was made; make it again")
    return facts


def read_facts(folder: Path, *, is_hashed: bool = True) -> dict[str, object] | None:
    """Return the facts of a folder, or None if it is absent, of another version or damaged.

    Args:
        folder: a folder that `publish` made.
        is_hashed: also compare the hash of each file, not only its size.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT:
            return None
        for name, (num_bytes, digest) in manifest["files"].items():
            if (folder / name).stat().st_size != num_bytes:
                return None
            if is_hashed and _digest(folder / name) != digest:
                return None
        return cast("dict[str, object]", manifest["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextmanager
def storage_errors(path: Path, needed_bytes: int) -> Generator[None]:
    """Turn an error of the file system met while writing `path` into a DataError."""
    try:
        yield
    except OSError as error:
        fix = "choose another folder with corpus.cache"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"no space left for {path}: it needs about {needed_bytes:,} bytes, "
                f"{_free_bytes(path):,} are free; make room, read less with corpus.max_bytes, or "
                f"{fix}"
            ) from error
        raise DataError(f"cannot write {path}: {error.strerror or error}; {fix}") from error


def _seal(folder: Path, facts: dict[str, object]) -> None:
    """Write the manifest of a folder, once its files are safely on the disk."""
    files: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.iterdir()):
        # Without this, a power cut could leave files of the right size that hold zeros.
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = (path.stat().st_size, _digest(path))
    manifest = {"format": FORMAT, "facts": facts, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")


def _move(temporary: Path, folder: Path) -> None:
    """Rename a sealed folder into its place, unless an intact one stands there already."""
    for _ in range(3):
        try:
            temporary.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if read_facts(folder) is not None:
            return
        broken = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
        try:
            folder.rename(broken)
        except FileNotFoundError:
            continue  # another process moved it away first
        if broken.is_dir():
            shutil.rmtree(broken, ignore_errors=True)
        else:
            broken.unlink(missing_ok=True)
    raise DataError(f"cannot replace {folder}: other processes keep changing it")


def _sweep(parent: Path) -> None:
    """Remove what crashed processes left behind a day or more ago."""
    for path in parent.glob(".*.????????"):
        try:
            # The folder's own time is that of its making; the files tell of work that goes on.
            newest = max(place.stat().st_mtime for place in (path, *path.iterdir()))
            if time.time() - newest > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)
        except (FileNotFoundError, NotADirectoryError):
            continue  # its own process has just removed or renamed it


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that `path` is or would be on."""
    for place in (path, *path.parents):
        if place.exists():
            return shutil.disk_usage(place).free
    return 0
