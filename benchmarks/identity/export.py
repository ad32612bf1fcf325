"""Write the sha256 of the weights of a run of `job.py`, whatever the format of its checkpoint is.

phalanx run benchmarks/identity/export.py --strategy dp1 -- FUNCTION RUN OUT.json
"""

import json
import sys
from pathlib import Path

import job
import phalanx
from loop import digest


def main(function: str, folder: str, out: str) -> None:
    """Load the latest checkpoint into the model of the job."""
    run = phalanx.init()
    run.prepare(getattr(job, function)().build(), batch_norm="global")
    run.load_state_dict(folder)
    Path(out).write_text(json.dumps(digest(run.state_dict())))


if __name__ == "__main__":
    main(*sys.argv[1:])
