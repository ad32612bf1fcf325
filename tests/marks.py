"""Marks that several tests share."""

from typing import Any

import pytest


def by_hand(*values: object) -> Any:
    """Return a case that takes two cores long, for `-m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)
