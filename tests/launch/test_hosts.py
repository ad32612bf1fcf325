"""Hosts as text and as files, of DeepSpeed's form and of MPI's."""

import socket
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.launch.hosts import Host, parse_hosts, read_hostfile


def test_hosts_are_names_with_numbers_of_ranks() -> None:
    assert parse_hosts("a:2, kim@b.lab:16,10.0.0.3") == (
        Host("a", 2),
        Host("b.lab", 16, "kim"),
        Host("10.0.0.3"),
    )
    assert [str(host) for host in parse_hosts("a:2,kim@b,c")] == ["a:2", "kim@b", "c"]


@pytest.mark.parametrize("text", ["", "a:0", "a:", "a:x", "@a", "a b", "a;b", "-oProxyCommand=x"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not legal; expected a:2,b:2 or user@a:2"):
        parse_hosts(text)


def test_a_host_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"host a is named 2 times; .* with all its ranks: a:5"):
        parse_hosts("a:2,b:2,a:3")


def test_files_of_both_forms(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two machines\nworker-1 slots=4\n\nkim@worker-2 slots=2 max_slots=4  # old\n")
    assert read_hostfile(file) == (Host("worker-1", 4), Host("worker-2", 2, "kim"))
    file.write_text("node1:2\nnode2\n")
    assert read_hostfile(file) == (Host("node1", 2), Host("node2"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb slots=two\n", "hosts:2: 'b slots=two' is no host"),
        ("# none\n", "names no host"),
        (None, "No such file"),
    ],
)
def test_other_files_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(tmp_path / "hosts")


def test_this_machine_is_known_by_its_name_with_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    monkeypatch.setattr(socket, "getfqdn", lambda: "a.home")
    assert Host("a").is_local and Host("a.home").is_local
    assert not Host("a.local").is_local and not Host("b.home").is_local
