"""Follow a run that trains: the weights of each later checkpoint replace those that are served."""

from __future__ import annotations

import asyncio
from pathlib import Path

from phalanx.checkpoint import manifest
from phalanx.errors import ConfigError
from phalanx.infer.engine_thread import EngineThread
from phalanx.infer.served import Served


async def follow(run: Path, first: Path, every_s: float, thread: EngineThread) -> None:
    """Load each later checkpoint of a run than `first`; look for one every `every_s` seconds.

    One that cannot be loaded is tried again at the next look, unless a later one is there.
    """
    last = first
    while True:
        await asyncio.sleep(every_s)
        found = list((await asyncio.to_thread(manifest.whole, run)).values())
        if found and found[-1] != last:
            if await asyncio.wrap_future(thread.load(found[-1])):
                last = found[-1]


def run_to_follow(served: Served) -> Path:
    """Return the run folder whose checkpoint is served.

    Raises:
        ConfigError: the weights are of no run.
    """
    run = manifest.run_of(served.weights.folder)
    if run is None:
        raise ConfigError(
            f"follow is set, but {served.weights.folder} is no checkpoint of a run folder, in "
            "which later ones would appear"
        )
    return run
