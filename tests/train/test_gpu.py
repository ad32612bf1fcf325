"""Each strategy that fits the devices there are, held against one process in float64 on the CPU.

What one device computes runs on the CPU too, so that these tests are known to be right where there
is no GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models import attention
from phalanx.models.attention import documents_of
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.models.loss import IGNORE, token_loss_sum
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.session import compile_blocks
from phalanx.train.step import Step
from phalanx.train.text import TextSession
from phalanx.verify.batches import decoder_batches
from phalanx.verify.record import split
from small_run import small_run

SHAPE = ModelShape(
    vocab_size=517, num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=96,
    max_seq_len=32, dropout=0.1,
)  # fmt: skip

NUM_GPUS = torch.cuda.device_count()
HAS_GPU = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")
GPU = [pytest.mark.gpu, HAS_GPU]
TWO_GPUS = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 CUDA devices; {NUM_GPUS} here")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])

Found = tuple[list[float], dict[str, torch.Tensor]]


def train(text: str, device: str, dtype: torch.dtype, compute: str, is_compiled: bool) -> Found:
    """Take three steps; return their losses, and the weights after them."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy, device)
    with torch.device("meta"):
        model = Decoder(SHAPE).to(dtype)
    model.compute_dtype = getattr(torch, compute)
    model.train()
    runner = Plan(strategy, model, compute=model.compute_dtype).build(
        comm, functools.partial(fill_initial, SHAPE, 3)
    )
    config = OptimizerConfig(warmup_steps=0, clip_norm=0.5)
    step = Step(
        model, build_optimizer(model, config), NextToken(0, SHAPE.dropout), config,
        comm=comm, num_steps=9, run=runner,
        scaler=torch.amp.GradScaler(device) if compute == "float16" else None,
    )  # fmt: skip
    if is_compiled and device == "cuda":
        compile_blocks(model)
    elif is_compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    place, size = comm.coord("data"), comm.size("data")
    losses: list[float] = []
    for batch in decoder_batches(SHAPE, 3, 8, 32, 1, 5):
        microbatches = [part.to(comm.device) for part in split(batch, place, size, 2)]
        losses.append(step(microbatches).loss)
    weights = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().double().cpu()
        for name, p in model.named_parameters()
    }
    return losses, weights


@functools.cache
def exact() -> Found:
    return run_ranks(train, 1, "dp1", "cpu", torch.float64, "float64", False, threads=1)[0]


def compare(found: Found, near: float) -> None:
    losses, weights = exact()
    assert found[0] == pytest.approx(losses, rel=near)
    for name, weight in found[1].items():
        # AdamW moves a weight by its learning rate, whichever small gradient it has.
        torch.testing.assert_close(weight, weights[name], rtol=near, atol=10 * near, msg=name)


@DEVICES
@pytest.mark.parametrize(
    "compute, is_compiled, near",
    [
        ("float64", False, 1e-9),
        pytest.param("bfloat16", False, 2e-2, marks=pytest.mark.slow),
        pytest.param("float32", False, 2e-3, marks=GPU),
        pytest.param("bfloat16", True, 2e-2, marks=GPU),
        pytest.param("float16", False, 5e-3, marks=GPU),
    ],
)
def test_one_device_trains_as_one_process(
    device: str, compute: str, is_compiled: bool, near: float
) -> None:
    dtype = torch.float64 if compute == "float64" else torch.float32
    (found,) = run_ranks(train, 1, "dp1", device, dtype, compute, is_compiled, device=device)
    if compute == "float16":
        assert found[0] == pytest.approx(exact()[0], rel=near)
    else:
        compare(found, near)


@pytest.mark.gpu
@HAS_GPU
@pytest.mark.parametrize(
    "text, is_compiled, compute, near",
    [
        ("recompute:full", False, "bfloat16", 2e-2),
        ("recompute:every/2", False, "bfloat16", 2e-2),
        ("recompute:selective", False, "bfloat16", 2e-2),
        ("recompute:selective", True, "float32", 2e-3),
    ],
)
def test_recomputation_on_a_gpu(text: str, is_compiled: bool, compute: str, near: float) -> None:
    settings = "cuda", torch.float32, compute, is_compiled
    (found,) = run_ranks(train, 1, text, *settings, device="cuda")
    compare(found, near)


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("text", ["dp2", "dp2:naive", "fsdp2", "fsdp2:zero1", "fsdp2:zero2", "tp2"])
def test_two_gpus_train_as_one_process(text: str) -> None:
    for found in run_ranks(train, 2, text, "cuda", torch.float64, "float64", False, device="cuda"):
        compare(found, 1e-9)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_documents_attend_as_under_a_dense_mask(device: str, dtype: torch.dtype) -> None:
    """With gradients, against float64 and a mask of T x T; rows with unequal many documents."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 300, heads, 16, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    borders = [[0, 1, 130, 257], [0, 299, 300, 300]]
    documents_BT = torch.stack(
        [(torch.arange(300)[:, None] >= torch.tensor(b)).sum(1) for b in borders]
    )
    out = attention.attend(q, k, v, documents_of(documents_BT, device))
    wide = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    sees = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in wide), attn_mask=sees, enable_gqa=True
    ).transpose(1, 2)
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    pairs = [(out, expected)]
    pairs += zip(
        torch.autograd.grad(out, (q, k, v), grad.to(device, dtype)),
        torch.autograd.grad(expected, wide, grad),
        strict=True,
    )
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3}.get(dtype, 3e-2)
    for found, wanted in pairs:
        error = (found.detach().double().cpu() - wanted.detach()).norm() / wanted.detach().norm()
        assert float(error) < near


@DEVICES
@pytest.mark.parametrize("num_rows", [None, 7])
def test_the_loss_and_its_gradients(device: str, num_rows: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(1000, 16, generator=generator, dtype=torch.float64)
    labels = torch.randint(1000, (50,), generator=generator)
    labels[::5] = IGNORE
    exact_in = [hidden.requires_grad_(), weight.requires_grad_()]
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    wanted = torch.autograd.grad(expected, exact_in)
    for dtype, near in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        x = hidden.detach().to(device, dtype).requires_grad_()
        w = weight.detach().to(device, torch.float64 if near < 1e-6 else torch.float32)
        w.requires_grad_()
        loss = token_loss_sum(x, w, labels.to(device), num_rows=num_rows)
        assert loss.item() == pytest.approx(expected.item(), rel=near)
        for found, exactly in zip(torch.autograd.grad(loss, (x, w)), wanted, strict=True):
            error = (found.double().cpu() - exactly).norm() / exactly.norm()
            assert float(error) < near


@pytest.mark.gpu
@HAS_GPU
def test_first_weights_are_those_of_a_cpu() -> None:
    on_cpu, on_gpu = Decoder(SHAPE), Decoder(SHAPE).cuda()
    on_cpu.initialize(4)
    on_gpu.initialize(4)
    for (name, ours), theirs in zip(on_gpu.named_parameters(), on_cpu.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs), name


def take_steps(job: Job, num_steps: int, saves: bool) -> list[float]:
    session = TextSession(job)
    with session.loader:
        found = [
            session.step([b.to(session.comm.device) for b in next(session.loader)]).loss
            for _ in range(num_steps)
        ]
        if saves:
            session.begin_save()
            session.saver.finish()
    return found


@DEVICES
def test_a_checkpoint_goes_on(device: str, tmp_path: Path) -> None:
    """Also in evaluation's own precision: float32, so that no kernel's order decides."""
    settings: dict[str, Any] = {"precision": "float32", "strategy": "dp1", "device": device}
    job = resolve(small_run(tmp_path, steps=4, **settings))
    (whole,) = run_ranks(take_steps, 1, job, 4, False, device=device)
    config = small_run(tmp_path, steps=4, **settings)
    part = resolve(dataclasses.replace(config, out=str(tmp_path / "part")))
    (first,) = run_ranks(take_steps, 1, part, 2, True, device=device)
    resumed = resolve(dataclasses.replace(config, out=None, resume=str(tmp_path / "part")))
    (last,) = run_ranks(take_steps, 1, resumed, 2, False, device=device)
    assert [*first, *last] == pytest.approx(whole, rel=0 if device == "cpu" else 1e-5)


@pytest.mark.gpu
@HAS_GPU
def test_verify_on_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from phalanx.cli.verify import run

    assert run(["dp1", "--device", "cuda", "--no-three"]) == 0
    assert "what one process computes: the worst of" in " ".join(capsys.readouterr().out.split())
