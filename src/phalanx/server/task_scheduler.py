"""The scheduler of a worker group: it assigns tasks to workers, and tracks who computes them."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from phalanx.server.message import PROTOCOL, WireMessage
from phalanx.server.role import Member
from phalanx.server.tasks import Tasks


class TaskScheduler(Member):
    """The role that answers workers' requests for tasks.

    It stores nothing on disk: after a restart it learns the range of tasks from the first request,
    and the finished tasks from workers, which report the servers' state after each push.
    """

    kind = "scheduler"

    def __init__(self, job: str, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._job = job
        self._tasks: Tasks | None = None
        self._stop_signal = 0  # signal by which worker 0 ended the job, or 0
        self._facts: dict[str, Any] | None = None

    @override
    def facts(self) -> dict[str, Any]:
        return {"job": self._job, "protocol": PROTOCOL}

    def _now_s(self) -> float:
        return self.clock.now_s

    @override
    def handle(self, peer: bytes, message: WireMessage) -> None:
        worker = int(message["worker"])
        if self._tasks is None:
            size, begin, end = message["tasks"]
            self._tasks = Tasks(size, begin, end, bool(message["is_open"]), self._now_s)
        tasks = self._tasks
        if message.kind in ("leave", "stop"):
            tasks.leave(worker)
            self._stop_signal = int(message.fields.get("signum", self._stop_signal))
        elif message.kind == "beat":
            tasks.beat(worker)
        elif message.kind != "stats":
            tasks.hear(worker)
        for slot, done in message.fields.get("done", ()):  # tasks that all servers have
            for clock in range(tasks.done[slot], done):
                tasks.finish(clock, slot)
        more: dict[str, Any] = {}
        if message.kind == "agree":
            self._facts = more["facts"] = self._facts or message["facts"]
        elif message.kind == "own":
            more["is_mine"] = tasks.own(worker, int(message["clock"]))
        elif message.kind == "help":
            through = bool(message["is_through"])
            more["task"] = tasks.help(worker, int(message["limit"]), is_through=through)
        elif message.kind == "finish":
            tasks.finish(int(message["clock"]), int(message["slot"]))
        live = tasks.num_live
        if message.kind == "stats":
            more["late"] = tasks.late()
        more["stop_signal"] = self._stop_signal
        self.reply(peer, message, "ok", is_over=tasks.is_over, num_live=live, **more)
