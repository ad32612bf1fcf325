"""Freed memory stays with the process: the same blocks cost no page faults again."""

import multiprocessing
import platform
import resource

import pytest
import torch

from phalanx.launch.local import run_ranks

pytestmark = pytest.mark.fresh_ranks


def faults() -> int:
    """Count the page faults of taking and freeing a block that fits where others have been.

    Return the least of several times, each for a smaller block: something small may have been put
    where they were.
    """
    counts = []
    for mebibytes in range(64, 34, -3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(mebibytes * 2**20 // 4)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts[1:])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_rank_keeps_what_it_has_freed() -> None:
    assert run_ranks(faults, 1)[0] < 100
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(faults) > 100  # in a process that has not asked for it
