"""A small training loop of one's own; the first rank writes losses, norms and weights to a file.

phalanx run benchmarks/identity/loop.py --strategy dp2 -- OUT.json STEPS FOLDER [--resume]
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from job import data, model, optimizer, scheduler


def main(out: str, steps: str, folder: str, *options: str) -> None:
    """Take `steps` steps, accumulating three batches each, and save; the second part resumes."""
    run = phalanx.init(accumulation=3)
    torch.manual_seed(0)
    net = model()
    opt = optimizer(net.parameters())
    schedule = scheduler(opt)
    loader = DataLoader(data(), batch_size=12, shuffle=True)
    batch_norm = "global" if run.strategy.fsdp.degree == 1 else "local"
    net, opt, loader, schedule = run.prepare(net, opt, loader, schedule, batch_norm=batch_norm)
    if "--resume" in options:
        run.resume(folder)
    losses, norms, done = [], [], 0
    while done < int(steps):
        for x, y in loader:
            loss = run.backward(sum_of_rows=cross_entropy(net(x), y, reduction="sum"), count=len(y))
            losses.append(loss.item())
            if not run.is_step_end:
                continue
            norms.append(float(run.clip(1.0)))
            opt.step()
            schedule.step()
            opt.zero_grad()
            done += 1
            if done == int(steps):
                break
    run.save(folder)
    weights = {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        for name, value in run.state_dict().items()
    }
    if run.is_first:
        Path(out).write_text(json.dumps({"loss": losses, "norm": norms, "weights": weights}))


if __name__ == "__main__":
    main(*sys.argv[1:])
