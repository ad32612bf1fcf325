import torch

from phalanx.measure.environment import environment
from phalanx.report.output import json_text


def test_environment_is_json_and_names_the_machine() -> None:
    found = environment()
    text = json_text(found)
    assert torch.__version__ in text
    cpu = found["cpu"]
    assert isinstance(cpu, dict)
    assert cpu["num_cores"] >= 1 and cpu["name"]
    memory_bytes = found["memory_bytes"]
    assert isinstance(memory_bytes, int) and memory_bytes > 2**28
    backends = found["backends"]
    assert isinstance(backends, dict) and backends["gloo"] is True
