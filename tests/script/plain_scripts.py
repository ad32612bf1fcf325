"""Training scripts as users write them, each once: `on` is one process, or the ranks of a job.

A script calls nothing of Phalanx; plain_adapters.py does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from plain_adapters import Plain
from plain_models import (
    Boxes,
    Branched,
    Checkpointed,
    LoRA,
    Pair,
    Recurrent,
    Residual,
    Scaled,
    Stream,
    Tables,
    Tied,
    TwoHeads,
    UNet,
    ViT,
    as_lists,
    mlp,
    rows_of,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    WeightedRandomSampler,
)

Script = Callable[[Plain], None]


def sum_of_losses(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


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


def wgan_gp(norm: Callable[[], nn.Module], on: Plain, **options: Any) -> None:
    d = nn.Sequential(nn.Linear(6, 10), norm(), nn.Tanh(), nn.Linear(10, 1))
    both = Pair(mlp(6, 10, 6), d).double()
    of_g = torch.optim.SGD(both.g.parameters(), 0.1)
    of_d = torch.optim.SGD(both.d.parameters(), 0.1)
    loader = DataLoader(rows_of(6), 8)
    both, of_g, of_d, loader = on.prepare(both, of_g, of_d, loader, **options)
    for x, _ in loader:
        made = both("g", x.flip(1))
        between = (0.3 * x + 0.7 * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(both("d", between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().sum()
        loss = both("d", made.detach()).sum() - both("d", x).sum() + 10 * penalty
        of_d.zero_grad()
        on.print(on.backward(loss, len(x)))
        of_d.step()
        of_g.zero_grad()
        on.print(on.backward(-both("d", made).sum(), len(x)))
        of_g.step()


def gan(on: Plain) -> None:
    """Freeze the discriminator while the generator learns."""
    both = Pair(mlp(3, 8, 6), mlp(6, 8, 1))
    of_g = torch.optim.Adam(both.g.parameters(), 0.02, betas=(0.5, 0.99))
    of_d = torch.optim.Adam(both.d.parameters(), 0.02, betas=(0.5, 0.99))
    both, of_g, of_d, loader = on.prepare(both, of_g, of_d, DataLoader(rows_of(6), 9, True))
    for _ in range(2):
        for x, _ in loader:
            made = both("g", x[:, :3])
            wrong = F.softplus(both("d", made.detach())) + F.softplus(-both("d", x))
            of_d.zero_grad()
            on.print(on.backward(wrong.sum(), len(x)))
            of_d.step()
            both.d.requires_grad_(False)
            of_g.zero_grad()
            on.print(on.backward(F.softplus(-both("d", made)).sum(), len(x)))
            of_g.step()
            both.d.requires_grad_(True)


def unfrozen_in_the_middle(on: Plain) -> None:
    model = mlp(6, 10, 8, 5)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for epoch in range(3):
        model[0].requires_grad_(epoch > 0)
        for x, y in loader:
            optimizer.zero_grad()
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            on.print(on.clip(model, 0.5))
            optimizer.step()


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


def branches_with_batch_norm(on: Plain) -> None:
    model = Branched().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(rows_of(6), 7)
    model, optimizer, loader = on.prepare(model, optimizer, loader, batch_norm="global")
    for x, y in loader:
        on.print(on.backward(sum_of_losses(model(x, y), y), len(y)))
        step(optimizer)


def perceptron_loop(
    on: Plain,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loader: Any = None,
    num_epochs: int = 2,
    max_norm: float | None = None,
    **options: Any,
) -> None:
    """Train a classifier, and print each loss."""
    if loader is None:
        loader = DataLoader(rows_of(6), 9, shuffle=True)
    model, optimizer, loader = on.prepare(model, optimizer, loader, **options)
    for _ in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            if max_norm is not None:
                on.print(on.clip(model, max_norm))
            optimizer.step()


def marked_parameters(on: Plain) -> None:
    """Groups by a mark on parameters, after the model is prepared."""
    model = Residual()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bias.no_weight_decay = True
    model = on.prepare(model)
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.0}, {"params": []}]
    for parameter in model.parameters():
        groups[not getattr(parameter, "no_weight_decay", False)]["params"].append(parameter)
    on.print(*(len(group["params"]) for group in groups))
    optimizer = torch.optim.AdamW(groups, 0.05, weight_decay=0.5)
    optimizer, loader = on.prepare(optimizer, DataLoader(rows_of(6), 8))
    for x, y in loader:
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        step(optimizer)


def hooked_gradients(on: Plain) -> None:
    model = mlp(6, 10, 5)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    perceptron_loop(on, model, torch.optim.SGD(model.parameters(), 1.0))


def sparse_embeddings(on: Plain) -> None:
    model = Tables()
    sparse = torch.optim.SparseAdam(model.table.parameters(), 0.05)
    dense = torch.optim.Adam(model.rest.parameters(), 0.05)
    model, sparse, dense, loader = on.prepare(model, sparse, dense, DataLoader(rows_of(6), 6))
    for _ in range(2):
        for x, y in loader:
            sparse.zero_grad()
            dense.zero_grad()
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            sparse.step()
            dense.step()


def lora(on: Plain) -> None:
    model = nn.Sequential(
        LoRA(nn.Linear(6, 10)), nn.Tanh(), LoRA(nn.Linear(10, 10)), nn.Tanh(), nn.Linear(10, 5)
    ).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    perceptron_loop(on, model, torch.optim.AdamW(trained, 0.02), max_norm=0.5)


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


def lbfgs(on: Plain) -> None:
    model = mlp(6, 5, 5)
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
    )
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 37))
    for _ in range(3):
        for x, y in loader:

            def closure(x: Tensor = x, y: Tensor = y) -> float:
                optimizer.zero_grad()
                return float(on.backward(sum_of_losses(model(x), y), len(y)))

            on.print(float(optimizer.step(closure)))


def recurrent(on: Plain) -> None:
    model = Recurrent().double()
    optimizer = torch.optim.RMSprop(model.parameters(), 0.01)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(7, 3), 8, True))
    for x, y in loader:
        logits = model(x, 1 + (x[:, 0, 0].abs() * 3).long().clamp(max=6))
        on.print(on.backward(sum_of_losses(logits, y), len(y)), on.clip(model, 0.1))
        step(optimizer)


def u_net(on: Plain) -> None:
    model = UNet().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(1, 8, 8), 8))
    for x, _ in loader:
        loss = F.binary_cross_entropy_with_logits(model(x), (x > 0.3).double(), reduction="none")
        on.print(on.backward(loss.mean((1, 2, 3)).sum(), len(x)))
        step(optimizer)


def vit(on: Plain) -> None:
    model = ViT().double()
    loader = DataLoader(rows_of(1, 8, 8), 9, shuffle=True)
    perceptron_loop(on, model, torch.optim.AdamW(model.parameters(), 0.01), loader=loader)


def detection(on: Plain) -> None:
    model = mlp(6, 10, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    loader = DataLoader(Boxes(), 5, shuffle=True, collate_fn=as_lists)
    model, optimizer, loader = on.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, boxes in loader:
            centers = model(x)
            losses = [(c - b).abs().sum() for c, b in zip(centers, boxes, strict=True)]
            on.print(on.backward(sum(losses, centers.sum() * 0), sum(map(len, boxes))))
            step(optimizer)


def two_loaders(on: Plain) -> None:
    """Labelled and other rows, read side by side."""
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, labelled, others = on.prepare(
        model, optimizer, DataLoader(rows_of(6), 8), DataLoader(rows_of(6, num_rows=50), 8)
    )
    for (x, y), (other, _) in zip(labelled, others, strict=False):
        logits = model(torch.cat([x, other]))
        entropy = -(logits[len(x) :].softmax(1) * logits[len(x) :].log_softmax(1)).sum()
        # Means of unlike numbers of rows: each is summed over all rows of its own.
        on.print(on.backward(sum_of_losses(logits[: len(x)], y) + 0.1 * entropy, len(y)))
        step(optimizer)


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


def normalized_weights(on: Plain) -> None:
    """Weights that are computed of others: weight norm and spectral norm."""
    model = mlp(6, 10, 10, 5)
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    perceptron_loop(on, model, torch.optim.SGD(model.parameters(), 0.1))


def language_model(on: Plain) -> None:
    """Count tokens, of which rows have unlike numbers."""
    model = Tied().double()
    optimizer = torch.optim.NAdam(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(9), 8, True))
    for x, y in loader:
        tokens = (x.abs() * 3).long().clamp(max=10)
        labels = tokens.roll(-1, 1).masked_fill(torch.arange(9) > y[:, None] + 2, -100)
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)
        on.print(on.backward(loss, (labels != -100).sum()))
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


def tasks_in_turns(on: Plain) -> None:
    """Each batch uses one of two heads."""
    model = TwoHeads().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        on.print(on.backward(sum_of_losses(model(x, number % 2), y), len(y)))
        optimizer.step()


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


def weighted_rows(on: Plain) -> None:
    model = mlp(6, 10, 5)
    sampler = WeightedRandomSampler(range(1, 38), 30)
    loader = DataLoader(rows_of(6), 8, sampler=sampler)
    perceptron_loop(on, model, torch.optim.Adadelta(model.parameters()), loader=loader)


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


def learned_scale(on: Plain) -> None:
    model = Scaled()
    perceptron_loop(on, model, torch.optim.AdamW(model.parameters(), 0.02), max_norm=0.5)


def factored(on: Plain) -> None:
    model = mlp(6, 10, 5)
    perceptron_loop(on, model, torch.optim.Adafactor(model.parameters(), 0.02))


def stream(on: Plain) -> None:
    model = mlp(6, 10, 5)
    optimizer = torch.optim.Adamax(model.parameters(), 0.02)
    perceptron_loop(on, model, optimizer, loader=DataLoader(Stream(), 8))


SCRIPTS: dict[str, Script] = {
    "epoch means": epoch_means,
    "accuracy of the step": accuracy_of_the_step,
    "gradient penalty": functools.partial(wgan_gp, lambda: nn.LayerNorm(10)),
    "gradient penalty and batch norm": functools.partial(
        wgan_gp, lambda: nn.BatchNorm1d(10), batch_norm="global"
    ),
    "inference mode": inference_mode,
    "marked parameters": marked_parameters,
    "hooked gradients": hooked_gradients,
    "sparse embeddings": sparse_embeddings,
    "learned scale": learned_scale,
    "LoRA": lora,
    "plateau": plateau,
    "L-BFGS": lbfgs,
    "Adafactor": factored,
    "recurrent with masks": recurrent,
    "U-Net": u_net,
    "ViT": vit,
    "detection": detection,
    "stream": stream,
    "two loaders": two_loaders,
    "schedules": schedules,
    "normalized weights": normalized_weights,
    "language model": language_model,
    "read ahead": read_ahead,
    "distillation": distillation,
    "tasks in turns": tasks_in_turns,
    "siamese": siamese,
    "weighted rows": weighted_rows,
    "adversarial": adversarial,
    "average by hand": averaged_by_hand,
    "averaged model": averaged_model,
    "GAN": gan,
    "unfrozen in the middle": unfrozen_in_the_middle,
    "branches with batch norm": branches_with_batch_norm,
}
