"""Where all ranks of a job stand, as far as one watcher has heard, and who holds the others up."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from phalanx.errors import named
from phalanx.launch.pulse import Beat

STILL_S: Final = 20.0
"""How long a rank's main thread may stand at one place before it is told, in seconds."""

SILENT_S: Final = 10.0
"""How long a rank may send no beat before it is told, in seconds; one sends about one a second."""

PATIENCE: Final = 5
"""How many times as long a rank may stand still outside of the steps."""

NUM_TOLD: Final = 4
"""Groups of ranks that a message describes."""


class Roll:
    """What each rank was last heard to do."""

    def __init__(self) -> None:
        self._beats: dict[int, tuple[Beat, float]] = {}
        self._limit_s = STILL_S
        self._is_told = False
        self._told_silent: set[int] = set()

    def hear(self, rank: int, beat: Beat) -> None:
        """Note a beat of a rank."""
        self._beats[rank] = (beat, time.monotonic())
        self._told_silent.discard(rank)

    def leave(self, rank: int) -> None:
        """Note that a rank has nothing more to do."""
        self._beats.pop(rank, None)

    def has_begun(self, num_ranks: int) -> bool:
        """Return whether all ranks have begun their work."""
        begun = (beat.doing != "starting" for beat, _ in self._beats.values())
        return sum(begun) == num_ranks

    def wake(self, slept_s: float) -> None:
        """Note that the watcher itself has slept: nobody is silent for that."""
        self._beats = {
            rank: (beat, at_s + slept_s) for rank, (beat, at_s) in list(self._beats.items())
        }

    def heeds_stop(self) -> bool:
        """Return whether all ranks will end after their step if they are asked to."""
        return bool(self._beats) and all(beat.heeds_stop for beat, _ in self._beats.values())

    def silent(self, limit_s: float) -> list[int]:
        """Return the ranks that were not heard for longer than a limit."""
        return [rank for rank in sorted(self._beats) if self.silence_s(rank) > limit_s]

    def silence_s(self, rank: int) -> float:
        """Return how long a rank was not heard, in seconds."""
        return time.monotonic() - self._beats[rank][1]

    def is_news(self, rank: int) -> bool:
        """Return whether this is asked for the first time since the rank was heard."""
        is_news = rank in self._beats and rank not in self._told_silent
        self._told_silent.add(rank)
        return is_news

    def stands(self) -> str:
        """Return which checkpoint stands and how to resume from it, if a rank has said so."""
        return next((beat.stands for beat, _ in self._beats.values() if beat.stands), "")

    def doing(self, rank: int) -> str:
        """Return what a rank was last heard to do."""
        return self._beats[rank][0].doing

    def in_collectives(self, ranks: Sequence[int], limit_s: float) -> bool:
        """Return whether each of these ranks has stood in a collective for a limit."""
        beats = [self._beats[rank][0] for rank in ranks if rank in self._beats]
        standing = [beat for beat in beats if beat.in_collective and beat.still_s >= limit_s]
        return len(standing) == len(ranks)

    def stall(self) -> str | None:
        """Return what to tell if ranks stand still; once for each time that they do."""
        beats = {rank: beat for rank, (beat, _) in sorted(self._beats.items())}
        still_s = {rank: beat.still_s for rank, beat in beats.items() if not beat.waits}
        longest_s = max(still_s.values(), default=0.0)
        if longest_s < STILL_S:
            self._is_told = False
        # Before and after the steps one rank may work for long while the others wait.
        is_stepping = any(beat.is_stepping for beat in beats.values())
        limit_s = self._limit_s * (1 if is_stepping else PATIENCE)
        if longest_s < limit_s or self._is_told or len(beats) < 2:
            return None
        still = [rank for rank in still_s if still_s[rank] >= limit_s]
        # A job that stood so long and went on is a slow one: it is told later the next time.
        self._is_told, self._limit_s = True, 2 * longest_s
        return self.told(f"{named(still)} at one place for {longest_s:.0f} s:")

    def told(self, heading: str) -> str:
        """Return where the ranks stand, below a heading, in a line or two for each group alike."""
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, (beat, _) in sorted(self._beats.items()):
            groups[beat.doing, beat.place].append(rank)
        lines = [heading]
        for (doing, place), ranks in list(groups.items())[:NUM_TOLD]:
            still_s = min(self._beats[rank][0].still_s for rank in ranks)
            lines.append(f"  {named(ranks)}: {doing}")
            if place:
                lines.append(f"    for {still_s:.0f} s at {place}")
        if len(groups) > NUM_TOLD:
            lines.append(f"  and {len(groups) - NUM_TOLD} more groups of ranks, each elsewhere")
        return "\n".join(lines)
