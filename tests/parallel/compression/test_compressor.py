"""Compressed sums beside exact ones: error, error feedback, replicas, overflow, training."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.comm.axes import DENSE, EXPERT
from phalanx.comm.comm import Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.comm.ledger import Ledger
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.compression.chosen import COMPRESSORS, compress
from phalanx.parallel.compression.compressor import Compressor
from phalanx.parallel.compression.low_rank import RANK
from phalanx.parallel.compression.rounded import BLOCK, Bf16, Int8
from phalanx.parallel.data import BucketedReducer
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy

SHAPES = ((48, 64), (5,), (64, 9, 8), (1,))


def gradients(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the bucket of a rank: mostly of low rank, as gradients are, and some noise."""
    generator = torch.Generator().manual_seed(97 * step + rank)
    parts: list[Tensor] = []
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        part = torch.randn(size, generator=generator)
        if len(shape) > 1:
            left = torch.randn(shape[0], 2, generator=generator)
            right = torch.randn(2, size // shape[0], generator=generator)
            part = 0.1 * part + (left @ right).flatten()
        parts.append(part)
    return torch.cat(parts).to(dtype)


def views(flat: Tensor) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), SHAPES, strict=True)]


def summed(compressor: Compressor, bucket: Tensor) -> Tensor:
    flat = compressor.comm.empty([len(bucket)], bucket).copy_(bucket)
    return compressor.start(0, flat, views(flat)).wait()


def exact(num_ranks: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([gradients(rank, step, dtype).double() for rank in range(num_ranks)]).sum(0)


def relative(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


BOUNDS = {"bf16": 4e-3, "int8": 1.6e-2, "powersgd": 0.6}
"""Largest relative error of one sum; PowerSGD's is of its first step, from a random matrix."""


def errors_of_one_sum(name: str, dtype: torch.dtype) -> tuple[float, list[float]]:
    comm = Ranks({"dp": 3})
    found = summed(COMPRESSORS[name](comm), gradients(comm.rank, 0, dtype))
    assert found.dtype == dtype
    return relative(found, exact(3, 0, dtype)), found.double().tolist()


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sum_is_near_the_exact_one_and_the_same_on_all_ranks(
    name: str, dtype: torch.dtype
) -> None:
    found = run_ranks(errors_of_one_sum, 3, name, dtype)
    bound = BOUNDS[name] + (4e-3 if dtype == torch.bfloat16 else 0)
    assert all(0 < error < bound for error, _ in found)
    assert all(values == found[0][1] for _, values in found)


def mean_errors(name: str, with_feedback: bool) -> list[float]:
    """Return the relative error of the mean of the sums after 1, 10 and 100 equal steps."""
    comm = Ranks({"dp": 3})
    compressor, bucket, right = COMPRESSORS[name](comm), gradients(comm.rank), exact(3)
    total, found = torch.zeros_like(right), list[float]()
    for step in range(1, 101):
        total += summed(compressor, bucket)
        if not with_feedback:
            compressor.reset_errors()
        if step in (1, 10, 100):
            found.append(relative(total / step, right))
    return found


@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_mean_error_tends_to_0_with_error_feedback_alone(name: str) -> None:
    first, tenth, hundredth = run_ranks(mean_errors, 3, name, True)[0]
    # PowerSGD sends four directions of a matrix a step, and the others have to wait.
    assert tenth < first / 4 and hundredth < first / (10 if name == "powersgd" else 40)
    *_, without = run_ranks(mean_errors, 3, name, False)[0]
    assert without > 0.9 * first


def sums_around_an_overflow(name: str) -> list[bool]:
    comm, found = Ranks({"dp": 2}), list[bool]()
    compressor = COMPRESSORS[name](comm)
    for step, value in enumerate((0.0, float("inf"), float("nan"), 0.0, 0.0)):
        bucket = gradients(comm.rank, step)
        bucket[7] += value if comm.rank == 1 else 0.0
        found.append(bool(summed(compressor, bucket).isfinite().all()))
    return found


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_not_finite_arrives_so_and_is_forgotten(name: str) -> None:
    for found in run_ranks(sums_around_an_overflow, 2, name):
        assert found == [True, False, False, True, True]


def bytes_of_a_sum(name: str) -> int:
    comm = Ranks({"dp": 2})
    compressor, flat = COMPRESSORS[name](comm), torch.ones(1 << 18)
    with Ledger(comm) as ledger, ledger.phase("backward"):
        compressor.start(0, flat, [flat.view(512, 512)]).wait()
    return sum(entry.sent_bytes for entry in ledger.entries())


def test_bytes_that_a_rank_sends() -> None:
    """float32 sends 2 (N-1)/N n: 1 MiB."""
    size = 1 << 18
    assert run_ranks(bytes_of_a_sum, 2, "bf16")[0] == 2 * size
    assert run_ranks(bytes_of_a_sum, 2, "int8")[0] == size + 4 * size // BLOCK
    assert run_ranks(bytes_of_a_sum, 2, "powersgd")[0] == 4 * RANK * (512 + 512)


@pytest.mark.parametrize("code", [Bf16(), Int8()])
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1.0, 1e30])
def test_a_code_and_its_error_are_the_values(code: Bf16 | Int8, scale: float) -> None:
    values = scale * torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(1))
    error, out = values.clone(), torch.empty(code.num_bytes(len(values)), dtype=torch.uint8)
    code.encode(error, out)
    total = torch.zeros_like(values)
    code.add(out, total)
    assert torch.allclose(total + error, values, rtol=1e-6, atol=1e-44)
    if scale != 1e-42:  # too small for a scale of its own: all of it waits
        assert float(error.abs().max()) <= float(values.abs().max()) / 127


def trained(name: str | None) -> tuple[list[float], int]:
    """Return losses of regression on two ranks, and the gradients that differ between them."""
    torch.manual_seed(3)
    comm = Ranks({"dp": 2})
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))
    reducer = BucketedReducer(list(model.parameters()), comm, bucket_bytes=8 << 10)
    if name is not None:
        assert reducer.compress(COMPRESSORS[name](comm))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.randn(256, 64)
    y, losses, num_other = torch.sin(x[:, :8]), list[float](), 0
    for _ in range(60):
        reducer.before_backward(reducer.parameters)
        own = slice(128 * comm.rank, 128 * (comm.rank + 1))
        loss = (model(x[own]) - y[own]).square().sum() / y.numel()
        loss.backward()
        reducer.finish()
        for parameter in model.parameters():
            assert parameter.grad is not None
            first = comm.broadcast(parameter.grad.clone(), "dp")
            num_other += not torch.equal(first, parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(comm.all_reduce(loss.detach(), "dp")))
    return losses, num_other


@pytest.mark.slow
def test_training_ends_where_float32_does() -> None:
    exact_losses, _ = run_ranks(trained, 2, None)[0]
    assert exact_losses[-1] < exact_losses[0] / 4
    for name in COMPRESSORS:
        losses, num_other = run_ranks(trained, 2, name)[0]
        assert num_other == 0
        # PowerSGD begins with a random basis, and is half as far.
        assert losses[-1] < (exact_losses[30] if name == "powersgd" else 1.01 * exact_losses[-1])


def over_two_axes(name: str) -> tuple[float, list[float]]:
    comm = Ranks({"dp": 2, "cp": 2})
    found = summed(COMPRESSORS[name](comm), gradients(comm.rank))
    return relative(found, exact(4)), found.tolist()


def test_other_axes_of_gradients_are_summed_exactly_and_first() -> None:
    found = run_ranks(over_two_axes, 4, "int8")
    assert all(0 < error < BOUNDS["int8"] for error, _ in found)
    assert all(values == found[0][1] for _, values in found)


def abandoned() -> bool:
    comm = Ranks({"dp": 2})
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1)
    compressor = COMPRESSORS["int8"](comm)
    reducer = BucketedReducer(list(model.parameters()), comm)
    reducer.compress(compressor)
    sums: list[Tensor] = []
    for begin in (reducer.reset_step, reducer.finish):
        reducer.before_backward(reducer.parameters)
        (model(torch.linspace(0, 1, 4)) * torch.linspace(1, 2, 4)).sum().backward()
        begin()
        assert model.weight.grad is not None
        sums.append(model.weight.grad.clone())
        model.zero_grad()
    fresh = COMPRESSORS["int8"](comm)
    flat = torch.outer(torch.linspace(1, 2, 4), torch.linspace(0, 1, 4)).flatten()
    return torch.equal(fresh.start(0, flat, [flat]).wait(), sums[1].flatten())


def test_a_backward_that_is_abandoned_leaves_no_error() -> None:
    assert run_ranks(abandoned, 2) == [True, True]


@pytest.mark.parametrize(
    "sums, axes", [(DENSE.sums, {"dp", "cp", "ep"}), (EXPERT.sums, {"dp", "cp"})]
)
def test_only_the_axes_of_the_parameters_are_summed(sums: str, axes: set[str]) -> None:
    comm = CountingComm({"dp": 2, "cp": 2, "ep": 2})
    flat = torch.empty(64, device="meta")
    COMPRESSORS["bf16"](comm).start(0, flat, [flat], sums).wait()
    assert {entry.axis for entry in comm.entries()} == axes


def sums_of_a_stack() -> tuple[Tensor, Tensor]:
    comm = Ranks({"dp": 2})
    stack = torch.randn(9, 32, 64, generator=torch.Generator().manual_seed(comm.rank))
    whole, alone = COMPRESSORS["powersgd"](comm), COMPRESSORS["powersgd"](comm)
    for _ in range(2):  # the second has errors of the first
        together, parts = stack.clone(), [each.clone() for each in stack]
        whole.start(0, together.view(-1), [together]).wait()
        for number, part in enumerate(parts):
            alone.start(number, part.view(-1), [part]).wait()
    return together, torch.stack(parts)


def test_powersgd_takes_each_matrix_of_a_stack_by_itself() -> None:
    together, alone = run_ranks(sums_of_a_stack, 2, threads=1)[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


EXPERTS = ModelShape(
    vocab_size=64, num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=64,
    max_seq_len=16, experts=ExpertShape(num_experts=16, top_k=4, ffn=32, shared_ffn=32),
)  # fmt: skip


def gradients_with_experts(text: str, names: list[str]) -> list[dict[str, Tensor]]:
    """Return the whole gradients of the third step under each compressor."""
    strategy, found = Strategy.parse(text), list[dict[str, Tensor]]()
    for name in names:
        comm, model = Ranks(strategy), Decoder(EXPERTS)
        model.initialize(3)
        runner = Plan(strategy, model).build(comm)
        compress(runner.reducer, name, strategy, "float32")
        assert runner.reducer is not None
        for step in range(3):
            model.zero_grad()
            ids = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(step))
            ids = ids.chunk(comm.size("data"))[comm.coord("data")]
            runner.reducer.before_backward(runner.reducer.parameters)
            (model(ids[:, :-1], ids[:, 1:]) / 128).backward()
            runner.reducer.finish()
        whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append(
            {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in whole.items()}
        )
    return found


@pytest.mark.slow
def test_ep_compresses_what_dp_alone_does() -> None:
    names = ["none", "bf16", "powersgd", "int8"]
    exact, *alone = run_ranks(gradients_with_experts, 2, "dp2", names, threads=1)[0]
    right, *beside = run_ranks(gradients_with_experts, 4, "dp2,ep2", names, threads=1)[0]
    for name, whole in exact.items():
        assert relative(right[name], whole) < 1e-6, name
        # A sum over ep in another order may round otherwise.
        assert relative(beside[0][name], alone[0][name]) < 4e-3, name
        assert relative(beside[1][name], alone[1][name]) < 1e-4, name
    # Blocks of int8 have other members, and one scale.
    for found in (alone[2], beside[2]):
        largest = max(float(whole.abs().max()) for whole in exact.values())
        for name, whole in exact.items():
            assert float((found[name] - whole).abs().max()) < largest / 16, name
