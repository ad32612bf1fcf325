"""The thread that runs the engine for the coroutines of an HTTP server, and follows a run.

Coroutines put orders (callables) into a queue, and the thread runs these before each step. New
pieces go to asyncio queues, on the event loop. So only the thread accesses the engine.

    event loop   submit: prepare, check the limits --+        +--> queue of the request --> answer
                                                     | orders | pieces
    engine thread                                    +-> step +
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from phalanx.checkpoint import manifest
from phalanx.comm.together import reason_of
from phalanx.errors import CheckpointError, ConfigError, PhalanxError, message_of
from phalanx.infer.engine import Engine, EngineFailed, Piece
from phalanx.infer.metrics import ServerMetrics
from phalanx.infer.options import Sampling, about_field
from phalanx.infer.scheduler import Completion

LOGGER = logging.getLogger(__name__)

CLOSING = "the server is shutting down"
"""Message of a request that is refused or ended because the server ends."""

Pieces = asyncio.Queue[Piece | Exception]
"""Pieces of all completions of one HTTP request; an exception is the last."""


class QueueFull(PhalanxError):
    """The server already runs and queues the largest number of requests."""


class EngineThread:
    """A thread that steps an engine while it has completions.

    Attributes:
        engine: the engine.
        failure: message of the error that stopped the engine; None while it runs.
        is_closing: whether no request may begin, because the server ends.
        checkpoint: folder whose weights were loaded last; None before the first `load`.
    """

    def __init__(self, engine: Engine, metrics: ServerMetrics, max_waiting: int) -> None:
        self.engine, self.metrics = engine, metrics
        self.failure: str | None = None
        self.is_closing = False
        self.checkpoint: Path | None = None
        self._max_requests = engine.scheduler.max_running + max_waiting
        self._open: dict[Completion, Pieces] = {}  # only used on the event loop
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; pieces go to asyncio queues of `loop`."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the current step, and wait for its end."""
        self._orders.put(None)
        self._thread.join()

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        field: str,
        **options: Any,
    ) -> tuple[list[Completion], Pieces]:
        """Order a continuation of each prompt with each of `samplings`; call on the event loop.

        `field` is the field of the request that has the prompts; `options` are of `Engine.prepare`.

        Returns:
            The completions, prompt by prompt, and the queue of their pieces.

        Raises:
            QueueFull: too many requests run or wait.
            EngineFailed: the engine has stopped.
            RequestError: a prompt is empty or too long.
            ConfigError: the number of texts exceeds the queue's size.
        """
        if self.failure is not None:
            raise EngineFailed(f"the engine has ended: {self.failure}")
        if self.is_closing:
            raise EngineFailed(CLOSING)
        with about_field(field):
            families = [
                self.engine.prepare(prompt, *samplings, number=number * len(samplings), **options)
                for number, prompt in enumerate(prompts)
            ]
        completions = [each for family in families for each in family]
        if len(completions) > self._max_requests:
            raise ConfigError(
                f"the request asks for {len(completions)} texts; the server runs or queues at most "
                f"{self._max_requests} together"
            )
        if len(self._open) + len(completions) > self._max_requests:
            raise QueueFull(
                f"{len(self._open)} requests run or wait, of at most {self._max_requests}; try "
                "again later"
            )
        pieces = Pieces()
        self._open.update(dict.fromkeys(completions, pieces))
        for family in families:
            self._orders.put(lambda family=family: self.engine.queue(family))
        return completions, pieces

    def abandon(self, completions: Sequence[Completion]) -> None:
        """Abort the completions that still run; call on the event loop."""
        for completion in completions:
            if self._open.pop(completion, None) is not None:
                self._orders.put(lambda completion=completion: self.engine.abort(completion))

    def close(self) -> None:
        """End all completions with an error, and refuse new ones."""
        self.is_closing = True
        self.call_on_loop(lambda: self._fail(CLOSING))

    def load(self, folder: Path) -> Future[bool]:
        """Order that the weights of a checkpoint replace the current ones between two steps.

        Returns:
            A future of whether they were replaced; if not, a warning with the reason is logged.
        """
        loaded: Future[bool] = Future()

        def order() -> None:
            if not loaded.set_running_or_notify_cancel():
                return
            try:
                self.engine.load(folder)
            except CheckpointError as error:
                LOGGER.warning("%s", error)
                loaded.set_result(False)
            else:
                self.checkpoint = folder
                loaded.set_result(True)

        self._orders.put(order)
        return loaded

    def _run(self) -> None:
        """Run the orders, waiting for one while the engine is idle, and a step after them."""
        scheduler = self.engine.scheduler
        try:
            while True:
                try:
                    order = self._orders.get(block=not scheduler.has_work)
                except queue.Empty:
                    pieces, now_s = self.engine.step(), time.monotonic()
                    for piece in pieces:
                        self.metrics.observe(piece, now_s)
                    if pieces:
                        self.call_on_loop(lambda pieces=pieces: self._deliver(pieces))
                else:
                    if order is None:
                        return
                    order()
        except BaseException as error:  # also a Rust panic: all waiting coroutines must be notified
            LOGGER.exception("the engine has ended")
            self.failure = why = message_of(error) or type(error).__name__
            self.call_on_loop(lambda: self._fail(why))

    def _deliver(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if (request := self._open.get(piece.completion)) is not None:
                request.put_nowait(piece)

    def _fail(self, why: str) -> None:
        for request in set(self._open.values()):
            request.put_nowait(EngineFailed(why))

    def call_on_loop(self, function: Callable[[], object]) -> None:
        """Call a function on the event loop, from any thread; not if the loop has ended."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)


async def follow(run: Path, first: Path, every_s: float, thread: EngineThread) -> None:
    """Load each checkpoint of `run` that is later than `first`; poll every `every_s` seconds.

    A checkpoint that fails to load is retried at the 2nd, 4th, 8th, ... poll that finds it. Memory
    may be free by then, but each attempt reads the checkpoint and delays requests.
    """
    last, num_polls = first, Counter[Path]()
    while True:
        await asyncio.sleep(every_s)
        try:
            checkpoints = await asyncio.to_thread(manifest.complete_checkpoints, run)
        except OSError as error:  # such as a network file system's, which may recover
            LOGGER.warning("cannot look for a later checkpoint: %s", reason_of(error))
            continue
        latest = [last, *checkpoints.values()][-1]
        num_polls[latest] += 1
        is_due = num_polls[latest].bit_count() == 1
        if latest != last and is_due and await asyncio.wrap_future(thread.load(latest)):
            last = latest
