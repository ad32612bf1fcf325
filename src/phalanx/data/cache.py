"""The data cache: folders that are complete or absent.

A folder is written under a temporary name with a manifest of sizes and hashes, and then renamed
(`phalanx.storage`). A folder whose files do not match its manifest is rebuilt. If several processes
build the same folder, the first one to rename it wins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from phalanx.errors import CheckpointError, DataError
from phalanx.storage import Checksum, checksum, free_bytes, lock, new_folder, remove_folder

FORMAT = 2
"""Version of the cache; increase it when the content or format of any cached file changes."""

_MANIFEST = "manifest.json"


def cache_folder(setting: str | None) -> Path:
    """Return the folder of the cache: `setting`, or `phalanx` in the user's cache folder if None.

    Raises:
        DataError: `setting` is None, and the user has no home folder.
    """
    if setting is not None:
        return Path(os.path.expanduser(setting))
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if caches.startswith("~"):
        raise DataError("this user has no home folder for the cache; set corpus.cache to a folder")
    return Path(caches) / "phalanx"


def fingerprint(*parts: object) -> str:
    """Return a hash of the values `parts` and the cache version, in 24 hexadecimal digits."""
    text = json.dumps([FORMAT, *(str(part) for part in parts)])
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def find_or_make(
    folder: Path,
    write: Callable[[Path], dict[str, object]],
    *,
    needed_bytes: int,
    is_hashed: bool = True,
) -> dict[str, object]:
    """Return the facts of `folder`; if it is absent or damaged, build it atomically with `write`.

    `write` puts plain files into the folder that it is given, and returns the facts, a dict that
    JSON can encode. `needed_bytes` is the approximate size of its files, for the message on a full
    disk. For `is_hashed` see `read_facts`.

    Raises:
        DataError: the disk is full, or the folder cannot be written.
    """
    if (facts := read_facts(folder, is_hashed=is_hashed)) is not None:
        return facts
    with storage_errors(folder, needed_bytes):
        _remove_damaged(folder)
        try:
            with new_folder(folder) as partial:
                facts = write(partial)
                files = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
                manifest = {"format": FORMAT, "facts": facts, "files": files}
                (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
        except OSError:
            if read_facts(folder) is None:  # else another process renamed its folder first
                raise
    if (facts := read_facts(folder)) is None:
        raise DataError(f"{folder} was damaged while it was written; start again")
    return facts


def _remove_damaged(folder: Path) -> None:
    """Remove a damaged `folder`, or a file there; not one that another process has completed.

    No process can rename its folder over a file or a folder with entries. So one that is damaged
    under the lock stays until the holder of the lock removes it.
    """
    if not os.path.lexists(folder):
        return
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        lock(descriptor, waits=True)
        if not folder.is_dir():
            try:
                folder.unlink(missing_ok=True)
            except OSError:
                if not folder.is_dir():  # else another process has completed it just now
                    raise
        elif any(folder.iterdir()) and read_facts(folder) is None:
            remove_folder(folder)
    finally:
        os.close(descriptor)


def read_facts(folder: Path, *, is_hashed: bool = True) -> dict[str, object] | None:
    """Return the facts of a folder, or None if it is absent, of another version or damaged.

    Compare the hash of each file in addition to its size if `is_hashed`.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT:
            return None
        for name, (num_bytes, digest) in manifest["files"].items():
            if (folder / name).stat().st_size != num_bytes:
                return None
            if is_hashed and _checksum(folder / name) != (num_bytes, digest):
                return None
        return cast("dict[str, object]", manifest["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):
        return None


@contextmanager
def storage_errors(path: Path, needed_bytes: int) -> Generator[None]:
    """Convert an OSError raised while `path` is written into a DataError."""
    try:
        yield
    except OSError as error:
        fix = "choose another folder with corpus.cache"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"no space left for {path}: it needs about {needed_bytes:,} bytes, "
                f"{free_bytes(path):,} are free; make room, read less with corpus.max_bytes, or "
                f"{fix}"
            ) from error
        raise DataError(f"cannot write {path}: {error.strerror or error}; {fix}") from error


def _checksum(path: Path) -> Checksum:
    num_bytes, digest = checksum(path, "blake2b")
    return num_bytes, digest[:32]
