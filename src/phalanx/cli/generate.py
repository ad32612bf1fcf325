"""`phalanx generate RUN`: continue prompts with a trained model, and print the texts."""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.screen import print_json, screen
from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Positional
from phalanx.errors import ConfigError
from phalanx.infer.options import EngineConfig, Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from phalanx.infer.served import Served
    from phalanx.infer.texts import Completion, TextEngine


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(EngineConfig, Sampling):
    """Continue prompts with a trained model: its text appears as it is computed."""

    run: Annotated[str | None, Positional("RUN")] = None
    """A run folder, whose latest checkpoint is taken; a checkpoint, of any strategy; or a Hugging
    Face folder."""
    prompt: list[str] = dataclasses.field(default_factory=list[str])
    """The text to continue; of several, give one each time. Without one, the model begins."""
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
    from phalanx.infer.ranks import with_engine

    with_engine(Path(config.run), config, functools.partial(_generate, config))
    return 0


def _generate(config: GenerateConfig, served: Served, texts: TextEngine) -> None:
    """Continue the prompts and print the texts; raise EngineFailed if logits are not finite."""
    from phalanx.infer.engine import NOT_FINITE, EngineFailed
    from phalanx.launch.failure import report

    prompts = config.prompt or [""]
    tokens = [served.encode(prompt) for prompt in prompts]
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(Sampling)}
    console = screen()
    begin_s = time.perf_counter()
    completions = [texts.add(each, Sampling(**values))[0] for each in tokens]
    first_s = _write(console, texts, prompts, completions) - begin_s
    took_s = time.perf_counter() - begin_s
    num_tokens = texts.engine.counts.generated_tokens
    report(
        f"{num_tokens:,} tokens in {took_s:.2f} s, {num_tokens / took_s:,.1f} tokens/s; the first "
        f"after {first_s:.2f} s"
    )
    if any(completion.finish_reason == "error" for completion in completions):
        raise EngineFailed(f"generation ended early: {NOT_FINITE}")
    if config.json:
        found = _document(prompts, completions, texts.tokenizer)
        print_json({"completions": found, "first_token_s": first_s, "took_s": took_s})


def _write(
    console: Console, texts: TextEngine, prompts: list[str], completions: list[Completion]
) -> float:
    """Run the engine until all texts end; print them in order, each while it is generated.

    Returns:
        The time of the first token, by `time.perf_counter`.
    """
    texts.engine.scheduler.is_draining = True
    shown, first_s = 0, 0.0
    _print(console, prompts[0])
    while shown < len(completions):
        pieces = texts.step()
        if pieces and not first_s:
            first_s = time.perf_counter()
        for piece in pieces:
            if piece.completion is completions[shown]:
                _print(console, piece.text)
        while shown < len(completions) and completions[shown].finish_reason is not None:
            _print(console, "\n")
            if completions[shown].scores:
                console.print(_scores(completions[shown], texts.tokenizer))
            shown += 1
            if shown < len(completions):
                _print(console, f"\n{prompts[shown]}{completions[shown].stream.text}")
    return first_s


def _print(console: Console, text: str) -> None:
    """Print a part of a line without wrapping, and flush it."""
    console.file.write(text)
    console.file.flush()


def _scores(completion: Completion, tokenizer: Tokenizer) -> Table:
    """Return a table of the log probabilities of a completion's tokens."""
    from phalanx.infer.texts import scores_of

    table = Table()
    for head in ("token", "log p", "the most probable"):
        table.add_column(head, justify="right" if head == "log p" else "left")
    found, _ = scores_of(tokenizer, completion.new_tokens, completion.scores)
    names = "tokens", "token_logprobs", "top_logprobs"
    for token, logprob, top in zip(*(found[name] for name in names), strict=True):
        others = ", ".join(f"{other!r} {value:.2f}" for other, value in top.items())
        table.add_row(*map(Text, (repr(token), f"{logprob:.3f}", others)))
    return table


def _document(
    prompts: list[str], completions: list[Completion], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return the completions as JSON; `logprobs` is the object of `/v1/completions`."""
    from phalanx.infer.texts import scores_of

    return [
        {
            "prompt": prompt,
            "text": found.stream.text,
            "tokens": found.new_tokens,
            "finish_reason": found.finish_reason,
            "logprobs": scores_of(tokenizer, found.new_tokens, found.scores)[0]
            if found.scores
            else None,
        }
        for prompt, found in zip(prompts, completions, strict=True)
    ]
