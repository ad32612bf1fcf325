"""Shared memory: what a reference in float64 gives, to the bit on all ranks; and ranks that die."""

import hashlib
import math
import os
import re
import signal
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from marks import by_hand
from phalanx.comm import same_host
from phalanx.comm.channels import SLOTS
from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.ledger import Entry, Ledger
from phalanx.comm.pending import Pending
from phalanx.comm.reductions import REDUCTIONS
from phalanx.comm.shared_memory import SharedMemory
from phalanx.comm.shared_transfer import SharedTransfer
from phalanx.errors import CollectiveMismatch, PeerLost, PhalanxError
from phalanx.launch import local
from phalanx.launch.local import run_ranks
from phalanx.models.initial import fill_initial
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
MOVED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.bool)
"""Data types of which no reduction is asked."""
RANK_1 = r"rank 1 \(process \d+\) "
LARGE = (1 << 18) + 1
"""1 MiB and 4 bytes of float32."""


def sizes_of(num_ranks: int) -> tuple[int, ...]:
    return 0, 1, num_ranks - 1, num_ranks + 1, 1023


def given(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return what a rank gives: any rank can say it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(-50, 50, (size,), generator=generator)
    return values if dtype == torch.int64 else (values / 7).to(dtype)


def expected(reduction: str, terms: list[Tensor]) -> Tensor:
    stacked = torch.stack([term.to(torch.float64) for term in terms])
    return {"sum": stacked.sum, "min": stacked.amin, "max": stacked.amax}[reduction](0)


def agrees(found: Tensor, right: Tensor, num_ranks: int, scale: float = 1) -> bool:
    if found.dtype == torch.int64:
        return torch.equal(found, right.to(torch.int64))
    eps = torch.finfo(found.dtype).eps * num_ranks
    return torch.allclose(found.double(), right, rtol=eps, atol=eps * scale)


def every_collective(num_outer: int, num_ranks: int, with_large: bool) -> str:
    """Check each collective, and return a digest of all that is the same on all ranks."""
    comm = Ranks({"outer": num_outer, "axis": num_ranks}, shares_memory=True)
    engine, coord = comm.engine("axis"), comm.coord("axis")
    assert isinstance(engine, SharedMemory) or num_ranks == 1
    digest = hashlib.sha256()

    def note(tensor: Tensor) -> None:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    for dtype in DTYPES:
        for size in (*sizes_of(num_ranks), *((LARGE,) if with_large else ())):
            terms = [given(rank, size, dtype, size) for rank in range(num_ranks)]
            for reduction in REDUCTIONS if size < LARGE else ("sum", "max"):
                right = expected(reduction, terms)
                for is_registered in (False, True):
                    x = terms[coord].clone()
                    if is_registered:
                        x = comm.empty([size], x).copy_(x)
                    work = engine.begin("all_reduce", x, x, reduction)
                    assert work is not None and work.wait()
                    assert agrees(x, right, num_ranks, 50 * num_ranks), (reduction, dtype, size)
                    note(x)
            gathered = comm.all_gather(terms[coord], "axis", 0)
            assert torch.equal(gathered, torch.cat(terms))
            fulls = [given(rank, size * num_ranks, dtype, size) for rank in range(num_ranks)]
            mine = slice(coord * size, (coord + 1) * size)
            share = comm.reduce_scatter(fulls[coord], "axis", 0)
            assert agrees(share, expected("sum", fulls)[mine], num_ranks, 50 * num_ranks)
            exchanged = comm.all_to_all(fulls[coord], "axis", 0, 0)
            assert torch.equal(exchanged, torch.cat([full[mine] for full in fulls]))
            for root in {0, num_ranks - 1}:
                x = terms[coord].clone()
                comm.broadcast_start(x, "axis", root).wait()
                assert torch.equal(x, terms[root])
                x = terms[coord].clone()
                comm.reduce_start(x, "axis", root).wait()
                if coord == root:
                    assert agrees(x, expected("sum", terms), num_ranks, 50 * num_ranks)
            partner = coord ^ 1 if coord ^ 1 < num_ranks else coord
            assert torch.equal(comm.swap(terms[coord], "axis", partner), terms[partner])
            if num_ranks == 1:
                continue  # with nobody to send to
            after, before = (coord + 1) % num_ranks, (coord - 1) % num_ranks
            sending = comm.send_start(terms[coord], "axis", after)
            x = torch.empty_like(terms[coord])
            assert torch.equal(comm.recv_start(x, "axis", before).wait(), terms[before])
            sending.wait()
    for dtype in MOVED:
        terms = [
            given(rank, 2 * num_ranks, torch.int64).abs().to(dtype) for rank in range(num_ranks)
        ]
        right = torch.cat([term.float() for term in terms])
        assert torch.equal(comm.all_gather(terms[coord], "axis", 0).float(), right)
    shape = 16 * num_ranks, 15 * num_ranks, 12 * num_ranks  # above SMALL_BYTES
    boxes = [given(rank, math.prod(shape), torch.float32).view(shape) for rank in range(num_ranks)]
    total = expected("sum", boxes)
    for dim in range(3):
        for box in (boxes[coord], comm.empty(shape, boxes[coord]).copy_(boxes[coord])):
            assert torch.equal(comm.all_gather(box, "axis", dim), torch.cat(boxes, dim))
            part = comm.reduce_scatter(box, "axis", dim)
            assert agrees(part, total.chunk(num_ranks, dim)[coord], num_ranks, 50 * num_ranks)
            turned = comm.reduce_scatter(box.mT, "axis", dim)
            right = total.mT.chunk(num_ranks, dim)[coord]
            assert agrees(turned, right, num_ranks, 50 * num_ranks)
    for _ in range(50):  # memory that is free again is another's at once
        box = comm.empty(shape, boxes[coord]).copy_(boxes[coord])
        part = comm.reduce_scatter(box, "axis", 1, is_spent=True)
        del box
        comm.empty(shape, boxes[coord]).fill_(-1)
        assert torch.equal(part, comm.reduce_scatter(boxes[coord], "axis", 1))
    image = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    # The last lies in another order on rank 0.
    for each in (image, image.contiguous().mT, image.contiguous() if coord else image):
        x, total = each * (coord + 1), sum(range(1, num_ranks + 1))
        assert torch.equal(comm.all_reduce(x, "axis"), each * total)
    if num_ranks > 1:
        barrier = engine.begin("barrier", torch.empty(0), torch.empty(0), 0)
        assert barrier is not None and barrier.wait()
    return digest.hexdigest()


@pytest.mark.parametrize(
    "num_outer, num_ranks, with_large",
    [
        (1, 3, False),
        *(
            by_hand(*case, True)
            for case in ((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 7), (1, 8))
        ),
        *(by_hand(2, num_ranks, True) for num_ranks in (2, 3, 4)),
    ],
)
def test_equal_to_a_reference_and_to_the_bit_on_all_ranks_and_in_every_run(
    num_outer: int, num_ranks: int, with_large: bool
) -> None:
    num_all = num_outer * num_ranks
    runs = [
        run_ranks(every_collective, num_all, num_outer, num_ranks, with_large, threads=1)
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and len(set(runs[0])) == 1


def test_equal_to_a_reference_within_groups() -> None:
    assert len(set(run_ranks(every_collective, 4, 2, 2, False, threads=1))) == 1


def back_to_back() -> int:
    """Call on two groups in turns, wait in another order on each rank, and drop tensors early."""
    comm, order = (
        Ranks({"dp": 2, "tp": 2}, shares_memory=True),
        torch.Generator().manual_seed(dist.get_rank()),
    )
    num_right = 0
    for turn in range(250):
        size = int(torch.randint(1, 20_000, (), generator=torch.Generator().manual_seed(turn)))
        pending = []
        for axis in ("dp", "tp"):
            for registered in (False, True):
                x = torch.full((size,), float(comm.coord(axis) + turn))
                if registered:
                    x = comm.empty([size], x).copy_(x)
                pending.append(comm.all_reduce_start(x, axis))
        for place in torch.randperm(4, generator=order).tolist():
            num_right += bool((pending[place].wait() == 2 * turn + 1).all())
        comm.reduce_scatter(torch.ones(2 * size), "dp", 0)  # its input is gone at once
    return num_right


def test_a_thousand_calls_of_two_groups_waited_for_in_any_order() -> None:
    assert run_ranks(back_to_back, 4, threads=1) == [1000] * 4


def many_under_way(size: int, started: Path) -> list[bool]:
    """Start more collectives and messages than have slots, on one rank all before the other."""
    comm, rank = Ranks({"dp": 2}, shares_memory=True), dist.get_rank()
    while rank == 1 and not started.exists():
        time.sleep(0.01)
    numbers = range(4 * SLOTS)
    terms = [comm.empty([size], torch.empty(0)).fill_(n + 1000 * rank) for n in numbers]
    pending = [comm.all_reduce_start(term, "dp") for term in terms]
    start = comm.recv_start if rank else comm.send_start
    sent = [torch.full((size,), -1.0 if rank else float(n)) for n in numbers]
    pending += [start(each, "dp", 1 - rank) for each in sent]
    sources = [n // SLOTS % 2 for n in numbers]  # calls of a slot are the two ranks' in turns
    spread = [torch.full((size,), float(n) if rank == sources[n] else -1.0) for n in numbers]
    pending += [
        comm.broadcast_start(each, "dp", source)
        for each, source in zip(spread, sources, strict=True)
    ]
    started.touch()
    for each in pending if rank else reversed(pending):
        each.wait()
    sums = [bool((term == 2 * n + 1000).all()) for n, term in enumerate(terms)]
    return sums + [bool((each[n] == n).all()) for each in (sent, spread) for n in numbers]


@pytest.mark.parametrize("size", [5, 20_000])
def test_more_calls_than_slots_are_under_way(size: int, tmp_path: Path) -> None:
    found = run_ranks(many_under_way, 2, size, tmp_path / "started", threads=1)
    assert found == [[True] * 12 * SLOTS] * 2


def counted(shares_memory: bool) -> list[Entry]:
    comm = Ranks({"dp": 2, "tp": 2}, shares_memory=shares_memory)
    with Ledger(comm) as ledger, ledger.phase("forward"):
        comm.all_reduce(torch.ones(3), "data")
        comm.all_gather(torch.ones(2, 5), "tp", 1)
        comm.reduce_scatter(torch.ones(4, 5), "tp", 0)
        comm.all_to_all(torch.ones(4, 6), "tp", 0, 1)
        comm.broadcast(torch.ones(7), "dp")
        comm.reduce_start(torch.ones(8), "tp", 1).wait()
        comm.swap(torch.ones(9), "tp", comm.coord("tp"))
        for op in (comm.send_start, comm.recv_start)[:: 1 - 2 * comm.coord("tp")]:
            op(torch.ones(11), "tp", 1 - comm.coord("tp")).wait()
    return ledger.entries()


def test_the_ledger_counts_what_it_counts_over_gloo() -> None:
    own = [run_ranks(counted, 4, shares) for shares in (True, False)]
    assert own[0] == own[1] and len(own[0][0]) > 6


SHAPE = ModelShape(
    vocab_size=96, num_layers=2, hidden=32, num_heads=4, num_kv_heads=4, head_dim=8, ffn=48,
    max_seq_len=16,
)  # fmt: skip


def weights_after_steps(texts: list[str]) -> list[bool]:
    """Return for each strategy whether shared memory and gloo lead to the same bits."""
    tokens = torch.randint(0, 96, (4, 17), generator=torch.Generator().manual_seed(1))
    found: list[bool] = []
    for text in texts:
        ended: list[list[Tensor]] = []
        for shares_memory in (True, False):
            strategy = Strategy.parse(text)
            comm = Ranks(strategy, shares_memory=shares_memory)
            plan = plan_decoder(strategy, SHAPE)
            model = plan.model.train()
            runner = plan.build(comm, partial(fill_initial, SHAPE, 5))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(3):
                rows = tokens.roll(step + comm.coord("data"), 0)
                runner(
                    [rows[:2], rows[2:]],
                    lambda batch, model=model: model(batch[:, :-1], batch[:, 1:]),
                    lambda loss: loss / 64,
                )
                optimizer.step()
                optimizer.zero_grad()
            ended.append([local_shard(parameter).detach() for parameter in model.parameters()])
        found.append(all(torch.equal(a, b) for a, b in zip(*ended, strict=True)))
    return found


@pytest.mark.parametrize(
    "num_ranks, texts",
    [
        (2, ["dp2", "fsdp2", "tp2", "cp2:ulysses"]),
        by_hand(2, ["dp2:naive", "fsdp2:zero2", "fsdp2:zero1"]),
        # FSDP2 refuses a second mesh of the same ranks beside tp.
        by_hand(4, ["dp2,tp2", "dp2,fsdp2", "tp4:2d", "dp2,cp2:ulysses"]),
    ],
)
def test_axes_of_two_ranks_compute_what_gloo_computes_to_the_bit(
    num_ranks: int, texts: list[str]
) -> None:
    assert (
        run_ranks(weights_after_steps, num_ranks, texts, threads=1)
        == [[True] * len(texts)] * num_ranks
    )


class Seen(TorchDispatchMode):
    """Notes the operators that pass the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def seen_by_a_mode() -> tuple[list[str], list[str]]:
    comm, x = Ranks({"dp": 2}, shares_memory=True), torch.ones(3)
    y = comm.empty([1 << 16], x).fill_(1)
    with Seen() as begun:
        pending = comm.all_reduce_start(x, "dp"), comm.all_reduce_start(y, "dp")
    with Seen() as ended:
        for each in pending:
            each.wait()
    assert (x == 2).all() and (y == 2).all()
    return begun.names, ended.names


def test_a_mode_of_the_dispatcher_sees_nothing_of_what_a_collective_does() -> None:
    for found in run_ranks(seen_by_a_mode, 2):
        assert found == (4 * ["aten.detach.default"], [])


def engines(lacks: str) -> list[str]:
    """Return what runs the axes, where rank 0 `lacks` a platform, memory or a host in common."""
    right = same_host.mapped

    def no_heap() -> object:
        raise OSError("no memory")

    def refuse(process: int, *args: object) -> object:
        if process == first:
            raise OSError("another host")
        return right(process, *args)

    numbers: list[int] = [0, 0]
    dist.all_gather_object(numbers, os.getpid())
    first = numbers[0] if lacks == "host" else -1
    with ExitStack() as stack:
        stack.enter_context(patch.object(same_host, "mapped", refuse))
        if lacks == "platform" and dist.get_rank() == 0:
            stack.enter_context(patch.object(same_host, "IS_SUPPORTED", False))
        if lacks == "memory" and dist.get_rank() == 0:
            stack.enter_context(patch.object(same_host, "own_heap", no_heap))
        comm = Ranks({"dp": 2}, shares_memory=True)
        x = torch.ones(3)
        comm.all_reduce(x, "dp")
        assert (x == 2).all()
        return [
            type(comm.engine("dp")).__name__,
            type(comm.with_separate_groups("dp").engine("dp")).__name__,
        ]


@pytest.mark.fresh_ranks
def test_ranks_without_memory_of_their_own_kind_use_gloo_on_all_ranks() -> None:
    assert run_ranks(engines, 2, "nothing") == [["SharedMemory"] * 2] * 2
    for lacks in ("host", "platform", "memory"):
        assert run_ranks(engines, 2, lacks) == [["ProcessGroupEngine"] * 2] * 2


def die_within(folder: str) -> None:
    comm = Ranks({"dp": 2}, shares_memory=True)
    x = comm.empty([1 << 20], torch.ones(1)).fill_(1)
    comm.all_reduce(x, "dp")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(x, "dp")
    except PeerLost as error:
        (Path(folder) / "said").write_text(str(error))
        (Path(folder) / "mapped").write_text(Path("/proc/self/maps").read_text())
        raise


@pytest.mark.fresh_ranks
def test_a_killed_rank_is_named_by_those_that_wait_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory has no file, which would stay."""
    monkeypatch.setattr(local, "GRACE_S", 60.0)  # it ends early, when rank 0 has failed too
    with pytest.raises(PhalanxError, match=r"rank 1 failed first[^$]*SIGKILL"):
        run_ranks(die_within, 2, str(tmp_path))
    said = (tmp_path / "said").read_text()
    assert re.fullmatch(RANK_1 + "has ended; rank 0 has waited in vain for another rank", said)
    mapped = (tmp_path / "mapped").read_text()
    assert "/memfd:phalanx" in mapped and "/dev/shm" not in mapped


def stay_away() -> str:
    comm = Ranks({"dp": 2}, shares_memory=True)
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    with pytest.raises(PeerLost) as caught:
        comm.all_reduce(torch.ones(3), "dp")
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.fresh_ranks
def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    said, _ = run_ranks(stay_away, 2, timeout_s=1.5)
    words = r"has not answered for \d+ s; rank 0 has waited in vain for another rank"
    assert re.fullmatch(RANK_1 + words, said)


def threads_that_wait() -> int:
    """Have two threads wait for what one of them has begun."""
    comm, num_right = Ranks({"dp": 2}, shares_memory=True), 0
    with ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            given = [torch.ones(40_000) for _ in range(4)]
            pending = [comm.all_reduce_start(x, "dp") for x in given]
            num_right += sum(bool((x == 2).all()) for x in pool.map(Pending.wait, pending))
    return num_right


def test_threads_may_wait_at_once() -> None:
    assert run_ranks(threads_that_wait, 2, threads=1) == [200, 200]


class Promise:
    """What collectives wait for."""

    is_kept = False

    def is_met(self) -> bool:
        return self.is_kept


def test_an_error_is_raised_by_who_meets_it_and_in_each_wait_for_its_collective() -> None:
    first, second, channels = Promise(), Promise(), MagicMock()

    def keep_one(*_: object) -> None:
        (second if first.is_kept else first).is_kept = True

    channels.sleep.side_effect = keep_one

    def wrong() -> Generator[Any]:
        yield first
        raise CollectiveMismatch("another call", 0)

    def right() -> Generator[Any]:
        yield second

    begun_wrong, begun_right = (SharedTransfer(each(), channels) for each in (wrong, right))
    with pytest.raises(CollectiveMismatch, match="another call"):
        begun_right.wait()  # it continues the other while it waits
    assert begun_right.wait()
    for _ in range(2):
        with pytest.raises(CollectiveMismatch, match="another call"):
            begun_wrong.wait()


def call_another() -> str:
    comm, rank = Ranks({"dp": 2}, shares_memory=True), dist.get_rank()
    with pytest.raises(CollectiveMismatch) as caught:
        if rank:
            comm.all_gather(torch.ones(3), "dp", 0)
        else:
            comm.all_reduce(torch.ones(4), "dp", "max")
    return str(caught.value)


@pytest.mark.fresh_ranks
def test_another_collective_of_a_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(call_another, 2)
    assert "rank 0 calls all_reduce max of 4 float32, but rank 1 all_gather of 3 float32" in first
    assert second == first
    assert "under fsdp run the same modules, also experts without rows" in first
