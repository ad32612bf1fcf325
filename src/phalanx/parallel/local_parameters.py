"""Run the forward of a module on this rank's shards of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from phalanx.comm.comm import local_shard


@contextmanager
def local_parameters(
    module: nn.Module, convert: Callable[[Tensor], Tensor] = lambda shard: shard
) -> Generator[None]:
    """Replace the parameters of a module and its submodules by `convert` of their local shards."""
    # The private dict, because setattr of a parameter's name accepts only an nn.Parameter.
    homes: list[dict[str, Any]] = [
        inner._parameters  # pyright: ignore[reportPrivateUsage]
        for inner in module.modules()
    ]
    before = [dict(home) for home in homes]
    try:
        for home in homes:
            shards = {name: local_shard(p) for name, p in home.items() if p is not None}
            home.update({name: convert(shard) for name, shard in shards.items()})
        yield
    finally:
        for home, parameters in zip(homes, before, strict=True):
            home.update(parameters)
