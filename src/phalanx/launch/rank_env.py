"""The rank of this process, as the environment of torchrun or another launcher defines it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from phalanx.errors import ConfigError

MOST_DIGITS: Final = 9
"""Most digits of a number in these environment variables."""


@dataclass(frozen=True)
class RankEnv:
    """The rank of this process and the number of ranks, in the job and on the host (`num_here`)."""

    rank: int
    num_ranks: int
    local_rank: int
    num_here: int

    @property
    def here(self) -> range:
        """The ranks of this host."""
        first = self.rank - self.local_rank
        return range(first, first + self.num_here)


def is_under_torchrun() -> bool:
    """Return whether RANK and WORLD_SIZE are set, so that this process is a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def read_rank_env() -> RankEnv:
    """Read the environment variables; without LOCAL_RANK this is the only rank of its host.

    Raises:
        ConfigError: a variable is not a number, or contradicts another variable.
    """
    num_here = _number("LOCAL_WORLD_SIZE", 1, least=1)
    if "LOCAL_RANK" not in os.environ and num_here > 1:
        raise ConfigError(
            f"LOCAL_RANK is not set, but LOCAL_WORLD_SIZE is {num_here}; set LOCAL_RANK to the "
            f"number of this process on its host, from 0 to {num_here - 1}"
        )
    num_ranks = _number("WORLD_SIZE", 1, least=1)
    env = RankEnv(_number("RANK", 0), num_ranks, _number("LOCAL_RANK", 0), num_here)
    for name, value, other, limit in (
        ("RANK", env.rank, "WORLD_SIZE", env.num_ranks),
        ("LOCAL_RANK", env.local_rank, "LOCAL_WORLD_SIZE", num_here),
    ):
        if value >= limit:
            raise ConfigError(
                f"{name} is {value} and {other} is {os.environ.get(other, limit)}; {name} counts "
                f"from 0 to {limit - 1}"
            )
    before, after = env.rank - env.local_rank, env.num_ranks - env.rank
    if before < 0 or after < num_here - env.local_rank:
        raise ConfigError(
            f"RANK {env.rank} of WORLD_SIZE {env.num_ranks} cannot be LOCAL_RANK "
            f"{env.local_rank} of LOCAL_WORLD_SIZE {num_here}: the ranks of a host must be "
            "consecutive; set all four as torchrun does"
        )
    return env


def _number(name: str, default: int, least: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) < least:
        shown = text if len(text) <= 2 * MOST_DIGITS else f"{text[:MOST_DIGITS]}..."
        raise ConfigError(
            f"the environment's {name} is {shown!r}; expected a whole number from {least} "
            f"with at most {MOST_DIGITS} digits"
        )
    return int(text)
