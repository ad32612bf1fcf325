"""Starting ranks: results in order, the first failure named, nothing left behind."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import ConfigError, PhalanxError, RankFailed
from phalanx.launch.local import run_ranks


def rank_and_sum(offset: int) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def test_results_come_in_the_order_of_the_ranks() -> None:
    assert run_ranks(rank_and_sum, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the user's own words")
    dist.all_reduce(torch.zeros(1))  # the others wait for rank 1


def test_a_rank_that_raises_ends_the_job_with_its_own_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(raise_on_rank_one, 3)
    assert time.monotonic() - start < 10
    assert caught.value.rank == 1
    assert str(caught.value).endswith("ValueError: the user's own words")
    assert "raise_on_rank_one" in caught.value.traceback


def kill_rank_two() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        run_ranks(kill_rank_two, 3)
    assert caught.value.rank == 2


def refuse() -> None:
    raise ConfigError("degree is 3; 2 is the nearest")


def test_an_error_of_the_users_keeps_its_message_and_exit_code() -> None:
    with pytest.raises(PhalanxError, match=r"^degree is 3; 2 is the nearest$") as caught:
        run_ranks(refuse, 2)
    assert caught.value.exit_code == 2


def pid_then_fail() -> None:
    raise RuntimeError(str(os.getpid()))


def test_no_process_is_left_behind() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(pid_then_fail, 2)
    pid = int(caught.value.traceback.split()[-1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
