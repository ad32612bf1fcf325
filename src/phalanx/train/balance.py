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
    neither loss         forward, backward, ...             -> all-reduce if there are biases

The all-reduce is one call of [L, 2 E + 2] float64 numbers.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from phalanx.comm.comm import Comm
from phalanx.models.decoder import Decoder
from phalanx.models.experts import Load, Router


class Balance:
    """The auxiliary losses and the biases of a model's routers, in one step after the other.

    Nothing is counted, sent or added for a model without experts.

    Attributes:
        shape: the experts of the model; None without any.
        counts: `Load.counts` of all layers, [L, 2 E + 2]: of this rank, and after `reduce` of all
            ranks.
        is_reduced: whether `counts` are of all ranks.
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self.comm = comm
        self.is_reduced = False
        self.counts = torch.empty(0)
        self._routers = [each for each in model.modules() if isinstance(each, Router)]
        # A stage of a pipeline may have no router, and yet takes part in the all-reduce.
        self.shape = model.shape.experts if isinstance(model, Decoder) else None
        self._num_layers = model.shape.num_layers if isinstance(model, Decoder) else 0

    @property
    def has_losses(self) -> bool:
        """Whether the model has auxiliary losses."""
        return self.shape is not None and self.shape.has_losses

    @property
    def needs_counts(self) -> bool:
        """Whether a step needs the loads of the global batch, for losses or for biases."""
        return self.shape is not None and (self.shape.has_losses or self.shape.bias_rate > 0)

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
            router.load = Load(self.counts[router.layer], has_losses=self.has_losses)

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
        per_token_LE = selections_LE / num_tokens
        if shape.pools_layers:
            num_routers = self._num_layers - shape.first_dense
            per_token_LE = (
                per_token_LE.sum(0, keepdim=True).expand_as(per_token_LE) / num_routers**2
            )
        of_parts_LE = shape.aux_loss * shape.num_experts * per_token_LE
        slopes_LE1 = torch.cat([of_parts_LE, torch.full_like(of_parts_LE[:, :1], shape.z_loss)], 1)
        for router in self._routers:
            assert router.load is not None
            router.load.slopes = slopes_LE1[router.layer] / num_tokens * scale

    def end(self) -> Tensor:
        """End the step; return the sum of the auxiliary losses, 0-d float64, equal on all ranks."""
        for router in self._routers:
            router.load = None
        if self.shape is None or not self.has_losses:
            return self.counts.new_zeros(())
        shape = self.shape
        selections_LE, parts_LE, squares_L, num_tokens = self._split()
        f_LE, mean_LE = selections_LE / num_tokens, parts_LE / num_tokens
        if shape.pools_layers:
            num_routers = self._num_layers - shape.first_dense
            f_LE, mean_LE = f_LE.sum(0) / num_routers, mean_LE.sum(0) / num_routers
        aux = shape.num_experts * (f_LE * mean_LE).sum()
        return shape.aux_loss * aux + shape.z_loss * squares_L.sum() / num_tokens

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
