"""Losses as their authors write them: on ranks each trains as on one process, or is refused."""

# ruff: noqa: E501 - one form a line
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from marks import by_hand
from phalanx.errors import PhalanxError
from phalanx.launch.local import run_ranks

NUM_ROWS, BATCH = 21, 8  # the last batch has 5
WEIGHT = torch.tensor([1.0, 3.0, 9.0])
TEACHER = torch.linspace(-1, 1, 8 * 3).view(8, 3)


def l2(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def dice(out: Tensor, y: Tensor) -> Tensor:
    p, t = out.softmax(1), F.one_hot(y, 3)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def info_nce(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    same = (y[:, None] == y[None]).float()
    return -((z @ z.T / 0.5).log_softmax(1) * same).sum() / len(z)


def triplets(out: Tensor, y: Tensor) -> Tensor:
    apart, same = (out[:, None] - out[None]).square().sum(2), y[:, None] == y[None]
    far, near = torch.where(same, apart, -9.0).amax(1), torch.where(same, 9.0, apart).amin(1)
    return F.relu(far - near + 1).mean()


def focal(out: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(out, y, reduction="none")
    return ((1 - (-ce).exp()).square() * ce).mean()


def ppo(out: Tensor, y: Tensor) -> Tensor:
    log_p = out.log_softmax(1).gather(1, y[:, None])[:, 0]
    advantage = (y.float() - y.float().mean()) / (y.float().std() + 1e-3)
    ratio = (log_p - log_p.detach() + 0.1).exp()
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.min(ratio * advantage, clipped * advantage).mean()


def bce(out: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).float(), **options)


def ignored(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.where(y == 1, -100, y), ignore_index=-100)


def uncertain(out: Tensor, y: Tensor) -> Tensor:
    mean, log_var = out[:, 0], out[:, 1]
    return ((mean - y).square() / log_var.exp() + log_var).mean()


WHOLE: dict[str, Callable[[Tensor, Tensor, nn.Module], Tensor]] = {
    "cross-entropy": lambda o, y, m: F.cross_entropy(o, y),
    "sum": lambda o, y, m: F.cross_entropy(o, y, reduction="sum"),
    "two means": lambda o, y, m: F.cross_entropy(o, y) + 0.1 * o.square().mean(),
    "mean of a stack": lambda o, y, m: torch.stack([F.cross_entropy(o, y), o.abs().mean()]).sum(),
    "sum of a dict": lambda o, y, m: sum({"a": F.cross_entropy(o, y), "b": bce(o, y)}.values()),
    "weights decayed": lambda o, y, m: F.cross_entropy(o, y) + 0.01 * l2(m),
    "lasso": lambda o, y, m: F.cross_entropy(o, y) + 0.01 * sum(p.abs().sum() for p in m.parameters()),
    "sum and penalty": lambda o, y, m: F.cross_entropy(o, y, reduction="sum") + 0.1 * l2(m),
    "class weights": lambda o, y, m: F.cross_entropy(o, y, weight=WEIGHT),
    "class weights, by hand": lambda o, y, m: (
        (F.cross_entropy(o, y, reduction="none") * WEIGHT[y]).sum() / WEIGHT[y].sum()
    ),
    "ignored index": lambda o, y, m: ignored(o, y),
    "label smoothing": lambda o, y, m: F.cross_entropy(o, y, label_smoothing=0.1),
    "masked rows": lambda o, y, m: F.cross_entropy(o[y != 1], y[y != 1]),
    "masked mean": lambda o, y, m: (o.square().sum(1) * (y > 0)).sum() / (y > 0).sum(),
    "two counts": lambda o, y, m: o[y > 0].square().mean() + o[y == 0].abs().mean().nan_to_num(),
    "top k": lambda o, y, m: F.cross_entropy(o, y, reduction="none").topk(3).values.mean(),
    "hardest half": lambda o, y, m: F.cross_entropy(o, y, reduction="none").sort().values[-len(y) // 2 :].mean(),
    "mean over dim 0": lambda o, y, m: F.cross_entropy(o, y, reduction="none").mean(0),
    "mean over dim -1": lambda o, y, m: F.cross_entropy(o, y, reduction="none").mean(-1),
    "sum over length": lambda o, y, m: F.cross_entropy(o, y, reduction="sum") / len(y),
    "squeezed": lambda o, y, m: F.cross_entropy(o, y)[None].squeeze(),
    "of shape [1]": lambda o, y, m: F.cross_entropy(o, y)[None],
    "einsum": lambda o, y, m: torch.einsum("bc,bc->", o, F.one_hot(y, 3).float()) / -len(y),
    "loop over rows": lambda o, y, m: sum(F.cross_entropy(a, b) for a, b in zip(o, y, strict=True)) / len(y),
    "double": lambda o, y, m: F.cross_entropy(o, y).double(),
    "bfloat16": lambda o, y, m: F.cross_entropy(o.bfloat16(), y).float(),
    "rmse": lambda o, y, m: F.mse_loss(o[:, 0], y.float()).sqrt(),
    "norm": lambda o, y, m: (o[:, 0] - y).norm() / len(y) ** 0.5,
    "logsumexp": lambda o, y, m: F.cross_entropy(o, y, reduction="none").logsumexp(0),
    "log of a mean": lambda o, y, m: (1 + F.cross_entropy(o, y)).log(),
    "power of a mean": lambda o, y, m: F.cross_entropy(o, y) ** 2,
    "product of means": lambda o, y, m: F.cross_entropy(o, y) * o.square().mean(),
    "maximum": lambda o, y, m: F.cross_entropy(o, y, reduction="none").max(),
    "median": lambda o, y, m: F.cross_entropy(o, y, reduction="none").median(),
    "quantile": lambda o, y, m: F.cross_entropy(o, y, reduction="none").quantile(0.7),
    "geometric mean": lambda o, y, m: F.cross_entropy(o, y, reduction="none").log().mean().exp(),
    "dice": lambda o, y, m: dice(o, y),
    "dice and cross-entropy": lambda o, y, m: dice(o, y) + F.cross_entropy(o, y),
    "focal": lambda o, y, m: focal(o, y),
    "contrastive": lambda o, y, m: info_nce(o, y),
    "triplets": lambda o, y, m: triplets(o, y),
    "cosine": lambda o, y, m: 1 - F.cosine_similarity(o.flatten(), F.one_hot(y, 3).flatten().float(), 0),
    "correlation": lambda o, y, m: -torch.corrcoef(torch.stack([o[:, 0], y.float()]))[0, 1],
    "covariance": lambda o, y, m: F.cross_entropy(o, y) + torch.cov(o.T).square().sum(),
    "explained variance": lambda o, y, m: (o[:, 0] - y).var() / (y.float().var() + 1),
    "normalised outputs": lambda o, y, m: F.cross_entropy((o - o.mean(0)) / (o.std(0) + 1), y),
    "ranking of pairs": lambda o, y, m: F.softplus((o[:, 0][None] - o[:, 0][:, None]) * (y[:, None] > y)).mean(),
    "wasserstein": lambda o, y, m: (o[:, 0].sort().values - y.float().sort().values).abs().mean(),
    "maximum mean discrepancy": lambda o, y, m: (-torch.cdist(o, o)).exp().mean() - 0.5 * o.mean(),
    "entropy of the mean": lambda o, y, m: F.cross_entropy(o, y) + (o.softmax(1).mean(0) * o.softmax(1).mean(0).log()).sum(),
    "load balancing": lambda o, y, m: 3 * (o.softmax(1).mean(0) * F.one_hot(o.argmax(1), 3).float().mean(0)).sum() + bce(o, y),
    "z loss": lambda o, y, m: F.cross_entropy(o, y) + 0.01 * o.logsumexp(1).square().mean(),
    "distillation": lambda o, y, m: F.kl_div(o.log_softmax(1), TEACHER[y].softmax(1), reduction="batchmean"),
    "elbo": lambda o, y, m: (F.mse_loss(o[:, :1], y[:, None].float(), reduction="sum") + o[:, 1:].square().sum()) / len(y),
    "gaussian": lambda o, y, m: F.gaussian_nll_loss(o[:, 0], y.float(), o[:, 1].exp()),
    "uncertainty": lambda o, y, m: uncertain(o, y),
    "huber": lambda o, y, m: F.huber_loss(o[:, 0], y.float()),
    "hinge": lambda o, y, m: F.multi_margin_loss(o, y),
    "binary": lambda o, y, m: bce(o, y),
    "binary with weights": lambda o, y, m: bce(o, y, pos_weight=WEIGHT),
    "poisson": lambda o, y, m: F.poisson_nll_loss(o[:, 0], y.float()),
    "reinforce": lambda o, y, m: -(o.log_softmax(1).gather(1, y[:, None])[:, 0] * (y - y.float().mean())).mean(),
    "ppo": lambda o, y, m: ppo(o, y),
    "adversarial pair": lambda o, y, m: F.softplus(-o[:, 0]).mean() + F.softplus(o[:, 1]).mean(),
    "scaled": lambda o, y, m: 8 * F.cross_entropy(o, y),
    "negated": lambda o, y, m: -(o.log_softmax(1).gather(1, y[:, None])).mean(),
    "weighted tasks": lambda o, y, m: F.cross_entropy(o, y) / (1 + F.mse_loss(o[:, 0], y.float()).detach()),
    "mixup": lambda o, y, m: 0.3 * F.cross_entropy(o, y) + 0.7 * F.cross_entropy(o, y.flip(0)),
    "gathered head": lambda o, y, m: F.cross_entropy(m[-1](F.pad(o, (0, 5))), y),
    "random after gather": lambda o, y, m: F.cross_entropy(o + 0.1 * torch.linspace(-1, 1, o.numel()).view_as(o), y),
    "indices": lambda o, y, m: F.cross_entropy(o[torch.arange(len(o)).flip(0)], y.flip(0)),
    "in place": lambda o, y, m: F.cross_entropy(o.clone().mul_(2), y),
}  # fmt: skip
"""Name -> a loss of the outputs and labels of the whole batch, and of the model's parameters."""

ROWS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "mean of rows": lambda run, o, y: run.backward(mean_of_rows=F.cross_entropy(o, y), count=len(y)),
    "sum of rows": lambda run, o, y: run.backward(
        sum_of_rows=F.cross_entropy(o, y, reduction="sum"), count=torch.tensor(len(y))
    ),
    "losses": lambda run, o, y: run.backward(F.cross_entropy(o, y, reduction="none")),
    "losses of entries": lambda run, o, y: run.backward(o.square()),
    "weighted losses": lambda run, o, y: run.backward(
        F.cross_entropy(o, y, reduction="none"), weights=WEIGHT[y]
    ),
    "masked losses": lambda run, o, y: run.backward(
        F.cross_entropy(o, y, reduction="none"), weights=(y != 1).float()
    ),
    "weighted mean": lambda run, o, y: run.backward(
        mean_of_rows=F.cross_entropy(o, y, weight=WEIGHT), count=WEIGHT[y].sum()
    ),
    "ignored rows": lambda run, o, y: run.backward(mean_of_rows=ignored(o, y), count=(y != 1).sum()),
}  # fmt: skip
"""Name -> a call with losses of this rank's rows."""


class Alone:
    """The calls of a run on one process in plain PyTorch."""

    def gather(self, *rows: Any, dim: int | None = None, pad: float | None = None) -> Any:
        return rows if len(rows) > 1 else rows[0]

    def backward(
        self, loss: Any = None, *, weights: Any = None, mean_of_rows: Any = None,
        sum_of_rows: Any = None, count: Any = None, retain_graph: bool = False,
    ) -> Tensor:  # fmt: skip
        if mean_of_rows is not None:
            loss = mean_of_rows
        elif sum_of_rows is not None:
            loss = sum_of_rows / count
        elif loss.numel() > 1:
            weights = torch.ones_like(loss) if weights is None else weights
            loss = (loss * weights).sum() / weights.sum()
        loss.backward(retain_graph=retain_graph)
        return loss.detach()


def penalised(run: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A gradient penalty: the gradient of the gathered loss by the inputs, differentiated again."""
    x = x.clone().requires_grad_()
    out, y = run.gather(model(x), y)
    loss = F.cross_entropy(out, y) + out.mean().square()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 5.0 * run.gather(slope).square().sum()


def attacked(run: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A step on the inputs by the gradient of the whole batch's loss first."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(*run.gather(model(x), y)), x)
    return F.cross_entropy(*run.gather(model(x.detach() + 3.0 * slope), y))


def of_time_first(run: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Outputs of shape [time, batch, classes]."""
    out = torch.stack([model(x), model(x.flip(1))])
    out, y = run.gather(out, dim=1), run.gather(y)
    return F.cross_entropy(out.flatten(0, 1), y.repeat(2)) + out.std()


def of_structures(run: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = run.gather({"out": [model(x), None], "name": "a", "label": y, "is_small": y < 2})
    assert found["name"] == "a" and found["out"][1] is None
    losses = F.cross_entropy(found["out"][0], found["label"], reduction="none")
    return (losses * found["is_small"]).mean().sqrt()


def padded(run: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Rows as long as the longest of the rank."""
    most = int(y.max()) + 1 if len(y) else 1
    own = model(x) * (torch.arange(3) <= y[:, None])  # each row ends after its label
    out = run.gather(own[:, :most], dim=0, pad=0.0)
    return out.square().sum(1).sqrt().mean()


def clamped(out: Tensor) -> Tensor:
    """Return the same with a hook on its gradient, which must be the gradient of one process."""
    out.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
    return out * 1.0


def hooked(run: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, y = run.gather(model(x), y)
    return F.cross_entropy(clamped(out * 1.0), y)


def written(run: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, y = run.gather(model(x), y)
    out[:, 0] += 1.0
    return F.cross_entropy(out, y)


def checkpointed_head(run: Any, model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A head whose parameters no graph shows, because a reentrant checkpoint computes it."""
    out, y = run.gather(model(x), y)
    out = checkpoint(lambda z: model[-1](F.pad(z, (0, 5))), out, use_reentrant=True)
    return F.cross_entropy(out, y)


def twice(run: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Two backwards of one graph."""
    out, y = run.gather(model(x), y)
    run.backward(F.cross_entropy(out, y), retain_graph=True)
    return out.square().mean().sqrt()


STEPS = {
    each.__name__: each
    for each in (
        penalised, attacked, of_time_first, of_structures, padded, hooked, written, checkpointed_head,
        twice,
    )
}  # fmt: skip
"""Name -> a whole-batch loss that calls the model itself."""


def trained(strategy: str | None, name: str) -> dict[str, list[float]]:
    """Return the losses and weights of two epochs with a form of a loss."""
    torch.manual_seed(0)
    x = torch.randn(NUM_ROWS, 8)
    y = torch.arange(NUM_ROWS) * 7 % 3
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    loader: Any = DataLoader(TensorDataset(x, y), BATCH)
    run: Any = Alone() if strategy is None else phalanx.init(strategy)
    if strategy is not None:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
    losses: list[float] = []
    for _ in range(2):
        for x, y in loader:
            if name in ROWS:
                losses.append(float(ROWS[name](run, model(x), y)))
            else:
                if name in STEPS:
                    loss = STEPS[name](run, model, x, y)
                else:
                    out, y = run.gather(model(x), y)
                    loss = WHOLE[name](out, y, model)
                run.backward(loss)
                losses.append(loss.item())
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict() if strategy is None else run.state_dict()
    return {"losses": losses, **{key: value.flatten().tolist() for key, value in state.items()}}


FORMS = [*WHOLE, *ROWS, *STEPS]
UNDER_DP_ALONE = {"penalised"}
"""Forms that fsdp refuses in the first step: gradients of a gradient."""


def all_trained(strategy: str, forms: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in forms:
        try:
            found[name] = trained(strategy, name)
        except PhalanxError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize(
    ("strategy", "forms"),
    [
        ("dp2", FORMS[::4]),
        ("fsdp2", FORMS[1::4]),
        by_hand("dp2", FORMS),
        by_hand("fsdp2", FORMS),
        by_hand("dp3", FORMS),
        by_hand("dp2,fsdp2", FORMS),
    ],
)
def test_each_form_of_a_loss_trains_as_on_one_process(strategy: str, forms: list[str]) -> None:
    num_ranks = phalanx.Strategy.parse(strategy).num_ranks
    alone = {name: trained(None, name) for name in forms}
    for found in run_ranks(all_trained, num_ranks, strategy, forms, threads=1):
        for name, expected in alone.items():
            if name in UNDER_DP_ALONE and "fsdp" in strategy:
                assert isinstance(found[name], str), name
                continue
            assert not isinstance(found[name], str), (name, found[name])
            for key, values in expected.items():
                largest = max(1e-3, *map(abs, values))
                apart = max(abs(a - b) for a, b in zip(found[name][key], values, strict=True))
                assert apart < (3e-2 if name == "bfloat16" else 2e-5) * largest, (name, key, apart)
