"""A training script that fails in the way that its first word names; by its second on one rank."""

import ctypes
import errno
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

import phalanx
from phalanx.checkpoint import tensor_file
from phalanx.launch.heartbeat import PULSE
from phalanx.train import pace
from phalanx.train import run as runs
from phalanx.train.step import Step


class Endpoint(RuntimeError):
    def __init__(self, endpoint: str, error: str) -> None:
        super().__init__(f"could not connect to {endpoint}: {error}")


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if way == "an error of a dataset" and index == 9:
            raise LookupError("row 9")
        if way == "a worker's own network" and index == 9:
            raise Endpoint("http://a", "Connection refused")
        if way == "a worker that dies" and index == 9:
            os._exit(3)
        if way == "rows of unlike lengths":
            return torch.zeros(index % 3 + 1), torch.zeros(1)
        return torch.full((4,), float(index)), torch.zeros(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if way == "an error in forward":
            raise ValueError("in forward")
        return self.layer(x)


def deeper(depth: int) -> int:
    return deeper(depth + 1) + 1


def fail_with_gradient(gradient: Tensor) -> Tensor:
    raise ValueError("in backward")


def fail(run: Any, model: Any, loss: Any) -> None:
    """Fail between two steps, on the ranks that are to."""
    if way == "an error":
        raise ValueError("an error")
    if way == "a network's words":
        raise RuntimeError("websocket: Connection reset, Socket closed")
    if way == "a wordless error":
        raise Wordless
    if way == "a group of errors":
        raise ExceptionGroup("two", [ValueError("one"), KeyError("two")])
    if way == "a chain of errors":
        raise ValueError("second") from OSError(28, "No space left on device")
    if way == "an error of 50 MB":
        raise ValueError("x" * 50_000_000)
    if way == "a broken pipe of its own":
        raise BrokenPipeError(32, "Broken pipe")
    if way == "an assertion":
        raise AssertionError
    if way == "no memory":
        raise MemoryError
    if way == "no memory in torch":
        torch.empty(1 << 60)
    if way == "too deep":
        deeper(0)
    if way == "no module":
        import no_such_module  # pyright: ignore  # noqa: F401
    if way == "bad syntax":
        exec("1 +")
    if way == "not a stop":
        raise StopIteration
    if way == "no file":
        Path("/no/such/file").read_text()
    if way == "a shape":
        _ = torch.ones(2) @ torch.ones(3)
    if way == "surrogates":
        raise ValueError("\udcff")
    if way == "a closed error output":
        sys.stderr.close()
        raise ValueError("into nothing")
    if way == "sys.exit":
        sys.exit(3)
    if way == "a text":
        sys.exit("no data")
    if way == "raise SystemExit":
        raise SystemExit(4)
    if way == "os._exit":
        os._exit(5)
    if way == "Ctrl-C of its own":
        raise KeyboardInterrupt
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "aborted":
        os.abort()
    if way == "a bad address":
        ctypes.string_at(0)
    if way == "out of CPU time":
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
        while True:
            pass
    if way == "no model":
        run.prepare(3)
    if way == "a count by position":
        run.backward(model(torch.zeros(1, 4)).sum(), 1)
    if way == "a model prepared twice":
        run.prepare(model)
    if way == "a loss that is no number":
        assert torch.isfinite(loss * float("nan"))
    if way == "nowhere to save":
        run.save("/proc/here")
    if way == "a broken checkpoint":
        folder = Path(sys.argv[3])
        run.save(folder)
        if run.is_first:
            for path in folder.rglob("*.safetensors"):
                path.write_bytes(b"broken")
        run.sum(1)
        run.resume(folder)


def main() -> None:
    if way == "an error before the job":
        raise ValueError("before")
    if way == "a wrong strategy":
        phalanx.init("pp2")
    if way == "a wrong setting":
        phalanx.init(timeout_s=-1)
    run = phalanx.init()
    if way == "an error before the model":
        raise ValueError("before the model")
    data: Any = Rows()
    if way == "no rows":
        data = TensorDataset(torch.zeros(0, 4), torch.zeros(0, 1))
    workers = 1 if "worker" in way else 0
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, 4, num_workers=workers)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    if way == "an error in backward":
        model.layer.weight.register_hook(fail_with_gradient)
    for _ in range(2):
        loss: Any = None
        for x, y in loader:
            loss = run.backward(sum_of_rows=mse_loss(model(x), y, reduction="sum"), count=len(y))
            optimizer.step()
            optimizer.zero_grad()
        if loss is None:
            raise ValueError("no rows at all")
        if sys.argv[2] == "all" or not run.is_first:
            fail(run, model, loss)


class Loss:
    """Of a job for the trainer, in which it fails on all ranks in the third step."""

    def __init__(self, way: str) -> None:
        self.way = way

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        global way
        x, y = microbatch
        loss = mse_loss(model(x), y, reduction="sum")
        if step == 2:
            way = self.way
            if way == "a loss that is no number":
                return loss * float("nan")
            fail(None, model, loss)
        return loss

    def num_valid(self, microbatch: Any) -> int:
        return len(microbatch[0])


def job() -> phalanx.Trainer:
    return phalanx.Trainer(Model, Loss(os.environ["WAY"]), Rows(), batch_size=4)


_train_rank = runs.train_rank
"""That of the package, which a test puts the next in the place of."""


def train_rank(job: Any, *extras: Any) -> Any:
    """Train a decoder on this rank, and fail as `fail_later` does."""
    fail_later()
    return _train_rank(job, *extras)


def fail_later() -> None:
    """Let this process fail in the third step of a decoder, in the way that WAY names."""
    global way
    way, one = os.environ["WAY"], os.environ.get("WHICH") == "one"
    take = Step.__call__

    def take_or_fail(self: Step, microbatches: Any) -> Any:
        if self.steps_done == 2 and not (one and dist.get_rank() == 0):
            if way == "a loss that is no number":
                next(self.model.parameters()).detach().fill_(float("nan"))
            elif way == "a full disk":
                tensor_file.write = fill_disk
            elif way in ("Ctrl-C", "SIGTERM", "SIGHUP"):
                parent = multiprocessing.parent_process()
                signum = {"Ctrl-C": signal.SIGINT}.get(way) or signal.Signals[way]
                if parent is None or dist.get_rank() == 0:
                    os.kill(os.getpid() if parent is None else parent.pid or 0, signum)
                while not PULSE.stop_signal:
                    time.sleep(0.01)
            else:
                fail(None, self.model, None)
        return take(self, microbatches)

    Step.__call__ = take_or_fail
    pace.COMPARE_S = 0.0  # else so short a run may be done before its ranks compare


def fill_disk(path: Path, *args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


way = sys.argv[1] if __name__ == "__main__" else ""
if __name__ == "__main__":
    main()
