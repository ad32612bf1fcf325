"""The memory account: byte by byte on small modules, against the allocator, and beside the plan."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from marks import by_hand
from phalanx.comm import exchange
from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.measure.memory import (
    CURVE_POINTS,
    KINDS,
    MemoryAccount,
    MemoryLedger,
    allocator_snapshot,
    points_to_keep,
)
from phalanx.measure.memory_report import MemoryReport, resident_peak_bytes
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.parallel.split import StateBytes
from phalanx.report.tabular import Table
from phalanx.report.terminal import text_of
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches

SHAPE = ModelShape(
    vocab_size=509,  # odd, so that rows are padded
    num_layers=3,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn=160,
    max_seq_len=32,
    tied=False,
)


class TwoLayers(nn.Module):
    """y = relu(x A) B: every byte of a step can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1000, 2000, bias=False)
        self.b = nn.Linear(2000, 500, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))).sum()


A, B, X = 4 * 1000 * 2000, 4 * 2000 * 500, 4 * 8 * 1000
INNER = 4 * 8 * 2000  # the bytes between the two layers


@pytest.fixture(scope="module")
def two_layers() -> tuple[dict[str, MemoryAccount], MemoryAccount, dict[str, Any]]:
    """Accounts of forward alone, and of a whole step, the second of the model, with its curve."""
    model, x = TwoLayers(), torch.randn(8, 1000)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(ledger: MemoryLedger | None) -> None:
        optimizer.zero_grad(set_to_none=True)
        if ledger is None:
            model(x).backward()
            optimizer.step()
            return
        with ledger:
            with ledger.phase("forward"):
                loss = model(x)
            with ledger.phase("backward"):
                loss.backward()
            with ledger.phase("optimizer"):
                optimizer.step()

    step(None)
    optimizer.zero_grad(set_to_none=True)
    parts = {}
    for name, run in (("loss", lambda: model(x)), ("no grad", torch.no_grad()(lambda: model(x)))):
        ledger = MemoryLedger(model, optimizer, "cpu")
        with ledger, ledger.phase("forward"):
            kept = run()
        parts[name] = ledger.account()
        del kept
    step(whole := MemoryLedger(model, optimizer, "cpu"))
    return parts, whole.account(), whole.curve()


Layers = tuple[dict[str, MemoryAccount], MemoryAccount, dict[str, Any]]


def test_forward_by_hand(two_layers: Layers) -> None:
    parts, _, _ = two_layers
    for account in parts.values():
        # While relu runs, what it reads and what it makes.
        assert account.at_most["activations"] == 2 * INNER
        assert account.at_most["parameters"] == A + B
        assert account.at_most["other"] == X
        assert account.at_most["gradients"] == account.at_most["gathered"] == 0
    # Kept for backward: relu's result; and the loss, a number.
    assert parts["loss"].at_end["activations"] == INNER + 4
    assert parts["no grad"].at_end["activations"] == 4


def test_a_step_by_hand(two_layers: Layers) -> None:
    _, whole, _ = two_layers
    held = {"parameters": A + B, "optimizer": 2 * (A + B) + 2 * 4, "other": X}
    assert {kind: whole.at_most[kind] for kind in held} == held
    assert whole.at_most["gradients"] == A + B
    # The peak: all gradients are there, and still the gradient of relu's input, the loss, its own
    # gradient of one, and the gradient of y by which it was made.
    assert whole.peak_phase == "backward"
    assert whole.at_peak["gradients"] == A + B
    assert whole.at_peak["activations"] == INNER + 2 * 4
    assert whole.peak_bytes == sum(held.values()) + (A + B) + INNER + 2 * 4
    assert whole.at_end["activations"] == 4


def test_the_peak_is_not_the_sum_of_what_each_kind_has_at_most(
    two_layers: Layers,
) -> None:
    _, whole, _ = two_layers
    assert whole.peak_bytes < sum(whole.at_most.values())
    assert all(whole.at_peak[kind] <= whole.at_most[kind] for kind in KINDS)


def test_the_curve_has_the_account_at_its_peak_and_at_its_end(two_layers: Layers) -> None:
    _, whole, values = two_layers
    curve, peak = values["curve"], values["peak"]
    assert {kind: of[peak] for kind, of in curve["bytes"].items()} == whole.at_peak
    assert {kind: of[-1] for kind, of in curve["bytes"].items()} == whole.at_end
    assert {kind: max(of) for kind, of in curve["bytes"].items()} == whole.at_most
    assert curve["phase"][0] == "before" and curve["phase"][peak] == whole.peak_phase
    assert list(dict.fromkeys(curve["phase"])) == ["before", "forward", "backward", "after"]
    assert curve["at_s"][0] == 0 and curve["at_s"] == sorted(curve["at_s"])


@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.sampled_from([12, CURVE_POINTS]))
def test_the_kept_points_have_every_maximum_and_are_close_elsewhere(
    seed: int, num_points: int, most: int
) -> None:
    draw = np.random.default_rng(seed)
    at_s = draw.exponential(size=num_points).cumsum() * draw.integers(0, 2, num_points).cumsum()
    held = draw.integers(0, 1000, (num_points, len(KINDS)))
    kept = points_to_keep(at_s, held, most)
    assert kept == sorted(set(kept)) and len(kept) <= min(most, num_points)
    assert kept[0] == 0 and kept[-1] == num_points - 1
    total = held.sum(1)
    assert int(total.argmax()) in kept
    assert held[kept].max(0).tolist() == held.max(0).tolist()
    if most == CURVE_POINTS:  # the extremes of each hundredth of the step
        ends = np.linspace(at_s[0], at_s[-1], 101)
        for begin, end in itertools.pairwise(ends):
            inside = (at_s >= begin) & (at_s < end)
            near = (at_s[kept] >= begin - at_s[-1] / 50) & (at_s[kept] <= end + at_s[-1] / 50)
            if inside.any():
                assert total[kept][near].max() >= total[inside].max()
                assert total[kept][near].min() <= total[inside].min()


def test_storages_are_counted_once_and_resizes_are_seen() -> None:
    old = torch.zeros(250)
    with MemoryLedger(nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]), "cpu") as ledger:
        new = old + 1
        views = [new.view(5, 50), new[3:], new.t()]
        new.add_(1)
        new.untyped_storage().resize_(0)
        new.untyped_storage().resize_(500)
        old.untyped_storage().resize_(0)
    del views
    account = ledger.account()
    assert account.at_peak["other"] == 1000 + 1000
    assert account.at_end["communication"] == 500  # only FSDP2 makes room by resizing
    assert account.at_end["other"] == 0
    assert account.at_end["parameters"] == 8


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    resize = torch.UntypedStorage.resize_
    model = nn.Linear(2, 2)
    ledger = MemoryLedger(model, torch.optim.SGD(model.parameters()), "cpu")
    with pytest.raises(RuntimeError), ledger, ledger.phase("forward"):
        model(torch.ones(3, 3))
    assert torch.UntypedStorage.resize_ is resize
    model(torch.ones(3, 2))
    assert ledger.account().at_end["parameters"] == 24


def allocations(events: list) -> list[int]:
    """Return what was allocated (freed where below 0), but for what one kernel took and gave back.

    The latter is work space, of oneDNN's products in bfloat16, say.
    """
    kept = []
    waiting = [("", events)]
    while waiting:
        name, children = waiting.pop()
        waiting += [(child.name, child.children) for child in children]
        own = [child for child in children if child.name == "[memory]"]
        open_ = {}
        for child in sorted(own, key=lambda child: child.start_time_ns):
            change = child.extra_fields
            is_product = name in ("aten::mm", "aten::bmm", "aten::baddbmm")
            if is_product and change.alloc_size < 0 and change.ptr in open_:
                kept.remove(open_.pop(change.ptr))
                continue
            kept.append(child)
            open_[change.ptr] = child
    # At one time the freed come first: what is freed makes room for what comes.
    return [size for _, size in sorted((e.start_time_ns, e.extra_fields.alloc_size) for e in kept)]


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_all_that_the_allocator_gave_out_is_seen(compute: torch.dtype | None) -> None:
    """To the byte; in bfloat16 that includes the inside of our own attention."""
    model = Decoder(SHAPE)
    model.initialize(0)
    model.compute_dtype = compute
    optimizer = build_optimizer(model, OptimizerConfig())
    batch = decoder_batches(SHAPE, 1, 4, 32, 0, 3)[0]

    def step(ledger: MemoryLedger | None = None) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = NextToken().loss_sum(model, batch, 0)
        loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    with MemoryLedger(model, optimizer, "cpu") as ledger:
        step()
    account = ledger.account()
    optimizer.zero_grad(set_to_none=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    now = most = 0
    for size in allocations(profile.profiler.kineto_results.experimental_event_tree()):
        now += size
        most = max(most, now)
    before = account.at_most["parameters"] + account.at_most["optimizer"]
    samples = sum(
        t.nbytes for t in (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    )
    assert account.peak_bytes - before - samples == most


def measure(
    text: str, accumulation: int, compute: torch.dtype | None
) -> tuple[MemoryAccount, StateBytes]:
    """The second step of a decoder under a strategy."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    with torch.device("meta"):
        model = Decoder(SHAPE)
    model.compute_dtype = compute
    plan = Plan(strategy, model, compute=compute)
    step = Step(
        model,
        run=plan.build(comm, lambda shard, *_: shard.normal_()),
        optimizer=build_optimizer(model, OptimizerConfig()),
        objective=NextToken(),
        config=OptimizerConfig(),
        comm=comm,
        num_steps=9,
    )
    batches = decoder_batches(SHAPE, 1, 1, 32, 0, 3) * accumulation
    step(batches)
    with MemoryLedger(model, step.optimizer, "cpu") as ledger, step.watched(ledger.phase):
        step(batches)
    return ledger.account(), plan.holds(accumulation)


CASES = [
    ("dp2", 2, torch.bfloat16),
    by_hand("dp2:naive", 1, None),
    by_hand("fsdp2:zero1", 2, None),
    ("fsdp2:zero1", 2, torch.bfloat16),
    by_hand("fsdp2:zero2", 1, None),
    by_hand("fsdp4:zero2", 2, torch.bfloat16),
    ("fsdp2", 1, torch.bfloat16),
    by_hand("fsdp4", 2, None),
    by_hand("dp2,fsdp2:zero2", 2, None),
    ("dp2,fsdp2", 2, torch.bfloat16),
]


@pytest.mark.parametrize("text, accumulation, compute", CASES)
def test_what_is_held_is_what_the_layout_says(
    text: str, accumulation: int, compute: torch.dtype | None
) -> None:
    strategy = Strategy.parse(text)
    for account, holding in run_ranks(measure, strategy.num_ranks, text, accumulation, compute):
        assert account.at_end["parameters"] == holding.parameter_bytes
        assert account.at_end["optimizer"] == pytest.approx(holding.optimizer_bytes, rel=0.01)
        assert account.at_end["gathered"] == 0
        assert account.at_end["communication"] < 100  # gloo's thread may still hold a number
        assert account.at_most["gathered"] == holding.gathered_bytes
        # A share on its way to the sum of earlier microbatches is a buffer of communication.
        excess = account.at_most["gradients"] - holding.gradient_bytes - holding.unreduced_bytes
        is_added = text == "fsdp4:zero2"
        share = -(-SHAPE.vocab_size // 4) * SHAPE.hidden * 4
        assert -share <= excess < 0 if is_added else excess == 0
        # Under zero1 with several microbatches the full gradients are gone when they are reduced.
        is_whole = strategy.fsdp.kind == "zero1" and accumulation > 1
        left = holding.optimizer_bytes // 2 if is_whole else holding.gradient_bytes
        assert account.at_end["gradients"] == left


def test_weights_cast_to_the_data_type_of_the_arithmetic_are_not_activations() -> None:
    (account, _), _ = run_ranks(measure, 2, "dp2", 1, torch.bfloat16)
    with torch.device("meta"):
        model = Decoder(SHAPE)
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    head = model.output.weight.numel()
    assert account.at_most["cast"] == 2 * (matrices + head)


def exchange_seen() -> tuple[MemoryAccount, MemoryAccount]:
    mesh = init_device_mesh("cpu", (3,))
    accounts = []
    calls: list[Callable[[], None]] = [
        lambda: exchange.reduce_scatter(torch.empty(100), torch.ones(300), mesh.get_group()),
        lambda: exchange.all_gather(torch.empty(300), torch.ones(100), mesh.get_group()),
    ]
    for call in calls:
        with MemoryLedger(nn.Identity(), torch.optim.SGD([torch.ones(1)]), "cpu") as ledger:
            call()
        accounts.append(ledger.account())
    return accounts[0], accounts[1]


def test_the_inside_of_our_own_collectives_is_seen() -> None:
    for reduce, gather in run_ranks(exchange_seen, 3):
        assert reduce.at_most["communication"] == 4 * (300 + 100 + 2 * 100)  # parts of two others
        assert gather.at_most["communication"] == 4 * (300 + 100)


def test_the_table_fits_and_names_what_has_no_formula() -> None:
    report = MemoryReport(
        at_peak=dict.fromkeys(KINDS, 2**20),
        at_most=dict.fromkeys(KINDS, 3 * 2**30),
        at_end=dict.fromkeys(KINDS, 0),
        peak_phase="forward",
        allocated_bytes=8 * 2**20,
        largest_bytes=9 * 2**20,
        resident_bytes=2**30,
    )
    assert report.peak_bytes == 8 * 2**20
    table = report.table({"gathered": 2 * 2**30}, {"gathered": 2**19, "gradients": 2**19})
    assert isinstance(table, Table) and max(map(len, text_of(table).splitlines())) <= 100
    rows = {line[0].text: [cell.text for cell in line[1:]] for line in table.lines()}
    assert list(rows) == [
        "parameters", "gathered parameters", "cast parameters", "gradients", "optimizer",
        "communication buffers", "activations", "other", "all",
    ]  # fmt: skip
    assert rows["activations"][0] == "-"
    cells = [*rows.values()]
    assert cells[1] == ["2048.00", "3072.00", "-33.3", "0.50", "1.00"]
    assert cells[-1] == ["", "", "-87.5", "1.00", "8.00"]
    for predicted_or_measured in (3, 4):
        *kinds, whole = (row[predicted_or_measured] for row in cells)
        assert sum(float(each) for each in kinds if each != "-") == float(whole)
    assert "of any rank is 9.00 MiB. CUDA's allocator allocated 8.00 MiB." in report.text()


def grow() -> tuple[int, int]:
    before = resident_peak_bytes()
    held = torch.ones(before // 4 + 2**22)  # 16 MiB more than the process ever had
    return resident_peak_bytes() - before, held.nbytes


def test_the_resident_set_grows_with_what_is_held() -> None:
    grown, held = run_ranks(grow, 1)[0]
    assert 0 < grown <= held + 2**24


def test_the_snapshot_of_the_allocator_is_of_the_block_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called: list[object] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda enabled="all": called.append(enabled)
    )
    monkeypatch.setattr(memory, "_dump_snapshot", called.append)
    with allocator_snapshot(file := tmp_path / "trace" / "memory.pickle"):
        called.append("step")
    assert called == ["all", "step", str(file), None] and file.parent.is_dir()
