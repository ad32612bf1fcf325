"""Faults in an order that a seed fixes, and what each cost a run: pure, so that goldens pin it.

    records   1 2 3 ... L     |  repeated  F ... L |  L+1 ... N      step records as they appear
    time      ------------ x  !  ..................^  --------       x struck   ! detected
                           |<->|<- next step ->|
                           |<- lost: from L to L+1, minus one step of the median time ->|
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

KINDS: Final = {
    "rank": "kill -9 of a rank other than rank 0",
    "rank0": "kill -9 of rank 0",
    "host": "kill -9 of all processes of the job on a host",
    "ssh": "kill -9 of the launcher's ssh to a host",
    "stop": "SIGSTOP of a rank",
    "cut": "the link of a host down for --for-s",
    "slow": "the link of a host at --mbit for --for-s",
    "disk": "the disk of the run's folder full for --for-s",
    "clock": "time.time() of rank 0 moved by an hour",
}
"""Kind of a fault -> what it does."""


@dataclass(frozen=True)
class Fault:
    """A fault of an order.

    Attributes:
        step: the fault strikes once this step is recorded.
        victim: any number; modulo the ranks, or hosts, that the job has then, it chooses one.
        pause: part of the time of a step to wait after the record, in [0, 1).
    """

    kind: str
    step: int
    victim: int
    pause: float


def order_of(seed: int, kinds: Sequence[str], number: int, steps: int) -> list[Fault]:
    """Return `number` faults at rising steps; each kind occurs as often as any other, or once more.

    Step s of fault i is in part i of `number` + 1 equal parts of the run, whose last has none.
    """
    chance = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < number:
        drawn += chance.sample(list(kinds), len(kinds))
    room = steps // (number + 1)
    return [
        Fault(kind, 1 + at * room + chance.randrange(max(1, room)), chance.getrandbits(16), pause)
        for at, (kind, pause) in enumerate((kind, chance.random()) for kind in drawn[:number])
    ]


@dataclass
class Strike:
    """A fault that has struck, in seconds of the observer's clock.

    Attributes:
        who: the rank, host or folder.
        at_s: when it struck.
        until_s: when the fault itself was over, such as a cut; `at_s` for a kill.
        load: load average of the machine at that time.
        by_bench: whether the launcher ended, and the bench started it again.
    """

    fault: Fault
    who: str
    at_s: float
    until_s: float
    load: float
    by_bench: bool = False


@dataclass
class Seen:
    """What an observer saw of a run: records, with the seconds at which each appeared.

    Attributes:
        steps: a (seconds, step record) for each taken step, repeated ones too.
        losses: (seconds, launcher's words) for each time that the launcher noticed a loss.
        sent: (seconds, bytes that rank 0 sends in a step) for each generation.
        strategies: (seconds, strategy) for each generation.
    """

    steps: list[tuple[float, dict[str, Any]]] = field(default_factory=list[Any])
    losses: list[tuple[float, str]] = field(default_factory=list[Any])
    sent: list[tuple[float, float]] = field(default_factory=list[Any])
    strategies: list[tuple[float, str]] = field(default_factory=list[Any])

    def add(self, at_s: float, record: dict[str, Any]) -> None:
        """Take a record of metrics.jsonl."""
        if record["kind"] == "step":
            self.steps.append((at_s, record))
        elif record["kind"] == "config":
            self.strategies.append((at_s, record["strategy"]))
        elif record["kind"] == "ranks" and record.get("sent"):
            self.sent.append((at_s, sum(size for _, size in record["sent"].values())))

    @property
    def last_step(self) -> int:
        """The highest step that has a record; 0 before the first."""
        return max((record["step"] for _, record in self.steps), default=0)

    @property
    def final(self) -> dict[int, dict[str, Any]]:
        """Step -> its last record: those of the run as it continued."""
        return {record["step"]: record for _, record in self.steps}

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        times = [b - a for (a, one), (b, next_) in zip(self.steps, self.steps[1:], strict=False)
                 if next_["step"] == one["step"] + 1]  # fmt: skip
        return statistics.median(times) if times else 0.0

    def has_recovered(self, strike: Strike) -> bool:
        """Return whether a step that is new was taken after the fault and each detected loss."""
        after_s = max([strike.until_s, *(at for at, _ in self.losses if at >= strike.at_s)])
        before = max((r["step"] for at, r in self.steps if at <= after_s), default=0)
        return any(at > after_s and r["step"] > before for at, r in self.steps)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a fault cost; a time is None if it never came.

    Attributes:
        step: last step that was recorded before the fault.
        detected_s: from the fault until the launcher noticed a loss.
        next_step_s: from that until a next step.
        repeated: steps taken twice.
        lost_s: time without progress.
        again_bytes: bytes that a rank sent again for the repeated steps.
        strategy: strategy of the run afterwards.
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
    by_bench: bool


def outcome_of(seen: Seen, strike: Strike, end_s: float) -> Outcome:
    """Return what a fault cost; `end_s` is when the next fault struck, or the run ended."""
    before = [(at, r["step"]) for at, r in seen.steps if at <= strike.at_s]
    begin_s, step = before[-1] if before else (strike.at_s, 0)
    lost = [at for at, _ in seen.losses if strike.at_s <= at < end_s]
    taken = [(at, r["step"]) for at, r in seen.steps if strike.at_s < at <= end_s]
    next_s: float | None = None
    repeated = 0
    highest = step
    over_s = strike.until_s
    if lost:  # steps between the fault and its detection were taken by those that it did not stop
        highest = max([step, *(each for at, each in taken if at <= lost[-1])])
        resumed = [(at, each) for at, each in taken if at > lost[-1]]
        next_s = resumed[0][0] if resumed else None
        repeated = sum(each <= highest for _, each in resumed)
        over_s = max(over_s if strike.fault.kind == "slow" else 0.0, lost[-1])
    new = [(at, each) for at, each in taken if at > over_s and each > highest]
    back_s, back = new[0] if new else (end_s, step)
    sent = [size for at, size in seen.sent if at <= strike.at_s] or [0.0]
    after = [text for at, text in seen.strategies if at < end_s] or [""]
    return Outcome(
        kind=strike.fault.kind,
        who=strike.who,
        step=step,
        detected_s=lost[0] - strike.at_s if lost else None,
        next_step_s=next_s - lost[0] if lost and next_s is not None else None,
        repeated=repeated,
        lost_s=max(0.0, back_s - begin_s - (back - step) * seen.step_s),
        again_bytes=repeated * sent[-1],
        strategy=after[-1],
        load=strike.load,
        by_bench=strike.by_bench,
    )
