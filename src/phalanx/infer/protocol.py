"""Bodies of HTTP requests in the format of OpenAI's API: parse and validate.

An unsupported field is refused by name, unless it is null or has a value without effect, which
`neutral` of its object lists. `Sampling` declares the legal values of a sampling option, once.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from typing_extensions import override

from phalanx.config.fields import Range, check_value, settings, value_at
from phalanx.errors import ConfigError
from phalanx.infer.options import (
    MAX_LOGPROBS,
    RequestError,
    Sampling,
    SamplingSettings,
    about_field,
)

MAX_CHOICES: Final = 64
"""Most continuations of one request: number of prompts times `n`."""

MAX_STOPS: Final = 16
MOST_SHOWN: Final = 60
"""Most characters of a value that an error message quotes."""

MAX_MESSAGES: Final = 4096


NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    field: values
    for values, fields in (
        ((0,), "frequency_penalty presence_penalty min_tokens priority"),
        ((1,), "repetition_penalty length_penalty best_of"),
        ((-1,), "top_k"),
        (("",), "suffix"),
        (({},), "logit_bias metadata chat_template_kwargs"),
        (([],), "tools functions documents stop_token_ids bad_words"),
        ((["text"],), "modalities"),
        (({"type": "text"},), "response_format"),
        (("none", "auto"), "tool_choice function_call"),
        (("auto", "default"), "service_tier"),
        ((True, False), "parallel_tool_calls"),
        ((True,), "skip_special_tokens spaces_between_special_tokens add_generation_prompt"),
        ((False,), "store use_beam_search early_stopping include_stop_str_in_output"),
        ((False,), "continue_final_message"),
    )
    for field in fields.split()
}
"""Field of a completion or a chat -> its values without effect; `top_k` alone takes others too."""


def _form(value: Any) -> str:
    """Return the form of a value that may be a text or a list, so that errors are about one."""
    if not isinstance(value, list):
        return "text"
    first = cast("list[Any]", value)[0] if value else ""
    if isinstance(first, list):
        return "lists"
    return "numbers" if isinstance(first, int | float) else "texts"


Text = Annotated[str, Tag("text")]


class Body(BaseModel):
    """Base class of a request body and of the objects in it; refuses unknown fields.

    Attributes:
        neutral: unsupported field of this object -> its values without effect, which are left out.
    """

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_neutral(cls, values: Any) -> Any:
        """Drop fields without effect: clients send back whole messages with null fields."""
        if not isinstance(values, dict):
            return values

        def is_neutral(name: str, value: Any) -> bool:
            if value is None:
                return name not in cls.model_fields
            is_bool = isinstance(value, bool)  # 0 == False, but is no value of the same field
            return any(
                value == each and is_bool == isinstance(each, bool)
                for each in cls.neutral.get(name, ())
            )

        fields = cast("dict[str, Any]", values).items()
        return {name: value for name, value in fields if not is_neutral(name, value)}


class StreamOptions(Body):
    """Options of a streaming response."""

    include_usage: bool | None = None


class GenerationBody(Body):
    """Fields that the bodies of completions and chats share."""

    neutral = NEUTRAL

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: (
        Annotated[
            Text | Annotated[list[str], Field(max_length=MAX_STOPS), Tag("texts")],
            Discriminator(lambda value: "texts" if isinstance(value, list) else "text"),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    echo: bool | None = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    # Names of the end user or of a cache: without effect, whatever they are.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def field_names(self) -> dict[str, str]:
        """Names of the fields that are not named as their options in `Sampling`."""
        return {"ignore_end": "ignore_eos"}

    @property
    def num_choices(self) -> int:
        """Number of continuations of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def has_usage(self) -> bool:
        """Whether a streaming response ends with an event of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def scored_prompt(self) -> int | None:
        """Number of alternatives to score with each prompt token; None to score no prompt."""
        return self.prompt_logprobs

    def samplings(self, max_tokens: int, logprobs: int | None) -> list[Sampling]:
        """Return the sampling options of each continuation of a prompt; the default seed is random.

        Raises:
            RequestError: a value is out of its range.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
        values = {name: getattr(self, name) for name in names}
        chosen: dict[str, Any] = {name: v for name, v in values.items() if v is not None}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = secrets.randbits(62) if self.seed is None else self.seed
        sampling = Sampling(
            **{"max_tokens": max_tokens, **chosen},
            stop=[stop for stop in stops if stop],
            logprobs=logprobs,
            ignore_end=bool(self.ignore_eos),
            prompt_logprobs=self.scored_prompt,
        )
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs requires stream: false", "prompt_logprobs")
        for setting in settings(SamplingSettings):
            name = self.field_names.get(setting.key, setting.key)
            if setting.key == "max_tokens" and not self.echo and sampling.prompt_logprobs is None:
                setting = dataclasses.replace(setting, range=Range(1))
            with about_field(name):
                named = dataclasses.replace(setting, key=name)
                check_value(named, value_at(sampling, setting.key))
        return [  # SEED accepts no negative number
            dataclasses.replace(sampling, seed=(seed + number) % 2**63)
            for number in range(self.num_choices)
        ]


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    neutral = {**NEUTRAL, "add_special_tokens": (True,)}

    prompt: Annotated[
        Text
        | Annotated[list[str], Tag("texts")]
        | Annotated[list[int], Tag("numbers")]
        | Annotated[list[list[int]], Tag("lists")],
        Discriminator(_form),
    ]
    logprobs: int | None = None

    @property
    @override
    def scored_prompt(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        nums = [num for num in (self.prompt_logprobs, echoed) if num is not None]
        return max(nums, default=None)

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

    neutral = {"tool_calls": ([],), "annotations": ([],)}

    role: Annotated[str, Field(max_length=64)]
    content: (
        Annotated[
            Text | Annotated[list[MessagePart], Field(max_length=MAX_MESSAGES), Tag("parts")],
            Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),
        ]
        | None
    ) = None
    # Only chat templates use these.
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None

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

    def for_template(self) -> dict[str, Any]:
        """Return the message for a chat template; as in transformers, without fields of None."""
        fields = self.model_dump(exclude_none=True)
        return fields if self.content is None else fields | {"content": self.text}


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    neutral = {**NEUTRAL, "add_special_tokens": (False,)}  # the template spells them

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    @override
    def field_names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {**super().field_names, "logprobs": "top_logprobs", "max_tokens": limit}


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
        param, names, node = str(first["loc"][0])[:200], list[str](), cast(Any, value)
        for part in first["loc"]:  # without pydantic's labels of alternatives
            if isinstance(node, dict):
                node = cast("dict[str, Any]", node).get(str(part))
            elif isinstance(node, list) and isinstance(part, int):
                node = cast("list[Any]", node)[part]
            else:
                continue
            names.append(str(part))
        where = ".".join(names)[:200]
        if first["type"] == "extra_forbidden":
            neutral = (Message if where.startswith("messages.") else kind).neutral
            legal = list(map(json.dumps, neutral.get(str(first["loc"][-1]), ())))
            only = "; expected " + " or ".join(legal) if legal else ""
            raise RequestError(f"{where} is not supported{only}", param) from None
        if first["type"] == "missing":
            raise RequestError(f"{where} is missing", param) from None
        actual = json.dumps(first["input"], ensure_ascii=False)
        actual = actual if len(actual) <= MOST_SHOWN else f"{actual[:MOST_SHOWN]}..."
        why = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        actual += ", which is not supported" if first["type"] == "literal_error" else ""
        raise RequestError(f"{where} is {actual}; {why}", param) from None
