"""Jobs that continue by themselves under faults: on this host, and on hosts of namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from namespaces import SSH, THREE_HOSTS, on_host, ssh_servers, switched
from phalanx.bench.fault_order import KINDS, Timeline
from phalanx.bench.faults import FaultsConfig, Site, differences, move_clock, run
from phalanx.errors import ConfigError
from phalanx.train.run import train
from small_run import records, small_run

BENCH = (sys.executable, "-m", "phalanx", "bench", "faults", "--json")

CASES = [
    (strategy, 2 + number % 2, number)
    for number, strategy in enumerate(
        ["dp4", "fsdp4", "dp2,fsdp2", "pp2,dp2", "tp2,dp2", "cp2,dp2"]
    )
]
"""Strategy, hosts and seed of each job of the 50 faults."""


def test_faults_that_hosts_do_not_allow_are_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match="no cut: localhost is no network namespace"):
        run(FaultsConfig(kinds=("rank", "cut"), hosts="localhost:2"), print)
    site = Site(FaultsConfig(hosts="localhost:1,elsewhere:1"), Path("/nowhere"))
    assert [kind for kind in KINDS if site.refusal(kind)] == ["cut", "slow", "disk"]
    assert "did you mean 'stop'" in site.refusal("stopp")


def seen(run: Path) -> Timeline:
    """Return what an observer of a run would have seen, without times."""
    timeline = Timeline()
    for record in records(run, "step"):
        timeline.add(0.0, record)
    return timeline


def test_another_run_differs_in_losses_and_weights_and_a_shorter_one_in_steps_and_samples(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"strategy": "dp1", "steps": 2}
    for name, change in {"one": {}, "other": {"seed": 1}, "longer": {"steps": 3}}.items():
        train(small_run(tmp_path, **{**settings, **change, "out": str(tmp_path / name)}))
    one, other, longer = (tmp_path / name for name in ("one", "other", "longer"))
    assert differences(seen(one), one, one) == []
    of_seed = differences(seen(other), other, one)
    assert of_seed[0].startswith("the loss of step 1 is")
    assert any(line.startswith("model.") for line in of_seed[1:])
    of_length = differences(seen(one), one, longer)
    assert "steps are missing: [3]" in of_length and "16 samples were taken, not 24" in of_length


def test_the_clock_of_rank_0_moves_by_the_file_in_the_folder_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", time.time)  # and put back
    move_clock("step", {})
    before_s = time.time()
    for shift_s in (3600, 7200):
        (tmp_path / "clock").write_text(str(shift_s))
        move_clock("step", {})
        assert shift_s <= time.time() - before_s < shift_s + 3000


def bench(*words: str, command: tuple[str, ...] = BENCH, cwd: Path | str = "/") -> dict[str, Any]:
    """Return the JSON document of `phalanx bench faults`, which has found nothing wrong."""
    command = (*command, *words)
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    return found


@pytest.mark.slow
def test_a_job_continues_after_ranks_hosts_a_disk_and_a_clock_fail(tmp_path: Path) -> None:
    words = ("rank", "host", "stop", "clock", "disk", "--faults=5", "--for-s=5", "--steps=120")
    found = bench(*words, "--strategy=dp2", cwd=tmp_path)
    assert {fault["kind"] for fault in found["faults"]} == {*words[:5]}
    assert not list(tmp_path.iterdir())
    for fault in found["faults"]:
        is_lost = fault["kind"] in ("rank", "host", "stop")
        assert (fault["detected_s"] is not None) == is_lost
        assert (fault["repeated"] > 0) <= (fault["again_bytes"] > 0)


@pytest.mark.slow
def test_each_sample_is_taken_once_by_a_job_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text((Path(__file__).parent / "fault_jobs.py").read_text())
    job = f"train --script {file}:job --device cpu --threads 1 --save-every 7"
    found = bench("rank", "rank0", "--faults=3", "--steps=150", f"--job={job}", cwd=tmp_path)
    assert len(found["faults"]) == 3
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    last = {step: max(own for at, own, _ in lines if at == step) for step, *_ in lines}
    taken, alone = (
        {
            step: sorted(row for at, own, rows in lines for row in rows
                         if at == step and own == (-1 if is_alone else last[step]))
            for step in last
        }
        for is_alone in (False, True)
    )  # fmt: skip
    assert max(last.values()) == 3
    assert taken == alone
    assert {len({*rows}) for rows in alone.values()} == {12}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_hosts", "seed"), CASES)
def test_fifty_faults_change_no_weight(strategy: str, num_hosts: int, seed: int) -> None:
    hosts = THREE_HOSTS[:num_hosts]
    listed = ",".join(f"{host}:{4 // num_hosts}" for host in hosts)
    listed = f"{listed[:-1]}2" if num_hosts == 3 else listed
    faults = f"--faults={8 + (seed < 2)}"
    with switched(hosts), ssh_servers(hosts):
        words = (f"--hosts={listed}", f"--ssh={SSH}", f"--seed={seed}", faults, "--steps=300")
        command = tuple(on_host(hosts[0], *BENCH))
        found = bench(*words, f"--strategy={strategy}", command=command)
    assert [fault["detected_s"] for fault in found["faults"]].count(None) == 0
