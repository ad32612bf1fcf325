"""Starting ranks: results in order, the first failure named, nothing left behind."""

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from marks import by_hand
from phalanx.bench.scaling import ScalingConfig, measure_scaling
from phalanx.comm.comm import Ranks
from phalanx.errors import (
    ConfigError,
    Interrupted,
    NotDivisible,
    PhalanxError,
    RankFailed,
    TrainingError,
)
from phalanx.launch import heartbeat_monitor, local, pipe, rank
from phalanx.launch.failure import is_reader_gone
from phalanx.launch.heartbeat import PULSE, Beat
from phalanx.launch.heartbeat_monitor import HeartbeatMonitor
from phalanx.launch.local import Work, run_ranks, run_supervised
from phalanx.launch.pipe import ByValue
from phalanx.train.job.request import choose

pytestmark = pytest.mark.fresh_ranks


def run_alone(function: Callable[[], Any], num_jobs: int) -> list[Any]:
    return run_supervised([("a worker", function, ())] * num_jobs)


def rank_and_sum(offset: int) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def test_results_come_in_the_order_of_the_ranks() -> None:
    assert run_ranks(rank_and_sum, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def add_rank(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    tensors[0] += dist.get_rank()
    return tensors


def test_any_number_of_tensors_is_sent_and_each_rank_has_its_own() -> None:
    tensors = [torch.ones(()) for _ in range(300)]
    returned = run_ranks(add_rank, 3, tensors)
    assert [float(sum(of_rank)) for of_rank in returned] == [300, 301, 302]
    assert float(sum(tensors)) == 300


def size_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_views_are_sent_without_what_they_are_views_of() -> None:
    tensors = list(torch.ones(100, 1000).unbind())
    assert len(pickle.dumps(ByValue(tensors))) < 2 * 4 * 100 * 1000
    assert run_ranks(size_of, 1, tensors) == [4 * 100 * 1000]


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the user's own words")
    dist.all_reduce(torch.zeros(1))  # the others wait for rank 1


def test_a_rank_that_raises_ends_the_job_with_its_own_traceback() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(raise_on_rank_one, 3)  # those that wait would do so for 600 s
    assert caught.value.rank == 1
    assert str(caught.value).endswith("ValueError: the user's own words")
    assert "raise_on_rank_one" in caught.value.traceback


def kill_rank_two() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        run_ranks(kill_rank_two, 3)
    assert caught.value.rank == 2


def die_before_a_helper(holds: str) -> None:
    if os.fork() == 0:
        open(holds).close()  # waits until the test opens it too
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_is_dead_though_a_process_that_it_forked_lives(tmp_path: Path) -> None:
    """That process has the rank's end of the pipe open."""
    holds = tmp_path / "holds"
    os.mkfifo(holds)
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(die_before_a_helper, 1, str(holds))
    holds.open("w").close()


def refuse() -> None:
    raise ConfigError("degree is 3; 2 is the nearest")


def test_an_error_of_the_users_keeps_its_message_and_exit_code() -> None:
    with pytest.raises(PhalanxError, match=r"^degree is 3; 2 is the nearest$") as caught:
        run_ranks(refuse, 2)
    assert caught.value.exit_code == 2


class OwnTrainingError(TrainingError):
    """A user's own class, composed from other things than its message."""

    def __init__(self, loss: float, step: int) -> None:
        super().__init__(f"loss {loss} in step {step}")


def stop_training() -> None:
    raise OwnTrainingError(2.0, 7)


def divide() -> None:
    raise NotDivisible("hidden", 6, 4)


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [(refuse, ConfigError, "degree"), (divide, NotDivisible, "hidden is 6"),
     (stop_training, TrainingError, "loss 2.0 in step 7")],
)  # fmt: skip
def test_an_error_keeps_its_class(
    function: Callable[[], None], kind: type[PhalanxError], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        run_ranks(function, 1)
    assert type(caught.value) is kind
    assert caught.value.exit_code == kind.exit_code


def fail_one_after_the_other() -> None:
    time.sleep(2.0 * dist.get_rank())  # rank 1 fails when nobody listens any more
    raise ValueError(f"rank {dist.get_rank()}")


def test_only_the_first_failure_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed, match="ValueError: rank 0"):
        run_ranks(fail_one_after_the_other, 2)
    assert capfd.readouterr().err == ""


def return_on_rank_one(shares_memory: bool | None) -> None:
    comm = None if shares_memory is None else Ranks({"dp": 3}, shares_memory=shares_memory)
    if dist.get_rank() != 1:
        if comm is None:
            dist.all_reduce(torch.zeros(1))
        else:
            comm.all_reduce(torch.zeros(1), "dp")


@pytest.mark.parametrize(
    "shares_memory", [by_hand(None), True, by_hand(False)]
)  # None: torch alone
def test_a_rank_that_returns_early_is_blamed_in_seconds(
    monkeypatch: pytest.MonkeyPatch, shares_memory: bool | None
) -> None:
    monkeypatch.setattr(heartbeat_monitor, "UNEVEN_S", 0.5)
    with pytest.raises(TrainingError, match=r"^rank 1 returned, so the collectives") as raised:
        run_ranks(return_on_rank_one, 3, shares_memory, timeout_s=60)
    assert re.search(r"ranks 0, 2: .*\n.* in return_on_rank_one", str(raised.value))


@pytest.mark.slow
def test_a_rank_that_has_returned_is_named_at_the_timeout() -> None:
    with pytest.raises(TrainingError, match=r"^rank 1 returned, and rank [02] has") as raised:
        run_ranks(return_on_rank_one, 3, True, timeout_s=3.0)
    assert re.search(r"for \d s at .* in return_on_rank_one", str(raised.value))
    assert "answered" not in str(raised.value)


def return_late_on_rank_one() -> int:
    time.sleep(2.5 * dist.get_rank())
    return dist.get_rank()


def test_a_rank_that_works_alone_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_monitor, "UNEVEN_S", 0.1)
    assert run_ranks(return_late_on_rank_one, 2) == [0, 1]


def return_one_after_the_other() -> int:
    time.sleep(0.4 * dist.get_rank())
    return dist.get_rank()


def test_ranks_may_return_one_after_the_other() -> None:
    assert run_ranks(return_one_after_the_other, 2) == [0, 1]


def die_after_the_return() -> int:
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, os.getpid())
    if dist.get_rank() == 1:
        # As gloo's threads do now and then.
        pipe.ParentPipe.wait_to_leave = lambda _: os._exit(1)
    else:
        with suppress(ProcessLookupError):
            while True:
                os.kill(ranks[1], 0)
                time.sleep(0.01)
    return dist.get_rank()


def test_a_rank_that_dies_once_it_has_returned_loses_no_result() -> None:
    assert run_ranks(die_after_the_return, 2) == [0, 1]


def test_what_cannot_be_sent_to_a_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be importable by name"):
        run_ranks(lambda: None, 1)
    with pytest.raises(ConfigError, match="its arguments must be picklable"):
        run_ranks(rank_and_sum, 1, lambda: 3)


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from phalanx.launch.local import run_ranks\nrun_ranks(print, 1)\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 1
    assert 'needs `if __name__ == "__main__":`' in done.stderr


def refuse_threads(line: Any) -> None:
    """Be a rank where the limit of processes forbids the thread that speaks to the parent."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pytest.MonkeyPatch().setattr(threading.Thread, "start", start)
    rank.run_rank(rank.RankInfo(3, 4, 0, "cpu", 1, 10.0), line, refuse, ())


def test_a_rank_without_threads_says_which_limit_is_met() -> None:
    context = local.prepare_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=refuse_threads, args=(theirs,))
    process.start()
    theirs.close()
    kind, failure = ours.recv()
    process.join()
    assert (kind, process.exitcode) == ("failure", 2)
    error = failure.as_error()
    assert isinstance(error, ConfigError)
    assert str(error).startswith("rank 3: no further process or thread may be started; raise")
    assert "Traceback" not in str(error)


def break_the_pipe() -> None:
    try:
        raise BrokenPipeError
    except BrokenPipeError:
        raise SystemExit(1)  # noqa: B904 - as a rich console does


def test_a_reader_that_left_is_known_from_what_the_rank_says() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(break_the_pipe, 1)
    assert is_reader_gone(caught.value)


def sleep_long(begun: Path, handles_stop: bool) -> None:
    with PULSE.handling_stop() if handles_stop else nullcontext():
        begun.touch()
        time.sleep(100)


@pytest.mark.parametrize("handles_stop", [False, True])
def test_a_signal_ends_at_once_what_does_not_heed_it(
    handles_stop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the second one, where the first is heeded."""
    begun, told = tmp_path / "begun", list[str]()
    is_heard, is_told = threading.Event(), threading.Event()
    hear = HeartbeatMonitor.record

    def hear_and_note(self: HeartbeatMonitor, rank: int, beat: Any) -> None:
        hear(self, rank, beat)
        if begun.exists() and self.handles_stop() == handles_stop:
            is_heard.set()

    def report(message: str) -> None:
        told.append(message)
        is_told.set()

    def interrupt() -> None:
        for event in (is_heard, is_told)[: 1 + handles_stop]:
            event.wait()
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(HeartbeatMonitor, "record", hear_and_note)
    monkeypatch.setattr(local, "report", report)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted) as caught:
        run_ranks(sleep_long, 1, begun, handles_stop)
    assert caught.value.signum == signal.SIGTERM
    assert ["a second signal ends it at once" in message for message in told] == [
        True
    ] * handles_stop


@pytest.mark.parametrize("run", [run_ranks, run_alone])
def test_a_signal_while_ranks_end_is_not_lost(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a verb of several jobs would start its next one."""
    end_ranks = local.end_ranks

    def end_and_interrupt(ranks: list[local.Rank]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        end_ranks(ranks)

    monkeypatch.setattr(local, "end_ranks", end_and_interrupt)
    with pytest.raises(Interrupted, match="SIGTERM"):
        run(os.getpid, 1)


INTERRUPTED = """
import os, signal, sys, time
from multiprocessing import forkserver, popen_forkserver, reduction
from phalanx.cli.main import main
from phalanx.launch.local import Work, run_ranks, run_supervised
from phalanx.launch.pipe import ByValue

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
starts = []

def interrupt():
    starts.append(1)
    if len(starts) == 2:  # the forkserver runs since the first
        time.sleep(0.5)  # it reads what was sent
        os.kill(os.getpid(), signal.SIGINT)

def send(*given, sendfds=reduction.sendfds):
    interrupt()
    return sendfds(*given)

def connect(fds, connect_to_new_process=forkserver.connect_to_new_process):
    pipes = connect_to_new_process(fds)
    interrupt()
    return pipes

def cut(*given, **more):
    pipe = open(*given, **more)
    if starts:
        pipe.write(bytes([128, 4, 149]))  # the first bytes of a pickle
        pipe.flush()
    interrupt()
    return pipe

{patch}
if __name__ == "__main__":
    sys.exit(main([], lambda _: run_ranks(print, 2) and 0))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "patch",
    [
        "reduction.sendfds = send",
        "forkserver.connect_to_new_process = connect",
        "popen_forkserver.open = cut",
    ],
)
def test_an_interrupt_while_a_process_starts_is_the_only_message(
    patch: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED.replace("{patch}", patch))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "phalanx: interrupted\n")


def pid_then_fail() -> None:
    raise RuntimeError(str(os.getpid()))


def test_no_process_is_left_behind() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(pid_then_fail, 2)
    pid = int(caught.value.traceback.split()[-1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("num_gpus", "words"),
    [
        (0, "the device is cuda, but this host has no GPU; the nearest is cpu"),
        (1, "2 ranks need 2 GPUs, but this host has 1; the nearest is 1, or the device cpu"),
    ],
)
def test_more_ranks_than_gpus_are_refused_before_any_starts(
    num_gpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=words):
        run_ranks(print, 2, device="cuda")


def test_a_strategy_of_more_ranks_than_gpus_is_refused_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phalanx.train.job.request.may_have_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    words = "strategy tp4 needs 4 GPUs, but this host has 2; the nearest is dp2, or the device cpu"
    with pytest.raises(ConfigError, match=words):
        choose("tp4", None, "cuda")
    with pytest.raises(ConfigError, match=words):
        measure_scaling(ScalingConfig(strategies=("tp4",), device="cuda"), print, [])


IN_ANOTHER_FOLDER = """
import os
from phalanx.launch.local import Work, run_ranks, run_supervised
from phalanx.launch.pipe import ByValue
import beside

if __name__ == "__main__":
    assert run_ranks(beside.safe_path, 1) == [None] and "PYTHONSAFEPATH" not in os.environ
"""


@pytest.mark.slow
def test_no_module_of_the_working_folder_is_imported(tmp_path: Path) -> None:
    script, here = tmp_path / "scripts" / "script.py", tmp_path / "a downloaded run"
    for folder in (script.parent, here):
        folder.mkdir()
    script.write_text(IN_ANOTHER_FOLDER)
    (script.parent / "beside.py").write_text(
        "import os\ndef safe_path(): return os.environ.get('PYTHONSAFEPATH')"
    )
    for name in ("random", "queue", "tempfile"):
        (here / f"{name}.py").write_text(f"open('{name} ran', 'w'); raise SystemExit(3)")
    subprocess.run([sys.executable, script], cwd=here, check=True)
    assert not list(here.glob("* ran"))


NOTEBOOK = """
import torch.distributed as dist
from phalanx.errors import ConfigError
from phalanx.launch.local import Work, run_ranks, run_supervised
from phalanx.launch.pipe import ByValue

def size(): return dist.get_world_size()

assert [run_ranks(size, 1) for _ in range(2)] == [[1], [1]]
try:
    run_ranks(size, 2)
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_what_a_notebook_defines_runs_in_its_process_and_in_no_others() -> None:
    run = subprocess.run([sys.executable], input=NOTEBOOK, text=True, capture_output=True)
    assert run.stderr == ""
    assert re.fullmatch(
        r".* 2 processes cannot import; put the job in a \.py file .*\n", run.stdout
    )


# Jobs of one process each, and what serves them.


def give(value: int) -> int:
    return value


def stand() -> None:
    while True:
        time.sleep(1)


def stop() -> None:
    time.sleep(1.5)  # a beat
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError("no more")


def test_what_serves_others_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LEAVING_S", 0.1)
    assert run_supervised([("a", give, (3,)), ("b", give, (4,))], [("c", stand, ())]) == [3, 4]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_stopped_process_is_called_by_its_name(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_monitor, "STOPPED_S", 0.0)  # at the first look after it
    said = rf"worker 2 on {socket.gethostname()} \(process \d+\) has been stopped by a signal"
    with pytest.raises(TrainingError, match=said):
        run_supervised([("worker 2", stop, ())], timeout_s=4)
    assert capfd.readouterr().err.startswith("phalanx: worker 2 on ")


def stop_by_the_second_process(folder: Path) -> int:
    """Wait for a request to stop; the first process is killed when it has one."""
    with PULSE.handling_stop():
        is_first = not (folder / "begun").exists()
        (folder / "begun").touch()
        while not PULSE.stop_signal:
            time.sleep(0.01)
        if is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return PULSE.stop_signal


def test_a_process_that_replaces_one_is_asked_to_stop_as_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = HeartbeatMonitor.record

    def hear_and_stop(self: HeartbeatMonitor, rank: int, beat: Beat) -> None:
        hear(self, rank, beat)
        if self.handles_stop() and not is_asked:
            is_asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    is_asked: list[bool] = []
    monkeypatch.setattr(HeartbeatMonitor, "record", hear_and_stop)
    works: list[Work] = [("worker 0", stop_by_the_second_process, (tmp_path,))]
    assert run_supervised(works, max_restarts=1) == [signal.SIGTERM]


def test_a_process_that_fails_is_called_by_its_name() -> None:
    with pytest.raises(RankFailed, match=r"^worker 1 failed first:\n(.*\n)*RuntimeError: no more$"):
        run_supervised([("worker 0", stand, ()), ("worker 1", fail, ())])
