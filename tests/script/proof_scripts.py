"""Scripts for `test_proof_by_default`: right ones, and ones with a planted mistake each."""

from __future__ import annotations

SCRIPT = """
import copy, random
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
import phalanx
{before}
run = phalanx.init({init})
rank = run.comm.coord("data")
torch.manual_seed(0)
mlp = lambda *layers: nn.Sequential(nn.Linear(8, 16), *layers, nn.ReLU(), nn.Linear(16, 3))
x = torch.randn(101, 8)
data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
model = {model}
optimizer = {optimizer}
{after}
loader = DataLoader(data, 16, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader{prepare})
for number, (x, y) in enumerate(loader):
{body}
{step}
run.save("checkpoints")
"""

PARTS = {
    "before": "",
    "init": "",
    "model": "mlp()",
    "optimizer": "torch.optim.AdamW(model.parameters(), lr=1e-2)",
    "after": "",
    "prepare": "",
    "body": "out, y = run.gather(model(x), y)\nrun.backward(F.cross_entropy(out, y))",
    "step": "if run.is_step_end:\n    optimizer.step()\n    optimizer.zero_grad()",
}


def script(**parts: str) -> str:
    """Return the script with some parts replaced."""
    known = {**PARTS, **parts}
    for name in ("body", "step"):
        known[name] = "\n".join(f"    {line}" for line in known[name].splitlines())
    return SCRIPT.format(**known)


def with_optimizer(name: str) -> dict[str, str]:
    """Return the parts of a script with an optimizer of torch."""
    return {"optimizer": f"torch.optim.{name}"}


_STEP = "optimizer.step()\noptimizer.zero_grad()"
_OWN = "loss = F.cross_entropy(model(x), y)\n"

RIGHT: dict[str, dict[str, str]] = {
    "mean of the whole batch": {},
    "sums of own rows": {
        "body": "h = model(x)\nright = run.sum((h.argmax(1) == y).sum())\n"
        "seconds = run.sum(0.1 + rank)\n"
        "out, y = run.gather(h, y)\nrun.backward(F.cross_entropy(out, y))"
    },
    "mean of equal losses": {
        "body": PARTS["body"].replace("run.b", "loss = run.b")
        + "\nmean = run.sum(loss.item()) / run.size"
    },
    "three steps": {"step": PARTS["step"] + "\nif number == 2: break"},
    "outputs in a structure": {
        "before": "class Structured(nn.Sequential):\n    def forward(self, x):\n"
        "        return {'out': super().forward(x)}",
        "model": "Structured(*mlp())",
        "body": "out, y = run.gather(model(x)['out'], y)\nrun.backward(F.cross_entropy(out, y))",
    },
    "mean of rows": {"body": _OWN + "run.backward(mean_of_rows=loss, count=len(y))"},
    "sum of rows": {
        "body": "run.backward(sum_of_rows=F.cross_entropy(model(x), y, reduction='sum'), "
        "count=len(y))"
    },
    "losses not reduced": {"body": "run.backward(F.cross_entropy(model(x), y, reduction='none'))"},
    "weighted losses": {
        "body": "each = F.cross_entropy(model(x), y, reduction='none')\n"
        "run.backward(each, weights=1 + y.float())"
    },
    "class weights": {
        "body": "out, y = run.gather(model(x), y)\n"
        "run.backward(F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 3.0])))"
    },
    "ignored labels": {
        "body": "y[y == 2] = -100\nout, y = run.gather(model(x), y)\n"
        "run.backward(F.cross_entropy(out, y))"
    },
    "root of a mean": {
        "body": "out, y = run.gather(model(x), y)\n"
        "run.backward(((out[:, 0] - y) ** 2).mean().sqrt())"
    },
    "contrastive": {
        "body": "out = F.normalize(run.gather(model(x)), dim=1)\n"
        "run.backward(F.cross_entropy(out @ out.T / 0.1, torch.arange(len(out))))"
    },
    "smoothed labels": {
        "body": "out, y = run.gather(model(x), y)\n"
        "run.backward(F.cross_entropy(out, y, label_smoothing=0.1))"
    },
    "SGD": with_optimizer("SGD(model.parameters(), 0.1)"),
    "momentum": with_optimizer("SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)"),
    "Adam": with_optimizer("Adam(model.parameters(), 1e-2)"),
    "NAdam": with_optimizer("NAdam(model.parameters(), 1e-2)"),
    "RMSprop": with_optimizer("RMSprop(model.parameters(), 1e-2)"),
    "Adagrad": with_optimizer("Adagrad(model.parameters(), 1e-2)"),
    "fused AdamW": with_optimizer("AdamW(model.parameters(), 1e-2, fused=True)"),
    "dropout": {"model": "mlp(nn.Dropout(0.3))"},
    "global BatchNorm": {"model": "mlp(nn.BatchNorm1d(16))", "prepare": ", batch_norm='global'"},
    "local BatchNorm": {"model": "mlp(nn.BatchNorm1d(16))", "prepare": ", batch_norm='local'"},
    "BatchNorm that amplifies rounding": {
        "model": "mlp(nn.BatchNorm1d(16, eps=1e-12))",
        "prepare": ", batch_norm='global'",
        "after": "model[0].weight.data *= 1e-4",
    },
    "LayerNorm": {"model": "mlp(nn.LayerNorm(16))"},
    "accumulation": {"init": "accumulation=2"},
    "accumulation of sums": {
        "init": "accumulation=3",
        "body": _OWN + "run.backward(mean_of_rows=loss / 3, count=len(y))",
    },
    "scheduler": {
        "after": "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)",
        "step": _STEP + "\nschedule.step()",
    },
    "clipping": {"step": "run.clip(0.1)\n" + _STEP},
    "autocast": {
        "body": "with torch.autocast('cpu', torch.bfloat16):\n"
        "    out, y = run.gather(model(x).float(), y)\n"
        "    loss = F.cross_entropy(out, y)\nrun.backward(loss)"
    },
    "bfloat16": {
        "model": "mlp().bfloat16()",
        "body": "out, y = run.gather(model(x.bfloat16()).float(), y)\n"
        "run.backward(F.cross_entropy(out, y))",
    },
    "several models": {
        "model": "nn.ModuleDict({'a': mlp(), 'b': mlp()})",
        "body": "out, y = run.gather(model['a'](x) + model['b'](x.flip(1)), y)\n"
        "run.backward(F.cross_entropy(out, y))",
    },
    "convolution": {
        "model": "nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), "
        "nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 3))"
    },
    "draw of the run": {
        "body": "x = x + run.draw(lambda rows: torch.randn(rows, 8))\n"
        "out, y = run.gather(model(x), y)\nrun.backward(F.cross_entropy(out, y))"
    },
    "state of each row": {
        "model": "nn.GRUCell(8, 3)",
        "after": "data = TensorDataset(*(t[:96] for t in data.tensors))\nstate = None",
        "body": "state = model(x, None if state is None else state.detach())\n"
        "out, y = run.gather(state, y)\nrun.backward(F.cross_entropy(out, y))",
    },
    "batch that grows with the ranks": {
        "after": "of = DataLoader; DataLoader = lambda data, size, **_: of(data, 8 * run.size)"
    },
    "DistributedSampler": {
        "after": "from torch.utils.data import DistributedSampler\nof = DataLoader\n"
        "DataLoader = lambda data, size, **_: of(\n"
        "    data, size // 2, sampler=DistributedSampler(data, run.size, run.rank))",
    },
    "no seed": {
        "before": "torch.seed()",
        "after": "torch.seed(); random.seed()\nmodel = mlp()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)",
    },
    "reentrant checkpoint": {
        "before": "from torch.utils.checkpoint import checkpoint",
        "body": "out = checkpoint(model, x.requires_grad_(), use_reentrant=True)\n"
        "out, y = run.gather(out, y)\nrun.backward(F.cross_entropy(out, y))",
    },
    "compiled": {"model": "torch.compile(mlp(), backend='aot_eager', fullgraph=True)"},
    "frozen layer": {"after": "for p in model[0].parameters(): p.requires_grad = False"},
}
"""Name -> parts of a script that computes what one process computes, or says that it does not."""

_ON_RANK = "if rank == 1:\n    with torch.no_grad():\n        "

WRONG: dict[str, dict[str, str]] = {
    "dropped count": {"body": _OWN + "run.backward(mean_of_rows=loss, count=1)"},
    "dropped count of collated rows": {
        "after": "of = DataLoader; DataLoader = lambda *args, **options: of(\n"
        "    *args, **options, num_workers=1,\n"
        "    collate_fn=lambda rows: tuple(map(torch.stack, zip(*rows))))",
        "body": _OWN + "run.backward(mean_of_rows=loss, count=1)",
    },
    "count of the batch": {"body": _OWN + "run.backward(mean_of_rows=loss, count=16)"},
    "mean given as a sum": {"body": _OWN + "run.backward(sum_of_rows=loss * 8, count=len(y))"},
    "leftover division by ranks": {
        "body": "out, y = run.gather(model(x), y)\n"
        "run.backward(F.cross_entropy(out, y) / run.comm.size('data'))"
    },
    "own loss": {"body": _OWN + "run.backward(loss)"},
    "forgotten gather of labels": {
        "body": "run.backward(F.cross_entropy(run.gather(model(x)), y))"
    },
    "root of own mean": {
        "body": "loss = ((model(x)[:, 0] - y) ** 2).mean().sqrt()\n"
        "run.backward(mean_of_rows=loss, count=len(y))"
    },
    "own class weights": {
        "body": "loss = F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 9.0]))\n"
        "run.backward(mean_of_rows=loss, count=len(y))"
    },
    "own ignored labels": {
        "body": "y[y == 2] = -100\n" + _OWN + "run.backward(mean_of_rows=loss, count=len(y))"
    },
    "own contrast": {
        "body": "out = F.normalize(model(x), dim=1)\n"
        "loss = F.cross_entropy(out @ out.T / 0.1, torch.arange(len(out)))\n"
        "run.backward(mean_of_rows=loss, count=len(y))"
    },
    "own term": {
        "body": "h = model(x)\nout, y = run.gather(h, y)\n"
        "run.backward(F.cross_entropy(out, y) + 0.01 * (h - h.detach()).mul(h.detach()).sum())"
    },
    "average by hand": {
        "body": "import torch.distributed as dist\n" + _OWN + "dist.all_reduce(loss.data)\n"
        "loss.data /= dist.get_world_size()\nrun.backward(loss)"
    },
    "drift of weights": {"step": _STEP + "\n" + _ON_RANK + "model[-1].bias.mul_(1.5).add_(0.1)"},
    "drift of a gradient": {"step": _ON_RANK + "model[-1].bias.grad.add_(0.1)\n" + _STEP},
    "clipping on one rank": {
        "step": "if rank == 0: nn.utils.clip_grad_value_(model[-1].bias, 1e-4)\n" + _STEP
    },
    "rate of one rank": {"step": "optimizer.param_groups[0]['lr'] = 0.01 * (1 + rank)\n" + _STEP},
    "rate by ranks": {
        "optimizer": "torch.optim.AdamW(model.parameters(), lr=1e-2 * run.comm.size('data'))"
    },
    "sum of gathered rows": {
        "body": PARTS["body"] + "\nright = run.sum((out.argmax(1) == y).sum())"
    },
    "fewer steps by ranks": {
        "body": PARTS["body"] + "\nif number == 4 // run.size: break",
        "step": "optimizer.step()\noptimizer.zero_grad()",
    },
    "rows of one rank": {"body": "x = x * (1 + rank)\n" + PARTS["body"]},
    "rows left out": {
        "body": "x, y = x[:-1], y[:-1]\n" + _OWN + "run.backward(mean_of_rows=loss, count=len(y))"
    },
    "shifted labels": {"body": "y = y.roll(1)\n" + PARTS["body"]},
    "seed of the data by rank": {
        "after": "torch.manual_seed(rank)\n"
        "data = TensorDataset(torch.randn(101, 8), data.tensors[1])"
    },
    "noise of each rank": {"body": "x = x + torch.randn_like(x)\n" + PARTS["body"]},
    "noise by rank's seed": {
        "body": "x = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(rank + 7))\n"
        + PARTS["body"]
    },
    "functional dropout": {"body": PARTS["body"].replace("model(x)", "model(F.dropout(x, 0.5))")},
    "mask of own draws": {
        "before": "class Mask(nn.Module):\n    def forward(self, x):\n"
        "        return x * (torch.rand(x.shape) > 0.5)",
        "model": "mlp(Mask())",
    },
    "own batch statistics": {
        "before": "class Norm(nn.Module):\n    def forward(self, x):\n"
        "        return (x - x.mean(0)) / (x.std(0) + 1e-3)",
        "model": "mlp(Norm())",
    },
    "BatchNorm without a choice": {"model": "mlp(nn.BatchNorm1d(16))"},
    "instance normalised by the batch": {
        "body": "x = (x - x.mean(0)) / x.std(0)\n" + PARTS["body"]
    },
    "batch size by ranks": {
        "after": "DataLoader_, DataLoader = DataLoader, "
        "lambda d, n, **k: DataLoader_(d, n // run.comm.size('data'), **k)"
    },
    "leftover division by accumulation": {
        "init": "accumulation=2",
        "body": "out, y = run.gather(model(x), y)\n"
        "run.backward(F.cross_entropy(out, y) / (2 if rank == 0 else 1))",
    },
    "penalty of own rows": {
        "body": "h = model(x)\nout, y = run.gather(h, y)\n"
        "run.backward(F.cross_entropy(out, y) + h.square().mean())"
    },
    "mixup within a rank": {"body": "x = 0.7 * x + 0.3 * x.flip(0)\n" + PARTS["body"]},
    "hard rows of each rank": {
        "body": "each = F.cross_entropy(model(x), y, reduction='none').topk(3).values\n"
        "run.backward(each)"
    },
    "auxiliary mean of each rank": {
        "body": "h = model(x)\nload = h.softmax(1).mean(0)\n"
        "loss = F.cross_entropy(h, y) + (load * load).sum()\n"
        "run.backward(mean_of_rows=loss, count=len(y))"
    },
}
"""Name -> parts of a script that computes something else on two ranks."""
