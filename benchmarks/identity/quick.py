"""What the server that ranks are forked from loads: no rank then imports or measures for seconds.

After its first step a run measures what the machine can do, and after the last one the model writes
a sample; no recorded number depends on either.
"""

import functools

from torch.utils import tensorboard

import phalanx.script.loop_proof
import phalanx.script.session
import phalanx.train.served_run
from phalanx.train import text
from phalanx.train.report import records

__all__ = ["phalanx", "tensorboard"]

records.quick_ceiling = lambda *_: 1e13
text.write_text = functools.partial(text.write_text, num_tokens=1)
