"""Parallelism strategies: text form and value, catalogue of kinds, and checks. No torch."""

from phalanx.strategy.advice import (
    check_ranks,
    refuse_first_come,
    refuse_servers,
    require_built,
    shrunk,
)
from phalanx.strategy.kinds import AXES, KINDS, POSITIONS, Kind, built
from phalanx.strategy.value import Axis, Recompute, Strategy

__all__ = [
    "AXES",
    "KINDS",
    "POSITIONS",
    "Axis",
    "Kind",
    "Recompute",
    "Strategy",
    "built",
    "check_ranks",
    "refuse_first_come",
    "refuse_servers",
    "require_built",
    "shrunk",
]
