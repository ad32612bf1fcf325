"""Catalogue of algorithms, the collectives each implements, and the list of steps of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final

from phalanx.comm.algorithms import by_halving, by_host, by_ring, by_tree, direct
from phalanx.comm.algorithms.steps import Steps
from phalanx.errors import ConfigError, nearest

ALGORITHMS: Final[Mapping[str, ModuleType]] = {
    "ring": by_ring,
    "tree": by_tree,
    "halving-doubling": by_halving,
    "direct": direct,
    "hierarchical": by_host,
}
"""Name of an algorithm -> module of its collectives; `hierarchical/4` means 4 ranks per host."""

ROOTED: Final = ("broadcast", "scatter", "gather", "reduce")
"""Collectives with a root rank, which is the second argument of their functions."""

COLLECTIVES: Final = (
    *ROOTED,
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "barrier",
)


def list_steps(collective: str, algorithm: str, num_ranks: int, root: int = 0) -> Steps:
    """Return the steps of a collective, with the messages of all ranks.

    Args:
        collective: one of COLLECTIVES.
        algorithm: one of ALGORITHMS, such as "ring" or "hierarchical/4".
        num_ranks: P, at least 1.
        root: root rank of a collective in ROOTED; ignored for others.

    Raises:
        ConfigError: the algorithm does not exist, or does not implement the collective.
    """
    return _listed(collective, algorithm, num_ranks, root if collective in ROOTED else 0)


def algorithms_of(collective: str) -> list[str]:
    """Return the names of the algorithms that implement a collective."""
    name = _function(collective)
    return [algorithm for algorithm, module in ALGORITHMS.items() if hasattr(module, name)]


@functools.lru_cache(maxsize=256)
def _listed(collective: str, algorithm: str, num_ranks: int, root: int) -> Steps:
    kind, slash, option = algorithm.partition("/")
    known = algorithms_of(collective)
    if kind not in known:
        raise ConfigError(
            f"algorithm is '{algorithm}'{nearest(kind, known)}; {collective} is implemented by "
            f"{', '.join(known)}"
        )
    arguments = [num_ranks, *([root] if collective in ROOTED else [])]
    if kind == "hierarchical":
        if not option.isdecimal() or int(option) < 1:
            raise ConfigError(
                f"algorithm is '{algorithm}'; expected hierarchical/RANKS, ranks a host; the "
                f"nearest is hierarchical/{max(1, num_ranks // 2)}"
            )
        arguments.append(int(option))
    elif slash:
        raise ConfigError(f"algorithm is '{algorithm}'; {kind} takes no option; write '{kind}'")
    make: Callable[..., Steps] = getattr(ALGORITHMS[kind], _function(collective))
    return make(*arguments)


def _function(collective: str) -> str:
    """Return the function name of a collective; a barrier is an all-gather with unused output."""
    return "all_gather" if collective == "barrier" else collective.replace("-", "_")
