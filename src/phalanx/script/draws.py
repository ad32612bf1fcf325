"""Random numbers for the rows of a batch: drawn as on one process, then split over the ranks.

    noise = torch.randn_like(x)                            equal numbers on all ranks with one seed
    noise = run.draw(lambda rows: torch.randn(rows, 8))    this rank's rows of one process's numbers

The loaders of a job and `run.draw` share a generator. At first use it copies the state of torch's
own generator on rank 0, so one process draws the same numbers in the same order. Other draws of a
loop come from each rank's own generator, and cause a warning (guards/random_draws.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from phalanx.comm.comm import Comm
from phalanx.data.rows import map_batch
from phalanx.errors import ScriptError
from phalanx.script.checks import check_arguments
from phalanx.script.deal import shard_rows
from phalanx.script.loader import RankLoader
from phalanx.script.order import JobGenerator


def draw_rows(
    make: Callable[[int], Any],
    generator: JobGenerator,
    loader: RankLoader | None,
    comm: Comm,
    num_rows: int | None,
) -> Any:
    """Return this rank's rows of the numbers that `make` draws for a batch, see `Run.draw`.

    `loader` yielded the last batch; it is None before the first batch. `num_rows` are the rows of
    all ranks, or None for the rows of the last batch.
    """
    if num_rows is not None:
        check_arguments("draw", rows=num_rows)
        (own,) = shard_rows(range(num_rows), comm.coord("data"), comm.size("data"), 1)
    elif loader is None:
        raise ScriptError(
            "draw: no batch of a prepared DataLoader has been read, so the number of rows is "
            "unknown; call run.draw inside the loop over batches, or give rows=, the rows of all "
            "ranks"
        )
    else:
        num_rows, own = loader.num_batch_rows, loader.own_rows
    with generator.as_torch_generator():
        whole = make(num_rows)

    def take(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            raise ScriptError(
                f"draw: the function returns a tensor on {tensor.device.type}, drawn by this "
                "rank's own generator there; draw on the CPU: run.draw moves the rows to "
                "run.device"
            )
        if tensor.ndim == 0 or len(tensor) != num_rows:
            raise ScriptError(
                f"draw: the function returns a tensor of shape {tuple(tensor.shape)}; expected "
                f"{num_rows} rows, the number that is passed to it: the rows of the batch on all "
                "ranks"
            )
        return tensor[own.start : own.stop].to(comm.device)

    return map_batch(whole, take)
