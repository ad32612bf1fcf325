"""The sampler for loops of one's own: the laws of torch's, and going on from anywhere."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from phalanx.data.order import permute
from phalanx.data.sampler import GlobalSampler
from phalanx.errors import ConfigError

sizes = st.integers(1, 40)
replicas = st.integers(1, 9)


@given(n=sizes, num_replicas=replicas, drop_last=st.booleans())
def test_sampler_is_torchs_without_shuffling(n: int, num_replicas: int, drop_last: bool) -> None:
    if drop_last and n < num_replicas:
        return  # torch computes a negative number of samples there
    for rank in range(num_replicas):
        names = dict(num_replicas=num_replicas, rank=rank, shuffle=False, drop_last=drop_last)
        ours, theirs = GlobalSampler(range(n), **names), DistributedSampler(range(n), **names)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@given(n=sizes, num_replicas=replicas, drop_last=st.booleans(), epoch=st.integers(0, 5))
def test_sampler_follows_torchs_laws_with_shuffling(
    n: int, num_replicas: int, drop_last: bool, epoch: int
) -> None:
    ranks = [
        GlobalSampler(range(n), num_replicas, rank, seed=3, drop_last=drop_last)
        for rank in range(num_replicas)
    ]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    drawn = [list(sampler) for sampler in ranks]
    assert [len(sampler) for sampler in ranks] == [len(part) for part in drawn]
    assert len({len(part) for part in drawn}) == 1
    together = [sample for row in zip(*drawn, strict=True) for sample in row]
    order = permute(np.arange(n), n, 3, epoch).tolist()
    total = len(together)
    assert together == (order * (total // n + 1))[:total]
    assert abs(total - n) < num_replicas
    assert (total <= n) if drop_last else (total >= n)


@given(n=sizes, before=replicas, after=replicas, turns=st.integers(0, 10), shuffle=st.booleans())
def test_sampler_goes_on_with_other_ranks(
    n: int, before: int, after: int, turns: int, shuffle: bool
) -> None:
    first = [GlobalSampler(range(n), before, rank, shuffle) for rank in range(before)]
    seen: list[int] = []
    for sampler in first:
        sampler.set_epoch(2)
        stream = iter(sampler)
        seen += [sample for _, sample in zip(range(turns), stream, strict=False)]
    state = first[0].state_dict()
    assert state == {"epoch": 2, "consumed": min(n, turns * before)}
    second = [GlobalSampler(range(n), after, rank, shuffle) for rank in range(after)]
    for sampler in second:
        sampler.load_state_dict(state)
        sampler.set_epoch(2)
        num_left, rest = len(sampler), list(sampler)
        assert num_left == len(rest)
        seen += rest
    assert set(seen) == set(range(n))
    assert len(seen) < n + before + after


def test_sampler_state_at_the_end_of_an_epoch() -> None:
    sampler = GlobalSampler(range(5), 2, 0, shuffle=False)
    assert list(sampler) == [0, 2, 4]
    assert sampler.state_dict() == {"epoch": 0, "consumed": 5}
    assert list(sampler) == [0, 2, 4]
    other = GlobalSampler(range(5), 2, 1, shuffle=False)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == []
    other.set_epoch(1)
    assert list(other) == [1, 3, 0]
    with pytest.raises(ConfigError, match="consumed 6"):
        other.load_state_dict({"epoch": 0, "consumed": 6})


def test_sampler_works_in_a_data_loader_and_alone() -> None:
    data = torch.arange(6)
    batches = DataLoader(data, batch_size=4, sampler=GlobalSampler(data, shuffle=False))
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(ValueError, match="Invalid rank 2"):
        GlobalSampler(data, 2, 2)
