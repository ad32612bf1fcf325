"""Parallelism strategies: text form and value, catalogue of kinds, and checks. No torch."""

from phalanx.strategy.advice import check_ranks, refuse_first_come, refuse_servers, require_built
from phalanx.strategy.kinds import AXES, KINDS, Kind, built
from phalanx.strategy.value import Axis, Recompute, Strategy

__all__ = [
    "AXES",
    "KINDS",
    "Axis",
    "Kind",
    "Recompute",
    "Strategy",
    "built",
    "check_ranks",
    "refuse_first_come",
    "refuse_servers",
    "require_built",
]
