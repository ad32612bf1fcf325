"""Join the job that torchrun (or Slurm) has started this process for.

The ranks meet at a store before they join: the first rank of each host prepares what the job needs,
then the others of the host do and find it ready. Only when all have it, and have the same, do they
join and are bound by the timeout of collectives. A rank that another's failure stops says nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from phalanx.errors import ConfigError, PhalanxError, TrainingError, message_of
from phalanx.launch.local import num_cores
from phalanx.launch.malloc import keep_freed_memory
from phalanx.launch.rank import is_reader_gone

if TYPE_CHECKING:
    from torch.distributed import Store

Value = TypeVar("Value")
Result = TypeVar("Result")

PREPARATION_S = 24 * 3600.0
"""Longest wait for the preparation of another rank, which may read a large corpus."""

QUIET_S = 5.0
"""How long a rank without words of its own stays: torchrun ends all ranks when the first leaves."""

FAILED = "failed"


class PeerFailed(TrainingError):
    """Another rank tells the error; this one ends with it."""


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job, as the environment says.

    Attributes:
        rank: global rank.
        num_ranks: ranks in the job.
        local_rank: rank among those of this host.
        num_here: ranks on this host.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_here: int


def is_under_torchrun() -> bool:
    """Return whether the environment says that this process is a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def read_place() -> Place:
    """Read the environment; without LOCAL_RANK this is the only rank of its host, as under Slurm.

    Raises:
        ConfigError: LOCAL_RANK is missing though the host has several ranks, or no number.
    """
    num_here = _number("LOCAL_WORLD_SIZE", 1)
    if "LOCAL_RANK" not in os.environ and num_here > 1:
        raise ConfigError(
            f"LOCAL_RANK is not set, but LOCAL_WORLD_SIZE is {num_here}; set LOCAL_RANK to the "
            f"number of this process on its host, from 0 to {num_here - 1}"
        )
    return Place(_number("RANK", 0), _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0), num_here)


def run_here(
    prepare: Callable[[], Value],
    facts: Callable[[Value], Mapping[str, Any]],
    function: Callable[[Value], Result],
    *,
    device: str = "auto",
    threads: int | None = None,
    timeout_s: float = 600.0,
) -> Result:
    """Prepare, join the job, run `function` on what was prepared, and wait for the other ranks.

    Args:
        prepare: called before the job is joined, on the first rank of each host and then on its
            others; it may take as long as it needs.
        facts: what all ranks must agree on in a prepared value, by name; plain values for JSON.
        function: called with torch.distributed initialised.
        device: "auto", "cpu" or "cuda".
        threads: CPU threads of this rank; the host's cores shared evenly if None.
        timeout_s: longest wait for another rank in one collective, in seconds.

    Raises:
        ConfigError: the environment is incomplete, the host has too few GPUs, or ranks differ in
            `facts` (raised on rank 0).
        PeerFailed: another rank could not prepare.
    """
    import torch.distributed as dist

    from phalanx import mesh
    from phalanx.comm.primitives import barrier

    place = read_place()
    device = _use_device(place, device, threads)
    mesh.allow_files()
    store = _meet(place, timeout_s)
    value = _prepare(place, store, prepare, facts)
    store.set_timeout(timedelta(seconds=timeout_s))
    if not dist.is_initialized():  # by an earlier run of this process
        mesh.join(
            place.rank,
            place.num_ranks,
            store=dist.PrefixStore("join", store),
            device=device,
            timeout_s=timeout_s,
        )
    result = function(value)
    barrier()
    return result


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"the environment's {name} is '{text}'; expected a whole number from 0")
    return int(text)


def _use_device(place: Place, name: str, threads: int | None) -> str:
    """Give this process its threads and its GPU, and return the kind of its device."""
    import torch

    keep_freed_memory()
    torch.set_num_threads(threads or max(1, num_cores() // place.num_here))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        num_gpus = torch.cuda.device_count()
        num_needed = max(place.num_here, place.local_rank + 1)
        if num_needed > num_gpus:
            fewer = f"start at most {num_gpus} on each (--nproc-per-node), or " if num_gpus else ""
            raise ConfigError(
                f"this host runs {num_needed} ranks, but has {num_gpus} GPUs; {fewer}use "
                "--device cpu"
            )
        torch.cuda.set_device(place.local_rank)
    return name


def _meet(place: Place, timeout_s: float) -> Store:
    """Return a store that only this call of `run_here` writes to, on all ranks."""
    import torch.distributed as dist

    try:
        store, _, _ = next(
            dist.rendezvous(
                "env://", place.rank, place.num_ranks, timeout=timedelta(seconds=timeout_s)
            )
        )
    except (ValueError, dist.DistError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, but the ranks cannot meet: {reason}; set MASTER_ADDR "
            f"and MASTER_PORT to the host of rank 0 and a free port on it, start all ranks within "
            f"{timeout_s:g} s (--timeout-s), or unset RANK"
        ) from error
    store.set_timeout(timedelta(seconds=PREPARATION_S))
    # Each rank counts its own calls, and all make the same.
    call = store.add(f"phalanx/calls/{place.rank}", 1)
    return dist.PrefixStore(f"phalanx/{call}", store)


def _prepare(
    place: Place,
    store: Store,
    prepare: Callable[[], Value],
    facts: Callable[[Value], Mapping[str, Any]],
) -> Value:
    """Prepare after the first rank of the host, and wait until all ranks have the same."""
    try:
        if place.local_rank > 0:
            _read(store, place.rank - place.local_rank)
        value = prepare()
        store.set(f"{place.rank}", json.dumps(facts(value)))
        if place.rank == 0:
            check_same([json.loads(_read(store, rank)) for rank in range(place.num_ranks)])
            store.set("all", "ready")
    except BaseException:
        with suppress(RuntimeError):  # the store may have gone with rank 0
            store.set(f"{place.rank}", FAILED)
            store.set("all", FAILED)
        raise
    _read(store, "all")
    return value


def _read(store: Store, key: int | str) -> str:
    import torch.distributed as dist

    try:
        text = store.get(f"{key}").decode()
    except dist.DistNetworkError as error:
        raise PeerFailed("the rank that holds the store has left") from error
    if text == FAILED:
        raise PeerFailed("another rank could not prepare the job; its own message says why")
    return text


def check_same(facts: list[dict[str, Any]]) -> None:
    """Check that all ranks have prepared the same.

    Raises:
        ConfigError: they have not; names the ranks and what differs.
    """
    others = [rank for rank, theirs in enumerate(facts) if theirs != facts[0]]
    if not others:
        return
    theirs = facts[others[0]]
    differing = [
        f"{name} ({facts[0].get(name)} on rank 0, {theirs.get(name)} on rank {others[0]})"
        for name in facts[0] | theirs
        if facts[0].get(name) != theirs.get(name)
    ]
    ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    raise ConfigError(
        f"{ranks} would run another job than rank 0: they differ in {'; '.join(differing)}; give "
        "all hosts the same settings, data and Python (whose standard library is the default data)"
    )


def leave(exit_code: int) -> NoReturn:
    """End this rank without tearing its threads down, which sometimes aborts what succeeded."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def leave_failed(error: BaseException, *, is_everyones: bool = False) -> NoReturn:
    """Print this rank's own error, the last thing it prints, and leave.

    An error of the user's is one message; any other comes with its traceback.

    Args:
        error: what went wrong.
        is_everyones: every rank meets it by itself, so that one of each host says it.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if isinstance(error, KeyboardInterrupt):
        leave(128 + getattr(error, "signum", signal.SIGINT))
    if is_reader_gone(error):
        leave(141)
    is_others = is_everyones and os.environ.get("LOCAL_RANK", "0") != "0"
    if isinstance(error, PeerFailed) or is_others:
        time.sleep(QUIET_S)
        leave(1)
    rank = os.environ["RANK"]
    if isinstance(error, PhalanxError):
        # There is no command line under torchrun.
        print(f"rank {rank}: {message_of(error)}", file=sys.stderr)  # noqa: T201
        leave(error.exit_code)
    if isinstance(error, Exception):
        handler = get_error_handler()  # torchrun shows what this writes in its own summary
        handler.initialize()
        handler.record_exception(error)
    print(f"rank {rank} failed:", file=sys.stderr)  # noqa: T201
    traceback.print_exception(error)
    leave(1)
