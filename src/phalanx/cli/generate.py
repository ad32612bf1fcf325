"""`phalanx generate RUN`: continue prompts with a trained model, and print the texts."""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Positional
from phalanx.errors import ConfigError
from phalanx.infer.options import EngineConfig, Sampling, SamplingSettings
from phalanx.object_store import path_of
from phalanx.report.output import print_json
from phalanx.report.tabular import Number, Table
from phalanx.report.terminal import Terminal

if TYPE_CHECKING:
    from phalanx.infer.engine import Engine
    from phalanx.infer.scheduler import Completion
    from phalanx.infer.served import Served


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(EngineConfig, SamplingSettings):
    """Continue prompts with a trained model: its text appears as it is computed."""

    run: Annotated[str | None, Positional("RUN")] = None
    """A run folder, whose latest checkpoint is taken; a checkpoint, of any strategy; or a Hugging
    Face folder."""
    prompt: list[str] = dataclasses.field(default_factory=list[str])
    """Prompt; may be repeated. Default: empty."""
    json: bool = False
    """Make the last line of standard output one JSON document: texts, tokens, why each ended."""


def run(argv: list[str]) -> int:
    """Run `phalanx generate`.

    Raises:
        ConfigError: no folder is given, or a prompt is too long.
    """
    config = read_command_line(argv, GenerateConfig, prog="phalanx generate")
    if config.run is None:
        raise ConfigError("RUN is missing; expected: phalanx generate RUN --prompt TEXT")
    from phalanx.infer.assembly import with_engine

    with_engine(path_of(config.run), config, functools.partial(_generate, config))
    return 0


def _generate(config: GenerateConfig, served: Served, engine: Engine) -> None:
    """Continue the prompts; print the texts in order, each while it is generated.

    Raises:
        EngineFailed: the logits are not finite.
    """
    from phalanx.infer.detokenize import scores_of
    from phalanx.infer.engine import NOT_FINITE, EngineFailed
    from phalanx.launch.failure import report

    def logprobs_of(completion: Completion) -> dict[str, Any] | None:
        """Return the `logprobs` object of `/v1/completions`; None if they were not asked for."""
        assert engine.tokenizer is not None
        scores = completion.scores
        return scores_of(engine.tokenizer, completion.new_tokens, scores)[0] if scores else None

    prompts, terminal = config.prompt or [""], Terminal()
    tokens = [served.encode(prompt) for prompt in prompts]
    values = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(SamplingSettings)
    }
    begin_s = time.perf_counter()
    completions = [engine.add(each, Sampling(**values))[0] for each in tokens]
    shown, first_s = 0, 0.0
    terminal.write(prompts[0])
    while shown < len(completions):
        pieces = engine.step()
        if pieces and not first_s:
            first_s = time.perf_counter() - begin_s
        terminal.write(
            "".join(piece.text for piece in pieces if piece.completion is completions[shown])
        )
        while shown < len(completions) and completions[shown].finish_reason is not None:
            terminal.write("\n")
            if (logprobs := logprobs_of(completions[shown])) is not None:
                terminal.show(_table(logprobs))
            shown += 1
            if shown < len(completions):
                terminal.write(f"\n{prompts[shown]}{completions[shown].text}")
    took_s = time.perf_counter() - begin_s
    num_tokens = engine.counts.generated_tokens
    report(
        f"{num_tokens:,} tokens in {took_s:.2f} s, {num_tokens / took_s:,.1f} tokens/s; the first "
        f"after {first_s:.2f} s"
    )
    if any(completion.finish_reason == "error" for completion in completions):
        raise EngineFailed(f"generation ended early: {NOT_FINITE}")
    if config.json:
        texts = [
            {
                "prompt": prompt,
                "text": completion.text,
                "tokens": completion.new_tokens,
                "finish_reason": completion.finish_reason,
                "logprobs": logprobs_of(completion),
            }
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        print_json({"completions": texts, "first_token_s": first_s, "took_s": took_s})


def _table(logprobs: dict[str, Any]) -> Table:
    """Return a table of the log probabilities of a completion's tokens."""
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    rows = [
        (repr(token), logprob, ", ".join(f"{other!r} {value:.2f}" for other, value in top.items()))
        for token, logprob, top in zip(*columns, strict=True)
    ]
    return Table("", ("token", Number("log p", ".3f"), "the most probable"), rows)
