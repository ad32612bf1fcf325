"""Parts that several ranks hold stay the same bits, however long the training."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.comm.ledger import no_phase
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel import reduce
from phalanx.parallel.pipeline.split import TiedReducer
from phalanx.parallel.plan import Plan, shard_of
from phalanx.parallel.sparse import SparseReducer
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches
from phalanx.verify.record import split

SHAPE = ModelShape(
    vocab_size=67, num_layers=1, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24,
    max_seq_len=16, norm="layer", position="learned", bias=True, tied=True, dropout=0.1,
)  # fmt: skip
NUM_STEPS = 10

Parts = dict[tuple[str, tuple[int, ...]], str]


def trained(text: str, num_steps: int, is_spoiled: bool = False) -> Parts:
    """Train in float32; return a hash of each part held, by its name and place."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    model = Decoder(SHAPE)
    model.initialize(3)
    if is_spoiled:
        reduce.ReplicaReducer.finish = finish_data_alone
    runner = Plan(strategy, model).build(comm)
    config = OptimizerConfig(warmup_steps=1)
    step = Step(
        model, build_optimizer(model, config), NextToken(3, SHAPE.dropout), config,
        comm=comm, num_steps=num_steps, run=runner,
    )  # fmt: skip
    for batch in decoder_batches(SHAPE, num_steps, 4, 9, 0, 3):
        step(split(batch, comm.coord("data"), comm.size("data"), 1))
    held: dict[str, nn.Parameter | Tensor] = {}
    for name, parameter in model.named_parameters():
        held[name] = parameter
        for key in ("exp_avg", "exp_avg_sq"):
            held[f"{name}.{key}"] = step.optimizer.state[parameter][key]
    parts: Parts = {}
    for name, tensor in held.items():
        part, offset = shard_of(tensor)
        data = part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        parts[name, offset] = hashlib.blake2b(data, digest_size=16).hexdigest()
    return parts


def finish_data_alone(self: reduce.ReplicaReducer, phase: object = None) -> None:
    """Leave out the sum over the ranks that hold the same."""


def unequal(reports: list[Parts]) -> tuple[set[str], set[str]]:
    """Return the names of parts that several ranks hold, and of those that differ."""
    bits: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for report in reports:
        for part, digest in report.items():
            bits[part].append(digest)
    several = {name for (name, _), digests in bits.items() if len(digests) > 1}
    return several, {name for (name, _), digests in bits.items() if len(set(digests)) > 1}


@pytest.mark.parametrize(
    "text, num_held_once",
    [
        ("tp2", 13),  # all matrices, and the biases of column products
        by_hand("tp4:2d", 8),  # all matrices
        by_hand("tp8:2.5d/2", 0),
    ],
)
def test_replicas_stay_bit_equal(text: str, num_held_once: int) -> None:
    reports = run_ranks(trained, Strategy.parse(text).num_ranks, text, NUM_STEPS, threads=1)
    several, differ = unequal(reports)
    assert differ == set()
    once = {name for report in reports for name, _ in report} - several
    assert len(once) == 3 * num_held_once  # with their moments


def test_a_sum_that_is_left_out_would_be_found() -> None:
    reports = run_ranks(trained, 2, "tp2", 2, True, threads=1)
    several, differ = unequal(reports)
    assert "norm.weight" in several and "norm.weight" in differ
    assert "embedding.weight" not in several


class Additions(TorchDispatchMode):
    """Counts the additions that DTensor is asked for."""

    num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_of_parts = any(issubclass(kind, DTensor) for kind in types)
        self.num_seen += is_of_parts and func.name().startswith("aten::add")
        return func(*args, **kwargs or {})


class Unused(torch.autograd.Function):
    """Takes a parameter, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return torch.ones((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> None:
        return None


def added(is_in_parts: bool) -> tuple[int, int, Tensor]:
    """Run four backwards; return additions of DTensors, places in memory, and the gradient."""
    comm = Ranks({"tp_row": 1, "tp_col": 1})
    part = DTensor.from_local(torch.ones(2, 3), comm.mesh, [Shard(0), Shard(1)], run_check=False)
    parameter = nn.Parameter(part)
    reducer = reduce.ReplicaReducer([parameter] if is_in_parts else [], comm, None)
    places: set[int] = set()
    with Additions() as additions:
        for factor in (1, 10, 100):
            (factor * parameter.to_local()).sum().backward()
            places.add(parameter.grad.to_local().data_ptr())
        Unused.apply(parameter).backward()
    del reducer
    return additions.num_seen, len(places), parameter.grad.to_local()


@pytest.mark.parametrize("is_in_parts, num_additions", [(True, 0), (False, 2)])
def test_gradients_are_added_in_parts(is_in_parts: bool, num_additions: int) -> None:
    ((num_seen, num_places, gradient),) = run_ranks(added, 1, is_in_parts)
    assert (num_seen, num_places) == (num_additions, 1)
    assert torch.equal(gradient, torch.full((2, 3), 111.0))


class Told(reduce.GradientReducer):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__([], CountingComm({"pp": 2}))
        self.calls: list[str] = []

    def before_backward(self, last: Any, reached: Any = None) -> None:
        self.calls.append("before_backward")

    def finish(self, phase: Any = no_phase) -> None:
        self.calls.append("finish")

    def reset_step(self) -> None:
        self.calls.append("abandon")

    def after_step(self) -> None:
        self.calls.append("after_step")


def test_a_reducer_around_another_tells_it_all() -> None:
    inners = [Told(), Told(), Told()]
    comm = inners[0].comm
    outers = (
        TiedReducer(nn.Parameter(torch.ones(2)), comm, 1, inners[0]),
        reduce.ReplicaReducer([], comm, inners[1]),
        SparseReducer([], inners[2]),
    )
    for inner, outer in zip(inners, outers, strict=True):
        for parameter in outer.parameters:
            parameter.grad = torch.ones(2)
        outer.before_backward([])
        outer.finish()
        outer.reset_step()
        outer.after_step()
        assert inner.calls == ["before_backward", "finish", "abandon", "after_step"]
