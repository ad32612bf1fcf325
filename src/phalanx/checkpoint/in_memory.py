"""Keep the state of a launched job in the memory of its hosts, where restarts find it.

    host      0             1             2
    writes    files of 0    files of 1    files of 2    into `Launched.folder`, which outlives ranks
    gets      files of 2    files of 0    files of 1    while training continues

A state in memory is a checkpoint as on disk, but no host has all its files. It is complete once
each file is on two hosts; only then each host removes the former state. After the loss of a host
the others have all files; after the loss of two neighbours the run resumes from the disk. Before a
resume, `recover` sends each host the files that it lacks.
(Gemini, Wang et al., SOSP 2023, groups hosts, where a ring has more pairs that hold all of a file.)
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from phalanx.account.host import free_memory_bytes
from phalanx.checkpoint import index, manifest
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.optimizer_state import AnyOptimizer
from phalanx.checkpoint.saver import Save, Saver
from phalanx.checkpoint.sharding import file_of
from phalanx.checkpoint.state import local_shards_with_moments
from phalanx.comm.file_exchange import FileExchange, FileTransfer
from phalanx.comm.join import job_store
from phalanx.comm.together import all_or_none, gather_objects, max_over_ranks
from phalanx.errors import CheckpointError
from phalanx.launch import interface
from phalanx.launch.launched import is_restarted, launched
from phalanx.launch.rank_env import RankEnv, is_under_torchrun, read_rank_env
from phalanx.launch.torchrun import meet
from phalanx.report.units import size_text
from phalanx.storage import PARTIAL, Checksum, checksum, free_bytes, publish_folder

SHARE: Final = 0.04
"""Part of the time of training that saves may take if the settings name no number of steps."""

NUM_MEASURED: Final = 3
"""Steps whose time is measured for that."""

RECOVERY_S: Final = 600.0
"""Longest wait of a restart for another host, in seconds."""


def traffic(files: Mapping[str, Checksum], hosts: Sequence[range]) -> list[FileTransfer]:
    """Return what ranks send to the next host in a save.

    Args:
        files: size and checksum of the files of the ranks, by name; of other files too.
        hosts: the ranks of each host.
    """
    following = hosts[1:] and [*hosts[1:], hosts[0]]
    return [
        FileTransfer(rank, after[n % len(after)], name, files[name][0])
        for host, after in zip(hosts, following, strict=False)
        for n, rank in enumerate(host)
        if (name := file_of(rank)) in files
    ]


class MemorySaver(Saver):
    """Saves the states of a run in the memory of its hosts; see the module.

    Attributes:
        hosts: the ranks of each host.
        exchange: the connections to other hosts; None without others.
    """

    def __init__(self, run: Path, num_stages: int = 1) -> None:
        """Connect the ranks of a launched job for saves of the run in the folder `run` on disk."""
        job = launched()
        assert job is not None, "an agent of `phalanx launch` has started this rank"
        folder = Path(job.folder, manifest.IN_MEMORY, *Path(os.path.abspath(run)).parts[1:])
        self._env = read_rank_env()
        self.hosts = sorted(set(gather_objects(self._env.here)), key=lambda ranks: ranks.start)
        super().__init__(folder, num_stages=num_stages)
        self.exchange = None
        if len(self.hosts) > 1:
            keys, limit_s = dist.PrefixStore("files", self._store), self._progress.timeout_s
            self.exchange = FileExchange(keys, self._env.rank, self._env.num_ranks, limit_s)

    def check_room(self, model: nn.Module, optimizer: AnyOptimizer) -> None:
        """Check that this host has the memory; every rank calls this together, before a step.

        Raises:
            CheckpointError: a host has too little; the message has the calculation.
        """
        infos = self._ours(held := local_shards_with_moments(model, optimizer))
        here, files = self._env.here, dict[str, Checksum]()  # without their checksums
        for rank in range(self._env.num_ranks):
            written = self._plan.writes_of(rank).values()
            files[file_of(rank)] = sum(info.num_bytes for info in written), ""
        whole = sum(num_bytes for num_bytes, _ in files.values())
        own = sum(files[file_of(rank)][0] for rank in here)
        copies = sum(each.num_bytes for each in traffic(files, self.hosts) if each.target in here)
        needed = whole + own + copies + own
        gather_objects(None)  # the ranks of a host read before any allocates
        left = min(free_memory_bytes(), free_bytes(self.run))
        left += sum(path.stat().st_size for path in self.run.rglob("*"))  # which saves replace

        def check() -> None:
            if needed > left:
                raise CheckpointError(
                    f"host {platform.node()} needs {size_text(needed)}: {size_text(whole)} for the "
                    f"whole state, which a restart reads, and for the next save {size_text(own)} "
                    f"of its {len(here)} ranks, as much to write from, and {size_text(copies)} of "
                    f"another host; it has {size_text(left)}; set memory_every to 0, so that "
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
        self._store.set_timeout(timedelta(seconds=self._progress.timeout_s))

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
        #     first of a host    index, manifest |      |      | remove the former state, rename
        #     each rank                          | send its file, get others | "done" | wait for all
        #
        #     killed before all are done      the former state, or this one if its files are left
        #     killed after it                 this state: `recover` reads .partial folders too
        store, is_first = self._store, self._env.local_rank == 0
        if is_first and self._env.rank > 0:
            index.write(save.partial, save.plan)
            (save.partial / manifest.NAME).write_bytes(store.get("manifest"))
        if self.exchange is not None:
            files = json.loads(store.get("manifest"))["files"]
            moved = functools.partial(self._progress.renew, save.number)
            self.exchange.run(traffic(files, self.hosts), save.partial, moved)
        if store.add("done", 1) == save.number * save.plan.num_ranks:
            store.delete_key(f"{save.number - 1} is complete")
            store.set(f"{save.number} is complete", "")
        store.get(f"{save.number} is complete")
        if is_first:
            for folder in save.final.parent.iterdir():
                if folder != save.partial:
                    shutil.rmtree(folder)
            publish_folder(save.partial, save.final)


class MemoryPace:
    """Saves in memory after some steps, so that a restart loses at most K.

    A save begins every K/2 steps, and is complete when the next begins:

        K = 4    step     1    2    3    4    5    6
                 save          begin     |    |
                 4 is over, 2 is not complete: wait for it, then begin the next

    If K is unset, training waits for the first save; K/2 steps take its time divided by SHARE.
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
            (period,) = max_over_ranks([math.ceil(self._first_s / (SHARE * step_s))])
            self.period = max(period, num_steps)  # as many steps have passed without a save
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

    `every` is the setting memory_every; for the other arguments see `MemorySaver` and `MemoryPace`.

    Raises:
        CheckpointError: `every` is set, and a host has too little memory.
    """
    job = launched()
    if job is None or every == 0 or (every is None and not job.restarts):
        return None
    saver = MemorySaver(run, num_stages)
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

    `manifest.saved_states` has it from then on. Nothing happens in the first generation, nor in
    further calls.

    Raises:
        PeerLost: another host has gone.
    """
    job = launched()
    if job is None or not (is_restarted() and is_under_torchrun()):
        return
    env, root = read_rank_env(), Path(job.folder) / manifest.IN_MEMORY
    store: Any = meet(env, RECOVERY_S)
    store.set_timeout(timedelta(seconds=RECOVERY_S))
    interface.choose(dist.PrefixStore("interface", store), env)
    if env.local_rank == 0:
        _recover(root, env, store)
    for name in json.loads(store.get("recovered")):
        manifest.RECOVERED[Path("/", name).parent.parent] = root / name


def _recover(root: Path, env: RankEnv, store: Any) -> None:
    """Bring the newest state of each run to this host, the folder `root`, and remove all else."""
    # Every host makes the same choice and the same list of transfers:
    #
    #     host               0                    1                      2 (new)
    #     has of step 40     rank 0, rank 1       rank 1, rank 2         -
    #     gets               rank 2 from 1        rank 0 from 0          all, in turns from 0 and 1
    store.set(f"{env.rank}", json.dumps([env.num_here, _states_in(root), free_bytes(root)]))
    firsts, hosts, left = [0], list[dict[str, Any]](), list[int]()
    while firsts[-1] < env.num_ranks:
        num_here, states, num_free = json.loads(store.get(f"{firsts[-1]}"))
        firsts.append(firsts[-1] + num_here)
        hosts.append(states)
        left.append(num_free)
    chosen: dict[Path, str] = {}  # by the folder of a run's checkpoints
    transfers: list[FileTransfer] = []
    for name, sha256 in sorted({(n, each[0]) for host in hosts for n, each in host.items()})[::-1]:
        held = [host[name] if host.get(name, [""])[0] == sha256 else [sha256, {}] for host in hosts]
        sizes: dict[str, int] = next(each[2] for each in held if each[1])
        having = {file: [at for at, each in enumerate(held) if file in each[1]] for file in sizes}
        if Path(name).parent in chosen or not all(having.values()):
            continue
        moved = [
            FileTransfer(places[at % len(places)], at, f"{name}/{file}", sizes[file])
            for file, places in having.items()
            for at in range(len(hosts))
            if at not in places
        ]
        needed = [sum(e.num_bytes for e in moved if e.target == at) for at in range(len(hosts))]
        if all(map(operator.le, needed, left)):  # else the run resumes from the disk
            left = [*map(operator.sub, left, needed)]
            chosen[Path(name).parent] = name
            transfers += moved
    keys = dist.PrefixStore("files", store)
    FileExchange(keys, firsts.index(env.rank), len(hosts), RECOVERY_S).run(transfers, root)
    for folder in {path.parent for path in root.rglob("*") if path.is_file()}:
        if str(folder.relative_to(root)) not in chosen.values():
            shutil.rmtree(folder)
    if store.add("ready", 1) == len(hosts):
        store.set("recovered", json.dumps([*chosen.values()]))
    store.get("recovered")  # the connections stay until then


def _states_in(root: Path) -> dict[str, list[Any]]:
    """Return the states of this host: name -> [sha256 of the manifest, files here, all sizes]."""
    states: dict[str, list[Any]] = {}
    for path in [*root.rglob(f"checkpoints/*/{manifest.NAME}")]:
        folder = path.parent
        with suppress(CheckpointError, OSError):  # lost while it wrote the manifest, or named it
            needed = {name: size for name, (size, _) in manifest.read(folder).files.items()}
            if folder.suffix == PARTIAL:  # each file is whole that has its final name
                folder = folder.rename(folder.with_suffix(""))
            needed[manifest.NAME], sha256 = checksum(folder / manifest.NAME)
            here = [name for name in needed if (folder / name).exists()]
            states[str(folder.relative_to(root))] = [sha256, here, needed]
    return states
