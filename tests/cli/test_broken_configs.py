"""Broken requests: each fails before a process is started, in one message that names the fix."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from marks import by_hand
from phalanx.cli.main import main
from phalanx.data import corpus, tokenizer
from small_run import tokenizer_of

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 20


class Broken(NamedTuple):
    """A command line, the files it needs, and the words that its message must have."""

    line: str
    thing: str
    fix: str
    files: dict[str, str | bytes] = {}  # noqa: RUF012 (never changed)


SMALL = "--data text.txt --model demo --shape.num-layers 1 --shape.hidden 32 --shape.num-heads 2"

CASES = {
    # The words of the request.
    "verb": Broken("trian --steps 3", "'trian' is not a verb", "did you mean 'train'?"),
    "typo of an option": Broken(
        "train --optimizer.rl 1", "option '--optimizer.rl' is unknown", "'--optimizer.lr'"
    ),
    "option of another section": Broken("train --lr 1", "option '--lr'", "'--optimizer.lr'"),
    "word without an option": Broken("train dp2", "'dp2' on the command line", "--name value"),
    "option without its value": Broken(
        "train --steps", "'--steps' lacks its value", "write --steps VALUE"
    ),
    "value of another type": Broken(
        "train --optimizer.lr fast", "--optimizer.lr is 'fast'", "expected a number"
    ),
    "value that is not a choice": Broken(
        "train --precision bfloat", "--precision is 'bfloat'", "did you mean 'bfloat16'?"
    ),
    "controls in a word": Broken("trai\x1b[31mn", "'trai\\x1b[31mn' is not a verb", "'train'?"),
    "controls in a name": Broken("train --data a\x1b[31mb", "matches a\\x1b[31mb", "a glob"),
    "threads without end": Broken(
        "bench mfu --threads 99999999", "threads is 99999999", "the nearest is 4096"
    ),
    "log_to without a function": Broken(
        "train --log-to my_log", "log_to is 'my_log'", "expected MODULE:FUNCTION"
    ),
    "log_to without its module": Broken(
        "train --log-to no_such_log:record", "log_to is 'no_such_log:record'", "ModuleNotFoundError"
    ),
    "typo in log_to": Broken(
        "train --log-to logs_of_mine.py:recrod", "has no function 'recrod'", "'record'?",
        {"logs_of_mine.py": "def record(kind, values): ..."},
    ),
    # The configuration file.
    "number of 400 digits": Broken(
        "train --config a.toml", "clip_p is 1000", "a number of at most",
        {"a.toml": f"[optimizer]\nclip_p = 1{'0' * 400}"},
    ),
    "text without end": Broken(
        "train --config a.toml", "precision is 'pp", "expected one of auto, float64",
        {"a.toml": f'precision = "{"p" * 50_000}"'},
    ),
    "name of two lines": Broken(
        "train --config a.toml", "no preset 'a\\nb'", "the presets are demo",
        {"a.toml": 'model = "a\\nb"'},
    ),
    "missing file": Broken(
        "train --config rum.toml", "rum.toml: there is no such file", "'run.toml'", {"run.toml": ""}
    ),
    "typo of a key": Broken(
        "train --config a.toml", "'stesp' is unknown", "did you mean 'steps'?",
        {"a.toml": "stesp = 1"},
    ),
    "key of another section": Broken(
        "train --config a.toml",
        "'lr' does not belong to section [batch]",
        "it belongs to section [optimizer]",
        {"a.toml": "[batch]\nlr = 1"},
    ),
    "typo of a section": Broken(
        "train --config a.toml",
        "section [optimiser] is unknown",
        "did you mean 'optimizer'?",
        {"a.toml": "[optimiser]\nlr = 1"},
    ),
    "type of a key": Broken(
        "train --config a.toml", "steps is 'ten'", "a whole number", {"a.toml": 'steps = "ten"'}
    ),
    "not TOML": Broken(
        "train --config a.toml", "a.toml: is not TOML", "at line 2", {"a.toml": "seed=1\nlr: 3\n"}
    ),
    "number without end": Broken(
        "train --config a.toml", "a.toml: is not TOML", "digits", {"a.toml": f"seed = {'1' * 5000}"}
    ),
    "brackets without end": Broken(
        "train --config a.toml", "a.toml: is not TOML", "recursion",
        {"a.toml": "data = " + "[" * 5000},
    ),
    "NUL in a text": Broken(
        "train --config a.toml", "out is 'a\\x00b'", "without NUL",
        {"a.toml": 'out = "a\\u0000b"'},
    ),
    # Values and what contradicts what.
    "name that is not UTF-8": Broken(
        "train --out \udcff", "out is '\\udcff', which is not UTF-8", "a name in UTF-8"
    ),
    "not a number": Broken("train --timeout-s nan", "timeout_s is nan", "expected more than 0"),
    "variable that is not set": Broken("train --out=", "out is empty", "leave it out"),
    "learning rate": Broken("train --optimizer.lr 0", "optimizer.lr is 0.0", "more than 0"),
    "p of the norm": Broken("train --optimizer.clip-p 3", "clip_p is 3", "the nearest is 2"),
    "sequence length": Broken("train --corpus.seq-len 1", "seq_len is 1", "the nearest is 2"),
    "validation share": Broken("train --corpus.validation 1", "validation is 1.0", "in [0, 1)"),
    "steps and epochs": Broken("train --steps 3 --epochs 1", "steps is 3", "give one of them"),
    "warm-up longer than the run": Broken(
        "train --steps 3 --optimizer.warmup-steps 9", "warmup_steps is 9", "the nearest is 2"
    ),
    "vocabulary of a given tokenizer": Broken(
        "train --tokenizer t.json --corpus.vocab-size 999", "vocab_size is 999", "give one of them"
    ),
    "contradictory batch": Broken(
        f"train {SMALL} --strategy dp2 --batch.global-size 32 --batch.microbatch 8 "
        "--batch.accumulation 3",
        "microbatch 8 x accumulation 3 x 2 data ranks = 48",
        "set global_size to 48",
    ),
    "indivisible batch": Broken(
        f"train {SMALL} --nproc 2 --batch.global-size 7", "global_size is 7", "6 and 8 are"
    ),
    # The strategy.
    "axis": Broken("train --strategy dq2", "axis 'dq' is unknown", "did you mean 'dp'?"),
    "kind": Broken("train --strategy dp2:naiv", "kind 'naiv'", "did you mean 'naive'?"),
    "degree that makes no grid": Broken("train --strategy tp6:2d", "tp6:2d", "nearest is tp4:2d"),
    "servers and tp": Broken(
        "train --strategy dp2:ps,tp2", "a worker of dp:ps is one process", "write 'dp2:ps'"
    ),
    "quorum of too many": Broken(
        "train --strategy dp2:quorum/3", "never reach a quorum of 3", "the most is dp2:quorum/2"
    ),
    "ranks that do not fit": Broken(
        "train --strategy dp4 --nproc 3", "needs 4 ranks, but there are 3", "'dp3' would use them"
    ),
    # The model.
    "folder to verify": Broken("verify dp2 --train --model /tmp", "no preset '/tmp'", "are demo"),
    "preset": Broken("train --model gpt2-125m", "no preset 'gpt2-125m'", "'gpt2-124m'"),
    "heads that do not divide": Broken(
        "train --shape.num-heads 4 --shape.num-kv-heads 3", "num_heads 4", "num_kv_heads 3"
    ),
    "a width too large to try its divisors": Broken(
        "train --shape.num-heads 2 --shape.hidden 999999999999",
        "hidden is 999999999999, which 2 does not divide",
        "the nearest degree that does is 1",
    ),
    "float16 on a CPU": Broken(
        f"train {SMALL} --precision float16 --device cpu", "precision is float16", "is bfloat16"
    ),
    "sequence longer than the positions": Broken(
        "train --model demo --corpus.seq-len 128 --shape.max-seq-len 64", "is 128", "at most 64"
    ),
    # The data.
    "missing data": Broken("train --data txt.text", "txt.text does not exist", "text.txt"),
    "glob without a match": Broken("train --data no/*.md", "no file matches no/*.md", "expected"),
    "data of another kind": Broken(
        "train --data folder", "holds no file that can be read", ".txt", {"folder/a.png": b"\x89"}
    ),
    "empty corpus": Broken(
        "train --data a.txt", "a.txt holds no text", "expected at least one document", {"a.txt": ""}
    ),
    "binary file": Broken(
        "train --data a.txt", "a.txt is not text", "expected UTF-8", {"a.txt": b"ELF\0\1\2"}
    ),
    "text that is not UTF-8": Broken(
        "train --data a.txt", "byte 3 is 0xe9", "convert the file to UTF-8",
        {"a.txt": b"caf\xe9 au"},
    ),
    "broken JSON lines": Broken(
        "train --data a.jsonl", "a.jsonl", "expected one object a line",
        {"a.jsonl": '{"text": "a"\n'},
    ),
    "missing tokenizer": Broken(
        f"train {SMALL} --tokenizer t.json", "t.json does not exist", "leave the setting out"
    ),
    "file that is no tokenizer": Broken(
        f"train {SMALL} --tokenizer t.json", "cannot read t.json", "`tokenizers`",
        {"t.json": "{}"},
    ),
    "tokenizer of another vocabulary": Broken(
        f"train {SMALL} --shape.vocab-size 300 --tokenizer t.json",
        "ids up to 399, but the model's vocabulary has 300",
        "set shape.vocab_size to 400",
        {"t.json": tokenizer_of(400)},
    ),
    "less text than a sample": Broken(
        f"train {SMALL} --data a.txt --corpus.validation 0", "tokens to train on, too few for one",
        "set corpus.seq_len to at most", {"a.txt": "a b"},
    ),
    "too little text": Broken(
        f"train {SMALL} --epochs 1 --corpus.tail drop --batch.global-size 64",
        "do not fill one global batch of 64",
        "--corpus.tail keep",
    ),
    # The disk.
    "checkpoint that is none": Broken(
        f"train {SMALL} --resume folder", "no checkpoint in folder", "expected a run folder",
        {"folder/a.txt": ""},
    ),
    "checkpoint of a like name": Broken(
        f"train {SMALL} --resume runs/dmo", "no checkpoint in runs/dmo: it does not exist",
        "did you mean 'runs/demo'?", {"runs/demo/a.txt": ""},
    ),
    "step of a like name": Broken(
        f"train {SMALL} --resume r/checkpoints/step-00000003", "it does not exist",
        "did you mean 'r/checkpoints/step-00000002'?", {"r/checkpoints/step-00000002/a.txt": ""},
    ),
    "weights of nothing": Broken(
        f"train {SMALL} --init folder", "no checkpoint in folder", "expected a run folder",
        {"folder/a.txt": ""},
    ),
    "init and resume": Broken(
        "train --init a --resume b", "init is a and resume is b", "init starts a new run"
    ),
    "convert without folders": Broken(
        "convert", "SRC and DST are missing", "phalanx convert SRC DST"
    ),
    "convert without a destination": Broken("convert folder", "DST is missing", "SRC DST"),
    "convert what is not there": Broken(
        "convert fodler out", "fodler does not exist", "did you mean 'folder'?",
        {"folder/config.json": "{}"},
    ),
    "convert what is neither": Broken(
        "convert folder out", "folder is neither a Hugging Face folder", "config.json",
        {"folder/a.txt": ""},
    ),
    "convert an unknown architecture": Broken(
        "convert folder out", "model_type is 'lama'", "legal are llama, mistral, qwen2",
        {"folder/config.json": '{"model_type": "lama"}'},
    ),
    "convert into a used folder": Broken(
        "convert folder other", "other is not empty", "give another folder",
        {"folder/config.json": "{}", "other/a.txt": ""},
    ),
    "shards of a checkpoint": Broken(
        "convert folder out --max-shard-gb 1", "max_shard_gb is 1", "leave max_shard_gb out",
        {"folder/config.json": "{}"},
    ),
    "shards of no size": Broken(
        "convert folder out --max-shard-gb 0", "max_shard_gb is 0", "more than 0"
    ),
    "shards of any size": Broken(
        "convert folder out --max-shard-gb 1e300", "max_shard_gb is 1e+300", "is 1000000"
    ),
    "data type to convert to": Broken(
        "convert folder out --dtype bf16", "--dtype is 'bf16'", "did you mean 'bfloat16'?"
    ),
    "secret that is none": Broken(
        f"train {SMALL} --strategy dp2:ps --server.coordinator tcp://127.0.0.1:1 "
        "--server.worker 0 --server.secret text.txt",
        "secret is text.txt, which cannot be read", "phalanx server secret --secret text.txt",
    ),
    "out is a file": Broken(
        f"train {SMALL} --out text.txt", "cannot write to text.txt", "another --out"
    ),
    "job that is no Python": Broken(
        "train --script a.py:job", "a.py is not valid Python", "null bytes", {"a.py": "x = 1\0\n"}
    ),
    "job that takes arguments": Broken(
        "train --script wants.py:job", "requires arguments, (lr)", "without required arguments",
        {"wants.py": "def job(lr): pass"},
    ),
    "job whose file ends by itself": Broken(
        "train --script ends.py:job", "ended by sys.exit: no data", "expected a file that defines",
        {"ends.py": "import sys\nsys.exit('no data')\n"},
    ),
    "job that ends by itself": Broken(
        "verify dp2 --script leaves.py:job", "ended by sys.exit: exit code 0", "expected a file",
        {"leaves.py": "def job(): raise SystemExit\n"},
    ),
    "verify what depends on who comes first": Broken(
        "verify dp2:async", "depends on which worker pushes first", "the nearest is dp2:ps"
    ),
    "doctor": Broken("doctor --jsn", "option '--jsn' is unknown", "did you mean '--json'?"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder of its own, with a cache of its own."""
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a process of a job is started."""

    def start(*_: object, **__: object) -> None:
        pytest.fail("a broken request started ranks")

    import phalanx.train.run
    import phalanx.verify.harness

    for module in (phalanx.train.run, phalanx.verify.harness):
        monkeypatch.setattr(module, "run_ranks", start)


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        raw = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(raw)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_broken_request(case: Broken, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, case.files)
    before = {*folder.iterdir()}
    assert main([*case.line.split(), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("phalanx: ")
    assert case.thing in captured.err
    assert case.fix in captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err) < 1000
    kept = {folder / "cache", folder / "__pycache__"}  # Python keeps what it reads of a script
    assert {*folder.iterdir()} - kept == before, "it leaves nothing behind"
    document = json.loads(captured.out.splitlines()[-1])
    assert captured.err == f"phalanx: {document['error']}\n"


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("words", [
    ["train", "--data", "no\nsuch"], ["train", "--config=no\nsuch"],
    ["train", "--script", "no\nsuch:job"], ["run", "no\nsuch"], ["convert", "no\nsuch", "out"],
])  # fmt: skip
def test_a_name_of_two_lines_is_shown_in_one(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "no\\nsuch" in said
    assert len(said.splitlines()) == 1


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("words", "pattern"), [
    ("run a.py", "a.py is not valid Python: invalid syntax .*line 2"),
    ("run b.py --strategy dp2:ps", "starts no servers for dp:ps.* The nearest is 'dp2'"),
    ("run b.py --strategy cp2", "'cp2' has cp: .* runs the forward itself"),
    ("verify dp2 --script c.py:job", "needs the module 'sklearn'.*'phalanx-train.examples.'"),
    ("verify pp2 --script b.py", "'pp2' has pp: a pipeline runs the forward itself"),
])  # fmt: skip
def test_a_broken_script(
    words: str, pattern: str, folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write(folder, {"a.py": "x = 1\ndef job(:\n", "b.py": "", "c.py": "import sklearn\n"})
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(words.split()) == 2
    assert re.search(pattern, capsys.readouterr().err)


LINKS = ("train --out circle", "train --out circle/x", 
    "train --out dangling", "bench mfu --out circle/x")  # fmt: skip


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("line", LINKS)
def test_links_that_lead_nowhere(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "circle").symlink_to("circle")
    (folder / "dangling").symlink_to("nowhere")
    verb, *words = line.split()
    assert main([verb, *(SMALL.split() if verb == "train" else []), *words]) == 2
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert re.search(r"(circle|dangling|nowhere).*; (give|choose) another|leads nowhere", message)
    assert not (folder / "nowhere").exists()


def test_a_large_file_that_is_no_text_is_not_read_to_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "HEAD_BYTES", 8)
    with (folder / "a.txt").open("wb") as file:
        file.truncate(1 << 42)  # more than the memory
    assert main(["train", *SMALL.split(), "--data", "a.txt"]) == 2
    assert "a.txt is not text: it has a NUL at byte 0" in capsys.readouterr().err


def test_a_tokenizer_that_is_too_large_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokenizer, "MOST_BYTES", 300)
    write(folder, {"t.json": " " * 301})
    assert main(["train", *SMALL.split(), "--tokenizer", "t.json"]) == 2
    assert re.search(r"t.json has 301 bytes; expected .* at most 300", capsys.readouterr().err)


@pytest.mark.parametrize("variables", [{"RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_a_job_that_is_set_by_half(
    variables: dict[str, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *SMALL.split()]) == 2
    assert re.search(
        r"(RANK|WORLD_SIZE) is '.', but .* is not set; set both", capsys.readouterr().err
    )


@pytest.mark.usefixtures("nothing_starts")
def test_no_space_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = SimpleNamespace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert main(["train", *SMALL.split(), "--out", "out"]) == 2
    message = capsys.readouterr().err
    assert "out has 1 bytes left" in message and "another --out" in message


@pytest.mark.parametrize(
    "name", [by_hand("typo of an option"), by_hand("missing data"), "ranks that do not fit"]
)
def test_a_broken_request_in_a_process_of_its_own(name: str, folder: Path) -> None:
    case = CASES[name]
    command = [sys.executable, "-m", "phalanx", *case.line.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 2
    assert case.thing in ended.stderr and case.fix in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(folder.glob("runs/*/checkpoints")) == []
