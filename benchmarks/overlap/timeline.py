"""What a rank computes and what travels meanwhile, as spans of time."""

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from phalanx.comm import exchange, fsdp
from phalanx.comm.waits import around_waits


class Span(NamedTuple):
    """Something that took time, in seconds of the machine's clock.

    Attributes:
        track: "computes", "waits", "gathers" or "reductions".
    """

    track: str
    name: str
    begin_s: float
    end_s: float


class _Watched(dist.Work):
    """Sends and receives that a thread waits for, so that the moment of their end is known."""

    def __init__(self, works: Sequence[dist.Work | None], note_end: Callable[[], None]) -> None:
        super().__init__()
        self._works = works
        self._note_end = note_end
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        for work in self._works:
            assert work is not None
            work.wait()
        self._note_end()

    def wait(self, timeout: Any = None) -> bool:
        self._thread.join()
        return True


class Timeline:
    """Records the blocks of an FSDP2 model, and the exchanges of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.spans: list[Span] = []
        self._model = model
        self._names: dict[int, str] = {}
        self._open: dict[str, float] = {}
        self._what = ("gathers", "")
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                group = module._get_fsdp_state()._fsdp_param_group
                if group is not None:
                    self._names[id(group._all_gather_comm)] = name
                    self._names[id(group._reduce_scatter_comm)] = name

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the step that is taken inside."""
        kinds = {
            "gathers": fsdp.ShardGather,
            "reductions": fsdp.ShardReduction,
        }
        with ExitStack() as stack:
            for track, kind in kinds.items():
                called = self._named(track, kind.__call__)
                stack.enter_context(patch.object(kind, "__call__", called))
            stack.enter_context(patch.object(exchange, "_exchange", self._exchange))
            stack.enter_context(around_waits(self._wait))
            for name, module in self._model.named_modules():
                if name in self._names.values() and module is not self._model:
                    stack.enter_context(self._computing(name, module))
            yield

    def _named(self, track: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def named(comm: Any, *args: Any, **kwargs: Any) -> Any:
            self._what = (track, self._names[id(comm)])
            return call(comm, *args, **kwargs)

        return named

    def _exchange(self, *args: Any) -> list[dist.Work | None]:
        (track, name), begin_s = self._what, time.perf_counter()
        works = _EXCHANGE(*args)

        def note_end() -> None:
            self.spans.append(Span(track, name, begin_s, time.perf_counter()))

        return [_Watched(works, note_end)]

    @contextmanager
    def _wait(self) -> Generator[None]:
        begin_s = time.perf_counter()
        yield
        self.spans.append(Span("waits", "wait", begin_s, time.perf_counter()))

    @contextmanager
    def _computing(self, name: str, module: nn.Module) -> Generator[None]:
        def begin(what: str) -> Callable[..., None]:
            return lambda *_: self._open.update({f"{what} {name}": time.perf_counter()})

        def end(what: str) -> Callable[..., None]:
            return lambda *_: self._close(f"{what} {name}")

        hooks = [
            module.register_forward_pre_hook(begin("forward")),
            module.register_forward_hook(end("forward")),
        ]
        if name.startswith("blocks."):
            hooks.append(module.register_full_backward_pre_hook(begin("backward")))
            hooks.append(module.register_full_backward_hook(end("backward")))
        yield
        for hook in hooks:
            hook.remove()

    def _close(self, name: str) -> None:
        if name in self._open:
            self.spans.append(Span("computes", name, self._open.pop(name), time.perf_counter()))


_EXCHANGE = exchange._exchange

TRACKS = ("computes", "waits", "gathers", "reductions")


def chrome_trace(ranks: Sequence[Mapping[str, Sequence[Span]]]) -> dict[str, Any]:
    """Return the spans of each way of each rank in the format of Chrome's traces.

    A way and a rank are a process of the trace; every way begins at 0.
    """
    events: list[dict[str, Any]] = []
    for number, way in enumerate(ranks[0]):
        first_s = min(span.begin_s for spans in ranks for span in spans[way])
        for rank, spans in enumerate(ranks):
            process = 10 * number + rank
            title = {"name": f"{way}, rank {rank}"}
            events.append({"ph": "M", "name": "process_name", "pid": process, "args": title})
            for thread, track in enumerate(TRACKS):
                where = {"pid": process, "tid": thread}
                events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": track}})
            events += [
                {
                    "ph": "X", "name": span.name, "pid": process, "tid": TRACKS.index(span.track),
                    "ts": round(1e6 * (span.begin_s - first_s)),
                    "dur": round(1e6 * (span.end_s - span.begin_s)),
                }
                for span in sorted(spans[way], key=lambda span: span.begin_s)
            ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
