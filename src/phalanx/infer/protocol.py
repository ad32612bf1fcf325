"""Bodies of HTTP requests and responses in the format of OpenAI's API: parse, validate, write.

An unknown field, or a field with an unsupported value, is refused by name unless it is null.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from phalanx.config.fields import check_value, settings, value_at
from phalanx.errors import ConfigError
from phalanx.infer.options import MAX_LOGPROBS, RequestError, Sampling, about_field

MAX_CHOICES: Final = 64
"""Most continuations of one request: number of prompts times `n`."""

MAX_STOPS: Final = 16
MOST_SHOWN: Final = 60
"""Most characters of a value that an error message quotes."""

MAX_MESSAGES: Final = 4096

Count = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """Base class of a request body and of the objects in it; refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_null(cls, values: Any) -> Any:
        """Drop unknown fields that are null: clients send back whole messages that have them."""
        if not isinstance(values, dict):
            return values
        given = cast("dict[str, Any]", values).items()
        return {name: v for name, v in given if v is not None or name in cls.model_fields}


class StreamOptions(Body):
    """Options of a streaming response."""

    include_usage: bool | None = None


class GenerationBody(Body):
    """Fields that the bodies of completions and chats share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    # Accepted only with the value that has no effect, because other values are not supported.
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def num_choices(self) -> int:
        """Number of continuations of each prompt."""
        return self.n or 1

    @property
    def has_usage(self) -> bool:
        """Whether a streaming response ends with an event of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def samplings(self, max_tokens: int, logprobs: int | None) -> list[Sampling]:
        """Return the sampling options of each continuation of a prompt; the default seed is random.

        Raises:
            RequestError: a value is out of its range.
        """
        values = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given: dict[str, Any] = {name: v for name, v in values.items() if v is not None}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = secrets.randbits(62) if self.seed is None else self.seed
        found: list[Sampling] = []
        for number in range(self.num_choices):
            sampling = Sampling(
                max_tokens=self.max_tokens or max_tokens,
                seed=(seed + number) % 2**63,  # SEED accepts no negative number
                stop=[stop for stop in stops if stop],
                logprobs=logprobs,
                ignore_end=bool(self.ignore_eos),
                **given,
            )
            for setting in settings(Sampling):
                with about_field(setting.key):
                    check_value(setting, value_at(sampling, setting.key))
            found.append(sampling)
        return found


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[Count] | list[list[Count]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """List of prompts, as texts or as token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if prompt and isinstance(prompt[0], int) else prompt


class MessagePart(Body):
    """A content part of a message; only text parts are supported."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a chat."""

    role: Annotated[str, Field(max_length=64)]
    content: str | Annotated[list[MessagePart], Field(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(
                f"content is null; only a message of role assistant may omit it, not {self.role}"
            )
        return self

    @property
    def text(self) -> str:
        """The content as one string; text parts are concatenated."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


class ResponseFormat(Body):
    """Format of a response; only text is supported."""

    type: Literal["text"]


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


def parse(kind: type[GenerationBody], content: bytes) -> Any:
    """Parse the bytes of a request body into an object of class `kind`.

    Raises:
        ConfigError: the bytes are not valid JSON.
        RequestError: a field is invalid.
    """
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"the body is a {type(value).__name__}; expected an object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where, param = ".".join(map(str, first["loc"]))[:200], str(first["loc"][0])[:200]
        if first["type"] == "extra_forbidden":
            raise RequestError(f"{where} is unknown or not supported", param) from None
        if first["type"] == "missing":
            raise RequestError(f"{where} is missing", param) from None
        given = json.dumps(first["input"], ensure_ascii=False)
        given = given if len(given) <= MOST_SHOWN else f"{given[:MOST_SHOWN]}..."
        why = first["msg"].replace("Input should be", "expected")
        raise RequestError(f"{where} is {given}; {why}", param) from None


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error response; `kind` is its type, see `RequestError` for the rest."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def new_id(prefix: str) -> str:
    """Return a unique response id that starts with `prefix`."""
    return f"{prefix}-{secrets.token_hex(12)}"


def usage(num_prompt: int, num_found: int, num_new: int) -> dict[str, Any]:
    """Return the `usage` object of a response; `num_found` prompt tokens came from the cache."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_found},
    }


def envelope(id: str, kind: str, model: str) -> dict[str, Any]:
    """Return the fields that every response and stream event of a request shares."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}
