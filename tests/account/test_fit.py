"""A model that cannot be held is refused with the arithmetic; one that can never is."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
import torch

from phalanx.account import host
from phalanx.account.fit import check_fit
from phalanx.account.planned import DecoderModel, PlannedStep, decoder_step
from phalanx.account.rank_memory import Detail, StageMemory, heaviest, memory
from phalanx.cli.main import main
from phalanx.errors import ConfigError
from phalanx.models.decoder import Decoder
from phalanx.models.registry import shape_of
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy

SMALL = ModelShape(
    vocab_size=512, num_layers=4, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=96,
    max_seq_len=64, tied=True,
)  # fmt: skip


def load(
    strategy: str, shape: ModelShape = SMALL, accumulation: int = 1
) -> PlannedStep[DecoderModel]:
    return decoder_step(shape, Strategy.parse(strategy), 32, 2, accumulation, "float32")


def need_of(of: PlannedStep[DecoderModel], detail: Detail = "activations") -> StageMemory:
    """Return the least that the fullest rank needs."""
    return heaviest(memory(of, "cpu", detail))


@pytest.mark.parametrize(
    "strategy",
    ["dp1", "dp4", "fsdp2", "fsdp2:zero1", "fsdp4:zero2", "dp2,fsdp2", "tp2", "fsdp2,tp2"],
)
def test_what_is_counted_is_what_the_layout_holds_or_a_little_less(strategy: str) -> None:
    with torch.device("meta"):
        holding = Plan(Strategy.parse(strategy), Decoder(SMALL)).holds()
    need = need_of(load(strategy))
    pairs = {
        "weights": (need.weights, holding.parameter_bytes),
        "moments": (need.optimizer, holding.optimizer_bytes),
        "gradients": (need.gradients, holding.gradient_bytes + holding.unreduced_bytes),
    }
    for name, (counted, held) in pairs.items():
        assert counted <= held, name
        if name != "gradients":  # of which some are held for a moment
            assert counted >= 0.9 * held, name


def test_both_gradients_and_activations_count_where_they_accumulate() -> None:
    one, two = need_of(load("dp1")), need_of(load("dp1", accumulation=2))
    assert one.total == one.weights + one.optimizer + max(one.gradients, one.activations)
    assert two.total == two.weights + two.optimizer + two.gradients + two.activations
    assert need_of(load("dp1"), "state").activations == 0


def test_the_limit_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    big = load("dp2", shape_of("llama3-1b"))
    needed = 2 * (need_of(big).total + host.RANK_BYTES)
    monkeypatch.setattr(host, "free_memory_bytes", lambda: needed - (1 << 30))
    monkeypatch.setattr(host, "free_swap_bytes", lambda: 1 << 30)
    check_fit(big, "llama3-1b", 2)
    monkeypatch.setattr(host, "free_swap_bytes", lambda: (1 << 30) - 1)
    with pytest.raises(ConfigError) as caught:
        check_fit(big, "llama3-1b", 2)
    assert re.match(
        r"llama3-1b \(1,235,814,400 parameters\) does not fit: under dp2, 2 ranks need at least "
        r"[\d.]+ GiB \(each 4\.6 of weights, 9\.21 of AdamW's moments, 4\.6 of gradients, "
        r"[\d.]+ of activations for 2 x 32 tokens\), but this host has [\d.]+ GiB left; try "
        r"--strategy fsdp2 \(at least [\d.]+ GiB\), or .*, or --model \S+ \([\d.]+ GiB\)$",
        str(caught.value),
    ), str(caught.value)


def test_a_gpu_holds_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    big = load("fsdp8", shape_of("llama3-8b"))
    monkeypatch.setattr(host, "largest_gpu_bytes", lambda: None)
    check_fit(big, "llama3-8b", 8, device="cuda")  # nobody can say
    monkeypatch.setattr(host, "largest_gpu_bytes", lambda: 80 << 30)
    check_fit(big, "llama3-8b", 8, device="cuda")
    monkeypatch.setattr(host, "largest_gpu_bytes", lambda: 8 << 30)
    with pytest.raises(
        ConfigError, match=r"a rank needs at least .* largest GPU of this host has 8"
    ):
        check_fit(big, "llama3-8b", 8, device="cuda")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model llama3-405b", "405,853,388,800 parameters) does not fit"),
        ("--shape.num-layers 1000000", "num_layers is 1000000; expected a number in [1, 10000]"),
        ("--shape.num-layers 10000 --shape.hidden 16384", "does not fit"),
        ("--batch.global-size 1000000000000", "the most is 1048576 a rank, 2097152 in all"),
        ("--batch.microbatch 1 --batch.accumulation 1000000000000", "nearest is 1048576"),
        ("--batch.microbatch 2000 --batch.accumulation 2000", "are 4000000 sequences for each"),
        ("--resume nosuch", "no checkpoint in nosuch: it does not exist"),
        ("--data nosuch.txt", "nosuch.txt does not exist"),
        ("--corpus.seq-len 5000", "positions end at 1024"),
    ],
)
def test_what_no_host_can_do_is_refused_at_once(
    line: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a meta model of a million blocks is built, or a server of ranks is started."""

    def start() -> None:
        pytest.fail("a request that cannot be met loaded torch for its ranks")

    monkeypatch.setattr("phalanx.launch.local.prepare_server", start)
    assert main(["train", "--device", "cpu", *line.split()]) == 2
    assert words in capsys.readouterr().err


def test_requests_are_judged_without_torch() -> None:
    code = (
        "import sys; from phalanx.cli.main import main; code = main('train --device cpu "
        "--model llama3-405b'.split()); sys.exit(10 * ('torch' in sys.modules) + code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 2, done.stderr


def test_the_memory_of_this_host_is_read() -> None:
    assert 0 < host.free_memory_bytes() < 1 << 50
    assert 0 <= host.free_swap_bytes() < 1 << 50


BLOCKS = ModelShape(
    vocab_size=60_000, num_layers=10, hidden=256, num_heads=4, num_kv_heads=4, head_dim=64,
    ffn=768, max_seq_len=64,
)  # fmt: skip
"""Its embedding costs no FLOPs, and holds much."""


def test_the_stages_of_a_pipeline_are_counted_each_with_its_own() -> None:
    of = load("pp2", BLOCKS, accumulation=4)
    fullest = need_of(of).total
    one = need_of(load("dp1", BLOCKS, accumulation=4))
    assert fullest > (one.weights + one.optimizer + one.gradients) / 2
    with torch.device("meta"):
        models = [Decoder(BLOCKS) for _ in range(2)]
    held = [
        Plan(of.strategy, model, pp_rank=rank).holds(4).parameter_bytes
        for rank, model in enumerate(models)
    ]
    assert sum(held) == one.weights


@pytest.mark.parametrize(("num_here", "counted"), [(2, "all"), (1, "least")])
def test_a_host_is_refused_for_the_stages_that_it_must_hold(
    monkeypatch: pytest.MonkeyPatch, num_here: int, counted: str
) -> None:
    of = load("pp2", BLOCKS, accumulation=4)
    needs = [each.total for each in memory(of, "cpu", "activations")]
    assert needs[0] != needs[1]
    room = (sum(needs) if counted == "all" else min(needs)) + num_here * host.RANK_BYTES
    monkeypatch.setattr(host, "free_swap_bytes", lambda: 0)
    monkeypatch.setattr(host, "free_memory_bytes", lambda: room)
    check_fit(of, "blocks", num_here)
    monkeypatch.setattr(host, "free_memory_bytes", lambda: room - 2)
    with pytest.raises(ConfigError, match="does not fit: under pp2"):
        check_fit(of, "blocks", num_here)


def test_a_cut_by_hand_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_swap_bytes", lambda: 0)
    monkeypatch.setattr(host, "free_memory_bytes", lambda: 3 * host.RANK_BYTES)
    huge = dataclasses.replace(BLOCKS, hidden=8192, ffn=24576, num_heads=128, num_kv_heads=128)
    with pytest.raises(ConfigError, match="does not fit: under pp2,cut:6"):
        check_fit(load("pp2,cut:6+6", huge), "huge", 2)
