"""Defects that gloo forgives and NCCL does not are found in the calls of a job over gloo.

Every strategy of tests/verify is held against the same rules. Here they are put to the test.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from marks import by_hand
from nccl_rules import Broken
from nccl_trace import traced
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Phase, no_phase
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.split import TiedReducer
from phalanx.strategy import Strategy
from phalanx.verify.batches import decoder_batches
from phalanx.verify.cases import decoder_case
from phalanx.verify.harness import verify_case

SHAPE = ModelShape(
    vocab_size=12, num_layers=4, hidden=8, num_heads=2, num_kv_heads=2, head_dim=4, ffn=8,
    max_seq_len=8, tied=True,
)  # fmt: skip


Patch = tuple[type, str, Any]


def broken(function: Any, *args: Any) -> str:
    """Return the rule that a function breaks on this rank; empty if it breaks none."""
    try:
        traced(function, *args)
    except Broken as error:
        return str(error)
    return ""


def one_group(self: Ranks, axis: str, peer: int, *, is_send: bool) -> Any:
    """The defect: activations and gradients pass through one group."""
    return self._engines[axis], peer


def both_receive_first(self: TiedReducer, phase: Phase = no_phase) -> None:
    """The defect: the two ends of a pipeline wait for each other's gradient of a tied weight."""
    (weight,) = self.parameters
    assert weight.grad is not None
    with phase("reduce"):
        theirs = self.comm.recv_start(torch.empty_like(weight.grad), "pp", self._other)
        sent = self.comm.send_start(weight.grad.clone(), "pp", self._other)
        weight.grad.add_(theirs.wait())
        sent.wait()


def verify(text: str) -> None:
    strategy = Strategy.parse(text)
    batches = decoder_batches(SHAPE, 1, 4, 8, 1, 0)
    case = dataclasses.replace(decoder_case(SHAPE, batches, 0, OptimizerConfig()), accumulation=4)
    verdict = verify_case(case, strategy, Ranks(strategy))
    assert verdict.is_equal, str(verdict)


ONE_GROUP: Patch = (Ranks, "_message_engine", one_group)
TIE: Patch = (TiedReducer, "finish", both_receive_first)


def with_defects(cases: list[tuple[str, tuple[Patch, ...]]]) -> list[str]:
    """Return what is found of each strategy with defects planted."""
    found: list[str] = []
    for text, patches in cases:
        with pytest.MonkeyPatch.context() as monkeypatch:
            for patch in patches:
                monkeypatch.setattr(*patch)
            found.append(broken(verify, text))
    return found


BOTH_SEND = ("pp2", "pp2:interleaved/2", "pp2:zb/1", "pp2:zb/2", "pp2:zbv", "pp2:dualpipev")
IN_TURN = ("pp2:naive", "pp2:gpipe")
"""Schedules whose neighbours never send at a time."""

RECEIVES_AHEAD = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0F2,0SEND_F2,0B1,0F3,0SEND_F3,0RECV_B2,0B2,\
0RECV_B3,0B3
1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1RECV_F2,1RECV_F3,1F2,1B2,1SEND_B2,1F3,1B3,\
1SEND_B3
"""
"""A file of a schedule whose receives begin before they are needed, as no kind has them."""


@pytest.mark.parametrize(
    ("both_send", "in_turn"), [(BOTH_SEND[:1], ()), by_hand(BOTH_SEND, IN_TURN)]
)
def test_pipelines_over_one_group_and_ties_that_both_receive_first_are_found(
    both_send: tuple[str, ...], in_turn: tuple[str, ...], tmp_path: Path
) -> None:
    by_hand = tmp_path / "ahead.csv"
    by_hand.write_text(RECEIVES_AHEAD)
    stuck = [(text, (ONE_GROUP,)) for text in both_send]
    stuck_at_the_tie = [(text, (ONE_GROUP, TIE)) for text in in_turn]
    right = [(text, ()) for text in (*both_send, f"pp2,schedule:{by_hand}")]
    right += [(text, (ONE_GROUP,)) for text in in_turn]
    cases = [*stuck, *stuck_at_the_tie, *right]
    (found, same) = run_ranks(with_defects, 2, cases, threads=1)
    assert found == same
    verdicts = dict(zip(cases, found, strict=True))
    for case in stuck:
        assert verdicts[case].startswith("deadlock:")
        assert all(f"rank {rank}: send of" in verdicts[case] for rank in (0, 1))
    for case in stuck_at_the_tie:
        assert verdicts[case].startswith("deadlock:")
        assert all(f"rank {rank}: recv of float64[12x8]" in verdicts[case] for rank in (0, 1))
    for case in right:
        assert not verdicts[case], (case, verdicts[case])


@pytest.mark.slow
def test_ends_that_first_speak_at_the_tie_and_both_receive_first_are_found() -> None:
    """They have a group for either direction, but none of the two is connected."""
    cases = [("pp3:gpipe", ()), ("pp3:gpipe", (TIE,))]
    for right, wrong in run_ranks(with_defects, 3, cases, threads=1):
        assert not right
        assert wrong.startswith("deadlock:") and "rank 0: recv" in wrong and "rank 2: recv" in wrong


DEVICE = torch.device("cpu")


def on_device(size: int) -> torch.Tensor:
    return torch.ones(size, device=DEVICE)


def exchange_transposed() -> None:
    comm = Ranks({"pp": 2})
    tensor = torch.ones(3, 2, device=DEVICE).T
    if comm.coord("pp") == 0:
        comm.send_start(tensor, "pp", 1).wait()
    else:
        comm.recv_start(tensor, "pp", 0).wait()


def reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    dist.all_reduce(tensor, op)


def send_in_the_order_of_tags() -> None:
    if dist.get_rank() == 0:
        works = [dist.isend(on_device(size), 1, tag=size) for size in (1, 2)]
    else:
        works = [dist.irecv(on_device(size), 0, tag=size) for size in (2, 1)]
    for work in works:
        assert work is not None
        work.wait()


def leave_one_alone() -> None:
    dist.all_reduce(on_device(1), async_op=True)
    dist.barrier()


def add_on_host() -> None:
    dist.all_reduce(on_device(2).cpu() + torch.ones(2))


def add_on_device() -> None:
    dist.all_reduce(on_device(2) + torch.tensor(2.0) + torch.ones(2).to(DEVICE))


def gather_and_scatter_columns() -> None:
    comm = Ranks({"dp": 2}, shares_memory=False)
    whole = comm.all_gather(on_device(6).view(2, 3), "dp", 1)
    assert torch.equal(comm.reduce_scatter(whole, "dp", 1), 2 * on_device(6).view(2, 3))


def what_gloo_forgives() -> dict[str, str]:
    return {
        "a message whose bytes lie otherwise": broken(exchange_transposed),
        "a sum whose bytes lie otherwise": broken(reduce, torch.ones(2, 3).T),
        "a data type": broken(reduce, torch.ones(2, dtype=torch.int16)),
        "a reduction": broken(reduce, torch.ones(2, dtype=torch.int64), dist.ReduceOp.BAND),
        "messages by their tags": broken(send_in_the_order_of_tags),
        "a work that nobody waits for": broken(leave_one_alone),
        "a tensor of the host": broken(add_on_host),
        "nothing": broken(reduce, torch.ones(2))
        + broken(add_on_device)
        + broken(gather_and_scatter_columns),
    }


def test_what_gloo_forgives_is_found() -> None:
    words = {
        "a message whose bytes lie otherwise": "the strides are (1, 2)",
        "a sum whose bytes lie otherwise": "the strides are (1, 3)",
        "a data type": "NCCL knows no torch.int16",
        "a reduction": "NCCL knows no such reduction",
        "messages by their tags": "differs in the shape",
        "a work that nobody waits for": "is never waited for",
        "a tensor of the host": "NCCL takes no tensor of the host",
    }
    for found in run_ranks(what_gloo_forgives, 2, threads=1):
        assert not found.pop("nothing")
        for name, message in found.items():
            assert words[name] in message, (name, message)
