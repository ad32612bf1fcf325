"""A change of structure changes no number of tests/goldens, which `goldens.py` writes."""

from __future__ import annotations

import pytest

import goldens


@pytest.mark.parametrize("section", ["ledger", pytest.param("plan", marks=pytest.mark.slow)])
def test_numbers_are_those_that_were_written(section: str, subtests: pytest.Subtests) -> None:
    counted, written = goldens.SECTIONS[section](), goldens.read(section)
    assert [*counted] == [*written]
    for name, value in counted.items():
        with subtests.test(name):
            assert value == written[name]
