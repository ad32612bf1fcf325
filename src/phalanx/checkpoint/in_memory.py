"""Keep the state of a launched job in the memory of its hosts, where restarts find it.

    host      0             1             2
    writes    files of 0    files of 1    files of 2    into `Launched.folder`, which outlives ranks
    gets      files of 2    files of 0    files of 1    while training continues

A state in memory is a checkpoint as on disk, but no host has all its files. It is complete once
each file is on two hosts; then each host gives its folder the final name, and removes the former
state. After the loss of a host the others have all files; after the loss of two neighbours the run
resumes from the disk. Before a resume, `recover` sends each host the files that it lacks.
(Gemini, Wang et al., SOSP 2023, groups hosts, where a ring has more pairs that hold all of a file.)
"""

from __future__ import annotations

import functools
import json
import math
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from phalanx.account.host import free_memory_bytes
from phalanx.checkpoint import index, manifest, tensor_file
from phalanx.checkpoint.files import remove_older
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.optimizer_state import AnyOptimizer
from phalanx.checkpoint.saver import Save, Saver
from phalanx.checkpoint.sharding import WritePlan, file_of
from phalanx.checkpoint.state import local_shards_with_moments
from phalanx.comm.file_exchange import FileExchange, FileTransfer
from phalanx.comm.join import job_store
from phalanx.comm.together import all_or_none, gather_objects, max_over_ranks
from phalanx.errors import CheckpointError, PeerLost
from phalanx.launch import interface
from phalanx.launch.launched import is_restarted, launched
from phalanx.launch.rank_env import RankEnv, is_under_torchrun, read_rank_env
from phalanx.launch.torchrun import meet
from phalanx.report.units import size_text
from phalanx.storage import checksum, free_bytes, publish_folder

SHARE: Final = 0.04
"""Part of the time of training that saves may take if the settings name no number of steps."""

NUM_MEASURED: Final = 3
"""Steps whose time is measured for that."""

RECOVERY_S: Final = 600.0
"""Longest wait of a restart for another host, in seconds."""

POLL_S: Final = 0.005
"""Seconds between two looks of a writer at the store."""


class RankTraffic(NamedTuple):
    """Bytes of a save on one rank: of its file, sent to the next host, and received."""

    written: int
    sent: int
    received: int


def receivers(hosts: Sequence[range]) -> dict[int, int]:
    """Return for each rank the rank of the next of the `hosts` that gets its file, if any does."""
    following = hosts[1:] and [*hosts[1:], hosts[0]]
    pairs = zip(hosts, following, strict=False)
    return {rank: after[n % len(after)] for here, after in pairs for n, rank in enumerate(here)}


def traffic(plan: WritePlan, hosts: Sequence[range]) -> list[RankTraffic]:
    """Return the bytes of one save in memory by rank; `hosts` has the ranks of each host."""
    infos = [plan.writes_of(rank) for rank in range(plan.num_ranks)]
    sizes = [tensor_file.file_bytes(each) if each else 0 for each in infos]
    to = receivers(hosts)
    received = [0] * plan.num_ranks
    for source, target in to.items():
        received[target] += sizes[source]
    return [RankTraffic(n, n if to else 0, got) for n, got in zip(sizes, received, strict=True)]


class MemorySaver(Saver):
    """Saves the states of a run in the memory of its hosts; see the module.

    Attributes:
        hosts: the ranks of each host.
        sent: bytes that this rank has sent to other hosts, and received from them.
    """

    def __init__(self, run: Path, *, timeout_s: float | None = None, num_stages: int = 1) -> None:
        """Connect the ranks of a launched job for saves of the run in the folder `run` on disk."""
        folder = manifest.in_memory_of(run)
        assert folder is not None, "an agent of `phalanx launch` has started this rank"
        self._env = read_rank_env()
        self.hosts = sorted(set(gather_objects(self._env.here)), key=lambda ranks: ranks.start)
        self.sent = (0, 0)
        self._planned: tuple[WritePlan, list[FileTransfer]] | None = None
        super().__init__(folder, keep=1, timeout_s=timeout_s, num_stages=num_stages)
        self._exchange = None
        if len(self.hosts) > 1:
            keys, limit_s = dist.PrefixStore("files", self._store), self._progress.timeout_s
            self._exchange = FileExchange(keys, self._env.rank, self._env.num_ranks, limit_s)

    def check_room(self, model: nn.Module, optimizer: AnyOptimizer) -> None:
        """Check that this host has the memory; every rank calls this together, before a step.

        Raises:
            CheckpointError: a host has too little; the message has the calculation.
        """
        infos = self._ours(held := local_shards_with_moments(model, optimizer))
        sizes, here = traffic(self._plan, self.hosts), self._env.here
        whole = sum(size.written for size in sizes)
        own = sum(sizes[rank].written for rank in here)
        copies = sum(sizes[rank].received for rank in here)
        needed = whole + own + copies + own
        gather_objects(None)  # the ranks of a host read before any allocates
        left = min(free_memory_bytes(), free_bytes(self.run))

        def check() -> None:
            if needed > left:
                raise CheckpointError(
                    f"host {platform.node()} needs {size_text(needed)}: {size_text(whole)} for the "
                    f"whole state, which a restart reads, and for the next save {size_text(own)} "
                    f"of its {len(here)} ranks, as much to write from, and {size_text(copies)} of "
                    f"another host; {size_text(left)} are free; set memory_every to 0, so that "
                    "restarts resume from the disk, or start fewer ranks on this host"
                )

        all_or_none(check, "cannot keep the state in memory")
        self._copy.reserve([held[name].local for name in infos])

    @override
    def _claim(self) -> str:
        return secrets.token_hex(8)

    @override
    def _check_shared(self, mark: str) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        self._store: Any = dist.PrefixStore(f"in memory/{mark}", job_store())

    @override
    def _open(self, save: Save) -> None:
        save.partial.mkdir(parents=True, exist_ok=True)

    @override
    def _publish(self, save: Save, about: Manifest) -> None:
        manifest.write(save.partial, about)
        self._store.set("manifest", (save.partial / manifest.NAME).read_text())

    @override
    def _conclude(self, save: Save) -> None:
        # All ranks have written, and rank 0 has the manifest of all files in the store:
        #
        #     each rank          send its file, get others | done | wait until all are done
        #     first of a host    index, manifest | rename the folder | remove the former state
        #
        # Keys of the store are used again: all ranks have read a value before the next is set.
        store = self._store
        if self._exchange is not None:
            moved = functools.partial(self._progress.renew, save.number)
            sizes = self._exchange.run(self._transfers(save.plan), save.partial, moved)
            self.sent = (self.sent[0] + sizes[0], self.sent[1] + sizes[1])
        if store.add("done", 1) == save.number * save.plan.num_ranks:
            store.set("complete", str(save.number))
        while not store.check(["complete"]) or int(store.get("complete")) < save.number:
            if self._progress.is_late:
                raise PeerLost("another rank does not get the files of other hosts")
            time.sleep(POLL_S)
        if self._env.local_rank == 0:
            if self._env.rank > 0:
                index.write(save.partial, save.plan)
                (save.partial / manifest.NAME).write_bytes(store.get("manifest"))
            publish_folder(save.partial, save.final)
            remove_older(self.run, self.keep)

    def _transfers(self, plan: WritePlan) -> list[FileTransfer]:
        if self._planned is None or self._planned[0] is not plan:
            sizes, pairs = traffic(plan, self.hosts), receivers(self.hosts).items()
            files = [FileTransfer(a, b, file_of(a), sizes[a].sent) for a, b in pairs]
            self._planned = plan, [each for each in files if each.num_bytes]
        return self._planned[1]


class MemoryPace:
    """Saves in memory after some steps, so that a restart loses at most K.

    A save begins every K/2 steps, and is complete when the next begins:

        K = 4    step     1    2    3    4    5    6
                 save          begin     |    |
                 4 is over, 2 is not complete: wait for it, then begin the next

    If K is unset, the first save takes SHARE of the time of K/2 steps; training waits for it.
    """

    def __init__(
        self, saver: MemorySaver, every: int | None, steps_done: int, say: Callable[[str], None]
    ) -> None:
        """Count from `steps_done`; `every` is K, and `say` shows the K that is measured."""
        self.saver, self._every, self._say = saver, every, say
        self.period = 1 if every is None else -(-every // 2)
        self._begun, self._begun_s, self._first_s = steps_done, 0.0, 0.0

    def after_step(self, done: int, begin: Callable[[], None]) -> None:
        """Begin a save by `begin` if one is due after `done` steps; all ranks call this together.

        Raises:
            CheckpointError: the previous save failed.
            PeerLost: the previous save failed because another rank is lost.
        """
        num_steps, now_s = done - self._begun, time.monotonic()
        self.saver.poll()
        if num_steps >= (self._every or 2 * self.period) - self.period:
            self.saver.finish()
        if self._first_s and num_steps >= NUM_MEASURED:
            step_s = (now_s - self._begun_s - self._first_s) / num_steps
            (self.period,) = max_over_ranks([math.ceil(self._first_s / (SHARE * step_s))])
            self._first_s, self._every = 0.0, 2 * self.period
            self._say(f"saves the state in memory; a restart loses at most {self._every} steps")
        if num_steps < self.period or self._first_s:
            return
        self._begun, self._begun_s = done, now_s
        begin()
        if self._every is None or self._every == 1:
            self.saver.finish()
        if self._every is None:
            self._first_s = time.monotonic() - now_s


def pace_of(
    run: Path,
    every: int | None,
    model: nn.Module,
    optimizer: AnyOptimizer,
    steps_done: int,
    say: Callable[[str], None],
    num_stages: int = 1,
) -> MemoryPace | None:
    """Return the saves in memory of a run, or None if it has none; every rank calls this together.

    Args:
        run: folder of the run on disk.
        every: most steps that a restart loses; 0: no saves in memory; None: as few as SHARE allows,
            in a job that is restarted after a loss.
        model: sharded model.
        optimizer: its optimizer.
        steps_done: steps of the run so far.
        say: shows a line to the user.
        num_stages: number of pipeline stages.

    Raises:
        CheckpointError: `every` is set, and a host has too little memory.
    """
    job = launched()
    if job is None or every == 0 or (every is None and not job.restarts):
        return None
    saver = MemorySaver(run, num_stages=num_stages)
    try:
        saver.check_room(model, optimizer)
    except CheckpointError as error:
        saver.__exit__(None, None, None)
        if every:
            raise
        say(f"{error}; restarts resume from the disk")
        return None
    return MemoryPace(saver, every, steps_done, say)


@functools.cache
def recover() -> None:
    """Bring the newest state in memory of each run to all hosts; every rank of a job calls this.

    It does nothing in the first generation, and when it is called again.

    Raises:
        PeerLost: another host has gone.
    """
    job = launched()
    if job is None or not (is_restarted() and is_under_torchrun()):
        return
    env = read_rank_env()
    store: Any = meet(env, RECOVERY_S)
    store.set_timeout(timedelta(seconds=RECOVERY_S))
    interface.choose(dist.PrefixStore("interface", store), env)
    if env.local_rank == 0:
        _recover(Path(job.folder) / manifest.IN_MEMORY, env, store)
    store.get("recovered")


def _recover(root: Path, env: RankEnv, store: Any) -> None:
    """Bring the newest state of each run to this host, the folder `root`, and remove all else."""
    # Every host makes the same choice and the same list of transfers:
    #
    #     host               0                    1                      2 (new)
    #     has of step 40     rank 0, rank 1       rank 1, rank 2         -
    #     gets               rank 2 from 1        rank 0 from 0          all, in turns from 0 and 1
    store.set(f"{env.rank}", json.dumps([env.num_here, _states_in(root)]))
    hosts: list[dict[str, list[Any]]] = []
    number, first = 0, 0
    while first < env.num_ranks:
        number = len(hosts) if first == env.rank else number
        num_here, states = json.loads(store.get(f"{first}"))
        hosts.append(states)
        first += num_here
    chosen: dict[Path, str] = {}  # by the folder of a run's checkpoints
    transfers: list[FileTransfer] = []
    for name, sha256 in sorted({(n, each[0]) for host in hosts for n, each in host.items()})[::-1]:
        states = [host[name] if host.get(name, [""])[0] == sha256 else None for host in hosts]
        sizes: dict[str, int] = next(each[2] for each in states if each is not None)
        holders = {
            file: [at for at, each in enumerate(states) if each is not None and file in each[1]]
            for file in sizes
        }
        if Path(name).parent in chosen or not all(holders.values()):
            continue
        chosen[Path(name).parent] = name
        transfers += [
            FileTransfer(having[at % len(having)], at, f"{name}/{file}", sizes[file])
            for file, having in holders.items()
            for at in range(len(hosts))
            if at not in having
        ]
    keys = dist.PrefixStore("files", store)
    exchange = FileExchange(keys, number, len(hosts), RECOVERY_S)
    exchange.run(transfers, root)
    for folder in root.rglob("checkpoints/*"):
        if str(folder.relative_to(root)) not in chosen.values():
            shutil.rmtree(folder)
    if store.add("ready", 1) == len(hosts):
        store.set("recovered", "")
    store.get("recovered")  # the connections stay until then


def _states_in(root: Path) -> dict[str, list[Any]]:
    """Return the states of this host: name -> [sha256 of the manifest, files here, all sizes]."""
    states: dict[str, list[Any]] = {}
    for path in root.rglob(f"checkpoints/*/{manifest.NAME}"):
        folder, (num_bytes, sha256) = path.parent, checksum(path)
        if not folder.suffix:
            needed = {name: size for name, (size, _) in manifest.read(folder).files.items()}
            needed[manifest.NAME] = num_bytes
            held = [name for name in needed if (folder / name).exists()]
            states[str(folder.relative_to(root))] = [sha256, held, needed]
    return states
