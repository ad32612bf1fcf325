"""Sources at an address, such as s3://bucket/web/: fsspec copies them into the cache.

A file whose entry in the listing is as at the last copy is not copied again. A file that would not
be read is empty in the copy, so that it is named as any other file that is left out.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any, Final, TypeVar

from phalanx.data.cache import fingerprint, storage_errors
from phalanx.data.corpus import METADATA, mixture_of, sources
from phalanx.data.formats import format_of
from phalanx.data.pretokenised import ARRAYS, files_of_ids
from phalanx.data.survey import Progress
from phalanx.errors import DataError, StoreError
from phalanx.object_store import ask, open_store, repeated
from phalanx.storage import PARTIAL, replace_file

T = TypeVar("T")

_NUM_THREADS: Final = 8


def check_data(data: str | None) -> None:
    """Check the sources of a `data` setting, and send nothing.

    Raises:
        DataError: a path has no file that can be read.
        ConfigError: an address cannot be opened, see `open_store`.
    """
    for _, path in mixture_of(data):
        if path is not None and "://" in path:
            open_store(path)
        elif not files_of_ids(path):
            sources(path)


def local_path(
    address: str | None, cache: Path, report: Progress, *, is_follower: bool = False
) -> str | None:
    """Return the path of an address's copy, after copying what has changed; a path as it is.

    A follower takes the copy that another process of this host has just made.

    Raises:
        DataError: the address cannot be read, or has no file.
    """
    if address is None or "://" not in address or len(mixture_of(address)) > 1:
        return address
    fs, path = open_store(address)
    folder = cache / "addresses" / fingerprint("address", address)
    record, files = folder / "listing.json", folder / "files"
    known: dict[str, str] = json.loads(record.read_text()) if record.is_file() else {}
    if not (is_follower and known):
        listing = _repeated(lambda: _listing(fs, path), address)
        if not listing:
            raise DataError(f"{address} has no file; expected a file, a folder or a glob")
        before, known = known, {name: f"{entry}" for name, entry in listing.items()}
        changed = [n for n in known if known[n] != before.get(n) or not (files / n).is_file()]
        sizes = {name: listing[name][1].get("size") or 0 for name in changed}

        def copy(name: str) -> str:
            suffix = PurePosixPath(name).suffix.lower()
            is_read = format_of(Path(name)) or suffix in ARRAYS or Path(name).name in METADATA

            def get() -> None:
                partial = folder / f"{token_hex(4)}{PARTIAL}"
                try:
                    partial.touch()
                    if is_read:
                        ask("get_file", fs, listing[name][0], str(partial), partial=partial)
                        if sizes[name] not in (0, num_bytes := partial.stat().st_size):
                            raise OSError(f"{num_bytes:,} of {sizes[name]:,} bytes came")
                    partial.replace(files / name)
                finally:
                    partial.unlink(missing_ok=True)

            (files / name).parent.mkdir(parents=True, exist_ok=True)
            _repeated(get, f"{address} ({name})")
            return name

        num_bytes, done = sum(sizes.values()), 0
        with storage_errors(files, num_bytes), ThreadPoolExecutor(_NUM_THREADS) as pool:
            for name in set(before) - set(known):
                (files / name).unlink(missing_ok=True)
            for name in pool.map(copy, changed):
                done += sizes[name]
                report("copy the data", done, num_bytes)
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(record, json.dumps(known).encode())
    is_file = list(known) == [PurePosixPath(path.partition("?")[0]).name]
    return str(files / next(iter(known)) if is_file else files)


def _repeated(work: Callable[[], T], where: str) -> T:
    try:
        return repeated(work, "read", where)
    except FileNotFoundError as error:
        raise DataError(f"cannot read {where}: it does not exist") from error
    except StoreError as error:
        raise DataError(str(error)) from error


def _listing(fs: Any, path: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the path and the entry of each file, by its name in the copy."""
    if path.startswith(("http://", "https://")):  # which has no folders
        return {PurePosixPath(path.partition("?")[0]).name: (path, ask("info", fs, path))}
    fs.invalidate_cache()
    root = path
    while glob.has_magic(root):
        root = root.rpartition("/")[0]
    entries = ask("find" if root == path else "glob", fs, path, detail=True)
    base = (root.rpartition("/")[0] if path in entries else root).rstrip("/")
    named = {file[len(base) :].strip("/"): (file, entries[file]) for file in sorted(entries)}
    return {
        name: (file, entry)
        for name, (file, entry) in named.items()
        if entry.get("type") == "file" and "/." not in f"/{name}"
    }
