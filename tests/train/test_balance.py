"""Auxiliary losses and biases of experts: over the global batch, against transformers."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.checkpoint.manifest import complete_checkpoints
from phalanx.checkpoint.weights import open_checkpoint
from phalanx.comm.comm import SingleRankComm
from phalanx.config import OptimizerConfig, ShapeConfig
from phalanx.data.samples import Batch
from phalanx.errors import ConfigError
from phalanx.models.decoder import Decoder
from phalanx.models.experts import Router
from phalanx.models.loss import IGNORE
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel import recompute
from phalanx.parallel.accumulate import Accumulate
from phalanx.strategy import Recompute
from phalanx.train.job.request import settle
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.run import train
from phalanx.train.step import Step
from phalanx.verify.harness import verify
from small_run import SHAPE, small_run

PLAIN = ExpertShape(num_experts=8, top_k=2, ffn=24)
LOSSES = dataclasses.replace(PLAIN, aux_loss=0.5, z_loss=0.1)
LENGTH = 12
ROWS = 6


def step_of(experts: ExpertShape, recomputes: Recompute | None = None, **more: Any) -> Step:
    """Return the step of a small float64 decoder on one process."""
    shape = ModelShape(
        vocab_size=51, num_layers=3, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn=48,
        max_seq_len=64, experts=experts,
    )  # fmt: skip
    model = Decoder(shape).double()
    model.initialize(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Router):
                module.weight *= 20  # clear preferences, so that loads are uneven
    if recomputes is not None:
        recompute.apply(model, recomputes)
    config = OptimizerConfig()
    optimizer = build_optimizer(model, config)
    comm = SingleRankComm()
    return Step(model, optimizer, NextToken(), config, comm=comm, num_steps=10, **more)


def batches(*sizes: int) -> list[Batch]:
    """Return the rows of one batch, in microbatches of these sizes; some tokens have no label."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(51, (ROWS, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[1, 7:] = IGNORE
    labels[5] = IGNORE
    whole = Batch(
        tokens[:, :-1], labels, torch.arange(LENGTH).expand(ROWS, -1), None, torch.arange(ROWS)
    )
    parts = {
        name: getattr(whole, name).split(sizes)
        for name in ("tokens_BT", "labels_BT", "positions_BT", "rows_B")
    }
    return [
        Batch(**{n: p[i] for n, p in parts.items()}, documents_BT=None) for i in range(len(sizes))
    ]


def gradient(step: Step, microbatches: list[Batch]) -> tuple[float, Tensor]:
    """Return the loss and all gradients as one vector."""
    loss, _ = step.compute_gradients(microbatches)
    return loss.item(), torch.cat(
        [p.grad.flatten() for p in step.model.parameters() if p.grad is not None]
    )


def by_hand(step: Step, aux_of: Any) -> tuple[float, Tensor]:
    """Return the loss and the gradients of one graph over the whole batch, by autograd alone."""
    (batch,) = batches(ROWS)
    model, seen = step.model, list[Tensor]()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [
        router.register_forward_hook(lambda r, args, _: seen.append(args[0] @ r.weight.T))
        for router in routers
    ]
    model.zero_grad()
    summed = model(batch.tokens_BT, batch.labels_BT, positions_BT=batch.positions_BT)
    is_valid = (batch.labels_BT != IGNORE).flatten()
    loss = summed / is_valid.sum() + aux_of(seen, is_valid)
    loss.backward()
    for hook in hooks:
        hook.remove()
    return loss.item(), torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


def losses_by_hand(seen: list[Tensor], is_valid: Tensor) -> Tensor:
    total = torch.zeros(())
    for logits in seen:
        scores = logits[is_valid].softmax(-1)
        load = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0).mean(0)
        total = total + 0.5 * 8 * (load * scores.mean(0)).sum()
        total = total + 0.1 * logits[is_valid].logsumexp(-1).square().mean()
    return total


@pytest.mark.parametrize("sizes", [(6,), (1, 3, 2)])
@pytest.mark.parametrize("kind", ["none", "sqrt", "selective"])
def test_losses_are_of_the_whole_batch(sizes: tuple[int, ...], kind: Any) -> None:
    step = step_of(LOSSES, Recompute(kind))
    loss, found = gradient(step, batches(*sizes))
    expected_loss, expected = by_hand(step_of(LOSSES), losses_by_hand)
    assert loss == pytest.approx(expected_loss, rel=1e-14)
    assert (found - expected).norm() <= 1e-13 * expected.norm()
    # Each token of each layer counts once, also where a forward runs again.
    num_valid = 4 * LENGTH + 7
    assert step.balance.counts[:, :8].sum(1).tolist() == [2 * num_valid] * 3


def test_the_mean_of_microbatches_is_another_loss() -> None:
    """The fault that counting first prevents: each microbatch balanced by its own loads."""
    _, right = gradient(step_of(LOSSES), batches(3, 3))
    _, without = gradient(step_of(PLAIN), batches(3, 3))
    parts = [gradient(step_of(LOSSES), [part]) for part in batches(3, 3)]
    bare = [gradient(step_of(PLAIN), [part]) for part in batches(3, 3)]
    wrong = sum(a - b for (_, a), (_, b) in zip(parts, bare, strict=True)) / 2
    assert (wrong - (right - without)).norm() > 0.02 * (right - without).norm()


def test_pooled_layers_equal_transformers() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    pooled = dataclasses.replace(PLAIN, aux_loss=0.7, pools_layers=True)

    def of_transformers(seen: list[Tensor], is_valid: Tensor) -> Tensor:
        aux = load_balancing_loss_func(tuple(seen), 8, 2, attention_mask=is_valid[None])
        assert isinstance(aux, Tensor)
        return 0.7 * aux

    expected_loss, expected = by_hand(step_of(pooled), of_transformers)
    loss, found = gradient(step_of(pooled), batches(2, 4))
    assert loss == pytest.approx(expected_loss, rel=1e-6)  # transformers sums in float32
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_balanced_loads_have_the_loss_of_k() -> None:
    step = step_of(dataclasses.replace(PLAIN, aux_loss=1.0, pools_layers=True))
    for module in step.model.modules():
        if isinstance(module, Router):
            module.weight.detach().zero_()  # equal scores: f is uneven, P is even
    with_aux, _ = gradient(step, batches(6))
    without, _ = gradient(step_of(PLAIN), batches(6))
    assert with_aux - without == pytest.approx(2.0, abs=0.05)


def test_sigmoid_scores_count_as_shares() -> None:
    of = dataclasses.replace(PLAIN, score="sigmoid", aux_loss=0.5)

    def aux(seen: list[Tensor], is_valid: Tensor) -> Tensor:
        total = torch.zeros(())
        for logits in seen:
            scores = logits[is_valid].sigmoid()
            load = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0).mean(0)
            total = total + 4 * (load * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
        return total

    expected_loss, expected = by_hand(step_of(of), aux)
    loss, found = gradient(step_of(of), batches(1, 3, 2))
    assert loss == pytest.approx(expected_loss, rel=1e-14)
    assert (found - expected).norm() <= 1e-13 * expected.norm()


class _Counted(Accumulate):
    """Counts forwards without gradients."""

    num_inferred = 0

    def infer(self, microbatch: Any, forward: Any, *how: Any) -> Tensor:
        self.num_inferred += 1
        return super().infer(microbatch, forward, *how)


@pytest.mark.parametrize(
    ("experts", "sizes", "num_inferred", "num_reduced"),
    [
        (PLAIN, (3, 3), 0, 0),
        (LOSSES, (6,), 0, 1),
        (LOSSES, (3, 3), 2, 1),
        (dataclasses.replace(PLAIN, has_bias=True, bias_rate=0.1), (3, 3), 0, 1),
        (None, (3, 3), 0, 0),
    ],
)
def test_nothing_more_runs_than_is_needed(
    experts: Any, sizes: tuple[int, ...], num_inferred: int, num_reduced: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    reduced = list[tuple[int, ...]]()
    all_reduce = SingleRankComm.all_reduce

    def counted(self: Any, tensor: Tensor, *rest: Any) -> Tensor:
        if tensor.ndim == 2:
            reduced.append(tuple(tensor.shape))
        return all_reduce(self, tensor, *rest)

    monkeypatch.setattr(SingleRankComm, "all_reduce", counted)
    run = _Counted()
    gradient(step_of(experts, run=run), batches(*sizes))
    assert run.num_inferred == num_inferred
    assert reduced == [(3, 18)] * num_reduced


def test_an_evaluation_has_no_losses_and_no_limit() -> None:
    limited = dataclasses.replace(LOSSES, capacity=0.5)
    (batch,) = batches(6)
    found = [step_of(of).model.eval()(batch.tokens_BT, batch.labels_BT) for of in (limited, PLAIN)]
    assert torch.equal(*found)


def test_dropped_selections_are_counted() -> None:
    limited = dataclasses.replace(PLAIN, capacity=0.5)
    totals = list[list[float]]()
    for sizes in ((6,), (1, 3, 2)):
        step = step_of(limited)
        gradient(step, batches(*sizes))
        totals.append(step.balance.counts[:, -1].tolist())
    assert totals[0] == totals[1], "the same tokens are dropped in any microbatches"
    # An expert takes ceil(0.5 * 2 * 12 / 8) = 2 tokens of a row: at most 16 of 24 selections.
    assert all(4 * 8 <= dropped < 24 * 5 for dropped in totals[0])


def test_biases_move_toward_the_mean_load() -> None:
    of = dataclasses.replace(PLAIN, has_bias=True, bias_rate=0.125)
    step = step_of(of)
    step(batches(1, 3, 2))
    for router in (module for module in step.model.modules() if isinstance(module, Router)):
        loads = step.balance.counts[router.layer, :8]
        assert loads.std() > 0
        assert router.bias is not None
        assert router.bias.tolist() == (0.125 * (loads.mean() - loads).sign()).tolist()
    before = [b.clone() for b in step.model.buffers()]
    loss, num_valid = step.compute_gradients(batches(6))
    step.nonfinite = "skip"
    step.apply_gradients(loss * float("nan"), num_valid)
    assert all(map(torch.equal, before, step.model.buffers())), "a skipped step moves none"


def test_biases_of_a_resumed_run(tmp_path: Path) -> None:
    """A run that resumes under another split, with other microbatches, continues to the digit."""
    of = "num_experts=4,top_k=2,ffn=24,has_bias=true,bias_rate=0.01,aux_loss=0.1,capacity=1.1"
    shape = dataclasses.replace(SHAPE, experts=of)
    config = small_run(tmp_path, strategy="fsdp2", steps=3, shape=shape)
    train(dataclasses.replace(config, save="every=1"))
    part = str(tmp_path / "run" / "checkpoints" / "step-00000001")
    again = dataclasses.replace(
        config, strategy="dp1", resume=part, out=str(tmp_path / "part"), shape=ShapeConfig()
    )
    train(again)
    whole, resumed = (
        open_checkpoint(complete_checkpoints(tmp_path / name)[3]) for name in ("run", "part")
    )
    assert whole.shape.experts is not None
    assert whole.shape.experts.aux_loss == 0.1
    for block in range(whole.shape.num_layers):
        bias = whole.read(f"blocks.{block}.mlp.router.bias")
        assert bias.abs().max() >= 0.01
        assert torch.equal(bias, resumed.read(f"blocks.{block}.mlp.router.bias"))
        for name in ("gate", "down"):
            ours, theirs = (w.read(f"blocks.{block}.mlp.experts.{name}") for w in (whole, resumed))
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


class Wrapped(nn.Module):
    """A user's module around a decoder."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return self.inner(*args)


class NextOfRows:
    """A user's objective: next-token cross-entropy of rows."""

    def loss_sum(self, model: nn.Module, microbatch: dict[str, Tensor], step: int) -> Tensor:
        return model(microbatch["ids"][:, :-1], microbatch["ids"][:, 1:])

    def num_valid(self, microbatch: dict[str, Tensor]) -> int:
        return microbatch["ids"][:, 1:].numel()


def built(is_wrapped: bool) -> nn.Module:
    of = dataclasses.replace(LOSSES, has_bias=True, bias_rate=0.1)
    model = step_of(of).model
    return Wrapped(model) if is_wrapped else model


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_job_of_a_users_own_has_the_losses_and_moves_the_biases(is_wrapped: bool) -> None:
    """The reference has them too, which a decoder alone has not."""
    ids = torch.randint(51, (2, 7, 13), generator=torch.Generator().manual_seed(0))
    how = functools.partial(built, is_wrapped), [{"ids": each} for each in ids]
    verdict = verify(*how, "dp2", NextOfRows(), accumulation=2)
    assert verdict.is_equal, str(verdict)
    assert any(row.quantity == "buffer" for row in verdict.differences)


def test_servers_refuse_losses(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, experts="num_experts=4,top_k=2,ffn=24,z_loss=0.1")
    config = small_run(tmp_path, strategy="dp2:ps", steps=2, shape=shape)
    with pytest.raises(ConfigError, match=r"need the loads of the whole batch.* nearest is dp2"):
        settle(config)
