"""Options of an engine and of each request, and the error of a request. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from phalanx.config.fields import SEED, THREADS, Range
from phalanx.errors import ConfigError

MAX_LOGPROBS: Final = 20
"""Most alternatives of a token whose log-probabilities a request may ask for."""


class RequestError(ConfigError):
    """A request is refused.

    Attributes:
        param: field of the request that is wrong; None if it is not one field.
        code: code of the error in OpenAI's API; None if it has none.
        status: HTTP status.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@contextmanager
def about_field(param: str) -> Generator[None]:
    """Convert a ConfigError raised inside the block to a RequestError about one field."""
    try:
        yield
    except ConfigError as error:
        raise RequestError(str(error), param, getattr(error, "code", None)) from error


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling options of one request that are numbers or texts, named as in OpenAI's HTTP API.

    The filters apply to the probabilities after temperature, in this order: top_k, top_p, min_p.
    """

    max_tokens: Annotated[int, Range(0, 2**31 - 1, "[]")] = 64
    """Most tokens to generate."""
    temperature: Annotated[float, Range(0, 100, "[]")] = 1.0
    """Logits are divided by it; 0 takes the token with the largest."""
    top_k: Annotated[int, Range(0)] = 0
    """Choose among this number of most probable tokens; 0: among all."""
    top_p: Annotated[float, Range(0, 1, "[]")] = 1.0
    """Choose among the fewest most probable tokens, at least one, whose probabilities sum up to
    this (Holtzman et al. 2020)."""
    min_p: Annotated[float, Range(0, 1, "[]")] = 0.0
    """Leave out tokens less probable than this part of the most probable one (Nguyen et al.
    2024)."""
    seed: Annotated[int, SEED] = 0
    """Seed of the draws; the tokens do not depend on other requests."""
    stop: list[str] = dataclasses.field(default_factory=list[str])
    """Texts that end the generation; they are not part of the result. Give it once for each."""
    logprobs: Annotated[int | None, Range(0, MAX_LOGPROBS, "[]")] = None
    """Give the logarithm of each token's probability, and of this number of alternatives."""
    ignore_end: bool = False
    """Generate past the token that ends a text."""
    min_tokens: Annotated[int, Range(0, 2**31 - 1, "[]")] = 0
    """Generate at least this number of tokens before a token or text ends the generation."""
    presence_penalty: Annotated[float, Range(-2, 2, "[]")] = 0.0
    """Subtract this from the logits of generated tokens."""
    frequency_penalty: Annotated[float, Range(-2, 2, "[]")] = 0.0
    """Subtract this from the logit of a token for each time it has been generated."""
    repetition_penalty: Annotated[float, Range(0, 100, "(]")] = 1.0
    """Divide positive logits of tokens of the prompt and of generated tokens by this, and multiply
    negative ones (Keskar et al. 2019)."""


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingSettings):
    """Sampling options of one request, also those that only an HTTP request can have.

    Attributes:
        prompt_logprobs: number of alternatives of each prompt token's log-probability; None: none.
        logit_bias: id -> what to add to its logit.
        allowed_token_ids: ids that may be chosen; None for all.
        bad_words: token sequences that are not generated.
        stop_token_ids: ids that end the generation, as the model's own ends.
        skip_special_tokens: whether the text omits special tokens.
        include_stop: whether the text ends with the stop text or token that ended it.
    """

    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    skip_special_tokens: bool = True
    include_stop: bool = False

    @property
    def changes_logits(self) -> bool:
        """Whether logits change before temperature and filters."""
        is_penalized = self.presence_penalty or self.frequency_penalty or self.min_tokens
        is_masked = self.logit_bias or self.bad_words or self.allowed_token_ids is not None
        return bool(is_penalized or is_masked or self.repetition_penalty != 1)


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of a token, and (id, log-probability) of the most probable tokens.

    The probabilities are the model's own: at temperature 1, without penalties and filters. `rank`
    is 1 for the most probable token.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine: precision, device, batching and key-value cache."""

    precision: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and arithmetic; auto: bfloat16 where the device has it, else
    float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    strategy: str = "tp1"
    """How several processes split the model: tpN or tpN:megatron, as in training, and epN, which
    deals the experts alone."""
    threads: Annotated[int | None, THREADS] = None
    """CPU threads of each process; torch's own choice for one, the cores shared evenly by
    several."""
    slots: Annotated[int, Range(1)] = 64
    """Most requests that run together."""
    budget: Annotated[int, Range(1)] = 512
    """Most tokens that a step computes; longer prompts are computed in chunks."""
    block_size: Annotated[int, Range(1)] = 16
    """Positions of a block of the cache; on a GPU, torch 2.13 reads blocks of 256 in place."""
    cache_tokens: Annotated[int | None, Range(1)] = None
    """Positions of the whole cache; if unset, the longest sequence for every slot, or less where
    memory is short."""
    max_model_len: Annotated[int | None, Range(1)] = None
    """Most tokens of a prompt and its continuation; if unset, the positions of the model."""
    weights: Literal["full", "int8"] = "full"
    """int8 rounds the linear maps of the blocks, a scale for each output; less memory, not less
    time."""
    cache: Literal["full", "int8", "fp8"] = "full"
    """int8 and fp8 (E4M3) round keys and values, a scale for each position and head; int8 is
    nearer."""
    lora_modules: tuple[str, ...] = ()
    """Adapters beside the model, each NAME=FOLDER of PEFT or of a run of phalanx train --lora;
    requests choose one by their field model."""
    prefix_cache: bool = True
    """Find the keys and values of prompts that begin alike, and compute them once."""
    chunked_prefill: bool = True
    """Compute long prompts in chunks beside other requests; otherwise in one step."""
    speculative: str = "none"
    """ngram guesses up to 4 next tokens by lookup in the request's own tokens, and keeps those that
    are right: faster where a text repeats its prompt; ngram,TOKENS,LONGEST,SHORTEST sets the number
    of tokens and the n-grams."""
