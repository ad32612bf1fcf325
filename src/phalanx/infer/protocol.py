"""Bodies of HTTP requests in the format of OpenAI's API: parse and validate.

The table of `request_fields.py` lists the unsupported fields. `SamplingSettings` declares the legal
values of a sampling option, once. `phalanx serve --fields` prints `described_fields`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from typing_extensions import override

from phalanx.config.fields import Range, check_value, settings, value_at
from phalanx.errors import ConfigError
from phalanx.infer.grammar import Kind
from phalanx.infer.options import (
    MAX_LOGPROBS,
    RequestError,
    Sampling,
    SamplingSettings,
    about_field,
)
from phalanx.infer.request_fields import ANY, UNSUPPORTED, neutral_of

if TYPE_CHECKING:
    from phalanx.infer.served import Served

MAX_CHOICES: Final = 64
"""Most continuations of one request: number of prompts times `n`."""

MAX_STOPS: Final = 16
MAX_BIAS: Final = 100.0
MOST_SHOWN: Final = 60
"""Most characters of a value that an error message quotes."""

MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 128

MAX_IDS: Final = 1 << 18
"""Most token ids of a field; a vocabulary has fewer."""


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
    """Base class of a request body and of the objects in it.

    Attributes:
        neutral: unsupported field of this object -> its values without effect, which are left out;
            None for all values.
    """

    neutral: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {}

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any, info: ValidationInfo) -> Any:
        """Drop fields without effect, and unknown ones; note the latter, or refuse if strict.

        A null is as no field, unless the field is required.
        """
        if not isinstance(values, dict):
            return values
        unknown: set[str] | None = info.context
        known = {field.alias or name: field for name, field in cls.model_fields.items()}

        def is_kept(name: str, value: Any) -> bool:
            if name in known:
                return value is not None or known[name].is_required()
            if value is None:
                return False
            if name not in cls.neutral:
                if unknown is not None:
                    unknown.add(name)
                return unknown is None
            if (neutral := cls.neutral[name]) is None:
                return False
            is_bool = isinstance(value, bool)  # 0 == False, but is no value of the same field
            return not any(value == each and is_bool == isinstance(each, bool) for each in neutral)

        fields = cast("dict[str, Any]", values).items()
        return {name: value for name, value in fields if is_kept(name, value)}


class StreamOptions(Body):
    """Options of a streaming response."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_IDS)]


class ResponseFormat(Body):
    """What a text has to match, in OpenAI's format; a schema always holds, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = {}

    @property
    def schema_of(self) -> Any:
        """The schema; None for any text."""
        if self.type != "json_schema":
            return {"type": "object"} if self.type == "json_object" else None
        if not isinstance(schema := self.json_schema.get("schema"), dict):
            why = "response_format of type json_schema requires json_schema.schema, an object"
            raise RequestError(why, "response_format")
        return schema


class StructuredOutputs(Body):
    """What a text has to match, in vLLM's format."""

    neutral = {"structural_tag": (), "disable_any_whitespace": (False,)}

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool = False


class Constraint(NamedTuple):
    """What a text has to match: the field that says so, and the arguments of `Grammars.compile`."""

    field: str
    kind: Kind
    text: str


class GenerationBody(Body):
    """Fields that the bodies of completions and chats share."""

    model: str | None = None
    max_tokens: int | None = None
    """16 in completions, all positions left in chats; 0 needs echo or prompt_logprobs."""
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    """-1 and 0: among all."""
    min_p: float | None = None
    """After top_k and top_p, as in transformers."""
    seed: int | None = None
    """Choice i draws with seed + i."""
    n: int = 1
    """1 to 64 choices of all prompts."""
    stop: Annotated[
        Text | Annotated[list[str], Field(max_length=MAX_STOPS), Tag("texts")],
        Discriminator(lambda value: "texts" if isinstance(value, list) else "text"),
    ] = []
    """At most 16."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    min_tokens: int | None = None
    """Before it no end token or text ends the answer; a whole grammar may."""
    presence_penalty: float | None = None
    """Of generated tokens, -2 to 2."""
    frequency_penalty: float | None = None
    """Of generated tokens, by their number, -2 to 2."""
    repetition_penalty: float | None = None
    """Of tokens of the prompt and generated ones."""
    logit_bias: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """By ids of tokens; added, within -100 and 100."""
    allowed_token_ids: Annotated[TokenIds | None, Field(min_length=1)] = None
    """Only these are generated."""
    bad_words: list[Annotated[str, Field(min_length=1)]] = []
    """Not generated, alone or after a space."""
    stop_token_ids: TokenIds = []
    """End the generation; not in the text."""
    include_stop_str_in_output: bool = False
    """Also the token that ends it."""
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    """The last ones; -1: as many as fit."""
    add_special_tokens: bool | None = None
    """True in completions, false in chats."""
    echo: bool = False
    """With the prompt; in chats with a last assistant turn."""
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """0 to 20; not with stream."""
    response_format: ResponseFormat | None = None
    """Text, json_object or json_schema."""
    structured_outputs: StructuredOutputs = StructuredOutputs()
    """One of json, regex, choice, grammar, json_object."""
    guided_json: dict[str, Any] | str | None = None
    """A schema that llguidance supports."""
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    """GBNF or Lark."""
    return_token_ids: bool = False
    """Also of the prompt, as prompt_token_ids."""
    return_tokens_as_token_ids: bool = False
    """The logprobs name tokens token_id:5."""
    request_id: Annotated[str | None, Field(max_length=128)] = None
    """Ends the id of the response."""

    @property
    def field_names(self) -> dict[str, str]:
        """Names of the fields that are not named as their options in `Sampling`."""
        return {}

    @property
    def num_generated(self) -> int:
        """Number of continuations of each prompt to generate, of which `n` are kept."""
        return self.n

    @property
    def scored_prompt(self) -> int | None:
        """Number of alternatives to score with each prompt token; None to score no prompt."""
        return self.prompt_logprobs

    @property
    def constraint(self) -> Constraint | None:
        """What the text has to match.

        Raises:
            RequestError: several fields say so.
        """
        outputs, form, newer = self.structured_outputs, self.response_format, "structured_outputs"
        values: list[tuple[str, Kind, Any]] = [
            ("response_format", "json", form and form.schema_of),
            ("guided_json", "json", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            (newer, "json", {"type": "object"} if outputs.json_object else outputs.json_),
            (newer, "regex", outputs.regex),
            (newer, "choice", outputs.choice),
            (newer, "grammar", outputs.grammar),
        ]
        values = [each for each in values if each[2] is not None]
        if not values:
            return None
        field, kind, value = values[0]
        if len(values) > 1:
            why = f"{field} and {values[1][0]} constrain the text; expected one constraint"
            raise RequestError(why, field)
        return Constraint(field, kind, value if isinstance(value, str) else json.dumps(value))

    def samplings(
        self,
        max_tokens: int,
        logprobs: int | None,
        served: Served,
        defaults: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> list[Sampling]:
        """Return the sampling options of each continuation of a prompt; the default seed is random.

        Args:
            max_tokens: most tokens to generate, unless the body has `max_tokens`.
            logprobs: number of alternatives of each token's log-probability; None for none.
            served: the model, whose ids and tokenizer the fields refer to.
            defaults: values of options that the body does not have.

        Raises:
            RequestError: a value is out of its range.
        """
        chosen = {**defaults, **self.model_dump(include=PLAIN, exclude_none=True)}
        if chosen.get("top_k") == -1:
            chosen["top_k"] = 0
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        seed = secrets.randbits(62) if self.seed is None else self.seed
        allowed = self.allowed_token_ids
        sampling = Sampling(
            **{"max_tokens": max_tokens, **chosen},
            stop=[stop for stop in stops if stop],
            logprobs=logprobs,
            ignore_end=self.ignore_eos,
            prompt_logprobs=self.scored_prompt,
            logit_bias=self._bias(),
            allowed_token_ids=None if allowed is None else tuple(allowed),
            bad_words=tuple(_spellings(self.bad_words, served)),
            stop_token_ids=frozenset(self.stop_token_ids),
            skip_special_tokens=self.skip_special_tokens,
            include_stop=self.include_stop_str_in_output,
        )
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            if (most := max(getattr(sampling, name) or [0])) >= served.num_ids:
                raise RequestError(
                    f"{name} has token {most}; expected 0 to {served.num_ids - 1}", name
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
        if sampling.min_tokens > sampling.max_tokens:
            most = f"max_tokens, {sampling.max_tokens}"
            raise RequestError(
                f"min_tokens is {sampling.min_tokens}; expected at most {most}", "min_tokens"
            )
        return [  # SEED accepts no negative number
            dataclasses.replace(sampling, seed=(seed + number) % 2**63)
            for number in range(self.num_generated)
        ]

    def _bias(self) -> dict[int, float]:
        """Return `logit_bias` by id, within vLLM's bounds."""
        bias = self.logit_bias
        if wrong := [key for key in bias if not re.fullmatch("[0-9]{1,9}", key)]:
            raise RequestError(
                f"logit_bias has the key {wrong[0][:MOST_SHOWN]!r}; expected ids of tokens",
                "logit_bias",
            )
        return {int(key): min(max(value, -MAX_BIAS), MAX_BIAS) for key, value in bias.items()}


PLAIN: Final = {
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
"""Fields that are options of `SamplingSettings` as they are."""


def _spellings(words: Sequence[str], served: Served) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each bad word, alone and after a space, as vLLM does."""
    for word in words:
        plain, spaced = (
            tuple(served.tokenizer.encode(text, add_special_tokens=False).ids)
            for text in (word, f" {word.lstrip()}")
        )
        if plain:
            yield plain
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                yield spaced


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    neutral = neutral_of("completions")

    prompt: Annotated[
        Text
        | Annotated[list[str], Tag("texts")]
        | Annotated[list[int], Tag("numbers")]
        | Annotated[list[list[int]], Tag("lists")],
        Discriminator(_form),
    ]
    logprobs: int | None = None
    """0 to 20; the model's own, before penalties."""
    best_of: int | None = None
    """The n of the largest mean log-probability."""

    @property
    @override
    def num_generated(self) -> int:
        return self.n if self.best_of is None else self.best_of

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

    neutral = {"annotations": None, "logprobs": None}

    type: Literal["text", "input_text", "output_text"]  # in chats; in the input of responses
    text: str


class Function(Body):
    """A function that the model may call, has to call (its name) or has called (arguments)."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    arguments: str | None = None


class Tool(Body):
    """A tool, a choice of a tool, or a call of one in a message of the assistant."""

    neutral = {"index": None}

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(Body):
    """A message of a chat."""

    neutral = {"annotations": ([],), "audio": (), "function_call": ()}

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
    tool_calls: Annotated[list[Tool], Field(max_length=MAX_MESSAGES)] | None = None

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
        for call in fields.get("tool_calls", ()):  # templates expect objects, clients send texts
            with suppress(ValueError):
                call["function"]["arguments"] = json.loads(call["function"].get("arguments", "{}"))
        if fields.get("tool_calls") == []:
            del fields["tool_calls"]
        return fields if self.content is None else fields | {"content": self.text}


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    neutral = neutral_of("chats")

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    """Rendered and parsed as the chat template has them."""
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("text")]
        | Annotated[Tool, Tag("object")],
        Discriminator(lambda value: "text" if isinstance(value, str) else "object"),
    ] = "auto"
    """Also a function."""
    parallel_tool_calls: bool = True
    """False: one call."""
    max_completion_tokens: int | None = None
    """As max_tokens."""
    logprobs: bool = False
    top_logprobs: int | None = None
    """0 to 20; needs logprobs: true."""
    add_generation_prompt: bool | None = None
    """For the template."""
    continue_final_message: bool = False
    """Leaves the last turn open."""
    chat_template_kwargs: dict[str, Any] = {}
    """For the template."""
    documents: list[dict[str, Any]] | None = None
    """For the template."""
    reasoning_effort: str | None = None
    """For the template."""

    @property
    @override
    def field_names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"logprobs": "top_logprobs", "max_tokens": limit}

    @property
    def functions(self) -> tuple[list[Function], list[Function]]:
        """The functions that the model may call, and the ones of which it has to call one.

        Raises:
            RequestError: `tool_choice` requires a function that is not among the tools.
        """
        functions, choice = [tool.function for tool in self.tools], self.tool_choice
        name = choice.function.name if isinstance(choice, Tool) else None
        forced = [each for each in functions if choice == "required" or each.name == name]
        if choice not in ("none", "auto") and not forced:
            wanted = "required" if name is None else f"the function {name!r}"
            names = ", ".join(each.name for each in functions)[:300] or "none"
            raise RequestError(f"tool_choice is {wanted}; the tools are {names}", "tool_choice")
        return ([] if choice == "none" else functions), forced


class TokenizeBody(ChatBody):
    """The body of `/tokenize`: a prompt or messages."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] = []
    prompt: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds


def described_fields() -> list[tuple[str, str, str, str]]:
    """Return each field of completions and chats: its name, whose it is, what happens, and why."""
    kinds = {"": GenerationBody, "completions": CompletionBody, "chats": ChatBody}
    rows = [
        (name, where, "taken", kind.model_fields[name].description or "")
        for where, kind in kinds.items()
        for name in kind.__annotations__
    ]
    for row in UNSUPPORTED:
        some = f"{row.ignored} ignored, others refused" if row.ignored else "refused"
        rows.append((row.name, row.where, "ignored" if row.ignored == ANY else some, row.about))
    return rows


def parse(kind: type[Body], content: bytes, unknown: set[str] | None = None) -> Any:
    """Parse the bytes of a request body into an object of class `kind`.

    Unknown fields are added to `unknown`; without it they are refused.

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
        return kind.model_validate(value, context=unknown)
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
            legal = list(map(json.dumps, neutral.get(str(first["loc"][-1])) or ()))
            only = "; expected " + " or ".join(legal) if legal else ""
            raise RequestError(f"{where} is not supported{only}", param) from None
        if first["type"] == "missing":
            raise RequestError(f"{where} is missing", param) from None
        actual = json.dumps(first["input"], ensure_ascii=False)
        actual = actual if len(actual) <= MOST_SHOWN else f"{actual[:MOST_SHOWN]}..."
        why = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        actual += ", which is not supported" if first["type"] == "literal_error" else ""
        raise RequestError(f"{where} is {actual}; {why}", param) from None
