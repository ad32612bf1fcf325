"""What a host has left, by the system and by control groups of both kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.account import host


@pytest.mark.parametrize(
    ("group", "limit", "use"),
    [
        (".", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_limit_counts_what_files_can_give_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, limit: str, use: str
) -> None:
    """Pages of files are counted as used, and given back to whoever needs them."""
    (tmp_path / group).mkdir(exist_ok=True)
    monkeypatch.setattr(host, "_GROUPS", tmp_path)
    unlimited = host.free_memory_bytes()
    assert unlimited > 1000
    (tmp_path / group / limit).write_text("1000\n")
    (tmp_path / group / use).write_text("900\n")
    assert host.free_memory_bytes() == 100
    (tmp_path / group / "memory.stat").write_text("anon 500\ninactive_file 300\nactive_file 50\n")
    assert host.free_memory_bytes() == 450
    (tmp_path / group / limit).write_text("max\n")
    assert host.free_memory_bytes() > 1000
