"""States in the memory of hosts: which bytes go where, and what is left after a loss of hosts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runs
import torch
import torch.distributed as dist

from phalanx.checkpoint import files, in_memory, manifest, state
from phalanx.checkpoint.in_memory import MemorySaver
from phalanx.comm.join import job_store
from phalanx.launch.launched import VARIABLE, Launched
from phalanx.launch.local import run_ranks


def start_on(hosts: Sequence[tuple[Path, int]], generation: int = 0) -> Path:
    """Be a rank that agents have started on hosts, each with its folder and its number of ranks."""
    rank, first = dist.get_rank(), 0
    for folder, num_here in hosts:
        if rank < first + num_here:
            break
        first += num_here
    store: Any = job_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    os.environ |= {
        VARIABLE: Launched(folder=str(folder), generation=generation).text(),
        "RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(rank - first),
        "LOCAL_WORLD_SIZE": str(num_here),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return folder


def save(hosts: list[tuple[Path, int]], run: Path, steps: list[int]) -> Any:
    """Save after some steps; return the bytes that were sent and planned, and what was saved."""
    start_on(hosts)
    model, optimizer = runs.build("hsdp")
    with MemorySaver(run) as saver:
        for number in range(1, max(steps) + 1):
            runs.step(model, optimizer)
            if number in steps:
                saver.begin(model, optimizer, runs.about(number))
    rank = dist.get_rank()
    planned = in_memory.traffic(saver._plan, saver.hosts)[rank]
    return saver.sent, planned, runs.whole_state(model, optimizer)


def resume(hosts: list[tuple[Path, int]], run: Path) -> Any:
    """Recover, and load into other shards; return the steps done and the whole state."""
    folder = start_on(hosts, generation=1)
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


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("step-*/*"))


def test_a_run_survives_the_loss_of_a_host_but_not_of_two_neighbours(tmp_path: Path) -> None:
    run, folders = tmp_path / "run", [tmp_path / name for name in "abc"]
    hosts = list(zip(folders, (2, 1, 1), strict=True))
    saved = run_ranks(save, 4, hosts, run, [1, 3], threads=1)
    # Each host has its own files, those of the host before it, and no former state.
    about = ["index.json", "manifest.json"]
    held = [[0, 1, 3], [0, 1, 2], [2, 3]]
    for folder, ranks in zip(folders, held, strict=True):
        assert names_in(folder) == about + [f"rank-{rank:05d}.safetensors" for rank in ranks]
    for sent, planned, _ in saved:
        assert sent == (2 * planned.sent_bytes, 2 * planned.received_bytes)
    whole = saved[0][2]
    for number in range(3):
        # The middle of a save: nothing names it, so that the one before is resumed.
        (folders[number - 1] / manifest.IN_MEMORY / "run/checkpoints/step-00000009.partial").mkdir(
            parents=True
        )
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
        assert not list(left.rglob("*.partial"))
