"""A state is read again as it was, or is refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.encoding import decoded, encoded
from phalanx.errors import CheckpointError

NAMES = st.sampled_from(["a", "pairs", "counter", "a tuple", ""])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAMES
KEYS: st.SearchStrategy[Any] = st.recursive(PLAIN, lambda of: st.tuples(of, of), max_leaves=4)
STATES: st.SearchStrategy[Any] = st.recursive(
    PLAIN,
    lambda of: (
        st.lists(of, max_size=3)
        | st.tuples(of)
        | st.dictionaries(KEYS, of, max_size=2)
        | st.dictionaries(KEYS, st.integers(), max_size=2).map(Counter)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(STATES)
def test_a_state_is_read_again_as_it_was(state: Any) -> None:
    try:
        written = encoded(state, "it")
    except CheckpointError as error:
        assert "nested too deeply" in str(error)
        return
    again = decoded(json.loads(json.dumps(written)))
    assert (again, repr(again)) == (state, repr(state))


@pytest.mark.parametrize("state", [{1, 2}, {"a": b"b"}, {frozenset({1}): 2}, [1j], "\ud800"])
def test_a_state_that_could_not_be_read_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot save the state of it: "):
        encoded(state, "it")
