"""What the server that the tests' ranks are forked from loads beside the libraries.

After its first step a run measures for seconds, on every rank, what the machine can do.
After the last one the model writes a sample of 64 tokens. Runs of tests take a constant and write
eight tokens. Ranks repeat no measurement of this machine. Those that a test starts as programs do
as users see it.
"""

import dataclasses
import functools

from torch.utils import tensorboard  # a run with logs asks for it

from phalanx.planner.calibration import ASSUMED, blank
from phalanx.planner.machine import Level, Link
from phalanx.train import text
from phalanx.train.report import records
from short_measurements import shorten

__all__ = ["tensorboard"]

CEILING_FLOPS_PER_S = 1e13

records.quick_ceiling = lambda *_: CEILING_FLOPS_PER_S
LINK = Link(name="memory", bandwidth=1e9, latency_s=1e-4, source="a constant", date="2026-11")
records.machine_of = lambda comm, _, **__: dataclasses.replace(
    blank("cpu"), compute=ASSUMED, levels=(Level(name="server", devices=2, link=LINK),)
)
text.write_text = functools.partial(text.write_text, num_tokens=8)
shorten()
