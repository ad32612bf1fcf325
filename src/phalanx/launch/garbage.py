"""How often Python looks for garbage in all objects: rarely while modules are imported.

Python starts such a full collection when the number of objects has grown by a quarter. Five start
while torch and the code for training are imported; they free next to nothing, and take a sixth of
the time (benchmarks/startup). Collections of new objects continue as usual.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_IN_START_UP = (*_USUAL[:2], 1000)
"""The third threshold is the number of collections of the middle generation before a full one."""


def collect_rarely() -> None:
    """Begin a start-up: postpone full collections until `collect_as_usual`."""
    gc.set_threshold(*_IN_START_UP)


def collect_as_usual() -> None:
    """End a start-up, in a process that computes or serves from now on."""
    if gc.get_threshold() == _IN_START_UP:  # else a script has chosen its own
        gc.set_threshold(*_USUAL)
