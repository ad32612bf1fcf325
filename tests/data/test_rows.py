"""Batches of any form: what is done to their tensors leaves the form alone."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from phalanx.data.rows import map_batch


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Inner:
    x: Any


def test_the_form_of_a_batch_is_kept() -> None:
    one = torch.ones(1)
    batch = {"plain": (one, [one, None]), "named": Pair(one, one), "inner": Inner(UserDict(x=one))}
    doubled = map_batch(batch, lambda tensor: 2 * tensor)
    assert type(doubled["plain"]) is tuple and type(doubled["plain"][1]) is list
    assert type(doubled["named"]) is Pair and float(doubled["named"].y) == 2
    assert float(doubled["plain"][1][0]) == 2 and doubled["plain"][1][1] is None
    assert type(doubled["inner"]) is Inner and float(doubled["inner"].x["x"]) == 2
