"""What one split saved, any other loads: whole tensors, shards, and parts of every layout."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import runs
import torch

from marks import by_hand
from nccl_trace import traced
from phalanx.checkpoint import manifest, state
from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches
from phalanx.verify.record import split as split_rows

State = dict[str, torch.Tensor]
Split = tuple[str, int]

SPLITS = [("whole", 1), ("fsdp", 2), ("hsdp", 4), ("fsdp", 3), ("whole", 3), ("fsdp", 4)]
OTHERS = SPLITS[3:]
"""Splits whose kind another shows too."""

IDS = [f"{split}{num_ranks}" for split, num_ranks in SPLITS]


@pytest.fixture(
    scope="module",
    params=[pytest.param(s, marks=[pytest.mark.slow] * (s in OTHERS)) for s in SPLITS],
    ids=IDS,
)
def saver(request: pytest.FixtureRequest) -> Split:
    return request.param


@pytest.fixture(scope="module")
def saved(saver: Split, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A run folder with a checkpoint, and what was saved."""
    split, num_ranks = saver
    run = tmp_path_factory.mktemp(split)
    return run, run_ranks(runs.save_after, num_ranks, run, 2, split, threads=1)[0]


def assert_same(loaded: State, saved: State) -> None:
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name


def test_the_names_are_the_models_own(saved: tuple[Path, State]) -> None:
    trained = ["embedding.weight", "middle.weight", "middle.bias"]
    assert sorted(saved[1]) == sorted(
        [f"model.{name}" for name in [*trained, "frozen.weight", "frozen.bias", "scale"]]
        + [f"optimizer.{n}.{key}" for n in trained for key in ("step", "exp_avg", "exp_avg_sq")]
    )
    assert saved[1]["optimizer.middle.bias.step"] == 2
    assert saved[1]["optimizer.embedding.weight.exp_avg"].shape == (7, 5)


NEXT = dict(zip(SPLITS, [*SPLITS[1:], SPLITS[0]], strict=True))


@pytest.mark.parametrize("is_next", [True, by_hand(False)], ids=["the next", "all others"])
def test_any_split_loads_it(saved: tuple[Path, State], is_next: bool, saver: Split) -> None:
    loaders = {NEXT[saver]} if is_next else {*SPLITS} - {NEXT[saver]}
    for split, num_ranks in sorted(loaders):
        for loaded in run_ranks(runs.load_into, num_ranks, saved[0], split, threads=1):
            assert_same(loaded, saved[1])


def test_each_part_is_written_once_and_the_work_is_shared(saved: tuple[Path, State]) -> None:
    about = manifest.read(manifest.find(saved[0]))
    sizes = [size for name, (size, _) in about.files.items() if name.endswith(".safetensors")]
    assert len(sizes) == about.num_ranks
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("split", ["whole", "fsdp"])
def test_weights_come_alone(saved: tuple[Path, State], split: str) -> None:
    expected = {name: t for name, t in saved[1].items() if name.startswith("model.")}
    for loaded in run_ranks(runs.load_weights_into, 2, saved[0], split, threads=1):
        assert_same(loaded, expected)


def test_an_optimizer_that_counts_steps_on_the_cpu_loads_it(saved: tuple[Path, State]) -> None:
    (loaded,) = run_ranks(runs.load_into, 1, saved[0], "whole", False, threads=1)
    assert_same(loaded, saved[1])


SHAPE = ModelShape(
    vocab_size=67, num_layers=1, hidden=16, num_heads=8, num_kv_heads=4, head_dim=2, ffn=24,
    max_seq_len=16, norm="layer", position="learned", bias=True, tied=True, dropout=0.1,
)  # fmt: skip

CHAIN = ("dp1", "tp2", "tp4:2d", "tp8:3d", "tp8:2.5d/2", "fsdp2,tp2", "dp1", "dp2,tp2", "tp4")
"""Each goes on where the one before has stopped."""


EXPERTS = dataclasses.replace(
    SHAPE, norm="rms", bias=False, experts=ExpertShape(num_experts=4, top_k=2, ffn=18, shared_ffn=8)
)

BALANCED = dataclasses.replace(
    EXPERTS,
    experts=ExpertShape(
        num_experts=4, top_k=2, ffn=18, score="sigmoid", has_bias=True, bias_rate=0.01,
        aux_loss=0.3, z_loss=0.01,
    ),
)  # fmt: skip


def two_steps(
    run: Path,
    text: str,
    steps_done: int,
    num_steps: int,
    kind: Literal["adamw", "muon"] = "adamw",
    shape: ModelShape = SHAPE,
) -> tuple[list[tuple[float, float]], State, State]:
    """Go on from the latest checkpoint, if there is one, and save; all in float64.

    Returns:
        Loss and norm of each step, and the whole state as it was loaded and as it was saved.
    """
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    model = Decoder(shape).to(comm.device, torch.float64)
    model.initialize(3 + steps_done)  # other weights than those in the checkpoint
    runner = Plan(strategy, model).build(comm)
    config = OptimizerConfig(kind=kind, warmup_steps=1)
    step = Step(
        model, build_optimizer(model, config, comm), NextToken(3, shape.dropout), config,
        comm=comm, num_steps=2 * len(CHAIN), run=runner,
    )  # fmt: skip
    loaded: State = {}
    if steps_done:
        state.load(manifest.find(run), model, step.optimizer)
        loaded = runs.whole_state(model, step.optimizer)
        step.steps_done = steps_done
    batches = decoder_batches(shape, 99, 6, 9, 0, 3)[steps_done : steps_done + num_steps]
    results = [
        step(split_rows(batch, comm.coord("data"), comm.size("data"), 2)) for batch in batches
    ]
    runs.save(run, model, step.optimizer, step.steps_done)
    saved = runs.whole_state(model, step.optimizer)
    return [(result.loss, result.grad_norm) for result in results], loaded, saved


def two_steps_each(
    run: Path, texts: list[str], steps_done: int, kind: Literal["adamw", "muon"], shape: ModelShape
) -> list[tuple[list[tuple[float, float]], State, State]]:
    """Go on under strategies of as many ranks, one after another; NCCL would run their calls."""
    return [
        traced(two_steps, run, text, steps_done + 2 * n, 2, kind, shape)
        for n, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("kind", "chain"),
    [
        ("adamw", CHAIN[:2]),
        ("muon", ("fsdp2", "dp2", "dp1")),
        by_hand("adamw", CHAIN),
        by_hand("muon", ("dp2,fsdp2", *CHAIN)),
    ],
)
def test_training_goes_on_from_layout_to_layout(
    tmp_path: Path, kind: Literal["adamw", "muon"], chain: Sequence[str]
) -> None:
    before = check_chain(tmp_path, chain, kind, SHAPE)
    assert any(name.endswith("mlp.up.bias.exp_avg_sq") for name in before)
    has_buffer = any(name.endswith("mlp.up.weight.momentum_buffer") for name in before)
    assert has_buffer == (kind == "muon")


@pytest.mark.parametrize(
    "chain",
    [
        ("fsdp2,ep2", "fsdp2", "dp1"),
        by_hand(("dp1", "fsdp3,ep2", "ep4", "dp2,ep2", "ep2,tp2", "fsdp2,ep2,tp2", "fsdp3", "dp1")),
    ],
)
def test_training_with_experts_goes_on_without_ep(tmp_path: Path, chain: Sequence[str]) -> None:
    before = check_chain(tmp_path, chain, "adamw", EXPERTS)
    assert before["optimizer.blocks.0.mlp.experts.gate.exp_avg_sq"].shape == (4, 18, 16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_losses_and_biases_of_experts_go_on_from_ep4_to_one_process(
    tmp_path: Path, kind: Literal["adamw", "muon"]
) -> None:
    before = check_chain(tmp_path, ("ep4", "fsdp2", "dp1"), kind, BALANCED)
    assert before["model.blocks.0.mlp.router.bias"].unique().numel() > 1
    has_buffer = "optimizer.blocks.0.mlp.experts.gate.momentum_buffer" in before
    assert has_buffer == (kind == "muon")


def check_chain(
    tmp_path: Path, chain: Sequence[str], kind: Literal["adamw", "muon"], shape: ModelShape
) -> State:
    """Return the last state; the second step of each shows that the moments came along."""
    num_steps = 2 * len(chain)
    ((expected, _, _),) = run_ranks(
        two_steps, 1, tmp_path / "alone", "dp1", 0, num_steps, kind, shape, threads=1
    )
    before: State = {}
    steps_done = 0
    for num_ranks, group in itertools.groupby(chain, lambda text: Strategy.parse(text).num_ranks):
        texts = list(group)
        ranks = run_ranks(
            two_steps_each, num_ranks, tmp_path, texts, steps_done, kind, shape, threads=1
        )
        for number, text in enumerate(texts):
            for steps, loaded, _ in (results[number] for results in ranks):
                assert_same(loaded, before)
                for found, wanted in zip(steps, expected[steps_done:], strict=False):
                    assert found == pytest.approx(wanted, rel=1e-10), text
            before = ranks[0][number][2]
            steps_done += 2
    return before
