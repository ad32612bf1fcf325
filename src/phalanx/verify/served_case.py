"""The step of a case with parameter servers, which run as threads of the first rank.

After each step, the summed gradients, weights and moments are copied from the servers to the
workers, so that they are compared as under any other strategy.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from phalanx.comm.comm import SingleRankComm
from phalanx.comm.together import barrier, broadcast_object
from phalanx.config.schema import ServerConfig
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.processes import local_roles
from phalanx.strategy import Strategy
from phalanx.train.served_step import ClockedStep
from phalanx.train.step import Step, StepResult


@contextmanager
def served_step(
    strategy: Strategy, rank: int, *args: Any, num_steps: int, **more: Any
) -> Generator[Step]:
    """Start servers on rank 0 and connect; the step is built from the arguments of `Step`.

    Every rank enters and leaves this together.
    """
    with ExitStack() as servers:
        meeting = servers.enter_context(local_roles()).meeting if rank == 0 else None
        meeting = broadcast_object(meeting)
        consistency = Consistency(strategy.dp.kind, strategy.dp.degree, strategy.dp.option or 0)
        client = Client(meeting, rank, consistency, (0, num_steps))
        step = _CopyingStep(*args, num_steps=num_steps, **more, comm=SingleRankComm())
        step.join(client, ServerConfig(), is_first=rank == 0)
        yield step
        client.close()
        barrier()


class _CopyingStep(ClockedStep):
    """Step that copies the servers' gradients, weights and moments back to the worker."""

    def compute_gradients(self, microbatches: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, num_valid = super().compute_gradients(microbatches)
        flats = [torch.empty_like(flat) for flat in self.flat.weights]
        self.client.gradient(flats, self.steps_done + 1)
        self.flat.give_gradients([flat / num_valid.clamp(min=1) for flat in flats])
        barrier()  # the first pull applies the sum, so all ranks read the gradient before it
        return loss, num_valid

    def apply_gradients(self, loss: torch.Tensor, num_valid: torch.Tensor) -> StepResult:
        result = super().apply_gradients(loss, num_valid)
        self.before_save()
        barrier()
        return result
