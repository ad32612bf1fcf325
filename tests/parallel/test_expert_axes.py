"""Parameters of two sets of axes, experts and all others, beside one process that holds both."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Comm
from phalanx.comm.ledger import Entry, Ledger
from phalanx.config import OptimizerConfig
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.accumulate import Runner
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches
from phalanx.verify.record import split

SHAPE = ModelShape(
    vocab_size=37, num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24,
    max_seq_len=16, experts=ExpertShape(num_experts=4, top_k=2, ffn=12, shared_ffn=8),
)  # fmt: skip

ROWS, LENGTH, ACCUMULATION, STEPS = 16, 8, 2, 2


def fill(part: Tensor, name: str, whole: tuple[int, ...], offset: tuple[int, ...]) -> None:
    fill_initial(SHAPE, 5, part, name, whole, offset)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def take_steps(model: Decoder, comm: Comm, run: Runner, num_data_ranks: int) -> list[list[Entry]]:
    """Take steps; return the communication of each."""
    config = OptimizerConfig(warmup_steps=0, clip_norm=0.1)
    step = Step(
        model, build_optimizer(model, config), NextToken(), config, comm=comm, num_steps=9, run=run
    )
    entries: list[list[Entry]] = []
    for batch in decoder_batches(SHAPE, STEPS, ROWS, LENGTH, 1, 1):
        with Ledger(comm) as ledger, step.watched(ledger.phase):
            norms.append(step(split(batch, comm.coord("data"), num_data_ranks, ACCUMULATION)).grad_norm)
    return entries
