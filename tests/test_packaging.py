"""The locked versions cover what is declared, and set-up says clearly what it lacks."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from statements import statements

ROOT = Path(__file__).parent.parent


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def locked() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    return {name_of(name): version for name, _, version in pins}


def test_every_declared_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [need for needs in project["optional-dependencies"].values() for need in needs]
    declared = {name_of(need) for need in [*project["dependencies"], *extras]} - {"phalanx-train"}
    assert declared <= set(locked())


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [need for needs in project["optional-dependencies"].values() for need in needs]
    declared = {name_of(need).replace("-", "_") for need in [*project["dependencies"], *extras]}
    nodes = (
        n for file in (ROOT / "src").rglob("*.py") for n in statements(ast.parse(file.read_text()))
    )
    names = [
        node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    imported = {name.partition(".")[0] for name in names}
    # torch shows progress with tqdm where that is installed.
    known = sys.stdlib_module_names | declared | {"phalanx", "tqdm"}
    known |= {"zmq"} if "pyzmq" in declared else set()
    assert imported - known == set()


def test_versions_are_of_any_build() -> None:
    assert locked()["torch"] == "2.13.0"
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in locked().values())


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "there is no"),
        ('case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac', "3.11 or newer"),
        ('case "$2" in *venv*) exit 1;; esac', "lacks its venv module"),
    ],
)
def test_set_up_says_what_it_lacks(script: str | None, words: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    command = ["make", "-C", str(tmp_path), f"PYTHON={python}", "train"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert f"make PYTHON={'python3.12' if words.startswith('3.11') else '/path/to/python'}" in (
        ended.stderr
    )
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("status", [0, 2])
@pytest.mark.skipif(sys.platform != "linux", reason="tail --pid is of GNU")
def test_ci_ends_with_the_status_of_the_tests_and_waits_for_no_orphan(
    status: int, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci")
    summary = "1 failed, 2 passed in 3.00s" if status else "3 passed in 3.00s"
    make = tmp_path / "make"
    make.write_text(
        f'#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/orphan\necho "{summary}"\n'
        f"echo 0 errors\nexit {status}\n"
    )
    make.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", str(checkout / ".ci" / "run")],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    os.kill(int((tmp_path / "orphan").read_text()), signal.SIGKILL)
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (status, summary), ran.stderr
