"""Files between processes: their bytes, and a process that is lost while it sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.comm import file_exchange
from phalanx.comm.file_exchange import FileExchange, FileTransfer
from phalanx.comm.join import job_store
from phalanx.errors import PeerLost
from phalanx.launch.local import run_ranks


def move(folder: Path) -> None:
    """Send a file of three messages to rank 0, then lose rank 1 after one of another file."""
    file_exchange.CHUNK_BYTES = 100
    rank = dist.get_rank()
    here = folder / str(rank)
    here.mkdir()
    if rank == 1:
        (here / "a").write_bytes(bytes(range(250)))
    exchange = FileExchange(dist.PrefixStore("files", job_store()), rank, 2, 60.0)
    exchange.run([FileTransfer(1, 0, "a", 250)], here)
    assert (here / "a").read_bytes() == bytes(range(250))
    assert exchange.bytes_sent == 250 * rank
    if rank == 1:  # lost after one message of the file
        exchange.run([FileTransfer(1, 0, "a", 100)], here)
        del exchange
    else:
        with pytest.raises(PeerLost, match="a host that sends or gets files has gone"):
            exchange.run([FileTransfer(1, 0, "b", 250)], here)
        assert not (here / "b").exists()


def test_a_file_of_a_lost_process_gets_no_final_name(tmp_path: Path) -> None:
    run_ranks(move, 2, tmp_path, threads=1)
