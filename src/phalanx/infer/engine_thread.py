"""The thread that runs the engine for the coroutines of an HTTP server.

Coroutines put orders (callables) into a queue, and the thread runs these before each step. New
tokens go to asyncio queues, on the event loop. So only the thread accesses the engine.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from phalanx.errors import CheckpointError, ConfigError, PhalanxError, message_of
from phalanx.infer.engine import NOT_FINITE, EngineFailed
from phalanx.infer.metrics import ServerMetrics
from phalanx.infer.options import Sampling, about_field
from phalanx.infer.scheduler import GenerationRequest
from phalanx.infer.texts import Completion, Piece, TextEngine

LOGGER = logging.getLogger(__name__)

POLL_S = 0.005
"""Seconds between two checks for orders while a dynamic or static batch waits to start."""


CLOSING = "the server is shutting down"
"""Message of a request that is refused or ended because the server ends."""


class QueueFull(PhalanxError):
    """The server already runs and queues the largest number of requests."""


class Update(NamedTuple):
    """A new piece of completion `number`, with its finish reason.

    Without a piece, no further one comes, or, with number -1, the client has disconnected. `error`
    is the reason for the finish reason "error".
    """

    number: int
    piece: Piece | None
    finished: str | None
    error: str = ""


@dataclass(eq=False)
class Ticket:
    """A completion that a coroutine waits for.

    Attributes:
        number: index of the completion in its HTTP request.
        updates: queue of the updates of all completions of that HTTP request.
        completion: the completion; None until the engine thread has added it.
    """

    prompt: Sequence[int]
    sampling: Sampling
    number: int
    updates: asyncio.Queue[Update]
    completion: Completion | None = None


class EngineThread:
    """A thread that steps an engine while it has requests.

    Attributes:
        texts: the engine.
        failure: message of the error that stopped the engine; None while it runs.
        is_closing: whether no request may begin, because the server ends.
        checkpoint: folder whose weights were loaded last; None before the first `load`.
    """

    def __init__(self, texts: TextEngine, metrics: ServerMetrics, max_waiting: int) -> None:
        self.texts, self.metrics = texts, metrics
        self.failure: str | None = None
        self.is_closing = False
        self.checkpoint: Path | None = None
        self._max_requests = texts.engine.scheduler.max_running + max_waiting
        self._open: set[Ticket] = set()  # only used on the event loop
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._tickets: dict[GenerationRequest, Ticket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; updates go to asyncio queues of `loop`."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the current step, and wait for its end."""
        self._commands.put(None)
        self._thread.join()

    def submit(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], field: str
    ) -> tuple[list[Ticket], asyncio.Queue[Update]]:
        """Order a continuation of each prompt with each of `samplings`; call on the event loop.

        `field` is the field of the request that has the prompts.

        Returns:
            The tickets, prompt by prompt, and the queue of their updates.

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
        for prompt in prompts:
            for sampling in samplings:
                with about_field(field):
                    self.texts.engine.check(prompt, sampling)
        num_new = len(prompts) * len(samplings)
        if num_new > self._max_requests:
            raise ConfigError(
                f"the request asks for {num_new} texts; the server runs or queues at most "
                f"{self._max_requests} together"
            )
        if len(self._open) + num_new > self._max_requests:
            raise QueueFull(
                f"{len(self._open)} requests run or wait, of at most {self._max_requests}; try "
                "again later"
            )
        updates: asyncio.Queue[Update] = asyncio.Queue()
        tickets = [
            Ticket(prompt, sampling, number * len(samplings) + choice, updates)
            for number, prompt in enumerate(prompts)
            for choice, sampling in enumerate(samplings)
        ]
        self._open.update(tickets)
        self._commands.put(lambda: self._add(tickets, len(samplings)))
        return tickets, updates

    def abandon(self, ticket: Ticket) -> None:
        """Remove a ticket, and abort its completion if it runs; call on the event loop."""
        if ticket in self._open:
            self._open.remove(ticket)
            self._commands.put(lambda: self._abort(ticket))

    def close(self) -> None:
        """End all completions with an error, and refuse new ones."""
        self.is_closing = True
        self._call_on_loop(lambda: self._fail(CLOSING))

    def load(self, folder: Path) -> Future[bool]:
        """Order that the weights of a checkpoint replace the current ones between two steps.

        Returns:
            A future of whether they were replaced; if not, a warning with the reason is logged.
        """
        loaded: Future[bool] = Future()

        def order() -> None:
            if loaded.set_running_or_notify_cancel():
                loaded.set_result(self._load(folder))

        self._commands.put(order)
        return loaded

    def _load(self, folder: Path) -> bool:
        try:
            self.texts.load(folder)
        except CheckpointError as error:
            LOGGER.warning("%s", error)
            return False
        self.checkpoint = folder
        return True

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._step()
        except BaseException as error:  # also a Rust panic: all waiting coroutines must be notified
            LOGGER.exception("the engine has ended")
            self.failure = why = message_of(error) or type(error).__name__
            self._call_on_loop(lambda: self._fail(why))

    def _fail(self, why: str) -> None:
        for ticket in self._open:
            ticket.updates.put_nowait(Update(ticket.number, None, "error", why))

    def _take_orders(self) -> bool:
        """Run all queued orders, blocking for one if the engine is idle; return False on `stop`."""
        has_work = self.texts.engine.scheduler.has_work
        while True:
            try:
                order = self._commands.get(block=not has_work)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            has_work = True

    def _add(self, tickets: list[Ticket], num_choices: int) -> None:
        now_s = time.monotonic()
        for start in range(0, len(tickets), num_choices):
            siblings = tickets[start : start + num_choices]
            samplings = [ticket.sampling for ticket in siblings]
            completions = self.texts.add(siblings[0].prompt, *samplings, now_s=now_s)
            for ticket, completion in zip(siblings, completions, strict=True):
                ticket.completion = completion
                self._tickets[completion.request] = ticket

    def _abort(self, ticket: Ticket) -> None:
        if ticket.completion is not None:
            self.texts.abort(ticket.completion)
            self._tickets.pop(ticket.completion.request, None)
            self.metrics.forget(ticket.completion)

    def _step(self) -> None:
        pieces = self.texts.step(time.monotonic())
        now_s = time.monotonic()
        updates: list[tuple[Ticket, Update]] = []
        for piece in pieces:
            completion = piece.completion
            self.metrics.observe(completion, now_s)
            ticket = self._tickets[completion.request]
            finished = completion.finish_reason
            why = NOT_FINITE if finished == "error" else ""
            updates.append((ticket, Update(ticket.number, piece, finished, why)))
            if finished is not None:
                del self._tickets[completion.request]
        if updates:
            self._send(updates)
        elif not self.texts.engine.scheduler.running:
            time.sleep(POLL_S)  # a batch waits to start

    def _send(self, updates: list[tuple[Ticket, Update]]) -> None:
        """Put updates into the queues of their tickets, on the event loop."""

        def put() -> None:
            for ticket, update in updates:
                ticket.updates.put_nowait(update)

        self._call_on_loop(put)

    def _call_on_loop(self, function: Callable[[], object]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)
