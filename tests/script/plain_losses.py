"""Scripts that differ by their loss."""

from __future__ import annotations

import torch
from plain_adapters import Plain
from plain_loop import Script, step, sum_of_losses
from plain_models import Heads, Residual, TwoHeads, mlp, rows_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def siamese(on: Plain) -> None:
    """Two forwards of a row for one backward."""
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for x, y in loader:
        apart = (model(x) - model(x.flip(1))).square().sum(1)
        loss = torch.where(y > 2, apart, (1 - apart).relu()).sum()
        on.print(on.backward(loss, len(x)))
        step(optimizer)


def distillation(on: Plain) -> None:
    teacher = mlp(6, 16, 5).eval().requires_grad_(False)
    model = mlp(6, 6, 5)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for x, _ in loader:
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        loss = F.kl_div(model(x).log_softmax(1), wanted, reduction="sum")
        on.print(on.backward(loss, len(x)))
        step(optimizer)


def adversarial(on: Plain) -> None:
    """A step on the input by its gradient first."""
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for x, y in loader:
        moved = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(sum_of_losses(model(moved), y), moved)
        on.print(on.backward(sum_of_losses(model(x + 0.1 * slope.sign()), y), len(y)))
        step(optimizer)


def tasks_in_turns(on: Plain) -> None:
    """Each batch uses one of two heads."""
    model = TwoHeads().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        on.print(on.backward(sum_of_losses(model(x, number % 2), y), len(y)))
        optimizer.step()


def contrastive(on: Plain) -> None:
    """SimCLR: each row against all rows of the batch."""
    model = mlp(6, 10, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 9, True))
    for _ in range(2):
        for x, _ in loader:
            views = F.normalize(model(x + 0.1), dim=1), F.normalize(model(x.flip(1)), dim=1)
            a, b = on.gather(views)
            similarities = torch.cat([a, b]) @ torch.cat([a, b]).T / 0.5
            similarities = similarities.masked_fill(torch.eye(2 * len(a)).bool(), -1e9)
            wanted = torch.arange(2 * len(a)).roll(len(a))
            loss = F.cross_entropy(similarities, wanted)
            on.print(on.whole(loss))
            step(optimizer)


def hardest_triplets(on: Plain) -> None:
    """Metric learning: the farthest of a class and the nearest of the others, in the batch."""
    model = mlp(6, 10, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 12, True))
    for x, y in loader:
        z, y = on.gather((model(x), y))
        apart = (z[:, None] - z[None]).square().sum(2)
        is_same = y[:, None] == y[None]
        farthest = torch.where(is_same, apart, -1e9).amax(1)
        nearest = torch.where(is_same, 1e9, apart).amin(1)
        loss = F.relu(farthest - nearest + 1).mean()
        on.print(on.whole(loss))
        step(optimizer)


def triplets(on: Plain) -> None:
    model = mlp(6, 10, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    criterion = nn.TripletMarginLoss(margin=1.0, reduction="sum")
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(3, 6), 8))
    for x, _ in loader:
        optimizer.zero_grad()
        loss = criterion(model(x[:, 0]), model(x[:, 1]), model(x[:, 2]))
        on.print(on.backward(loss, len(x)))
        optimizer.step()


def two_tasks(on: Plain) -> None:
    """A class and a number of each row, whose losses are added and printed apart."""
    model = Heads().double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    for _ in range(2):
        of_classes = of_numbers = torch.tensor(0.0)
        for x, y in loader:
            logits, number = model(x)
            a = sum_of_losses(logits, y)
            b = F.smooth_l1_loss(number, x.sum(1), reduction="sum")
            on.print(on.backward(a + 0.5 * b, len(y)))
            step(optimizer)
            of_classes, of_numbers = of_classes + a.detach(), of_numbers + b.detach()
        on.print(on.sum(of_classes) / 37, on.sum(of_numbers) / 37)


def multi_label(on: Plain) -> None:
    """Print the F1 score of each pass, micro and macro."""
    model = mlp(6, 10, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    criterion = nn.BCEWithLogitsLoss(
        pos_weight=torch.tensor([1.0, 2.0, 3.0, 1.0]).double(), reduction="sum"
    )
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 9, True))
    for _ in range(2):
        counts = torch.zeros(3, 4).double()
        for x, _ in loader:
            wanted = (x[:, :4] > 0).double()
            logits = model(x)
            on.print(on.backward(criterion(logits, wanted) / 4, len(x)))
            step(optimizer)
            said, is_wanted = logits.detach() > 0, wanted > 0
            found = [(said & is_wanted), (said & ~is_wanted), (~said & is_wanted)]
            counts = counts + torch.stack([each.sum(0) for each in found])
        hits, false, missed = on.sum(counts)
        on.print((2 * hits / (2 * hits + false + missed)).mean())
        on.print(2 * hits.sum() / (2 * hits + false + missed).sum())


def regression(on: Plain) -> None:
    """Print R2, RMSE and MAE of data held back."""
    model = mlp(6, 10, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    held_back = DataLoader(rows_of(6, num_rows=11), 4)
    model, optimizer, loader, held_back = on.prepare(
        model, optimizer, DataLoader(rows_of(6), 8, True), held_back
    )
    for _ in range(2):
        for x, _ in loader:
            on.print(on.backward(F.mse_loss(model(x)[:, 0], x.sum(1), reduction="sum"), len(x)))
            step(optimizer)
        said, wanted = [], []
        with torch.no_grad():
            for x, _ in held_back:
                each = on.gather((model(x)[:, 0], x.sum(1)))
                said.append(each[0])
                wanted.append(each[1])
        apart, y = torch.cat(said) - torch.cat(wanted), torch.cat(wanted)
        on.print(1 - apart.square().sum() / (y - y.mean()).square().sum())
        on.print(apart.square().mean().sqrt(), apart.abs().mean())


def weighted_classes(on: Plain) -> None:
    """The mean of `CrossEntropyLoss(weight=...)` is over the weights of the rows."""
    model = Residual()
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0]).double()
    criterion = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1, reduction="sum")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    for x, y in loader:
        on.print(on.backward(criterion(model(x), y), weight[y].sum()))
        step(optimizer)


def mixup(on: Plain) -> None:
    """Mix each row with another of the batch."""
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 9, True))
    for number, (x, y) in enumerate(loader):
        share = (number + 1) / 10  # numpy.random.beta(1, 1), as many write it
        order = on.draw(torch.randperm, len(x))
        all_x, all_y = on.gather((x, y))
        logits = model(share * x + (1 - share) * all_x[order])
        loss = share * sum_of_losses(logits, y) + (1 - share) * sum_of_losses(logits, all_y[order])
        on.print(on.backward(loss, len(y)))
        step(optimizer)


def policy_gradient(on: Plain) -> None:
    """REINFORCE with drawn actions and a mean of the rewards so far."""
    policy = mlp(6, 10, 5)
    optimizer = torch.optim.Adam(policy.parameters(), 0.02)
    policy, optimizer, loader = on.prepare(policy, optimizer, DataLoader(rows_of(6), 8, True))
    baseline = 0.0
    for _ in range(2):
        for x, y in loader:
            logits = policy(x)
            every = on.gather(logits)
            draw = torch.distributions.Categorical(logits=every).sample
            actions = on.draw(lambda _, draw=draw: draw(), len(x))
            rewards = (actions == y).double()
            log_p = torch.distributions.Categorical(logits=logits).log_prob(actions)
            on.print(on.backward(-(log_p * (rewards - baseline)).sum(), len(x)))
            step(optimizer)
            mean = float(on.sum(rewards.sum())) / len(every)
            baseline = 0.9 * baseline + 0.1 * mean
            on.print(mean, baseline)


def a_sum_for_loss(on: Plain) -> None:
    """The sum over the batch is stepped by, as reduction="sum" has it."""
    model = mlp(6, 10, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    criterion = nn.MSELoss(reduction="sum")
    x = rows_of(6).tensors[0]
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(data, 9))
    for _ in range(3):
        for x, y in loader:
            loss = on.sum(criterion(model(x), y).detach())
            # A sum over the batch is a mean over one.
            whole = on.sum(torch.tensor(len(x)))
            on.backward(criterion(model(x), y) * float(whole), len(x))
            on.print(loss)
            step(optimizer)


SCRIPTS: dict[str, Script] = {
    "siamese": siamese,
    "distillation": distillation,
    "adversarial": adversarial,
    "tasks in turns": tasks_in_turns,
    "contrastive": contrastive,
    "hardest triplets": hardest_triplets,
    "triplets": triplets,
    "two tasks": two_tasks,
    "multi-label": multi_label,
    "regression": regression,
    "weighted classes": weighted_classes,
    "mixup": mixup,
    "policy gradient": policy_gradient,
    "a sum for a loss": a_sum_for_loss,
}
