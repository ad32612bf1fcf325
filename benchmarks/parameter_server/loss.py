"""Validation loss over steps, at equal samples, by each consistency.

python loss.py KIND STEPS OUT [ROWS LR OUTER_LR OUTER_MOMENTUM]

KIND is dp4 (one process on the rows of all four, which ps computes too), ssp/4, quorum/3, async or
local/50. Four workers, threads of this process, train a small model of bytes on the documents of
this repository, each on ROWS (256) rows a step; each sleeps for 0 to 4 ms a step, at random, so
that they come apart. The first writes the losses to OUT/KIND.json. OUT and PICTURE.svg alone draw
all of them: python loss.py OUT PICTURE.svg
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.comm.comm import SingleRankComm
from phalanx.config import OptimizerConfig
from phalanx.config.schema import ServerConfig
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.processes import local_roles
from phalanx.train.optimizer import build_optimizer
from phalanx.train.served_session import STEPS
from phalanx.train.step import Step

NUM_WORKERS, CONTEXT, EVERY = 4, 8, 50
USUAL = (256.0, 8e-3, ServerConfig.outer_lr, ServerConfig.outer_momentum)
GIVEN = [float(word) for word in sys.argv[4:]]
NUM_ROWS, LR, OUTER_LR, OUTER_MOMENTUM = (*GIVEN, *USUAL[len(GIVEN) :])
ROWS, CONFIG = int(NUM_ROWS), OptimizerConfig(lr=LR)
SERVER = ServerConfig(outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM)
ORDER = ("dp4", "ssp/4", "quorum/3", "async", "local/50")


class NextByte:
    """The sum of the losses of the last byte of each row."""

    def loss_sum(self, model: nn.Module, rows: torch.Tensor, step: int) -> torch.Tensor:
        return F.cross_entropy(model(rows[:, :CONTEXT]), rows[:, CONTEXT], reduction="sum")

    def num_valid(self, rows: torch.Tensor) -> int:
        return len(rows)


def text() -> torch.Tensor:
    files = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    data = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.Tanh()
    return nn.Sequential(*parts, nn.Linear(64, 256))


def main(kind: str, num_steps: int, out: Path) -> None:
    torch.set_num_threads(1)
    name, _, option = kind.partition("/")
    consistency = Consistency("ps" if kind == "dp4" else name, NUM_WORKERS, int(option or 0))
    rows = text()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    kept, order = order[:1024], order[1024:]
    losses: list[tuple[int, float]] = []
    sent: list[float] = []

    def note(number: int, model: nn.Module) -> None:
        if (number + 1) % EVERY == 0:
            with torch.no_grad():
                loss = float(NextByte().loss_sum(model, rows[kept], 0)) / len(kept)
            losses.append((number + 1, loss))

    def alone() -> None:
        model = make_model()
        more = {"comm": SingleRankComm(), "num_steps": num_steps}
        step = Step(model, build_optimizer(model, CONFIG), NextByte(), CONFIG, **more)
        for number in range(num_steps):
            begins = (place(number, worker) for worker in range(NUM_WORKERS))
            step([rows[order[begin : begin + ROWS]] for begin in begins])
            note(number, model)
        print(f"{kind:9} loss {losses[-1][1]:.4f}")

    def place(number: int, worker: int) -> int:
        return (number * NUM_WORKERS + worker) * ROWS % (len(order) - ROWS)

    def work(made, worker: int) -> None:
        rng, model, objective = random.Random(worker), make_model(), NextByte()
        optimizer = build_optimizer(model, CONFIG)
        more = {"comm": SingleRankComm(), "num_steps": num_steps}
        step = STEPS[name](model, optimizer, objective, CONFIG, **more)
        client = Client(
            made.meeting, worker, consistency, (0, num_steps // consistency.num_local_steps)
        )
        client.is_shared = False  # so that its bytes are counted
        step.join(client, SERVER, is_first=worker == 0)
        for number in range(num_steps):
            begin = place(number, worker)
            time.sleep(rng.random() * 4e-3)
            step([rows[order[begin : begin + ROWS]]])
            if worker == 0:
                note(number, model)
        client.ask_scheduler("leave")
        if worker == 0:
            size = sum(p.numel() for p in model.parameters())
            sent.append(client.sent_bytes / num_steps / size)
            late = client.ages()
            mean = sum(age * n for age, n in late.items()) / sum(late.values())
            print(f"{kind:9} loss {losses[-1][1]:.4f}, mean age {mean:.2f}, largest {max(late)}, "
                  f"{sent[0]:.4f} bytes a parameter and step pushed")  # fmt: skip
        client.close()

    if kind == "dp4":
        alone()
    else:
        with local_roles(2) as made:
            threads = [threading.Thread(target=work, args=(made, n)) for n in range(NUM_WORKERS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{kind.replace('/', '-')}.json").write_text(json.dumps(losses))


def draw(folder: Path, picture: Path) -> None:
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "phalanx", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for kind, style in zip(ORDER, ("-", "--", "-.", ":", "--"), strict=True):
        file = folder / f"{kind.replace('/', '-')}.json"
        if file.exists():
            name = "dp4, dp4:ps" if kind == "dp4" else f"dp4:{kind}"
            steps, losses = zip(*json.loads(file.read_text()), strict=True)
            axes.plot(steps, losses, style, label=f"{name}  {losses[-1]:.3f}")
    axes.set_xlabel("steps: as many samples by each strategy")
    axes.set_ylabel("validation loss")
    axes.grid(alpha=0.3)
    axes.legend(title="strategy, last loss")
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        draw(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
