"""Convert weights between a Hugging Face folder and a checkpoint, in both directions.

Weights are read and written one tensor at a time, in the order of the table in names.py, so that
only the current tensor and its parts are in memory (GPT-2's c_attn has three parts; the experts of
a block are one tensor a projection). The result is written under a temporary name and renamed when
complete. `decoder_of` converts a transformers model in memory to a decoder in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from phalanx.checkpoint import index, manifest, tensor_file
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.sharding import Sharding, WritePlan, file_of
from phalanx.checkpoint.tensor_file import TensorInfo
from phalanx.checkpoint.untrusted import brief, read_json
from phalanx.checkpoint.weights import Weights, open_checkpoint, sizes_of
from phalanx.data.survey import Progress, no_progress
from phalanx.errors import CheckpointError, ConfigError
from phalanx.hugging_face import folder as folders
from phalanx.hugging_face import peft_folder
from phalanx.hugging_face.companions import (
    ORIGIN,
    copy_companions,
    family_in,
    ids_of,
    is_of_run,
    keep_origin,
    prepend_separator,
    write_missing,
)
from phalanx.hugging_face.config import config_to_hf, shape_from_hf
from phalanx.hugging_face.families import families_of, family_of
from phalanx.hugging_face.folder import TensorFiles
from phalanx.hugging_face.names import TheirTensor, reader, table
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.object_store import address_of, fetch
from phalanx.storage import check_free, checksum, hint_of_missing, published

Kind = Literal["hugging face", "phalanx", "peft"]

MAX_SHARD_BYTES: Final = 5 * 10**9


@dataclass(frozen=True)
class Converted:
    """Result of a conversion; `kind` and `family` describe the files written.

    If the source was a run, `source` is the checkpoint that was read. `companions` are the files
    written besides the weights and config.json: copied, or generated for the tokenizer.
    """

    source: Path
    destination: Path
    kind: Kind
    family: str
    dtype: str
    num_tensors: int
    num_bytes: int
    companions: list[str]


def convert(
    source: Path,
    destination: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    family: str | None = None,
    base: Path | None = None,
    progress: Progress = no_progress,
) -> Converted:
    """Convert a Hugging Face folder to a checkpoint without optimizer state, or the reverse.

    Adapters are merged into the weights of their base, and become a Hugging Face folder.

    Args:
        source: a Hugging Face folder, PEFT's, a checkpoint, or a run, whose latest one is read.
        destination: a folder that is absent or empty.
        dtype: dtype of the tensors to write.
        max_shard_bytes: largest size of a safetensors file, unless one tensor is larger.
        family: model type to write if several compute the shape; if None, the type that the
            weights came from, else the first.
        base: folder of the weights that adapters belong to; if None, the one that they name.
        progress: callback before each tensor, and at the end.

    Raises:
        CheckpointError: the source is missing, damaged, incomplete or of an unknown kind; or the
            destination cannot be written. No partial destination is left.
        ConfigError: the target format does not support the model, or the destination is not empty.
    """
    # 1. Open the source and check names and sizes of all tensors, before anything is written.
    # 2. Copy the files beside the weights; read, cast and write one tensor after another.
    # 3. Rename the folder when it is complete; a failure removes the partial one.
    kind = kind_of(source)
    check_free(source, destination)
    weights, family = _open(source, base, family)
    read = _Reader(weights, dtype, progress)
    with published(destination, read.num_bytes) as partial:
        companions = copy_companions(weights.folder, partial)
        if kind == "hugging face":
            keep_origin(family, ids_of(source), partial)
            kept = [*companions, ORIGIN]
            num_tensors = _write_checkpoint(partial, weights.shape, read, kept)
        else:
            num_tensors, generated = _write_hugging_face(
                partial, weights, family, read, max_shard_bytes
            )
            companions = sorted([*companions, *generated])
    progress("convert", read.num_bytes, read.num_bytes)
    return Converted(
        source=source if kind == "peft" else weights.folder,
        destination=destination,
        kind="phalanx" if kind == "hugging face" else "hugging face",
        family=family,
        dtype=_name(dtype),
        num_tensors=num_tensors,
        num_bytes=read.num_bytes,
        companions=companions,
    )


def kind_of(source: Path) -> Kind:
    """Return whether a folder is a Hugging Face model, PEFT's, or a checkpoint or run of Phalanx.

    Raises:
        CheckpointError: it does not exist, is not a folder, or is neither.
    """
    if address_of(source) is not None and not manifest.complete_checkpoints(source):
        fetch(source / manifest.NAME)
    if not source.exists():
        raise CheckpointError(f"{source} does not exist{hint_of_missing(source)}")
    if not source.is_dir():
        raise CheckpointError(f"{source} is a file; expected the folder it is in: {source.parent}")
    if folders.is_hugging_face(source):  # even if it has a manifest.json too
        return "hugging face"
    if (source / peft_folder.CONFIG).is_file():
        return "peft"
    if (source / manifest.NAME).exists() or (manifest.run_folder(source) / "checkpoints").is_dir():
        return "phalanx"
    raise CheckpointError(
        f"{source} is neither a Hugging Face folder ({folders.CONFIG} and *.safetensors) nor "
        f"adapters of PEFT ({peft_folder.CONFIG}) nor "
        f"a checkpoint ({manifest.NAME}) nor a run (checkpoints/step-*)"
    )


def open_hugging_face(folder: Path) -> Weights:
    """Open a Hugging Face folder, and check that each tensor exists and has the expected size.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, unexpected or of the wrong size.
        ConfigError: its config.json describes a model that Decoder does not support.
    """
    config = folders.read_config(folder)
    try:
        shape = shape_from_hf(config)
    except ConfigError as error:
        raise ConfigError(f"{folder / folders.CONFIG}: {error}") from error
    tensors = TensorFiles(folder)
    try:
        read = reader(shape, config["model_type"], tensors.sizes, tensors.read)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return Weights(folder, shape, read)


def open_weights(source: Path, base: Path | None = None) -> Weights:
    """Open all weights in a folder of any kind; adapters are added to the weights of their base.

    Args:
        source: a Hugging Face folder, PEFT's, a checkpoint, or a run, whose latest one is opened.
        base: folder of the weights that adapters belong to; if None, the one that they name.

    Raises:
        CheckpointError: a folder is damaged, or the base has changed since the adapters were saved.
        ConfigError: a config.json describes a model that Decoder does not support.
    """
    kind = kind_of(source)
    if kind == "hugging face":
        return open_hugging_face(source)
    if kind == "phalanx":
        weights = open_checkpoint(source)
        if weights.base is None:
            return weights
        folder, expected = weights.base
        below = open_weights(base or Path(folder))
        if (actual := checksum_of(below.folder)) != expected:
            raise CheckpointError(
                f"{weights.folder} has adapters of {folder}, whose sha256 was {expected:.12}; it "
                f"is {actual:.12} now: the weights have changed"
            )
        return peft_folder.merged(below, peft_folder.adapters_in(weights), weights.folder)
    named = read_json(source / peft_folder.CONFIG).get("base_model_name_or_path")
    if base is None and not (isinstance(named, str) and Path(named).is_dir()):
        raise CheckpointError(
            f"{source} has adapters of {brief(named)}, which is no folder here; convert takes the "
            "folder of the base by --base"
        )
    below = open_weights(base or Path(str(named)))
    return peft_folder.merged(below, read_adapters(source, below), below.folder)


def read_adapters(source: Path, base: Weights) -> peft_folder.Adapters:
    """Read the adapters of `base` in a folder of PEFT, a run with adapters or its checkpoint.

    Raises:
        CheckpointError: it has none, is damaged, or is of another model.
    """
    if kind_of(source) == "peft":
        return peft_folder.read_peft(source, base.shape, names_of(base))
    weights = open_checkpoint(source) if kind_of(source) == "phalanx" else None
    if weights is None or weights.base is None:
        raise CheckpointError(f"{source} has no adapters; expected {peft_folder.CONFIG} of PEFT")
    if _as_evaluated(weights.shape) != _as_evaluated(base.shape):
        raise CheckpointError(f"{source} has adapters of a model of another shape")
    return peft_folder.adapters_in(weights)


def _as_evaluated(shape: ModelShape) -> ModelShape:
    """Return the shape without adapters and without what acts in training alone."""
    experts = shape.experts and shape.experts.as_evaluated
    return dataclasses.replace(shape, lora=None, dropout=0.0, experts=experts)


def names_of(weights: Weights) -> str:
    """Return the model type whose names the adapters of these weights have."""
    if folders.is_hugging_face(weights.folder):
        return str(folders.read_config(weights.folder)["model_type"])
    before = family_in(weights.folder)
    return before if before in families_of(weights.shape) else family_of(weights.shape)


def checksum_of(folder: Path) -> str:
    """Return the sha256 of the weights and the shape in a Hugging Face folder or a checkpoint."""
    if folders.is_hugging_face(folder):
        files = [folder / folders.CONFIG, *folders.weight_files(folder)]
        content: Any = [(file.name, checksum(file.resolve())) for file in files]
    else:
        about = manifest.read(folder)
        content = [about.files, about.shape, about.state.get("base")]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_checkpoint(
    folder: Path,
    shape: ModelShape,
    read: _Reader,
    companions: list[str],
) -> int:
    """Write a checkpoint without optimizer state; return the number of its tensors."""
    sizes = sizes_of(shape)
    tensors = {f"model.{n}": Sharding(tuple(s), read.dtype_of(n)) for n, s in sizes.items()}
    plan = WritePlan(tensors, 1)
    infos, file = plan.writes_of(0), file_of(0)
    pieces = (read(name.removeprefix("model.")) for name in infos)
    checksums = {file: tensor_file.write(folder / file, infos, pieces)}
    checksums[index.NAME] = index.write(folder, plan)
    about = Manifest(
        steps_done=0,
        num_steps=0,
        consumed=0,
        num_ranks=1,
        strategy="dp1",
        shape=dataclasses.asdict(shape),
        stream={},
        has_optimizer=False,
        files=checksums | {name: checksum(folder / name) for name in companions},
    )
    manifest.write(folder, about)
    return len(sizes)


def _write_hugging_face(
    folder: Path, weights: Weights, family: str, read: _Reader, max_shard_bytes: int
) -> tuple[int, list[str]]:
    """Write a Hugging Face folder; return the number of tensors, and the generated companions."""
    shape, ids = weights.shape, ids_of(weights.folder)
    # In their order and under their names; one of theirs may join three of ours, read only then.
    # The experts of a projection are read once: their tensors follow one another.
    links = {link.theirs: link for link in table(shape, family)}
    sizes = sizes_of(shape)
    held: dict[str, Tensor] = {}

    def parts(link: TheirTensor) -> list[Tensor]:
        if link.expert is None:
            return [read(name) for name in link.ours]
        if not held.keys() >= set(link.ours):
            held.clear()  # before the next are read
            held.update((name, read(name)) for name in link.ours)
        return [held[name] for name in link.ours]

    folders.write_folder(
        folder,
        config_to_hf(shape, _name(read.dtype), family, ids),
        {
            name: TensorInfo(read.dtype_of(link.ours[0]), tuple(link.join_sizes(sizes)))
            for name, link in links.items()
        },
        lambda name: links[name].join(parts(links[name])),
        max_shard_bytes,
    )
    generated = write_missing(folder, ids, shape.max_seq_len)
    if is_of_run(weights.folder) and isinstance(separator := ids["bos_token_id"], int):
        prepend_separator(folder, separator)
    return len(links), generated


def _open(source: Path, base: Path | None, family: str | None) -> tuple[Weights, str]:
    """Return the weights of a folder, and their family, or the family to write them as.

    If several families compute the shape, it is `family` if given, else the family of the origin,
    else the first.
    """
    weights = open_weights(source, base)
    # The family of the origin, unless the shape was changed to one that it cannot compute.
    return weights, names_of(weights) if family is None else family_of(weights.shape, family)


class _Reader:
    """Reads weights by name, casts them to a dtype, and reports the progress."""

    def __init__(self, weights: Weights, dtype: torch.dtype, progress: Progress) -> None:
        self._weights, self.dtype, self._progress = weights, dtype, progress
        self._done_bytes = 0
        sizes = sizes_of(weights.shape).values()
        self.num_bytes = dtype.itemsize * sum(size.numel() for size in sizes)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a weight: `dtype`, but of a router's bias at least float32."""
        is_wide = name.endswith("router.bias")
        return torch.promote_types(self.dtype, torch.float32) if is_wide else self.dtype

    def __call__(self, name: str) -> Tensor:
        """Return a weight in its dtype; raise CheckpointError if a value overflows float16."""
        self._progress("convert", self._done_bytes, self.num_bytes)
        tensor = self._weights.read(name)
        cast = tensor.to(self.dtype_of(name))
        if self.dtype == torch.float16 and bool((cast.isinf() & tensor.isfinite()).any()):
            raise CheckpointError(
                f"'{name}' has values up to {float(tensor.abs().max()):g}, but float16 has "
                f"at most {torch.finfo(self.dtype).max:g}; use --dtype bfloat16 or float32"
            )
        self._done_bytes += cast.nbytes
        return cast


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decoder_of(model: nn.Module) -> Decoder:
    """Return a `Decoder` with the weights of a causal language model of transformers.

    The weights are copied, and keep their dtypes; `phalanx convert` exports a trained run.

    Args:
        model: for example `LlamaForCausalLM(config)`, complete on one device.

    Raises:
        ConfigError: its config has a model type or option that Decoder does not support.
        CheckpointError: its tensors do not match its config.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ConfigError(
            f"decoder_of takes a model of transformers, not a {type(model).__name__}; expected one "
            "such as LlamaForCausalLM"
        )
    shape = shape_from_hf(config.to_dict())
    tensors = model.state_dict()
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    read = reader(shape, config.model_type, sizes, tensors.__getitem__)
    with torch.device("meta"):
        decoder = Decoder(shape)
    weights = {name: read(name).detach().clone() for name in sizes_of(shape)}
    decoder.load_state_dict(weights, assign=True)
    return decoder
