"""Faults planted around a user's module are found: buffers, masks, eval mode, narrow types."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from mutants import Patch, _unreduced, planted
from torch import Tensor, nn

from marks import by_hand
from phalanx.comm import comm
from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.parallel import batch_norm, dropout
from phalanx.strategy import Strategy
from phalanx.verify import record
from phalanx.verify.cases import awkward_shapes, configured_case
from phalanx.verify.harness import verify_case
from phalanx.verify.record import Case
from phalanx.verify.settings import VerifyConfig
from phalanx.verify.verdict import Verdict


class Codebook(nn.Module):
    """Keeps a mean of its own rows alone, as many a codebook does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


class Net(nn.Module):
    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6, bias=False)
        self.middle = nn.Sequential(*middle)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).tanh())


def normed() -> nn.Module:
    return Net(nn.BatchNorm1d(6))


def dropping() -> nn.Module:
    return Net(nn.Dropout(0.3), nn.Linear(6, 6), nn.Dropout(0.3))


def with_codebook() -> nn.Module:
    return Net(Codebook())


class Squares:
    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        return (model(microbatch) - microbatch.sum(-1, keepdim=True)).square().sum()

    def num_valid(self, microbatch: Any) -> int:
        return len(microbatch)


def _as_in_training(right: Any) -> Any:
    """Statistics are those of the batch in evaluation too."""

    def wrong(norm: Any, comm: Any, x: Tensor) -> Tensor:
        was, norm.training = norm.training, True
        tracked = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        made = right(norm, comm, x)
        norm.training = was
        if not was:
            norm.load_state_dict(tracked, strict=False)
        return made

    return wrong


def _biased(right: Any) -> Any:
    return lambda norm, mean, variance, num_rows: right(
        norm, mean, variance * (num_rows - 1) / num_rows, num_rows
    )


def _of_step_0(right: Any) -> Any:
    return lambda seed, step, rows: right(seed, 0, rows)


def _of_one_name(right: Any) -> Any:
    return lambda *parts: right(parts[0], "") if len(parts) == 2 else right(*parts)


def _unscaled(right: Any) -> Any:
    return lambda x, p, keys, salt: right(x, p, keys, salt) * (1 - p)


def _half_a_gradient(right: Any) -> Any:
    def wrong(self: Any, tensor: Any, name: str, reduction: str = "sum") -> Any:
        if name == "grad" and tensor.is_floating_point():
            tensor.mul_(0.5)
        return right(self, tensor, name, reduction)

    return wrong


def _half_a_rate(right: Any) -> Any:
    """The optimizer steps by another rate than the step says."""

    def wrong(model: Any, config: Any) -> Any:
        optimizer = right(model, config)

        def halve(*_: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] /= 2

        optimizer.register_step_pre_hook(halve)
        return optimizer

    return wrong


x = torch.linspace(-1, 1, 3 * 8 * 5, dtype=torch.float64).view(3, 8, 5).sin()
NORMED = Case(normed, Squares(), list(x), batch_norm="global")
DROPPING = Case(dropping, Squares(), list(x), accumulation=2, dropout_seed=4)

OF_MODULES: dict[str, tuple[Case, list[Patch], str | None, str]] = {
    "statistics of the batch in eval mode": (
        NORMED, [(batch_norm, "_forward", _as_in_training)], "middle.0", "the eval output",
    ),
    "a biased running variance": (
        NORMED, [(batch_norm, "_track", _biased)], "middle.0", "buffer of middle.0.running_var",
    ),
    "a buffer of a rank's own rows": (
        Case(with_codebook, Squares(), list(x)), [], "middle.0", "buffer of middle.0.mean",
    ),
    "the same masks in each step": (
        DROPPING, [(dropout, "row_keys", _of_step_0)], "middle.0", "its output differs",
    ),
    "the same masks in each module": (
        DROPPING, [(dropout, "key", _of_one_name)], "middle.0", "its output differs",
    ),
    "masks without their scale": (
        DROPPING, [(dropout, "dropout", _unscaled)], "middle.0", "its output differs",
    ),
}  # fmt: skip

OF_BFLOAT16: dict[str, tuple[list[Patch], str | None, str]] = {
    "half a gradient": (
        [(comm.Comm, "all_reduce_start", _half_a_gradient)], "norm",
        "in the sum over ranks or microbatches",
    ),
    "gradients that stay a rank's own": (
        [(comm.Comm, "all_reduce_start", _unreduced)], "norm",
        "in the sum over ranks or microbatches",
    ),
    "half a rate": (
        [(record, "build_optimizer", _half_a_rate)], "blocks.0.attention.q",
        "so the optimizer's update is wrong",
    ),
}  # fmt: skip


SLOW = frozenset(
    {
        "a biased running variance",
        "the same masks in each module",
        "masks without their scale",
        "gradients that stay a rank's own",
        "half a rate",
        "bfloat16, large rate",
    }
)
"""What another shows too."""


def verdicts_on_ranks(is_slow: bool) -> dict[str, Verdict]:
    """Verify each case with its fault, and without."""
    strategy = Strategy.parse("dp2")
    ranks, found = Ranks(strategy), dict[str, Verdict]()
    for name, (case, patches, _, _) in OF_MODULES.items():
        if (name in SLOW) == is_slow:
            with planted(*patches):
                found[name] = verify_case(case, strategy, ranks)
    found["normed"], found["dropping"] = (
        verify_case(case, strategy, ranks) for case in (NORMED, DROPPING)
    )
    config = VerifyConfig(dtype="bfloat16", steps=2)
    shape = dataclasses.replace(awkward_shapes(strategy)["windowed"], num_layers=1)
    case = configured_case(shape, strategy, config)
    for name, (patches, _, _) in OF_BFLOAT16.items():
        if (name in SLOW) == is_slow:
            with planted(*patches):
                found[name] = verify_case(case, strategy, ranks)
    found["bfloat16"] = verify_case(case, strategy, ranks)
    if is_slow:
        # By Adam's first step, one sign of a small gradient that rounding turns is twice this rate.
        large = OptimizerConfig(lr=0.5, clip_norm=0.2, warmup_steps=0)
        case = dataclasses.replace(case, optimizer=large)
        found["bfloat16, large rate"] = verify_case(case, strategy, ranks)
    return found


@pytest.mark.parametrize("is_slow", [False, by_hand(True)])
def test_a_planted_fault_is_found_and_named(is_slow: bool, subtests: pytest.Subtests) -> None:
    found = run_ranks(verdicts_on_ranks, 2, is_slow, threads=1)[0]
    due = {name: each[-2:] for name, each in {**OF_MODULES, **OF_BFLOAT16}.items()}
    assert {*found} & {*due} == {name for name in due if (name in SLOW) == is_slow}
    for name, verdict in found.items():
        with subtests.test(name):
            if name not in due:
                assert verdict.is_equal, str(verdict)
                continue
            module, words = due[name]
            assert not verdict.is_equal
            assert verdict.place is not None
            assert verdict.place.module == module, str(verdict)
            assert words in str(verdict)
