"""How the ranks of a script differ where they must be alike, in a sentence: pure functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

STEPS = "steps"
BATCHES = "batches"
AHEAD = "ahead"
CLIPS = "clips"

_OF_COUNTS = {
    STEPS: "rank {0} has taken {1} steps and rank {2} has taken {3}, so their weights differ; each "
    "rank must step, or skip a step, when the others do",
    BATCHES: "the ranks have read unlike numbers of batches before the last one, {1} on rank {0} "
    "and {3} on rank {2}, so that rows of several global batches were added up; each rank must "
    "read, or leave out, a batch when the others do",
    AHEAD: "{1} batches wait for a run.backward on rank {0} and {3} on rank {2}, so that the ranks "
    "take unlike ones for the last of a pass; each rank must keep, or leave out, a batch that it "
    "has read when the others do",
    CLIPS: "run.clip was called {1} times on rank {0} and {3} times on rank {2}, so their weights "
    "differ; every rank calls it, and none under `if run.is_first`",
}


class Digest(NamedTuple):
    """What is known of a tensor on a rank.

    Attributes:
        place: which shard of the tensor it is, as "fsdp=1"; empty where all ranks hold the whole.
        bits: sum of its bits.
        total: sum of its elements, for a message.
    """

    place: str
    bits: int
    total: float


@dataclass(frozen=True)
class Facts:
    """What is compared of a rank, and what may explain a difference.

    Attributes:
        rank: the rank.
        counts: of `STEPS`, `BATCHES`, `AHEAD` and `CLIPS`.
        settings: of the optimizers, by a name such as "lr of group 0 of SGD".
        weights: by the names of parameters.
        states: of the optimizers, by a name such as "exp_avg of 0.weight".
        gradient_writes: gradients that something changed between run.backward and a step.
        weight_writes: writes to parameters in place until the last step, the optimizer's too.
    """

    rank: int
    counts: Mapping[str, int]
    settings: Mapping[str, str]
    weights: Mapping[str, Digest]
    states: Mapping[str, Digest]
    gradient_writes: int
    weight_writes: int

    def to_text(self) -> str:
        """Return them for a store."""
        return json.dumps(vars(self))

    @classmethod
    def of_text(cls, text: str) -> Facts:
        """Return what `to_text` was made of."""
        values: dict[str, Any] = json.loads(text)
        for part in ("weights", "states"):
            values[part] = {name: Digest(*each) for name, each in values[part].items()}
        return cls(**values)


class Difference(NamedTuple):
    """How two ranks differ.

    Attributes:
        kind: in what.
        words: a sentence, which begins in lower case and has no full stop.
    """

    kind: Literal["counts", "settings", "weights", "states"]
    words: str


def first_difference(ranks: Sequence[Facts]) -> Difference | None:
    """Return what differs first, causes before their effects; None where all are alike."""
    for count in _OF_COUNTS:
        for a, b in _apart(ranks, lambda facts: facts.counts, count):
            words = _OF_COUNTS[count].format(a.rank, a.counts[count], b.rank, b.counts[count])
            return Difference("counts", words)
    for setting in _names(facts.settings for facts in ranks):
        for a, b in _apart(ranks, lambda facts: facts.settings, setting):
            return Difference("settings", _of_setting(setting, a, b))
    for name in _names(facts.weights for facts in ranks):
        for a, b in _apart(ranks, lambda facts: facts.weights, name):
            return Difference("weights", _of_weights(name, a, b))
    for name in _names(facts.states for facts in ranks):
        for a, b in _apart(ranks, lambda facts: facts.states, name):
            return Difference(
                "states",
                f"the optimizer's {name} {_values(a.states.get(name), b.states.get(name), a, b)}; "
                "load the state of an optimizer on every rank",
            )
    return None


def _apart(
    ranks: Sequence[Facts], part: Callable[[Facts], Mapping[str, Any]], name: str
) -> list[tuple[Facts, Facts]]:
    """Return the first rank of a place and the first that differs from it; empty without one."""
    first: dict[str, Facts] = {}
    for facts in ranks:
        value = part(facts).get(name)
        other = first.setdefault(value.place if isinstance(value, Digest) else "", facts)
        theirs = part(other).get(name)
        if isinstance(value, Digest) and isinstance(theirs, Digest):
            value, theirs = value.bits, theirs.bits
        if value != theirs:
            return [(other, facts)]
    return []


def _names(parts: Any) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _of_setting(name: str, a: Facts, b: Facts) -> str:
    here, there = (facts.settings.get(name, "not set") for facts in (a, b))
    words = f"{name} is {here} on rank {a.rank} and {there} on rank {b.rank}; "
    if name.startswith("the kind"):
        return words + "make the same optimizer on every rank"
    if name.startswith("the arguments"):
        return words + "give run.clip the same on every rank"
    if not name.startswith("lr "):
        return words + "give it the same value on every rank"
    return words + (
        "every rank must step a scheduler, and by the same value: one that takes a loss, such as "
        "ReduceLROnPlateau, by the loss that run.backward returned, or by a run.sum"
    )


def _of_weights(name: str, a: Facts, b: Facts) -> str:
    words = f"{name} {_values(a.weights.get(name), b.weights.get(name), a, b)}; "
    if a.gradient_writes != b.gradient_writes:
        return words + (
            f"{a.gradient_writes} gradients were changed after run.backward on rank {a.rank} and "
            f"{b.gradient_writes} on rank {b.rank}: clip them on every rank, by run.clip, and not "
            "under `if run.is_first`"
        )
    if a.weight_writes != b.weight_writes:
        return words + (
            f"weights were written {abs(a.weight_writes - b.weight_writes)} times more on rank "
            f"{max(a, b, key=lambda facts: facts.weight_writes).rank}: call load_state_dict, and "
            "all else that sets weights, on every rank, or before run.prepare"
        )
    for state in _names([a.states, b.states]):
        for _ in _apart([a, b], lambda facts: facts.states, state):
            return words + (
                f"so does the optimizer's {state}: clip or change gradients, and load the state of "
                "an optimizer, on every rank"
            )
    if a.states:
        return words + (
            "the optimizers' states are alike, so something else than a step has set weights on "
            "one rank alone; do it on every rank, or before run.prepare"
        )
    return words + "weights, or gradients, were changed on one rank alone; do it on every rank"


def _values(here: Digest | None, there: Digest | None, a: Facts, b: Facts) -> str:
    if here is None or there is None:
        return f"is there on rank {(b if here is None else a).rank} alone"
    left, right = f"{here.total:.6g}", f"{there.total:.6g}"
    if left == right:
        left, right = f"{here.total:.17g}", f"{there.total:.17g}"
    return f"differs: its elements add up to {left} on rank {a.rank} and {right} on rank {b.rank}"
