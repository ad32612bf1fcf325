"""Which compressor a run has: refusals, and what is measured decides."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from phalanx.comm.comm import Ranks
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.parallel.compression import chosen
from phalanx.parallel.compression.chosen import check_compression, compress, fastest
from phalanx.parallel.compression.rounded import RoundedSum
from phalanx.parallel.data import BucketedReducer, apply
from phalanx.strategy import Strategy


@pytest.mark.parametrize("text", ["dp1", "fsdp2", "dp2,fsdp2", "dp2:naive", "tp2", "pp2"])
def test_a_strategy_without_buckets_of_dp_compresses_nothing(text: str) -> None:
    strategy = Strategy.parse(text)
    with pytest.raises(ConfigError, match=r"compress is int8, but .* sums no gradients in buckets"):
        check_compression("int8", strategy, "float32")
    check_compression("auto", strategy, "float32")
    check_compression("none", strategy, "float32")


def test_a_scale_of_the_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="nearest precision is bfloat16"):
        check_compression("bf16", Strategy.parse("dp2,tp2"), "float16")
    check_compression("bf16", Strategy.parse("dp2,tp2"), "bfloat16")


def test_float32_is_left_only_for_a_gain() -> None:
    assert fastest({"float32": 1.0, "bf16": 0.9, "int8": 1.5}) == "float32"
    assert fastest({"float32": 1.0, "bf16": 0.6, "int8": 0.5}) == "int8"
    assert fastest({"float32": 1.0, "bf16": 0.5, "int8": 0.6}) == "bf16"


def reducer_by_auto(shares_memory: bool, times_s: dict[str, float] | None) -> tuple[str, str]:
    comm = Ranks({"dp": 2}, shares_memory=shares_memory)
    reducer = apply(nn.Linear(2, 2), comm)
    measured = chosen.measure_seconds if times_s is None else lambda _: times_s
    with patch.object(chosen, "measure_seconds", measured):
        said = compress(reducer, "auto", Strategy.parse("dp2"), "float32")
    assert isinstance(reducer, BucketedReducer)
    found = reducer._compressor
    return said, type(found._code).__name__ if isinstance(found, RoundedSum) else "float32"


@pytest.mark.parametrize(
    "int8_s, compressor, said",
    [(0.002, "Int8", "int8"), (0.009, "float32", "float32")],
)
def test_what_was_measured_decides(int8_s: float, compressor: str, said: str) -> None:
    times_s = {"float32": 0.01, "bf16": 0.02, "int8": int8_s}
    shown = f"1048576 values take float32 10.0 ms, bf16 20.0 ms, int8 {1e3 * int8_s:.1f} ms"
    expected = f"gradients are sent as {said}: {shown}", compressor
    assert run_ranks(reducer_by_auto, 2, False, times_s) == [expected] * 2


def said_of_a_resumed_run() -> str:
    reducer = apply(nn.Linear(2, 2), Ranks({"dp": 2}))
    return compress(reducer, "int8", Strategy.parse("dp2"), "float32", is_resumed=True)


def test_a_resumed_run_says_that_errors_are_lost() -> None:
    said = "int8: the checkpoint has no compression errors of gradients; they start at 0"
    assert run_ranks(said_of_a_resumed_run, 2) == [said] * 2


def times() -> dict[str, float]:
    return chosen.measure_seconds(Ranks({"dp": 2}))


def test_all_ranks_have_the_times_of_the_slowest() -> None:
    first, second = run_ranks(times, 2)
    assert first == second and list(first) == ["float32", *chosen.MEASURED]
    assert min(first.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("shares_memory", [True, False])
def test_on_one_host_gradients_travel_as_float32(shares_memory: bool) -> None:
    found = run_ranks(reducer_by_auto, 2, shares_memory, None, threads=1)
    assert [name for _, name in found] == ["float32"] * 2


SLOW_LINK = """
import statistics, sys, time
import torch, torch.distributed as dist
from phalanx.comm.comm import Ranks
from phalanx.parallel.compression import chosen
from phalanx.launch.local import run_ranks

def timed():
    comm = Ranks({"dp": 4}, shares_memory=False)
    times = chosen.measure_seconds(comm)
    return times["float32"] / times["int8"], chosen.fastest(times)

if __name__ == "__main__":
    for gain, name in run_ranks(timed, 4, threads=1):
        print(f"{gain:.2f} {name}")
"""


@pytest.mark.slow
def test_over_one_gigabit_int8_is_chosen(tmp_path: Path) -> None:
    """The ranks of a network namespace have a loopback of 1 Gbit/s: no wall time is bounded."""
    script = tmp_path / "slow_link.py"
    script.write_text(SLOW_LINK)
    shaped = (
        "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 100ms"
    )
    command = ["unshare", "--net", "sh", "-c", f"{shaped} && exec {sys.executable} {script}"]
    try:
        subprocess.run(["unshare", "--net", "sh", "-c", shaped], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to shape a link of a network namespace: {error}")
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True, env=dict(os.environ)
    )
    found = [line.split() for line in ended.stdout.splitlines()]
    assert len(found) == 4
    for gain, name in found:
        assert name == "int8" and float(gain) > 2


def test_every_compressor_is_one_of_the_setting() -> None:
    names = set(chosen.Compression.__args__) - {"none", "auto"}
    assert set(chosen.COMPRESSORS) == names and set(chosen.MEASURED) <= names
    assert torch.ones(chosen.PROBE).nbytes == 4 << 20
