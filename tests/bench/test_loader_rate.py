"""The rate of a loader alone, and the rate that a run's model takes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from phalanx.bench.loader_rate import DataConfig, run, samples_taken, time_loader, with_workers
from phalanx.errors import ConfigError
from phalanx.review.run_records import RunRecords

LOADERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def few():
    return DataLoader(TensorDataset(torch.zeros(64, 3), torch.zeros(64)), batch_size=4)

def none():
    return [1, 2]
"""


class Stream(IterableDataset[int]):
    """Yields 0, 1, 2."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def loader(num_rows: int) -> DataLoader[object]:
    return DataLoader(TensorDataset(torch.zeros(num_rows, 3), torch.zeros(num_rows)), batch_size=4)


def test_samples_and_bytes_of_all_batches_after_the_warm_up_count() -> None:
    rate = time_loader("", loader(22), 60)  # batches of 4 4 | 4 4 4 2 rows
    assert (rate.num_samples, rate.num_bytes) == (14, 14 * 16)
    assert rate.samples_per_s == pytest.approx(14 / rate.seconds)
    with pytest.raises(ConfigError, match="2 batches"):
        time_loader("", loader(8), 60)


def test_the_batches_of_more_workers_are_the_same() -> None:
    plain, two = loader(22), with_workers(loader(22), 2)
    assert two.num_workers == 2 and len(two) == len(plain)
    assert [batch.tolist() for batch in with_workers(DataLoader(Stream(), 2), 0)] == [[0, 1], [2]]


def test_a_data_rank_takes_its_part_of_a_step_without_the_data_term() -> None:
    steps = RunRecords(Path())
    steps.columns = {
        "step": array("d", [1, 2]),
        "tokens": array("d", [64, 64]),
        "wall_s": array("d", [0.5, 0.5]),
        "data_s": array("d", [0.1, 0.1]),
    }
    steps.config = {"strategy": "dp2,tp2", "corpus": {"seq_len": 8}}
    assert samples_taken(steps) == pytest.approx(64 / 8 / 2 / 0.4)
    steps.unit = "samples"
    assert samples_taken(steps) == pytest.approx(64 / 2 / 0.4)
    assert samples_taken(RunRecords(Path())) is None


def test_a_loader_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own_loaders.py").write_text(LOADERS)
    found = run(DataConfig(loader=f"{tmp_path}/own_loaders.py:few", seconds=0.1), print)
    assert [each["name"] for each in found.values["loaders"]] == [
        "0 workers", "1 worker", "2 workers",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="returned list"):
        run(DataConfig(loader=f"{tmp_path}/own_loaders.py:none"), print)
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        run(DataConfig(), print)
