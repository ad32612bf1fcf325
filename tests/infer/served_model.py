"""A small model behind a server on a port of this host, in a thread of this process."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from models_and_prompts import twins
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from phalanx.infer.app import Gateway, Limits, app_of
from phalanx.infer.assembly import engine_of
from phalanx.infer.options import EngineConfig
from phalanx.infer.served import open_served

CONFIG: dict[str, Any] = {"precision": "float32", "threads": 1, "slots": 8, "cache_tokens": 1280}


def letters() -> str:
    """Return a tokenizer of 97 tokens, printable letters; it begins each text with `<s>`."""
    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "<s>": 95, "</s>": 96}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 95)]
    )
    return tokenizer.to_str()


def ascii_bytes() -> str:
    """Return a byte-level tokenizer of 97 tokens: ASCII without a tilde, and a line break."""
    texts = [*map(chr, range(33, 126)), "\u0120", "\u010a", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer.to_str()


def published(
    folder: Path, tokenizer: str | None = None, *, of: str = "llama", **companions: Any
) -> Path:
    """Write a small model as transformers does, with its tokenizer, into `folder`/hf."""
    _, theirs = twins(of)
    theirs.save_pretrained(folder / "hf")
    (folder / "hf" / "tokenizer.json").write_text(tokenizer or letters())
    for name, content in companions.items():
        (folder / "hf" / f"{name}.json").write_text(json.dumps(content))
    return folder / "hf"


class Client:
    """Speaks to a server by plain HTTP."""

    def __init__(self, port: int, gateway: Gateway) -> None:
        self.port, self.gateway = port, gateway
        self.engine = gateway.thread.engine

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the content of an answer, which is JSON or text."""
        connection = self.connect()
        content = body if isinstance(body, bytes | None) else json.dumps(body)
        headers = {"Content-Type": "application/json", **headers}
        connection.request("GET" if body is None else "POST", path, content, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        is_json = "json" in (answer.getheader("content-type") or "")
        return answer.status, json.loads(text) if is_json else text

    def events(self, path: str, body: Any) -> list[Any]:
        """Return the events of a stream; the last is [DONE]."""
        status, text = self.ask(path, body)
        assert status == 200 and text.endswith("\n\n")
        data = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
        assert data.pop() == "[DONE]"
        return [json.loads(each) for each in data]

    def wait_until_idle(self) -> None:
        """Wait until the engine has no request, and no block is held."""
        for _ in range(1000):
            if not self.engine.scheduler.has_work:
                break
            time.sleep(0.01)
        assert self.engine.scheduler.pool.num_held == 0


@contextmanager
def serving(
    folder: Path, limits: Limits | None = None, follow_s: float | None = None, **config: Any
) -> Generator[Client]:
    """Serve a folder while the block runs."""
    settings = EngineConfig(**{**CONFIG, **config})
    served = open_served(folder, settings.lora_modules)
    engine = engine_of(served, settings)
    app = app_of(served, engine, limits or Limits(max_waiting=64), follow_s)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has ended"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Client(port, app.state.gateway)
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def long_published(folder: Path, template: str) -> Path:
    """Write a small Llama of 4,096 positions with a chat template, and the tokens `ascii_bytes`."""
    names = {"chat_template": template, "eos_token": "</s>"}
    found = published(folder, ascii_bytes(), tokenizer_config=names)
    config = json.loads((found / "config.json").read_text())
    config |= {"max_position_embeddings": 4096, "eos_token_id": 96}
    (found / "config.json").write_text(json.dumps(config))
    return found
