"""`phalanx convert SRC DST`: weights from and to the Hugging Face layout."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.text import Text

from phalanx.cli.screen import Preparation, print_json, screen
from phalanx.config_load import read_command_line
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from phalanx.hugging_face.compare import Agreement
    from phalanx.hugging_face.convert import Converted


SRC = tyro.conf.arg(
    metavar="SRC",
    help_behavior_hint="(required)",
    help="What to read. A Hugging Face folder (config.json, *.safetensors) of Llama, Qwen3 or "
    "GPT-2 becomes a checkpoint of weights alone, for phalanx train --init. A checkpoint, or a run "
    "folder, whose latest checkpoint is taken, becomes a folder that from_pretrained loads. A "
    "tokenizer beside the weights is copied along.",
)
DST = tyro.conf.arg(
    metavar="DST",
    help_behavior_hint="(required)",
    help="The folder to write: a new one, or an empty one.",
)
CHECK = tyro.conf.arg(
    help="Afterwards load both sides whole, compare the logits of transformers' model with those "
    "of ours on random tokens, and exit with 1 if they do not agree."
)
DTYPE = tyro.conf.arg(
    help="Data type to write. float32 keeps float16 and bfloat16 exactly. Weights in a checkpoint "
    "become float32 again when training begins, whatever they were written in."
)


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Convert weights from the Hugging Face layout to a checkpoint, or back: SRC says which."""

    source: Annotated[str, tyro.conf.Positional, SRC] = ""
    destination: Annotated[str, tyro.conf.Positional, DST] = ""
    check: Annotated[bool, tyro.conf.FlagCreatePairsOff, CHECK] = False
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], DTYPE] = "float32"
    max_shard_gb: float | None = None
    """Largest file of a Hugging Face folder, in 1e9 bytes; 5 if unset."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Make the last line of standard output one JSON document."""


def run(argv: list[str]) -> int:
    """Convert as the command line says; 1 if the check finds that the sides do not agree."""
    config = read_command_line(argv, ConvertConfig(), prog="phalanx convert")
    _check(config)
    from phalanx.hugging_face.compare import require_transformers

    if config.check:
        require_transformers()
    console = screen()
    begin_s = time.perf_counter()
    with Preparation(console) as preparation:
        converted = _convert(config, preparation)
    took_s = time.perf_counter() - begin_s
    agreement = _agreement(converted) if config.check else None
    if agreement is not None:
        style = "green" if agreement.is_within else "bold red"
        console.print(Text(f"checked: {agreement}", style=style), soft_wrap=True)
    console.print(Text(_closing(converted, took_s)), soft_wrap=True)
    if config.json:
        print_json(_document(converted, agreement, took_s))
    return 0 if agreement is None or agreement.is_within else 1


def _check(config: ConvertConfig) -> None:
    """Refuse what can be judged from the words alone.

    Raises:
        ConfigError: a folder is not given, or the size of a shard is no size.
    """
    if not config.source or not config.destination:
        missing = "DST is" if config.source else "SRC and DST are"
        raise ConfigError(f"{missing} missing; expected: phalanx convert SRC DST")
    size_gb = config.max_shard_gb
    if size_gb is not None and not 0 < size_gb < math.inf:
        raise ConfigError(f"max_shard_gb is {size_gb}; expected more than 0 and finite")


def _convert(config: ConvertConfig, preparation: Preparation) -> Converted:
    """Convert, with a bar on a terminal.

    Raises:
        ConfigError: the size of a shard is given for a checkpoint, which has none.
    """
    from phalanx.hugging_face.convert import MAX_SHARD_BYTES, convert, kind_of

    source, max_shard_bytes = Path(config.source), MAX_SHARD_BYTES
    if config.max_shard_gb is not None:
        if kind_of(source) == "hugging face":
            raise ConfigError(
                f"max_shard_gb is {config.max_shard_gb:g}, but {source} becomes a checkpoint, "
                "which has no shards; leave it out"
            )
        max_shard_bytes = round(config.max_shard_gb * 1e9)
    return convert(
        source,
        Path(config.destination),
        dtype=_dtype(config.dtype),
        max_shard_bytes=max_shard_bytes,
        progress=preparation.report,
    )


def _agreement(converted: Converted) -> Agreement:
    from phalanx.checkpoint.weights import open_checkpoint
    from phalanx.hugging_face.compare import compare_logits

    ours, theirs = converted.source, converted.destination
    if converted.kind == "phalanx":
        ours, theirs = theirs, ours
    return compare_logits(open_checkpoint(ours), theirs, converted.dtype)


def _dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)


def _closing(converted: Converted, took_s: float) -> str:
    what = "a checkpoint of weights" if converted.kind == "phalanx" else "a Hugging Face folder"
    copied = f", with {', '.join(converted.companions)}" if converted.companions else ""
    return (
        f"wrote {converted.destination}: {what} ({converted.family}), {converted.num_tensors} "
        f"tensors, {converted.num_bytes:,} bytes of {_name(converted)}, in {took_s:.1f} s"
        f"{copied}"
    )


def _document(converted: Converted, agreement: Agreement | None, took_s: float) -> dict[str, Any]:
    return {
        "source": str(converted.source),
        "destination": str(converted.destination),
        "kind": converted.kind,
        "family": converted.family,
        "dtype": _name(converted),
        "num_tensors": converted.num_tensors,
        "num_bytes": converted.num_bytes,
        "companions": converted.companions,
        "took_s": took_s,
        "check": None
        if agreement is None
        else {
            "agrees": agreement.is_within,
            "largest_difference": agreement.largest_difference,
            "largest_logit": agreement.largest_logit,
            "num_tokens": agreement.num_rows * agreement.length,
        },
    }


def _name(converted: Converted) -> str:
    return str(converted.dtype).removeprefix("torch.")
