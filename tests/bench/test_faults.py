"""Jobs that continue by themselves under faults: on this host, and on hosts of namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from namespaces import SSH, THREE_HOSTS, on_host, ssh_servers, switched
from phalanx.bench.faults import (
    KINDS,
    Fault,
    FaultsConfig,
    History,
    Site,
    Strike,
    differences,
    on_record,
    order_of,
    run,
)
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


def test_a_seed_fixes_which_fault_strikes_when_and_whom() -> None:
    order = order_of(7, ["rank", "host", "ssh"], 5, 60)
    assert [(each.kind, each.step, each.victim) for each in order] == [
        ("host", 2, 23965),
        ("rank", 12, 2457),
        ("ssh", 23, 4578),
        ("ssh", 31, 3873),
        ("rank", 34, 62092),
    ]
    assert order_of(8, ["rank", "host", "ssh"], 5, 60) != order


@given(
    st.integers(0, 2**40),
    st.lists(st.sampled_from(list(KINDS)), min_size=1, unique=True),
    st.integers(1, 60),
    st.integers(1, 10**4),
)
def test_faults_rise_before_the_end_and_each_kind_is_as_frequent(
    seed: int, kinds: list[str], number: int, steps: int
) -> None:
    order = order_of(seed, kinds, number, steps)
    assert order == order_of(seed, kinds, number, steps) and len(order) == number
    assert {0 <= each.pause < 1 and each.victim >= 0 for each in order} == {True}
    times = Counter(each.kind for each in order)
    assert max(times.values()) - min(times[kind] for kind in kinds) <= 1
    if steps > number:
        rising = [each.step for each in order]
        assert rising == sorted(set(rising)) and 1 <= rising[0] <= rising[-1] < steps


def watched(*steps: tuple[float, int], lost: tuple[float, ...] = ()) -> History:
    seen = History()
    seen.events = [(at_s, "lost", "") for at_s in lost]
    seen.add(0.0, {"kind": "config", "strategy": "dp4"})
    seen.add(1.5, {"kind": "ranks", "sent": {"dp": [2, 100.0], "world": [1, 20.0]}})
    for at_s, number in steps:
        seen.add(at_s, {"kind": "step", "step": number})
    return seen


def struck(at_s: float, until_s: float, kind: str = "rank") -> Strike:
    return Strike(Fault(kind, 3, 0, 0.0), "rank 1 on a", at_s, until_s, 0.5)


def test_a_lost_rank_costs_the_time_until_the_step_after_the_last_that_was_taken() -> None:
    # The fault strikes after step 3; one more step is taken; 3 and 4 are repeated.
    seen = watched(
        *((1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)),
        *((10.0, 3), (11.0, 4), (12.0, 5), (13.0, 6)),
        lost=(5.25,),
    )
    seen.add(9.0, {"kind": "config", "strategy": "dp2"})
    strike = struck(3.25, 3.25)
    assert seen.step_s == 1.0
    assert seen.cost_of(strike, 14.0) == dict(
        kind="rank", who="rank 1 on a", step=3, detected_s=2.0, next_step_s=4.75, repeated=2,
        lost_s=7.0, again_bytes=240.0, strategy="dp2", load=0.5,
    )  # fmt: skip
    assert seen.has_recovered(strike)
    assert not watched((1.0, 1), (3.0, 3), (10.0, 3), lost=(5.0,)).has_recovered(strike)
    assert [*seen.final] == [1, 2, 3, 4, 5, 6]


def test_a_fault_that_no_rank_is_lost_by_costs_what_the_steps_take_longer() -> None:
    seen = watched((1.0, 1), (2.0, 2), (3.0, 3), (6.0, 4), (9.0, 5), (10.0, 6), (11.0, 7))
    cost = seen.cost_of(struck(3.5, 8.5, "slow"), 12.0)
    assert (cost["detected_s"], cost["next_step_s"], cost["repeated"]) == (None, None, 0)
    assert cost["lost_s"] == 4.0
    assert not watched((1.0, 1), (2.0, 2)).has_recovered(struck(2.5, 8.5, "slow"))


def test_faults_that_hosts_do_not_allow_are_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match="no cut: localhost is no network namespace"):
        run(FaultsConfig(kinds=("rank", "cut"), hosts="localhost:2"), print)
    site = Site(FaultsConfig(hosts="localhost:1,elsewhere:1"), Path("/nowhere"))
    assert [kind for kind in KINDS if site.refusal(kind)] == ["cut", "slow", "disk"]
    assert "did you mean 'stop'" in site.refusal("stopp")


def seen(run: Path) -> History:
    """Return what an observer of a run would have seen, without times."""
    timeline = History()
    for record in records(run, "step"):
        timeline.add(0.0, record)
    return timeline


@pytest.mark.slow
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
    assert (
        "steps [3] are in one run alone" in of_length
        and "16 samples were taken, not 24" in of_length
    )


def test_the_clock_of_rank_0_moves_by_the_file_in_the_folder_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", time.time)  # and put back
    on_record("step", {})
    before_s = time.time()
    for shift_s in (3600, 7200):
        (tmp_path / "clock").write_text(str(shift_s))
        on_record("step", {})
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
    words = ("rank", "host", "stop", "clock", "disk", "--faults=5", "--for-s=5")
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
    job = f"train --script {file}:job --device cpu --threads 1 --save every=7"
    found = bench("rank", "rank0", "--faults=3", "--steps=300", f"--job={job}", cwd=tmp_path)
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
    rows = [row for step in sorted(taken) for row in taken[step]]
    epochs = [rows[begin : begin + 96] for begin in range(0, len(rows), 96)]
    assert all(sorted(epoch) == [*range(96)] for epoch in epochs[:-1]) and len(epochs) > 30


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_hosts", "seed"), CASES)
def test_fifty_faults_change_no_weight(strategy: str, num_hosts: int, seed: int) -> None:
    hosts = THREE_HOSTS[:num_hosts]
    listed = ",".join(f"{host}:{4 // num_hosts}" for host in hosts)
    listed = f"{listed[:-1]}2" if num_hosts == 3 else listed
    faults = f"--faults={8 + (seed < 2)}"
    with switched(hosts), ssh_servers(hosts):
        words = (f"--hosts={listed}", f"--ssh={SSH}", f"--seed={seed}", faults)
        command = tuple(on_host(hosts[0], *BENCH))
        found = bench(*words, f"--strategy={strategy}", command=command)
    assert [fault["detected_s"] for fault in found["faults"]].count(None) == 0
