"""One script on one process, on processes of `phalanx run`, and on hosts that torchrun joins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forked_torchrun import run_script as run_script_alone
from forked_torchrun import run_two
from namespaces import HOSTS
from phalanx.cli.main import main
from phalanx.errors import PhalanxError, message_of
from phalanx.launch.local import run_ranks
from phalanx.script.script_rank import run_script

pytestmark = pytest.mark.fresh_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
TOY = EXAMPLES / "toy_model"

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def output_of(*command: str, code: int = 0) -> tuple[str, str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=ENVIRONMENT
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def forked(done: subprocess.CompletedProcess[str], code: int = 0) -> tuple[str, str]:
    assert (done.returncode != 0) == (code != 0), done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def printed() -> str:
    """What the plain script prints."""
    return forked(run_script_alone(str(TOY / "plain.py")))[0]


def test_one_process_prints_what_the_plain_script_does(printed: str) -> None:
    assert forked(run_script_alone(str(TOY / "distributed.py")))[0] == printed


@pytest.mark.slow
def test_processes_of_the_command_print_it_once(printed: str) -> None:
    command = ["-m", "phalanx", "run", str(TOY / "distributed.py"), "--threads", "1", "--no-proof"]
    assert forked(run_script_alone(*command, "--strategy", "fsdp3:zero1"))[0] == printed


SCRIPT = """
import sys
import phalanx
import torch
run = phalanx.init()
run.print(sys.argv[1:], __name__)
if sys.argv[1:] == ["raise"] and not run.is_first:
    raise ValueError("of rank 1")
if sys.argv[1:] == ["network"] and not run.is_first:
    raise RuntimeError("NoEndpoint: Connection refused, Socket closed")
if sys.argv[1:] == ["long"]:
    raise ValueError("begin" + 1_000_000 * "x" + "end")
if sys.argv[1:] == ["exit"]:
    sys.exit(7)
if sys.argv[1:] == ["twice"]:
    torch.distributed.init_process_group("gloo")
if sys.argv[1:] == ["mistake"]:
    run.clip(1.0)
if sys.argv[1:] == ["module"]:
    import no_such_module.inner
"""


@pytest.mark.parametrize(("word", "error"), [
    ("raise", r"rank 1 failed first:\n(.*\n)*ValueError: of rank 1"),
    ("network", r"rank 1 failed first:\n(.*\n)*RuntimeError: NoEndpoint: Connection refused"),
    ("long", r"^rank \d failed first:\n(?=(.|\n){20000,21000}$)(.*\n)*ValueError: beginx{5000}"),
    ("exit", r"script.py ended by sys.exit: exit code 7"),
    ("twice", r"initialized the process group already; remove the call"),
    ("mistake", r"^clip: no model is prepared.*\nat .*script.py:18$"),
    ("module", r"script.py needs the module 'no_such_module', which this Python.*\nat .*py:20$"),
])  # fmt: skip
def test_what_a_script_ends_with_is_told(tmp_path: Path, word: str, error: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with pytest.raises(PhalanxError) as raised:
        run_ranks(run_script, 2, str(script), [word], None, threads=1)
    assert re.search(error, message_of(raised.value)), raised.value


SAVES = """
import os, signal, sys
import phalanx
import torch
run = phalanx.init()
model = torch.nn.Linear(1, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    run.backward(sum_of_rows=model(torch.full((1, 1), run.comm.coord("data") + 1.0)).sum(), count=1)
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        run.save(sys.argv[1])
if not run.is_first:
    os.kill(os.getpid(), signal.SIGKILL)
run.sum(1)
"""


@pytest.mark.slow
def test_a_script_that_is_killed_says_what_stands_and_how_to_resume(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", str(tmp_path / "saved")
    script.write_text(SAVES)
    with pytest.raises(PhalanxError) as raised:
        run_ranks(run_script, 2, str(script), [folder], None, threads=1)
    stands = f"checkpoints/step-00000002; run.resume({folder!r}) resumes it"
    assert "signal SIGKILL" in str(raised.value)
    assert message_of(raised.value).endswith(f"last checkpoint: {folder}/{stands}")


IMPATIENT = """
import time
import phalanx
run = phalanx.init("dp2,fsdp2", timeout_s=3.0)
if run.comm.coord("fsdp"):
    time.sleep(1000)
import torch
run.comm.all_reduce(torch.ones(1), "fsdp")
"""


@pytest.mark.slow
def test_the_timeout_of_a_script_holds_in_the_job_of_the_command(tmp_path: Path) -> None:
    """In the groups of its axes too, which torch would give half an hour."""
    script = tmp_path / "script.py"
    script.write_text(IMPATIENT)
    with pytest.raises(PhalanxError, match="has waited in vain for another rank"):
        run_ranks(run_script, 4, str(script), [], None, threads=1)


STARTS = """
import os, signal, subprocess, sys
from multiprocessing import Process
from pathlib import Path
import phalanx

def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(sys.argv[1], f"pid {os.getpid()}").touch()
    while True:
        signal.pause()

if __name__ == "__main__":
    run = phalanx.init()
    child = os.fork()
    if child == 0 and run.is_first:
        raise ValueError("of a fork")
    if child:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        program = subprocess.Popen(["sleep", "1000"])
        program.terminate()
        codes.append(program.wait())
        process = Process(target=signal.pause)
        process.start()
        process.terminate()
        process.join()
        codes.append(process.exitcode)
        Process(target=ignore_sigterm).start()
        while len(list(Path(sys.argv[1]).glob("pid *"))) < 2:
            pass
        Path(sys.argv[1], os.environ["RANK"]).write_text(repr(codes))
        run.sum(1)
"""


def runs(pid: int) -> bool:
    """Whether a process is there, and not as one that has ended and whose parent has too."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.slow
def test_what_a_script_forks_and_starts_ends_as_by_python(tmp_path: Path) -> None:
    """A fork speaks for no rank, a helper ends by SIGTERM, and by SIGKILL with its rank."""
    script = tmp_path / "script.py"
    script.write_text(STARTS)
    run_ranks(run_script, 2, str(script), [str(tmp_path)], None, threads=1)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[1, -15, -15]", "[0, -15, -15]"]
    while any(runs(int(path.name.split()[1])) for path in tmp_path.glob("pid *")):
        time.sleep(0.01)


OF_NO_ROWS = """
import phalanx
import torch
from torch.utils.data import DataLoader, TensorDataset
run = phalanx.init()
loader = run.prepare(DataLoader(TensorDataset(torch.ones(5, 2)), batch_size=4))
for (x,) in loader:
    x.view(len(x), -1)
"""


@pytest.mark.slow
def test_a_batch_without_rows_is_told_where_a_script_cannot_take_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OF_NO_ROWS)
    with pytest.raises(PhalanxError, match=r"The batch of this rank has no rows.*drop_last=True"):
        run_ranks(run_script, 2, str(script), [], None, threads=1)


STOPS = """
import os, signal, sys, time
import phalanx
import torch
from torch.utils.data import DataLoader, TensorDataset
run = phalanx.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.ones(80, 2)), 4)
model, optimizer, loader = run.prepare(model, optimizer, loader)
is_over = False
while not is_over:
    for (x,) in loader:
        run.backward(sum_of_rows=model(x).square().sum(), count=len(x))
        optimizer.step()
        optimizer.zero_grad()
        if run.should_stop:
            is_over = True
            break
        if run.steps_done == 3 and run.is_first:
            os.kill(int(sys.argv[2]), signal.SIGTERM)
        time.sleep(0.01)
saved = run.save(sys.argv[1])
run.print("saved", saved, os.getpid())
"""


@pytest.mark.slow
def test_a_script_that_asks_saves_when_a_signal_comes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPS)
    command = "import os, sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]"
    command += " + ['--', sys.argv[2].replace('script.py', 'run'), str(os.getpid())]))"
    words, told = output_of(
        *(
            sys.executable,
            "-c",
            command,
            "run",
            str(script),
            "--nproc",
            "2",
            "--threads",
            "1",
            "--no-proof",
        ),
        code=143,
    )
    assert "saved" in words
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
    assert "SIGTERM: the run ends after the current step" in told
    assert re.search(r"interrupted by SIGTERM; last checkpoint: .*step-\d+; run.resume", told), told


@pytest.mark.slow
def test_without_a_launcher_a_script_that_asks_saves_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPS.replace("int(sys.argv[2])", "os.getpid()"))
    words, told = output_of(sys.executable, str(script), str(tmp_path / "run"), code=143)
    assert "saved" in words
    assert "the script was asked to stop" in told


@pytest.mark.slow
def test_without_a_launcher_a_mistake_is_told_in_one_message(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import phalanx\nphalanx.init().clip(1.0)")
    words, told = output_of(sys.executable, str(script), code=2)
    assert words == ""
    assert re.search(rf"^phalanx: clip: no model is prepared.*\nat {script}:2$", told), told


@pytest.mark.slow
def test_a_script_that_asks_saves_when_torchrun_is_to_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPS.replace("int(sys.argv[2])", "os.getppid()"))
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    words, told = output_of(sys.executable, *torchrun, str(script), str(tmp_path / "run"), code=1)
    assert "saved" in words
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
    assert told.count("SIGTERM: the run ends after the current step") == 1
    assert (
        len(re.findall(r"interrupted by SIGTERM; last checkpoint: .*step-\d+; run.resume", told))
        == 1
    )


def test_a_script_that_never_joins_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("x = 1")
    with pytest.raises(PhalanxError, match=r"never called phalanx.init, so 2 processes each did"):
        run_ranks(run_script, 2, str(script), [], None, threads=1)


WITHOUT_PHALANX = """
import torch
import torch.distributed as dist
if {is_init}:
    dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.randn(3, 4)).sum().backward()
"""


def test_a_script_that_finds_the_process_group_may_divide_the_work_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the Trainer of transformers does; one that makes the group again is told."""
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_PHALANX.format(is_init=False))
    run_ranks(run_script, 2, str(script), [], None, threads=1)
    script.write_text(WITHOUT_PHALANX.format(is_init=True))
    assert main(["run", str(script), "--nproc", "2"]) == 2  # before any process starts
    assert "makes its own process group by init_process_group" in capsys.readouterr().err
    with pytest.raises(PhalanxError, match="start the script by torchrun --nproc-per-node 2"):
        run_ranks(run_script, 2, str(script), [], None, threads=1)


JOINS = """
import os
import runpy
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import jobs
Path(sys.argv[1], os.environ["RANK"]).write_text(str(jobs.job().verify("dp2").is_equal))
runpy.run_path({script!r}, run_name="__main__")
"""


def test_torchrun_joins_the_processes_and_verify_joins_them_too(
    tmp_path: Path, printed: str
) -> None:
    """It would start two jobs of two otherwise."""
    script = tmp_path / "script.py"
    folder = str(Path(__file__).parent)
    script.write_text(JOINS.format(folder=folder, script=str(TOY / "distributed.py")))
    assert forked(run_two(str(script), str(tmp_path)))[0] == printed
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["True", "True"]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "error"), [
    ("raise", "ValueError: of rank 1"), ("exit", "exitcode *: 7"),
])  # fmt: skip
def test_under_torchrun_a_script_that_fails_ends_the_job(
    tmp_path: Path, word: str, error: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    _, words = forked(run_two(str(script), word), code=1)
    assert re.search(error, words), words


@pytest.mark.parametrize(("words", "error"), [
    ([], "SCRIPT is missing; expected: phalanx run SCRIPT"),
    (["nothing.py"], "there is no file nothing.py"),
    ([str(TOY / "plain.py"), "--nproc", "2", "--strategy", "dp3"], "needs 3 ranks, but there"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    assert main(["run", *words]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_runs_on_two_hosts(switch: str, printed: str) -> None:
    """Two network namespaces, each with a torchrun of its own."""
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 "
        f"--master-addr={HOSTS[0]} --master-port=29617 {TOY / 'distributed.py'}"
    )

    def start(host: str) -> tuple[str, str]:
        command = f"hostname {host}; exec {torchrun} ".replace(
            "--nnodes=2", f"--nnodes=2 --node-rank={HOSTS.index(host)}"
        )
        return output_of(*f"ip netns exec {host} unshare --uts sh -c".split(), command)

    with ThreadPoolExecutor() as hosts:
        outputs = list(hosts.map(start, HOSTS))
    assert [output for output, _ in outputs] == [printed, ""]
