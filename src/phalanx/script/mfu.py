"""MFU of a trainer's steps: the FLOPs of their rows beside the rate of products on the devices.

The rate is that of products in the data type in which the model computes most of its own, which
may be another than its parameters have: an autocast within the forward decides it. It is measured
after the first step, in which the products are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from phalanx.comm.comm import Comm
from phalanx.comm.watch import Watch
from phalanx.data.rows import tensors_of
from phalanx.measure.products import arithmetic_in, quick_ceiling
from phalanx.script.flops import Flops, row_shapes


class ProductTypes(Watch):
    """Notes the data types of the products that run inside `with ProductTypes() as types:`."""

    def __init__(self) -> None:
        super().__init__()
        self._flops = Counter[torch.dtype]()

    @property
    def most(self) -> torch.dtype | None:
        """The data type of most FLOPs; None if there were no products."""
        return max(self._flops, key=lambda dtype: self._flops[dtype]) if self._flops else None

    @override
    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the operator if it is a product, and run it."""
        result = func(*args, **kwargs)
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            factor = next(each for each in (*args, result) if isinstance(each, Tensor))
            self._flops[factor.dtype] += count(*args, **kwargs, out_val=result)
        return result


class Mfu:
    """Says what share of the rate of products a step takes; None where it is not known."""

    def __init__(self, flops: Flops | None, comm: Comm) -> None:
        """Take the FLOPs of a batch of one process."""
        self._flops = flops
        self._comm = comm
        self._rate: float | None = None

    def measure(self, types: ProductTypes) -> None:
        """Measure the rate of all ranks, once one has seen a step; every rank calls this."""
        dtype, device = types.most, self._comm.device
        arithmetic = None if dtype is None else arithmetic_in(dtype, device)
        own = 0.0 if arithmetic is None else quick_ceiling(device, arithmetic)
        rates = torch.tensor([own, own > 0], dtype=torch.float64).to(device)
        total, num_known = self._comm.all_reduce(rates, "job").tolist()
        self._rate = total if num_known == self._comm.size("job") else None

    def look(self, microbatches: Sequence[Any]) -> None:
        """Look at a step's rows: of other shapes than were counted, their FLOPs are not known.

        Rows that are padded to the longest of their batch are of one shape only by chance, so
        nothing is known of the steps that follow, either.
        """
        filled = [each for each in microbatches if any(len(t) for t in tensors_of(each))]
        if self._flops and any(row_shapes(each) != self._flops.row_shapes for each in filled):
            self._flops = None

    def share(self, step_s: float, num_rows: int | None = None) -> float | None:
        """Return the MFU of a step of a global batch of so many rows, as of the first if None."""
        if self._flops is None or self._rate is None:
            return None
        rows = self._flops.num_rows if num_rows is None else num_rows
        share = self._flops.total * rows / self._flops.num_rows / step_s / self._rate
        return share if share <= 1 else None
