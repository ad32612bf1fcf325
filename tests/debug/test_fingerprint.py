"""What differs between calls, and where a call stands."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.debug.fingerprint import Fingerprint, difference, find_places


def test_the_odd_rank_out_is_named() -> None:
    calls = {rank: Fingerprint("all_reduce", "sum", "float32", "[4]") for rank in (4, 5, 6, 7)}
    assert difference(calls, lambda _: True) is None
    calls[4] = Fingerprint("all_reduce", "max", "float32", "[4]")
    assert difference(calls, lambda _: True) == (5, 4, "reduction: sum and max")


def test_names_count_only_where_a_rank_has_both() -> None:
    tied = {
        0: Fingerprint("all_reduce", tensor="embedding"),
        1: Fingerprint("all_reduce", tensor="head"),
    }
    assert difference(tied, {"embedding"}.__contains__) is None
    assert difference(tied, {"embedding", "head"}.__contains__) == (
        0,
        1,
        "tensor: embedding and head",
    )
    unnamed = {0: Fingerprint("all_reduce", tensor="embedding"), 1: Fingerprint("all_reduce")}
    assert difference(unnamed, {"embedding", ""}.__contains__) is None


def test_a_place_is_told_where_the_working_directory_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    scope: dict[str, Any] = {}
    exec(compile("import sys\nframe = sys._getframe()", "/somewhere/script.py", "exec"), scope)
    assert find_places(scope["frame"])[0][0] == "/somewhere/script.py:2 in <module>"
