"""Kill runs that save to an object store; read all the time; count what was whole, and what failed.

    server    moto's S3, which answers some requests with an error, late, or never
    writer    two ranks that save without end, keep two checkpoints, and replace some; killed
    reader    loads the latest checkpoint over and over meanwhile, and after each kill

Each weight of a checkpoint has the number of its step, so a reader that mixes two saves, or reads a
part of one, finds two numbers, a missing object or another checksum. After each kill the last
checkpoint that the writer has published must be there, and the next writer continues from it.

    python benchmarks/hugging_face/object_store.py [--kills 40] [--faults 0.05] [--json FILE]

needs: pip install 's3fs' 'moto[server]'
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

BUCKET = "bucket"
SLOW_S = 20.0
"""Delay of an answer that comes too late: s3fs waits 15 s for a byte."""


def serve(port: int, part: float, seed: int) -> None:
    """Serve S3; a `part` of the requests gets an error, no answer, a late one, or is lost."""
    import moto.server as server
    from werkzeug.serving import run_simple

    app = server.DomainDispatcherApplication(server.create_backend_app)
    draw, counts, lock = random.Random(seed), Counter[str](), threading.Lock()

    def faulty(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/faults":
            start("200 OK", [])
            return [json.dumps(counts).encode()]
        with lock:
            fault = None
            if draw.random() < part:
                fault = draw.choices(["error", "no answer", "no request", "late"], [15, 15, 15, 1])[
                    0
                ]
            counts["requests"] += 1
            counts[fault or "answered"] += 1
        if fault == "error":
            start("503 Slow Down", [("Content-Type", "text/xml")])
            return [b"<Error><Code>InternalError</Code><Message>try again</Message></Error>"]
        if fault == "late":
            time.sleep(SLOW_S)
        answer = [] if fault == "no request" else app(environ, start)
        if fault in ("no request", "no answer"):
            b"".join(answer)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError(fault)
        return answer

    run_simple("127.0.0.1", port, faulty, threaded=True)


def save_without_end(address: str, folder: Path) -> None:
    """Save on each rank, from the latest checkpoint on; note what is published in a file."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from phalanx.checkpoint import manifest, state
    from phalanx.checkpoint.saver import Saver
    from phalanx.object_store import path_of

    run, model, is_first = path_of(address), nn.Linear(512, 256), dist.get_rank() == 0
    optimizer = torch.optim.AdamW(model.parameters())
    done = 0
    if manifest.complete_checkpoints(run):
        state.load(manifest.find(run), model, optimizer)
        done = value_of(model)
    with Saver(run, keep=2) as saver:
        while True:
            is_again = done > 0 and done % 5 == 0 and torch.rand(()).item() < 0.5
            done = first_value(done if is_again else done + 1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(done)
            saver.begin(model, optimizer, about(done, dist.get_world_size()), replaces=True)
            saver.finish()
            if is_first:
                with (folder / "published").open("a") as file:
                    file.write(f"{done}\n")


def first_value(number: int) -> int:
    """Return the first rank's number."""
    from phalanx.comm.together import on_first_rank

    return on_first_rank(lambda: number, "cannot agree")


def about(steps_done: int, num_ranks: int) -> Any:
    """Return the manifest of a save without states."""
    from phalanx.checkpoint.manifest import Manifest

    return Manifest(
        steps_done=steps_done,
        num_steps=steps_done,
        consumed=0,
        num_ranks=num_ranks,
        strategy=f"dp{num_ranks}",
        shape={},
        stream={},
    )


def value_of(model: Any) -> int:
    """Return the number that each weight has; fail if there are several."""
    import torch

    values = set(torch.cat([each.detach().flatten() for each in model.parameters()]).tolist())
    assert len(values) == 1, f"the weights have the numbers {sorted(values)}"
    return int(values.pop())


def read_latest(address: str) -> int:
    """Return the steps of the latest checkpoint; fail if its weights have another number."""
    import torch

    from phalanx.checkpoint import index, manifest
    from phalanx.checkpoint.files import open_tensors, verify
    from phalanx.object_store import path_of

    def read(folder: Path) -> int:
        held = manifest.read(folder)
        verify(folder, held)
        tensors = index.read(folder / held.save, held.files)
        names = [name for name in tensors if name.startswith("model.")]
        values = [
            index.load_full(lambda file: open_tensors(folder, held, file), tensors, name).flatten()
            for name in names
        ]
        (value,) = set(torch.cat(values).tolist())
        assert len(names) == 2 and value == held.steps_done, (names, value, held.steps_done)
        return held.steps_done

    return manifest.read_found(path_of(address), read)


@dataclasses.dataclass
class Reader:
    """Reads the latest checkpoint over and over, in a thread."""

    address: str
    num_read: int = 0
    num_removed: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list[str])
    ends: threading.Event = dataclasses.field(default_factory=threading.Event)

    def run(self) -> None:
        """Read until `ends` is set."""
        latest = 0
        while not self.ends.is_set():
            try:
                step = read_latest(self.address)
                if step < latest:
                    self.wrong.append(f"step {step} after step {latest}")
                latest, self.num_read = step, self.num_read + 1
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                if "each while it was read" in text:  # removed, three times in a row
                    self.num_removed += 1
                elif "no checkpoint in" not in text or latest:
                    self.wrong.append(text)


def wait_for(is_so: Callable[[], bool], limit_s: float) -> None:
    """Poll until the condition holds."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, "the writer has not saved"
        time.sleep(0.01)


def main() -> int:
    """Run the kills; print the counts; return 1 if anything was read that was not whole."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--faults", type=float, default=0.05)
    parser.add_argument("--port", type=int, default=5057)
    parser.add_argument("--json")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--write", nargs=2)
    given = parser.parse_args()
    if given.serve:
        serve(given.port, given.faults, 0)
    if given.write:
        from phalanx.launch.local import run_ranks

        run_ranks(save_without_end, 2, given.write[0], Path(given.write[1]), threads=1)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="object-store-"))
    url = f"http://127.0.0.1:{given.port}"
    os.environ |= {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "a",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(folder / "reader"),
    }
    own = [sys.executable, __file__, "--port", str(given.port), "--faults", str(given.faults)]
    server = subprocess.Popen([*own, "--serve"], stderr=subprocess.DEVNULL)
    try:
        result = kill_writers(given.kills, own, folder, url)
    finally:
        server.kill()
    print(json.dumps(result, indent=1))
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["wrong"] else 0


def unnamed(address: str) -> set[Path]:
    """Return the folders of saves that no manifest names."""
    from phalanx.checkpoint import manifest
    from phalanx.object_store import listed, path_of

    run = path_of(address)
    named = {
        each / manifest.read(each).save for each in manifest.complete_checkpoints(run).values()
    }
    paths = [path for path in listed(run) if path.suffix == ".safetensors"]
    return {path.parent for path in paths}.difference(named)


def kill_writers(num_kills: int, own: list[str], folder: Path, url: str) -> dict[str, Any]:
    """Kill writers at random moments; return the counts."""
    import urllib.request

    from fsspec import filesystem

    def is_up() -> bool:
        try:
            filesystem("s3").mkdir(BUCKET)
        except FileExistsError:
            return True
        except Exception:
            return False
        return True

    wait_for(is_up, 60)
    address, draw, num_saves, num_within = f"s3://{BUCKET}/run", random.Random(0), 0, 0
    left = set[Path]()
    reader, published = Reader(address), folder / "published"
    published.touch()
    thread = threading.Thread(target=reader.run)
    thread.start()
    begin_s = time.monotonic()
    for number in range(num_kills):
        home = os.environ | {"XDG_CACHE_HOME": str(folder / f"writer-{number % 2}")}
        before = len(published.read_text().split())
        writer = subprocess.Popen(
            [*own, "--write", address, str(folder)],
            env=home,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            wait_for(lambda before=before: len(published.read_text().split()) >= before + 2, 400)
            time.sleep(draw.uniform(0, 0.6))
        finally:
            os.killpg(writer.pid, signal.SIGKILL)
            writer.wait()
        steps = [int(line) for line in published.read_text().split()]
        num_saves += len(steps) - before
        last = read_latest(address)
        if last < steps[-1]:
            reader.wrong.append(f"step {last} is the last, after step {steps[-1]} was published")
        unfinished = unnamed(address)
        num_within += bool(unfinished - left)
        left |= unfinished
        print(f"kill {number + 1}: after step {steps[-1]}, reads {reader.num_read}", flush=True)
    reader.ends.set()
    thread.join()
    with urllib.request.urlopen(f"{url}/faults") as answer:
        faults = json.loads(answer.read())
    return {
        "kills": num_kills,
        "kills with objects of an unfinished save or removal left": num_within,
        "saves": num_saves,
        "reads during saves": reader.num_read,
        "reads whose three checkpoints were removed meanwhile": reader.num_removed,
        "wrong": reader.wrong,
        "requests": faults,
        "seconds": round(time.monotonic() - begin_s),
    }


if __name__ == "__main__":
    sys.exit(main())
