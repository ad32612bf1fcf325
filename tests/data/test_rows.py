"""Batches of any form: what is done to their tensors leaves the form alone."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from phalanx.data.rows import map_batch, take_rows


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


@pytest.mark.parametrize("rows", [torch.tensor([2, 0]), slice(2, 3), slice(0, 0)])
def test_lists_of_names_and_numbers_have_a_row_each(rows: torch.Tensor | slice) -> None:
    whole = torch.arange(3)
    names = ["a", "b", "c"]
    batch = {
        "x": whole,
        "in": (names, Inner(UserDict(y=(0.0, 1.0, 2.0)))),
        "of": "abc",
        "pair": [8],
    }
    taken = take_rows(batch | {"scale": torch.tensor(0.5)}, rows)
    numbers = whole[rows].tolist()
    assert taken["x"].tolist() == numbers
    assert taken["in"][0] == [names[number] for number in numbers]
    assert taken["in"][1].x["y"] == tuple(map(float, numbers))
    assert float(taken["scale"]) == 0.5 and taken["of"] == "abc" and taken["pair"] == [8]
