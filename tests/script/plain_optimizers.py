"""Scripts that differ by what is done with gradients."""

from __future__ import annotations

from typing import Any

import torch
from plain_adapters import Plain
from plain_loop import Script, perceptron_loop, step, sum_of_losses
from plain_models import Residual, mlp, rows_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader


def marked_parameters(on: Plain) -> None:
    """Groups by a mark on parameters, after the model is prepared."""
    model = Residual()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            setattr(module.bias, "no_weight_decay", True)  # noqa: B010
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


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.02, 0.02)


def hooked_gradients(on: Plain) -> None:
    model = mlp(6, 10, 5)
    for parameter in model.parameters():
        parameter.register_hook(clamped)
    perceptron_loop(on, model, torch.optim.SGD(model.parameters(), 1.0))


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


def factored(on: Plain) -> None:
    model = mlp(6, 10, 5)
    perceptron_loop(on, model, torch.optim.Adafactor(model.parameters(), 0.02))


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as the repository that most take it from has it."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        norm = torch.stack(norms).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()


def sharpness_aware(on: Plain) -> None:
    """SAM: two forwards and backwards a step."""
    model = Residual()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model, loader = on.prepare(model, DataLoader(rows_of(6), 8, True))
    optimizer = on.prepare(optimizer)
    for x, y in loader:
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        optimizer.first_step()
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_groups(on: Plain) -> None:
    """By torch's own function, each part of the model for itself."""
    model = Residual()
    optimizer = torch.optim.SGD(
        [
            {"params": model.first.parameters(), "lr": 0.02},
            {"params": model.blocks.parameters(), "weight_decay": 0.1},
            {"params": model.last.parameters(), "lr": 0.2, "momentum": 0.9},
        ],
        lr=0.1,
    )
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    for x, y in loader:
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        on.print(nn.utils.clip_grad_norm_(model.blocks.parameters(), 0.2))
        on.print(nn.utils.clip_grad_norm_(model.last.parameters(), 0.1))
        nn.utils.clip_grad_value_(model.first.parameters(), 0.01)
        step(optimizer)


def noisy_gradients(on: Plain) -> None:
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    noise = torch.Generator().manual_seed(3)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for x, y in loader:
        optimizer.zero_grad()
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        for parameter in model.parameters():
            shape, dtype = parameter.grad.shape, parameter.grad.dtype
            parameter.grad += 0.01 * torch.randn(shape, generator=noise, dtype=dtype)
        optimizer.step()


def split_noise(on: Plain) -> None:
    """Add noise to gradients that may be shards, as the message on whole noise says."""
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    drawn = torch.Generator().manual_seed(3)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for x, y in loader:
        optimizer.zero_grad()
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=drawn, dtype=p.dtype)
            if isinstance(p, DTensor):
                noise = distribute_tensor(noise, p.device_mesh, p.placements, src_data_rank=None)
            p.grad += 0.01 * noise
        optimizer.step()


def norm_of_gradients(on: Plain) -> None:
    """Print the norms of gradients and weights, as many loops watch them."""
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for x, y in loader:
        optimizer.zero_grad()
        on.print(on.backward(sum_of_losses(model(x), y), len(y)))
        on.print(sum(p.grad.detach().norm(2).item() ** 2 for p in model.parameters()) ** 0.5)
        on.print(sum(p.detach().norm().item() for p in model.parameters()))
        optimizer.step()


def scaled_loss(on: Plain) -> None:
    model = mlp(6, 10, 5)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            factor = 1e308 if number == 2 else 1.0  # this step overflows
            loss = on.backward(scaler.scale(factor * sum_of_losses(model(x), y)), len(y))
            scaler.step(optimizer)
            on.print(loss / scaler.get_scale() if factor == 1 else 0.0)
            scaler.update()
            optimizer.zero_grad()
            on.print(scaler.get_scale())


def autocast(on: Plain) -> None:
    """bfloat16 in the forward, weights in float32."""
    model = Residual().float()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x.float())
            loss = sum_of_losses(logits, y)
        on.print(on.backward(loss, len(y)))
        optimizer.step()


SCRIPTS: dict[str, Script] = {
    "marked parameters": marked_parameters,
    "hooked gradients": hooked_gradients,
    "L-BFGS": lbfgs,
    "Adafactor": factored,
    "sharpness-aware": sharpness_aware,
    "clipped by groups": clipped_by_groups,
    "noisy gradients": noisy_gradients,
    "split noise": split_noise,
    "norm of gradients": norm_of_gradients,
    "scaled loss": scaled_loss,
    "autocast": autocast,
}
