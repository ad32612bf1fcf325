"""Folders in object stores, named by addresses such as s3://bucket/run, through fsspec.

An object store has no rename, no append and no lock, so an address has a path on this host, whose
text is the address: s3://bucket/run is ~/.cache/phalanx-objects/s3/bucket/run. Small files are
read and written there; `fetch` and `put` bring them from and to the store, `stream` takes tensors
there straight from memory. A request that fails is repeated (PAUSES_S).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path, PosixPath
from typing import Any, Final, TypeVar, cast

from typing_extensions import override

from phalanx.errors import ConfigError, StoreError
from phalanx.storage import PARTIAL, replace_file

T = TypeVar("T")

PAUSES_S: Final = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
"""Seconds before each repetition of a failed request, shortened at random by up to a half."""

REQUEST_S: Final = 60.0
"""Longest wait for an answer, in seconds, and as many for each 64 MiB that it transfers."""

PART_BYTES: Final = 64 << 20
"""Bytes of a part of a large object; stores accept at most 10,000 parts."""


class ObjectPath(PosixPath):
    """The path on this host of an address; its text is the address."""

    @override
    def __str__(self) -> str:
        return address_of(self) or os.fspath(self)

    @override
    def __fspath__(self) -> str:
        return super().__str__()


def is_address(text: str) -> bool:
    """Return whether a text is an address in a store."""
    return text.partition("://")[0].isalnum() and "://" in text


def path_of(text: str | Path) -> Path:
    """Return the path of an address on this host, or any other path as it is."""
    if isinstance(text, Path) or not is_address(text):
        return Path(text)
    scheme, _, key = text.partition("://")
    names = [name for name in key.split("/") if name]
    if not names or {".", ".."} & {*names}:
        raise ConfigError(f"{text} is no folder in a store; expected such as s3://bucket/run")
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return ObjectPath(os.path.abspath(cache), _FOLDER, scheme, *names)


def address_of(path: Path) -> str | None:
    """Return the address whose path on this host `path` is; None for any other path."""
    scheme, _, key = os.path.abspath(path).partition(f"/{_FOLDER}/")[2].partition("/")
    return f"{scheme}://{key}" if key else None


_FOLDER: Final = "phalanx-objects"
"""Folder of all addresses; a path in it has an address wherever the cache of a process is."""


def open_store(where: Path | str) -> tuple[Any, str]:
    """Return the file system of an address, or of a path that has one, and the key there.

    Raises:
        ConfigError: the scheme is unknown, or its package is not installed.
    """
    address = where if isinstance(where, str) else address_of(where)
    try:
        import fsspec

        return cast(Any, fsspec).url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError) as error:  # no package, or an unknown scheme
        raise ConfigError(
            f"{address} cannot be opened ({error}); pip install 'phalanx-train[objects]', or the "
            "package of fsspec for this store"
        ) from error


def ask(
    call: str,
    files: Any,
    key: str,
    *args: Any,
    num_bytes: int = 0,
    partial: Path | None = None,
    **options: Any,
) -> Any:
    """Call a method of a file system on a key, for at most the time of a request.

    A download into the file `partial` may take longer while the file grows.
    """
    if files.async_impl:
        work = getattr(files, f"_{call}")(key, *args, **options)
        done = asyncio.run_coroutine_threadsafe(work, files.loop)
    else:
        done = Future[Any]()
        done.set_running_or_notify_cancel()  # so that a request that hangs may end later

        def run() -> None:
            try:
                done.set_result(getattr(files, call)(key, *args, **options))
            except BaseException as error:
                done.set_exception(error)

        # A daemon, because a request that hangs would keep the process from ending.
        threading.Thread(target=run, daemon=True).start()
    limit_s, size, before = REQUEST_S * (1 + num_bytes / PART_BYTES), 0, -1
    while not wait([done], limit_s).done:
        before, size = size, partial.stat().st_size if partial and partial.exists() else -1
        if size <= before:
            done.cancel()
            raise TimeoutError(f"no byte in {limit_s:.0f} s")
    return done.result()


def repeated(work: Callable[[], T], doing: str, where: str | None) -> T:
    """Return what `work` returns; repeat it after each of PAUSES_S while it fails.

    Raises:
        FileNotFoundError, FileExistsError: as `work` raised, at once.
        StoreError: the store refused the request, or failed it each time.
    """
    begin_s = time.monotonic()
    for pause_s in (*PAUSES_S, None):
        try:
            return work()
        except (FileNotFoundError, FileExistsError, ConfigError):
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            refused = (PermissionError, NotImplementedError, ValueError, TypeError)
            if isinstance(error, refused) or "Credentials" in type(error).__name__:
                raise StoreError(errno.EACCES, f"cannot {doing}: {reason}", where) from error
            if pause_s is None:
                times, took_s = len(PAUSES_S) + 1, time.monotonic() - begin_s
                words = f"cannot {doing}: tried {times} times in {took_s:.0f} s, at last {reason}"
                raise StoreError(errno.EIO, words, where) from error
            time.sleep(pause_s * random.uniform(0.5, 1.0))
    raise AssertionError("the last pause is None")


def get(path: Path, begin: int = 0, end: int | None = None, sha256: str = "") -> bytes:
    """Return the bytes of an object from `begin` to `end`; read them again if they differ.

    Raises:
        FileNotFoundError: there is none.
        StoreError: the store failed each time.
    """

    def read() -> bytes:
        if end is None:
            return ask("cat_file", *open_store(path))
        content = ask("cat_file", *open_store(path), start=begin, end=end, num_bytes=end - begin)
        content = content if len(content) <= end - begin else content[begin:end]  # without ranges
        if sha256 and hashlib.sha256(content).hexdigest() != sha256:
            raise OSError(f"damaged: bytes {begin} to {end} have another sha256")
        return content

    return repeated(read, "read", address_of(path))


def size_of(path: Path) -> int:
    """Return the size of an object in bytes; for the errors see `get`."""
    return repeated(lambda: ask("info", *open_store(path))["size"], "read", address_of(path))


def put(path: Path, content: bytes, *, is_new: bool = False) -> None:
    """Write an object whole, with `is_new` only if there is none, which the store decides.

    Raises:
        FileExistsError: `is_new` is set, and another content is there.
        StoreError: the store failed each time.
    """

    def write() -> None:
        options: dict[str, Any] = {"mode": "create"} if is_new else {}
        try:
            ask("pipe_file", *open_store(path), content, num_bytes=len(content), **options)
        except OSError:
            # The answer to an earlier request may be lost, and stores name the conflict in their
            # own ways: the content that is there shows whose request came first.
            with suppress(FileNotFoundError):
                if is_new and ask("cat_file", *open_store(path)) != content:
                    raise FileExistsError(errno.EEXIST, "exists", address_of(path)) from None
                if is_new:
                    return
            raise

    _written(write, path)


def stream(path: Path, chunks: Callable[[], Iterable[memoryview]]) -> None:
    """Write an object as a stream, which is invisible until its end; call `chunks` for each try.

    Raises:
        StoreError: the store failed each time.
        Exception: of `chunks`, without a further try.
    """
    stopped: list[Exception] = []

    def write() -> None:
        files, key = open_store(path)
        file, source = files.open(key, "wb", block_size=PART_BYTES), iter(chunks())
        try:
            while True:
                try:
                    chunk = next(source, None)
                except Exception as error:
                    stopped.append(error)
                    break
                if chunk is None:
                    return file.close()
                file.write(chunk)
        finally:
            if not file.closed:  # `close` would publish the part that is written
                with suppress(Exception):
                    file.discard()
                    file.closed = True

    _written(write, path)
    if stopped:
        raise stopped[0]


def _written(write: Callable[[], None], path: Path) -> None:
    if str(address_of(path)).startswith("http"):
        raise StoreError(errno.EROFS, "http addresses can only be read", address_of(path))
    try:
        repeated(write, "write", address_of(path))
    except FileNotFoundError as error:
        raise StoreError(errno.ENOENT, f"cannot write: {error}", address_of(path)) from error


def listed(folder: Path) -> dict[Path, Mapping[str, Any]]:
    """Return the objects in a folder and below, by path, with what the store says of each."""
    try:
        there = repeated(
            lambda: ask("find", *open_store(folder), detail=True), "list", address_of(folder)
        )
    except FileNotFoundError:
        return {}
    start = open_store(folder)[1].strip("/") + "/"
    paths = {folder / name.strip("/").removeprefix(start): about for name, about in there.items()}
    # A name such as a/../../b would lead out of the folder on this host.
    return {path: about for path, about in paths.items() if ".." not in path.parts}


def remove(paths: Iterable[Path]) -> None:
    """Remove objects, and their files on this host; some may be gone.

    Raises:
        StoreError: the store failed each time.
    """
    for path in paths:
        with suppress(FileNotFoundError):
            repeated(
                lambda path=path: ask("rm_file", *open_store(path)), "remove", address_of(path)
            )
        path.unlink(missing_ok=True)


def modified_s(about: Mapping[str, Any]) -> float:
    """Return when an object was written, in seconds since 1970; now if the store does not say."""
    times = [about.get(key) for key in ("LastModified", "mtime", "created", "updated")]
    known = [each for each in times if isinstance(each, datetime)]
    return (known or [datetime.now(UTC)])[0].timestamp()


def fetch(path: Path) -> Path:
    """Make the file of an address the same as its object, or remove it; return `path`.

    Raises:
        StoreError: the store failed each time.
    """
    if address_of(path) is not None:
        try:
            content = get(path)
        except (FileNotFoundError, IsADirectoryError):
            path.unlink(missing_ok=True)
            return path
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
    return path


def refresh(folder: Path, name: str) -> None:
    """Make the files FOLDER/*/`name` the same as the objects, if the folder has an address."""
    if address_of(folder) is None:
        return
    objects = listed(folder)
    paths = [path for path in objects if path.name == name and path.parent.parent == folder]
    for path in paths:
        if not path.exists() or _SEEN.get(path) != str(objects[path]):
            fetch(path)
            _SEEN[path] = str(objects[path])
    for path in {*folder.glob(f"*/{name}")}.difference(paths):
        path.unlink(missing_ok=True)


_SEEN: Final = dict[Path, str]()
"""What the store said of an object when it was fetched."""


def fetch_run(run: Path) -> None:
    """Fetch the records and settings of a run, where the files here are older."""
    for path, about in listed(run).items() if address_of(run) is not None else ():
        when_s = modified_s(about)
        is_older = not path.exists() or path.stat().st_mtime < when_s
        if is_older and path.relative_to(run).parts[0] != "checkpoints":
            os.utime(fetch(path), (when_s, when_s))


def upload_run(run: Path) -> None:
    """Upload the records and settings of a run that have changed since the last upload.

    Raises:
        StoreError: the store failed each time.
    """
    for path in sorted(run.rglob("*")) if address_of(run) is not None else ():
        is_record = path.relative_to(run).parts[0] != "checkpoints" and path.suffix != PARTIAL
        if is_record and path.is_file() and _SENT.get(path) != (state := path.stat())[6:9]:
            put(path, path.read_bytes())
            _SENT[path] = state[6:9]


_SENT: Final = dict[Path, Any]()
"""Size and times of a file when it was uploaded."""
