"""Export of a pipeline timeline as Chrome trace events, which Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from phalanx.parallel.pipeline.simulate import Timeline

NAMES: Final = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
}
"""Letter of an action -> its name in the trace."""


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write a trace with a lane for each pipeline rank, in microseconds.

    Raises:
        OSError: the file cannot be written.
    """
    events: list[dict[str, Any]] = []
    for rank, lane in enumerate(timeline.lanes):
        name = {"name": f"pp rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": name})
        for action, begin, end in lane:
            events.append(
                {
                    "ph": "X",
                    "name": f"{NAMES[action.op]} {action.microbatch}",
                    "cat": NAMES[action.op],
                    "pid": 0,
                    "tid": rank,
                    "ts": 1e6 * begin,
                    "dur": 1e6 * (end - begin),
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")
