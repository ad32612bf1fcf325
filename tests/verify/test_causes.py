"""What a verdict says of the common causes, on modules of a user's own."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import Trainer
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.verify.compare import compare_values
from phalanx.verify.harness import verify
from phalanx.verify.trace import gap
from phalanx.verify.verdict import Verdict


class Net(nn.Module):
    """A module whose activation overwrites what it reads."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 16)
        self.middle = middle or nn.Identity()
        self.activation = nn.ReLU(inplace=True)
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.middle(self.first(x))))


def with_batch_norm() -> nn.Module:
    return Net(nn.BatchNorm1d(16))


def with_dropout() -> nn.Module:
    return Net(nn.Dropout(0.1))


class NaN(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * math.nan if dist.get_rank() == 1 else x


def with_nan() -> nn.Module:
    return Net(NaN())


class Sometimes(nn.Module):
    """A parameter that only rows marked by their first feature use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(5, 1)
        self.sometimes = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, is_marked = self.always(x), x[:, :1] > 2
        return out + self.sometimes(x) * is_marked if bool(is_marked.any()) else out


class Squares:
    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        return (model(microbatch["x"]) - microbatch["y"]).square().sum()

    def num_valid(self, microbatch: Any) -> int:
        return len(microbatch["x"])


class Means(Squares):
    """A loss that is a mean already."""

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        return super().loss_sum(model, microbatch, step) / len(microbatch["x"])


def batches(num_steps: int = 2) -> list[dict[str, Tensor]]:
    x = torch.linspace(-1, 1, num_steps * 8 * 5, dtype=torch.float64).view(num_steps, 8, 5)
    return [{"x": rows, "y": rows.sum(-1, keepdim=True).sin()} for rows in x]


def test_batch_norm_is_named() -> None:
    verdict = verify(with_batch_norm, batches(), "dp2", Squares())
    assert verdict.place is not None and verdict.place.module == "middle"
    assert "middle (BatchNorm1d): in training it takes mean and variance" in str(verdict)
    assert "one process of the trainer computes the same as plain PyTorch" in str(verdict)


def test_dropout_of_the_rank_is_named() -> None:
    verdict = verify(with_dropout, batches(), "fsdp2", Squares())
    assert verdict.place is not None and verdict.place.module == "middle"
    assert "middle (Dropout, p 0.1): it draws from each process's own generator" in str(verdict)


def test_a_mean_for_a_sum_is_named() -> None:
    verdict = verify(Net, batches(), "dp2", Means())
    assert "2 times what it should be" in str(verdict)
    assert "a `loss_sum` that returns a mean, over the 2 data ranks" in str(verdict)
    assert verdict.place is not None and verdict.place.module is None
    assert "the caller of the model: backward passes a different gradient" in str(verdict)


def test_nan_is_called_nan_with_rank_and_module() -> None:
    text = str(verdict := verify(with_nan, batches(), "dp2", Squares()))
    assert "the loss: it is NaN, but finite in one process" in text
    assert verdict.place is not None and verdict.place.module == "middle"
    assert "it is not finite (step 0, most on rank 1" in text
    assert "the gradient of first.weight, first.bias, last.weight and 1 more is not" in text
    assert "nonfinite" not in text and "optimizer.lr" not in text


# The first microbatch of each rank uses it, the last does not.
@pytest.mark.parametrize("text", ["fsdp2", "fsdp2:zero1", "fsdp2:zero2", "dp2", "dp2:naive"])
def test_a_parameter_that_only_an_early_microbatch_uses_keeps_its_gradient(text: str) -> None:
    rows = batches(1)
    rows[0]["x"][:2, 0] = 3
    verdict = verify(Sometimes, rows, text, Squares(), accumulation=2)
    assert verdict.is_equal, str(verdict)
    assert any(d.name == "sometimes.weight" for d in verdict.differences)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_types_are_judged_by_how_far_a_perturbation_moves(dtype: str) -> None:
    assert verify(Net, batches(), "dp2", Squares(), accumulation=2, dtype=dtype).is_equal
    verdict: Verdict = verify(Net, batches(), "dp2", Means(), dtype=dtype)
    assert not verdict.is_equal


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    verdict = verify(Net, batches(), "dp1", Squares(), accumulation=2, device="cuda")
    assert verdict.is_equal, str(verdict)


def test_a_rank_of_a_job_starts_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="is a rank of a job of 2, as under torchrun"):
        run_ranks(batches, 3)


class Overflow(nn.Module):
    """NaN where an element is large."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 3, torch.nan, x)


def with_overflow() -> nn.Module:
    return Net(Overflow())


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_nan_in_the_same_elements_of_both_is_equal_and_reported(dtype: str) -> None:
    rows = batches()
    rows[1]["x"] = rows[1]["x"].abs() + 9
    verdict = verify(with_overflow, rows, "dp2", Squares(), dtype=dtype)
    assert verdict.is_equal, str(verdict)
    assert "what one process computes, NaN in both (step 1, the loss and " in str(verdict)


def test_nan_in_other_elements_than_in_one_process_differs() -> None:
    ours, due = ({"w": torch.tensor(row)} for row in ([1.0, math.nan], [math.nan, 1.0]))
    (found,) = compare_values(0, "weight", ours, due)
    assert not found.passes
    assert found.problem == "it is NaN in different elements than in one process"
    assert compare_values(0, "weight", due, due)[0].passes
    assert gap(due["w"], due["w"]) == 0 < gap(ours["w"], due["w"])


def one_module(model: nn.Module) -> nn.Module:
    return model


def test_a_build_that_makes_no_new_module_is_refused() -> None:
    net = Net(nn.Identity())
    for build, words in ((net, "is a Net"), (partial(one_module, net), "the same Net")):
        with pytest.raises(ConfigError, match=f"{words}.*copy.deepcopy"):
            verify(build, batches(), "dp2", Squares())
        with pytest.raises(ConfigError, match=f"phalanx.Trainer: .*{words}"):
            Trainer(build, Squares(), list(torch.ones(4, 5)), accumulation=1).verify("dp2")
    assert verify(partial(copy.deepcopy, net), batches(), "dp2", Squares()).is_equal
