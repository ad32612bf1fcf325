"""Python values pass between ranks, and asking for a rare one moves a number only."""

from __future__ import annotations

import torch.distributed as dist

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.comm.together import first_object, gather_objects
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy


def ask(whose: tuple[int, ...]) -> tuple[object, int]:
    """Return the first value where some ranks have one, and the collectives it took."""
    rank = dist.get_rank()
    with Ledger(Ranks(Strategy.parse("dp3"))) as ledger:
        found = first_object(f"words of {rank}" if rank in whose else None)
    return found, sum(entry.calls for entry in ledger.entries())


def exchange() -> list[object]:
    return [gather_objects({"rank": dist.get_rank()}), ask(()), ask((2,)), ask((1, 2))]


def test_values_of_all_and_the_first_value_of_some() -> None:
    for gathered, none, one, two in run_ranks(exchange, 3, threads=1):
        assert gathered == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert none == (None, 1)
        assert one[0] == "words of 2" and two[0] == "words of 1"
