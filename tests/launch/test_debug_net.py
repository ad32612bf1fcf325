"""What native code prints about connections, in a file of each rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from phalanx.config import TrainConfig
from phalanx.errors import ConfigError
from phalanx.launch import debug_net
from phalanx.launch.local import run_ranks
from phalanx.train.job.resolve import resolve
from phalanx.train.job.run_folder import net_files
from phalanx.train.run import start
from small_run import small_run


def printed() -> str:
    """Print as Python does and as native code does; return the levels of this rank."""
    sys.stderr.write("of Python\n")
    sys.stderr.flush()
    os.write(2, b"of native code\n")
    return " ".join(os.environ[name] for name in ("TORCH_DISTRIBUTED_DEBUG", "NCCL_DEBUG"))


@pytest.mark.fresh_ranks
def test_native_code_prints_to_a_file_of_each_rank(tmp_path: Path) -> None:
    with debug_net.into(tmp_path / "logs"):
        assert run_ranks(printed, 2, threads=1) == ["INFO INFO"] * 2
    assert debug_net.VARIABLE not in os.environ
    for rank in range(2):
        text = (tmp_path / f"logs/net-rank-{rank}.log").read_text()
        assert "[c10d] The client socket has connected to" in text
        assert "[c10d - debug]" in text and "[c10d - trace]" not in text
        assert text.splitlines()[-1] == "of native code"
        assert "of Python" not in text


@pytest.mark.fresh_ranks
def test_a_run_has_these_files_beside_its_logs(tmp_path: Path) -> None:
    start(resolve(small_run(tmp_path, strategy="dp2", steps=1, debug_net=True)))
    logs = tmp_path / "run/logs"
    for rank in range(2):
        assert "[c10d]" in (logs / f"net-rank-{rank}.log").read_text()
        assert "[c10d]" not in (logs / f"rank-{rank}.log").read_text()


def test_ranks_of_a_launcher_need_to_know_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TrainConfig(debug_net=True)
    with net_files(asked, Path("new")):
        assert os.environ[debug_net.VARIABLE] == os.path.abspath("new/logs")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="before the ranks can agree on its name; give --out"):
        net_files(asked, Path("new"))
    with net_files(TrainConfig(), Path("new")):
        assert debug_net.VARIABLE not in os.environ
