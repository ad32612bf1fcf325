"""Predict time and memory of published runs, one JSON object a line.

    python benchmarks/planner/predict.py RUNS.jsonl

A line of RUNS.jsonl is a run: an object with id, hardware, num_gpus, model, seq_len and parallel.
Its answer has id, step_time_s, tokens_per_s_per_device, memory_bytes and fits; or id and error.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import published
from phalanx.errors import PhalanxError

NEEDED = ("id", "hardware", "num_gpus", "model", "seq_len", "parallel")
"""Required fields of a run."""


def predicted(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prediction for a run, or its id and the error."""
    missing = [name for name in NEEDED if row.get(name) is None]
    if missing:
        return {"id": row.get("id"), "error": f"the run lacks {', '.join(missing)}"}
    try:
        run = published.read(row)
        step_s = published.seconds(run)
        memory_bytes, fits = published.held(run)
    except PhalanxError as error:
        return {"id": row["id"], "error": str(error)}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"a field has an unexpected value ({type(error).__name__}: {error})"
        return {"id": row["id"], "error": f"run {row['id']}: {what}"}
    tokens = run.planned.num_sequences * run.planned.seq_len
    return {
        "id": row["id"],
        "step_time_s": step_s,
        "tokens_per_s_per_device": tokens / step_s / row["num_gpus"],
        "memory_bytes": memory_bytes,
        "fits": fits,
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for line in filter(str.strip, Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()):
        print(json.dumps(predicted(json.loads(line))))
