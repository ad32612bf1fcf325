"""What torchrun or Slurm say of a process, and what cannot be."""

import pytest

from phalanx.errors import ConfigError
from phalanx.launch.rank_env import read_rank_env


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, "from 0 to 3"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one'"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc'"),
        (
            {"RANK": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            "RANK 0 of WORLD_SIZE 4 cannot",
        ),
        (
            {"RANK": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "RANK 3 of WORLD_SIZE 4 cannot",
        ),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1 and LOCAL_WORLD_SIZE is 1; LOCAL_RANK counts from"),
        ({"WORLD_SIZE": "1" * 5000}, r"WORLD_SIZE is '1{9}\.\.\.'; expected .* at most 9 digits"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; expected a whole number from 1"),
        ({"RANK": "\x1b[31m"}, r"RANK is '\\x1b\[31m'; expected a whole number from 0"),
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4; RANK counts from 0 to 3"),
    ],
)
def test_a_broken_environment(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        read_rank_env()
