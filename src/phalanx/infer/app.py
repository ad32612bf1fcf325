"""The HTTP server: OpenAI's completions and chats over one engine, health, metrics and a page.

Every error response has a reason: 400 an unsupported or invalid field, or a prompt that is too
long; 401 a missing or wrong API key; 404 another model; 408 a body that does not arrive in time;
413 a body that is too large; 415 a Content-Type other than JSON; 429 a full queue; 503 an engine
that has stopped, a server that ends, or logits that are not finite.

Web pages of other sites, open in a browser on this host, can send requests to this server. Without
a CORS preflight, which this server grants to `allowed_origins` alone, such a page can only send
bodies of a form or plain text type: 415 refuses them. With DNS rebinding the site's own domain name
resolves to this host, so the browser sees the same origin. The header Host then has that name: 403
(`Refusals`).
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

import phalanx
from phalanx.checkpoint import manifest
from phalanx.errors import ConfigError
from phalanx.infer.answers import Answer, envelope, error_body
from phalanx.infer.chat import Chat
from phalanx.infer.engine import NOT_FINITE, Engine, EngineFailed, Piece
from phalanx.infer.engine_thread import CLOSING, EngineThread, Pieces, QueueFull, follow
from phalanx.infer.grammar import Grammars
from phalanx.infer.metrics import ServerMetrics
from phalanx.infer.options import RequestError, about_field
from phalanx.infer.protocol import (
    MAX_CHOICES,
    Body,
    ChatBody,
    CompletionBody,
    Constraint,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parse,
)
from phalanx.infer.responses import ResponseAnswer, ResponseBody
from phalanx.infer.scheduler import Completion
from phalanx.infer.served import Served
from phalanx.infer.tool_calls import CALL_FORMATS, CallParser, format_of, grammar_of
from phalanx.storage import existing

BODY_TIMEOUT_S: Final = 30.0
"""Timeout for receiving the whole body of a request, seconds."""

CLOSE: Final = {"Connection": "close"}
"""Header of a response sent before the whole request body has arrived: the rest is not read."""

LOGGER = logging.getLogger(__name__)

MAX_IGNORED: Final = 1000
"""Number of unknown fields after which the log names no more."""

DEFAULT_TOKENS: Final = 16
"""`max_tokens` of a completion without one, as OpenAI's; a chat may use all positions left."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server accepts, and what it takes for granted.

    Attributes:
        max_waiting: most requests that wait, in addition to the running ones.
        max_body_bytes: largest size of a body.
        api_key: key that clients must send, in ASCII; None for no key.
        is_local: whether to refuse a Host header that is neither an IP address nor localhost.
        is_strict: whether to refuse unknown fields of a body; otherwise they are ignored.
        names: further names of the served model.
        defaults: values of `SamplingSettings` for requests without them; `max_tokens` for chats.
        allowed_origins: sites whose pages may send requests (CORS); "*" for all.
    """

    max_waiting: int = 256
    max_body_bytes: int = 1 << 20
    api_key: str | None = None
    is_local: bool = False
    is_strict: bool = False
    names: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    allowed_origins: Sequence[str] = ()


class Refusals:
    """ASGI middleware that refuses requests by their headers, before any of the body is read.

    Two lengths, Content-Length and Transfer-Encoding, let a proxy and this server disagree on where
    a request ends (request smuggling; RFC 9112, section 6.1). If `is_local`, a Host that DNS could
    resolve is refused too (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, is_local: bool) -> None:
        self._app, self._is_local = app, is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request to the application, or answer it with 400 or 403."""
        answer = self._app
        # Decided by headers alone: a body that is read first would let a stranger's page fill
        # memory.
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        host = headers.get("host", "")
        if "content-length" in headers and "transfer-encoding" in headers:
            message = "the headers have Content-Length and Transfer-Encoding; expected one of them"
            answer = JSONResponse(error_body(message, "invalid_request_error"), 400, CLOSE)
        elif scope["type"] == "http" and self._is_local and not _needs_no_dns(host):
            message = (
                f"the header Host is {host!r:.99}; without an API key this server accepts "
                "only localhost and IP addresses"
            )
            answer = JSONResponse(error_body(message, "invalid_request_error"), 403)
        await answer(scope, receive, send)


def _needs_no_dns(host: str) -> bool:
    """Return whether a Host header is an IP address or localhost, which need no DNS lookup."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        ipaddress.ip_address(name)
    except ValueError:
        return re.fullmatch(r"(.+\.)?localhost(:\d*)?", host.lower()) is not None
    return True


class Gateway:
    """Handlers that submit HTTP requests to the engine thread and build the responses."""

    def __init__(
        self, served: Served, engine: Engine, limits: Limits, tool_call_parser: str = "auto"
    ) -> None:
        self.served, self.limits = served, limits
        self.metrics = ServerMetrics(engine)
        self.thread = EngineThread(engine, self.metrics, limits.max_waiting)
        self._most_tokens = engine.max_total_tokens
        names = () if served.adapters is None else served.adapters.names
        self._adapters = {name: number for number, name in enumerate(names, 1)}
        self._chat = Chat(served)
        self._calls = CALL_FORMATS.get(tool_call_parser) or format_of(self._chat.source)
        self._grammars = Grammars(served.tokenizer, served.end_ids)
        self._watchers: set[asyncio.Task[None]] = set()
        self._ignored: set[str] = set()
        self._bodies: set[asyncio.Timeout] = set()  # time limits of bodies that are arriving

    async def completions(self, request: Request) -> Response:
        """Answer `/v1/completions`."""
        body: CompletionBody = await self._body(request, CompletionBody)
        check_number(len(body.prompts), body.n)
        if body.num_generated != body.n:
            check_number(len(body.prompts), body.num_generated, "best_of")
            if body.num_generated < body.n or body.stream:
                raise RequestError("best_of requires stream: false and at least n", "best_of")
        most, vocab_size = self._most_tokens, self.served.weights.shape.vocab_size
        max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        first, most = self._cut(body, max_tokens)

        def encode() -> list[list[int]]:
            with about_field("prompt"):
                encoded = [
                    prompt
                    if isinstance(prompt, list)
                    else self.served.encode(prompt, most, has_begin=body.add_special_tokens)
                    for prompt in body.prompts
                ]
                encoded = [prompt[first:] for prompt in encoded]
                for prompt in encoded:
                    check_ids(prompt, vocab_size)
            return encoded

        prompts = await asyncio.to_thread(encode)
        texts = [
            prompt
            if isinstance(prompt, str) and first is None
            else self.served.tokenizer.decode(tokens, skip_special_tokens=body.skip_special_tokens)
            for prompt, tokens in zip(body.prompts if body.echo else (), prompts, strict=False)
        ]
        echoes = [text for text in texts for _ in range(body.n)]
        return await self._answer(request, body, prompts, DEFAULT_TOKENS, body.logprobs, echoes)

    def _cut(self, body: GenerationBody, max_tokens: int) -> tuple[int | None, int | None]:
        """Return where to cut prompts, and most tokens of their texts; None for no limit."""
        if (num := body.truncate_prompt_tokens) is None:
            return None, self._most_tokens
        if num == 0:
            raise RequestError(
                "truncate_prompt_tokens is 0; expected -1, or at least 1", "truncate_prompt_tokens"
            )
        return -(num if num > 0 else max(self._most_tokens - max_tokens, 1)), None

    async def chats(self, request: Request) -> Response:
        """Answer `/v1/chat/completions`."""
        return await self._chat_answer(request, await self._body(request, ChatBody))

    async def responses(self, request: Request) -> Response:
        """Answer `/v1/responses`."""
        body: ResponseBody = await self._body(request, ResponseBody)
        return await self._chat_answer(
            request, body.chat, ResponseAnswer(body, body.model or self.served.name)
        )

    async def _chat_answer(
        self, request: Request, body: ChatBody, answer: ResponseAnswer | None = None
    ) -> Response:
        check_number(1, body.n)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs requires logprobs: true", "top_logprobs")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise ConfigError(
                "max_tokens and max_completion_tokens are the same limit; give only one of them"
            )
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        functions, forced = body.functions
        if functions and self._calls is None:
            raise RequestError(
                "tools requires a chat template that renders them in a known format, which the "
                f"model lacks; --tool-call-parser names the format: {', '.join(CALL_FORMATS)}",
                "tools",
            )
        max_tokens = body.max_completion_tokens
        first, most = self._cut(body, max_tokens or body.max_tokens or 1)

        def encode() -> list[int]:
            with about_field("messages"):
                return self._chat.encode(body, most)[first:]

        prompt = await asyncio.to_thread(encode)
        if max_tokens is None:
            room = max(self._most_tokens - len(prompt), 1)
            max_tokens = min(room, self.limits.defaults.get("max_tokens", room))
        last = body.messages[-1]
        is_echo = body.echo and last.role == "assistant"  # as in vLLM, of the role of the answer
        echoes = [last.text] * body.n if is_echo else []
        calls = constraint = None
        if functions and (form := self._calls) is not None:
            names, is_single = [each.name for each in functions], not body.parallel_tool_calls
            calls = functools.partial(CallParser, form, names, is_single=is_single)
            if body.constraint is not None:  # it would allow no call
                why = f"tools and {body.constraint.field} exclude each other"
                raise RequestError(f"{why}; expected one of them, or tool_choice: none", "tools")
            if forced:
                is_single |= body.tool_choice != "required"
                lark = grammar_of(form, forced, self.served.tokenizer, is_single=is_single)
                constraint = Constraint("tools", "lark", lark)
        return await self._answer(
            *(request, body, [prompt], max_tokens, logprobs, echoes),
            calls=calls,
            constraint=constraint,
            answer=answer,
        )

    async def tokenize(self, request: Request) -> Response:
        """Answer `/tokenize`: tokens of a prompt or a chat as a completion would compute them."""
        body: TokenizeBody = await self._body(request, TokenizeBody)
        if (body.prompt is None) == (not body.messages):
            raise RequestError("expected prompt or messages, one of them", "prompt")

        def encode() -> list[int]:
            with about_field("prompt" if body.messages == [] else "messages"):
                if body.prompt is not None:
                    return self.served.encode(body.prompt, has_begin=body.add_special_tokens)
                return self._chat.encode(body)

        tokens = await asyncio.to_thread(encode)
        strings = [self.served.tokenizer.id_to_token(token) for token in tokens]
        about = {"count": len(tokens), "max_model_len": self._most_tokens, "tokens": tokens}
        return JSONResponse({**about, "token_strs": strings if body.return_token_strs else None})

    async def detokenize(self, request: Request) -> Response:
        """Answer `/detokenize`: the text of tokens, special ones too."""
        body: DetokenizeBody = await self._body(request, DetokenizeBody)
        with about_field("tokens"):
            check_ids(body.tokens, self.served.num_ids)
        text = self.served.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    def close(self) -> None:
        """End all requests with an error, also those whose body is arriving, and refuse new ones.

        Any thread may call this, also a handler of signals.
        """

        def end_bodies() -> None:
            while self._bodies:
                if not (limit := self._bodies.pop()).expired():
                    limit.reschedule(0)

        self.thread.close()
        self.thread.call_on_loop(end_bodies)

    async def _body(self, request: Request, kind: type[Body]) -> Any:
        """Check the API key, the content type and the model of a request; return its body."""
        if (key := self.limits.api_key) is not None:
            scheme, _, sent = request.headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(sent.strip().encode(), key.encode())
            if not is_right or scheme.lower() != "bearer":
                raise RequestError(
                    "the header Authorization is not 'Bearer KEY' with the API key",
                    code="invalid_api_key",
                    status=401,
                )
        content_type = request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(
                415, f"the header Content-Type is {content_type!r:.99}; expected 'application/json'"
            )
        content = bytearray()
        limit = asyncio.timeout(0 if self.thread.is_closing else BODY_TIMEOUT_S)
        self._bodies.add(limit)
        try:
            async with limit:
                async for part in request.stream():
                    content += part
                    if len(content) > self.limits.max_body_bytes:
                        most = f"{self.limits.max_body_bytes:,}"
                        raise HTTPException(413, f"the body has more than {most} bytes", CLOSE)
        except TimeoutError:
            if self.thread.is_closing:
                raise HTTPException(503, CLOSING, CLOSE) from None
            why = f"the body took more than {BODY_TIMEOUT_S:g} s to arrive"
            raise HTTPException(408, why, CLOSE) from None
        finally:
            self._bodies.discard(limit)
        unknown: set[str] = set()
        noted = None if self.limits.is_strict else unknown
        body = await asyncio.to_thread(parse, kind, bytes(content), noted)
        if (new := unknown - self._ignored) and len(self._ignored) < MAX_IGNORED:
            self._ignored |= new
            LOGGER.warning("ignored the unknown fields %s", ", ".join(sorted(new))[:200])
        if body.model is not None:
            self.check_model(body.model)
        return body

    def check_model(self, name: str) -> None:
        """Raise RequestError if `name` is not the served model."""
        if name not in (self.served.name, *self.limits.names, *self._adapters):
            raise RequestError(
                f"there is no model {name!r:.99}; the served model is {self.served.name!r}",
                "model",
                "model_not_found",
                status=404,
            )

    async def _answer(
        self,
        request: Request,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        max_tokens: int,
        logprobs: int | None,
        echoes: Sequence[str],
        calls: Callable[[], CallParser] | None = None,
        constraint: Constraint | None = None,
        answer: ResponseAnswer | None = None,
    ) -> Response:
        """Generate, and return one JSON response or a stream of events."""
        grammar, is_chat = None, isinstance(body, ChatBody)
        defaults = {**self.limits.defaults}
        defaults.pop("max_tokens", None)
        is_ranked = body.num_generated != body.n
        samplings = body.samplings(
            max_tokens, 0 if is_ranked and logprobs is None else logprobs, self.served, defaults
        )
        if (constraint := constraint or body.constraint) is not None:
            with about_field(constraint.field):
                grammar = await asyncio.to_thread(self._grammars.compile, *constraint)
        served, adapter = self.served, self._adapters.get(body.model or "", 0)
        if adapter:
            served = replace(served, name=str(body.model))
        formatter = answer or Answer(served, logprobs, body, echoes, calls)
        completions, arriving = self.thread.submit(
            *(prompts, samplings, "messages" if is_chat else "prompt"),
            grammar=grammar,
            skips_special=calls is None,
            adapter=adapter,
        )

        async def watch() -> None:
            """Abort the completions when the client disconnects."""
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.thread.abandon(completions)
            arriving.put_nowait(ClientDisconnect())

        watcher = asyncio.ensure_future(watch())
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        pieces = self._pieces(completions, arriving, watcher)
        if body.stream:
            events = formatter.stream(pieces, completions)
            return StreamingResponse(events, media_type="text/event-stream")
        async for _ in pieces:
            pass
        return await asyncio.to_thread(lambda: JSONResponse(formatter.whole(completions)))

    async def _pieces(
        self, completions: list[Completion], arriving: Pieces, watcher: asyncio.Task[None]
    ) -> AsyncGenerator[Piece]:
        """Yield pieces until all completions have finished.

        Raises:
            ClientDisconnect: the client has disconnected.
            EngineFailed: the engine or the server has ended, or the logits are not finite.
        """
        num_left = len(completions)
        try:
            while num_left:
                piece = await arriving.get()
                await asyncio.sleep(0)  # lets a lost connection be noticed before the next write
                if isinstance(piece, Exception):
                    raise piece
                if piece.finish_reason == "error":
                    grammar = piece.completion.grammar
                    raise EngineFailed((grammar and grammar.failure) or NOT_FINITE)
                num_left -= piece.finish_reason is not None
                yield piece
        finally:
            watcher.cancel()
            self.thread.abandon(completions)


def check_ids(tokens: Sequence[int], num_ids: int) -> None:
    """Raise ConfigError if a token of a prompt is not in the vocabulary."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < num_ids:
        raise ConfigError(
            f"prompt has tokens from {min(tokens)} to {max(tokens)}; expected 0 to "
            f"{num_ids - 1}, the vocabulary of the model"
        )


def check_number(num_prompts: int, num_choices: int, field: str = "n") -> None:
    """Raise RequestError if a request asks for no text, or for more than MAX_CHOICES."""
    num_texts = num_prompts * num_choices
    if num_choices < 1 or not 1 <= num_texts <= MAX_CHOICES:
        raise RequestError(
            f"{num_prompts} prompts with {field} {num_choices} request {num_texts} texts; expected "
            f"1 to {MAX_CHOICES}",
            field if num_prompts == 1 else "prompt",
        )


REFUSALS: Final[dict[type[Exception], tuple[int, str]]] = {
    ConfigError: (400, "invalid_request_error"),
    HTTPException: (400, "invalid_request_error"),  # with a status of its own
    QueueFull: (429, "rate_limit_error"),
    ClientDisconnect: (499, "client_disconnected"),
    EngineFailed: (503, "server_error"),
}
"""Exception class -> HTTP status and error type of the response."""

HEADERS: Final = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
"""HTTP status -> headers of the response."""


async def refuse(request: Request, error: Exception) -> Response:
    """Return the response to a request that was refused or failed."""
    del request
    status, kind = next(REFUSALS[each] for each in type(error).__mro__ if each in REFUSALS)
    message, param, code, headers = str(error), None, None, None
    if isinstance(error, RequestError):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, HTTPException):
        status, message, headers = error.status_code, str(error.detail), error.headers
    content = error_body(message, kind, param, code)
    return JSONResponse(content, status, headers or HEADERS.get(status))


def app_of(
    served: Served,
    engine: Engine,
    limits: Limits,
    follow_s: float | None = None,
    tool_call_parser: str = "auto",
) -> FastAPI:
    """Return the application that serves a model.

    The routes that need no API key contain no user data.

    Args:
        served: the model.
        engine: its engine.
        limits: see `Limits`.
        follow_s: seconds between polls for a later checkpoint of the run, whose weights are then
            served; None to keep the first weights.
        tool_call_parser: name of the format of calls of tools, or auto: the chat template's.

    Raises:
        ConfigError: the chat template is invalid, or `follow_s` is given without a run folder.
    """
    gateway = Gateway(served, engine, limits, tool_call_parser)
    folder = served.weights.folder
    run = None if follow_s is None else manifest.run_of(folder)
    if follow_s is not None and run is None:
        raise ConfigError(
            f"follow is set, but {folder} is not a checkpoint of a run folder, where later "
            "checkpoints would appear"
        )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        gateway.thread.start(asyncio.get_running_loop())
        follower = None
        if run is not None and follow_s is not None:
            follower = asyncio.ensure_future(follow(run, folder, follow_s, gateway.thread))
        yield
        if follower is not None:
            follower.cancel()
        await asyncio.to_thread(gateway.thread.stop)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.gateway = gateway
    app.add_middleware(Refusals, is_local=limits.is_local)
    if limits.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=limits.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    for kind in REFUSALS:
        app.add_exception_handler(kind, refuse)
    app.add_api_route("/v1/completions", gateway.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", gateway.chats, methods=["POST"])
    app.add_api_route("/v1/responses", gateway.responses, methods=["POST"])
    app.add_api_route("/tokenize", gateway.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", gateway.detokenize, methods=["POST"])
    page = files("phalanx.infer").joinpath("page.html").read_text("utf-8")
    about_model = envelope(served.name, "model", served.name)
    about_model["created"] = int(existing(folder).stat().st_mtime)
    about_model |= {"owned_by": "phalanx", "max_model_len": engine.max_total_tokens}
    about_model["root"] = served.name
    about = {name: {**about_model, "id": name} for name in (served.name, *limits.names)}
    if served.adapters is not None:
        of_base = {"parent": served.name}
        about |= {name: {**about_model, "id": name, **of_base} for name in served.adapters.names}

    @app.get("/")
    async def front() -> Response:
        return HTMLResponse(page)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [*about.values()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        gateway.check_model(name)
        return JSONResponse(about[name])

    @app.get("/health")
    async def health() -> Response:
        failure = gateway.thread.failure
        if failure is not None:
            return JSONResponse(error_body(failure, "server_error"), 503)
        return JSONResponse({"status": "ok"})

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        return await health()

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": phalanx.__version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/stats")
    async def stats() -> Response:
        checkpoint = (gateway.thread.checkpoint or folder).name
        about = {"model": served.name, "checkpoint": checkpoint}
        about |= {"has_key": limits.api_key is not None}
        return JSONResponse({**about, **gateway.metrics.values()})

    _ = front, models, model, ping, version, metrics, stats
    return app
