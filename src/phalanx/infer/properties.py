"""Convert the options of a serving.properties file (LMI, DJL Serving) to settings of `serve`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from phalanx.errors import ConfigError
from phalanx.storage import read_text

CHOICES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "rolling_batch": (
        "batching",
        {
            **dict.fromkeys(("auto", "vllm", "lmi-dist", "trtllm", "scheduler"), "rolling"),
            **dict.fromkeys(("disable", "false", "none"), "dynamic"),
        },
    ),
    "dtype": (
        "precision",
        {
            **{"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "auto": "auto"},
            **{"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"},
        },
    ),
    "enable_prefix_caching": ("prefix_cache", {"true": True, "false": False}),
}
"""Key -> setting, and setting for each legal value."""

NUMBERS: Final = {
    "max_rolling_batch_size": "slots",
    "max_rolling_batch_prefill_tokens": "budget",
    "job_queue_size": "max_waiting",
}
"""Key -> setting that is the same number."""

TEXTS: Final = {"model_id": "run", "served_model_name": "served_model_name"}
"""Key -> setting that is the same text."""


def read_properties(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a file, setting name -> value, and the keys that are ignored.

    Raises:
        ConfigError: the file cannot be read, or a value is invalid for its key.
    """
    lines = read_text(path).splitlines()
    found: dict[str, Any] = {}
    left_out: list[str] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line[0] in "#!":
            continue
        if (parts := re.fullmatch(r"([^=:\s]+)\s*[=:\s]\s*(.*)", line)) is None:
            raise ConfigError(f"{path}, line {number} is {line!r:.99}; expected KEY=VALUE")
        key, value = parts.groups()
        try:
            setting = _setting(key.removeprefix("option."), value)
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number}: {key} cannot be {value!r:.99}; expected {error}"
            ) from None
        if setting is None:
            left_out.append(key)
        else:
            found |= setting
    return found, left_out


def _setting(key: str, value: str) -> dict[str, Any] | None:
    """Return {setting: value} for one line; None if no setting corresponds to the key.

    Raises:
        ValueError: the value is invalid; the message names the valid values.
    """
    if key in CHOICES:
        setting, values = CHOICES[key]
        if value not in values:
            raise ValueError(", ".join(values))
        return {setting: values[value]}
    if key in TEXTS:
        return {TEXTS[key]: value}
    if key == "tensor_parallel_degree" and value == "max":
        import torch

        return {"strategy": f"tp{max(torch.cuda.device_count(), 1)}"}
    if key not in NUMBERS and key != "tensor_parallel_degree":
        return None
    if re.fullmatch("-?[0-9]{1,18}", value) is None:
        raise ValueError("a whole number")
    return {NUMBERS[key]: int(value)} if key in NUMBERS else {"strategy": f"tp{int(value)}"}
