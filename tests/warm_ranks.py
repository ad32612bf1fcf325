"""Ranks that stay: `run_ranks` of a test runs on processes that have joined for a job before it.

Two processes that are forked, join gloo and leave take 0.2 s of processor, and each computes anew
what torch keeps: layouts of DTensor, classes of FSDP2, meshes. So the ranks of a job that is over
wait for the next one of as many ranks. Between two jobs a rank is put back: random numbers,
environment, folder, default type, filters of warnings, module globals and classes, what lists and
tables of phalanx hold, modules of tests, keys of the job's store. A rank that cannot be put back
ends, and so do those that differ: after a death, a thread that runs on, a handler of a signal, a
group that no `job_mesh` made, a collective that not all ranks have called. Meshes stay, as in one
job. Ranks that wait while jobs of other numbers of ranks run are stopped, for each of their groups
has a thread that wakes up 100 times a second.

A test that is about processes, memory or joining asks for new ones: `@pytest.mark.fresh_ranks`.
"""

from __future__ import annotations

import contextvars
import ctypes
import gc
import importlib
import math
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import threading
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from phalanx.launch import local
from phalanx.launch import rank as one_rank
from phalanx.launch.failure import describe
from phalanx.launch.feed import Feed
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import Rank
from phalanx.launch.pipe import LEAVE, ByValue, ParentPipe, RankPipe, end_children
from phalanx.launch.rank import RankInfo
from phalanx.launch.signals import end_with_server, leave_to_parent

MOST_RANKS = 4
MOST_GROUPS = 24
"""Groups of a rank that stays."""

READY_S = 20.0
"""How long ranks whose job is over may take to be put back, in seconds."""

_VERSION_AT = 24
"""Of a dictionary of CPython 3.11: where its version is, in bytes from its start."""

_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS)
_LASTING = (
    *("phalanx", "warm_ranks", "ranks_preload", "ranks_started", "namespaces"),
    *(name for name in sys.stdlib_module_names if name != "__main__"),
)
"""Modules that no folder of a job brings, beside those of site-packages."""

_OWN = ("/proc/", "/memfd:phalanx")
"""How the names of files begin that are the listing's own, or memory that ranks share."""

_STAYING = ("phalanx.comm.meshes", "phalanx.comm.heap", "phalanx.comm.shared_transfer")
"""Modules whose tables hold what belongs to a process: meshes, memory, collectives under way."""

_OF_TORCH = ("nn", "optim", "distributed", "autograd", "utils", "amp", "random", "overrides")
_WATCHED = ("phalanx", *(f"torch.{name}" for name in _OF_TORCH), "transformers.models")
_WATCHED_ALONE = (
    "torch",
    "os",
    "time",
    "signal",
    "socket",
    "random",
    "builtins",
    "threading",
    "shutil",
)

_start_ranks, _end_ranks = local.start_ranks, local.end_ranks


CHANGES = os.environ.get("PHALANX_TEST_CHANGES", "")
"""A file that is told which jobs have changed their ranks, and how, to shorten the tests by."""


class Changed(Exception):
    """A rank is not as it was when its job began, and cannot be put back."""


class _Wire(RankPipe):
    """The parent's end of the pipe to a rank, which notes that the rank's function has ended."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self.connection = connection
        self.has_ended = False

    def receive(self) -> tuple[str, Any] | None:
        message = super().receive()
        self.has_ended |= message is not None and message[0] in ("result", "failure")
        return message

    def reads_ready(self) -> Any:
        """Return what the rank says of itself once it has been put back; None if it is not."""
        try:
            while self.connection.poll(READY_S):
                kind, value = self.connection.recv()
                if kind == "ready":
                    return value
        except (EOFError, OSError):
            pass
        return None


class WarmRanks:
    """The ranks that wait in this process's care, by how many they are.

    Attributes:
        is_off: whether the jobs that start now get new processes, which end with them.
    """

    def __init__(self) -> None:
        self.is_off = False
        self._main = sys.modules["__main__"]
        self._waiting: dict[int, list[Rank]] = {}
        self._at_work: list[list[Rank]] = []

    def start(
        self,
        ranks: list[Rank],
        info: RankInfo,
        function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        """Do what `start_ranks` does, with ranks that wait if there are any."""
        try:
            call = bytes(ForkingPickler.dumps((function, ByValue(args))))
        except (pickle.PicklingError, AttributeError, TypeError):
            call = b""
        # A script whose own names its ranks need is read again by multiprocessing.
        is_script = sys.modules["__main__"] is not self._main
        is_warm = call and not self.is_off and not is_script and info.device == "cpu"
        if not is_warm or info.num_ranks > MOST_RANKS:
            _start_ranks(ranks, info, function, args)
            return
        ready = self._waiting.pop(info.num_ranks, [])
        _signal(ready, signal.SIGCONT)
        for others in self._waiting.values():
            if all(wire.connection.poll() for _, wire in others):  # they have been put back
                _signal(others, signal.SIGSTOP)
        if not _are_alike(ready):
            _end_ranks(ready)
            ready = _started(info)
        ranks += ready
        self._at_work.append(ready)
        for number, (_, wire) in enumerate(ready):
            wire.has_ended = False
            own = replace(info, rank=number, member=info.member + number)
            wire.send((own, os.getcwd(), sys.path, sys.argv, call))

    def end(self, ranks: list[Rank]) -> None:
        """Do what `end_ranks` does, but let ranks wait whose functions have all ended."""
        used = next((each for each in self._at_work if each == ranks and ranks), None)
        if used is not None:
            self._at_work.remove(used)
            if all(wire.has_ended for _, wire in used) and len(used) not in self._waiting:
                for _, wire in used:
                    wire.send(LEAVE)
                self._waiting[len(used)] = used
                return
        _end_ranks(ranks)

    def end_all(self) -> None:
        """End the ranks that wait."""
        for ranks in self._waiting.values():
            _signal(ranks, signal.SIGCONT)
            _end_ranks(ranks)
        self._waiting.clear()


WARM = WarmRanks()


def _signal(ranks: list[Rank], signum: int) -> None:
    """Stop ranks that wait, or continue them; on Linux, where they end if their server does."""
    if sys.platform != "linux":
        return
    for process, _ in ranks:
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):  # one that cannot be put back ends at any time
                os.kill(process.pid, signum)


def _are_alike(ranks: list[Rank]) -> bool:
    """Return whether there are ranks, all have been put back and all have made the same calls."""
    said = [wire.reads_ready() for _, wire in ranks]
    if not said or None in said:
        return False
    calls: dict[str, int] = {}
    return all(
        calls.setdefault(group, number) == number for each in said for group, number in each.items()
    )


_STORES: list[Any] = []
"""The stores of ranks that stay, which outlast their jobs."""


def _started(info: RankInfo) -> list[Rank]:
    ranks: list[Rank] = []
    context = multiprocessing.get_context("forkserver")
    with local.hosted_store() as (store, port):
        _STORES.append(store)
    for number in range(info.num_ranks):
        own = replace(info, rank=number, port=port)
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(own, theirs))
        process.start()
        theirs.close()
        ranks.append((process, _Wire(ours)))
    return ranks


def serve(info: RankInfo, connection: Connection) -> None:
    """Join, and do one job after another, as `run_rank` does one; never returns."""
    done = ""
    try:
        leave_to_parent()
        end_with_server()  # what is stopped does not see that the tests are over
        one_rank.keep_printing()
        multiprocessing.set_start_method(None, force=True)
        one_rank.join_job(info, ParentPipe(connection, ""))
        PULSE.__init__()
        start = _Start()
        while True:
            job = connection.recv()
            if job == LEAVE:  # a second time, to the ranks of a job that failed
                continue
            line = ParentPipe(connection, job[0].sockets)
            line.open()
            line.beat_on(Feed(one_rank.connected(job[0]), job[0].member))
            start.begin(job[0].threads, job[0].timeout_s)
            contextvars.copy_context().run(_do, line, *job)
            one_rank.flush_streams()
            line.wait_to_leave()
            end_children()
            done = pickle.loads(job[-1])[0].__qualname__ if CHANGES else ""
            del job, line
            connection.send(("ready", start.put_back()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the tests are over
    except Changed as change:
        if CHANGES:
            with Path(CHANGES).open("a") as file:
                file.write(f"{done}: {change}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _do(
    line: ParentPipe, info: RankInfo, folder: str, path: list[str], argv: list[str], call: bytes
) -> None:
    os.chdir(folder)
    sys.path[:], sys.argv = path, argv
    importlib.invalidate_caches()
    function, args = pickle.loads(call)
    try:
        with PULSE.doing("the work"):
            result = function(*args)
        sys.stdout.flush()
        line.send("result", ByValue(result))
    except BaseException as error:
        with suppress(OSError):
            line.send("failure", describe(info.rank, error))


class _Start:
    """What a rank is when a job begins."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._num_jobs = 0
        self._world: Any = dist.distributed_c10d._world
        self._job = dist.group.WORLD
        self._backend, self._store = self._world.pg_map[self._job]
        self._environ = dict(os.environ)
        self._rng = torch.get_rng_state(), random.getstate()
        self._dtype = torch.get_default_dtype()
        self._is_deterministic = torch.are_deterministic_algorithms_enabled()
        self._filters = list(warnings.filters)
        self._settings = _settings()
        NAMES.watch()
        NAMES.take_changes()
        gc.freeze()  # so that garbage of a job is collected without a look at all modules

    def begin(self, threads: int, timeout_s: float) -> None:
        """Give the job what its caller has asked for, and keys of its own in the store."""
        import torch
        import torch.distributed as dist

        from phalanx.comm import join

        self._num_jobs += 1
        own = dist.PrefixStore(f"test job {self._num_jobs}", self._store)
        self._world.pg_map[self._job] = self._backend, own
        join.set_timeout(timeout_s)
        torch.set_num_threads(threads)

    def put_back(self) -> dict[str, int]:
        """Be again what a job begins with; return how many collectives each group has seen.

        Raises:
            Changed: it cannot be.
        """
        import torch

        PULSE.__init__()
        os.environ.clear()
        os.environ.update(self._environ)
        torch.set_rng_state(self._rng[0])
        random.setstate(self._rng[1])
        torch.set_default_dtype(self._dtype)
        torch.use_deterministic_algorithms(self._is_deterministic)
        if warnings.filters != self._filters:
            warnings.resetwarnings()  # so that what was passed over is looked at again
            warnings.filters[:] = self._filters
        NAMES.put_back()
        NAMES.watch()
        gc.collect()
        gc.freeze()  # what is left stays in tables, and the next collection need not look at it
        now = _settings()
        if now != self._settings:
            pairs = zip(self._settings, now, strict=True)
            raise Changed(str([pair for pair in pairs if pair[0] != pair[1]]))
        return self._calls()

    def _calls(self) -> dict[str, int]:
        import torch.distributed as dist

        from phalanx.comm import meshes as comm_meshes
        from phalanx.comm.shared_memory import SharedMemory
        from phalanx.comm.shared_transfer import UNDER_WAY

        meshes: Any = comm_meshes
        if UNDER_WAY:  # other ranks may still wait for them
            raise Changed(f"{len(UNDER_WAY)} collectives are under way")
        if dist.group.WORLD is not self._job:
            raise Changed("the job was left")
        known = {self._job}
        for made in meshes._made.values():
            flattened = made.whole._get_root_mesh()._flatten_mapping.values()
            known |= {*made.groups.values(), *(each.get_group() for each in flattened)}
        there = set(self._world.pg_map)
        # torch keeps layouts by mesh, and takes one mesh for another of the same ranks.
        foreign = [g.group_desc for g in there - known if g.group_desc != "undefined"]
        if foreign or len(there) > MOST_GROUPS:
            raise Changed(f"{len(there)} groups, of meshes of its own: {foreign}")
        counts = {
            self._world.pg_names[group]: group._get_sequence_number_for_group() for group in there
        }
        for made in meshes._made.values():
            for index, engine in enumerate((*made.engines.values(), *made._apart.values())):
                if isinstance(engine, SharedMemory):
                    number = engine._calls.numbers.get(None, 0)
                    counts[f"{engine.group.group_name} {index}"] = number
        return {**counts, "groups made": self._world.group_count}


def _settings() -> list[Any]:
    """Return what a job may change of this process beside what is put back."""
    import torch
    from torch._dynamo.utils import counters

    inside: Any = getattr(torch, "_C")  # noqa: B009 - private, and the only way
    return [
        [str(thread.name) for thread in threading.enumerate() if thread.name != "pulse"],
        {number: signal.getsignal(number) for number in signal.valid_signals()},
        (sys.stdin, sys.stdout, sys.stderr, sys.excepthook, sys.gettrace(), sys.getprofile()),
        (torch.get_default_device(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        (torch.is_anomaly_enabled(), torch.is_autocast_enabled("cpu")),
        (torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled),
        inside._len_torch_dispatch_stack(),
        inside._len_torch_function_stack(),
        inside._autograd._top_saved_tensors_default_hooks(True),
        dict(counters["frames"]),
        gc.isenabled(),
        [resource.getrlimit(kind) for kind in _LIMITS],
        _files(),
    ]


def _files() -> list[str]:
    """Return the files that this process has open, such as a lock; not sockets and pipes."""
    found: list[str] = []
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # the listing's own
            path = os.readlink(f"/proc/self/fd/{number}")
            found += [path] if path.startswith("/") and not path.startswith(_OWN) else []
    return sorted(found)


def _is_of_tests(module: ModuleType | None) -> bool:
    """Return whether a module is of a test or a script: a new process has it from its file."""
    name = getattr(module, "__name__", "").partition(".")[0]
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")
    return bool(file) and "site-packages" not in file and name not in _LASTING


class AllNames:
    """The names of all watched modules.

    The server of the ranks looks at them once, see `ranks_started`, and each rank inherits them.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._watched: list[_Names] = []

    def watch(self) -> None:
        """Watch the modules that are new; forget those of tests, which are read again."""
        for name in sys.modules.keys() - self._seen:
            module = sys.modules[name]
            if _is_of_tests(module):
                del sys.modules[name]
                continue
            self._seen.add(name)
            if name in _WATCHED_ALONE or name.startswith(_WATCHED):
                self._watched.append(_Names(module))

    def take_changes(self) -> None:
        """Let the names stand for what they stand for now, after this process has joined."""
        self._watched = [
            _Names(names.module) if names.have_changed() else names for names in self._watched
        ]

    def put_back(self) -> None:
        """Let the names stand for what they stood for."""
        for names in self._watched:
            names.put_back()


NAMES = AllNames()


class _Names:
    """What the names of a module and of its classes stand for, and what its tables hold."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        # The names of groups are counted by it, and those of meshes stay.
        self._kept = {"_group_count"} if module.__name__.endswith("distributed_c10d") else set()
        of = [module, *(each for each in vars(module).values() if _is_own(each, module))]
        self._is_ours = module.__name__.startswith("phalanx")
        versions = map(_version, of)
        self._stood_for = [
            [a, dict(vars(a)), v, v.value] for a, v in zip(of, versions, strict=True)
        ]
        self._held = [
            (value, value.copy())
            for name, value in vars(module).items()
            if self._is_table(name, value) and module.__name__ not in _STAYING
        ]
        self._caches = [
            value.cache_clear
            for value in vars(module).values()
            if self._is_ours and hasattr(value, "cache_clear")
        ]

    def _is_table(self, name: str, value: Any) -> bool:
        if self._is_ours:
            return type(value) in (dict, list, set)
        return issubclass(type(value), OrderedDict) and name.startswith("_global")  # hooks

    def have_changed(self) -> bool:
        """Return whether a name stands for something else, or a table holds something else."""
        return any(value != before for value, before in self._held) or not all(
            _is_as(vars(each), before) for each, before, *_ in self._stood_for
        )

    def put_back(self) -> None:
        for known in self._stood_for:
            each, before, version, number = known
            if version.value == number:
                continue
            if _is_as(vars(each), before):
                known[3] = version.value
                continue
            for name in self._changed(vars(each), before):
                setattr(each, name, before[name])
            if self._is_ours:
                for name in [*vars(each)]:
                    if name not in before and not isinstance(vars(each)[name], ModuleType):
                        delattr(each, name)
        for value, before in self._held:
            if value != before:
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)
        for clear in self._caches:
            clear()

    def _changed(self, now: Any, before: dict[str, Any]) -> Iterator[str]:
        for name, value in before.items():
            if now.get(name, now) is not value and name not in self._kept:
                yield name


def _version(of: Any) -> Any:
    """Return where the names of a module or a class have the number of their last change.

    PEP 509: no two changes of any dictionaries have one number. Another Python than CPython 3.11
    gets a number that equals none, so that the names themselves are compared.
    """
    if sys.version_info[:2] != (3, 11) or sys.implementation.name != "cpython":
        return SimpleNamespace(value=math.nan)
    names = vars(of)
    table = names if type(names) is dict else gc.get_referents(names)[0]
    return ctypes.c_uint64.from_address(id(table) + _VERSION_AT)


def _is_as(now: Any, before: dict[str, Any]) -> bool:
    """Return whether names stand for the same; one look, that of a table at another."""
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # two tensors, which are not the same one
        return False


def _is_own(value: Any, module: ModuleType) -> bool:
    return issubclass(type(value), type) and value.__module__ == module.__name__
