"""A communicator of a single rank, for work that does not communicate with the process's job."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.comm.comm import Comm
from phalanx.comm.pending import Pending


class SingleRankComm(Comm):
    """A communicator of a single rank: every collective returns its input and sends nothing."""

    def __init__(self) -> None:
        super().__init__({"dp": 1}, {"dp": 0}, torch.device("cpu"))

    @override
    def _run(
        self, op: str, axis: str, out: Tensor, given: Tensor, option: Any = None, *,
        is_spent: bool = False,
    ) -> Pending:  # fmt: skip
        raise AssertionError(f"{op}: there is no other rank on {axis}")
