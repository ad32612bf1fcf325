"""Where `GlobalSampler` was: a name that goes with the next release."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "GlobalSampler":
        raise ImportError("GlobalSampler is gone: run.prepare(loader) deals a DataLoader's batches")
    raise AttributeError(name)
