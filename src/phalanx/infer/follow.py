"""Follow a run during training: serve the weights of each new checkpoint."""

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
    """Load each checkpoint of `run` that is later than `first`; poll every `every_s` seconds.

    A checkpoint that fails to load is retried at the 2nd, 4th, 8th, ... poll that finds it. Memory
    may be free by then, but each attempt reads the checkpoint and delays requests.
    """
    last, num_looks = first, Counter[Path]()
    while True:
        await asyncio.sleep(every_s)
        try:
            found = await asyncio.to_thread(manifest.complete_checkpoints, run)
        except OSError as error:  # such as a network file system's, which may recover
            LOGGER.warning("cannot look for a later checkpoint: %s", reason_of(error))
            continue
        latest = [last, *found.values()][-1]
        num_looks[latest] += 1
        is_due = num_looks[latest].bit_count() == 1
        if latest != last and is_due and await asyncio.wrap_future(thread.load(latest)):
            last = latest


def run_to_follow(served: Served) -> Path:
    """Return the run folder that contains the served checkpoint.

    Raises:
        ConfigError: the weights are not a checkpoint of a run.
    """
    run = manifest.run_of(served.weights.folder)
    if run is None:
        raise ConfigError(
            f"follow is set, but {served.weights.folder} is not a checkpoint of a run "
            "folder, where later checkpoints would appear"
        )
    return run
