"""Sources at an address, such as s3://bucket/web/: fsspec copies them into the cache.

A file whose size and entry in the listing are as in the copy is not copied again. A file that would
not be read is empty in the copy, so that it is named as any other file that is left out.
"""

from __future__ import annotations

import glob
import importlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any, Final, TypeVar

from phalanx.data.cache import fingerprint, storage_errors
from phalanx.data.corpus import METADATA, mixture_of, sources
from phalanx.data.pretokenised import ARRAYS, files_of_ids
from phalanx.data.records import format_of
from phalanx.data.survey import Progress
from phalanx.errors import DataError
from phalanx.storage import PARTIAL, replace_file

ATTEMPTS: Final = 5
"""Most times that a request is made."""

STALL_S = 60.0
"""Seconds after which a request without a further byte counts as failed."""

PAUSE_S = 0.5
"""Seconds before the second attempt; doubled before each later one."""

_PARALLEL: Final = 8
_T = TypeVar("_T")


def check_data(data: str | None) -> None:
    """Check the sources of a `data` setting: paths have files that can be read. Send nothing.

    Raises:
        DataError: they do not, or the package for an address is missing.
    """
    for _, path in mixture_of(data):
        if path is not None and "://" in path:
            open_address(path)
        elif not files_of_ids(path):
            sources(path)


def open_address(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path there; send nothing.

    Raises:
        DataError: a package is missing, or no file system has such addresses.
    """
    try:
        return importlib.import_module("fsspec.core").url_to_fs(address)
    except ImportError as error:
        kind = address.partition("://")[0]
        fix = {"gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}.get(kind)
        fix = f"'phalanx-train[objects]' {fix or ''}".strip()
        raise DataError(f"cannot read {address}: {error}; pip install {fix}") from error
    except ValueError as error:
        raise DataError(f"cannot read {address}: {error}; expected s3://, gs:// ...") from error


def copied(address: str, cache: Path, report: Progress, *, is_follower: bool = False) -> str:
    """Return the path of an address's copy in the cache, after copying what has changed.

    A follower takes the copy that another process of this host has just made.

    Raises:
        DataError: the address cannot be read in ATTEMPTS attempts, or has no file.
    """
    fs, path = open_address(address)
    folder = cache / "addresses" / fingerprint("address", address)
    record, files = folder / "listing.json", folder / "files"
    known: dict[str, str] = json.loads(record.read_text()) if record.is_file() else {}
    if not (is_follower and known):
        listing = _attempt(address, lambda: _listing(fs, path))
        if not listing:
            raise DataError(f"{address} has no file; expected a file, a folder or a glob")
        marks = {name: f"{info}" for name, (_, info) in listing.items()}
        changed = [n for n in marks if marks[n] != known.get(n) or not (files / n).is_file()]
        sizes = {name: int(listing[name][1].get("size") or 0) for name in changed}
        done = 0

        def copy(name: str) -> str:
            local, suffix = files / name, PurePosixPath(name).suffix.lower()
            is_read = format_of(Path(name)) or suffix in ARRAYS or local.name in METADATA
            partials: list[Path] = []

            def get() -> Path:
                partial = local.with_name(f".{token_hex(4)}{PARTIAL}")  # its own in each attempt
                partials.append(partial)
                if is_read:
                    fs.get_file(listing[name][0], str(partial))
                    if sizes[name] and partial.stat().st_size != sizes[name]:
                        raise OSError(f"{partial.stat().st_size} of {sizes[name]} bytes came")
                else:
                    partial.touch()
                return partial

            local.parent.mkdir(parents=True, exist_ok=True)
            try:
                _attempt(f"{address} ({name})", get, partials).replace(local)
            finally:
                for partial in partials:
                    partial.unlink(missing_ok=True)
            return name

        with storage_errors(files, sum(sizes.values())), ThreadPoolExecutor(_PARALLEL) as pool:
            for name in set(known) - set(marks):
                (files / name).unlink(missing_ok=True)
            for name in pool.map(copy, changed):
                done += sizes[name]
                report("copy the data", done, sum(sizes.values()))
            replace_file(record, json.dumps(marks).encode())
        known = marks
    is_file = list(known) == [PurePosixPath(path.partition("?")[0]).name]
    return str(files / next(iter(known)) if is_file else files)


def _listing(fs: Any, path: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the path and the entry of each file, by its name in the copy."""
    if path.startswith(("http://", "https://")):  # which has no folders
        return {PurePosixPath(path.partition("?")[0]).name: (path, fs.info(path))}
    fs.invalidate_cache()
    root = path
    while glob.has_magic(root):
        root = root.rpartition("/")[0]
    entries = (fs.find if root == path else fs.glob)(path, detail=True)
    base = root.rstrip("/").rpartition("/")[0] if path in entries else root.rstrip("/")
    named = {file[len(base) :].strip("/"): (file, info) for file, info in sorted(entries.items())}
    return {
        name: entry
        for name, entry in named.items()
        if entry[1].get("type") == "file"
        and not any(part.startswith(".") for part in name.split("/"))
    }


def _attempt(what: str, call: Callable[[], _T], partials: list[Path] | None = None) -> _T:
    """Return what `call` returns, in one of ATTEMPTS attempts; the last of `partials` grows."""
    problem, attempt = None, 0
    while attempt < ATTEMPTS:
        time.sleep(PAUSE_S * 2 ** (attempt - 1) if attempt else 0)
        attempt += 1
        done: Future[_T] = Future()

        def run(done: Future[_T] = done) -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        # A daemon, because a request that hangs would keep the process from ending.
        threading.Thread(target=run, daemon=True).start()
        size, before = 0, -1
        while size > before and not wait([done], STALL_S).done:
            last = partials[-1] if partials else None
            before, size = size, last.stat().st_size if last is not None and last.exists() else 0
        if not done.done():
            problem = TimeoutError(f"no byte came for {STALL_S:g} s")
            continue
        if (problem := done.exception()) is None:
            return done.result()
        if isinstance(problem, FileNotFoundError | PermissionError | NotImplementedError):
            break
    raise DataError(
        f"cannot read {what}: {type(problem).__name__}: {problem}; tried {attempt} times"
    ) from problem
