"""However a script or a job fails, its process ends with the same code by any launcher."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from phalanx.cli.main import main
from ports import reserved_port

HERE = Path(__file__).parent
SCRIPT = str(HERE / "ways_to_fail.py")

SIGNAL = -1
"""In place of the code: a signal ends it, which a shell has as 128 and more, and a job as 1."""

ALONE = {
    "an error before the job": 1,
    "an error before the model": 1,
    "an error": 1,
    "an error in forward": 1,
    "an error in backward": 1,
    "an error of a dataset": 1,
    "a worker's own network": 1,
    "a worker that dies": 1,
    "rows of unlike lengths": 1,
    "no rows": 1,
    "a network's words": 1,
    "a wordless error": 1,
    "a group of errors": 1,
    "a chain of errors": 1,
    "an error of 50 MB": 1,
    "a broken pipe of its own": 1,
    "an assertion": 1,
    "no memory": 1,
    "no memory in torch": 1,
    "too deep": 1,
    "no module": 1,
    "bad syntax": 1,
    "not a stop": 1,
    "no file": 1,
    "a shape": 1,
    "surrogates": 1,
    "a closed error output": 1,
    "a loss that is no number": 1,
    "sys.exit": 3,
    "a text": 1,
    "raise SystemExit": 4,
    "os._exit": 5,
    "Ctrl-C of its own": 130,
    "killed": SIGNAL,
    "aborted": SIGNAL,
    "a bad address": SIGNAL,
    "out of CPU time": SIGNAL,
    "a wrong strategy": 2,
    "a wrong setting": 2,
    "no model": 2,
    "a count by position": 2,
    "a model prepared twice": 2,
    "nowhere to save": 2,
    "a broken checkpoint": 2,
}
"""The exit code of `python SCRIPT`, by the way in which it fails."""

OURS = {
    "an error": r"^rank \d failed:\n(.*\n)*ValueError: an error$",
    "a wrong strategy": r"^phalanx: strategy 'pp2' has pp",
}
"""What we say of some ways under torchrun; of the others nobody is left to speak."""

ON_ONE_RANK = [
    *("an error", "a network's words", "a wordless error", "no memory", "sys.exit", "a text"),
    *("raise SystemExit", "os._exit", "Ctrl-C of its own", "killed", "aborted", "a bad address"),
    *("no model", "surrogates"),
]
"""Ways of rank 1 while rank 0 goes on."""

OF_A_JOB = [way for way in ON_ONE_RANK if way != "no model"]
"""Ways of the loss of a job that is trained by `phalanx train --script`."""

OF_A_DECODER = {
    "a loss that is no number": 1,
    "an error": 1,
    "no memory": 1,
    "killed": SIGNAL,
    "aborted": SIGNAL,
    "os._exit": 5,
    "a full disk": 2,
    "Ctrl-C": 130,
    "SIGTERM": 143,
    "SIGHUP": 129,
    "a closed output": 141,
}
"""Ways of `phalanx train`, which trains a model of its own."""

DECODER = """
import sys
import phalanx
from phalanx.config import TrainConfig
from phalanx.config.load import load_config
if __name__ == "__main__":
    phalanx.train_decoder(load_config(sys.argv[1:], TrainConfig).config)
    print("is done")
"""
"""A script that trains what `phalanx train` would."""

OF_A_COMMAND = {
    "train --optimizer.rl 1": 2,
    "train --data /no/such/folder": 2,
    "train --strategy dp3,,": 2,
    "train --out /proc/here": 2,
    "train --shape.hidden 7": 2,
    "train --resume /no/such/run": 2,
    "train --script /no/such/file.py:job": 2,
    "verify dp0": 2,
    "run /no/such/file.py": 2,
}

PROGRAM = """
import json, os, signal, sys
from multiprocessing import util
import phalanx, phalanx.script.run, phalanx.script.trainer, phalanx.train.loop, phalanx.train.run
ranks, codes, words = {}, {}, []
def wait_for_one():
    pid, status = os.wait()
    if pid in ranks:
        codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
for name, words, environment in json.loads(sys.argv[1]):
    while len(ranks) >= 6:
        wait_for_one()
    pid = os.fork()
    if not pid:
        break
    ranks[pid] = name
else:
    while ranks:
        wait_for_one()
    print(json.dumps(codes), flush=True)
    os._exit(0)
os.environ.update(environment)
output = os.open(f"{os.environ['WORDS']}/{name.replace('/', '_')}", os.O_CREAT | os.O_WRONLY)
os.dup2(output, 1)
os.dup2(output, 2)
if "a closed output" in name:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)
if "WHICH" in environment:
    sys.path.insert(0, environment["HERE"])
    import ways_to_fail
    phalanx.train.run.train_rank = ways_to_fail.train_rank
    if "RANK" in environment:  # this process is a rank itself
        ways_to_fail.fail_later()
start = util.spawnv_passfds
def start_or_fork(path, words, descriptors):
    if "forkserver" not in words[-1]:
        return start(path, words, descriptors)
    if pid := os.fork():
        return pid
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *descriptors}:
        try:
            os.close(descriptor)
        except OSError:
            pass
    try:
        exec(words[-1], {})
    finally:
        os._exit(0)
util.spawnv_passfds = start_or_fork
sys.argv = words
if words[0] == "phalanx":
    from phalanx.cli.main import main
    sys.exit(main())
exec(compile(open(words[0]).read(), words[0], "exec"))
"""
"""Starts each process as a fork that ends as Python ends a program, so that torch is loaded once;
so is the server of its ranks.
"""


def in_forks(
    jobs: list[tuple[str, list[str], int]], folder: Path, **settings: str
) -> dict[str, set[int]]:
    """Return the codes of the processes of each job: one by python, or some as under torchrun.

    They find the settings in their environment.
    """
    processes: list[tuple[str, list[str], dict[str, str]]] = []
    with ExitStack() as ports:
        for name, words, num_ranks in jobs:
            environment = {"WORDS": str(folder), "OMP_NUM_THREADS": "1", "WAY": name, **settings}
            port = ports.enter_context(reserved_port())
            for rank in range(num_ranks):
                place = {
                    **{"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"},
                    **{"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)},
                    "MASTER_PORT": port,
                }
                is_alone = num_ranks == 1
                processes.append(
                    (f"{name}:{rank}", words, environment | ({} if is_alone else place))
                )
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(processes)],
            capture_output=True, text=True, timeout=2000, check=False, cwd=folder,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes: dict[str, set[int]] = {}
    for name, code in json.loads(done.stdout.splitlines()[-1]).items():
        seen = 130 if code == -signal.SIGINT else max(code, SIGNAL)
        codes.setdefault(name.rpartition(":")[0], set()).add(seen)
    return codes


def differing(found: dict[str, set[int]], expected: dict[str, set[int]]) -> dict[str, set[int]]:
    return {way: codes for way, codes in found.items() if codes != expected[way]}


def of_job(code: int) -> int:
    """Return what a launcher makes of the code of a process."""
    return 1 if code == SIGNAL else code


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_a_script_by_python_and_as_under_torchrun(tmp_path: Path) -> None:
    alone = [(way, [SCRIPT, way, "all", str(tmp_path / "a")], 1) for way in ALONE]
    codes = in_forks(alone, tmp_path)
    assert differing(codes, {way: {code} for way, code in ALONE.items()}) == {}
    every = [(way, [SCRIPT, way, "all", str(tmp_path / "b")], 2) for way in ALONE]
    codes = in_forks(every, tmp_path)
    # A rank may end because the other has: with 1.
    assert {way for way in ALONE if codes[way] - {ALONE[way], 1}} == set()
    assert {way for way in ALONE if ALONE[way] not in codes[way]} == set()
    one = [(way, [SCRIPT, way, "one"], 2) for way in ON_ONE_RANK]
    codes = in_forks(one, tmp_path)
    assert differing(codes, {way: {1, ALONE[way]} for way in ON_ONE_RANK}) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "code"),
    [("an error", 1), ("a wrong strategy", 2), ("sys.exit", 3), ("os._exit", 5), ("killed", -9)],
)
def test_torchrun_ends_by_1_and_its_summary_has_the_code_of_the_script(
    way: str, code: int, tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, SCRIPT, way, "all", str(tmp_path)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(rf"exitcode *: {code} ", done.stderr), done.stderr
    assert ALONE[way] == (code if code > 0 else SIGNAL)
    if way in OURS:
        assert re.search(OURS[way], done.stderr, re.MULTILINE), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("which", ["all", "one"])
def test_a_script_by_phalanx_run(which: str, tmp_path: Path) -> None:
    ways = ALONE if which == "all" else ON_ONE_RANK
    options = ["--nproc", "2", "--threads", "1", "--no-proof", "--"]
    codes = {
        way: {main(["run", SCRIPT, *options, way, which, str(tmp_path / way)])} for way in ways
    }
    assert differing(codes, {way: {of_job(code)} for way, code in ALONE.items()}) == {}


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_a_job_by_the_command_and_as_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", "--script", f"{SCRIPT}:job", "--strategy", "dp2", "--threads", "1"]
    codes: dict[str, set[int]] = {}
    for way in OF_A_JOB:
        monkeypatch.setenv("WAY", way)
        codes[way] = {main([*command, "--out", str(tmp_path / way)])}
    assert differing(codes, {way: {of_job(ALONE[way])} for way in OF_A_JOB}) == {}
    jobs = [
        (way, ["phalanx", *command, "--out", str(tmp_path / f"{way} 2")], 2) for way in OF_A_JOB
    ]
    codes = in_forks(jobs, tmp_path)
    assert {way for way in OF_A_JOB if codes[way] - {ALONE[way], 1}} == set()
    assert {way for way in OF_A_JOB if ALONE[way] not in codes[way]} == set()


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_a_wrong_request_by_the_command_and_as_under_torchrun(tmp_path: Path) -> None:
    alone = {words: {main(words.split())} for words in OF_A_COMMAND}
    assert differing(alone, {words: {2} for words in OF_A_COMMAND}) == {}
    jobs = [(words, ["phalanx", *words.split()], 2) for words in OF_A_COMMAND]
    codes = in_forks(jobs, tmp_path)
    assert {
        words for words in OF_A_COMMAND if codes[words] - {1, 2} or 2 not in codes[words]
    } == set()


@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("which", ["all", "one"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("by", ["the command", "a script"])
def test_a_decoder_by_itself_and_as_under_torchrun(
    by: str, num_ranks: int, which: str, tmp_path: Path
) -> None:
    """Of its ways some are those of a signal to all, or of the output of the first rank."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a text\n" for n in range(900)))
    script = tmp_path / "script.py"
    script.write_text(DECODER)
    command = [
        *(["phalanx", "train"] if by == "the command" else [str(script)]),
        *("--steps=5", f"--data={text}", "--device=cpu", "--threads=1"),
        *("--shape.num-layers=1", "--shape.hidden=32", "--shape.num-heads=2", "--save=every=1"),
        *("--shape.head-dim=16", "--shape.ffn=64", "--shape.vocab-size=300", "--strategy=dp2"),
        *("--corpus.seq-len=16", f"--corpus.cache={tmp_path / 'cache'}"),
    ]
    of_all = [way for way in OF_A_DECODER if way in ("Ctrl-C", "SIGTERM", "SIGHUP")]
    ways = [way for way in OF_A_DECODER if which == "all" or way not in of_all]
    jobs = [(way, [*command, f"--out={tmp_path / way}"], num_ranks) for way in ways]
    codes = in_forks(jobs, tmp_path, WHICH=which, HERE=str(HERE))
    if num_ranks == 1:
        assert differing(codes, {way: {of_job(OF_A_DECODER[way])} for way in ways}) == {}
    # A rank may end because the other has: with 1.
    assert {way for way in ways if codes[way] - {of_job(OF_A_DECODER[way]), SIGNAL, 1}} == set()
    expected = {way: of_job(OF_A_DECODER[way]) for way in ways if OF_A_DECODER[way] != SIGNAL}
    assert {way for way, code in expected.items() if code not in codes[way]} == set()
