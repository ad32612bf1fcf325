"""A process that has joined a job ends with the exit code of its script, however that ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from marks import by_hand

ENDS: dict[str, tuple[str, int]] = {
    "the end": ("run = phalanx.init()", 0),
    "a caught exit": ("phalanx.init()\ntry: sys.exit(3)\nexcept SystemExit as stop: stop.code", 0),
    "sys.exit": ("phalanx.init()\nsys.exit(3)", 3),
    "a bare exit": ("phalanx.init()\nexit()", 0),
    "a text": ("phalanx.init()\nsys.exit('no data')", 1),
    "main": ("def main():\n phalanx.init()\n return 3\nsys.exit(main())", 3),
    "main without a code": ("def main():\n phalanx.init()\nsys.exit(main())", 0),
    "raise": ("phalanx.init()\nraise SystemExit(3)", 3),
    "raise nothing": ("phalanx.init()\nraise SystemExit", 0),
    "raise in a function": ("phalanx.init()\ndef f(): raise SystemExit(3)\nf()", 3),
    "raise from finally": ("phalanx.init()\ntry: sys.exit(0)\nfinally: raise SystemExit(4)", 4),
    "a large code": ("phalanx.init()\nsys.exit(259)", 3),
    "an error": ("phalanx.init()\n1 / 0", 1),
    "an error of ours": ("phalanx.init().clip(1.0)", 2),
    "a wrong strategy": ("phalanx.init('dp2')", 2),
    "an error before the job": ("phalanx.init(timeout_s=-1)", 2),
    "os._exit": ("phalanx.init()\nos._exit(5)", 5),
    "argparse": ("phalanx.init()\nimport argparse\nargparse.ArgumentParser().parse_args(['x'])", 2),
    "Ctrl-C": ("phalanx.init()\nraise KeyboardInterrupt", 130),
    "a thread": ("phalanx.init()\nt = Thread(target=sys.exit, args=(3,))\nt.start()\nt.join()", 0),
    "a closed output": ("phalanx.init()\nsys.stdout.close()", 0),
    "a fork": ("phalanx.init()\nif os.fork(): os.wait()\nelse: sys.exit(3)", 0),
    "a fork to the end": ("phalanx.init()\nif os.fork(): print(os.wait()[1]); sys.exit(4)", 4),
}
"""What a script does, and the exit code that Python gives it where there is no job."""

PROGRAM = """
import json, os, sys
from threading import Thread
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
import phalanx, phalanx.script.run
pids = {}
script = ""
for name, text in json.loads(sys.argv[1]).items():
    pids[name] = os.fork()
    if not pids[name]:
        script, pids = text, {}
        break
else:
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for name, p in pids.items()}
    print(json.dumps(codes), flush=True)
    os._exit(0)
exec(script)
"""
"""Each script ends in a fork, as Python ends a program, so that torch is loaded once."""


WITHOUT_GUARD = """
import sys
from multiprocessing import get_context
from pathlib import Path
import phalanx
run = phalanx.init()
process = get_context("spawn").Process(target=print)
process.start()
process.join()
sys.exit(process.exitcode + 10)
"""


@pytest.mark.slow
def test_a_spawned_process_that_runs_the_script_again_is_told_of_the_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_GUARD)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 12, done.stderr
    guard = 'put the statements that the script runs below `if __name__ == "__main__":`'
    (message,) = done.stderr.splitlines()
    assert message.endswith(guard)


OTHERS = (
    *("a text", "a bare exit", "main without a code", "raise", "raise nothing"),
    *("raise in a function", "a large code", "an error before the job", "a wrong strategy"),
    *("a caught exit", "argparse", "raise from finally"),
    *("main", "os._exit", "a thread", "a closed output", "a fork"),
)
"""Ends whose kind another shows too."""


@pytest.fixture(scope="module")
def codes(request: pytest.FixtureRequest) -> dict[str, int]:
    """What the scripts of the tests that run here end with."""
    tests = [item for item in request.session.items if "codes" in item.fixturenames]
    scripts = {name: ENDS[name][0] for name in (item.callspec.params["name"] for item in tests)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(scripts)],
        capture_output=True, text=True, timeout=280, check=False, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [by_hand(name) if name in OTHERS else name for name in ENDS])
def test_a_rank_ends_with_the_code_of_its_script(name: str, codes: dict[str, int]) -> None:
    assert codes[name] == ENDS[name][1]


IMPORT = """
import builtins, os, signal, sys
def state():
    hooks = sys.exit, builtins.exit, builtins.quit, sys.excepthook, SystemExit.__dict__["code"]
    return hooks, dict(os.environ), [signal.getsignal(each) for each in signal.valid_signals()]
before = state()
import phalanx
assert state() == before
"""


def test_an_import_changes_nothing_outside_of_the_package() -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    subprocess.run([sys.executable, "-c", IMPORT], env=environment, check=True)
