"""`phalanx doctor`: installed packages, this machine's devices, and a test of two processes."""

from __future__ import annotations

import os
import shutil
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

from phalanx.cli import doctor_hosts
from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Range
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch.hosts import parse_hosts, read_hostfile
from phalanx.planner import calibration_file
from phalanx.report.output import print_json
from phalanx.report.tabular import Line, Table
from phalanx.report.terminal import Terminal
from phalanx.report.units import GIB

PACKAGES: Final = ("numpy", "tokenizers", "safetensors", "rich")
"""Packages that phalanx requires, in addition to torch."""

EXTRAS: Final = {
    "hf": "transformers",
    "parquet": "pyarrow",
    "plot": "matplotlib",
    "tensorboard": "tensorboard",
}
"""Optional extra -> the package that it installs."""

TEST_NUMBERS: Final = 1 << 20
"""Elements in the self-test's all-reduce."""

TEST_TIMEOUT_S: Final = 10.0
"""Timeout of the self-test, in seconds that one rank waits for the other."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Check the installation: show versions, devices and backends, and connect two processes.

    With --peer or --hosts check hosts, and the links between them, each fault with its cure.
    """

    peer: str | None = None
    """Check the link to this host: name, route, ports, MTU, clocks, versions, bandwidth."""
    hosts: str | None = None
    """Check the links of all pairs of these hosts: a:2,b:2 with numbers of ranks, or a file."""
    listen: bool = False
    """Answer --peer of other hosts, without ssh; for a network whose hosts you trust."""
    port: Annotated[int, Range(1, 65535, "[]")] = 29500
    """Port of --listen, and of the store of the job."""
    out: str = "runs"
    """Folder of the run, which all hosts must share."""
    ssh: str = "ssh"
    """The command ssh, with options of your own."""
    write: str | None = None
    """FILE.json that keeps latency and bandwidth, which plan --cluster FILE.json reads."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


def run(argv: list[str]) -> int:
    """Print the report; return 1 if the self-test of two processes failed, else 0."""
    config = read_command_line(argv, DoctorConfig, prog="phalanx doctor")
    if config.listen:
        doctor_hosts.listen(config.port, Terminal())
    if config.peer is not None or config.hosts is not None:
        return _of_hosts(config)
    found = examine()
    if config.json:
        print_json(found)
    else:
        rows = [(Line(name, "bold"), text) for name, text in _rows(found)]
        Terminal().show(Table("", ("", ""), rows))
    return 0 if found["self_test"]["passed"] else 1


def _of_hosts(config: DoctorConfig) -> int:
    """Check hosts and their links; return 1 if something is wrong, else 0."""
    path = None if config.write is None else calibration_file.path_of(config.write)
    if config.hosts is None:
        hosts = parse_hosts(f"{socket.gethostname()},{config.peer}")
    else:
        file = Path(config.hosts)
        hosts = read_hostfile(file) if file.exists() else parse_hosts(config.hosts)
    config, terminal = replace(config, out=os.path.abspath(config.out)), Terminal()
    examination = doctor_hosts.Examination(hosts, config, terminal)
    try:
        examination.run()
    except OSError as error:
        raise ConfigError(f"a host is lost: {error}") from None
    if any("TCP" in values for values in examination.links.values()):
        terminal.show(examination.matrix())
    if path is not None:
        examination.keep(path)
        terminal.show(Line(f"wrote {path}", wraps=False))
    if config.json:
        print_json(examination)
    return 1 if any(finding.cure for _, finding in examination.findings) else 0


def examine() -> dict[str, Any]:
    """Return the report of doctor, as plain values for JSON."""
    from phalanx.measure.environment import environment, has_fast_bfloat16, package_version

    here = environment()
    # The names by which torch.compile searches for a C++ compiler.
    compilers = (os.environ.get("CXX") or "g++", "g++", "clang++", "c++")
    return {
        **here,
        "gpu_bfloat16": has_fast_bfloat16("cuda") if here["gpus"] else None,
        "packages": {name: package_version(name) for name in PACKAGES},
        "extras": {extra: package_version(package) for extra, package in EXTRAS.items()},
        "compiler": next(filter(None, map(shutil.which, compilers)), None),
        "self_test": self_test(),
    }


def self_test() -> dict[str, Any]:
    """All-reduce between two gloo processes; return passed, seconds, all_reduce_s and error."""
    from phalanx.launch.local import run_ranks

    begun_s, answers, error = time.perf_counter(), [], None
    try:
        answers = run_ranks(meet, 2, threads=1, timeout_s=TEST_TIMEOUT_S)
        if any(total != 3.0 * TEST_NUMBERS for total, _ in answers):
            error = f"wrong sums: {[total for total, _ in answers]}"
    except PhalanxError as raised:
        error = str(raised)
    return {
        "passed": error is None,
        "seconds": time.perf_counter() - begun_s,
        "all_reduce_s": max((seconds for _, seconds in answers), default=None),
        "error": error,
    }


def meet() -> tuple[float, float]:
    """All-reduce on this rank of two; return the sum over all elements, and the seconds."""
    import torch

    from phalanx.comm.comm import Ranks
    from phalanx.comm.together import barrier
    from phalanx.strategy import Strategy

    comm = Ranks(Strategy.parse("dp2"))
    numbers = torch.full((TEST_NUMBERS,), 1.0 + comm.coord("dp"))
    barrier()
    begun_s = time.perf_counter()
    comm.all_reduce(numbers, "dp")
    return numbers.sum().item(), time.perf_counter() - begun_s


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the report, with advice where something is missing."""
    cpu, gpus, test = found["cpu"], found["gpus"], found["self_test"]
    packages = {**found["versions"], **found["packages"]}
    backends = [f"{name} {'yes' if has else 'no'}" for name, has in found["backends"].items()]
    gpu_text = ", ".join(
        f"{gpu['name']} ({gpu['memory_bytes'] / GIB:.0f} GiB, sm {gpu['capability']})"
        for gpu in gpus
    )
    bfloat16 = [f"CPU {_fast(cpu['fast_bfloat16'])}"]
    if gpus:
        bfloat16.append(f"GPU {_fast(found['gpu_bfloat16'])}")
    extras = [
        f"{extra} {version or f'no (pip install phalanx-train[{extra}])'}"
        for extra, version in found["extras"].items()
    ]
    if test["passed"]:
        speed_bytes_per_s = 4 * TEST_NUMBERS / test["all_reduce_s"]
        met = (
            f"passed in {test['seconds']:.1f} s: two gloo processes connected; an all-reduce of "
            f"{4 * TEST_NUMBERS / 2**20:.0f} MiB took {test['all_reduce_s'] * 1e3:.1f} ms "
            f"({speed_bytes_per_s / 1e9:.2f} GB/s)"
        )
    else:
        met = f"FAILED after {test['seconds']:.1f} s: {test['error']}"
    return [
        ("system", found["system"]),
        ("versions", ", ".join(f"{name} {value or 'MISSING'}" for name, value in packages.items())),
        ("processor", f"{cpu['name']}, {cpu['num_cores']} cores, {cpu['num_threads']} threads"),
        ("features", ", ".join(cpu["flags"]) or "none known"),
        ("memory", f"{found['memory_bytes'] / GIB:.1f} GiB"),
        ("gpus", gpu_text or "none; everything runs on the CPU"),
        ("bfloat16", ", ".join(bfloat16)),
        ("backends", ", ".join(backends)),
        ("compiler", found["compiler"] or "none; --compile needs a C++ compiler such as g++"),
        ("extras", ", ".join(extras)),
        ("self-test", met),
    ]


def _fast(is_fast: bool) -> str:
    return "fast" if is_fast else "emulated; float32 is faster"
