"""The balance of a model's experts over the global batch: auxiliary losses, and biases.

With f_e the selections of expert e a token, and P_e its mean part in the scores, over the N valid
tokens of the global batch (labels that are not IGNORE), a router adds to the loss

    aux_loss * E sum_e f_e P_e      Fedus et al., Switch Transformers, 2021, equation 4
    z_loss * mean square            of the log-sum-exp of the logits: Zoph et al., ST-MoE, 2022

f_e P_e is a product of two means, so the sum or mean of the losses of parts of a batch is another
loss. Its gradient starts from the derivatives aux_loss * E f_e / N and z_loss / N by the sums over
tokens, which are all that a rank needs of other ranks, and needs before its first backward:

    one microbatch       forward (counts) -> all-reduce -> backward
    several, or pp       forwards without gradients (count) -> all-reduce -> forward, backward, ...
    neither loss         forward, backward, ...             -> all-reduce if there are biases,
                                                               or if the step is recorded

The all-reduce is one call of [L, 2 E + 2] float64 numbers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm.comm import Comm
from phalanx.measure.expert_load import Routing
from phalanx.models.decoder import Decoder
from phalanx.models.experts import Load, Router


class Balance:
    """The auxiliary losses and the biases of a model's routers, in one step after the other.

    Nothing is counted, sent or added for a model without experts.

    Attributes:
        shape: the experts of the model; None without any.
        has_losses, needs_counts: `has_losses` and `needs_loads` of `shape`.
        counts: `Load.counts` of all layers, [L, 2 E + 2]: of this rank, and after `reduce` of all
            ranks.
        is_reduced: whether `counts` are of all ranks.
        is_recorded: whether the next step's routing is recorded, so that its counts are reduced.
        losses: the balancing loss and the z loss of the latest step, float64 [2].
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self.comm = comm
        self.is_reduced = self.is_recorded = False
        self.counts = torch.empty(0)
        self.losses = torch.zeros(2, dtype=torch.float64)
        self._routers = [each for each in model.modules() if isinstance(each, Router)]
        # A stage of a pipeline may have no router, and yet takes part in the all-reduce.
        decoder = next((each for each in model.modules() if isinstance(each, Decoder)), None)
        self.shape = None if decoder is None else decoder.shape.experts
        self._num_layers = 0 if decoder is None else decoder.shape.num_layers
        self.has_losses = self.shape is not None and self.shape.has_losses
        self.needs_counts = self.shape is not None and self.shape.needs_loads

    def needs_first_pass(self, num_microbatches: int) -> bool:
        """Return whether forwards of their own count the step's tokens, see `ExpertShape`."""
        stages = self.comm.size("pp")
        return self.shape is not None and self.shape.needs_first_pass(num_microbatches, stages)

    def begin(self) -> None:
        """Begin a step: its first forwards count."""
        if self.shape is None:
            return
        size = self._num_layers, 2 * self.shape.num_experts + 2
        self.counts = torch.zeros(size, dtype=torch.float64, device=self.comm.device)
        self.is_reduced = False
        for router in self._routers:
            router.load = Load(self.counts[router.layer])

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count in the forward inside, unless the step has counted all tokens already."""
        loads = [router.load for router in self._routers if router.load is not None]
        for load in loads:
            load.is_counting = not self.is_reduced
        yield
        for load in loads:
            load.is_counting = False

    def reduce(self, scale: Tensor) -> None:
        """Sum the counts over ranks, once a step, and set the slopes of the losses times `scale`.

        Every rank calls this together, after all its forwards that count.
        """
        if self.shape is None or self.is_reduced:
            return
        self.comm.all_reduce(self.counts, "loss")
        self.is_reduced = True
        selections_LE, _, _, num_tokens = self._split()
        shape = self.shape
        f_LE = selections_LE / num_tokens
        if shape.pools_layers:
            f_LE = f_LE.sum(0).expand_as(f_LE) / (self._num_layers - shape.first_dense) ** 2
        slopes_LE = F.pad(shape.aux_loss * shape.num_experts * f_LE, (0, 1), value=shape.z_loss)
        for router in self._routers:
            assert router.load is not None
            router.load.slopes = slopes_LE[router.layer] / num_tokens * scale

    def end(self) -> None:
        """End the step, whose forwards are done; `counts` stay."""
        for router in self._routers:
            router.load = None

    def loss(self) -> Tensor:
        """Return the sum of the auxiliary losses of the step, 0-d float64, equal on all ranks."""
        shape = self.shape
        assert shape is not None and self.is_reduced
        selections_LE, parts_LE, squares_L, num_tokens = self._split()
        f_LE, mean_LE = selections_LE / num_tokens, parts_LE / num_tokens
        if shape.pools_layers:
            num_routers = self._num_layers - shape.first_dense
            f_LE, mean_LE = f_LE.sum(0) / num_routers, mean_LE.sum(0) / num_routers
        aux = shape.num_experts * (f_LE * mean_LE).sum()
        z_loss = shape.z_loss * squares_L.sum() / num_tokens
        self.losses = torch.stack([shape.aux_loss * aux, z_loss])
        return self.losses.sum()

    def recorded(self) -> list[Tensor]:
        """Return the numbers that `routing` takes; none unless the step is recorded."""
        if self.shape is None or not (self.is_recorded and self.is_reduced):
            return []
        return [self.losses, self.counts]

    def routing(self, numbers: Sequence[float]) -> Routing | None:
        """Return the routing of the step whose `recorded` numbers these are."""
        if self.shape is None or not numbers:
            return None
        size, first = self.shape.num_experts, self.shape.first_dense
        rows_LC = torch.tensor(numbers[2:], dtype=torch.float64).view(self._num_layers, -1)[first:]
        return Routing.of(
            [*range(first, self._num_layers)],
            rows_LC[:, :size].long().tolist(),
            rows_LC[:, -1].tolist(),
            self.comm.size("ep"),
            (numbers[0], numbers[1]),
        )

    @torch.no_grad()
    def update_biases(self) -> None:
        """Move each bias by `bias_rate` toward the mean load; every rank calls this together.

        Wang et al., Auxiliary-Loss-Free Load Balancing, 2024, algorithm 1.
        """
        if self.shape is None or not self.shape.bias_rate:
            return
        selections_LE = self._split()[0]
        signs_LE = (selections_LE.mean(1, keepdim=True) - selections_LE).sign()
        for router in self._routers:
            assert router.bias is not None
            router.bias += self.shape.bias_rate * signs_LE[router.layer].to(router.bias)

    def _split(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return selections_LE, sums of parts_LE and of squares_L, and the number of tokens."""
        assert self.shape is not None
        size = self.shape.num_experts
        selections_LE, parts_LE, rest_L2 = self.counts.split([size, size, 2], 1)
        # All layers see the same tokens.
        num_tokens = selections_LE[-1].sum().div(self.shape.top_k).clamp(min=1)
        return selections_LE, parts_LE, rest_L2[:, 0], num_tokens
