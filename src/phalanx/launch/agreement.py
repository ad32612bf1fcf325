"""Have the ranks that torchrun or Slurm has started prepare one job, and compare what they have.

The first rank of each host prepares, and then its others, which find what it has stored. Each rank
states its facts in the job's store, and rank 0 names what differs. Two versions of this package, or
of torch, are no one job: what the ranks send each other need not mean the same to both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.errors import ConfigError, named
from phalanx.launch.failure import PeerFailed
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.rank_env import RankEnv

if TYPE_CHECKING:
    from torch.distributed import Store

Value = TypeVar("Value")

FAILED = "failed"


def agree(
    env: RankEnv,
    store: Store,
    prepare: Callable[[], Value],
    facts: Callable[[Value], Mapping[str, Any]],
) -> Value:
    """Prepare after the first rank of the host, and wait until all ranks have the same."""
    try:
        if env.local_rank > 0:
            _read(store, env.here.start)
        with PULSE.doing("preparing the job"):
            value = prepare()
        text = json.dumps(_versions() | dict(facts(value)), sort_keys=True)
        store.set(f"{env.rank}", text)
        # Each compares with the first, so that rank 0 need not read as many texts as ranks.
        if store.compare_set("first", "", text).decode() != text:
            store.set("unlike", "")
        if store.add("prepared", 1) == env.num_ranks:
            store.set("compared", "")
        if env.rank == 0:
            _read(store, "compared")
            if store.check(["unlike"]):
                texts = store.multi_get([f"{rank}" for rank in range(env.num_ranks)])
                check_same([json.loads(text) for text in texts])
            store.set("all", "ready")
    except BaseException:
        with suppress(RuntimeError):  # the store may have gone with rank 0
            for key in (f"{env.rank}", "compared", "all"):
                store.set(key, FAILED)
        raise
    _read(store, "all")
    return value


def _read(store: Store, key: int | str) -> str:
    import torch.distributed as dist

    try:
        with PULSE.waiting("waiting for others to prepare the job"):
            text = store.get(f"{key}").decode()
    except dist.DistNetworkError as error:
        raise PeerFailed("the rank that holds the store has left") from error
    if text == FAILED:
        raise PeerFailed("another rank could not prepare the job; its own message says why")
    return text


def _versions() -> dict[str, str]:
    """Return the versions that all ranks must have; not of which kind a build of torch is."""
    versions: dict[str, str] = {}
    for package, name in (("phalanx-train", "phalanx"), ("torch", "torch")):
        with suppress(metadata.PackageNotFoundError):  # it is imported from its source
            versions[f"version of {name}"] = metadata.version(package).partition("+")[0]
    return versions


def check_same(facts: list[dict[str, Any]]) -> None:
    """Refuse a job of which not all ranks have prepared the same; name them and what differs."""
    ours = facts[0]
    others = [rank for rank, theirs in enumerate(facts) if theirs != ours]
    if not others:
        return
    theirs = facts[others[0]]
    differing = [
        f"{name} ({ours.get(name)} on rank 0, {theirs.get(name)} on rank {others[0]})"
        for name in ours | theirs
        if ours.get(name) != theirs.get(name)
    ]
    raise ConfigError(
        f"{named(others)} would run another job than rank 0: they differ in "
        f"{'; '.join(differing)}; give all hosts the same settings, data, packages and Python "
        "(whose standard library is the default data)"
    )
