"""States in the memory of hosts: which bytes go where, and what is left after a loss of hosts."""

from __future__ import annotations

import platform
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist

from launched_ranks import start_on
from marks import by_hand
from phalanx.checkpoint import files, in_memory, manifest, state
from phalanx.checkpoint.in_memory import MemoryPace, MemorySaver, traffic
from phalanx.config import BatchConfig, TrainConfig
from phalanx.errors import CheckpointError, ConfigError, PeerLost
from phalanx.launch.local import run_ranks
from phalanx.train.callback import Callback, Callbacks
from phalanx.train.job.resolve import resolve
from phalanx.train.job.resume import continued
from phalanx.train.loop import train
from phalanx.train.run import train_rank
from phalanx.train.session import Session
from phalanx.train.text import TextSession
from small_run import losses, small_run


def save(hosts: list[tuple[Path, int]], run: Path, steps: list[int]) -> Any:
    """Save after some steps; return the bytes that were sent and planned, and what was saved."""
    start_on(hosts)
    model, optimizer = runs.build("hsdp")
    with MemorySaver(run) as saver:
        for number in range(1, max(steps) + 1):
            runs.step(model, optimizer)
            if number in steps:
                saver.begin(model, optimizer, runs.about(number))
    with MemorySaver(run) as again:  # as after a second resume within a process
        again.begin(model, optimizer, runs.about(number))
    dist.barrier()
    assert not manifest.saved_states(run)  # until a restart has brought all files here
    sizes = manifest.read(manifest.folder_of(saver.run, number)).files
    sent = [each for each in traffic(sizes, saver.hosts) if each.source == dist.get_rank()]
    planned = sum(each.num_bytes for each in sent)
    assert saver.exchange is not None
    return saver.exchange.bytes_sent, planned, runs.whole_state(model, optimizer)


def resume(hosts: list[tuple[Path, int]], run: Path, free: int = 1 << 30) -> Any:
    """Recover, and load into other shards; return the steps done and the whole state."""
    folder = start_on(hosts, generation=1)
    in_memory.free_bytes = lambda _: free
    in_memory.recover.__wrapped__()
    assert not manifest.saved_states(run) or files.find_whole(run, compares=True)
    states = manifest.saved_states(run)
    if not states:
        return 0, {}
    last = states[max(states)]
    assert last.is_relative_to(folder) and manifest.run_of(last) == run
    model, optimizer = runs.build("fsdp")
    state.load(last, model, optimizer)
    return max(states), runs.whole_state(model, optimizer)


def save_and_fail(hosts: list[tuple[Path, int]], run: Path, is_sent: bool) -> None:
    """Save after step 1, and be lost while the state after step 2 is sent, or named by a host."""
    start_on(hosts)
    model, optimizer = runs.build()

    def lose(*_: Any) -> Any:
        raise PeerLost("gone")

    with MemorySaver(run) as saver:
        runs.step(model, optimizer)
        saver.begin(model, optimizer, runs.about(1))
        saver.finish()
        if not is_sent:
            assert saver.exchange is not None
            saver.exchange.run = lose
        elif dist.get_rank() > 0:
            in_memory.publish_folder = lose
        runs.step(model, optimizer)
        saver.begin(model, optimizer, runs.about(2))
        with suppress(PeerLost):
            saver.finish()


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_host_lost_within_a_save_leaves_the_former_state_or_the_new(
    tmp_path: Path, is_sent: bool
) -> None:
    hosts = [(tmp_path / name, 1) for name in "abc"]
    run_ranks(save_and_fail, 3, hosts, tmp_path / "run", is_sent, threads=1)
    assert list(tmp_path.rglob("*.partial"))
    shutil.rmtree(hosts[2][0])
    found = run_ranks(resume, 2, hosts[:2], tmp_path / "run", threads=1)
    assert [steps for steps, _ in found] == [1 + is_sent] * 2
    assert not list(tmp_path.rglob("*.partial"))


class Fail(Callback):
    """Fails after a step."""

    def __init__(self, last: int) -> None:
        self.last = last

    def step(self, steps_done: int, result: Any) -> None:
        if steps_done == self.last:
            raise PeerLost("gone")


def train_text(
    hosts: list[tuple[Path, int]], config: TrainConfig, last: int, launched: dict[str, Any]
) -> None:
    """Train as a rank of a launched job until a step, when a rank is lost."""
    start_on(hosts, **launched)
    in_memory.recover.__wrapped__()
    with suppress(PeerLost):
        train(TextSession(resolve(continued(config)), Callbacks({"fail": Fail(last)})))


@pytest.mark.parametrize("again", ["dp2", by_hand("fsdp3")])
def test_a_restart_continues_with_the_same_losses(tmp_path: Path, again: str) -> None:
    """To the bit on the same strategy; on another host in place of the first, without the disk."""
    config = small_run(
        tmp_path,
        150,
        strategy="dp2",
        steps=8,
        save="minutes=0",
        batch=BatchConfig(global_size=12),
    )
    run_ranks(train_rank, 2, resolve(replace(config, out=str(tmp_path / "whole"))), threads=1)
    expected = losses(tmp_path / "whole")
    hosts = [(tmp_path / name, 1) for name in "abc"]
    run_ranks(train_text, 2, hosts[:2], replace(config, memory_every=2), 5, {}, threads=1)
    run = Path(str(config.out))
    assert not manifest.complete_checkpoints(run)
    launched = {"generation": 1, "strategy": again, "first": "dp2", "run": str(run)}
    config = replace(config, memory_every=2)
    places = hosts[1:] if again == "dp2" else hosts
    for last in (8, 0):  # lost after the last step, before its checkpoint
        run_ranks(train_text, len(places), places, config, last, launched, threads=1)
    after = losses(run)[5:]
    assert len(after) >= 3
    if again == "dp2":
        assert after == expected[-len(after) :]
    assert after == pytest.approx(expected[-len(after) :], rel=1e-10)
    assert 8 - len(after) >= 5 - 2
    assert list(manifest.complete_checkpoints(run)) == [8]


def paced(every: int | None, num_steps: int, save_s: float) -> list[tuple[int, int]]:
    """Take steps of a second; return the steps at which saves began, and most steps to lose."""
    saver = SimpleNamespace(poll=lambda: None, finish=lambda: None)
    now_s, begun, said = 0.0, list[int](), list[str]()
    in_memory.time = SimpleNamespace(monotonic=lambda: now_s)
    pace = MemoryPace(saver, every, 0, said.append)

    def begin() -> None:
        nonlocal now_s
        begun.append(step)
        now_s += save_s if len(begun) == 1 else 0.0

    for step in range(1, num_steps + 1):
        now_s += 1.0
        pace.after_step(step, begin)
    return begun, said


def test_saves_begin_every_half_of_the_most_steps_to_lose() -> None:
    assert run_ranks(paced, 1, 1, 3, 0.0)[0] == ([1, 2, 3], [])
    assert run_ranks(paced, 1, 5, 10, 0.0)[0] == ([3, 6, 9], [])
    assert run_ranks(paced, 1, None, 9, 0.01)[0] == (
        [1, 4, 7],  # no step of the first three has a save, so that the promise holds from then on
        ["saves the state in memory; a restart loses at most 6 steps"],
    )
    begun, said = run_ranks(paced, 1, None, 20, 0.3)[0]
    assert begun == [1, 9, 17]  # 0.3 s are 4 % of the time of 7.5 steps
    assert said == ["saves the state in memory; a restart loses at most 16 steps"]


def test_a_state_in_memory_follows_the_checkpoint_of_the_best_that_it_names() -> None:
    begun = list[str]()
    session: Any = SimpleNamespace(
        step=SimpleNamespace(steps_done=3),
        best=object(),
        saver=SimpleNamespace(finish=lambda: begun.append("the disk has it")),
        in_memory=SimpleNamespace(saver="memory", after_step=lambda _, begin: begin()),
        state=SimpleNamespace(begin_save=lambda saver, _: begun.append(saver)),
        manifest=lambda **_: None,
    )
    Session.save_in_memory(session)
    assert begun == ["the disk has it", "memory"]


def words_of_room(hosts: list[tuple[Path, int]], run: Path, free: int) -> str:
    start_on(hosts)
    in_memory.free_memory_bytes = lambda: free
    said: list[str] = []
    model, optimizer = runs.build()
    assert in_memory.pace_of(run, None, model, optimizer, 0, said.append) is None
    with pytest.raises(CheckpointError) as raised:
        in_memory.pace_of(run, 4, model, optimizer, 0, said.append)
    assert said == [f"{raised.value}; restarts resume from the disk"]
    (MemorySaver(run).run / "former state").write_bytes(bytes(1 << 20))
    assert in_memory.pace_of(run, 4, model, optimizer, 0, said.append) is not None
    return str(raised.value)


def test_too_little_memory_is_refused_with_the_calculation(tmp_path: Path) -> None:
    hosts = [(tmp_path / name, 1) for name in "ab"]
    words = run_ranks(words_of_room, 2, hosts, tmp_path / "run", 5000, threads=1)
    assert words[0] == words[1]
    assert re.sub(r"[\d.,]+ (KiB|bytes)", "N", words[0]) == (
        f"cannot keep the state in memory: host {platform.node()} needs N: N for the whole state, "
        "which a restart reads, and for the next save N of its 1 ranks, as much to write from, and "
        "N of another host; it has N; set memory_every to 0, so that restarts resume from the "
        "disk, or start fewer ranks on this host"
    )


def test_without_an_agent_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory_every is 3, but .* start the job by phalanx l"):
        resolve(small_run(tmp_path, memory_every=3))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("step-*/*"))


def test_a_run_survives_the_loss_of_a_host_but_not_of_two_neighbours(tmp_path: Path) -> None:
    run, folders = tmp_path / "checkpoints", [tmp_path / name for name in "abc"]
    hosts = list(zip(folders, (2, 1, 1), strict=True))
    saved = run_ranks(save, 4, hosts, run, [1, 3], threads=1)
    # Each host has its own files, those of the host before it, and no former state.
    about = ["index.json", "manifest.json"]
    held = [[0, 1, 3], [0, 1, 2], [2, 3]]
    for folder, ranks in zip(folders, held, strict=True):
        assert names_in(folder) == about + [f"rank-{rank:05d}.safetensors" for rank in ranks]
    for sent, planned, _ in saved:
        assert sent == 2 * planned
    whole = saved[0][2]
    for lost in ([0], [1, 2]):
        left = tmp_path / f"without {lost}"
        places = [(left / each.name, 1) for each in folders]
        for number, folder in enumerate(folders):
            if number not in lost:
                shutil.copytree(folder, left / folder.name)
        for steps, loaded in run_ranks(resume, 3, places, run, threads=1):
            assert steps == (3 if len(lost) == 1 else 0)
            for name, tensor in loaded.items():
                assert torch.equal(tensor, whole[name])
        names = [names_in(folder) for folder, _ in places]
        assert names[0] == names[1] == names[2]
    (tmp_path / "new").mkdir()  # a host without room
    places = [(folders[0], 1), (folders[1], 1), (tmp_path / "new", 1)]
    assert [n for n, _ in run_ranks(resume, 3, places, run, 9, threads=1)] == [0] * 3
