"""Disturb small runs in random orders, and resume each as its message says.

python benchmarks/faults/main.py [--orders 40] [--limit-s 480] [--seed 0] [--folder DIR]

An order is a run of `dp2` that is disturbed two or three times: its terminal is closed, the disk
of its log fills up, a save fails, or its processes are killed. After each, the last checkpoint
must be whole and named, and the command of the message (or `--resume` on the folder, where no
message can be seen) continues from it. Weights and moments after the last step must equal, byte for
byte, the ones of a run that nobody disturbs.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pty
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open

from phalanx.checkpoint import files, manifest

PHALANX = str(Path(sys.executable).with_name("phalanx"))
STEPS, EVERY = 300, 15
"""Steps of a run, and between two of its checkpoints."""

NEW = (
    "--strategy dp2 --device cpu --threads 1 --precision float32 --seed 3 --eval-every 0 "
    f"--steps {STEPS} --save every={EVERY},keep=3 --corpus.seq-len 24 "
    "--batch.global-size 8 --batch.microbatch 2 --shape.num-layers 1 --shape.hidden 16 "
    "--shape.num-heads 2 --shape.num-kv-heads 1 --shape.head-dim 8 --shape.ffn 24 "
    "--shape.vocab-size 300 --shape.max-seq-len 64"
)

END_S = 90.0
"""Longest wait for the end of a disturbed run, or for its next step, in seconds."""

MUTE = ("terminal", "disk", "kill launcher", "kill all")
"""Faults whose run can show no message."""

FAULTS = (*MUTE, "save", "term", "interrupt", "kill rank 0", "kill rank 1")


class Broken(Exception):
    """A promise that did not hold."""


class Run:
    """A run in a folder, disturbed and resumed."""

    def __init__(self, out: Path) -> None:
        self.out, self.text = out, ""
        self.command = [PHALANX, "train", "--data", str(out.parent / "text.txt"), *NEW.split()]
        self.command += ["--out", str(out), "--corpus.cache", str(out.parent / "cache")]

    def steps(self) -> list[int]:
        """Return the steps in the records."""
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        with contextlib.suppress(json.JSONDecodeError):  # the last line may be half written
            return [v["step"] for v in map(json.loads, lines) if v["kind"] == "step"]
        return []

    def start(self, fault: str) -> subprocess.Popen[bytes]:
        """Start the run, or resume it."""
        output, self._log = None, self.out.parent / "log"
        if fault == "terminal":
            self._terminal, inner = pty.openpty()
            how = {"stdin": inner, "stdout": inner, "stderr": inner, "start_new_session": True}
            process = subprocess.Popen([sys.executable, "-c", CONTROLLED, *self.command], **how)
            os.close(inner)
            return process
        output = open("/dev/full" if fault == "disk" else self._log, "wb")
        with output:
            return subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def disturb(self, fault: str, after: int) -> None:
        """Start, disturb once `after` more steps are recorded, and wait for the end."""
        begun = len(self.steps())
        if fault == "save":
            due = (max(self.checkpoints(), default=0) // EVERY + 2) * EVERY
            blocked = manifest.folder_of(self.out, due).with_suffix(".partial")
            blocked.parent.mkdir(parents=True, exist_ok=True)
            blocked.write_text("in the way")
        process = self.start(fault)
        try:
            until_s = time.monotonic() + END_S
            while len(self.steps()) - begun < after and process.poll() is None:
                if fault == "terminal":
                    drain(self._terminal)
                if time.monotonic() > until_s:
                    raise Broken(f"{fault}: {len(self.steps()) - begun} steps in {END_S:g} s")
                time.sleep(0.01)
            if process.poll() is None and fault != "save":
                self._hit(fault, process)
            while process.poll() is None and time.monotonic() < until_s + END_S:
                time.sleep(0.02)
            if process.poll() is None:
                raise Broken(f"{fault}: it does not end")
            ranks = ranks_of(process.pid)
            while ranks and time.monotonic() < until_s + END_S:
                time.sleep(0.05)
                ranks = ranks_of(process.pid)
            if ranks:
                raise Broken(f"{fault}: processes {ranks} are left")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if fault == "save":
                blocked.unlink(missing_ok=True)
        self.text = "" if fault in MUTE else self._log.read_text(errors="replace")
        self.code = process.returncode

    def _hit(self, fault: str, process: subprocess.Popen[bytes]) -> None:
        if fault == "terminal":
            os.close(self._terminal)
        elif fault in ("disk", "term", "interrupt"):
            process.send_signal(signal.SIGINT if fault == "interrupt" else signal.SIGTERM)
        elif fault == "kill launcher":
            process.kill()
        elif fault == "kill all":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            log = (self.out / "logs" / f"rank-{fault[-1]}.log").read_text()
            number = re.findall(r"process (\d+)", log)[-1]
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)

    def checkpoints(self) -> dict[int, Path]:
        """Return the complete checkpoints by their steps."""
        return manifest.complete_checkpoints(self.out)

    def check(self, fault: str) -> None:
        """Check that the last checkpoint is whole and named, and take the command to resume."""
        found, taken = self.checkpoints(), max(self.steps(), default=0)
        if taken >= 3 * EVERY and not found:
            raise Broken(f"{fault}: no checkpoint after {taken} steps")
        if fault in ("terminal", "disk", "term", "interrupt") and taken < STEPS:
            if taken and max(found, default=0) != taken:
                raise Broken(f"{fault}: the last step is {taken}, the last checkpoint {max(found)}")
        if not found:
            return
        last = found[max(found)]
        files.verify(last, manifest.read(last))
        resume = ["train", "--resume", str(self.out)]
        if fault not in MUTE and self.code != 0:
            named = f"last checkpoint: {last}; resume by: phalanx "
            if named not in self.text:
                raise Broken(f"{fault}: exit {self.code}, {last} is not named in {self.text!r}")
            resume = shlex.split(self.text.split(named)[1].splitlines()[0])
        self.command = [PHALANX, *resume]

    def finish(self) -> list[str]:
        """Let the run end; return the checksums of the tensors of its last checkpoint."""
        ended = subprocess.run(self.command, capture_output=True, text=True, timeout=3 * END_S)
        last = manifest.folder_of(self.out, STEPS)
        if not (last / manifest.NAME).exists():
            raise Broken(f"it does not end: {ended.returncode}, {ended.stderr[-2000:]}")
        files.verify(last, manifest.read(last))
        found: list[str] = []
        for path in last.glob("*.safetensors"):
            with safe_open(path, "numpy") as file:
                for name in file.keys():
                    if not name.startswith("generators."):  # whose draws no step uses
                        digest = hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()
                        found.append(f"{name} {digest}")
        return sorted(found)


CONTROLLED = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Code that makes its standard input the controlling terminal, and executes its arguments."""


def drain(terminal: int) -> None:
    os.set_blocking(terminal, False)
    with contextlib.suppress(OSError):
        os.read(terminal, 1 << 16)


def ranks_of(session: int) -> list[int]:
    """Return the living processes of a session."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def run_order(number: int, seed: int, folder: Path, expected: Sequence[str]) -> list[str]:
    """Disturb one run; return its faults.

    Raises:
        Broken: a promise did not hold.
    """
    rng = random.Random(f"{seed} {number}")
    run = Run(folder / f"order-{number}")
    faults: list[str] = []
    for _ in range(rng.choice((2, 3))):
        fault = rng.choice(FAULTS)
        faults.append(fault)
        run.disturb(fault, rng.randrange(1, STEPS // 3))
        run.check(fault)
    if run.finish() != list(expected):
        raise Broken(f"{faults}: the last checkpoint differs from the undisturbed run's")
    shutil.rmtree(run.out)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=40)
    parser.add_argument("--limit-s", type=float, default=480.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="phalanx-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"The square of {n} is {n * n}, and its cube {n**3}.\n" for n in range(400))
    (folder / "text.txt").write_text("".join(lines))
    begin_s = time.monotonic()
    expected = Run(folder / "undisturbed").finish()
    done, broken = Counter[str](), list[str]()
    num_orders = 0
    for number in range(given.orders):
        if time.monotonic() - begin_s > given.limit_s:
            break
        num_orders += 1
        try:
            done.update(faults := run_order(number, given.seed, folder, expected))
            print(f"order {number}: {', '.join(faults)}", flush=True)
        except Exception as error:
            broken.append(f"order {number}: {type(error).__name__}: {error}")
            print(broken[-1], flush=True)
    counts = ", ".join(f"{fault} {count}" for fault, count in sorted(done.items()))
    took_s = time.monotonic() - begin_s
    print(f"{num_orders} orders, {len(broken)} broken, in {took_s:.0f} s; {counts}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
