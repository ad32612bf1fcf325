"""Ranks that wait for the next test begin it as new ones would; those that cannot, end."""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from marks import by_hand
from phalanx.comm import comm, join
from phalanx.errors import RankFailed
from phalanx.launch import attach
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import run_ranks

DONE: list[str] = []


def look() -> dict[str, object]:
    """Return what a job may find of the one before, and the process."""
    return {
        "process": os.getpid(),
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "type": torch.get_default_dtype(),
        "drawn": (torch.rand(1).item(), random.random()),
        "filters": [str(each) for each in warnings.filters],
        "key": join.job_store().check(["left"]),
        "function": comm.job_mesh.__name__,
        "method": comm.Ranks.with_separate_groups.__name__,
        "asked": len(attach.ATTACH_CALLED),
        "pulse": (PULSE.steps_done, PULSE.resume_hint),
        "module": len(DONE),
        "threads": torch.get_num_threads(),
        "timeout": join.job_timeout().total_seconds(),
    }


def leave_all() -> int:
    os.environ["LEFT"] = "1"
    del os.environ["RANK"]
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    random.seed(1)
    join.job_store().set("left", "1")
    comm.job_mesh = leave_all
    comm.Ranks.with_separate_groups = leave_all
    attach.ATTACH_CALLED.append(True)
    PULSE.saved("step 7")
    DONE.append("a job")
    torch.set_num_threads(2)
    return os.getpid()


def test_a_job_finds_nothing_of_the_one_before() -> None:
    before = run_ranks(look, 2, threads=1, timeout_s=50.0)
    left = run_ranks(leave_all, 2, threads=2, timeout_s=70.0)
    after = run_ranks(look, 2, threads=1, timeout_s=50.0)
    assert left == [each["process"] for each in before], "the same processes"
    assert after == before


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are stopped on Linux alone")
def test_ranks_that_wait_for_long_take_no_processor() -> None:
    """Those whose number is not asked for: they are stopped, and work on when it is."""
    before = run_ranks(os.getpid, 2)
    while not {state_of(pid) for pid in before} == {"T"}:
        run_ranks(os.getpid, 1)
    assert run_ranks(os.getpid, 2) == before


def leave_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def leave_mode() -> None:
    torch.set_grad_enabled(False)


def leave_mesh() -> None:
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))


def leave_output() -> None:
    sys.stdout = sys.stderr


def leave_job() -> None:
    dist.destroy_process_group()


def leave_under_way() -> None:
    """Begin a collective through shared memory; only the second rank finds what it needs."""
    ranks = comm.Ranks({"dp": 2}, shares_memory=True)
    if dist.get_rank():
        dist.barrier()
    UNENDED.append(ranks.all_reduce_start(torch.ones(1), "dp"))
    if not dist.get_rank():
        dist.barrier()


UNENDED: list[object] = []


def leave_uneven() -> None:
    """Begin a call that the other rank does not make."""
    if dist.get_rank():
        dist.all_reduce(torch.ones(1), async_op=True)


@pytest.mark.parametrize(
    "leave",
    [
        leave_thread, leave_mesh, leave_uneven, by_hand(leave_under_way), by_hand(leave_mode),
        by_hand(leave_output), by_hand(leave_job),
    ],
)  # fmt: skip
def test_what_cannot_be_put_back_ends_the_ranks(leave: Callable[[], None]) -> None:
    before = run_ranks(os.getpid, 2)
    run_ranks(leave, 2)
    after = run_ranks(os.getpid, 2)
    assert not {*before} & {*after}


def refuse(which: int) -> None:
    if which in (dist.get_rank(), -1):
        raise AssertionError("refused")
    dist.barrier()


def test_ranks_that_all_refuse_stay_and_those_that_one_has_left_end() -> None:
    before = run_ranks(os.getpid, 2)
    with pytest.raises(RankFailed, match="refused"):
        run_ranks(refuse, 2, -1)
    assert run_ranks(os.getpid, 2) == before
    with pytest.raises(RankFailed, match="refused"):
        run_ranks(refuse, 2, 0)
    assert not {*before} & {*run_ranks(os.getpid, 2)}


@pytest.mark.fresh_ranks
def test_a_test_that_asks_gets_new_ranks() -> None:
    assert not {*run_ranks(os.getpid, 2)} & {*run_ranks(os.getpid, 2)}
