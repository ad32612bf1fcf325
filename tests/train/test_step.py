"""Clipping, the learning rate, and what a loss that is not finite does."""

import dataclasses
import gc
import math
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.config import OptimizerConfig
from phalanx.errors import TrainingError
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.loss import IGNORE
from phalanx.models.shape import ModelShape
from phalanx.parallel import data
from phalanx.parallel.accumulate import Accumulate
from phalanx.parallel.compression.chosen import COMPRESSORS
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.train import step as steps
from phalanx.train.clip import gradient_norm, scale_to
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer, learning_rate
from phalanx.train.step import Step, StepResult
from phalanx.verify.batches import decoder_batches
from phalanx.verify.record import split

TINY = ModelShape(
    vocab_size=61, num_layers=2, hidden=16, num_heads=2, num_kv_heads=2, head_dim=8, ffn=24,
    max_seq_len=16,
)  # fmt: skip


def norms_of_mixed_gradients() -> dict[float, tuple[float, float]]:
    """Gradients that are plain, sharded on one axis, on both, unevenly, and replicated."""
    comm = Ranks({"row": 2, "col": 2})
    torch.manual_seed(0)
    wholes = [torch.randn(6, 5, dtype=torch.float64) for _ in range(5)]
    wholes[1] = torch.randn(1, 5, dtype=torch.float64)  # one rank of the axis has no row
    placements = [
        None,
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Replicate(), Replicate()],
    ]
    parts = [
        whole if places is None else distribute_tensor(whole, comm.mesh, places)
        for whole, places in zip(wholes, placements, strict=True)
    ]
    everything = torch.cat([whole.flatten() for whole in wholes])
    return {
        p: (float(gradient_norm(parts, comm, p)), float(everything.norm(p)))
        for p in (1.0, 2.0, math.inf)
    }


def test_each_element_counts_once_in_every_norm() -> None:
    for norms in run_ranks(norms_of_mixed_gradients, 4):
        for ours, expected in norms.values():
            assert ours == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_scaling_gives_the_limit_and_leaves_small_gradients_alone(p: float) -> None:
    gradients = [torch.tensor([3.0, -4.0], dtype=torch.float64), torch.zeros(0)]
    norm = float(gradient_norm(gradients, CountingComm({}), p))
    scale_to(gradients, norm, 0.5)
    assert float(gradient_norm(gradients, CountingComm({}), p)) == pytest.approx(0.5, rel=1e-5)
    before = gradients[0].clone()
    scale_to(gradients, 0.5, 2.0)
    assert torch.equal(gradients[0], before)
    assert gradient_norm([], CountingComm({}), p).dtype == torch.float64  # as a stage that has some


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_millions_of_elements_loses_none(dtype: torch.dtype) -> None:
    gradient = torch.randn(8_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for p in (1.0, 2.0):
        expected = float(gradient.double().norm(p))
        assert float(gradient_norm([gradient], CountingComm({}), p)) == pytest.approx(
            expected, 1e-5
        )


def test_learning_rate_rises_in_a_line_and_falls_by_half_a_cosine() -> None:
    config = OptimizerConfig(lr=2.0, min_lr_ratio=0.1, warmup_steps=3)
    rates = [learning_rate(config, step, 14) for step in range(14)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[8] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[-1] == pytest.approx(0.2)
    assert sorted(rates[3:], reverse=True) == rates[3:]
    assert learning_rate(config, 50, 14) == pytest.approx(0.2)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert [decays[id(p)] for p in model.parameters()] == [0.3, 0.0, 0.0, 0.0]


class Sum:
    """The sum of the outputs; a microbatch is a tensor of rows."""

    def loss_sum(self, model: nn.Module, microbatch: torch.Tensor, step: int) -> torch.Tensor:
        return model(microbatch).sum()

    def num_valid(self, microbatch: torch.Tensor) -> int:
        return len(microbatch)


def train_by_hand(rows: torch.Tensor, targets: torch.Tensor, config: OptimizerConfig) -> list:
    """The loop anybody would write: mean loss, clip_grad_norm_, AdamW, the rate of each step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(4):
        loss = nn.functional.cross_entropy(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (0.5, 1.0, 0.55, 0.1)[step]
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *(p.detach() for p in model.parameters())]


class Classes:
    """Cross-entropy, summed; a microbatch is rows and targets."""

    def loss_sum(self, model: nn.Module, microbatch: tuple, step: int) -> torch.Tensor:
        return nn.functional.cross_entropy(model(microbatch[0]), microbatch[1], reduction="sum")

    def num_valid(self, microbatch: tuple) -> int:
        return len(microbatch[0])


def train_by_step(rows: torch.Tensor, targets: torch.Tensor, config: OptimizerConfig) -> list:
    comm = Ranks({"dp": 2})
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    step = Step(
        model,
        build_optimizer(model, config),
        Classes(),
        config,
        comm=comm,
        num_steps=4,
        run=Accumulate(data.apply(model, comm)),
    )
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, None)  # 2 rows and 5
    share = list(zip(rows[mine].split(1), targets[mine].split(1), strict=True))
    losses = [step(share).loss for _ in range(4)]
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_a_step_does_what_a_loop_written_by_hand_does(clip_norm: float) -> None:
    rows = torch.linspace(-2, 2, 28, dtype=torch.float64).view(7, 4).sin()
    targets = torch.tensor([0, 1, 2, 0, 1, 1, 2])
    config = OptimizerConfig(lr=0.05, min_lr_ratio=0.1, warmup_steps=1, clip_norm=clip_norm)
    expected = train_by_hand(rows, targets, config)
    for found in run_ranks(train_by_step, 2, rows, targets, config):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.allclose(torch.as_tensor(ours), torch.as_tensor(theirs), atol=1e-9)


def step_with_a_scaler() -> list[tuple[float, bool, float]]:
    """An overflow halves the scale and is skipped; then training goes on."""
    comm = Ranks({"dp": 1})
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    step = Step(
        model, build_optimizer(model, OptimizerConfig()), Sum(), OptimizerConfig(),
        comm=comm, num_steps=9, scaler=scaler,
    )  # fmt: skip
    found = []
    for factor in (1e9, 1.0):
        before = model.weight.detach().clone()
        result = step([torch.full((2, 4), factor)])
        moved = float((model.weight.detach() - before).abs().max())
        found.append((moved, result.is_skipped, scaler.get_scale()))
    return found


def test_a_scaler_skips_an_overflow_and_goes_on() -> None:
    ((first, second),) = run_ranks(step_with_a_scaler, 1, threads=1)
    assert first == (0.0, True, 2.0**119)
    assert second[0] > 0 and second[1:] == (False, 2.0**119)


def norm_of_fsdp_over_a_sharded_weight() -> tuple[float, float]:
    comm = Ranks({"fsdp": 2, "tp": 2})
    torch.manual_seed(0)
    whole = torch.randn(8, 4)
    model = nn.Linear(4, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(whole, comm.mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=comm.mesh["fsdp"])
    return float(gradient_norm([model.weight.detach()], comm)), float(whole.norm())


def test_the_norm_of_a_weight_sharded_twice_on_one_dim() -> None:
    for ours, expected in run_ranks(norm_of_fsdp_over_a_sharded_weight, 4):
        assert ours == pytest.approx(expected, rel=1e-6)


def step_over_a_nan(nonfinite: str) -> tuple[str, bool, list[float]]:
    """Only rank 1 sees the NaN; returns what happened, whether weights moved, and the next loss."""
    comm = Ranks({"dp": 2})
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    step = Step(
        model,
        build_optimizer(model, OptimizerConfig()),
        Sum(),
        OptimizerConfig(),
        comm=comm,
        num_steps=4,
        run=Accumulate(data.apply(model, comm)),
        nonfinite=nonfinite,  # type: ignore[arg-type]
    )
    rows = torch.ones(2, 4)
    before = model.weight.detach().clone()
    bad = rows * (math.nan if dist.get_rank() == 1 else 1.0)
    try:
        outcome = step([bad])
        words = "skipped" if outcome.is_skipped else "taken"
    except TrainingError as error:
        words = str(error)
    has_moved = not torch.equal(before, model.weight)
    losses: list[StepResult] = [step([rows])]
    return words, has_moved, [result.loss for result in losses]


class InfiniteAt0(Sum):
    """The loss of step 0 is not finite, and the gradients of the weights are."""

    def loss_sum(self, model: nn.Module, microbatch: torch.Tensor, step: int) -> torch.Tensor:
        return super().loss_sum(model, microbatch, step) + (math.inf if step == 0 else 0)


def step_after_a_skipped_one(name: str) -> bool:
    """Return whether the compressed gradient is as if there had been no skipped step."""
    comm, config, found = Ranks({"dp": 2}), OptimizerConfig(), list[torch.Tensor]()
    rows = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for first in (0, 1):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        reducer = data.apply(model, comm)
        assert reducer.compress(COMPRESSORS[name](comm))
        step = Step(
            model,
            build_optimizer(model, config),
            InfiniteAt0(),
            config,
            comm=comm,
            num_steps=4,
            run=Accumulate(reducer),
            nonfinite="skip",
        )
        step.steps_done = first
        for turn in range(first, 2):
            assert step([rows[turn]]).is_skipped == (turn == 0)
        assert model.weight.grad is not None
        found.append(model.weight.grad.clone())
    return torch.equal(*found)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_compression_cut_off_a_skipped_step_is_in_no_other(name: str) -> None:
    assert run_ranks(step_after_a_skipped_one, 2, name) == [True, True]


def test_a_nan_on_one_rank_stops_all_alike() -> None:
    outcomes = run_ranks(step_over_a_nan, 2, "stop")
    for words, has_moved, losses in outcomes:
        assert words.startswith("step 1: the loss is nan and the norm of the gradient nan")
        assert not has_moved
        assert losses == outcomes[0][2]


def test_a_nan_on_one_rank_is_skipped_on_all_alike() -> None:
    outcomes = run_ranks(step_over_a_nan, 2, "skip")
    for words, has_moved, losses in outcomes:
        assert (words, has_moved) == ("skipped", False)
        assert math.isfinite(losses[0])
        assert losses == outcomes[0][2]


class HostReads(TorchDispatchMode):
    """Counts the reads of a single number, each of which waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return func(*args, **(kwargs or {}))


def reads_of_a_step(text: str, needs_scaler: bool) -> tuple[int, list[int]]:
    """Return how often a step reads a number by itself, and how many it reads together."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    model = Decoder(TINY)
    model.initialize(0)
    runner = Plan(strategy, model).build(comm)
    config = OptimizerConfig(clip_norm=1e-3)
    step = Step(
        model, build_optimizer(model, config), NextToken(), config,
        comm=comm, num_steps=2, run=runner,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0) if needs_scaler else None,
    )  # fmt: skip
    together: list[int] = []
    own = steps._read

    def read(*numbers: torch.Tensor) -> object:
        together.append(len(numbers))
        return own(*numbers)

    steps._read = read
    batches = [
        dataclasses.replace(batch, documents_BT=None)
        for batch in decoder_batches(TINY, 2, 8, 12, strategy.data_ranks, 1)
    ]
    for batch in batches:
        together.clear()
        microbatches = split(batch, comm.coord("data"), comm.size("data"), 2)
        with HostReads() as reads:
            result = step(microbatches)
    assert result.num_valid_tokens == int((batches[-1].labels_BT != IGNORE).sum())
    return reads.count, together


@pytest.mark.parametrize(
    ("text", "needs_scaler"),
    [
        *(("dp1", True), ("fsdp2", False)),
        *(by_hand("dp1", False), by_hand("fsdp2", True), by_hand("dp2", False)),
        by_hand("dp2", True),
    ],
)
def test_the_host_reads_once_a_step(text: str, needs_scaler: bool) -> None:
    """What waits for a GPU is counted on a CPU: every read of a number by the host."""
    num_ranks = Strategy.parse(text).num_ranks
    for alone, together in run_ranks(reads_of_a_step, num_ranks, text, needs_scaler):
        assert together == [4], "loss, norm, valid tokens and scale, together"
        assert alone == 0


@contextmanager
def looked_at(phase: str) -> Generator[None]:
    """Have the rank's beat look at the main thread while the step is in a phase."""
    thread = threading.Thread(target=PULSE.beat)
    thread.start()
    thread.join()
    yield


def tensors_in_cycles(text: str, compute: torch.dtype | None) -> list[str]:
    """Return the tensors, and frames that hold some, which only Python's collector would free."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    model = Decoder(TINY)
    model.initialize(0)
    model.compute_dtype = compute
    runner = Plan(strategy, model, compute=compute).build(comm)
    config = OptimizerConfig()
    step = Step(
        model, build_optimizer(model, config), NextToken(), config,
        comm=comm, num_steps=2, run=runner,
    )  # fmt: skip
    batches = decoder_batches(TINY, 2, 8, 12, strategy.data_ranks, 1)
    first, second = (split(batch, comm.coord("data"), comm.size("data"), 2) for batch in batches)
    step(first)  # what is made once, cycles of PyTorch among it, is made now
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    with step.watched(looked_at):
        step(second)
    gc.collect()
    return [str(each)[:80] for each in gc.garbage if isinstance(each, (torch.Tensor, FrameType))]


@pytest.mark.parametrize(
    "text, compute",
    [
        ("dp1,recompute:selective", torch.bfloat16),
        by_hand("dp2", torch.bfloat16),
        ("fsdp2,recompute:full", None),
        by_hand("tp2:megatron", None),
        by_hand("tp4:2d", None),
    ],
)
def test_a_step_leaves_no_tensor_in_a_cycle(text: str, compute: torch.dtype | None) -> None:
    """A tensor in one lives until Python happens to collect garbage: memory without use."""
    assert run_ranks(tensors_in_cycles, Strategy.parse(text).num_ranks, text, compute) == [
        [] for _ in range(Strategy.parse(text).num_ranks)
    ]
