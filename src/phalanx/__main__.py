"""`phalanx` and `python -m phalanx`: the command, which Ctrl-C may end before it is loaded."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Load the command line and run it; return the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # There is nothing to leave in order yet, and an exception would be raised within whatever
        # is being imported, which may take it for its own.
        signal.signal(signal.SIGINT, lambda signum, _: os._exit(128 + signum))
    from phalanx.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
