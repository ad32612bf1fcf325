"""Each command of README.md and docs runs: by default its settings, in the slow run all of it.

A command runs as it stands; `SMALLER` adds the words that make its run short.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import BLOCKS, LANGUAGES, NOT_RUN, ROOT, Block

from model_folder import model_folder
from phalanx.cli.main import main
from small_run import tokenizer_of

SHELL = [block for block in BLOCKS if block.language in ("sh", "console") and block.is_run]
COMMANDS = [(block, command) for block in SHELL for command in block.commands()]

TINY = (
    " --corpus.seq-len 16 --shape.num-layers 4 --shape.hidden 16 --shape.num-heads 2"
    " --shape.num-kv-heads 2 --shape.head-dim 8 --shape.ffn 24 --shape.vocab-size 300"
)
SMALLER = (
    (r"phalanx train .*--resume", "--steps 4 --threads 1"),
    (r"phalanx train .*--script", "--steps 4 --threads 1"),
    (r"phalanx train .*--init", "--data notes --steps 2 --threads 1 --eval-samples 8"),
    (r"phalanx train --model folder", "--steps 2 --threads 1 --corpus.seq-len 64"),
    (r"phalanx train", f"--data notes --steps 2 --threads 1 --eval-samples 8{TINY}"),
    (r"phalanx verify .*--(script|train)", ""),
    (r"phalanx verify", "--steps 1 --no-three"),
    (r"phalanx bench (ceiling|mfu)", "--budget-s 1 --threads 1"),
    (r"phalanx bench comm", "--ranks 2 --max-mib 1"),
    (r"phalanx bench data", ""),
    (r"phalanx bench", "--rounds 1 --seq-len 16 --shape.num-layers 2"),
    (r"phalanx launch .*--print", ""),
    (r"phalanx generate", "--max-tokens 4 --threads 1 --seed 1"),
    (r"phalanx (run|launch .*--(dry-run|print)|doctor|convert|show|plan|report)", ""),
    (r"python |torchrun ", ""),
)
"""Beginnings of commands that a test knows how to run, and words that make the run shorter."""

COMMAND = r"(?m)^(\$|python|torchrun|make|pip|phalanx (?!convert SRC)\w+)( (?!.*──>)\S|$)"


def words_of(command: str) -> str | None:
    """Return what makes a command shorter; None if no test can run it."""
    found = (words for pattern, words in SMALLER if re.match(pattern, command))
    return next(found, None)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block.where}: the language is {block.language!r}"
    if block.language in ("sh", "console", "python") and block.mark:
        assert re.fullmatch(rf"{NOT_RUN}\w.+", block.mark), f"{block.where}: {block.mark!r}"
    if block.language in ("sh", "console") and block.is_run:
        assert block.commands(), f"{block.where} has no command"
        for command in block.commands():
            assert words_of(command) is not None, f"{block.where}: no test can run {command!r}"
    if block.language == "text":
        found = re.search(COMMAND, block.text)
        assert not found, f"{block.where}: {found} is a command: write sh or console"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files that the commands name, and stand in it."""
    for name in ("examples", "benchmarks", "docs", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "notes").mkdir()
    lines = (f"The square of {n} is {n * n}, and its cube {n**3}.\n" for n in range(2000))
    (tmp_path / "notes/squares.txt").write_text("".join(lines))
    (tmp_path / "tokenizer.json").write_text(tokenizer_of(300))
    (tmp_path / "run.toml").write_text('data = "notes"\nsteps = 3\n')
    (tmp_path / "my.py").write_text(JOB)
    (tmp_path / "loop.py").write_text(LOOP)
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chats.jsonl").write_text(8 * f"{json.dumps({'messages': chat})}\n")
    monkeypatch.chdir(tmp_path)
    for name in ("my", "job", "loop"):  # modules of another test's folder
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


JOB = """
import phalanx, torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

class Classes:
    def loss_sum(self, model, microbatch, step):
        return nn.functional.cross_entropy(model(microbatch[0]), microbatch[1], reduction="sum")

    def num_valid(self, microbatch):
        return len(microbatch[1])

def job():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    return phalanx.Trainer(build, Classes(), data, batch_size=16, accumulation=2)
"""

LOOP = next(
    block.text
    for block in BLOCKS
    if block.page == "your_model.md" and block.is_run and "phalanx.init()" in block.text
)
"""The loop of docs/your_model.md."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=f"{block.where}: {command}")
        for block, command in COMMANDS
        if re.match("phalanx train", command) and not re.search("--(script|resume|init)", command)
    ],
)
def test_the_settings_of_a_run_are_legal(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--model folder" in command:
        model_folder(place / "folder")
    words = shlex.split(f"{command} {words_of(command)}")[1:]
    assert main([*words, *([] if "--show-config" in words else ["--show-config"])]) == 0
    assert "optimizer.lr" in capsys.readouterr().out


@pytest.mark.slow  # each takes seconds: processes, imports, first steps
@pytest.mark.parametrize(
    ("block", "command"),
    [pytest.param(*each, id=f"{each[0].where}: {each[1]}") for each in COMMANDS],
)
def test_a_command_runs(
    block: Block, command: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    smaller = words_of(command)
    assert smaller is not None
    if "--model folder" in command:
        model_folder(place / "folder")
    if re.search(r"runs/|weights\b", command):
        assert main([*shlex.split(FIRST_RUN), *shlex.split(TINY)]) == 0
        shutil.copytree(place / "runs/NAME", place / "weights")
    if "runs/my-job" in command:
        assert main(["train", "--script", "my.py:job", "--steps", "2", "--out", "runs/my-job"]) == 0
    program, *words = shlex.split(f"{command} {smaller}")
    refusals = re.findall(rf"{re.escape(command)}\n(phalanx: .*)\Z", block.text.rstrip("\n"))
    if program == "phalanx":
        code, said = main(words), capfd.readouterr().err
    else:
        binary = Path(sys.executable).parent / program
        done = subprocess.run([str(binary), *words], capture_output=True, text=True)
        code, said = done.returncode, done.stdout + done.stderr
    assert code == (2 if refusals else 0), said
    assert all(refusal in " ".join(said.split()) for refusal in refusals)


FIRST_RUN = (
    "train --data notes --steps 2 --threads 1 --eval-samples 8 --strategy dp2 --out runs/NAME"
    " --prompt 1"
)
"""The run that the commands resume, begin from and convert."""


def test_a_block_without_a_test_or_a_reason_is_refused() -> None:
    for language, mark, text in (
        ("", "", "phalanx train\n"),
        ("sh", "", "rm notes\n"),
        ("sh", "skipped", "phalanx train\n"),
        ("sh", "not run: ", "phalanx train\n"),
        ("text", "", "phalanx train --steps 2\n"),
    ):
        with pytest.raises(AssertionError):
            test_a_block_is_run_or_says_why_not(Block("page.md", 1, language, mark, text))
