"""Training scripts as users write them, each once: `on` is one process, or the ranks of a job.

A script calls nothing of Phalanx; plain_adapters.py does.
"""

from __future__ import annotations

import plain_data
import plain_generative
import plain_loops
import plain_losses
import plain_networks
import plain_optimizers
import plain_text
from plain_loop import Script

SCRIPTS: dict[str, Script] = {
    **plain_loops.SCRIPTS,
    **plain_losses.SCRIPTS,
    **plain_generative.SCRIPTS,
    **plain_networks.SCRIPTS,
    **plain_text.SCRIPTS,
    **plain_optimizers.SCRIPTS,
    **plain_data.SCRIPTS,
}
