"""Follow a run that trains: the weights of each later checkpoint replace those that are served."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

from phalanx.checkpoint import manifest
from phalanx.comm.together import reason_of
from phalanx.errors import ConfigError
from phalanx.infer.engine_thread import EngineThread
from phalanx.infer.served import Served

LOGGER = logging.getLogger(__name__)


async def follow(run: Path, first: Path, every_s: float, thread: EngineThread) -> None:
    """Load each later checkpoint of a run than `first`; look for one every `every_s` seconds.

    One that cannot be loaded is tried again at the 2nd, 4th, 8th, ... look that finds it: memory
    may be free then, but each attempt reads the checkpoint, and requests wait for that.
    """
    last, num_looks = first, Counter[Path]()
    while True:
        await asyncio.sleep(every_s)
        try:
            found = await asyncio.to_thread(manifest.whole, run)
        except OSError as error:  # such as one of a server of files, which may come back
            LOGGER.warning("cannot look for a later checkpoint: %s", reason_of(error))
            continue
        latest = [last, *found.values()][-1]
        num_looks[latest] += 1
        is_due = num_looks[latest].bit_count() == 1
        if latest != last and is_due and await asyncio.wrap_future(thread.load(latest)):
            last = latest


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
