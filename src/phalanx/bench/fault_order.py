"""Faults in an order that a seed fixes, and what each cost a run: pure, so that goldens pin it.

steps     1 2 3 ... L                    F ... L   L+1        records as they appear
time      -------- x        !            ^                    x fault   ! its detection
                   |detected|next step   |repeated|
                  |<------------- lost ---------->|           minus one step's time
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

KINDS: Final = {
    "rank": "kill -9 of a rank other than rank 0",
    "rank0": "kill -9 of rank 0",
    "host": "kill -9 of all processes of the job on a host",
    "ssh": "kill -9 of the launcher's ssh to a host",
    "stop": "SIGSTOP of a rank",
    "cut": "the link of a host down for --for-s",
    "slow": "the link of a host at --mbit for --for-s",
    "disk": "the disk of the run's folder full for --for-s",
    "clock": "time.time() of rank 0 an hour ahead",
}
"""Kind of a fault -> what it does."""

LOSING: Final = tuple(KINDS)[:6]
"""Kinds by which a job loses ranks, which the launcher must detect."""


class Fault(NamedTuple):
    """A fault of an order.

    Attributes:
        step: the fault strikes once this step is recorded.
        victim: any number; modulo the ranks, or hosts, that the job then has, it chooses one.
        pause: part of the time of a step to wait after the record, in [0, 1).
    """

    kind: str
    step: int
    victim: int
    pause: float


def order_of(seed: int, kinds: Sequence[str], number: int, steps: int) -> list[Fault]:
    """Return `number` faults at rising steps; each kind occurs as often as any other, or once more.

    Fault i strikes in part i of `number` + 1 equal parts of the run, the last of which has none.
    """
    chance = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < number:
        drawn += chance.sample(list(kinds), len(kinds))
    room = max(1, steps // (number + 1))
    return [
        Fault(kind, at * room + chance.randint(1, room), chance.getrandbits(16), chance.random())
        for at, kind in enumerate(drawn[:number])
    ]


class Strike(NamedTuple):
    """A fault that struck, from `at_s` until it was over, and the load average at that time."""

    fault: Fault
    who: str
    at_s: float
    until_s: float
    load: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a fault cost; a time is None if it never came.

    Attributes:
        step: the last step that was recorded before the fault.
        detected_s: from the fault until the launcher noticed a loss.
        next_step_s: from then until a step was taken again.
        repeated: steps taken twice.
        lost_s: time without progress.
        again_bytes: bytes that a rank sent for the repeated steps.
        strategy: how the run continued.
        load: load average of the machine when the fault struck.
    """

    kind: str
    who: str
    step: int
    detected_s: float | None
    next_step_s: float | None
    repeated: int
    lost_s: float
    again_bytes: float
    strategy: str
    load: float


Event = Literal["step", "sent", "strategy", "lost", "restart", "join"]


@dataclass
class Timeline:
    """What an observer saw of a run, in seconds of its own clock.

    Attributes:
        events: a (seconds, kind, value) each: "step", its record, repeated ones too; "strategy" of
            a generation, and "sent", the bytes of rank 0 in a step; the other kinds have the
            launcher's words on a loss, a restart, or a host that joins.
    """

    events: list[tuple[float, Event, Any]] = field(default_factory=list[tuple[float, Event, Any]])

    def add(self, at_s: float, record: dict[str, Any]) -> None:
        """Take a record of metrics.jsonl."""
        if record["kind"] == "step":
            self.events.append((at_s, "step", record))
        elif record["kind"] == "config":
            self.events.append((at_s, "strategy", record["strategy"]))
        elif record["kind"] == "ranks" and record.get("sent"):
            self.events.append((at_s, "sent", sum(size for _, size in record["sent"].values())))

    def of(
        self, kind: Event, after_s: float = -math.inf, until_s: float = math.inf
    ) -> list[tuple[float, Any]]:
        """Return the (seconds, value) of a kind, later than `after_s` and not than `until_s`."""
        return [(at, each) for at, is_of, each in self.events if is_of == kind
                and after_s < at <= until_s]  # fmt: skip

    def steps(self, *span_s: float) -> list[tuple[float, int]]:
        """Return the (seconds, number) of each step in a span of `of`."""
        return [(at, record["step"]) for at, record in self.of("step", *span_s)]

    @property
    def last_step(self) -> int:
        """The last step; 0 before the first."""
        return max((step for _, step in self.steps()[-1:]), default=0)

    @property
    def final(self) -> dict[int, dict[str, Any]]:
        """Step -> its last record, in order: the steps that led to the final weights."""
        records: dict[int, dict[str, Any]] = {}
        for _, record in self.of("step"):
            for undone in [step for step in records if step >= record["step"]]:
                del records[undone]
            records[record["step"]] = record
        return records

    @property
    def step_s(self) -> float:
        """Median time of a step; 0 before the second."""
        steps = self.steps()
        pairs = itertools.pairwise(steps)
        times = [end - begin for (begin, one), (end, other) in pairs if other == one + 1]
        return statistics.median(times) if times else 0.0

    @property
    def useful_s(self) -> float:
        """Time of the steps that led to the final weights, without waits between generations."""
        last = {step: at for at, step in self.steps()}
        times = 0.0
        own = [event for event in self.events if event[1] in ("step", "strategy")]
        for (begin, one, record), (end, other, after) in itertools.pairwise(own):
            if one == other == "step" and after["step"] == record["step"] + 1:
                times += (end - begin) * (last[after["step"]] == end)
        return times

    def has_recovered(self, strike: Strike) -> bool:
        """Return whether a new step was taken after a fault, and by a host that it had cut off."""
        lost, joined = self.of("lost", strike.at_s), self.of("join", strike.until_s)
        kind = strike.fault.kind
        if (kind in LOSING and not lost) or (kind == "cut" and not joined):
            return False
        after_s = max([strike.until_s, *(at for at, _ in [*lost, *joined])])
        before = max((step for _, step in self.steps(-math.inf, after_s)), default=0)
        return any(step > before for _, step in self.steps(after_s))

    def cost_of(self, strike: Strike, end_s: float) -> Cost:
        """Return what a fault cost until `end_s`, when the next one struck, or the run ended."""
        begin_s, step = (self.steps(-math.inf, strike.at_s) or [(strike.at_s, 0)])[-1]
        lost = [at for at, _ in self.of("lost", strike.at_s, end_s)]
        over_s = lost[-1] if lost else strike.until_s
        # Between the fault and its detection, ranks that it did not reach may complete a step.
        highest = max([step, *(each for _, each in self.steps(strike.at_s, over_s))])
        resumed = self.steps(over_s, end_s)
        back = next((pair for pair in resumed if pair[1] > highest), (end_s, step))
        repeated = sum(each <= highest for _, each in resumed)
        sent = self.of("sent", -math.inf, strike.at_s) or [(0.0, 0.0)]
        strategies = self.of("strategy", over_s, end_s) or self.of("strategy")[-1:] or [(0.0, "")]
        return Cost(
            kind=strike.fault.kind,
            who=strike.who,
            step=step,
            detected_s=lost[0] - strike.at_s if lost else None,
            next_step_s=resumed[0][0] - lost[0] if lost and resumed else None,
            repeated=repeated,
            lost_s=max(0.0, back[0] - begin_s - (back[1] - step) * self.step_s),
            again_bytes=repeated * sent[-1][1],
            strategy=strategies[0][1],
            load=strike.load,
        )
