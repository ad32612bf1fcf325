"""The page docs/fine_tuning.md from nothing to a chat: its commands run as they stand."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from blocks import BLOCKS, ROOT

BIN = Path(sys.executable).parent
COMMANDS = [
    command
    for block in BLOCKS
    if block.where.startswith("fine_tuning.md") and block.language == "sh"
    for command in block.commands()
]


@pytest.mark.slow
def test_from_nothing_to_a_chat(tmp_path: Path) -> None:
    for library in ("transformers", "peft", "fastapi"):
        pytest.importorskip(library)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    server: subprocess.Popen[bytes] | None = None
    answers: list[str] = []
    try:
        for command in COMMANDS:
            words = shlex.split(command.replace("127.0.0.1:8000", "127.0.0.1:18765"))
            if words[-1] == "&":
                words[words.index("8000")] = "18765"
                server = subprocess.Popen(words[:-1], cwd=tmp_path, env=environment)
                while True:  # until the model is loaded
                    assert server.poll() is None
                    try:
                        urllib.request.urlopen("http://127.0.0.1:18765/health", timeout=20).read()
                        break
                    except OSError:
                        time.sleep(0.2)
                continue
            if words[0] == "lm_eval" and not (BIN / "lm_eval").exists():
                continue
            ended = subprocess.run(
                words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
            )
            assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
            answers.append(ended.stdout)
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
    made, _, coins, chat, *evaluated, _ = answers
    assert made == ""
    assert "of which 65,536 in adapters" in " ".join(coins.split())
    assert json.loads(chat)["choices"][0]["message"]["content"] == "Lima"
    if evaluated:
        (row,) = (line for line in evaluated[0].splitlines() if "exact_match" in line)
        assert float(row.split("|")[7]) == 1.0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "demo/merged").iterdir()
    }
