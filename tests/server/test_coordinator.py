"""The journal, the fence against an older coordinator, and who holds what."""

from pathlib import Path

import pytest

from phalanx.server.coordinator import Fenced, JobJournal


def test_a_later_coordinator_ends_an_older_one(tmp_path: Path) -> None:
    first = JobJournal(tmp_path / "journal")
    first.save({"epoch": 1})
    second = JobJournal(tmp_path / "journal")
    assert second.term == first.term + 1 and second.load() == {"epoch": 1}
    with pytest.raises(Fenced):
        first.save({"epoch": 2})
    second.save({"epoch": 3})
    second.close()
    first.close()
    third = JobJournal(tmp_path / "journal")
    assert third.load() == {"epoch": 3}
    third.close()
