"""What the server that ranks are forked from loads: no rank then imports or measures for seconds.

After its first step a run measures what the machine can do, and after the last one the model writes
a sample; no recorded number depends on either. A source tree may lack some of these modules.
"""

import functools
from contextlib import suppress
from importlib import import_module

NEEDED = (
    "torch.utils.tensorboard", "phalanx.script.loop_proof", "phalanx.script.session",
    "phalanx.train.served_run",
)  # fmt: skip

for name in NEEDED:
    with suppress(ImportError):
        import_module(name)
with suppress(ImportError, AttributeError):
    text = import_module("phalanx.train.text")
    text.write_text = functools.partial(text.write_text, num_tokens=1)
with suppress(ImportError):
    records = import_module("phalanx.train.report.records")
    records.quick_ceiling = lambda *_: 1e13
    records.machine_of = lambda *_, **__: records.blank("cpu")
