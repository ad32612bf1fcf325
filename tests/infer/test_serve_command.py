"""`phalanx serve`: what it refuses, the options of LMI, and its life as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from served_model import published

from phalanx.cli import serve
from phalanx.cli.main import main
from phalanx.errors import CheckpointError, ConfigError
from phalanx.infer.served import sampling_defaults

PROPERTIES = """
# of LMI
engine=Python
option.model_id=/models/a
option.rolling_batch=vllm
option.max_rolling_batch_size=16
option.max_rolling_batch_prefill_tokens=2048
option.tensor_parallel_degree=2
option.dtype=bf16
"""


def test_the_options_of_a_serving_properties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serving.properties"
    file.write_text(PROPERTIES)
    read: Any = serve._read  # pyright: ignore[reportPrivateUsage]
    config = read(["--properties", str(file), "--slots", "8"])
    assert (config.run, config.slots) == ("/models/a", 8)
    assert (config.budget, config.strategy, config.precision) == (2048, "tp2", "bfloat16")
    expected = "engine, option.rolling_batch, which serve does not use"
    assert expected in capsys.readouterr().out
    file.write_text("option.tensor_parallel_degree : max\noption.served_model_name a/b:c=d\n")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = read(["--properties", str(file)])
    assert (config.strategy, config.served_model_name) == ("tp4", ("a/b:c=d",))
    for line, message in (
        ("option.dtype=int3", "precision is 'int3'; expected one of auto, float64, float32"),
        ("option.enable_prefix_caching=1", "cannot be '1'; expected true or false"),
        ("option.max_rolling_batch_size=many", "cannot be 'many'; expected a whole number"),
        ("option.dtype", "line 1 is 'option.dtype'; expected KEY=VALUE"),
        ("option.max_rolling_batch_size=0", "slots is 0; expected at least 1"),
    ):
        file.write_text(line)
        with pytest.raises(ConfigError, match=re.escape(message)):
            read(["--properties", str(file)])


def test_options_of_vllm_stand_for_options_here(capsys: pytest.CaptureFixture[str]) -> None:
    read: Any = serve._read  # pyright: ignore[reportPrivateUsage]
    theirs = "--model m --tensor-parallel-size=2 --dtype half --max-num-seqs 4 --max-model-len 99"
    theirs += " --max-num-batched-tokens 32 --kv-cache-dtype auto --no-enable-prefix-caching"
    theirs += " --gpu-memory-utilization 0.9 --trust-remote-code --disable-log-requests"
    theirs += " --generation-config none --served-model-name a b"
    ours = "m --strategy tp2 --precision float16 --slots 4 --max-model-len 99 --budget 32"
    ours += " --cache full --no-prefix-cache --generation-config none --served-model-name a b"
    assert read(theirs.split()) == read(ours.split())
    said = capsys.readouterr().out
    assert "ignored --gpu-memory-utilization, --trust-remote-code, which serve does not" in said
    config = read(["m", "--allowed-origins", '["http://a", "http://b"]', "--access-log"])
    assert (config.allowed_origins, config.access_log) == (["http://a", "http://b"], True)
    for words, message in (
        (["m", "--dtype"], "option '--precision' lacks its value"),
        (["m", "--dtype", "int3"], "--precision is 'int3'; expected one of"),
        (["m", "--max-num-seqs", "0"], "slots is 0; expected at least 1"),
        (["m", "--tensor-paralel-size", "2"], "option '--tensor-paralel-size' is unknown"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            read(words)


def test_the_table_of_fields_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--fields"]) == 0
    said = capsys.readouterr().out
    assert "repetition_penalty" in said and "refused" in said


def test_sampling_defaults_are_of_the_generation_config(tmp_path: Path) -> None:
    content = {"temperature": 0.5, "top_k": None, "max_new_tokens": 9, "do_sample": False}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(content))
    assert sampling_defaults(tmp_path) == {"temperature": 0.5, "max_tokens": 9}
    file.write_text('{"top_p": 2}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p is 2; expected"):
        sampling_defaults(tmp_path)
    file.unlink()
    assert sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--ssl-keyfile", "none.pem"], "are no certificate and its key"),
        (["a", "--chat-template", "none.jinja"], "cannot read none.jinja"),
        ([], "RUN is missing; expected: phalanx serve RUN"),
        (["a", "--port", "70000"], "port is 70000"),
        (
            ["a", "--port", "0", "--host", "a..b"],
            "cannot listen on 'a..b': it is not a host name",
        ),
        (["a", "--properties", "none.properties"], "cannot read none.properties"),
        (["nowhere", "--port", "0"], "nowhere does not exist"),
        (["a", "--follow", "5", "--weights", "int8"], "the nearest is weights full"),
    ],
)
def test_a_wrong_request_is_answered(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(published(tmp_path)), "--port", str(port)]) == 2
    message = capsys.readouterr().err
    expected = f"cannot listen on 127.0.0.1 port {port}: Address already in use; --port 0 takes"
    assert expected in message and "every machine" not in message
    assert main(["serve", "nowhere", "--host", "192.0.2.1"]) == 2
    message = capsys.readouterr().err
    assert "cannot listen on 192.0.2.1" in message and "every machine has 127.0.0.1" in message


def test_a_later_rank_of_torchrun_needs_no_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(published(tmp_path)), "--port", str(port)]) == 2
    assert "a rank of a job of 2, as under torchrun, but 1 ranks" in capsys.readouterr().err


def test_the_key_is_of_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: Any = serve._read  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setenv("PHALANX_API_KEY", "secret")
    assert read(["a"]).api_key == "secret"
    assert read(["a", "--api-key", "other"]).api_key == "other"
    for key in ("s\u00e9cret", "a b"):
        monkeypatch.setenv("PHALANX_API_KEY", key)
        assert main(["serve", "a"]) == 2
        assert "expected visible ASCII" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "grace_s", "is_stream"),
    [("tp1", "200", False), ("tp1", "0", True), ("tp2", "200", True), ("tp2", "0", False)],
)
def test_a_server_ends_with_its_running_requests(
    strategy: str, grace_s: str, is_stream: bool, tmp_path: Path
) -> None:
    words = ["serve", str(published(tmp_path)), "--port", "0", "--strategy", strategy]
    words += ["--grace-s", grace_s, "--budget", "1", "--served-model-name", "a/b"]
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", *words, "--threads", "1", "--precision", "float32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    said = ""
    while "listening" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    (address,) = re.findall(r"http://127\.0\.0\.1:\d+", said)
    with urllib.request.urlopen(f"{address}/v1/models/a%2Fb") as answer:
        assert json.load(answer)["id"] == "a/b"
    body = {"model": "a/b", "prompt": "Once", "max_tokens": 100, "n": 8, "ignore_eos": True}
    body["stream"] = is_stream
    headers = {"Content-Type": "application/json"}
    found: list[tuple[int, str]] = []

    def ask() -> None:
        content = json.dumps(body).encode()
        request = urllib.request.Request(f"{address}/v1/completions", content, headers)
        try:
            with urllib.request.urlopen(request, timeout=250) as answer:
                found.append((answer.status, answer.read().decode()))
        except urllib.error.HTTPError as refusal:
            found.append((refusal.code, refusal.read().decode()))

    asking = threading.Thread(target=ask)
    asking.start()
    while b"phalanx_requests_running 0.0" in urllib.request.urlopen(f"{address}/metrics").read():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    asking.join()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert f"SIGTERM: the server ends with its running requests, within {grace_s} s" in out
    assert "Traceback" not in out
    ((status, answer),) = found
    is_whole = '"finish_reason": "length"' in answer.replace('":"', '": "')
    assert status == (200 if is_stream or grace_s == "200" else 503)
    assert is_whole == (grace_s == "200")
    assert ("the server is shutting down" in answer) == (grace_s == "0")


@pytest.mark.slow
def test_a_server_over_tls_with_the_options_of_vllm(tmp_path: Path) -> None:
    folder = published(tmp_path, generation_config={"temperature": 0.0, "max_new_tokens": 3})
    template, key, certificate = (tmp_path / name for name in ("a.jinja", "key.pem", "cert.pem"))
    template.write_text("{{ messages[0].content }}!")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    made += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1"]
    subprocess.run([*made, "-addext", "subjectAltName=IP:127.0.0.1"], check=True)
    words = ["--model", str(folder), "--dtype", "float32", "--max-model-len", "64", "--port", "0"]
    words += ["--chat-template", str(template), "--served-model-name", "a", "b", "--access-log"]
    words += ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    words += ["--allowed-origins", "https://page.example", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "phalanx", "serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    while "listening" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    assert "defaults of generation_config.json: temperature 0.0, max_tokens 3;" in said
    (address,) = re.findall(r"https://127\.0\.0\.1:\d+", said)
    context = ssl.create_default_context(cafile=str(certificate))

    def ask(path: str, body: Any = None, **headers: str) -> tuple[Any, Any]:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"{address}{path}", content, headers)
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return json.load(answer), answer.headers

    models = ask("/v1/models")[0]["data"]
    assert [(each["id"], each["max_model_len"]) for each in models] == [("a", 64), ("b", 64)]
    chat = {"model": "b", "messages": [{"role": "user", "content": "hi"}]}
    first, headers = ask("/v1/chat/completions", chat, Origin="https://page.example")
    assert headers["Access-Control-Allow-Origin"] == "https://page.example"
    assert first["usage"]["prompt_tokens"] == 3 and first["usage"]["completion_tokens"] <= 3
    assert ask("/v1/chat/completions", chat)[0]["choices"] == first["choices"]  # greedy
    tokens = ask("/tokenize", {"messages": chat["messages"]})[0]["tokens"]
    assert ask("/detokenize", {"tokens": tokens})[0]["prompt"].replace(" ", "") == "hi!"
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert '"POST /v1/chat/completions HTTP/1.1" 200' in said + out
