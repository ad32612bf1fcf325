"""Runs over parameter servers, end to end: as one process computes, whoever is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from marks import by_hand
from phalanx.checkpoint import manifest
from phalanx.config import BatchConfig, OptimizerConfig, TrainConfig
from phalanx.config.schema import ServerConfig
from phalanx.errors import ConfigError, Interrupted
from phalanx.launch.local import Work, run_ranks
from phalanx.server import coordinator
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.processes import local_roles
from phalanx.server.requests import JobEnded
from phalanx.server.task_scheduler import Tasks
from phalanx.train import served_run
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.loop import train as train_session
from phalanx.train.report.summary import Summary
from phalanx.train.run import NOTHING, train
from phalanx.train.served_session import ServedSession
from small_run import SHAPE, losses, records, small_run
from workers_in_threads import allowed_connections, connections

UNTIED = dataclasses.replace(SHAPE, tied=False)
BY_ROWS = ServerConfig(table_rule="adagrad", table_lr=0.05)


def run(folder: Path, strategy: str, name: str, **settings: object) -> list[float]:
    """Train on 12 rows a step, and return the losses."""
    batch = BatchConfig(global_size=12, microbatch=2)
    given = {"strategy": strategy, "out": str(folder / name), "batch": batch, **settings}
    train(small_run(folder, **given))
    return losses(folder / name)


def moved_by_rows(folder: Path) -> tuple[list[float], str]:
    """Train with an embedding that moves by rows; return losses, and the checkpoint of step 3."""
    more = {"server": BY_ROWS, "shape": UNTIED}
    whole = run(folder, "dp2:ps", "whole", steps=6, save="every=3", **more)
    return whole, str(manifest.complete_checkpoints(folder / "whole")[3])


@pytest.mark.slow
@pytest.mark.fresh_ranks
@pytest.mark.parametrize("then", ["dp3:ps", "dp2"])
def test_synchronous_workers_take_the_step_of_one_process_and_resume(
    then: str, tmp_path: Path
) -> None:
    alone = run(tmp_path, "dp1", "alone", steps=6)
    groups = ServerConfig(groups=2)
    ours = run(tmp_path, "dp2:ps", "served", steps=6, save="every=3", server=groups)
    torch.testing.assert_close(ours, alone, rtol=1e-12, atol=0)
    logs = (tmp_path / "served" / "logs").glob("*.log")
    assert connections("".join(log.read_text() for log in logs)) == allowed_connections([0, 1])
    of_one, of_worker = (
        records(tmp_path / name, "summary")[0]["utilization"] for name in ("alone", "served")
    )
    assert of_one["model_flops_causal"] == 2 * of_worker["model_flops_causal"]
    assert of_one["num_devices"] == of_worker["num_devices"] == 1
    middle = manifest.complete_checkpoints(tmp_path / "served")[3]
    server = groups if then == "dp3:ps" else ServerConfig()
    again = run(tmp_path, then, "again", steps=6, resume=str(middle), server=server)
    torch.testing.assert_close(again, alone[3:], rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.fresh_ranks
def test_workers_of_rounds_resume_as_if_there_had_been_no_pause(tmp_path: Path) -> None:
    """Outer momentum, and the moments of each worker, are in the checkpoint."""
    whole = run(tmp_path, "dp2:local/2", "whole", steps=8, save="every=4")
    middle = str(manifest.complete_checkpoints(tmp_path / "whole")[4])
    again = run(tmp_path, "dp2:local/2", "again", steps=8, resume=middle)
    assert again == whole[4:]
    assert len(run(tmp_path, "dp2", "other", steps=6, resume=middle)) == 2
    said = " ".join((tmp_path / "other" / "logs" / "rank-0.log").read_text().split())
    assert "moments of dp:local; this run does not use them" in said


@pytest.mark.slow
@pytest.mark.fresh_ranks
def test_an_embedding_that_moves_by_rows_resumes_as_if_there_had_been_no_pause(
    tmp_path: Path,
) -> None:
    """Sums of squares of rows are in the checkpoint."""
    whole, middle = moved_by_rows(tmp_path)
    again = run(tmp_path, "dp3:ps", "again", resume=middle, server=BY_ROWS, steps=6, shape=UNTIED)
    torch.testing.assert_close(again, whole[3:], rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.fresh_ranks
def test_other_strategies_read_the_rest_of_its_checkpoint(tmp_path: Path) -> None:
    """And say that they do not use the sums of squares of its rows."""
    whole, middle = moved_by_rows(tmp_path)
    for strategy in ("dp2", "dp2:ps"):
        name = strategy.replace(":", "-")
        other = run(tmp_path, strategy, name, resume=middle, steps=6, shape=UNTIED)
        assert len(other) == 3 and other[0] == pytest.approx(whole[3], rel=1e-12)
        said = " ".join((tmp_path / name / "logs" / "rank-0.log").read_text().split())
        assert "of server.table_rule adagrad; this run does not use them" in said


@pytest.mark.slow
@pytest.mark.fresh_ranks
def test_an_embedding_moves_by_rows_as_it_moves_whole(tmp_path: Path) -> None:
    more = {"optimizer": OptimizerConfig(lr=0.3, weight_decay=0.0), "shape": UNTIED, "steps": 8}
    whole = run(tmp_path, "dp2:ps", "whole", server=ServerConfig(rule="sgd"), **more)
    server = ServerConfig(rule="sgd", table_rule="sgd")
    rows = run(tmp_path, "dp2:ps", "rows", server=server, **more)
    torch.testing.assert_close(rows, whole, rtol=1e-12, atol=0)
    assert whole[-1] < whole[0]


@pytest.mark.slow
@pytest.mark.fresh_ranks
@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_servers_of_another_rule_resume_as_if_there_had_been_no_pause(
    rule: Literal["sgd", "momentum"], tmp_path: Path
) -> None:
    server = ServerConfig(rule=rule)
    whole = run(tmp_path, "dp2:ps", "whole", steps=6, save="every=3", server=server)
    middle = str(manifest.complete_checkpoints(tmp_path / "whole")[3])
    again = run(tmp_path, "dp2:ps", "again", steps=6, resume=middle, server=server)
    assert again == whole[3:] and whole[-1] < whole[0]


@pytest.mark.slow
@pytest.mark.fresh_ranks
@pytest.mark.parametrize("strategy", ["dp3:ssp/2", "dp3:async", "dp3:quorum/2", "dp2:local/4"])
def test_other_consistencies_learn(strategy: str, tmp_path: Path) -> None:
    found = run(tmp_path, strategy, "run", steps=80)
    assert sum(found[-5:]) < 0.9 * sum(found[:5])


@pytest.mark.parametrize(
    ("strategy", "settings", "words"),
    [
        ("dp2:local/4", {"steps": 6}, "synchronize only after every 4 steps; the nearest is 8"),
        (
            "dp2:ps",
            {"steps": 4, "server": ServerConfig(groups=3)},
            "server.groups is 3, but dp2:ps has 2 workers; the nearest is 2",
        ),
        ("dp2:ps", {"steps": 4, "debug_comm": True}, "has none; leave debug_comm out"),
        ("dp2:ps", {"steps": 4, "profile": "active=1"}, "profile without servers, such as dp2"),
        ("dp2:local/2", {"steps": 4, "server": ServerConfig(rule="sgd")}, "server.rule is sgd"),
        (
            "dp2:local/2",
            {"steps": 4, "server": ServerConfig(table_rule="sgd")},
            "push updates of all weights; leave server.table_rule out, or use dp2:ps",
        ),
        (
            "dp2:ps",
            {"steps": 4, "server": ServerConfig(table_lr=0.1)},
            "server.table_lr is 0.1, but server.table_rule is unset; set server.table_rule to ada",
        ),
        (
            "dp2:ps",
            {"steps": 4, "server": ServerConfig(table_rule="sgd")},
            "leave server.table_rule out, or set shape.tied to false",
        ),
    ],
)
def test_what_servers_cannot_do_is_refused(
    strategy: str, settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        run(tmp_path, strategy, "run", **settings)


def test_a_worker_of_several_hosts_is_called_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    server = ServerConfig(coordinator="tcp://127.0.0.1:7000", secret=str(secret), worker=1)
    job = resolve(small_run(tmp_path, strategy="dp2:ps", steps=2, server=server))
    names = list[str]()

    def note(works: list[Work], *_: object, **__: object) -> list[None]:
        names.extend(name for name, *_ in works)
        return [None]

    monkeypatch.setattr(served_run, "run_supervised", note)
    served_run.run_worker(job, NOTHING, lambda: None)
    assert names == ["worker 1"]


def test_the_job_on_one_host_ends_with_worker_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process of another worker, which joins too late, does not delay its end."""
    job = resolve(small_run(tmp_path, strategy="dp2:ps", steps=2))
    names = list[list[str]]()

    def note(*groups: list[Work], **_: object) -> list[None]:
        names.extend([name for name, *_ in works] for works in groups)
        return [None]

    monkeypatch.setattr(served_run, "run_supervised", note)
    served_run.run_served(job, NOTHING, lambda: None)
    assert names[0] == ["worker 0"] and names[1][0] == "worker 1"


def late_outcomes(job: Job) -> list[str]:
    """Join a job that has ended as each of its workers; return the outcomes."""
    coordinator.BEAT_S = 1e9  # the coordinator stays
    found = list[str]()
    with local_roles(1) as made:
        client = Client(made.meeting, 0, Consistency("ps", 2), (0, 2))
        client.end()
        client.close()
        for worker in range(2):
            try:
                found.append(str(served_run.train_worker(job, worker, made.meeting)))
            except JobEnded as error:
                found.append(type(error).__name__)
    return found


def test_a_worker_that_joins_too_late_is_no_failure_of_a_job_that_has_ended(tmp_path: Path) -> None:
    job = resolve(small_run(tmp_path, strategy="dp2:ps", steps=2))
    assert run_ranks(late_outcomes, 1, job, threads=1) == [["JobEnded", "None"]]


def lost_before_saves(job: Job, steps: Sequence[int]) -> list[str]:
    """Be worker 0, killed before the save after each of `steps`; return hashes of what is saved."""

    def killed(session: ServedSession, **_: object) -> None:
        if session.step.steps_done in left:
            left.remove(session.step.steps_done)
            session.client.close()
            raise KeyboardInterrupt
        save(session)

    Tasks.is_lost = lambda *_: True  # from the start, so that worker 0 computes all tasks
    left, save = list(steps), ServedSession.begin_save
    ServedSession.begin_save = killed
    with local_roles(1) as made:
        while left:
            with suppress(KeyboardInterrupt):
                train_session(ServedSession(job, 0, made.meeting))
        assert isinstance(served_run.train_worker(job, 0, made.meeting), Summary)
    found = manifest.complete_checkpoints(job.out)
    assert list(found) == [2, 3]
    assert records(job.out, "evaluation")[-1]["step"] == 3
    return [file[1] for step in found for file in manifest.read(found[step]).files.values()]


@pytest.mark.slow
def test_a_checkpoint_is_written_by_the_worker_that_replaces_the_one_lost_before_it(
    tmp_path: Path,
) -> None:
    """Losing worker 0 changes no byte of any checkpoint, of the last step or of one before."""
    settings: dict[str, Any] = {"strategy": "dp2:ps", "steps": 3, "save": "every=2"}
    found = list[list[str]]()
    for name, lost in (("whole", ()), ("again", (2, 3))):
        job = resolve(small_run(tmp_path, out=str(tmp_path / name), **settings))
        found += run_ranks(lost_before_saves, 1, job, lost, threads=1)
    assert found[0] == found[1]
    where = "tcp://127.0.0.1:9"
    server = ServerConfig(coordinator=where, worker=0, secret="secret")
    again = small_run(tmp_path, out=str(tmp_path / "again"), server=server, **settings)
    with pytest.raises(ConfigError, match="checkpoints of another run"):  # its job has ended
        resolve(again)
    (tmp_path / "again" / ".served").write_text(where)
    assert resolve(again).out == tmp_path / "again"


def lost_for_a_step(job: Job) -> None:
    """Be worker 0, lost before the save after step 2, until worker 1 has taken step 3."""

    def killed(session: ServedSession, **_: object) -> None:
        session.client.close()
        raise KeyboardInterrupt

    Tasks.is_lost = lambda *_: True
    with local_roles(1) as made:
        save, ServedSession.begin_save = ServedSession.begin_save, killed
        with suppress(KeyboardInterrupt):
            train_session(ServedSession(job, 0, made.meeting))
        ServedSession.begin_save = save
        with ServedSession(job, 1, made.meeting) as other:
            while other.step.steps_done < 3:
                other.step(other.next_microbatches())
            other.client.close()
        assert isinstance(served_run.train_worker(job, 0, made.meeting), Summary)


def read_while_others_update(job: Job) -> None:
    """Be worker 0, which reads a shard a step later than the others for its first checkpoint."""
    read, Tasks.is_lost = Client.read, lambda *_: True

    def later(client: Client, flats: Any) -> tuple[float | None, set[int]]:
        Client.read = read
        steps, versions = read(client, flats)
        return steps, {*versions, max(versions) + 1}

    Client.read = later
    with local_roles(1) as made:
        assert isinstance(served_run.train_worker(job, 0, made.meeting), Summary)


@pytest.mark.parametrize("disturbed", [lost_for_a_step, by_hand(read_while_others_update)])
def test_a_checkpoint_that_was_due_is_written_after_the_next_step(
    tmp_path: Path, disturbed: Callable[[Job], None]
) -> None:
    """No step lacks its record, and no checkpoint has weights of two steps."""
    found = list[list[float]]()
    for name, work in (("plain", read_once), ("again", disturbed)):
        more: dict[str, Any] = {"strategy": "dp2:ps", "steps": 4, "save": "every=2"}
        job = resolve(small_run(tmp_path, out=str(tmp_path / name), **more))
        run_ranks(work, 1, job, threads=1)
        assert list(manifest.complete_checkpoints(job.out)) == [2 if name == "plain" else 3, 4]
        assert [each["step"] for each in records(job.out, "step")] == [1, 2, 3, 4]
        found.append(losses(job.out))
    assert found[0] == found[1]


def read_once(job: Job) -> None:
    """Be worker 0, which computes the tasks of worker 1, too."""
    Tasks.is_lost = lambda *_: True
    with local_roles(1) as made:
        assert isinstance(served_run.train_worker(job, 0, made.meeting), Summary)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Return the folder and the losses of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("clean")
    return folder, run(folder, "dp3:ps", "run", steps=60)


@pytest.mark.slow
@pytest.mark.fresh_ranks
def test_rounds_end_by_a_signal_after_one_that_is_saved(tmp_path: Path) -> None:
    """Workers hear the signal at different steps of a round, whose end waits for all of them."""
    batch = BatchConfig(global_size=12, microbatch=2)
    more = {"strategy": "dp2:local/4", "save": "minutes=60", "timeout_s": 60.0}
    config = small_run(tmp_path, steps=100_000, batch=batch, **more)
    out, is_over = Path(str(config.out)), threading.Event()

    def end() -> None:
        while not is_over.wait(0.05):
            if (out / "metrics.jsonl").exists() and len(losses(out)) >= 6:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    ending = threading.Thread(target=end)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        ending.start()
        with pytest.raises(Interrupted, match="last checkpoint: "):
            train(config)
    finally:
        is_over.set()
        ending.join()
        signal.signal(signal.SIGTERM, before)
    (step,) = manifest.complete_checkpoints(out)
    assert step % 4 == 0 and step == len(losses(out))


@pytest.mark.slow
@pytest.mark.fresh_ranks
@pytest.mark.parametrize(
    "killed",
    [["server0"], ["scheduler0"], ["scheduler1"], ["coordinator"], ["rank 0"], ["rank 1"],
     ["scheduler1", "rank 2"]],
    ids=" and ".join,
)  # fmt: skip
def test_training_resumes_where_processes_are_killed(
    killed: list[str], clean: tuple[Path, list[float]], tmp_path: Path
) -> None:
    """The losses are equal to the bit: no update is lost or doubled, and each sample is in once.

    The run has two groups of workers, the undisturbed one has one.
    """
    config = small_run(tmp_path, batch=BatchConfig(global_size=12, microbatch=2))
    out = Path(str(config.out))
    (tmp_path / "go.py").write_text(
        "import pickle, sys\n"
        "from phalanx.train.run import train\n"
        "if __name__ == '__main__':\n"
        "    train(pickle.load(open(sys.argv[1], 'rb')))\n"
    )
    more = {"strategy": "dp3:ps", "steps": 60, "server": ServerConfig(groups=2)}
    given = TrainConfig(**{**vars(config), **more})
    (tmp_path / "config").write_bytes(pickle.dumps(given))
    process = subprocess.Popen([sys.executable, tmp_path / "go.py", tmp_path / "config"])

    def num_steps() -> int:
        return len(losses(out)) if (out / "metrics.jsonl").exists() else 0

    while num_steps() < 8 and process.poll() is None:
        time.sleep(0.05)
    text = "".join(file.read_text() for file in (out / "logs").glob("*.log"))
    for name in killed:
        number = re.findall(rf"{name}[:,] process (\d+)", text)[-1]
        os.kill(int(number), signal.SIGKILL)
    assert process.wait(600) == 0
    text = "".join(file.read_text() for file in (out / "logs").glob("*.log"))
    assert connections(text) == allowed_connections([0, 0, 1])
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["loss"] for line in steps if line["kind"] == "step"}
    due = dict(enumerate(clean[1], 1))
    assert {step: found[step] for step in found} == {step: due[step] for step in found}
    assert max(found) == 60
