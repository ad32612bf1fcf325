"""Entry point of `phalanx` and `python -m phalanx`; Ctrl-C ends it even during imports."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Import and run the command line; return the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing needs cleanup during the imports. A KeyboardInterrupt would be raised inside a
        # module that is being imported, and that module might catch it.
        signal.signal(signal.SIGINT, lambda signum, _: os._exit(128 + signum))
    from phalanx.cli.main import main as run
    from phalanx.launch.process_memory import collect_rarely

    collect_rarely()  # verbs import torch when they need it
    return run()


if __name__ == "__main__":
    sys.exit(main())
