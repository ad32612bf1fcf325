"""`phalanx serve RUN`: serve a trained model over HTTP."""

from __future__ import annotations

import errno
import functools
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import ssl
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from phalanx.config.command_line import read_words
from phalanx.config.fields import Positional, Range, check_values
from phalanx.errors import ConfigError, Interrupted
from phalanx.infer.options import EngineConfig
from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
from phalanx.object_store import path_of
from phalanx.report.tabular import Table
from phalanx.report.terminal import Terminal
from phalanx.storage import read_text

if TYPE_CHECKING:
    from phalanx.infer.engine import Engine
    from phalanx.infer.served import Served

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "jinja2")

API_KEY = "PHALANX_API_KEY"
"""Environment variable of the API key; other users cannot read it, unlike a command line."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineConfig):
    """Serve a trained model over HTTP with an OpenAI-compatible API."""

    run: Annotated[str | None, Positional("RUN")] = None
    """A run folder, whose latest checkpoint is taken; a checkpoint, of any strategy; or a Hugging
    Face folder."""
    served_model_name: tuple[str, ...] = ()
    """The names of the model for clients, answers have the first; if unset, the folder's."""
    chat_template: str | None = None
    """File of a chat template, in place of the model's."""
    generation_config: str | None = "auto"
    """Folder of a generation_config.json with sampling defaults; auto: the model's; none: none."""
    strict: bool = False
    """Refuse fields of requests that are unknown, which otherwise cost a line of the log."""
    fields: bool = False
    """Print what happens with the fields of requests, and end."""
    host: str = "127.0.0.1"
    """The address to listen on; the default takes connections of this host alone."""
    port: Annotated[int, Range(0, 65535, "[]")] = 8000
    """The port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """What clients have to send as `Authorization: Bearer KEY`; if unset, the environment variable
    PHALANX_API_KEY. Other users of this host can read a command line."""
    ssl_keyfile: str | None = None
    """File of the private key for HTTPS."""
    ssl_certfile: str | None = None
    """File of the certificate for HTTPS, with the certificates of its issuers."""
    allowed_origins: list[str] = field(default_factory=list[str])
    """Site whose pages may send requests (CORS), or * for all; may be repeated."""
    access_log: bool = False
    """Print a line for each request."""
    max_waiting: Annotated[int, Range(0)] = 256
    """Most requests that wait; further ones are answered by 429."""
    max_body_bytes: Annotated[int, Range(1)] = 1 << 20
    """Largest body of a request; larger ones are answered by 413."""
    follow: Annotated[float | None, Range(0, ends="()")] = None
    """Look every this number of seconds for a later checkpoint of the run, and serve its weights
    from then on."""
    grace_s: Annotated[float, Range(0, 10**6, "[]")] = 25.0
    """Seconds that running requests have to end after SIGTERM or Ctrl-C; then they get an error."""
    tool_call_parser: Literal["auto", "hermes", "mistral", "llama3_json"] = "auto"
    """Format of a model's calls of tools: of Hermes and Qwen, Mistral, or Llama 3; auto: the one in
    its chat template."""
    properties: str | None = None
    """A serving.properties of LMI, whose options stand for options here; the command line wins."""


def run(argv: list[str]) -> int:
    """Serve until a signal arrives.

    Raises:
        ConfigError: RUN is missing, a package is not installed, or an option does not fit.
        Interrupted: a signal has ended the server.
    """
    config = _read(argv)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"serve needs {', '.join(missing)}, which is not installed: "
            "pip install 'phalanx-train[serve]'"
        )
    if config.fields:
        from phalanx.infer.protocol import described_fields

        Terminal().show(Table("", ("field", "of", "", ""), described_fields()))
        return 0
    if config.run is None:
        raise ConfigError("RUN is missing; expected: phalanx serve RUN")
    if config.api_key is not None and re.fullmatch("[!-~]+", config.api_key) is None:
        raise ConfigError(
            f"the API key of --api-key or {API_KEY} is empty, or has a space or a character that "
            "is not ASCII, which an Authorization header cannot carry; expected visible ASCII"
        )
    if config.follow is not None and config.weights == "int8":
        raise ConfigError(
            f"follow is {config.follow:g}, but weights is int8, which quantizes the weights only "
            "at the start; the nearest is weights full"
        )
    if config.ssl_keyfile is not None or config.ssl_certfile is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(config.ssl_certfile or "", config.ssl_keyfile)
        except OSError as error:  # SSLError too
            raise ConfigError(
                f"ssl_certfile {config.ssl_certfile} and ssl_keyfile {config.ssl_keyfile} are no "
                f"certificate and its key: {error}"
            ) from None
    # The port is held from before the model is loaded; under torchrun the first rank serves.
    is_first = not is_under_torchrun() or read_rank_env().rank == 0
    with _listener(config) if is_first else nullcontext() as listener:
        from phalanx.infer.assembly import with_engine

        work = functools.partial(_serve, config, listener)
        if signum := with_engine(path_of(config.run), config, work):
            raise Interrupted(signum)
    return 0


PROPERTIES: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "model_id": ("run", str),
    "served_model_name": ("served_model_name", lambda text: (text,)),
    "max_rolling_batch_size": ("slots", int),
    "max_rolling_batch_prefill_tokens": ("budget", int),
    "job_queue_size": ("max_waiting", int),
    "tensor_parallel_degree": ("strategy", lambda text: f"tp{int(text)}"),
    "dtype": ("precision", lambda text: DTYPES.get(text, text)),
    "enable_prefix_caching": ("prefix_cache", {"true": True, "false": False}.__getitem__),
}
"""Key of a serving.properties file (LMI, DJL Serving) -> setting, and its value of the text."""

DTYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16"}

ALIASES: Final[Mapping[str, tuple[str, Mapping[str, str] | None]]] = {
    "model": ("", {}),
    "tensor-parallel-size": ("--strategy", {}),
    "dtype": ("--precision", {**DTYPES, "float": "float32"}),
    "speculative-config": ("--speculative", {}),
    "max-num-seqs": ("--slots", {}),
    "max-num-batched-tokens": ("--budget", {}),
    "kv-cache-dtype": ("--cache", {"auto": "full", "fp8_e4m3": "fp8"}),
    "enable-prefix-caching": ("--prefix-cache", None),
    "no-enable-prefix-caching": ("--no-prefix-cache", None),
    "enable-chunked-prefill": ("--chunked-prefill", None),
    "no-enable-chunked-prefill": ("--no-chunked-prefill", None),
    "enable-log-requests": ("--access-log", None),
    "disable-log-requests": ("--no-access-log", None),
    "disable-uvicorn-access-log": ("--no-access-log", None),
}
"""Option of vLLM -> the same option here, and values with other names; None for a flag."""

UNUSED: Final = {
    **dict.fromkeys(("trust-remote-code", "enforce-eager", "disable-log-stats"), False),
    **dict.fromkeys(("enable-auto-tool-choice", "allow-credentials"), False),
    **dict.fromkeys(("gpu-memory-utilization", "swap-space", "uvicorn-log-level"), True),
    **dict.fromkeys(("tokenizer-mode", "load-format", "allowed-methods", "allowed-headers"), True),
}
"""Option of vLLM without effect here -> whether a value follows."""


def _renamed(argv: list[str]) -> list[str]:
    """Return a command line without options that only vLLM has, in the names of this command."""
    words, unused, left = list[str](), list[str](), list(argv)
    while left:
        word = left.pop(0)
        option, sign, text = word.partition("=")
        name = option.removeprefix("--").replace("_", "-") if option.startswith("--") else ""
        new, values = ALIASES.get(name, ("", None))
        has_value = UNUSED.get(name, values is not None)
        values_of = [text] if sign else [left.pop(0)] if has_value and left else []
        if name in UNUSED:
            unused.append(option)
        elif name in ALIASES:
            translated = [(values or {}).get(each, each) for each in values_of]
            translated = [f"tp{each}" for each in translated] if new == "--strategy" else translated
            words += [each for each in (new, *translated) if each]
        else:
            words.append(word)
    if unused:
        Terminal().say(f"ignored {', '.join(unused)}, which serve does not use")
    return words


def _read(argv: list[str]) -> ServeConfig:
    """Return the settings of the command line, which override settings of a serving.properties."""
    chosen = read_words(_renamed(argv), ServeConfig, prog="phalanx serve")
    if (file := chosen.get("properties")) is not None:
        settings, ignored = dict[str, Any](), list[str]()
        for number, line in enumerate(map(str.strip, read_text(Path(file)).splitlines()), 1):
            if not line or line[0] in "#!":
                continue
            if (parts := re.fullmatch(r"([^=:\s]+)\s*[=:\s]\s*(.*)", line)) is None:
                raise ConfigError(f"{file}, line {number} is {line!r:.99}; expected KEY=VALUE")
            key, text = parts.groups()
            if (known := PROPERTIES.get(key.removeprefix("option."))) is None:
                ignored.append(key)
                continue
            name, value_of = known
            if (name, text) == ("strategy", "max"):
                import torch

                text = str(max(torch.cuda.device_count(), 1))
            try:
                settings[name] = value_of(text)
            except (KeyError, ValueError):
                expected = "true or false" if name == "prefix_cache" else "a whole number"
                raise ConfigError(
                    f"{file}, line {number}: {key} cannot be {text!r:.99}; expected {expected}"
                ) from None
        chosen = settings | chosen
        if ignored:
            Terminal().say(f"{file}: ignored {', '.join(ignored)}, which serve does not use")
    if chosen.get("api_key") is None:
        chosen["api_key"] = os.environ.get(API_KEY)
    if len(origins := chosen.get("allowed_origins", [])) == 1 and origins[0].startswith("["):
        chosen["allowed_origins"] = json.loads(origins[0])  # as vLLM's
    if (file := chosen.get("chat_template")) is not None:
        chosen["chat_template"] = read_text(Path(file))
    config = ServeConfig(**chosen)
    check_values(config)
    return config


def _listener(config: ServeConfig) -> socket.socket:
    """Return a socket that listens on the host and port of the settings.

    Raises:
        ConfigError: the port is occupied, or the host is not an address of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except UnicodeError as error:  # a label of the host name is empty or too long
        raise ConfigError(
            f"cannot listen on {config.host!r}: it is not a host name ({error}); every machine "
            "has 127.0.0.1"
        ) from None
    except OSError as error:
        is_gai = isinstance(error, socket.gaierror)  # has other error numbers than errno
        why = error.strerror if is_gai else os.strerror(error.errno or 0)
        is_of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "--port 0 takes a free one" if is_of_port else "every machine has 127.0.0.1"
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {why}; {advice}"
        ) from None


def _serve(
    config: ServeConfig, listener: socket.socket | None, served: Served, engine: Engine
) -> int:
    """Serve until a signal arrives, and return its number."""
    import asyncio

    import uvicorn
    from torch import distributed as dist

    from phalanx.hugging_face.companions import DEFAULT
    from phalanx.infer.app import Limits, app_of
    from phalanx.infer.engine import EngineFailed
    from phalanx.infer.served import sampling_defaults
    from phalanx.launch.failure import report
    from phalanx.launch.heartbeat import PULSE
    from phalanx.launch.process_memory import collect_as_usual
    from phalanx.launch.signals import handled

    collect_as_usual()
    terminal = Terminal()
    defaults = dict[str, Any]()
    if (source := config.generation_config) not in (None, "vllm"):
        defaults = sampling_defaults(
            served.weights.folder if source == "auto" else Path(str(source))
        )
    if defaults:
        shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
        terminal.say(
            f"sampling defaults of generation_config.json: {shown}; --generation-config none "
            "leaves them out"
        )
    limits = Limits(
        is_strict=config.strict,
        names=config.served_model_name[1:],
        defaults=defaults,
        allowed_origins=config.allowed_origins,
        max_waiting=config.max_waiting,
        max_body_bytes=config.max_body_bytes,
        api_key=config.api_key,
        is_local=config.api_key is None and _is_loopback(config.host),
    )
    names = config.served_model_name or (served.name,)
    served = replace(served, name=names[0])
    if config.chat_template is not None:
        served = replace(served, chat_templates={DEFAULT: config.chat_template})
    app = app_of(served, engine, limits, config.follow, config.tool_call_parser)
    close = app.state.gateway.close
    pool = engine.scheduler.pool
    terminal.say(
        f"serving {served.name}: {config.slots} slots, a cache of "
        f"{pool.num_blocks * pool.block_size:,} tokens in blocks of {pool.block_size}",
    )
    if config.api_key is None and not _is_loopback(config.host):
        terminal.say(f"other hosts can reach {config.host}, but no --api-key is set", "yellow")

    scheme = "http" if config.ssl_certfile is None else "https"

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for server in self.servers:
                for listener in server.sockets:
                    host, port = listener.getsockname()[:2]
                    name = f"[{host}]" if ":" in host else host
                    terminal.say(f"listening on {scheme}://{name}:{port}")

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            # The launcher of several ranks gets the signals, and sends the first to all.
            with nullcontext() if dist.is_initialized() else handled(self.handle_exit):
                yield

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not PULSE.stop_signal:
                PULSE.stop_signal = sig
                name = signal.Signals(sig).name
                report(f"{name}: {PULSE.on_stop}; a second signal ends it at once")
            elif sig != signal.SIGHUP:  # a closed terminal sends several
                close()

        async def on_tick(self, counter: int) -> bool:
            self.should_exit |= PULSE.stop_signal > 0
            return await super().on_tick(counter)

        async def shutdown(self, sockets: Any = None) -> None:
            closing = asyncio.get_running_loop().call_later(config.grace_s, close)
            await super().shutdown(sockets)
            closing.cancel()

    options = uvicorn.Config(
        app,
        log_level="warning",
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=ceil(config.grace_s) + 2,  # uvicorn then cancels its tasks
    )
    if config.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    PULSE.on_stop = f"the server ends with its running requests, within {config.grace_s:g} s"
    PULSE.heed()
    assert listener is not None, "the first rank listens"
    with listener:
        Server(options).run([listener])
    if (failure := app.state.gateway.thread.failure) is not None:
        raise EngineFailed(f"the engine has ended: {failure}")
    return PULSE.stop_signal


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
