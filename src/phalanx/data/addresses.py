"""Sources at an address, such as s3://bucket/web/: fsspec copies them into the cache.

A file whose entry in the listing is as at the last copy is not copied again. A file that would not
be read is empty in the copy, so that it is named as any other file that is left out.
"""

from __future__ import annotations

import glob
import importlib
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any, Final

from phalanx.data.cache import fingerprint, storage_errors
from phalanx.data.corpus import METADATA, mixture_of, sources
from phalanx.data.formats import format_of
from phalanx.data.pretokenised import ARRAYS, files_of_ids
from phalanx.data.survey import Progress
from phalanx.errors import DataError
from phalanx.storage import PARTIAL, replace_file

ATTEMPTS: Final = 5
"""Most times that a request is made."""

STALL_S = 60.0
"""Seconds without a further byte after which a request counts as failed."""

PAUSE_S = 0.5
"""Seconds before the second attempt; doubled before each later one."""

_NUM_THREADS: Final = 8


def check_data(data: str | None) -> None:
    """Check the sources of a `data` setting, and send nothing.

    Raises:
        DataError: a path has no file that can be read, or the package for an address is missing.
    """
    for _, path in mixture_of(data):
        if path is not None and "://" in path:
            _open(path)
        elif not files_of_ids(path):
            sources(path)


def local_path(
    address: str | None, cache: Path, report: Progress, *, is_follower: bool = False
) -> str | None:
    """Return the path of an address's copy, after copying what has changed; a path as it is.

    A follower takes the copy that another process of this host has just made.

    Raises:
        DataError: the address cannot be read in ATTEMPTS attempts, or has no file.
    """
    if address is None or "://" not in address or len(mixture_of(address)) > 1:
        return address
    fs, path = _open(address)
    folder = cache / "addresses" / fingerprint("address", address)
    record, files = folder / "listing.json", folder / "files"
    known: dict[str, str] = json.loads(record.read_text()) if record.is_file() else {}
    if not (is_follower and known):
        listing = _attempt(address, lambda _: _listing(fs, path), folder)
        if not listing:
            raise DataError(f"{address} has no file; expected a file, a folder or a glob")
        before, known = known, {name: f"{entry}" for name, entry in listing.items()}
        changed = [n for n in known if known[n] != before.get(n) or not (files / n).is_file()]
        sizes = {name: listing[name][1].get("size") or 0 for name in changed}

        def copy(name: str) -> str:
            suffix = PurePosixPath(name).suffix.lower()
            is_read = format_of(Path(name)) or suffix in ARRAYS or Path(name).name in METADATA

            def get(partial: Path) -> Path:
                partial.touch()
                if is_read:
                    fs.get_file(listing[name][0], str(partial))
                    if sizes[name] not in (0, num_bytes := partial.stat().st_size):
                        raise OSError(f"{num_bytes:,} of {sizes[name]:,} bytes came")
                return partial.replace(files / name)

            (files / name).parent.mkdir(parents=True, exist_ok=True)
            _attempt(f"{address} ({name})", get, folder)
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


def _open(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path there."""
    try:
        return importlib.import_module("fsspec.core").url_to_fs(address)
    except ImportError as error:
        package = re.search(r"[Ii]nstall (\w+)", str(error))
        fix = "'phalanx-train[objects]'" if package is None else package[1]
        raise DataError(f"cannot read {address}: {error}: pip install {fix}") from error
    except ValueError as error:
        raise DataError(f"cannot read {address}: {error}; expected s3://, gs:// ...") from error


def _listing(fs: Any, path: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the path and the entry of each file, by its name in the copy."""
    if path.startswith(("http://", "https://")):  # which has no folders
        return {PurePosixPath(path.partition("?")[0]).name: (path, fs.info(path))}
    fs.invalidate_cache()
    root = path
    while glob.has_magic(root):
        root = root.rpartition("/")[0]
    entries = (fs.find if root == path else fs.glob)(path, detail=True)
    base = (root.rpartition("/")[0] if path in entries else root).rstrip("/")
    named = {file[len(base) :].strip("/"): (file, entries[file]) for file in sorted(entries)}
    return {
        name: (file, entry)
        for name, (file, entry) in named.items()
        if entry.get("type") == "file" and "/." not in f"/{name}"
    }


def _attempt(what: str, call: Callable[[Path], Any], folder: Path) -> Any:
    """Return what `call` returns, in one of ATTEMPTS attempts.

    Each attempt has a new partial file in `folder`; one that stalls ends when it grows no more.
    """
    problem, attempt = None, 0
    while attempt < ATTEMPTS:
        time.sleep(PAUSE_S * 2 ** (attempt - 1) if attempt else 0)
        attempt += 1
        done, partial = Future[Any](), folder / f"{token_hex(4)}{PARTIAL}"

        def run(done: Future[Any] = done, partial: Path = partial) -> None:
            try:
                done.set_result(call(partial))
            except BaseException as error:
                done.set_exception(error)

        # A daemon, because a request that hangs would keep the process from ending.
        threading.Thread(target=run, daemon=True).start()
        size, before = 0, -1
        while size > before and not wait([done], STALL_S).done:
            before, size = size, partial.stat().st_size if partial.exists() else 0
        problem = TimeoutError(f"no byte in {STALL_S:g} s")
        if done.done() and (problem := done.exception()) is None:
            return done.result()
        partial.unlink(missing_ok=True)
        if isinstance(problem, FileNotFoundError | PermissionError | NotImplementedError):
            break
    raise DataError(
        f"cannot read {what}: {type(problem).__name__}: {problem}; tried {attempt} times"
    ) from problem
