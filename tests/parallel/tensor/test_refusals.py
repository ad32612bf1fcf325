"""What a layout would compute silently wrong is an error."""

import pytest
import torch
from torch import nn

from phalanx.errors import StrategyError
from phalanx.parallel.tensor import layers
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.branch import bind_branch
from phalanx.parallel.tensor.loss import check_range
from phalanx.strategy import Strategy


def test_ids_that_no_rank_holds() -> None:
    check_range(torch.tensor([[0, 4]]), 5, "an id")
    check_range(torch.empty(0, 3, dtype=torch.int64), 5, "an id")
    for ids in ([[0, 5]], [[-1, 2]]):
        with pytest.raises(IndexError, match=r"an id is out of range.*the vocabulary has 5"):
            check_range(torch.tensor(ids), 5, "an id")


class Shifted(nn.Module):
    """A norm that weighs by 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.eps = 1e-6


def test_a_norm_whose_formula_is_not_known() -> None:
    layers.bind_norm(nn.LayerNorm(8), layout_of(Strategy.parse("tp4:2d")))
    layers.bind_norm(Shifted(), layout_of(Strategy.parse("tp4")))  # features are whole
    with pytest.raises(StrategyError, match="Shifted is not a norm that tp can compute"):
        layers.bind_norm(Shifted(), layout_of(Strategy.parse("tp4:2d")))


def test_a_column_map_that_reads_something_else() -> None:
    column = nn.Linear(8, 8)
    branch = nn.Sequential(column)
    bind_branch(branch, layout_of(Strategy.parse("tp2")), [column], [1])
    with pytest.raises(StrategyError, match="column map of Sequential reads a tensor that is not"):
        column(torch.zeros(1, 2, 8))
