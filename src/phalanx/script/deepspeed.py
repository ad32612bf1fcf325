"""Convert a DeepSpeed configuration to a strategy and settings, and list unsupported options.

Names and defaults follow DeepSpeed's documentation (https://www.deepspeed.ai/docs/config-json/).
Options that only tune or report are left out, and listed. Options that would change the numbers and
have no counterpart are refused. The optimizer and scheduler sections are refused, because a script
makes these objects with torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch

from phalanx.config.file import MAX_BYTES
from phalanx.errors import ConfigError
from phalanx.launch.rank_env import is_under_torchrun, read_rank_env

_REPORTS: Final = frozenset(
    "steps_per_print wall_clock_breakdown dump_state tensorboard wandb csv_monitor comet "
    "comms_logger flops_profiler memory_breakdown autotuning zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer communication_data_type prescale_gradients "
    "disable_allgather activation_checkpointing".split()
)
"""Options that report or tune; for activation checkpointing put recompute:full in the strategy."""

_ZERO_TUNING: Final = frozenset(
    "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
    "contiguous_gradients round_robin_gradients sub_group_size stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_gather_16bit_weights_on_model_save load_from_fp32_weights ignore_unused_parameters "
    "elastic_checkpoint memory_efficient_linear".split()
)
"""Options of zero_optimization that only tune."""


_READ: Final = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "zero_optimization bf16 fp16 gradient_clipping"
).split()
"""Options that have a counterpart."""


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A DeepSpeed configuration as arguments of `phalanx.init`, `run.clip` and torch.

    Attributes:
        strategy: argument of `phalanx.init`.
        accumulation: argument of `phalanx.init`.
        batch_size: argument of the DataLoader: rows of one microbatch over all ranks.
        autocast: dtype for `torch.autocast` around the forward, or None for float32.
        max_norm: argument of `run.clip`, or None for no clipping.
        left_out: options without a counterpart, which change results by rounding at most.
    """

    strategy: str
    accumulation: int
    batch_size: int
    autocast: torch.dtype | None
    max_norm: float | None
    left_out: tuple[str, ...]


def from_deepspeed(
    config: str | Path | Mapping[str, Any], num_ranks: int | None = None
) -> DeepSpeedSettings:
    """Turn a DeepSpeed configuration into a strategy and settings.

    Args:
        config: path of the file, or its content.
        num_ranks: ranks of the job; the number the job was started with if None.

    Raises:
        ConfigError: the file cannot be read, or options that change numbers have no counterpart;
            the message lists all of them.
    """
    if not isinstance(config, Mapping | str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"config is {config!r}; expected a DeepSpeed configuration, or the path of its file"
        )
    values = config if isinstance(config, Mapping) else _read(Path(config))
    if num_ranks is None:
        num_ranks = read_rank_env().num_ranks if is_under_torchrun() else 1
    problems = _problems(values)
    micro, accumulation = 1, 1
    try:
        micro, accumulation = _batch(values, num_ranks)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(f"the DeepSpeed configuration cannot be converted: {'; '.join(problems)}")
    zero = values.get("zero_optimization", {})
    left_out = [name for name in values if name in _REPORTS]
    left_out += [f"zero_optimization.{name}" for name in zero if name in _ZERO_TUNING]
    stage = zero.get("stage", 0)
    axis = f"dp{num_ranks}" if stage == 0 else f"fsdp{num_ranks}:zero{stage}"
    return DeepSpeedSettings(
        strategy=axis if num_ranks > 1 else "dp1",
        accumulation=accumulation,
        batch_size=micro * num_ranks,
        autocast=torch.bfloat16 if _asks(values.get("bf16", False)) else None,
        max_norm=float(values.get("gradient_clipping", 0.0)) or None,
        left_out=tuple(left_out),
    )


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Return a message with advice for each option that cannot be converted."""
    problems: list[str] = []
    for name, value in values.items():
        known = name in _READ or name in _REPORTS or name in ("optimizer", "scheduler")
        if not known and _asks(value):
            problems.append(f"{name} has no counterpart here: take it out, or leave it disabled")
    sections = ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler")
    for name in sections:
        if not isinstance(values.get(name, {}), Mapping):
            problems.append(f"{name} is {values[name]!r}, expected an object")
    if problems and any(not isinstance(values.get(name, {}), Mapping) for name in sections):
        return problems
    zero = values.get("zero_optimization", {})
    for name, value in zero.items():
        if name not in (*_ZERO_TUNING, "stage") and _asks(value):
            problems.append(
                f"zero_optimization.{name} has no counterpart here: take it out, or split over "
                "more ranks if it does not fit"
            )
    kept = {name: values[name] for name in _READ if name in values}
    kept["zero_optimization"] = {"stage": zero.get("stage", 0)}
    if automatic := _paths_of_auto(kept):
        has = "are" if len(automatic) > 1 else "is"
        problems.append(
            f"{', '.join(automatic)} {has} 'auto', which another program fills in: give the value"
        )
    stage = zero.get("stage", 0)
    if stage != "auto" and (type(stage) is not int or not 0 <= stage <= 3):
        problems.append(f"zero_optimization.stage is {stage!r}, expected 0, 1, 2 or 3")
    for name in ("bf16", "fp16"):
        enabled = values.get(name, {}).get("enabled", False)
        if not isinstance(enabled, bool) and enabled != "auto":
            problems.append(f"{name}.enabled is {enabled!r}, expected true or false")
    if values.get("fp16", {}).get("enabled", False) is True:
        problems.append(
            "fp16 is enabled, but only bf16 and float32 are supported: enable bf16 instead"
        )
    clipping = values.get("gradient_clipping", 0.0)
    is_number = isinstance(clipping, int | float) and not isinstance(clipping, bool)
    if clipping != "auto" and not (is_number and 0 <= clipping < math.inf):
        problems.append(f"gradient_clipping is {clipping!r}, expected a number of at least 0")
    for name, place in (("optimizer", "optim"), ("scheduler", "optim.lr_scheduler")):
        if values.get(name):
            words = f"write one of torch.{place} and leave the section out"
            problems.append(f"{name} is not read: {words}")
    return problems


def _paths_of_auto(values: Mapping[str, Any], before: str = "") -> list[str]:
    """Return the options whose value is "auto", with dotted names inside sections."""
    found: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _paths_of_auto(cast("Mapping[str, Any]", value), f"{before}{name}.")
        elif value == "auto":
            found.append(f"{before}{name}")
    return found


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():  # reading a named pipe would block, and a device has no end
        raise ConfigError(f"there is no file {path}; expected a DeepSpeed configuration")
    if (num_bytes := path.stat().st_size) > MAX_BYTES:
        raise ConfigError(f"{path} has {num_bytes:,} bytes; expected a DeepSpeed configuration")
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; expected a JSON object")
    return values


def _asks(value: Any) -> bool:
    """Return whether the value of an option enables it: neither empty, false nor disabled."""
    if isinstance(value, Mapping):
        if "enabled" in value:
            return bool(value["enabled"])
        return bool(value) and value.get("device") != "none"
    return bool(value)


def _batch(values: Mapping[str, Any], num_ranks: int) -> tuple[int, int]:
    """Return microbatch rows per rank, and accumulation; batch = rows x accumulation x ranks."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    numbers = [None if values.get(name) == "auto" else values.get(name) for name in names]
    for name, value in zip(names, numbers, strict=True):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
    whole, micro, times = numbers
    if whole is None and micro is None and "auto" in map(values.get, names):
        return 1, 1  # `_problems` reports "auto" values
    if whole is None and micro is None:
        raise ConfigError(
            f"neither {names[0]} nor {names[1]} is given; expected at least one, as DeepSpeed "
            "requires"
        )
    if times is None:
        times = 1 if whole is None or micro is None else max(1, whole // micro // num_ranks)
    if micro is None:
        micro = max(1, (whole or 1) // num_ranks // times)
    if whole is not None and whole != micro * times * num_ranks:
        raise ConfigError(
            f"train_batch_size is {whole}, but {micro} rows a microbatch x {times} microbatches x "
            f"{num_ranks} ranks are {micro * times * num_ranks}; set train_batch_size to this "
            "product"
        )
    return micro, times
