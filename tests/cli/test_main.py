"""The phalanx command: verbs, exit codes, one message for each error."""

from __future__ import annotations

import errno
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import FILE_ERRORS, VERBS, main
from phalanx.cli.script import ScriptVerifyConfig, script_help
from phalanx.errors import ConfigError, RankFailed


def verb_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(argv: list[str]) -> int:
        raise error

    module = types.ModuleType("phalanx.cli.doctor")
    module.__dict__["run"] = run
    monkeypatch.setitem(sys.modules, "phalanx.cli.doctor", module)


def test_help_is_short_and_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 26
    assert all(len(line) <= 100 for line in text.splitlines())
    assert all(verb in text for verb in VERBS)


def test_no_verb_is_answered_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: phalanx VERB" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("phalanx 0.")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["trian"], "'trian' is not a verb (did you mean 'train'?)"),
        (["doctr", "--json"], "(did you mean 'doctor'?)"),
        (["repor"], "'repor' is not a verb (did you mean 'report'?); the verbs are"),
        (["--json"], "'--json' is not a verb"),
    ],
)
def test_a_verb_that_is_not_there(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("phalanx: ")
    assert answer in captured.err
    assert ("error" in captured.out) == ("--json" in words)


@pytest.mark.parametrize(
    ("error", "exit_code", "answer"),
    [
        (ConfigError("lr is [bold]bad[/bold]"), 2, "phalanx: lr is [bold]bad[/bold]\n"),
        (RankFailed(1, "words of the rank"), 1, "words of the rank"),
        (KeyboardInterrupt(), 130, "phalanx: interrupted\n"),
        (OSError(errno.ENOSPC, "full", "/disk/x"), 2, "phalanx: /disk/x: no space left"),
        (PermissionError(errno.EACCES, "no", "/root"), 2, "phalanx: /root: permission denied"),
    ],
)
def test_an_error_is_one_message_and_an_exit_code(
    error: BaseException,
    exit_code: int,
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verb_that_raises(monkeypatch, error)
    assert main(["doctor", "--json"]) == exit_code
    captured = capsys.readouterr()
    assert answer in captured.err
    assert "Traceback" not in captured.err
    document = json.loads(captured.out.splitlines()[-1])
    assert document["exit_code"] == exit_code
    assert document["error"] in captured.err


def test_a_value_that_nobody_reads_to_its_end_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_that_raises(monkeypatch, ConfigError(f"model is '{'m' * 100_000}'; expected another"))
    assert main(["doctor", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("phalanx: model is 'mmm") and len(captured.err) < 1000
    assert captured.err.endswith("mmm'; expected another\n")
    assert "characters left out" in json.loads(captured.out.splitlines()[-1])["error"]


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert errno.EBADF not in FILE_ERRORS
    verb_that_raises(monkeypatch, OSError(errno.EBADF, "a bug"))
    with pytest.raises(OSError, match="a bug"):
        main(["doctor"])


def test_help_of_train_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys; from phalanx.cli.main import main; code = main(['train', '--help']);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    before = os.times()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = os.times()
    assert run.returncode == 0, run.stderr
    assert "--optimizer.lr" in run.stdout and "Highest learning rate" in run.stdout
    # Of the processor, 0.4 s: other work on the machine must not decide.
    assert sum(after[2:4]) - sum(before[2:4]) < 1.5


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "phalanx", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_a_pipe_that_breaks_elsewhere_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    verb_that_raises(monkeypatch, BrokenPipeError(errno.EPIPE, "between ranks"))
    with pytest.raises(BrokenPipeError, match="between ranks"):
        main(["doctor"])


def test_show_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / ("a-long-name-" * 6 + ".toml")
    file.write_text("steps = 7\n")
    words = ["train", "--config", str(file), "--optimizer.lr", "0.5", "--show-config"]
    assert main(words) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line[:1].strip()}
    assert rows["optimizer.lr"] == ["0.5", "command", "line"]
    assert rows["seed"] == ["0", "default"]
    assert rows["steps"][0] == "7"
    assert max(map(len, text.splitlines())) <= 100
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["config"]["optimizer"]["lr"] == 0.5
    assert document["sources"]["steps"] == str(file)
    assert document["sources"]["optimizer.lr"] == "command line"
    assert document["sources"]["batch.accumulation"] == document["sources"]["model"] == "derived"


def test_the_schedule_that_is_shown_is_read_and_one_that_cannot_run_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--batch.accumulation", "4", "--show-config", "--strategy"]
    assert main([*words, "pp2:zb/1"]) == 0
    *_, about, first, second = capsys.readouterr().out.splitlines()
    assert about.startswith("schedule of the pipeline") and first.startswith("0F0,0SEND_F0,0F1")
    file = tmp_path / "zb.csv"
    file.write_text(f"{first}\n{second}\n")
    assert main([*words, f"pp2,schedule:{file}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] == [first, second]
    file = tmp_path / "lost.csv"
    file.write_text(f"{first}\n{second}\n".replace("1SEND_B2,", ""))
    assert main(["train", "--batch.accumulation", "4", "--strategy", f"pp2,schedule:{file}"]) == 2
    found = capsys.readouterr().err
    assert found == f"phalanx: schedule {file}: rank 1 has 1SEND_B2 0 times; expected 1\n"


@pytest.mark.slow
def test_what_an_encoding_lacks_is_escaped() -> None:
    words = ["train", "--show-config", "--out", "runs/é模"]
    run = subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "ascii"},
    )
    assert run.returncode == 0, run.stderr
    assert "runs/\\xe9\\u6a21" in run.stdout


@pytest.mark.slow
def test_a_rank_escapes_what_an_encoding_lacks(tmp_path: Path) -> None:
    words = ["--strategy", "dp2", "--steps", "1", "--out", str(tmp_path / "é模")]
    run = subprocess.run(
        [sys.executable, "-m", "phalanx", "train", *words, "--shape.num-layers", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "ascii"},
    )
    assert run.returncode == 0, run.stderr
    assert "\\xe9\\u6a21" in run.stdout


def test_show_config_is_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train --optimizer.clip-p inf --show-config --json".split()) == 0
    text = capsys.readouterr().out
    optimizer = json.loads(text, parse_constant=pytest.fail)["config"]["optimizer"]
    assert (optimizer["clip_p"], optimizer["clip_p_text"]) == (None, "inf")


@pytest.mark.parametrize(("has_left", "exit_code"), [(True, 141), (False, 1)])
def test_a_rank_that_finds_no_reader(
    has_left: bool,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = RankFailed(0, "BrokenPipeError: [Errno 32] Broken pipe\n\nSystemExit: 1")
    verb_that_raises(monkeypatch, error)
    monkeypatch.setattr("phalanx.cli.main.reader_has_left", lambda: has_left)
    assert main(["doctor"]) == exit_code
    assert (capsys.readouterr().err == "") == has_left


def test_a_console_that_finds_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = SystemExit(1)
    stop.__context__ = BrokenPipeError()
    verb_that_raises(monkeypatch, stop)
    assert main(["doctor"]) == 141


def test_the_cursor_comes_back_when_a_run_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.train import run

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    config = types.SimpleNamespace(threads=1, timeout_s=1.0, device="cpu", debug_net=False)
    strategy = types.SimpleNamespace(num_ranks=2, is_served=False)
    ours, terminal = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(run, "claim", lambda job: job)
    monkeypatch.setattr(run, "run_ranks", interrupted)
    with os.fdopen(terminal, "w") as screen, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        with pytest.raises(KeyboardInterrupt):
            job = types.SimpleNamespace(config=config, strategy=strategy, out=Path(), is_new=False)
            run.start(job)  # type: ignore[arg-type]
        screen.flush()
        assert b"\x1b[?25h" in os.read(ours, 1000)
    os.close(ours)


def test_ctrl_c_while_the_command_is_loaded_ends_it_without_a_traceback() -> None:
    code = (
        "import os, runpy, signal, sys, types\n"
        "def find_spec(name, *_):\n"
        "    if name == 'phalanx.launch.signals':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, types.SimpleNamespace(find_spec=find_spec))\n"
        "runpy.run_module('phalanx', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_closed_standard_streams_are_nothing() -> None:
    """As under cron, or by `>&-`: no file that is opened later may be taken for one of them."""
    code = (
        "import os, sys; from phalanx.cli.main import main; code = main(['--help']);"
        "print('said', file=sys.stderr); os._exit(code or os.open(os.devnull, 0) < 3)"
    )
    command = f"exec {sys.executable} -c {shlex.quote(code)} <&- >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "said\n")


def test_what_torch_cannot_read_in_the_environment_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "bogus")
    verb_that_raises(monkeypatch, ValueError("\nInvalid log settings: bogus, must be a comma"))
    assert main(["doctor"]) == 2
    assert "the environment's TORCH_LOGS is 'bogus', which torch cannot" in capsys.readouterr().err
    verb_that_raises(monkeypatch, ValueError("another"))
    with pytest.raises(ValueError, match="another"):
        main(["doctor"])


def test_a_signal_does_not_break_the_last_message_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends the other ranks by a signal while they say what they have met themselves."""

    class Slow(types.ModuleType):
        def __getattr__(self, name: str) -> Any:  # while the message's library is loaded
            os.kill(os.getpid(), signal.SIGTERM)
            return getattr(right, name)

    right = sys.modules["rich.console"]
    verb_that_raises(monkeypatch, ConfigError("what is wrong"))
    monkeypatch.setitem(sys.modules, "rich.console", Slow("rich.console"))
    before = signal.getsignal(signal.SIGTERM)
    assert main(["doctor"]) == 2
    assert "what is wrong" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_help_of_verify_is_one_paragraph_on_jobs_of_your_own() -> None:
    help_text = script_help("verify STRATEGY", ScriptVerifyConfig)
    assert "on a job of your own. A job runs" in " ".join(help_text.splitlines())
