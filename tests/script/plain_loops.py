"""Scripts that differ by their loop: what they print, schedule, average and keep."""

from __future__ import annotations

import torch
from plain_adapters import Plain
from plain_loop import Script, step, sum_of_losses
from plain_models import Checkpointed, Residual, mlp, rows_of
from torch import Tensor
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader


def epoch_means(on: Plain) -> None:
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 9, True))
    for _ in range(2):
        total = right = torch.tensor(0.0)
        for x, y in loader:
            logits = model(x)
            loss = on.backward(sum_of_losses(logits, y), len(y))
            step(optimizer)
            on.print(loss)
            total = total + sum_of_losses(logits.detach(), y)
            right = right + (logits.argmax(1) == y).sum()
        on.print(float(on.sum(total)) / 37, float(on.sum(right)) / 37)


def accuracy_of_the_step(on: Plain) -> None:
    """Measure between backward and step, with a graph."""
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for x, y in loader:
        loss = on.backward(sum_of_losses(model(x), y), len(y))
        right = (model(x).argmax(1) == y).sum()
        step(optimizer)
        on.print(loss, on.sum(right))


def inference_mode(on: Plain) -> None:
    """Measure before the first step and after each pass."""
    model = Residual()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    held_back = DataLoader(rows_of(6, num_rows=11), 4)
    model, optimizer, loader, held_back = on.prepare(
        model, optimizer, DataLoader(rows_of(6), 8), held_back
    )
    for _ in range(3):
        model.eval()
        with torch.inference_mode():
            losses = [sum_of_losses(model(x), y) for x, y in held_back]
        on.print(float(on.sum(torch.stack(losses).sum())) / 11)
        model.train()
        for x, y in loader:
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)


def read_ahead(on: Plain) -> None:
    """Read a batch before the backward of the one before it, whose blocks run again there."""
    model = Checkpointed().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    batches = iter(loader)
    batch = next(batches)
    while batch is not None:
        x, y = batch
        loss = sum_of_losses(model(x), y)
        batch = next(batches, None)
        on.print(on.backward(loss, len(y)))
        step(optimizer)


def plateau(on: Plain) -> None:
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 2.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    held_back = DataLoader(rows_of(6, num_rows=11), 4)
    model, optimizer, schedule, loader, held_back = on.prepare(
        model, optimizer, schedule, DataLoader(rows_of(6), 8, True), held_back
    )
    for _ in range(5):
        for x, y in loader:
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)
        with torch.no_grad():
            total = torch.stack([sum_of_losses(model(x), y) for x, y in held_back]).sum()
        schedule.step(float(on.sum(total)) / 11)
        on.print(optimizer.param_groups[0]["lr"])


def schedules(on: Plain) -> None:
    """One by steps and one by passes."""
    model = Residual()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
    by_pass = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.7)
    model, optimizer, by_step, by_pass, loader = on.prepare(
        model, optimizer, by_step, by_pass, DataLoader(rows_of(6), 9, True, drop_last=True)
    )
    for _ in range(3):
        for x, y in loader:
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)
            by_step.step()
        by_pass.step()
        on.print(optimizer.param_groups[0]["lr"])


def averaged_by_hand(on: Plain) -> None:
    """An average of the weights, evaluated by functional_call."""
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x, y in loader:
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        step(optimizer)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter.detach(), 0.1)
            logits = torch.func.functional_call(model, average, (x,))
        on.print(on.sum(sum_of_losses(logits, y)))


def averaged_model(on: Plain) -> None:
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for x, y in loader:
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        step(optimizer)
        average.update_parameters(model)
        with torch.no_grad():
            on.print(on.sum(sum_of_losses(average(x), y)))


class Meter:
    """The last value and the mean, as many examples have it."""

    def __init__(self) -> None:
        self.value = self.total = self.count = self.mean = 0.0

    def update(self, value: float, count: int = 1) -> None:
        self.value, self.total, self.count = value, self.total + value * count, self.count + count
        self.mean = self.total / self.count


def top_k(logits: Tensor, labels: Tensor, k: int) -> float:
    """Return the percentage of rows whose class is among the k likeliest."""
    found = logits.topk(k, 1).indices == labels[:, None]
    return float(found.any(1).double().mean()) * 100


def meters(on: Plain) -> None:
    """PyTorch's ImageNet example: meters of loss, top-1 and top-5, each batch and in all."""
    model = mlp(6, 10, 9)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    data = rows_of(6, classes=9)
    model, optimizer, schedule, loader = on.prepare(
        model, optimizer, schedule, DataLoader(data, 8, True)
    )
    for _ in range(2):
        losses, top_1, top_5 = Meter(), Meter(), Meter()
        for x, y in loader:
            logits = model(x)
            loss = on.backward(sum_of_losses(logits, y), len(y))
            step(optimizer)
            every, labels = on.gather((logits, y))
            losses.update(float(loss), len(labels))
            for meter, k in ((top_1, 1), (top_5, 5)):
                meter.update(top_k(every, labels, k), len(labels))
            on.print(losses.value, losses.mean, top_1.value, top_1.mean, top_5.value, top_5.mean)
        schedule.step()
        on.print(schedule.get_last_lr()[0])


def warm_restarts(on: Plain) -> None:
    """A schedule by fractions of a pass, after one that warms up."""
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
    model, optimizer, schedule, loader = on.prepare(
        model, optimizer, schedule, DataLoader(rows_of(6), 8, True)
    )
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)
            schedule.step(epoch + number / len(loader))
            on.print(optimizer.param_groups[0]["lr"])


def moving_average(on: Plain) -> None:
    """EMA, evaluated after each pass."""
    model = Residual()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    held_back = DataLoader(rows_of(6, num_rows=11), 4)
    model, optimizer, loader, held_back = on.prepare(
        model, optimizer, DataLoader(rows_of(6), 8, True), held_back
    )
    average = on.average(model, 0.9)
    for _ in range(2):
        for x, y in loader:
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)
            average.update()
        with average.applied(), torch.no_grad():
            losses = [sum_of_losses(model(x), y) for x, y in held_back]
            on.print(on.sum(torch.stack(losses).sum()) / 11)


def swa(on: Plain) -> None:
    """The mean of the weights after each of the last passes, at a rate of its own."""
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    late = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
    model, optimizer, schedule, late, loader = on.prepare(
        model, optimizer, schedule, late, DataLoader(rows_of(6), 8, True)
    )
    average = on.average(model, None)
    for epoch in range(4):
        for x, y in loader:
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)
        if epoch > 1:
            average.update()
            late.step()
        else:
            schedule.step()
        on.print(optimizer.param_groups[0]["lr"])
    with average.applied(), torch.no_grad():
        on.print(on.sum(torch.stack([sum_of_losses(model(x), y) for x, y in loader]).sum()))


def stopped_early(on: Plain) -> None:
    """Keep the best weights, stop when none is better, and print what the best ones do."""
    model = mlp(6, 10, 5)
    optimizer = torch.optim.Adam(model.parameters(), 0.3)
    held_back = DataLoader(rows_of(6, num_rows=11), 4)
    model, optimizer, loader, held_back = on.prepare(
        model, optimizer, DataLoader(rows_of(6), 8, True), held_back
    )

    def validate() -> float:
        model.eval()
        with torch.no_grad():
            losses = [sum_of_losses(model(x), y) for x, y in held_back]
        model.train()
        return float(on.sum(torch.stack(losses).sum())) / 11

    best, kept, num_worse = float("inf"), on.state_dict(model), 0
    for epoch in range(8):
        for x, y in loader:
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)
        loss = validate()
        if loss < best:
            best, kept, num_worse = loss, on.state_dict(model), 0
        else:
            num_worse += 1
        on.print(epoch, loss, best)
        if num_worse == 2:
            break
    on.load_state_dict(model, kept)
    on.print(validate())


SCRIPTS: dict[str, Script] = {
    "epoch means": epoch_means,
    "accuracy of the step": accuracy_of_the_step,
    "inference mode": inference_mode,
    "read ahead": read_ahead,
    "plateau": plateau,
    "schedules": schedules,
    "average by hand": averaged_by_hand,
    "averaged model": averaged_model,
    "meters": meters,
    "warm restarts": warm_restarts,
    "moving average": moving_average,
    "SWA": swa,
    "stopped early": stopped_early,
}
