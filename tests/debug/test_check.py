"""A collective that ranks do not call alike is found before it runs, and legal programs pass."""

import dataclasses
import re
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import phalanx
from forked_torchrun import run_two
from phalanx.cli.main import main
from phalanx.comm import exchange
from phalanx.comm.comm import Ranks
from phalanx.comm.join import job_store
from phalanx.comm.ledger import Ledger
from phalanx.config import TrainConfig
from phalanx.debug.check import CollectiveCheck
from phalanx.debug.fingerprint import Fingerprint
from phalanx.errors import CollectiveMismatch, RankFailed, TrainingError
from phalanx.launch.local import run_ranks
from phalanx.parallel import data
from phalanx.parallel.batch_norm import BatchNormSplit
from phalanx.parallel.skeleton import skeleton_of
from phalanx.parallel.split import Target
from phalanx.strategy import Strategy
from phalanx.train.run import train
from small_run import losses, small_run

# Renamed in torch 2.13.
all_gather_whole = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
reduce_scatter_whole = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)

# What does not match. Each function is one program; the ranks go on to the next after the error.


def other_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 0 else torch.float32))


def other_reduction(rank: int) -> None:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)


def other_functional_reduction(rank: int) -> None:
    functional.all_reduce(torch.ones(4), "sum" if rank == 0 else "avg", dist.group.WORLD)


def other_op(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), 0)


def other_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(2, 3) if rank == 0 else torch.ones(3, 2))  # as many elements


def other_root(rank: int) -> None:
    dist.broadcast(torch.ones(4), src=rank)


def uneven_gather(rank: int) -> None:
    part = torch.ones(3 + rank)
    dist.all_gather([torch.empty_like(part) for _ in range(2)], part)


def uneven_gather_into_tensor(rank: int) -> None:
    all_gather_whole(torch.ones(3 + rank), 0, dist.group.WORLD)


def uneven_scatter(rank: int) -> None:
    pieces = [torch.empty(3), torch.empty(3)] if rank == 0 else None
    dist.scatter(torch.empty(3 + rank), pieces, src=0)


def uneven_exchange(rank: int) -> None:
    exchange.reduce_scatter(torch.empty(3 + rank), torch.ones(6 + 2 * rank), dist.group.WORLD)


def other_splits(rank: int) -> None:
    # The same words on both ranks, and yet what rank 0 gives (2) is not what rank 1 takes (1).
    dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 2], [1, 2])


def swapped(rank: int) -> None:
    tensors = [torch.ones(4), torch.zeros(4)]
    named = dict(zip(("norm", "loss"), tensors, strict=True))
    with CollectiveCheck(world(), named=named):
        for tensor in tensors if rank == 0 else reversed(tensors):
            dist.all_reduce(tensor)


def swapped_gradients(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    weights = [model[0].weight, model[1].weight]
    with CollectiveCheck(world(), named=dict(model.named_parameters())):
        for weight in weights if rank == 0 else reversed(weights):
            dist.all_reduce(weight.grad)


class TwoWays(nn.Module):
    """Two layers that are alike, in an order of the rank's own."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in "ab"})
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = self.layers[name](x)
        return x


def swapped_modules(rank: int) -> None:
    model = TwoWays("ab" if rank == 0 else "ba")
    for layer in model.layers.values():
        fully_shard(layer, mesh=world().mesh)
    fully_shard(model, mesh=world().mesh)
    model(torch.ones(2, 8))


def other_message(rank: int) -> None:
    for size in (3, 4):
        if rank == 0:
            dist.send(torch.ones(size, dtype=torch.float32), dst=1)
        else:
            time.sleep(0.1)  # so that it is the receiver that compares
            dist.recv(torch.empty(size, dtype=torch.float32 if size == 3 else torch.int32), src=0)


def fewer_calls(rank: int) -> None:
    for _ in range(3 - rank):
        dist.all_reduce(torch.ones(4))


def one_group_first(rank: int) -> None:
    for group in PAIRS if rank == 0 else reversed(PAIRS):
        dist.all_reduce(torch.ones(4), group=group)


def never_comes(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        time.sleep(2.5)  # the limit is 1 s
    dist.all_reduce(torch.ones(4))


def in_backward(rank: int) -> None:
    x = torch.ones(4, requires_grad=True)

    def reduce(grad: torch.Tensor) -> None:
        dist.all_reduce(grad, dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MIN)

    x.register_hook(reduce)
    x.sum().backward()


WRONG: dict[Callable[[int], None], str] = {
    other_dtype: "in the data type: float64 and float32",
    other_reduction: "in the reduction: sum and max",
    other_functional_reduction: "in the reduction: sum and avg",
    other_op: "in the op: all_reduce and broadcast",
    other_shape: r"in the shape: \[2x3\] and \[3x2\]",
    other_root: "in the root: 0 and 1",
    uneven_gather: r"shape: rank 0 sends \[3\] to rank 1, which expects \[4\] from r",
    uneven_gather_into_tensor: r"shape: rank 0 sends \[3\] to rank 1, which expects \[4\] from r",
    uneven_scatter: r"shape: rank 0 sends \[3\] to rank 1, which expects \[4\] from r",
    uneven_exchange: r"shape: rank 0 sends \[3\] to rank 1, which expects \[4\] from r",
    other_splits: r"shape: rank 0 sends \[2\] to rank 1, which expects \[1\] from r",
    swapped: "in the tensor: norm and loss",
    swapped_gradients: "in the tensor: 0.weight.grad and 1.weight.grad",
    swapped_modules: "in the tensor: FSDP module layers.a and FSDP module layers.b",
    fewer_calls: "^rank 1 has finished without an error and will not reach call 3 on dp ",
    one_group_first: "^deadlock: ranks 0, 1 wait for each other\n",
    never_comes: "^rank 1 did not reach call 2 on dp .* within 1 s",
    in_backward: "in the reduction: sum and min",
}
"""Program -> what the message says."""

LATE = (never_comes,)
"""Programs in which a rank waits until the limit for one that does not come."""

PAIRS: list[dist.ProcessGroup] = []


def world() -> Ranks:
    return Ranks({"dp": dist.get_world_size()})


def run_wrong_programs() -> list[str]:
    """Return the message of each program on this rank; one that waits too long says so."""
    PAIRS[:] = [dist.new_group([0, 1]) for _ in range(2)]
    told: list[str] = []
    for program in WRONG:
        try:
            with CollectiveCheck(world(), limit_s=1.0 if program in LATE else 120.0):
                program(dist.get_rank())
            told.append("nothing was found")
        except CollectiveMismatch as error:
            told.append(str(error))
    return told


@pytest.fixture(scope="module")
def messages() -> dict[str, list[str]]:
    """What every rank said of each program."""
    ranks = run_ranks(run_wrong_programs, 2)
    return {
        program.__name__: [rank[number] for rank in ranks] for number, program in enumerate(WRONG)
    }


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_what_does_not_match_is_found(
    program: Callable[[int], None], messages: dict[str, list[str]]
) -> None:
    message, others = messages[program.__name__]
    if program is fewer_calls:
        # Rank 1 has left: it knows of nothing.
        assert others == "nothing was found"
    else:
        assert others == message  # one story
    assert re.search(WRONG[program], message), message


@pytest.mark.parametrize("program", [other_dtype, other_op, in_backward, one_group_first])
def test_both_calls_are_told_with_their_places(
    program: Callable[[int], None], messages: dict[str, list[str]]
) -> None:
    message = messages[program.__name__][0]
    name = "reduce" if program is in_backward else program.__name__
    for rank in (0, 1):
        place = rf"rank {rank}: \w+ .*\n +at tests/debug/test_check.py:\d+ in {name}, called"
        assert re.search(place, message), message


def test_the_lines_are_those_of_the_calls(
    messages: dict[str, list[str]],
) -> None:
    lines = re.findall(r":(\d+) in other_op", messages["other_op"][0])
    first = other_op.__code__.co_firstlineno
    assert lines == [str(first + 2), str(first + 4)]


def test_who_does_not_come_is_told_with_its_last_call(
    messages: dict[str, list[str]],
) -> None:
    for program, last in (("never_comes", "barrier"), ("fewer_calls", "all_reduce sum")):
        message = messages[program][0]
        assert re.search(r"rank 0: all_reduce .*\n.*\n +waits there", message), message
        assert re.search(rf"rank 1: {last}.*\n.*\n +was its last call, call \d on dp", message)


def run_other_message() -> None:
    with CollectiveCheck(world()):
        other_message(dist.get_rank())
        dist.barrier()


def test_a_message_that_is_not_what_the_receiver_takes() -> None:
    with pytest.raises(CollectiveMismatch) as caught:
        run_ranks(run_other_message, 2)
    found = "differ in message 2 from rank 0 to rank 1, in the data type: int32 and float32"
    assert found in str(caught.value)
    assert caught.value.exit_code == 1


# Four ranks.


def leave_one_message_early(is_receiver_first: bool) -> None:
    comm, store = world(), job_store()
    event = f"the other may go on/{is_receiver_first}"
    with CollectiveCheck(comm):
        for number in range(2):
            if comm.rank == 1:
                if number == 1 and not is_receiver_first:
                    store.wait([event])
                receiving = dist.irecv(torch.empty(3), src=0)
                if number == 1:
                    store.set(event, "")
                receiving.wait()
            elif number == 0:
                dist.send(torch.ones(3), dst=1)
            elif is_receiver_first:
                store.wait([event])
    store.set(event, "")
    store.wait(["never"])


@pytest.mark.parametrize("is_receiver_first", [False, True])
def test_who_leaves_while_another_waits_for_its_message(is_receiver_first: bool) -> None:
    with pytest.raises(CollectiveMismatch) as failed:
        run_ranks(leave_one_message_early, 2, is_receiver_first)
    message = str(failed.value)
    words = "rank 0 has finished without an error, and it has not sent message 2 to rank 1"
    assert words in message
    assert re.search(r"rank 1: recv of float32\[3\]\n.*\n +waits for it", message)
    assert re.search(r"rank 0: send of float32\[3\]\n.*\n +was its last call", message)


def take_axes_in_another_order() -> None:
    comm = Ranks({"outer": 2, "inner": 2})
    names = ("inner", "outer") if dist.get_rank() in (0, 3) else ("outer", "inner")
    with CollectiveCheck(comm, limit_s=120):
        for name in names:
            dist.all_reduce(torch.ones(4), group=comm.mesh.get_group(name))


def test_four_ranks_in_a_deadlock() -> None:
    with pytest.raises(
        CollectiveMismatch, match=r"^deadlock: ranks 0, 1, 2, 3 wait for each other"
    ) as caught:
        run_ranks(take_axes_in_another_order, 4)
    axes = re.findall(r"waits there, call 1 on (\w+) \(ranks \d, \d; group", str(caught.value))
    assert sorted(axes) == ["inner", "inner", "outer", "outer"], str(caught.value)


def send_before_or_after_a_collective() -> None:
    comm = Ranks({"pp": 2})
    numbers = torch.ones(4)
    with CollectiveCheck(comm, limit_s=120):
        for _ in range(3):  # right, and may be long
            if comm.coord("pp") == 0:
                time.sleep(0.3)
                comm.send_start(numbers, "pp", 1).wait()
            else:
                comm.recv_start(numbers, "pp", 0).wait()
            comm.all_reduce(numbers, "pp")
        if comm.coord("pp") == 0:
            comm.all_reduce(numbers, "pp")
            comm.send_start(numbers, "pp", 1).wait()
        else:
            comm.recv_start(numbers, "pp", 0).wait()
            comm.all_reduce(numbers, "pp")


def wait_for_one_who_never_sends() -> None:
    comm = Ranks({"pp": 2})
    with CollectiveCheck(comm, limit_s=0.5):
        if comm.coord("pp") == 1:
            comm.recv_start(torch.ones(4), "pp", 0).wait()
        job_store().wait(["never"])


@pytest.mark.slow
def test_a_message_that_never_comes_is_waited_for_as_long_as_without_the_check() -> None:
    with pytest.raises((RankFailed, TrainingError), match=r"waited in vain|imed out"):
        run_ranks(wait_for_one_who_never_sends, 2, timeout_s=2.0)


def test_one_that_waits_in_a_collective_for_one_that_waits_for_its_message() -> None:
    with pytest.raises(
        CollectiveMismatch, match=r"^deadlock: ranks 0, 1 wait for each other"
    ) as caught:
        run_ranks(send_before_or_after_a_collective, 2)
    message = str(caught.value)
    assert re.search(r"rank 0: all_reduce .*\n.*\n +waits there, call 4 on pp", message), message
    assert re.search(r"rank 1: recv of float32\[4\].*\n.*\n +waits for it, from rank 0", message)


def differ_on_one_axis() -> None:
    comm = Ranks({"outer": 2, "inner": 2})
    rank = dist.get_rank()
    with CollectiveCheck(comm, limit_s=120) as check, check.phase("clip"):
        if rank == 3:
            time.sleep(0.5)
        if rank >= 2:
            dist.all_reduce(torch.ones(2 + rank), group=comm.mesh.get_group("inner"))
        dist.barrier()  # where ranks 0 and 1 learn of it


def test_the_axis_and_the_phase_are_named_to_all() -> None:
    with pytest.raises(CollectiveMismatch) as caught:
        run_ranks(differ_on_one_axis, 4)
    assert "ranks 2 and 3 differ at call 1 on inner (ranks 2, 3;" in str(caught.value)
    assert "rank 3: all_reduce sum of float32[5] in phase clip" in str(caught.value)


# A rank that fails by an error of its own.


def fail_on_rank_one() -> None:
    with CollectiveCheck(world()):
        if dist.get_rank() == 1:
            raise ValueError("the user's own words")
        dist.all_reduce(torch.ones(4))


def test_a_rank_that_raises_has_the_word() -> None:
    with pytest.raises(RankFailed, match="the user's own words") as caught:
        run_ranks(fail_on_rank_one, 2)
    assert caught.value.rank == 1


def outlive_an_error() -> str:
    try:
        with CollectiveCheck(world(), limit_s=0.5):
            if dist.get_rank() == 1:
                raise ValueError("swallowed")
            dist.all_reduce(torch.ones(4))
    except (CollectiveMismatch, ValueError) as error:
        return str(error)
    return "nothing"


def test_an_error_that_was_swallowed_is_told() -> None:
    message = run_ranks(outlive_an_error, 2)[0]
    assert message.startswith(
        "rank 1 has ended by ValueError('swallowed') and will not reach call 1"
    )
    assert "rank 1: has made no call yet" in message


# Legal programs.


def call_everything() -> tuple[int, int, float]:
    rank, group = dist.get_rank(), dist.group.WORLD
    aside = dist.new_group([0, 1])
    x = torch.ones(4)
    halves = [torch.empty(2) for _ in range(2)]
    wholes = [torch.empty(4) for _ in range(2)]
    with CollectiveCheck(world(), limit_s=120) as check, Ledger(world()) as ledger:
        if rank == 0:
            dist.all_reduce(x)
        else:
            dist.all_reduce(x)  # from another line
        dist.all_gather(wholes, x)
        dist.reduce_scatter(torch.empty(2), halves)
        given, taken = ([1, 2], [1, 3]) if rank == 0 else ([3, 4], [2, 4])
        dist.all_to_all_single(torch.empty(sum(taken)), torch.ones(sum(given)), taken, given)
        dist.all_to_all_single(torch.empty(4), x)
        dist.gather(x, wholes if rank == 1 else None, dst=1)
        dist.scatter(x, wholes if rank == 1 else None, src=1)
        dist.reduce(x, dst=1)
        dist.all_gather_object([None, None], "a" * (1 + 9 * rank))
        dist.broadcast_object_list(["some", "values"])
        all_gather_whole(x, 0, group).sum()
        reduce_scatter_whole(x, "sum", 0, group).sum()
        functional.all_reduce_coalesced([x, x], "sum", group)
        exchange.all_gather(torch.empty(8), x, group)
        exchange.reduce_scatter(torch.empty(2), x, group)
        works = [dist.isend(x, 1 - rank), dist.irecv(torch.empty(4), 1 - rank)]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        dist.all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]

        def write() -> None:
            for _ in range(5):
                dist.all_reduce(torch.ones(2), group=aside)

        writer = threading.Thread(target=write)
        writer.start()
        x.fill_(1)
        dist.all_reduce(x)
        writer.join()
        dist.barrier()
        num_keys = check._store.num_keys()
        for _ in range(100):
            dist.all_reduce(torch.ones(1))
        dist.barrier()
        growth = check._store.num_keys() - num_keys
    num_compared = sum(check._numbers.values()) + sum(check._messages._numbers.values())
    num_unseen = num_compared - sum(entry.calls for entry in ledger.entries())
    return growth, num_unseen, float(x[0])


def test_legal_programs_pass_and_the_store_does_not_grow() -> None:
    for growth, num_unseen, value in run_ranks(call_everything, 2):
        assert abs(growth) <= 6  # what the other rank has not deleted yet of one call
        assert num_unseen == 3  # by the ledger inside the check: a receive and two barriers
        assert value == 2.0


def meet_on_any_source() -> None:
    rank = dist.get_rank()
    with CollectiveCheck(world(), limit_s=120):
        for size in (3, 4):
            if rank == 0:
                dist.send(torch.ones(size), dst=1)
            else:
                dist.recv(torch.empty(size), src=None if size == 3 else 0)
        dist.barrier()


def test_receiving_from_any_source_raises_no_false_alarm() -> None:
    run_ranks(meet_on_any_source, 2)


def train_sharded(is_checked: bool) -> tuple[list[float], list[str]]:
    comm = world()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=comm.mesh, mp_policy=policy)
    fully_shard(model, mesh=comm.mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    seen: list[str] = []

    def steps() -> None:
        for _ in range(3):
            loss = model(torch.ones(2, 8) * (1 + dist.get_rank())).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))

    if not is_checked:
        steps()
        return losses, seen
    named = dict(model.named_parameters())
    with CollectiveCheck(comm, named=named, limit_s=120) as check, Ledger(comm) as ledger:
        meet = check._meet

        def watch(call: object, fingerprint: Fingerprint) -> None:
            seen.append(f"{fingerprint.op} {fingerprint.dtype} {fingerprint.tensor}")
            meet(call, fingerprint)  # type: ignore[arg-type]

        check._meet = watch  # type: ignore[assignment]
        steps()
        assert len(seen) == sum(entry.calls for entry in ledger.entries())
    replicated = DistributedDataParallel(nn.Linear(4, 4))
    with CollectiveCheck(comm, limit_s=120):
        replicated(torch.ones(2, 4)).sum().backward()
        whole = distribute_tensor(torch.ones(4, 4), comm.mesh, [Shard(0)])
        whole.redistribute(placements=[Replicate()]).to_local()
    return losses, seen


class Counting:
    """Stands for a store, and counts the keys that are asked for or set; waiting is not counted."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.num_keys = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            if name != "check":
                self.num_keys += len(args[0]) if isinstance(args[0], list) else 1
            return getattr(self.store, name)(*args)

        return call


def keys_of_a_call() -> int:
    """Return for how many keys this rank turns to the store in the third of its calls."""
    with CollectiveCheck(world()) as check:
        for _ in range(2):
            dist.all_reduce(torch.ones(4))
        counting = Counting(check._store)
        check._store = counting  # type: ignore[assignment]
        dist.all_reduce(torch.ones(4))
        return counting.num_keys


def test_a_rank_turns_to_the_store_as_often_among_many_as_among_few() -> None:
    few, many = (run_ranks(keys_of_a_call, num_ranks, threads=1) for num_ranks in (2, 5))
    assert max(many) <= max(few) + 1 <= 12  # one more who waits for the last


class Partly(nn.Module):
    """Has a BatchNorm between layers that only the first rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_first = dist.get_rank() == 0
        return (self.last if is_first else nn.Identity())(self.norm(self.first(x)))


def one_each(sizes: list[int], bucket_bytes: int) -> list[list[int]]:
    return [[at] for at in reversed(range(len(sizes)))]


def gradients_beside_batch_norm(is_checked: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    comm = Ranks({"dp": 2})
    model = Partly()
    target = Target(Strategy.parse("dp2"), skeleton_of(model), batch_norm="global")
    BatchNormSplit(target).apply(model, comm)
    # Buckets of one gradient each: the last layer's is full before the backward of the BatchNorm.
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(data, "buckets", one_each)
        reducer = data.apply(model, comm)
    with CollectiveCheck(comm, limit_s=120) if is_checked else nullcontext():
        for step in range(2):
            model.zero_grad()
            reducer.before_backward(reducer.parameters)
            model(torch.ones(2, 3) * (1 + step + dist.get_rank())).square().sum().backward()
            reducer.finish()
    return [parameter.grad for parameter in model.parameters()]


def test_reductions_that_pass_those_of_a_batch_norm_are_no_deadlock() -> None:
    found, expected = (
        run_ranks(gradients_beside_batch_norm, 2, is_checked, threads=1)
        for is_checked in (True, False)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.filterwarnings("default")
def test_sharded_training_is_seen_named_and_unchanged() -> None:
    plain, _ = run_ranks(train_sharded, 2, False)[0]
    for checked, seen in run_ranks(train_sharded, 2, True)[:1]:
        assert checked == plain
        assert "all_gather bfloat16 FSDP module 1" in seen  # forward; pins _module_fqn
        assert "reduce_scatter float32 FSDP module 1" in seen  # backward


def store_serves_two() -> bytes:
    store, other = job_store(), job_store()
    if dist.get_rank() == 0:
        threading.Timer(0.3, other.set, ("key", "value")).start()
    return store.get("key")  # waits, and the other connection is free meanwhile


def test_each_connection_to_the_store_is_its_callers_own() -> None:
    assert run_ranks(store_serves_two, 2) == [b"value", b"value"]


# The verbs.


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return small_run(tmp_path_factory.mktemp("job"), strategy="dp2", steps=4, save="every=2")


def test_training_gives_the_same_losses(config: TrainConfig, tmp_path: Path) -> None:
    train(config)
    train(dataclasses.replace(config, debug_comm=True, out=str(tmp_path)))
    assert len(losses(tmp_path)) == 4
    assert losses(tmp_path) == losses(config.out)


ONE_CALL_MORE = """
import os, sys
import torch, torch.distributed as dist
from phalanx.cli.main import main
from phalanx.train.step import Step

clip = Step.apply_gradients

def apply_gradients(self, *args):
    if self.steps_done == 2:
        dist.all_reduce(torch.ones(3))
    return clip(self, *args)

if os.environ["RANK"] == "1":
    Step.apply_gradients = apply_gradients

from phalanx.train import pace
pace.COMPARE_S = 1e9  # after slow steps, the next call of rank 0 would be of the pace
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_under_torchrun_one_rank_says_it_once(config: TrainConfig, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ONE_CALL_MORE)
    shape = {k: v for k, v in dataclasses.asdict(config.shape).items() if v is not None}
    done = run_two(
        *(str(script), "train", "--debug-comm", f"--data={config.data}", "--strategy=dp2"),
        *("--precision=float64", "--device=cpu", "--threads=1", "--steps=4"),
        *(f"--out={tmp_path / 'out'}", f"--corpus.cache={config.corpus.cache}"),
        *("--corpus.seq-len=24", *(f"--shape.{k.replace('_', '-')}={v}" for k, v in shape.items())),
    )
    assert done.returncode != 0
    assert done.stderr.count(" differ at call ") == 1, done.stderr
    assert re.search(r"rank 0: all_reduce sum of int64.* in phase count of step 4\n", done.stderr)
    assert re.search(r"rank 1: all_reduce sum of float32\[3\]\n +at .*script.py:11 in", done.stderr)
    assert re.search(r"^rank [01]: ranks 0 and 1 differ", done.stderr, re.MULTILINE)
    assert f'File "{Path(phalanx.__file__).parent}' not in done.stderr  # no traceback of ours


@pytest.mark.slow
def test_verify_with_every_collective_compared() -> None:
    small = ["--steps=1", "--shape.num-layers=1", "--seq-len=8", "--no-three"]
    assert main(["verify", "fsdp2", *small, "--debug-comm"]) == 0
