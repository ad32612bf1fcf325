"""Data parallelism: bytes as predicted, gradients as one process has them, whatever is unused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from phalanx.comm.axes import DENSE, EXPERT
from phalanx.comm.comm import Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.comm.ledger import Entry, Ledger
from phalanx.errors import StrategyError, TrainingError
from phalanx.launch.local import run_ranks
from phalanx.measure.memory import MemoryLedger
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel import data
from phalanx.parallel.plan import Plan, plan_decoder, shard_of
from phalanx.parallel.reduce import BUCKET_BYTES, buckets
from phalanx.parallel.split import StateBytes
from phalanx.strategy import Strategy

SIZES = [4 * n for n in (3_000_000, 5_000_000, 10, 7_000_000, 70_000)]


def test_buckets_hold_every_parameter_once_last_first() -> None:
    assert buckets(SIZES) == [[4, 3], [2, 1, 0]]
    assert buckets(SIZES, bucket_bytes=1) == [[4], [3], [2], [1], [0]]
    assert buckets([]) == []


@pytest.mark.parametrize("kind, calls", [("naive", 5), ("bucketed", 2)])
def test_traffic_is_twice_the_parameters_less_one_share(kind: data.Kind, calls: int) -> None:
    model = nn.ParameterList(torch.empty(size // 4, device="meta") for size in SIZES)
    gradients, flags = Plan(Strategy.parse(f"dp4:{kind}"), model).traffic([(1, 8)])
    assert (gradients.calls, flags.calls) == (calls, 1)
    assert gradients.sent_bytes == 2 * 3 / 4 * sum(SIZES)
    assert flags.sent_bytes == 2 * 3 / 4 * len(SIZES)


def test_each_rank_holds_the_whole() -> None:
    total = sum(SIZES)
    assert data.replicated_bytes(SIZES, 8) == StateBytes(total + 8, 0, total, 0, 2 * total)


class Branches(nn.Module):
    """Two branches of which each rank uses one, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.never = nn.Linear(6, 6)
        self.register_buffer("short", torch.randint(99, (3,)).to(torch.int16))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.both(x))


def reduce_branches(kind: data.Kind) -> tuple[dict[str, torch.Tensor | None], list[Entry]]:
    """On the outer axis ranks repeat the job, so that global ranks differ from coordinates."""
    comm = Ranks({"outer": 2, "dp": 2})
    coordinate = comm.coord("dp")
    torch.manual_seed(dist.get_rank())  # apply() must make the weights equal over dp
    model = Branches().double()
    reducer = data.apply(model, comm, kind)
    short = model.short.double()
    dist.all_reduce(short, group=comm.mesh.get_group("dp"))
    assert torch.equal(short, 2.0 * model.short), "apply() left the buffers apart"
    samples = torch.arange(24, dtype=torch.float64).view(2, 2, 6).sin()
    with Ledger(comm) as ledger:
        for index, sample in enumerate(samples[coordinate]):
            reducer.before_backward(reducer.parameters if index == 1 else ())
            with ledger.phase("backward"):
                model(sample, coordinate).sum().backward()
        reducer.finish(ledger.phase)
    model.requires_grad_(False)
    alone = Branches().double()
    alone.load_state_dict(model.state_dict())
    sum(alone(s, c).sum() for c in range(2) for s in samples[c]).backward()
    errors = {
        name: None if p.grad is None else (p.grad - q.grad).abs().max()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True)
    }
    return errors, ledger.entries()


@pytest.mark.parametrize("kind", ["naive", "bucketed"])
def test_unused_parameters_and_accumulation(kind: data.Kind) -> None:
    for errors, entries in run_ranks(reduce_branches, 4, kind):
        unused = {name for name, error in errors.items() if error is None}
        assert unused == {"never.weight", "never.bias"}
        assert max(error for error in errors.values() if error is not None) < 1e-12
        assert {entry.axis for entry in entries} == {"dp"}
        sent = sum(entry.sent_bytes for entry in entries)
        sizes = [8 * n for n in (36, 6) * 4]
        # naive leaves out the two parameters that no rank used; a bucket carries them as zeros
        spared = 8 * 42 if kind == "naive" else 0
        assert sent == sum(sizes) - spared + len(sizes)


def pending_before_finish() -> list[bool]:
    """Two buckets of one layer each: the last layer's is on its way before backward ends."""
    comm = Ranks({"dp": 2})
    wide = BUCKET_BYTES // 4 // 64
    model = nn.Sequential(nn.Linear(64, wide, bias=False), nn.Linear(wide, 64, bias=False))
    reducer = data.BucketedReducer(list(model.parameters()), comm)
    seen: list[bool] = []
    model[0].weight.register_hook(lambda grad: seen.append(reducer._buckets[0].pending is not None))
    for is_last in (False, True):
        reducer.before_backward(reducer.parameters if is_last else ())
        model(torch.ones(1, 64)).sum().backward()
    reducer.finish()
    return seen


def test_a_full_bucket_is_reduced_while_backward_runs_and_once_a_batch() -> None:
    assert run_ranks(pending_before_finish, 2) == [[False, True]] * 2


def held_between_steps() -> tuple[int, int, int]:
    """Return the parameters' bytes, and the most alive beside them in forward and in backward."""
    comm = Ranks({"dp": 2})
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    reducer = data.apply(model, comm)
    nothing = torch.optim.SGD([torch.ones(1)])
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with MemoryLedger(model, nothing, "cpu") as forward:
            loss = model(torch.ones(1, 256)).sum()
        with MemoryLedger(model, nothing, "cpu") as backward:
            reducer.before_backward(reducer.parameters)
            loss.backward()
            reducer.finish()
    total = sum(p.nbytes for p in model.parameters())
    return total, *(ledger.account().peak_bytes - total for ledger in (forward, backward))


def test_forward_holds_no_gradients() -> None:
    """As in one process: the flat buffers go where the gradients in them go."""
    for total, forward, backward in run_ranks(held_between_steps, 2):
        assert forward < total / 4
        assert total <= backward < 1.5 * total


def reduce_sharded() -> tuple[float, bool]:
    """A weight split over tp: each tp coordinate reduces its own part over dp."""
    comm = Ranks({"dp": 2, "tp": 2})
    torch.manual_seed(0)
    whole = torch.randn(6, 4, dtype=torch.float64)
    weight = nn.Parameter(distribute_tensor(whole, comm.mesh["tp"], [Shard(0)]))
    model = nn.Module()
    model.weight = weight
    reducer = data.apply(model, comm)
    inputs = torch.randn(2, 4, dtype=torch.float64)
    reducer.before_backward(reducer.parameters)
    (weight.to_local() @ inputs[comm.coord("dp")]).square().sum().backward()
    reducer.finish()
    expected = sum(2 * torch.outer(whole @ x, x) for x in inputs)
    assert isinstance(weight.grad, DTensor)
    return float((weight.grad.full_tensor() - expected).abs().max()), True


def test_gradients_that_are_dtensors() -> None:
    for error, _ in run_ranks(reduce_sharded, 4):
        assert error < 1e-12


class Shared(nn.Module):
    """One layer used twice, each use checkpointed: a backward of its own inside the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return x


def reduce_shared(use_reentrant: bool, kind: data.Kind) -> torch.Tensor | str:
    """Return the sum over dp of the gradient of the weight, or the words of a refusal."""
    comm = Ranks({"dp": 2})
    torch.manual_seed(0)
    model = Shared(use_reentrant).double()
    reducer = data.apply(model, comm, kind)
    reducer.before_backward(reducer.parameters)
    x = torch.full((3, 4), 1.0 + dist.get_rank(), dtype=torch.float64, requires_grad=True)
    try:
        model(x).sum().backward()
    except TrainingError as error:
        return str(error)
    reducer.finish()
    assert model.layer.weight.grad is not None
    return model.layer.weight.grad


def test_a_gradient_that_comes_after_its_reduction_is_refused() -> None:
    right, _ = run_ranks(reduce_shared, 2, False, "bucketed", threads=1)
    naive, _ = run_ranks(reduce_shared, 2, True, "naive", threads=1)
    torch.testing.assert_close(naive, right)
    for words in run_ranks(reduce_shared, 2, True, "bucketed", threads=1):
        assert "reduction over dp had begun" in words and "use_reentrant=False" in words


class Linked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("links", torch.eye(2).to_sparse())


def test_a_sparse_buffer_is_refused_by_name() -> None:
    with pytest.raises(StrategyError, match="the buffer 'links' is a torch"):
        data.apply(Linked(), CountingComm({"dp": 2}))


def test_a_sparse_gradient_without_a_sparse_module_is_made_dense() -> None:
    found: dict[bool, torch.Tensor] = {}
    for sparse in (True, False):
        model = nn.Linear(2, 5, bias=False)
        reducer = data.BucketedReducer(list(model.parameters()), CountingComm({"dp": 2}))
        for numbers, last in (([0, 3, 3], []), ([1, 3], reducer.parameters)):
            reducer.before_backward(last)
            rows = nn.functional.embedding(torch.tensor(numbers), model.weight, sparse=sparse)
            (rows * torch.arange(2)).sum().backward()
        reducer.finish()
        assert model.weight.grad is not None
        found[sparse] = model.weight.grad
    assert torch.equal(found[True], found[False])


EXPERTS = ModelShape(
    vocab_size=36, num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24,
    max_seq_len=16, experts=ExpertShape(num_experts=4, top_k=2, ffn=12),
)  # fmt: skip


def test_a_bucket_has_gradients_of_one_set_of_axes() -> None:
    """Buckets of 4 KiB: experts of a block, 4.5 KiB, fill one while backward is in their block."""
    comm = CountingComm({"dp": 2, "ep": 2})
    plan = plan_decoder(Strategy.parse("dp2,ep2"), EXPERTS)
    plan.apply(comm)
    named = dict(plan.model.named_parameters())
    reducer = data.BucketedReducer([*named.values()], comm, 4096)
    names = {parameter: name for name, parameter in named.items()}
    found = [(b.sums, [names[each] for each in b.members]) for b in reducer._buckets]
    assert sorted(name for _, members in found for name in members) == sorted(named)
    for sums, members in found:
        assert {".experts." in name for name in members} == {sums == EXPERT.sums}
    kinds = [sums for sums, _ in found]
    assert kinds.index(EXPERT.sums) < len(kinds) - 1 - kinds[::-1].index(DENSE.sums)


def test_experts_are_summed_over_dp_alone() -> None:
    entries = plan_decoder(Strategy.parse("dp2,ep2"), EXPERTS).traffic([(2, 8)])
    sums = {e.axis: e.payload_bytes for e in entries if e.op == "all_reduce" and e.phase != "agree"}
    with torch.device("meta"):
        sizes = {name: p.nbytes for name, p in Decoder(EXPERTS).named_parameters()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    dense = sum(sizes.values()) - of_experts
    assert sums == {"dp": dense + of_experts // 2, "ep": dense}


def first_weights_of_another_seed(text: str) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Return the bytes that this rank should hold, those that it holds, and all weights."""
    strategy = Strategy.parse(text)
    comm, model = Ranks(strategy), Decoder(EXPERTS)
    model.initialize(comm.rank)
    plan = Plan(strategy, model)
    predicted = plan.holds().parameter_bytes
    plan.build(comm)
    whole = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }
    return predicted, sum(shard_of(p)[0].nbytes for p in model.parameters()), whole


@pytest.mark.parametrize("text", ["dp2,ep2", "fsdp2,ep2"])
def test_all_ranks_begin_with_the_weights_of_the_first(text: str) -> None:
    first = Decoder(EXPERTS)
    first.initialize(0)
    for predicted, held, whole in run_ranks(first_weights_of_another_seed, 4, text, threads=1):
        assert held == predicted
        for name, parameter in first.named_parameters():
            assert torch.equal(whole[name], parameter), name
