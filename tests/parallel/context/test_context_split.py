"""What cp cuts, refuses, computes on each rank and sends; and a run that changes it for another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from phalanx.checkpoint import manifest
from phalanx.comm.comm import Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.config import CorpusConfig
from phalanx.errors import ConfigError, StrategyError
from phalanx.launch.local import run_ranks
from phalanx.models.attention import documents_of
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.context.positions import contiguous, zig_zag
from phalanx.parallel.context.ring import Ring
from phalanx.parallel.context.split import attention_of, cut_documents, cut_positions
from phalanx.parallel.plan import Plan, plan_decoder
from phalanx.strategy import Strategy
from phalanx.train.job.resolve import resolve
from phalanx.train.run import train
from small_run import losses, records, small_run

SHAPE = ModelShape(
    vocab_size=31, num_layers=3, hidden=32, num_heads=6, num_kv_heads=2, head_dim=8, ffn=48,
    max_seq_len=40,
)  # fmt: skip


def test_each_position_is_held_once_and_padding_comes_last() -> None:
    for order in (zig_zag(3), contiguous(4)):
        for length in (1, 11, 12, 25):
            num_ranks, num_held = len(order.chunks), order.num_held(length)
            assert order.padded(length) == num_ranks * num_held >= length
            assert order.padded(length) - length < order.num_chunks
            of_ranks = [order.positions(rank, num_held) for rank in range(num_ranks)]
            held = torch.cat(of_ranks)
            assert held.sort().values.tolist() == list(range(order.padded(length)))
            assert torch.equal(held[order.gathered_index(num_held)], torch.arange(len(held)))
    assert zig_zag(2).positions(0, 4).tolist() == [0, 1, 6, 7]
    assert zig_zag(2).positions(1, 4).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_ranks_have_the_same_to_compute_under_a_causal_mask(num_ranks: int) -> None:
    """At each hop, counted in pairs of a query and a key that it looks at."""
    size, work = 5, dict[int, list[int]]()
    full, own = size * size, size * (size + 1) // 2
    for rank in range(num_ranks):
        ring = Ring(CountingComm({"cp": num_ranks}, {"cp": rank}))
        work[rank] = [
            sum(full if keys.first < queries.first else own for queries, keys in pairs)
            for distance in range(num_ranks)
            if (pairs := list(ring.pairs((rank - distance) % num_ranks, 2 * size)))
        ]
    assert all(
        of_rank == [full + 2 * own] + [2 * full] * (num_ranks - 1) for of_rank in work.values()
    )
    length = 2 * num_ranks * size
    assert sum(map(sum, work.values())) == length * (length + 1) // 2  # nothing is left out


def test_tokens_labels_and_documents_are_cut_alike() -> None:
    tokens_BT = torch.arange(20).view(2, 10)
    documents_BT = torch.tensor([[0] * 10, [0] * 7 + [1] * 3])
    for kind, expected in (("ring", [3, 4, 5, 6, 7, 8]), ("ulysses", [5, 6, 7, 8, 9])):
        comm = CountingComm({"cp": 2}, {"cp": 1})
        attention = attention_of(Strategy.parse(f"cp2:{kind}"), comm)
        cut_BT = cut_positions(tokens_BT, attention, comm)
        assert cut_BT[0].tolist() == expected
        documents = cut_documents(documents_BT, tokens_BT, attention, comm)
        assert documents is not None
        starts_BT1, ends_BN1, longest = documents
        if kind == "ring":  # padded to 12, and the padding is a document of its own
            assert starts_BT1[1, :, 0].tolist() == [0, 0, 0, 0, 7, 7]
            assert ends_BN1[..., 0].tolist() == [[10, 10, 12], [7, 10, 12]]
        else:
            assert torch.equal(starts_BT1, documents_of(documents_BT)[0])
        assert longest >= 10
    ring = attention_of(Strategy.parse("cp2"), CountingComm({"cp": 2}))
    padded_BT = cut_positions(tokens_BT, ring, ring.comm, padding=-100)
    assert padded_BT[0].tolist() == [0, 1, 2, 9, -100, -100]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cp4:ulysses", "6 heads, which is not a multiple of 4; the nearest is cp3:ulysses"),
        ("cp8:ulysses", "6 heads, which is not a multiple of 8; the nearest is cp6:ulysses"),
        ("cp2:ulysses,tp2", "6 heads, 3 on each rank of tp2, .* of 2; the nearest is cp3:ulysses"),
    ],
)
def test_heads_that_ulysses_cannot_deal_out(text: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        plan_decoder(Strategy.parse(text), SHAPE)
    plan_decoder(Strategy.parse(text.replace(":ulysses", "")), SHAPE)  # a ring takes any


def test_one_head_leaves_a_ring() -> None:
    single = dataclasses.replace(SHAPE, num_heads=1, num_kv_heads=1)
    with pytest.raises(StrategyError, match=r"1 heads, .* of 2; the nearest is cp2$"):
        plan_decoder(Strategy.parse("cp2:ulysses"), single)


def test_a_model_of_another_kind() -> None:
    with pytest.raises(StrategyError, match=r"supports only .* is a Linear; the nearest is dp2"):
        Plan(Strategy.parse("cp2"), nn.Linear(2, 2))


@pytest.mark.parametrize(("text", "legal"), [("cp2", 32), ("cp2:ulysses", 30), ("cp4", 32)])
def test_lengths_that_would_be_padded(tmp_path: Path, text: str, legal: int) -> None:
    config = small_run(tmp_path, strategy=text, corpus=CorpusConfig(seq_len=29))
    with pytest.raises(ConfigError, match=f"corpus.seq_len is 29, but {text} .* set it to {legal}"):
        resolve(config)
    with pytest.raises(ConfigError, match="blocks split by cp cannot be compiled"):
        resolve(small_run(tmp_path, strategy=text, compile=True))


def logits_on_rank(text: str) -> list[float]:
    """Return how far the logits of rows of any length are from those of a whole model."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    whole, split = (Decoder(SHAPE).double().eval() for _ in range(2))
    for model in (whole, split):
        model.initialize(0)
    Plan(strategy, split).build(comm)
    found: list[float] = []
    for length in (1, 2, 7, 40):
        tokens_BT = torch.arange(2 * length).view(2, -1) % SHAPE.vocab_size
        with torch.no_grad():
            ours, theirs = split(tokens_BT), whole(tokens_BT)
        assert ours.shape == theirs.shape
        found.append(float((ours - theirs).abs().max()))
    with pytest.raises(StrategyError, match="pass labels to the model"):
        split(tokens_BT)
    with pytest.raises(ConfigError, match="rows of 41 tokens; max_seq_len is 40"):
        split(torch.zeros(1, 41, dtype=torch.int64))
    return found


@pytest.mark.parametrize("text", ["cp2", "cp2:ulysses"])
def test_logits_of_rows_of_any_length_are_gathered(text: str) -> None:
    for errors in run_ranks(logits_on_rank, 2, text, threads=1):
        assert max(errors) < 1e-12


@pytest.mark.parametrize(("num_rows", "length"), [(3, 17), (2, 40)])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_what_is_sent_in_closed_form(num_rows: int, length: int, recompute: str) -> None:
    """The twin tests compare the account with a ledger; here it is compared with the formulas."""
    num_ranks, heads, groups, width = 3, 6, 2, 8
    for kind in ("ring", "ulysses"):
        strategy = Strategy.parse(f"cp{num_ranks}:{kind},recompute:{recompute}")
        held = attention_of(strategy).order.num_held(length)
        plan = plan_decoder(strategy, SHAPE, compute=torch.bfloat16)
        sent = {
            (e.phase, e.op): e.sent_bytes
            for e in plan.traffic([(num_rows, length)])
            if e.op in ("send", "all_to_all")
        }
        tokens = num_rows * held * SHAPE.num_layers
        if kind == "ring":
            block = tokens * 2 * groups * width
            forward = (num_ranks - 1) * block * 2
            again = forward if recompute == "full" else 0
            # Keys and values in bfloat16, and their gradients in float32.
            expected = {"forward": forward, "backward": again + (num_ranks - 1) * block * 6}
            assert sent == {(phase, "send"): size for phase, size in expected.items()}
        else:
            copies = 3  # two key heads make six, which three ranks share
            forward = 2 / 3 * tokens * (2 * heads + 2 * groups * copies) * width * 2
            again = forward if recompute != "none" else 0
            expected = {"forward": forward, "backward": again + forward}
            assert sent == {
                (phase, "all_to_all"): pytest.approx(size) for phase, size in expected.items()
            }


def limited() -> Decoder:
    experts = ExpertShape(num_experts=4, top_k=2, ffn=16, capacity=0.5)
    model = Decoder(dataclasses.replace(SHAPE, experts=experts)).double()
    model.initialize(1)
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            parameter.detach().mul_(20)  # clear preferences, so that limits drop tokens
    return model


def errors_of_gradients(text: str, lengths: tuple[int, ...]) -> dict[str, float]:
    alone, generator = limited(), torch.Generator().manual_seed(1)
    rows = [torch.randint(31, (2, length + 1), generator=generator) for length in lengths]
    torch.stack([alone(ids[:, :-1], ids[:, 1:]) for ids in rows]).sum().backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    strategy, model = Strategy.parse(text), limited()
    comm = Ranks(strategy)
    plan = Plan(strategy, model, pp_rank=comm.coord("pp"))
    plan.build(comm)(rows, lambda ids: model(ids[:, :-1], ids[:, 1:]), lambda loss: loss)
    errors: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        right = expected[name]
        assert right is not None and parameter.grad is not None
        errors[name] = float((parameter.grad - right).norm() / right.norm())
    return errors


def test_a_limit_is_of_the_row_that_backward_runs_again() -> None:
    """Stages run forwards of other lengths before the backward of the first microbatch."""
    args = errors_of_gradients, 4, "pp2,cp2,recompute:full", (17, 13, 9)
    for errors in run_ranks(*args, threads=1):
        assert errors and max(errors.values()) <= 1e-12


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param("cp2", "dp2", marks=pytest.mark.slow), ("dp2", "cp2:ulysses")],
)
def test_a_run_goes_on_with_another_split(tmp_path: Path, first: str, second: str) -> None:
    """Evaluation, the sample and checkpoints run under cp too."""
    config = small_run(
        tmp_path, steps=6, save="every=2,keep=4", eval_every=3, eval_samples=2, seed=3
    )
    train(dataclasses.replace(config, strategy=first))
    middle = str(manifest.folder_of(Path(config.out or ""), 2))
    on = dataclasses.replace(config, strategy=second, resume=middle, out=str(tmp_path / "on"))
    train(on)
    assert losses(on.out) == pytest.approx(losses(config.out)[2:], rel=1e-10)
    ours, theirs = (records(run.out, "evaluation")[-1]["loss"] for run in (on, config))
    assert ours == pytest.approx(theirs, rel=1e-10)
