"""Join the job for which torchrun (or Slurm, or mpirun) started this process.

The ranks connect to a store before they join. The first rank of each host prepares the job's data,
then the other ranks of the host prepare too and reuse it. Only when all ranks have prepared, with
equal facts, do they join; from then on the timeout of collectives applies. A rank that ends because
another rank failed prints no message.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from phalanx.errors import (
    ConfigError,
    PhalanxError,
    TrainingError,
    message_of,
    printable,
    shortened,
    within_limits,
)
from phalanx.launch import interface, link, schedulers
from phalanx.launch.agreement import agree, failing_together, own_cores
from phalanx.launch.debug_net import VARIABLE as DEBUG_NET
from phalanx.launch.debug_net import begin
from phalanx.launch.failure import (
    READER_LEFT,
    PeerFailed,
    exit_code_of,
    is_lost_peer,
    is_reader_gone,
    out_of_threads,
    reader_has_left,
    report,
    with_advice,
)
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.launched import launched
from phalanx.launch.pipe import end_children
from phalanx.launch.process_memory import collect_as_usual, keep_freed_memory
from phalanx.launch.rank import remove_sockets
from phalanx.launch.rank_env import RankEnv, is_under_torchrun, read_rank_env
from phalanx.launch.rank_log import flush_streams
from phalanx.launch.signals import ENDING, handled_in_thread, ignore
from phalanx.launch.watch import Watch, kill_silent

if TYPE_CHECKING:
    from torch.distributed import Store

Value = TypeVar("Value")
Result = TypeVar("Result")

PREPARATION_S = 24 * 3600.0
"""Longest wait, in seconds, for another rank to prepare, which may read a large corpus."""

AGENT_S = 60.0
"""Longest wait, in seconds, for torchrun's store, which exists before the ranks start."""

QUIET_S = 5.0
"""Delay, in seconds, before a rank exits without a message: torchrun ends all at the first exit."""

TOGETHER_S = 3.0
"""Signals within this time, in seconds, count as one: terminal and torchrun both send Ctrl-C."""


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
        prepare: called before the job is joined, on the first rank of each host and then on the
            other ranks of the host; may take up to PREPARATION_S.
        facts: returns the values that must be equal on all ranks, by name; JSON-serializable.
        function: called with the prepared value, with torch.distributed initialized.
        device: "auto", "cpu" or "cuda".
        threads: CPU threads of this rank; if None, an equal part of the host's cores.
        timeout_s: longest wait for another rank to start, or in one collective, in seconds.

    Raises:
        ConfigError: the environment is incomplete, the host has too few GPUs, or ranks differ in
            `facts` (raised on rank 0).
        TrainingError: another rank or host is lost, or does not answer.
        PeerFailed: another rank of this host, or any rank during preparation, reports its failure.
    """
    from phalanx.comm.together import barrier

    with joined(prepare, facts, device=device, threads=threads, timeout_s=timeout_s) as job:
        with PULSE.doing("the work"):
            result = function(job.value)
            barrier()
    return result


class Joined(NamedTuple, Generic[Value]):
    """The prepared value of the job that this process has joined, and "cpu" or "cuda"."""

    value: Value
    device: str


@contextmanager
def joined(
    prepare: Callable[[], Value],
    facts: Callable[[Value], Mapping[str, Any]],
    *,
    device: str,
    threads: int | None,
    timeout_s: float,
) -> Generator[Joined[Value]]:
    """Prepare, join the job, and watch it until the block ends; see `run_here`."""
    import torch
    import torch.distributed as dist

    from phalanx.comm import join

    env = read_rank_env()
    _end_with_parent()
    stopping = _Stopping(env.local_rank == 0 if launched() is None else env.rank == 0)
    with handled_in_thread(stopping):
        device = _use_device(env, device)
        if folder := os.environ.get(DEBUG_NET):
            begin(folder, env.rank)
        torch.set_num_threads(threads or 1)
        join.raise_file_limit()
        with within_limits(f"rank {env.rank} cannot join the job"), link.explained(env):
            store = meet(env, timeout_s)
        # The watch runs from the second on, so that a rank that never joins is named too:
        #
        #     1. all ranks connect to the store
        #     2. the first rank of each host prepares, then its others, up to PREPARATION_S
        #     3. the facts of all ranks are compared
        #     4. all join gloo or NCCL; from here the timeout of collectives applies
        any_store: Any = store  # `clone` has no type; tests/debug/test_check.py pins it
        with Watch(any_store.clone(), env, timeout_s) as watch:
            stopping.watch = watch
            with failing_together(env, store):
                cores = own_cores(env, store)  # waits for all ranks of the host, so all call it
                torch.set_num_threads(threads or cores)
                if device == "cuda":
                    _take_gpu(env, store)
            value = agree(env, store, prepare, facts)
            store.set_timeout(timedelta(seconds=timeout_s))
            try:
                if not dist.is_initialized():  # else an earlier run of this process has joined
                    _join(env, store, device, timeout_s)
                yield Joined(value, device)
            except Exception as error:
                judged = watch.error_to_raise(error, is_lost_peer(error))
                if judged is error:
                    raise
                raise judged from None


class _Stopping:
    """Handler of the signals that request this rank to end; runs in a separate thread."""

    def __init__(self, reports: bool) -> None:
        self._reports = reports
        self.watch: Watch | None = None
        self._asked_s: float | None = None

    def __call__(self, signum: int) -> None:
        if signum not in ENDING or (self.watch is not None and self.watch.is_torn_down()):
            return
        now_s, name = time.monotonic(), signal.Signals(signum).name
        if self._asked_s is not None:
            if signum == signal.SIGHUP or now_s - self._asked_s < TOGETHER_S:
                return
        if self._asked_s is None and PULSE.handles_stop:
            self._asked_s, PULSE.stop_signal = now_s, signum
            self._report(
                f"{name}: {PULSE.on_stop}; a second signal after {TOGETHER_S:g} s ends it at once"
            )
            return
        self._report(f"interrupted by {name}")
        leave(128 + signum)

    def _report(self, message: str) -> None:
        if self._reports:
            report(message)


def _join(env: RankEnv, store: Store, device: str, timeout_s: float) -> None:
    """Join the job over the interface that reaches the other hosts; raise if none does."""
    import torch.distributed as dist

    from phalanx.comm import join

    address = interface.choose(dist.PrefixStore("interface", store), env)
    try:
        with PULSE.doing("joining the job"):
            # NCCL may go by other interfaces than gloo, of which this process knows no address.
            is_other = device == "cuda" and "NCCL_SOCKET_IFNAME" in os.environ
            links = dist.PrefixStore("links", store)
            link.check_links(links, env, "" if is_other else address)
            own_store = dist.PrefixStore("join", store)
            join.join(env.rank, env.num_ranks, store=own_store, device=device, timeout_s=timeout_s)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        name = os.environ.get(interface.VARIABLE)
        by = f"interface {name}" if name else "the address to which its name resolves"
        raise TrainingError(
            f"the ranks cannot reach each other: {socket.gethostname()} connects to the others "
            f"from {address or 'an unknown address'} by {by}; set {interface.VARIABLE} on each "
            "host to the interface that reaches the other hosts (`ip -brief address` lists "
            "interfaces), or "
            "start all ranks again if one did not start"
        ) from error


def _use_device(env: RankEnv, name: str) -> str:
    """Return the device type, and select the GPU of this rank; raise if the host has too few."""
    import torch

    keep_freed_memory()
    collect_as_usual()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        num_gpus = torch.cuda.device_count()
        if num_gpus == 0 or (num_gpus > 1 and env.num_here > num_gpus):
            raise _too_few_gpus(env, num_gpus)
        # Slurm may make only one GPU visible to each task.
        torch.cuda.set_device(env.local_rank if num_gpus > 1 else 0)
    return name


def _take_gpu(env: RankEnv, store: Store) -> None:
    """Claim the GPU of this process in the store; raise if another rank has claimed it."""
    import torch

    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    taken_by = store.compare_set(f"gpu/{gpu}", "", str(env.rank)).decode()
    if taken_by == str(env.rank):
        return
    if env.num_here > 1:
        raise _too_few_gpus(env, torch.cuda.device_count())
    raise ConfigError(
        f"ranks {taken_by} and {env.rank} would use the same GPU, because LOCAL_WORLD_SIZE does "
        "not show that they are on one host; set LOCAL_RANK and LOCAL_WORLD_SIZE for each, as "
        "torchrun does"
    )


def _too_few_gpus(env: RankEnv, num_gpus: int) -> ConfigError:
    fewer = f"start at most {num_gpus} on each host (--nproc-per-node), or " if num_gpus else ""
    return ConfigError(
        f"this host runs {env.num_here} ranks, but has {num_gpus} GPUs; {fewer}use --device cpu"
    )


def meet(env: RankEnv, timeout_s: float) -> Store:
    """Return the job's store, with a key prefix that is unique to this call on all ranks."""
    import torch.distributed as dist

    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timedelta(seconds=min(timeout_s, AGENT_S) if is_agents else timeout_s)
    try:
        if is_agents:  # its store starts before the ranks, so its client need not retry for AGENT_S
            try:
                address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                socket.create_connection(address, AGENT_S).close()
            except ConnectionRefusedError:
                raise ConnectionRefusedError("connection refused") from None
            except (KeyError, ValueError, OSError):  # the store's client reports these better
                pass
        store, _, _ = next(dist.rendezvous("env://", env.rank, env.num_ranks, timeout=limit))
    except (ValueError, ConnectionRefusedError, dist.DistError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        if is_agents:
            starter = "torchrun" if launched() is None else "phalanx launch"
            raise ConfigError(
                f"{starter}'s store at {os.environ.get('MASTER_ADDR')}:"
                f"{os.environ.get('MASTER_PORT')} does not answer: {reason}; {starter} on that "
                "host has ended, or cannot be reached from this host"
            ) from error
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, but the ranks cannot connect: {reason}; set MASTER_ADDR "
            f"and MASTER_PORT to the host of rank 0 and a free port on it, start all ranks within "
            f"{timeout_s:g} s (--timeout-s), or unset RANK"
        ) from error
    store.set_timeout(timedelta(seconds=PREPARATION_S))
    # Each rank counts its own calls, and all ranks make the same calls.
    call = store.add(f"phalanx/calls/{env.rank}", 1)
    return dist.PrefixStore(f"phalanx/{call}", store)


def run_verb(prepare: Callable[[], Value], work: Callable[[Value], int]) -> int:
    """Run a command: call `work` with the result of `prepare`, and return its exit code.

    As a rank of a job, do not return but exit; one rank of each host reports an error of `prepare`.
    """
    try:
        schedulers.adopt()
    except ConfigError as error:
        if is_under_torchrun():
            leave_failed(error, is_everyones=True)
        raise
    if not is_under_torchrun():
        return work(prepare())
    try:
        value = prepare()
    except PhalanxError as error:
        leave_failed(error, is_everyones=True)
    try:
        leave(work(value))
    except BaseException as error:
        leave_failed(error)


def leave(exit_code: int) -> NoReturn:
    """Exit this rank without tearing its threads down, which can abort a process that succeeded."""
    end_children()
    remove_sockets()
    flush_streams()
    os._exit(exit_code)


def _end_with_parent() -> None:
    """Start a thread that ends this rank if torchrun is killed and so cannot end its ranks."""
    parent, is_first = os.getppid(), os.environ.get("LOCAL_RANK", "0") == "0"

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        if is_first:
            gone = f"torchrun (process {parent}) has ended, and its ranks on this host end with it"
            report(with_advice(gone))
        end_children()
        remove_sockets()
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, name="parent", daemon=True).start()


def leave_failed(error: BaseException, *, is_everyones: bool = False) -> NoReturn:
    """Print this rank's error as its last output, and exit.

    A PhalanxError is printed as one message; any other error with its traceback. `is_everyones`
    means that every rank raises the error: only one rank of each host prints it. Signals that
    arrive meanwhile are ignored, because they would only cut the message off.
    """
    if isinstance(error, KeyboardInterrupt):
        ignore()
        if os.environ["RANK"] == "0":
            report(str(error))
        leave(128 + getattr(error, "signum", signal.SIGINT))
    # Before a rich console raises SystemExit, it redirects standard output to /dev/null.
    if is_reader_gone(error) and (isinstance(error, SystemExit) or reader_has_left()):
        leave(READER_LEFT)
    is_others = isinstance(error, PeerFailed)
    if is_everyones:  # the first rank of this host reports it
        with suppress(ConfigError):  # the environment is wrong, perhaps only this rank's
            is_others |= read_rank_env().local_rank > 0
    if is_others:
        with handled_in_thread(lambda _: leave(1)):  # on torchrun's signal, exit without a message
            time.sleep(QUIET_S)
        leave(error.exit_code if isinstance(error, PeerFailed) else 1)
    ignore()
    rank = printable(os.environ["RANK"])
    if limit := out_of_threads(error):
        error = ConfigError(limit)
    if isinstance(error, PhalanxError):
        # Printed here, because under torchrun no code of the command line reports the error.
        message = shortened(message_of(error))
        message = with_advice(message) if isinstance(error, TrainingError) else message
        print(f"rank {rank}: {message}", file=sys.stderr, flush=True)  # noqa: T201
        kill_silent()
        leave(error.exit_code)
    if isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()  # torchrun shows the recorded exception in its summary
        handler.initialize()
        handler.record_exception(error)
    text = with_advice(shortened("".join(traceback.format_exception(error)).rstrip()))
    print(f"rank {rank} failed:\n{text}", file=sys.stderr)  # noqa: T201
    # A SystemExit is a failure even with code 0, because the work did not finish.
    leave(exit_code_of(error.code) or 1 if isinstance(error, SystemExit) else 1)
