"""Table of the topics of `phalanx show` that run a method."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from phalanx.show.strategies import ON_CUBES, STRATEGIES


class Topic(NamedTuple):
    """A topic.

    Attributes:
        about: line in the list of topics.
        place: "MODULE SETTINGS FUNCTION": module of phalanx.show, and its dataclass and function.
        given: arguments of the function before the settings.
    """

    about: str
    place: str
    given: tuple[Any, ...] = ()

    def load(self) -> tuple[type[Any], Callable[[Any], Any]]:
        """Import the module, and torch with it; return the settings class and the function."""
        module, settings, function = self.place.split()
        found = import_module(f"phalanx.show.{module}")
        return getattr(found, settings), functools.partial(getattr(found, function), *self.given)


_COLLECTIVE = "collective ShowCollective show_collective"

_SCHEDULES = {
    "naive": "stages that wait for each other",
    "gpipe": "all forwards, then all backwards",
    "1f1b": "a backward as soon as there is one",
    "interleaved": "1f1b over several stages a rank",
    "zb": "gradients of weights fill the bubble",
    "zbv": "zero bubble, two stages a rank in a V",
    "dualpipev": "like zbv, forwards and backwards in pairs",
}


def _steps(*names: str) -> dict[str, Topic]:
    """Return topics that run a training step of the strategies `names`."""
    found = dict[str, Topic]()
    for name in names:
        settings = "ShowCube" if name in ON_CUBES else "ShowRun"
        found[name] = Topic(STRATEGIES[name].line, f"one_step {settings} show_step", (name,))
    return found


RUN: Final[Mapping[str, Topic]] = {
    "p2p": Topic(
        "send and receive: blocking or not, tags, the deadlock of two sends",
        "point_to_point ShowRun show_messages",
    ),
    "broadcast": Topic("one rank's tensor to all", _COLLECTIVE, ("broadcast", None)),
    "scatter": Topic("a chunk of one rank's tensor to each", _COLLECTIVE, ("scatter", None)),
    "gather": Topic("a chunk of each rank to one", _COLLECTIVE, ("gather", None)),
    "reduce": Topic("the sum of all ranks on one", _COLLECTIVE, ("reduce", None)),
    "all-gather": Topic("a chunk of each rank to all", _COLLECTIVE, ("all-gather", None)),
    "reduce-scatter": Topic("a chunk of the sum to each", _COLLECTIVE, ("reduce-scatter", None)),
    "all-reduce": Topic("the sum of all ranks on all", _COLLECTIVE, ("all-reduce", None)),
    "all-to-all": Topic("a chunk from each rank to each", _COLLECTIVE, ("all-to-all", None)),
    "barrier": Topic("all wait for the last", _COLLECTIVE, ("barrier", None)),
    "ring": Topic("all-reduce round a ring: two halves", _COLLECTIVE, ("all-reduce", "ring")),
    "tree": Topic("all-reduce up and down a tree", _COLLECTIVE, ("all-reduce", "tree")),
    "halving-doubling": Topic(
        "all-reduce by exchanges of halves, 2 log2 P steps",
        _COLLECTIVE,
        ("all-reduce", "halving-doubling"),
    ),
    "direct": Topic("all-reduce in two steps", _COLLECTIVE, ("all-reduce", "direct")),
    "hierarchical": Topic(
        "all-reduce inside each host, then across", _COLLECTIVE, ("all-reduce", "hierarchical")
    ),
    "data-parallel": Topic(
        "a step with a main device, and one without", "data_parallel ShowRun show_data_parallel"
    ),
    **_steps("buckets", "zero1", "zero2", "zero3", "hsdp"),
    "fsdp": Topic(
        "one owner per weight, or a shard on each rank; what overlaps",
        "data_parallel ShowRun show_fsdp",
    ),
    **_steps("recompute"),
    **{
        kind: Topic(about, "schedules ShowSchedule show_schedule", (kind,))
        for kind, about in _SCHEDULES.items()
    },
    **_steps(*STRATEGIES),  # adds the strategies not listed above
    "parameter-server": Topic(
        "a master's link compared with a ring; versions in four consistencies",
        "parameter_server ShowServer show_parameter_server",
    ),
    "rolling-batch": Topic(
        "requests in slots: static batches, and rolling ones",
        "generation ShowGeneration show_rolling_batch",
    ),
    "paged-attention": Topic(
        "block tables of two sequences with a common prefix, and their waste",
        "generation ShowGeneration show_paged_attention",
    ),
}
"""Name -> topic, in the order of the list of topics."""
