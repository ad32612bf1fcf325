"""`phalanx convert SRC DST`: convert weights from or to the Hugging Face layout."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Positional, Range
from phalanx.errors import ConfigError
from phalanx.object_store import path_of
from phalanx.report.output import print_json
from phalanx.report.terminal import Preparation, Terminal

if TYPE_CHECKING:
    from phalanx.hugging_face.convert import Converted


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Convert weights from the Hugging Face layout to a checkpoint, or back: SRC says which."""

    source: Annotated[str | None, Positional("SRC")] = None
    """What to read. A Hugging Face folder (config.json, *.safetensors) becomes a checkpoint of
    weights alone, for phalanx train --init. A checkpoint, or a run folder, whose latest checkpoint
    is taken, becomes a folder that from_pretrained loads, with its adapters merged, if it has any;
    so do the adapters of a folder of PEFT. A tokenizer beside the weights is copied along."""
    destination: Annotated[str | None, Positional("DST")] = None
    """The folder to write: a new one, or an empty one."""
    check: bool = False
    """Afterwards load both sides whole, compare the logits of transformers' model with
    ours on random tokens, and exit with 1 if they do not agree."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type to write. float32 keeps float16 and bfloat16 exactly. Weights in a checkpoint
    become float32 again when training begins, whatever they were written in."""
    family: str | None = None
    """Model type of the Hugging Face folder to write, such as llama or phi3. Default: the
    original type, else the first that computes the weights."""
    base: str | None = None
    """Folder of the weights that adapters in SRC belong to; if unset, the one that SRC names."""
    max_shard_gb: Annotated[float | None, Range(0, 10**6, "(]")] = None
    """Largest file of a Hugging Face folder, in 1e9 bytes; 5 if unset."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


def run(argv: list[str]) -> int:
    """Run `phalanx convert`; return 1 if --check finds that the logits differ, else 0.

    Raises:
        ConfigError: SRC or DST is missing, or an option does not fit.
    """
    config = read_command_line(argv, ConvertConfig, prog="phalanx convert")
    if config.source is None or config.destination is None:
        missing = "SRC and DST are" if config.source is None else "DST is"
        raise ConfigError(f"{missing} missing; expected: phalanx convert SRC DST")
    import torch

    from phalanx.hugging_face.compare import compare_logits, require_transformers
    from phalanx.hugging_face.convert import open_weights

    if config.check:
        require_transformers()
    terminal = Terminal()
    begin_s = time.perf_counter()
    with Preparation(terminal) as preparation:
        converted = _convert(config, path_of(config.source), Path(config.destination), preparation)
    took_s = time.perf_counter() - begin_s
    base = None if config.base is None else path_of(config.base)
    agreement, check = None, None
    if config.check:
        ours, theirs = converted.source, converted.destination
        if converted.kind == "phalanx":
            ours, theirs = theirs, ours
        dtype = getattr(torch, converted.dtype)
        agreement = compare_logits(open_weights(ours, base), theirs, dtype)
        check = {
            "agrees": agreement.is_within,
            "largest_difference": agreement.largest_difference,
            "largest_logit": agreement.largest_logit,
            "num_tokens": agreement.num_rows * agreement.length,
        }
        style = "green" if agreement.is_within else "bold red"
        terminal.say(f"checked: {agreement}", style)
    what = "a checkpoint of weights" if converted.kind == "phalanx" else "a Hugging Face folder"
    copied = f", with {', '.join(converted.companions)}" if converted.companions else ""
    terminal.say(
        f"wrote {converted.destination}: {what} ({converted.family}), {converted.num_tensors} "
        f"tensors, {converted.num_bytes:,} bytes of {converted.dtype}, in {took_s:.1f} s{copied}",
    )
    if config.json:
        folders = {"source": str(converted.source), "destination": str(converted.destination)}
        result = {**dataclasses.asdict(converted), **folders, "took_s": took_s, "check": check}
        print_json(result)
    return 0 if agreement is None or agreement.is_within else 1


def _convert(
    config: ConvertConfig, source: Path, destination: Path, preparation: Preparation
) -> Converted:
    """Convert the weights, with a progress bar on a terminal."""
    import torch

    from phalanx.hugging_face.convert import MAX_SHARD_BYTES, convert, kind_of

    size_gb = config.max_shard_gb
    if kind_of(source) == "hugging face":
        if size_gb is not None:
            raise ConfigError(
                f"max_shard_gb is {size_gb:g}, but {source} is converted to a checkpoint, which "
                "has no shards; leave max_shard_gb out"
            )
        if config.family is not None:
            raise ConfigError(
                f"family is {config.family}, but {source} is converted to a checkpoint, whose "
                "family is read from config.json; leave family out"
            )
    return convert(
        source,
        destination,
        dtype=getattr(torch, config.dtype),
        max_shard_bytes=MAX_SHARD_BYTES if size_gb is None else round(size_gb * 1e9),
        family=config.family,
        base=None if config.base is None else path_of(config.base),
        progress=preparation.report,
    )
