"""A slow link: values and counted bytes are those of the engine, and sending takes bytes / rate."""

from __future__ import annotations

import time

import pytest
import torch

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry, Ledger
from phalanx.launch.local import run_ranks

BYTES_PER_S = 1e6


def collectives(bytes_per_s: float | None) -> tuple[list[torch.Tensor], list[Entry], float]:
    comm = Ranks({"pp": 2}, bytes_per_s=bytes_per_s, shares_memory=False)
    coord = comm.coord("pp")
    own = torch.arange(10_000, dtype=torch.float64) + coord
    begin_s = time.monotonic()
    with Ledger(comm) as ledger:
        started = comm.all_reduce_start(own.clone(), "pp")
        received = comm.recv_start(torch.empty_like(own), "pp", 1 - coord)
        sent = comm.send_start(own, "pp", 1 - coord)
        results = [started.wait(), received.wait(), sent.wait()]
        results += [comm.all_gather(own, "pp", 0), comm.reduce_scatter(own, "pp", 0)]
        results += [comm.all_to_all(own[None], "pp", 1, 0), comm.swap(own, "pp", 1 - coord)]
    return results, ledger.entries(), time.monotonic() - begin_s


@pytest.mark.fresh_ranks
def test_a_slow_link_changes_only_the_time() -> None:
    plain = run_ranks(collectives, 2, None)
    slow = run_ranks(collectives, 2, BYTES_PER_S)
    for (values, entries, _), (slow_values, slow_entries, seconds) in zip(plain, slow, strict=True):
        assert all(map(torch.equal, values, slow_values))
        assert slow_entries == entries
        assert seconds >= sum(entry.sent_bytes for entry in entries) / BYTES_PER_S
