"""Run commands of phalanx one after another, in one process that imports torch once.

Input: a JSON list of words a line. Output: a line of JSON for each, of exit code, standard output
and standard error. Ranks are forked from one server, as those of one command are.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing import forkserver

from phalanx.cli.main import main


def work() -> None:
    """Run the commands of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    for stream in (1, 2):
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), stream
        )  # of the server, and of ranks that it forks
    multiprocessing.set_forkserver_preload(["phalanx.launch.preload", "quick"])
    # `main` stops a server that it has started itself.
    forkserver.ensure_running()
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            try:
                code = main(json.loads(line))
            except Exception:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            texts = [file.read() for file in (output, errors) if file.seek(0) == 0]
        print(json.dumps([code, *texts]), file=answers, flush=True)


if __name__ == "__main__":  # ranks import this file
    work()
