"""DataParallel with a main device, as it is taught, counted beside `dp`.

python benchmarks/data_parallel/main_device.py [--devices 2 4] [--out FILE.json]

torch.nn.DataParallel is one process with a thread for each device; the first device is the main
one. Here a device is a thread of its own, and all that goes from one to another goes through
`send`, which copies and counts. A step is

    1  copy the model      main -> each other: the weights
    2  split the batch     main -> each other: its rows of tokens
    3  forward             each on its rows
    4  gather the outputs  each other -> main: its logits
    5  loss                main, over all rows
    6  backward            main -> each other: the gradient of its logits; then each on its rows
    7  reduce              each other -> main: the gradients of all weights; main adds them up
    8  update              main; the others' copies are thrown away and made anew by the next step

Memory is what operators made in the thread of a device, counted by a dispatch mode. Nothing is
timed: threads of one Python process wait for one another's interpreter lock.
"""

from __future__ import annotations

import argparse
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import write_result

SHAPE = ModelShape(
    vocab_size=1024, num_layers=4, hidden=128, num_heads=4, num_kv_heads=4, head_dim=32, ffn=384,
    max_seq_len=64, tied=True,
)  # fmt: skip
NUM_ROWS = 8
MIB = 2**20
T = TypeVar("T")
TURN = threading.Lock()
"""Devices compute in turn: PyTorch's dispatch modes are not safe in two threads at once."""


@dataclass(frozen=True)
class Counts:
    """Bytes of one device in one step; `kept` is what it holds when the step has ended."""

    sent: float
    received: float
    kept: int
    peak: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of what operators make in this thread, until it is freed in any."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()
        self._lock = threading.RLock()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
        with self._lock:
            for storage in (x.untyped_storage() for x in _tensors(out)):
                if id(storage) not in inputs | self._known:
                    self._known.add(id(storage))
                    self.held += storage.nbytes()
                    weakref.finalize(storage, self._free, id(storage), storage.nbytes())
            self.peak = max(self.peak, self.held)
        return out

    def _free(self, key: int, num_bytes: int) -> None:
        with self._lock:
            self._known.discard(key)
            self.held -= num_bytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Device:
    """A thread that plays a device, and what it holds, sends and receives."""

    def __init__(self) -> None:
        self.memory, self.sent, self.received = LiveBytes(), 0, 0
        self._thread = ThreadPoolExecutor(1)

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in this device's thread."""

        def seen() -> T:
            with TURN, self.memory:
                return function()

        return self._thread.submit(seen)

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` in this device's thread, and wait."""
        return self.start(function).result()


def send(source: Device, target: Device, tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` that lies on `target`."""
    if source is target:
        return tensor.detach()
    source.sent += tensor.nbytes
    target.received += tensor.nbytes
    return target.run(lambda: tensor.detach().clone())


def make_model(dtype: torch.dtype = torch.float32, shape: ModelShape = SHAPE) -> Decoder:
    model = Decoder(shape)
    model.initialize(0)
    return model.to(dtype)


def copy_of(model: Decoder, weights: dict[str, Tensor]) -> nn.Module:
    """Return a module like `model` around other weights."""
    with torch.device("meta"):
        replica = Decoder(model.shape)
    replica.load_state_dict(weights, assign=True)
    return replica


def step(
    devices: Sequence[Device],
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    tokens_BT: Tensor,
    labels_BT: Tensor,
) -> Tensor:
    """Take a step of DataParallel; the numbers are those of the list above. Return the loss."""
    main = devices[0]
    weights = dict(model.named_parameters())
    replicas: list[nn.Module] = [model]
    for device in devices[1:]:  # 1
        copies = {name: send(main, device, weight) for name, weight in weights.items()}
        replicas.append(copy_of(model, copies))
    rows = [send(main, d, r) for d, r in zip(devices, tokens_BT.chunk(len(devices)), strict=True)]
    started = [  # 3, after 2
        device.start(lambda replica=replica, part=part: replica(part))
        for device, replica, part in zip(devices, replicas, rows, strict=True)
    ]
    outputs = [future.result() for future in started]
    gathered = [send(d, main, y) for d, y in zip(devices, outputs, strict=True)]  # 4

    def loss_and_gradients() -> tuple[Tensor, tuple[Tensor, ...]]:  # 5
        logits = torch.cat(gathered).requires_grad_()
        gathered.clear()
        loss = mean_loss(logits, labels_BT, labels_BT.numel())
        loss.backward()
        assert logits.grad is not None
        return loss.detach(), logits.grad.chunk(len(devices))

    loss, d_outputs = main.run(loss_and_gradients)
    d_parts = [send(main, d, part) for d, part in zip(devices, d_outputs, strict=True)]  # 6
    started = [
        device.start(lambda y=y, d_y=d_y: y.backward(d_y))
        for device, y, d_y in zip(devices, outputs, d_parts, strict=True)
    ]
    for future in started:
        future.result()
    for device, replica in zip(devices[1:], replicas[1:], strict=True):  # 7
        for name, parameter in replica.named_parameters():
            gradient, total = parameter.grad, weights[name].grad
            assert gradient is not None and total is not None
            received = send(device, main, gradient)
            main.run(lambda total=total, received=received: total.add_(received))
    main.run(optimizer.step)  # 8
    return loss


def mean_loss(logits_BTV: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
    logits, labels = logits_BTV.flatten(0, 1), labels_BT.flatten()
    return F.cross_entropy(logits, labels, reduction="sum") / num_tokens


def batch() -> tuple[Tensor, Tensor]:
    tokens_BT = torch.arange(NUM_ROWS * SHAPE.max_seq_len).view(NUM_ROWS, -1) * 7 % 1021
    return tokens_BT, tokens_BT.roll(-1, 1)


def with_main_device(
    num_devices: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Counts], dict[str, Tensor]]:
    """Return what each device did in a step, and the gradients on the main one."""
    devices = [Device() for _ in range(num_devices)]
    main = devices[0]
    model = main.run(lambda: make_model(dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens_BT, labels_BT = (main.run(x.clone) for x in batch())
    step(devices, model, optimizer, tokens_BT, labels_BT)
    counts = [Counts(d.sent, d.received, d.memory.held, d.memory.peak) for d in devices]
    return counts, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def with_dp(dtype: torch.dtype = torch.float32) -> tuple[Counts, dict[str, Tensor]]:
    """Return what this rank of dp did in the same step, and its gradients."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    strategy = Strategy.parse(f"dp{num_ranks}")
    comm = Ranks(strategy)
    memory, ledger = LiveBytes(), Ledger(comm)
    with memory:
        model = make_model(dtype)
        reducer = Plan(strategy, model).build(comm).reducer
        optimizer = torch.optim.AdamW(model.parameters())
        tokens_BT, labels_BT = (x.chunk(num_ranks)[rank].clone() for x in batch())
        with ledger:
            logits = model(tokens_BT)
            reducer.before_backward(reducer.parameters)
            mean_loss(logits, labels_BT, labels_BT.numel() * num_ranks).backward()
            reducer.finish()
        del logits
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sent = sum(entry.sent_bytes for entry in ledger.entries())
    return Counts(sent, sent, memory.held, memory.peak), gradients


def largest_gap(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of gradients, relative to the largest gradient."""
    gap = max(float((ours[name] - expected[name]).abs().max()) for name in expected)
    return gap / max(float(gradient.abs().max()) for gradient in expected.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print("| devices | form | device | sends MiB | receives MiB | keeps MiB | holds at most MiB |")
    print("|---:|---|---|---:|---:|---:|---:|")
    for num_devices in args.devices:
        counts, gradients = with_main_device(num_devices)
        ranks = run_ranks(with_dp, num_devices, threads=1)
        error = largest_gap(ranks[0][1], gradients)
        named = {"main": counts[0], "each other": counts[-1], "each": ranks[0][0]}
        for device, of in named.items():
            form = "`dp`" if device == "each" else "main device"
            where = {"devices": num_devices, "form": form, "device": device}
            rows.append({**where, **vars(of), "gradient_error": error})
            cells = " | ".join(f"{value / MIB:.2f}" for value in vars(of).values())
            print(f"| {num_devices} | {form} | {device} | {cells} |", flush=True)
        print(f"{num_devices} devices: gradients differ by {error:.1e} at most", file=sys.stderr)
    size_bytes = sum(p.nbytes for p in make_model().parameters())
    write_result(args.out, {"parameter_bytes": size_bytes, "rows": rows})


if __name__ == "__main__":
    main()
