"""The calibration file, which stores the measured rates and links of a machine.

`phalanx bench ceiling` and `phalanx bench comm` write it; calibration.py builds a cluster from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

from phalanx.checkpoint.untrusted import decode
from phalanx.errors import ConfigError
from phalanx.planner.machine import ARITHMETICS, Core, Level
from phalanx.storage import read_text, replace_file

THIS: Final = "this"
"""Name of this machine, and of its calibration file in the user's cache folder."""

FORMAT: Final = 1
FILE_NAME: Final = "calibration.json"

_MAY_BE_ZERO: Final = ("latency_s", "turn_s", "crowd")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Measured rates of one GPU or one core.

    Attributes:
        best: FLOP/s of the fastest matrix product, by data type.
        sustained: FLOP/s at the product size with the highest median rate, by data type.
        bandwidth: memory bandwidth, bytes/s read plus written.
        core: rates of a CPU core in training; None for a GPU.
    """

    best: Mapping[str, float]
    sustained: Mapping[str, float]
    bandwidth: float
    memory_bytes: float
    date: str
    core: Core | None = None
    source: str = "measured on this machine"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of a machine.

    Attributes:
        kind: "gpu" or "cpu".
        device_name: name that the driver or the system reports.
        num_here: number of GPUs or cores of one host.
        num_hosts: number of hosts over which the links were measured.
        compute: measured rates; None before `phalanx bench ceiling`.
        levels: measured links, innermost level first; empty before `phalanx bench comm`.
        conditions: version of torch and instructions of the CPU.
    """

    kind: Literal["gpu", "cpu"]
    device_name: str
    num_here: int
    num_hosts: int = 1
    compute: Compute | None = None
    levels: tuple[Level, ...] = field(default=())
    conditions: str = ""

    def is_whole(self, num_ranks: int) -> bool:
        """Return whether the rates and links of a job of `num_ranks` were measured."""
        is_timed = self.compute is not None and (
            self.kind == "gpu" or self.compute.core is not None
        )
        return is_timed and (num_ranks == 1 or bool(self.levels))

    def filled(self, other: Calibration | None) -> Calibration:
        """Return this calibration; what it lacks is from `other`."""
        if other is None:
            return self
        compute, levels = self.compute or other.compute, self.levels or other.levels
        return dataclasses.replace(self, compute=compute, levels=levels)


def path_of(name: str) -> Path:
    """Return the path of the calibration file `name`: `this` in the cache folder, or any path.

    Raises:
        ConfigError: the name is neither `this` nor ends in .json.
    """
    if name == THIS:
        from phalanx.data.cache import cache_folder

        return cache_folder(None) / FILE_NAME
    if not name.endswith(".json"):
        raise ConfigError(
            f"{name!r} is not a calibration file; expected '{THIS}', for this machine, or a "
            f"name such as {name or 'cluster'}.json"
        )
    return Path(name)


def keep(path: Path, machine: Calibration) -> None:
    """Write a calibration; merge it with the file's other measurements of the same machine."""
    if path.exists():
        before = read(path)
        if (before.kind, before.device_name) == (machine.kind, machine.device_name):
            compute, earlier = machine.compute, before.compute
            if compute and earlier:  # rates of further data types
                core = compute.core
                if core and earlier.core:
                    products = {**earlier.core.products, **core.products}
                    attention = {**earlier.core.attention, **core.attention}
                    core = dataclasses.replace(core, products=products, attention=attention)
                best = {**earlier.best, **compute.best}
                sustained = {**earlier.sustained, **compute.sustained}
                compute = dataclasses.replace(compute, best=best, sustained=sustained, core=core)
            linked = machine if machine.levels else before
            machine = dataclasses.replace(
                machine,
                compute=compute or earlier,
                levels=linked.levels,
                num_hosts=linked.num_hosts,
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, **dataclasses.asdict(machine)}
    replace_file(path, f"{json.dumps(document, indent=1)}\n".encode())


def read(path: Path) -> Calibration:
    """Read a calibration file.

    Raises:
        ConfigError: the file does not exist, or is no calibration of this version.
    """
    if not path.exists():
        advice = "phalanx bench comm --write creates one"
        raise ConfigError(f"{path}: there is no such file; {advice}")
    text = read_text(path)
    try:
        document: dict[str, Any] = json.loads(text)
        if document.pop("format") != FORMAT:
            raise ValueError("unknown format")
        machine: Calibration = decode(Calibration, document, "the file")
        _check(machine, "the file")
        if (compute := machine.compute) is not None:
            if {*compute.best} != {*compute.sustained} or not {*compute.best} & {*ARITHMETICS}:
                best, sustained = [*compute.best], [*compute.sustained]
                raise ValueError(f"best has rates of {best}, sustained {sustained}")
            if compute.core is not None and not (compute.core.products and compute.core.attention):
                raise ValueError("core has no rates")
            if not compute.date[:4].isdecimal():
                raise ValueError(f"date is {compute.date!r}")
        return machine
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a calibration of this version ({type(error).__name__}: {error}); "
            "delete it, and write a new one with phalanx bench ceiling and bench comm, with --write"
        ) from None


def _check(value: Any, name: str) -> None:
    """Check the numbers inside `value`: finite, and above 0 or, if in `_MAY_BE_ZERO`, not below.

    Raises:
        ValueError: a number is out of range; the message names its field.
    """
    if dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            _check(getattr(value, each.name), each.name)
    elif isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            _check(inner, f"{name} of {key}")
    elif isinstance(value, tuple):
        for inner in cast("tuple[Any, ...]", value):
            _check(inner, name)
    elif isinstance(value, int | float):
        if not (math.isfinite(value) and (value > 0 or (value == 0 and name in _MAY_BE_ZERO))):
            raise ValueError(f"{name} is {value!r}")
