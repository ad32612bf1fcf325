"""Keep the state of a launched job in the memory of its hosts, where restarts find it.

    host      0             1             2
    writes    files of 0    files of 1    files of 2    into `Launched.folder`, which outlives ranks
    gets      files of 2    files of 0    files of 1    while training continues

A state in memory is a checkpoint as on disk, but no host has all its files. It is complete once
each file is on two hosts; then each host gives its folder the final name, and removes the former
state. After the loss of a host the others have all files; after the loss of two neighbours the run
resumes from the disk. Before a resume, `recover` sends each host the files that it lacks.
(Wang et al., "Gemini", SOSP 2023, group hosts instead of a ring, so that fewer pairs share a fate.)
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
from phalanx.comm.file_exchange import FileExchange, FileTransfer, part_of, reserve
from phalanx.comm.join import job_store
from phalanx.comm.together import all_or_none, gather_objects, max_over_ranks
from phalanx.errors import CheckpointError, PeerLost
from phalanx.launch import interface
from phalanx.launch.launched import launched
from phalanx.launch.rank_env import RankEnv, read_rank_env
from phalanx.launch.torchrun import meet
from phalanx.report.units import size_text
from phalanx.storage import checksum, free_bytes, publish_folder

SHARE: Final = 0.04
"""Part of the time of training that saves may take if the settings name no number of steps."""

RECOVERY_S: Final = 600.0
"""Longest wait of a restart for another host, in seconds."""

POLL_S: Final = 0.005
"""Seconds between two looks of a writer at the store."""


class RankTraffic(NamedTuple):
    """Bytes of one save in memory on one rank.

    Attributes:
        written_bytes: size of the file that the rank writes.
        sent_bytes: bytes that it sends to a rank of the next host.
        received_bytes: bytes that it receives from ranks of the previous host.
    """

    written_bytes: int
    sent_bytes: int
    received_bytes: int


def receivers(hosts: Sequence[range]) -> dict[int, int]:
    """Return for each rank the rank of the next host that gets its file; empty on one host.

    Args:
        hosts: the ranks of each host.
    """
    if len(hosts) < 2:
        return {}
    following = [*hosts[1:], hosts[0]]
    pairs = zip(hosts, following, strict=True)
    return {rank: after[n % len(after)] for here, after in pairs for n, rank in enumerate(here)}


def traffic(plan: WritePlan, hosts: Sequence[range]) -> list[RankTraffic]:
    """Return the bytes of one save in memory by rank."""
    ranks = range(plan.num_ranks)
    infos = [plan.writes_of(rank) for rank in ranks]
    sizes = [tensor_file.file_bytes(each) if each else 0 for each in infos]
    to = receivers(hosts)
    received = [sum(sizes[source] for source, target in to.items() if target == r) for r in ranks]
    return [RankTraffic(sizes[r], sizes[r] if to else 0, received[r]) for r in ranks]


class MemorySaver(Saver):
    """Saves the states of a run in the memory of its hosts; see the module.

    Attributes:
        hosts: the ranks of each host.
        sent: bytes that this rank has sent to other hosts, and received from them.
        writer_s: processor time of this rank's latest save beside the steps, in seconds.
    """

    def __init__(self, run: Path, *, timeout_s: float | None = None, num_stages: int = 1) -> None:
        """Connect the ranks; every rank of the launched job calls this.

        Args:
            run: folder of the run on disk.
            timeout_s: see `Saver`.
            num_stages: see `Saver`.
        """
        folder = manifest.in_memory_of(run)
        assert folder is not None, "an agent of `phalanx launch` has started this rank"
        self._env = read_rank_env()
        self.hosts = sorted(set(gather_objects(self._env.here)), key=lambda ranks: ranks.start)
        self.sent, self.writer_s = (0, 0), 0.0
        self._planned: tuple[WritePlan, list[FileTransfer]] | None = None
        super().__init__(folder, keep=1, timeout_s=timeout_s, num_stages=num_stages)
        self._exchange = None
        if len(self.hosts) > 1:
            keys, limit_s = dist.PrefixStore("files", self._store), self._progress.timeout_s
            self._exchange = FileExchange(keys, self._env.rank, self._env.num_ranks, limit_s)

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
        for each in self._transfers(save):
            if each.target == self._env.rank:  # now, when a full memory can still be reported
                reserve(part_of(save.partial / each.name), each.num_bytes)

    @override
    def _publish(self, save: Save, about: Manifest) -> None:
        manifest.write(save.partial, about)
        self._store.set("manifest", (save.partial / manifest.NAME).read_text())

    @override
    def _conclude(self, save: Save) -> None:
        # All ranks have written, and rank 0 has the manifest of all files in the store:
        #
        #     each rank       send its file, get others | done | wait until all are done
        #     first of a host                        index, manifest | rename | remove the former
        #
        # Keys of the store are used again: all ranks have read a value before the next is set.
        rank, store = self._env.rank, self._store
        if self._exchange is not None:
            moved = functools.partial(self._progress.renew, save.number)
            sizes = self._exchange.run(self._transfers(save), save.partial, moved)
            self.sent = (self.sent[0] + sizes[0], self.sent[1] + sizes[1])
        if store.add("done", 1) == save.number * save.plan.num_ranks:
            store.set("complete", str(save.number))
        while not store.check(["complete"]) or int(store.get("complete")) < save.number:
            if self._progress.is_late:
                raise PeerLost("another rank has not got the files of other hosts")
            time.sleep(POLL_S)
        if self._env.local_rank > 0:
            return
        if rank > 0:
            index.write(save.partial, save.plan)
            (save.partial / manifest.NAME).write_bytes(store.get("manifest"))
        publish_folder(save.partial, save.final)
        remove_older(self.run, self.keep)

    @override
    def _write(self, save: Save, failures: list[CheckpointError | PeerLost]) -> None:
        super()._write(save, failures)
        self.writer_s = time.thread_time()

    def _transfers(self, save: Save) -> list[FileTransfer]:
        if self._planned is None or self._planned[0] is not save.plan:
            sizes = [each.sent_bytes for each in traffic(save.plan, self.hosts)]
            pairs = receivers(self.hosts).items()
            files = [FileTransfer(a, b, file_of(a), sizes[a]) for a, b in pairs if sizes[a]]
            self._planned = save.plan, files
        return self._planned[1]

    def check_room(self, model: nn.Module, optimizer: AnyOptimizer) -> None:
        """Check that this host has the memory; every rank calls this together, before a step.

        Raises:
            CheckpointError: a host has too little; the message has the calculation.
        """
        infos = self._ours(held := local_shards_with_moments(model, optimizer))
        sizes, here = traffic(self._plan, self.hosts), self._env.here
        written = sum(sizes[rank].written_bytes for rank in here)
        received = sum(sizes[rank].received_bytes for rank in here)
        needed = 2 * (written + received) + written
        gather_objects(None)  # the ranks of a host read before any allocates
        left = min(free_memory_bytes(), free_bytes(self.run))

        def check() -> None:
            if needed <= left:
                return
            others = f", and {size_text(received)} of another host" if received else ""
            raise CheckpointError(
                f"{platform.node()} needs {size_text(needed)}: 2 states of {size_text(written)} of "
                f"its {len(here)} ranks{others}, and {size_text(written)} to write from; "
                f"{size_text(left)} are free in {self.run.anchor}; set memory_every to 0, so that "
                "restarts resume from the disk, or start fewer ranks on this host"
            )

        all_or_none(check, "cannot keep the state in memory")
        self._copy.reserve([held[name].local for name in infos])


class MemoryPace:
    """Saves in memory after some steps, so that a restart loses at most K.

    A save begins every K/2 steps, and is complete when the next begins:

        K = 4    step     1    2    3    4    5    6
                 save          begin     |    |
                 4 is over, 2 is not complete: wait for it, then begin the next

    If K is unset, the first two saves measure what a save costs, and K makes it SHARE of the time.
    """

    def __init__(
        self, saver: MemorySaver, every: int | None, steps_done: int, say: Callable[[str], None]
    ) -> None:
        """Count from `steps_done`; `every` is K, and `say` shows the K that is measured."""
        self.saver, self._every, self._say = saver, every, say
        self._period = 1 if every is None else -(-every // 2)
        self._begun, self._num_saves, self._num_measured = steps_done, 0, 0
        self._resumed_s = self._cost_s = 0.0

    def after_step(self, done: int, begin: Callable[[], None]) -> None:
        """Begin a save by `begin` if one is due after `done` steps; all ranks call this together.

        Raises:
            CheckpointError: the previous save failed.
            PeerLost: the previous save failed because another rank is lost.
        """
        saver, num_steps, now_s = self.saver, done - self._begun, time.monotonic()
        saver.poll()
        if num_steps >= (self._every or 2 * self._period) - self._period:
            saver.finish()
        if num_steps < self._period:
            return
        if self._every is None and self._num_saves and self._num_measured < 2:
            step_s = (now_s - self._resumed_s) / num_steps
            cost_s = self._cost_s + time.monotonic() - now_s
            if self._num_measured:  # the first save did not run beside steps
                cost_s += saver.writer_s
            (self._period,) = max_over_ranks([math.ceil(cost_s / (SHARE * step_s))])
            self._num_measured += 1
            if self._num_measured == 2:
                self._say(
                    f"saves the state in memory every {self._period} steps; a restart loses at "
                    f"most {2 * self._period}"
                )
            if num_steps < self._period:
                return
        begun_s = time.monotonic()
        begin()
        self._begun, self._num_saves = done, self._num_saves + 1
        if self._every == 1 or (self._every is None and self._num_saves == 1):
            saver.finish()
        self._resumed_s = time.monotonic()
        self._cost_s = self._resumed_s - begun_s


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
    if job is None or job.generation == 0:
        return
    env = read_rank_env()
    store: Any = meet(env, RECOVERY_S)
    store.set_timeout(timedelta(seconds=RECOVERY_S))
    interface.choose(dist.PrefixStore("interface", store), env)
    if env.local_rank == 0:
        _recover(Path(job.folder) / manifest.IN_MEMORY, env, store)
        store.set(f"recovered {env.rank}", "")
    store.get(f"recovered {env.here.start}")


class _Found(NamedTuple):
    """A state in memory on one host, which may lack files.

    Attributes:
        name: its folder below the folder of all states.
        sha256: hash of its manifest.
        needed: sizes of all its files by name.
        held: names of the files that the host has.
    """

    name: str
    sha256: str
    needed: dict[str, int]
    held: list[str]


def _recover(root: Path, env: RankEnv, store: Any) -> None:
    left = min(free_memory_bytes(), free_bytes(root))
    store.set(f"{env.rank}", json.dumps([env.num_here, left, _found_in(root)]))
    hosts: list[tuple[int, list[_Found]]] = []
    number, first = 0, 0
    while first < env.num_ranks:
        num_here, left, found = json.loads(store.get(f"{first}"))
        number = len(hosts) if first == env.rank else number
        hosts.append((left, [_Found(*each) for each in found]))
        first += num_here
    # Every host computes the same choice and the same transfers:
    #
    #     host               0                    1                      2 (new)
    #     has of step 40     rank 0, rank 1       rank 1, rank 2         -
    #     gets               rank 2 from 1        rank 0 from 0          all, in turns from 0 and 1
    chosen: dict[str, str] = {}  # name of a run -> name of its state
    transfers: list[FileTransfer] = []
    states = {(each.name, each.sha256): each.needed for _, found in hosts for each in found}
    for (name, sha256), needed in sorted(states.items(), reverse=True):
        run = str(Path(name).parent)
        holders = {
            file: [
                host
                for host, (_, found) in enumerate(hosts)
                if any(f[:2] == (name, sha256) and file in f.held for f in found)
            ]
            for file in needed
        }
        if run in chosen or not all(holders.values()):
            continue
        files = [
            FileTransfer(having[host % len(having)], host, f"{name}/{file}", needed[file])
            for file, having in holders.items()
            for host in range(len(hosts))
            if host not in having
        ]
        if all(
            sum(t.num_bytes for t in files if t.target == host) <= left
            for host, (left, _) in enumerate(hosts)
        ):
            chosen[run] = name
            transfers += files
    if transfers:
        exchange = FileExchange(dist.PrefixStore("files", store), number, len(hosts), RECOVERY_S)
        exchange.run(transfers, root)
    for folder in root.rglob("checkpoints/*"):
        if str(folder.relative_to(root)) not in chosen.values():
            shutil.rmtree(folder)


def _found_in(root: Path) -> list[_Found]:
    """Return the states of this host that have a manifest."""
    found: list[_Found] = []
    for folder in root.rglob("checkpoints/*"):
        path = folder / manifest.NAME
        if folder.suffix or not path.exists():
            continue
        needed = {name: size for name, (size, _) in manifest.read(folder).files.items()}
        needed[manifest.NAME] = path.stat().st_size
        sizes = {each.name: each.stat().st_size for each in folder.iterdir()}
        held = [name for name, size in needed.items() if sizes.get(name) == size]
        name = str(folder.relative_to(root))
        found.append(_Found(name, checksum(path)[1], needed, held))
    return found
