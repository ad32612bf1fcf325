"""Sources at an address: copied once, again where they changed, by a bounded number of requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from phalanx import object_store
from phalanx.config import CorpusConfig
from phalanx.data.addresses import check_data, local_path
from phalanx.data.survey import no_progress
from phalanx.data.tokens import prepare
from phalanx.errors import ConfigError, DataError

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


@pytest.fixture
def copies(memory: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are copied, from here on."""
    paths: list[str] = []
    get = type(memory).get_file

    def count(fs: Any, path: str, local: str) -> None:
        paths.append(path.rpartition("/")[2])
        get(fs, path, local)

    monkeypatch.setattr(type(memory), "get_file", count)
    return paths


def prepared(data: str, folder: Path, **changes: Any) -> Any:
    corpus = CorpusConfig(cache=str(folder / "cache"), validation=0.0)
    return prepare(data, corpus, model_vocab_size=300, **changes)


def test_an_address_has_the_tokens_of_the_same_folder(
    memory: Any, copies: list[str], tmp_path: Path
) -> None:
    (tmp_path / "web" / "b").mkdir(parents=True)
    for name in ("b/x.txt", "a.jsonl", "c.rst", "d.txt"):
        text = f'{{"text": "the text of {name}"}}\n' * 9
        (tmp_path / "web" / name).write_text(text)
        memory.pipe(f"/bucket/web/{name}", text.encode())
    memory.pipe("/bucket/web/.hidden.txt", b"hidden")
    here = prepared(str(tmp_path / "web"), tmp_path)
    there = prepared("memory://bucket/web/", tmp_path)
    assert there.train.map().tolist() == here.train.map().tolist()
    assert (there.text_digest, there.left_out) == (here.text_digest, here.left_out)
    assert sorted(copies) == ["a.jsonl", "d.txt", "x.txt"]
    assert prepared("memory://bucket/web/", tmp_path) == there and len(copies) == 3
    memory.pipe("/bucket/web/d.txt", b"new")
    memory.rm("/bucket/web/a.jsonl")
    follower = prepared("memory://bucket/web/", tmp_path, is_follower=True)
    assert follower == there and len(copies) == 3
    assert prepared("memory://bucket/web/", tmp_path).num_documents == 2
    assert copies[3:] == ["d.txt"]
    assert prepared("memory://bucket/web/d.txt", tmp_path).num_bytes == 3
    assert prepared("memory://bucket/*/d.*", tmp_path).num_bytes == 3
    with pytest.raises(DataError, match="memory://bucket/none has no file"):
        prepared("memory://bucket/none", tmp_path)


def test_requests_that_fail_or_stall_are_repeated(
    memory: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(object_store, "PAUSES_S", [0.0] * 4)
    monkeypatch.setattr(object_store, "REQUEST_S", 0.5)
    memory.pipe("/bucket/a.txt", b"whole")
    get, faults, calls = type(memory).get_file, ["raise", "stall", "short", "slow"], []

    def fail(fs: Any, path: str, local: str) -> None:
        calls.append(local)
        fault = faults.pop(0) if faults else None
        if fault == "raise":
            raise OSError("reset by peer")
        if fault == "stall":
            threading.Event().wait(10)
        if fault == "slow":  # each byte within the time of a request, all of them over it
            with Path(local).open("ab", buffering=0) as file:
                for letter in b"whole":
                    threading.Event().wait(0.3)
                    file.write(bytes([letter]))
            return
        get(fs, path, local)
        if fault == "short":
            Path(local).write_bytes(b"who")

    monkeypatch.setattr(type(memory), "get_file", fail)
    path = Path(str(local_path("memory://bucket/a.txt", tmp_path, no_progress)))
    assert path.read_bytes() == b"whole" and not faults and len(calls) == 4
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]
    memory.pipe("/bucket/a.txt", b"other")
    faults[:] = ["raise"] * 9
    with pytest.raises(DataError, match=r"\(a.txt\): cannot read: tried 5 times .*reset by peer"):
        local_path("memory://bucket/a.txt", tmp_path, no_progress)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"s3://b/web cannot be opened \(.*s3fs"):
        check_data("0.5*s3://b/web,0.5*memory://b/code")
    with pytest.raises(ConfigError, match="Protocol not known: nowhere"):
        check_data("nowhere://b/web")
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"pip install 'phalanx-train\[objects\]'"):
        check_data("memory://b/web")


class _Flaky(BaseHTTPRequestHandler):
    num_gets = 0

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()

    def do_GET(self) -> None:
        type(self).num_gets += 1
        self.do_HEAD()
        if type(self).num_gets > 2:
            self.wfile.write(b"text")  # else the connection ends early

    @override
    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.mark.slow
def test_http_is_read_and_a_broken_transfer_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(object_store, "PAUSES_S", [0.0] * 4)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Flaky) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/a.txt?version=3"
        path = Path(str(local_path(address, tmp_path, no_progress)))
        server.shutdown()
    assert (path.name, path.read_bytes(), _Flaky.num_gets) == ("a.txt", b"text", 3)


@pytest.mark.slow
def test_s3_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moto, s3fs = pytest.importorskip("moto.server"), pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    url = "http://{}:{}".format(*server.get_host_and_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    fs = s3fs.S3FileSystem()
    fs.mkdir("bucket")
    for name in ("a.txt", "b/c.txt"):
        fs.pipe(f"bucket/web/{name}", f"text of {name}".encode())
    files = prepared("s3://bucket/web", tmp_path)
    assert files.num_documents == 2
    fs.pipe("bucket/web/a.txt", b"TEXT of a.txt")
    assert prepared("s3://bucket/web", tmp_path).text_digest != files.text_digest
    server.stop()
