"""Record what each rank calls over gloo, and hold it against the rules of NCCL (nccl_rules.py).

gloo forgives what NCCL does not: it buffers sends, runs the calls of a group side by side, tells
messages apart by tags and reduces tensors that are not contiguous. So a job runs over gloo inside
`with Trace() as trace:`, and `trace.check()` says what NCCL would make of it. A trace sees every
collective of its thread, whoever calls it, and which of them is waited for when. An exchange of
comm.exchange counts as the one collective that NCCL runs in its place.

NCCL takes tensors of the device alone. Here all are on the CPU, so `HostTensors` marks those that a
GPU job would have on the host: what torch makes without being told a device, and what is brought
there, until it is sent to a device.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from nccl_rules import Broken, Call, Event, Message, Wait, check
from phalanx.comm import calls, transfer
from phalanx.comm.together import gather_objects
from phalanx.comm.watch import Watch
from phalanx.debug.fingerprint import Fingerprint, find_places, take

DTYPES = {
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
"""What NCCL knows and gloo, too."""

REDUCTIONS = ("", "sum", "product", "min", "max", "avg")
"""NCCL knows nothing of bits."""

LAID_OUT = ("all_gather", "reduce_scatter")
"""Calls of shared memory on tensors as they lie; for a process group exchange.py copies them."""


CREATES = {
    "tensor", "as_tensor", "from_numpy", "frombuffer", "empty", "zeros", "ones", "full", "arange",
    "linspace", "eye", "rand", "randn", "randint", "randperm",
}  # fmt: skip
"""Functions of torch whose result is on the host if they are told no device."""

_MARK = "is_on_the_host"

_WITHOUT_TENSORS = (bool, int, float, str, torch.Size, torch.dtype, torch.device)


def _is_on_host(tensor: Any) -> bool:
    return getattr(tensor, _MARK, False)


class HostTensors(TorchFunctionMode):
    """Marks the tensors that are on the host whatever the job computes on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, result = getattr(func, "__name__", ""), func(*args, **kwargs)
        if name == "cpu":  # which a GPU job would copy
            result = result.view(result.shape)
        made = _tensors(result)
        if made and name != "to":  # what is written in place stays where it is
            made = [each for each in made if not any(each is given for given in args)]
        is_here = bool(made) and self._is_of_host(name, args, kwargs)
        for each in made:
            if is_here is not _is_on_host(each):
                setattr(each, _MARK, is_here)
        return result

    def _is_of_host(self, name: str, args: Any, kwargs: Any) -> bool:
        if name == "cpu":
            return True
        given = [*args[1:], *kwargs.values()] if name == "to" else [kwargs.get("device")]
        if any(isinstance(each, torch.device | str) for each in given):
            return False
        tensors = [*_tensors(args), *_tensors(kwargs)]
        if name == "tensor" or (name in CREATES and not tensors):
            return True
        return bool(tensors) and all(map(_is_on_host, tensors))


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value; most values are one or hold none, and are told at once."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or isinstance(value, _WITHOUT_TENSORS):
        return []
    if type(value) in (tuple, list):
        return [tensor for each in value for tensor in _tensors(each)]
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


class _Awaited(dist.Work):
    """A work of gloo's that notes when it is waited for."""

    def __init__(self, work: dist.Work, trace: Trace, number: int) -> None:
        super().__init__()
        self._work, self._trace, self._number = work, trace, number

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        self._trace.note_wait(self._number)
        return self._work.wait()

    def get_future(self) -> Any:
        self._trace.note_wait(self._number)
        return self._work.get_future()


class Trace(Watch):
    """Notes the calls that run inside `with Trace() as trace:`; every rank enters one.

    Attributes:
        events: what was noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._numbers = itertools.count()
        self._works: list[_Awaited] = []
        self._batch: FrameType | None = None

    def check(self) -> None:
        """Hold the calls of all ranks against the rules of NCCL; every rank calls this.

        Raises:
            Broken: they break one.
        """
        check(gather_objects(self.events))

    def note_wait(self, number: int) -> None:
        """Note that a call is waited for."""
        self.events.append(Wait(number))

    @override
    def run_call(self, call: calls.Call, run: Callable[[], Any]) -> Any:
        """Note the collective, and run it.

        Raises:
            Broken: NCCL knows no such call.
        """
        if len(call.ranks) == 1:
            return run()
        batch = _batch()
        if batch is not None and batch is self._batch:
            last = self.events[-1]
            assert isinstance(last, Call)
            number = last.number
            messages = last.messages + _noted(number, call).messages
            self.events[-1] = dataclasses.replace(last, messages=messages)
        else:
            number = next(self._numbers)
            self.events.append(_noted(number, call))
        self._batch = batch
        result = run()
        if isinstance(result, transfer.Transfer):
            return transfer.Transfer([_Awaited(result, self, number)])
        if "process_group" in call.arguments:
            return self._watched(result, number)
        self.note_wait(number)  # whoever reads a functional result waits for it; here, at once
        return result

    def _watched(self, result: Any, number: int) -> Any:
        """Return the result of an operator with its work, if it has one, watched."""
        if isinstance(result, tuple):
            return tuple(self._watched(each, number) for each in result)
        if not isinstance(result, torch.ScriptObject):
            return result
        work = _Awaited(dist.Work.unbox(result), self, number)
        self._works.append(work)  # what is boxed does not hold the object of Python
        return work.boxed()


def traced(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function does on a rank of a job, all of whose calls NCCL would run.

    Every rank calls this.

    Raises:
        Broken: NCCL would not.
    """
    with Trace() as trace, HostTensors():
        result = function(*args)
    trace.check()
    return result


def _batch() -> FrameType | None:
    """Return the call of `batch_isend_irecv` under way, which gloo takes message by message."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not dist.batch_isend_irecv.__code__:
        frame = frame.f_back
    return frame


def _noted(number: int, call: calls.Call) -> Call:
    """Return a call in the words of the rules.

    Raises:
        Broken: NCCL knows no such call.
    """
    places, _ = find_places(inspect.currentframe())
    what = take(call, tensor="", places=places, phase="")
    group, rank = call.group.group_name, dist.get_rank()
    if call.op != "barrier":
        _refuse_tensors(call, what)
    if call.op not in ("send", "recv"):
        return Call(number, group, call.ranks, what)
    is_send = call.op == "send"
    peer = call.ranks[call.arguments["dst" if is_send else "src"]]
    if peer == rank:
        raise Broken(f"rank {rank} sends to itself: {what} at {' from '.join(places)}")
    return Call(number, group, call.ranks, what, (Message(is_send, peer, what),))


def _refuse_tensors(call: calls.Call, what: Fingerprint) -> None:
    why = ""
    if call.op == "recv_any_source":
        why = "NCCL receives from a rank that is named"
    if what.reduction not in REDUCTIONS:
        why = "NCCL knows no such reduction"
    for tensor in _flat([*call.inputs, *call.outputs]):
        if _is_on_host(tensor):
            why = "NCCL takes no tensor of the host"
        elif tensor.layout != torch.strided:
            why = "NCCL knows no sparse tensor"
        elif tensor.dtype not in DTYPES:
            why = f"NCCL knows no {tensor.dtype}"
        elif not (tensor.is_contiguous() or (call.op in LAID_OUT and call.arguments.get("engine"))):
            why = f"NCCL moves the bytes as they lie, and the strides are {tensor.stride()}"
    if why:
        raise Broken(f"{why}: {what} at {' from '.join(what.places)}")


def _flat(tensors: list[Any]) -> list[torch.Tensor]:
    return [one for each in tensors for one in (each if isinstance(each, list) else [each])]
