"""A small training loop of one's own; the first rank writes losses, norms and weights to a file.

phalanx run benchmarks/identity/loop.py --strategy dp2 -- OUT.json STEPS FOLDER [OPTION ...]

Options: loss=sum|mean|rows|whole, model=blocks|tokens, average, scaler,
no-shared-memory, resume. The last batch of `tokens` has one sample, so other ranks have none.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from job import data, model, optimizer, scheduler

ROLES = {
    "table": "embedding", "norm": "norm", "mlp": "branch", "mlp.0": "column", "mlp.2": "row",
    "head": "head",
}  # fmt: skip


class Tokens(nn.Module):
    """Predicts a class for each of six tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [rows, 6, 50]."""
        x = self.table(ids)
        return self.head(x + self.mlp(self.norm(x)))


def tokens() -> TensorDataset:
    """Return 121 rows of tokens and their classes; -100 where there is none."""
    generator = torch.Generator().manual_seed(2)
    ids, labels = torch.randint(0, 50, (2, 121, 6), generator=generator)
    return TensorDataset(ids, torch.where(labels < 40, labels, -100))


def digest(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of each tensor."""
    return {
        name: hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, value in tensors.items()
    }


def backward(run: phalanx.Run, form: str, scale: Any, logits: Tensor, y: Tensor) -> Tensor:
    """Call `run.backward` with a loss of this form."""
    if form == "whole":
        logits, y = run.gather(logits, y, dim=0)
        return run.backward(scale(cross_entropy(logits.flatten(0, -2), y.flatten())))
    logits, y = logits.flatten(0, -2), y.flatten()
    if form == "rows":
        losses = cross_entropy(logits, y, reduction="none")
        return run.backward(scale(losses), weights=1 + (y % 3).double().sqrt().float())
    loss, count = cross_entropy(logits, y, reduction=form), (y != -100).sum()
    return run.backward(count=count, **{f"{form}_of_rows": scale(loss)})


def main(out: str, steps: str, folder: str, *words: str) -> None:
    """Take `steps` steps, accumulating three batches each, and save; the second part resumes."""
    options = dict(word.partition("=")[::2] for word in words)
    form, is_text = options.get("loss", "sum"), options.get("model") == "tokens"
    run = phalanx.init(accumulation=3, shared_memory="no-shared-memory" not in options)
    torch.manual_seed(0)
    net = Tokens() if is_text else model()
    opt = optimizer(net.parameters())
    schedule = scheduler(opt)
    loader = DataLoader(tokens() if is_text else data(), batch_size=12, shuffle=True)
    norm: Any = "global" if run.strategy.fsdp.degree == 1 else "local"
    net, opt, loader, schedule = run.prepare(
        net, opt, loader, schedule,
        batch_norm=None if is_text else norm, roles=ROLES if run.strategy.tp.degree > 1 else None,
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2, enabled="scaler" in options)
    if "scaler" in options:
        run.register("scaler", scaler)
    average = run.average(0.9, warmup=True, buffers=True) if "average" in options else None
    if "resume" in options:
        run.resume(folder)
    losses, step_losses, norms, done = [], [], [], 0
    while done < int(steps):
        for x, y in loader:
            losses.append(backward(run, form, scaler.scale, net(x), y).item())
            if not run.is_step_end:
                continue
            step_losses.append(run.loss_of_step.item())
            scaler.unscale_(opt)
            norms.append(float(run.clip(1.0)))
            scaler.step(opt)
            scaler.update()
            schedule.step()
            opt.zero_grad()
            if average is not None:
                average.update()
            done += 1
            if done == int(steps):
                break
    run.save(folder)
    weights = digest(run.state_dict())
    numbers = {"loss": losses, "loss_of_step": step_losses, "norm": norms, "weights": weights}
    if average is not None:
        with average.applied():
            numbers["average"] = digest(run.state_dict())
    with torch.no_grad():
        net.eval()
        right = [((net(x).argmax(-1) == y).sum(), y.numel()) for x, y in loader]
    count = torch.tensor([n for _, n in right]).sum()
    numbers["accuracy"] = [run.mean(torch.stack([n for n, _ in right]).sum(), count).item()]
    if run.is_first:
        Path(out).write_text(json.dumps(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
