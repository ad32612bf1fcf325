"""Prepare a job on all ranks that torchrun or Slurm started, and check that the ranks agree.

The first rank of each host prepares first; the other ranks of the host then reuse the files that
it stored. Each rank writes its facts to the job's store, and rank 0 reports differences. Versions
of this package and of torch must be equal too, because messages between ranks may change with them.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.errors import ConfigError, named
from phalanx.launch.failure import PeerFailed, lost_peer_code
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import num_cores
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
    """Return the result of `prepare`, after checking that all ranks have equal facts.

    The first rank of each host calls `prepare` before the other ranks of the host do.
    """
    with failing_together(env, store):
        # rank     0 (host A)    1 (A)      2 (host B)    3 (B)
        #          prepare       wait 0     prepare       wait 2
        #          facts         prepare    facts         prepare         from files of the first
        # rank 0 waits for the last, reads all texts only if one differs, and releases all
        host = socket.gethostname()
        store.set(f"host of {env.rank}", host)
        if env.local_rank > 0:
            # Without this, ranks would share memory, and a GPU by its number, across hosts.
            if (other := _read(store, f"host of {env.rank - 1}")) != host:
                raise ConfigError(
                    f"LOCAL_RANK {env.local_rank} of {host} is rank {env.rank}, but rank "
                    f"{env.rank - 1} is on {other}: the ranks of a host must be consecutive; deal "
                    "them out host by host, as mpirun --map-by slot and mpiexec -ppn do"
                )
            _read(store, env.here.start)
        with PULSE.doing("preparing the job"):
            value = prepare()
        versions: dict[str, Any] = {}
        for package, name in (("phalanx-train", "phalanx"), ("torch", "torch")):
            with suppress(metadata.PackageNotFoundError):  # imported from source, not installed
                # without a build tag such as +cpu
                versions[f"version of {name}"] = metadata.version(package).partition("+")[0]
        text = json.dumps(versions | dict(facts(value)), sort_keys=True)
        store.set(f"{env.rank}", text)
        # Each rank compares with the first text set: rank 0 reads all texts only on a mismatch.
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
        _read(store, "all")
    return value


def own_cores(env: RankEnv, store: Store) -> int:
    """Return the number of cores of this rank: its part of those that it may use.

    Ranks of torchrun may all use all cores; srun and mpirun may bind each rank to some. A mask
    alone does not say which: it is as narrow where a cpuset holds all ranks.
    """
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    store.set(f"cores of {env.rank}", json.dumps(sorted(mask)))
    masks = [json.loads(_read(store, f"cores of {rank}")) for rank in env.here]
    return max(1, num_cores() // sum(not mask.isdisjoint(each) for each in masks))


@contextmanager
def failing_together(env: RankEnv, store: Store) -> Generator[None]:
    """If the block raises, `agree` raises PeerFailed on all other ranks of the job."""
    import torch.distributed as dist

    try:
        yield
    except dist.DistNetworkError as error:
        failed = PeerFailed("the rank that hosts the store has ended")
        failed.exit_code = lost_peer_code()
        raise failed from error
    except BaseException:
        with suppress(RuntimeError):  # the store may have ended with rank 0
            for key in (f"{env.rank}", "compared", "all"):
                store.set(key, FAILED)
        raise


def _read(store: Store, key: int | str) -> str:
    with PULSE.waiting("waiting for other ranks to prepare the job"):
        text = store.get(f"{key}").decode()
    if text == FAILED:
        raise PeerFailed("another rank could not prepare the job; see that rank's error")
    return text


def check_same(facts: list[dict[str, Any]], names: Sequence[str] = ()) -> None:
    """Raise ConfigError if ranks differ from rank 0; name these ranks and the differing facts.

    Messages call the ranks by `names`, or by their numbers.
    """
    ours = facts[0]
    others = [rank for rank, theirs in enumerate(facts) if theirs != ours]
    if not others:
        return
    theirs = facts[others[0]]
    differing = [
        f"{name} ({ours.get(name)} on {named([0], names)}, {theirs.get(name)} on "
        f"{named(others[:1], names)})"
        for name in ours | theirs
        if ours.get(name) != theirs.get(name)
    ]
    raise ConfigError(
        f"{named(others, names)} would run a different job than {named([0], names)}: they differ "
        f"in {'; '.join(differing)}; give all hosts the same settings, data, packages and Python "
        "(whose standard library is the default data)"
    )
