"""Convert the options of a serving.properties file (LMI, DJL Serving) to settings of `serve`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from phalanx.errors import ConfigError
from phalanx.storage import read_text

PRECISIONS: Final[Mapping[str, str]] = {
    **{"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "auto": "auto"},
    **{"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"},
}

WITHOUT_ROLLING: Final = ("disable", "false", "none")
"""Values of `option.rolling_batch` that select dynamic batching."""


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
        key, sign, value = (part.strip() for part in line.partition("="))
        if not sign:
            raise ConfigError(f"{path}, line {number} is {line!r:.99}; expected KEY=VALUE")
        try:
            setting = _setting(key.removeprefix("option."), value)
        except ValueError:
            raise ConfigError(f"{path}, line {number}: {key} cannot be {value!r:.99}") from None
        if setting is None:
            left_out.append(key)
        else:
            found |= setting
    return found, left_out


def _setting(key: str, value: str) -> dict[str, Any] | None:
    """Return {setting: value} for one line; None if no setting corresponds to the key."""
    if key == "rolling_batch":
        return {"batching": "dynamic" if value in WITHOUT_ROLLING else "rolling"}
    if key == "dtype":
        if value not in PRECISIONS:
            raise ValueError
        return {"precision": PRECISIONS[value]}
    if key == "tensor_parallel_degree":
        return {"strategy": f"tp{int(value)}"}
    if key == "model_id":
        return {"run": value}
    if key == "enable_prefix_caching":
        if value not in ("true", "false"):
            raise ValueError
        return {"prefix_cache": value == "true"}
    numbers = {
        "max_rolling_batch_size": "slots",
        "max_rolling_batch_prefill_tokens": "budget",
        "job_queue_size": "max_waiting",
    }
    return {numbers[key]: int(value)} if key in numbers else None
