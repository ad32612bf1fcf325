"""Table of the topics of `phalanx show`, in the order of lessons."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from phalanx.show.shown import Shown
from phalanx.show.strategies import ON_CUBES, STRATEGIES


class Topic(NamedTuple):
    """A topic.

    Attributes:
        about: line in the list of topics.
        source: "MODULE SETTINGS FUNCTION": module of phalanx.show, and its dataclass and function.
        options: arguments of the function before the settings.
    """

    about: str
    source: str
    options: tuple[Any, ...] = ()

    def load(
        self,
    ) -> tuple[type[Any], Callable[[Any], Shown], Callable[[Shown, Path], None]]:
        """Import the module, and torch with it.

        Returns:
            The settings class, the function that runs the topic, and the function that draws it.
        """
        name, settings, function = self.source.split()
        module = import_module(f"phalanx.show.{name}")
        painter = module if hasattr(module, "draw") else import_module("phalanx.show.animation")
        run = functools.partial(getattr(module, function), *self.options)
        return getattr(module, settings), run, painter.draw


OF_STATE: Final = ("buckets", "zero1", "zero2", "zero3", "hsdp")
"""Strategies that shard gradients, optimizer state or parameters, or bucket gradients."""


def _collective(about: str, collective: str, algorithm: str | None = None) -> Topic:
    source = "collective ShowCollective show_collective"
    return Topic(about, source, (collective, algorithm))


def _steps(*names: str) -> dict[str, Topic]:
    """Return topics that run a training step of the strategies `names`."""
    return {
        name: Topic(
            STRATEGIES[name].line,
            f"one_step {'ShowCube' if name in ON_CUBES else 'ShowRun'} show_step",
            (name,),
        )
        for name in names
    }


def _schedule(about: str, kind: str) -> Topic:
    return Topic(about, "schedules ShowSchedule show_schedule", (kind,))


LESSONS: Final[Mapping[str, Mapping[str, Topic]]] = {
    "Messages": {
        "p2p": Topic(
            "send and receive: blocking or not, tags, the deadlock of two sends",
            "point_to_point ShowRun show_messages",
        ),
    },
    "Collectives": {
        "broadcast": _collective("one rank's tensor to all", "broadcast"),
        "scatter": _collective("a chunk of one rank's tensor to each", "scatter"),
        "gather": _collective("a chunk of each rank to one", "gather"),
        "reduce": _collective("the sum of all ranks on one", "reduce"),
        "all-gather": _collective("a chunk of each rank to all", "all-gather"),
        "reduce-scatter": _collective("a chunk of the sum to each", "reduce-scatter"),
        "all-reduce": _collective("the sum of all ranks on all", "all-reduce"),
        "all-to-all": _collective("a chunk from each rank to each", "all-to-all"),
        "barrier": _collective("all wait for the last", "barrier"),
    },
    "Algorithms of all-reduce": {
        "ring": _collective("all-reduce round a ring: two halves", "all-reduce", "ring"),
        "tree": _collective("all-reduce up and down a tree", "all-reduce", "tree"),
        "halving-doubling": _collective(
            "all-reduce by exchanges of halves, 2 log2 P steps", "all-reduce", "halving-doubling"
        ),
        "direct": _collective("all-reduce in two steps", "all-reduce", "direct"),
        "hierarchical": _collective(
            "all-reduce inside each host, then across", "all-reduce", "hierarchical"
        ),
    },
    "Data parallelism, and shards of the state": {
        "data-parallel": Topic(
            "a step with a main device, and one without", "data_parallel ShowRun show_data_parallel"
        ),
        **_steps(*OF_STATE),
        "fsdp": Topic(
            "one owner per weight, or a shard on each rank; what overlaps",
            "data_parallel ShowRun show_fsdp",
        ),
        **_steps("recompute"),
    },
    "Pipelines": {
        "naive": _schedule("stages that wait for each other", "naive"),
        "gpipe": _schedule("all forwards, then all backwards", "gpipe"),
        "1f1b": _schedule("a backward as soon as there is one", "1f1b"),
        "interleaved": _schedule("1f1b over several stages a rank", "interleaved"),
        "zb": _schedule("gradients of weights fill the bubble", "zb"),
        "zbv": _schedule("zero bubble, two stages a rank in a V", "zbv"),
        "dualpipev": _schedule("like zbv, forwards and backwards in pairs", "dualpipev"),
    },
    "Context and tensor parallelism": _steps(
        *(name for name in STRATEGIES if name not in (*OF_STATE, "recompute"))
    ),
    "Experts": {
        "experts": Topic(
            "the way of rows to experts of another rank and back, drawn from a step",
            "expert_rows ShowExperts show_experts",
        ),
    },
    "Parameter servers": {
        "parameter-server": Topic(
            "roles, worker groups; a master's link and a ring; four consistencies",
            "parameter_server ShowServer show_parameter_server",
        ),
    },
    "Generation": {
        "rolling-batch": Topic(
            "requests in slots: static batches, and rolling ones",
            "generation ShowGeneration show_rolling_batch",
        ),
        "paged-attention": Topic(
            "block tables of two sequences with a common prefix, and their waste",
            "generation ShowGeneration show_paged_attention",
        ),
    },
    "Hardware": {
        "cluster": Topic(
            "the totals of a cluster's devices, and the link of each level",
            "devices ShowCluster show_cluster",
        ),
        "device": Topic(
            "a device from the SM to the peak, beside other devices",
            "devices ShowDevice show_device",
        ),
        "devices": Topic("all devices of the catalogue", "devices ShowDevices show_devices"),
    },
}
"""Lesson -> name -> topic; a lesson needs only the lessons before it."""

TOPICS: Final = {name: topic for lesson in LESSONS.values() for name, topic in lesson.items()}
CATALOGUE: Final = LESSONS["Hardware"]
RUN: Final = {name: topic for name, topic in TOPICS.items() if name not in CATALOGUE}
"""Topics that run a method."""
