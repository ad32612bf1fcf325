"""The predicted bytes beside those that live on a CPU."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import closed_forms
import pytest
import torch
from torch import Tensor

from live_bytes import LiveBytes
from marks import by_hand
from phalanx.account import activations as measured
from phalanx.account.activations import activations
from phalanx.errors import StrategyError
from phalanx.models.decoder import Block, Decoder
from phalanx.models.random import row_keys
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel import recompute
from phalanx.strategy import Recompute, Strategy

LLAMA = ModelShape(
    vocab_size=64,
    num_layers=4,
    hidden=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn=176,
    max_seq_len=128,
)
GPT2 = dataclasses.replace(
    LLAMA, norm="layer", position="learned", mlp="gelu", bias=True, ffn=256, tied=True
)
SHAPES = {
    "llama": LLAMA,
    "llama, grouped, dropout": dataclasses.replace(LLAMA, num_kv_heads=2, dropout=0.1),
    "qwen3": dataclasses.replace(LLAMA, num_kv_heads=1, head_dim=32, qk_norm=True),
    "gpt2": GPT2,
    "gpt2, dropout": dataclasses.replace(GPT2, dropout=0.1),
    "gpt2, grouped": dataclasses.replace(GPT2, num_kv_heads=2),
    "olmo2": dataclasses.replace(LLAMA, norm_at="output", qk_norm="projection"),
    "gemma3": dataclasses.replace(
        LLAMA, norm="rms+1", norm_at="both", qk_norm=True, mlp="geglu", num_kv_heads=2, window=20,
        full_every=2, window_theta=100.0, dropout=0.1,
    ),
}  # fmt: skip
EXPERTS = ExpertShape(num_experts=8, top_k=2, ffn=64, first_dense=1, shared_ffn=48)
SPARSE = dataclasses.replace(LLAMA, experts=EXPERTS)
SOME = ("llama, grouped, dropout", "gpt2, dropout", "olmo2")
"""Between them have each part; gemma3 and its window are measured with documents."""

NUM_ROWS, SEQ_LEN = 4, 128


def policy(text: str) -> Recompute:
    return Strategy.parse(f"recompute:{text}").recompute


def measure(
    shape: ModelShape,
    precision: str,
    text: str,
    *,
    seq_len: int = SEQ_LEN,
    has_documents: bool = False,
) -> tuple[int, LiveBytes]:
    """Return the bytes alive after forward, and what the whole step held."""
    decoder = Decoder(shape)
    for parameter in decoder.parameters():  # any values: faster than those of a seed
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)  # there already, as in a second microbatch
    if precision == "float64":
        decoder.double()
    decoder.compute_dtype = getattr(torch, precision)
    tokens_BT = torch.arange(NUM_ROWS * seq_len).view(NUM_ROWS, seq_len) % shape.vocab_size
    positions_BT = torch.arange(seq_len).repeat(NUM_ROWS, 1)
    live = LiveBytes()

    def forward(self: Block, *args: Any) -> Tensor:
        live.is_in_block = True
        try:
            return original(self, *args)
        finally:
            live.is_in_block = False

    original = Block.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "forward", forward)
        recompute.apply(decoder, policy(text))
        with live:
            loss = decoder(
                tokens_BT,
                tokens_BT.roll(-1, 1),
                positions_BT=positions_BT if has_documents else None,
                documents_BT=(positions_BT > 50).long() if has_documents else None,
                dropout_keys_B=row_keys(0, 0, torch.arange(NUM_ROWS)),
            )
            kept = live.now
            live.is_backward = live.has_run_again = True
            loss.backward()
    return kept, live


@pytest.mark.parametrize(
    "text", ["none", *map(by_hand, ["full", "every/2", "every/3"]), "sqrt", "selective"]
)
@pytest.mark.parametrize("precision", [by_hand("float32"), "bfloat16"])
@pytest.mark.parametrize("name", [n if n in SOME else by_hand(n) for n in SHAPES])
def test_predicted_within_5_percent(name: str, precision: str, text: str) -> None:
    check(SHAPES[name], precision, text, has_documents=False)


@pytest.mark.parametrize("text", ["none", "selective"])
@pytest.mark.parametrize("precision", [by_hand("float64"), by_hand("float32"), "bfloat16"])
def test_predicted_within_5_percent_with_documents(precision: str, text: str) -> None:
    check(SHAPES["llama, grouped, dropout"], precision, text, has_documents=True)
    check(SHAPES["gemma3"], precision, text, has_documents=True)


@pytest.mark.parametrize("text", ["none", "full", "selective"])
@pytest.mark.parametrize("precision", [by_hand("float32"), "bfloat16"])
def test_predicted_within_5_percent_with_experts(precision: str, text: str) -> None:
    """Of a first block with an MLP, and three with a router, experts and a shared expert."""
    check(SPARSE, precision, text, has_documents=False)


def test_experts_hold_what_their_rows_are() -> None:
    """Of each selection an input, an output and four inner activations; of the busiest, more."""
    sizes = (SEQ_LEN, NUM_ROWS, "bfloat16")
    narrow = dataclasses.replace(EXPERTS, ffn=32)
    whole, half = (
        activations(
            dataclasses.replace(SPARSE, experts=of), Strategy(), *sizes, device="cuda",
            has_casts=False,
        ).blocks
        for of in (EXPERTS, narrow)
    )  # fmt: skip
    num_rows = EXPERTS.top_k * NUM_ROWS * SEQ_LEN
    assert whole - half == 3 * num_rows * 4 * 32 * 2
    split = Strategy.parse("ep4")
    even, busiest = (
        activations(SPARSE, split, *sizes, device="cuda", has_casts=False, imbalance=each).blocks
        for each in (1.0, 1.5)
    )
    assert busiest - even == 3 * num_rows // 2 * (2 * SPARSE.hidden + 4 * EXPERTS.ffn) * 2


def check(shape: ModelShape, precision: str, text: str, *, has_documents: bool) -> None:
    strategy = Strategy(recompute=policy(text))
    predicted = activations(
        shape, strategy, SEQ_LEN, NUM_ROWS, precision, has_documents=has_documents
    )
    kept, live = measure(shape, precision, text, has_documents=has_documents)
    tokens_bytes = 8 * NUM_ROWS * SEQ_LEN  # made before, and so not seen
    assert predicted.kept == pytest.approx(kept + tokens_bytes, rel=0.05)
    assert predicted.peak == pytest.approx(live.held + tokens_bytes, rel=0.05)


@pytest.mark.parametrize("device", ["cuda", by_hand("cpu")])
def test_the_count_is_that_of_the_closed_forms(device: Any) -> None:
    """The forms say what a block keeps on a GPU too, and under each layout."""
    names = ["llama, grouped, dropout", "olmo2"]
    layouts = ["dp1", "tp2:megatron", "tp4:2d", "cp2", "cp2:ulysses"]
    for name, text, policy_text in itertools.product(names, layouts, ["none", "selective"]):
        shape = dataclasses.replace(SHAPES[name], num_kv_heads=4)
        strategy = dataclasses.replace(Strategy.parse(text), recompute=policy(policy_text))
        sizes = (shape, strategy, SEQ_LEN, NUM_ROWS, "bfloat16")
        counted, form = (
            account.activations(*sizes, device=device, has_documents=name == "olmo2")
            for account in (measured, closed_forms)
        )
        for part in ("blocks", "head", "gradient"):
            found, form_bytes = getattr(counted, part), getattr(form, part)
            assert found == pytest.approx(form_bytes, rel=0.05), (name, strategy, part)
        again = form.blocks + form.recomputed
        found = counted.blocks + counted.recomputed
        assert found == pytest.approx(again, rel=0.05), (name, strategy)


@pytest.mark.slow
def test_what_is_held_grows_with_the_root_of_the_depth() -> None:
    """Chen et al. 2016, section 4.1, by the true peak of a step, passing buffers included."""
    narrow = dataclasses.replace(GPT2, hidden=32, num_heads=2, num_kv_heads=2, ffn=128)
    shapes = [dataclasses.replace(narrow, num_layers=depth) for depth in (4, 16, 64)]
    peaks = {
        text: [measure(shape, "float32", text, seq_len=64)[1].peak for shape in shapes]
        for text in ("none", "full", "sqrt")
    }
    growth = {text: [b / a for a, b in itertools.pairwise(peak)] for text, peak in peaks.items()}
    # The depth grows fourfold each time. What no depth changes (loss, buffers) is a tenth at most.
    assert growth["none"] == pytest.approx([4, 4], rel=0.1)
    assert growth["sqrt"] == pytest.approx([2, 2], rel=0.1)
    # An input a block, and nothing else that grows.
    input_bytes = NUM_ROWS * 64 * narrow.hidden * 4
    assert peaks["full"][1] - peaks["full"][0] == pytest.approx(12 * input_bytes, rel=0.01)
    assert peaks["full"][2] - peaks["full"][1] == pytest.approx(48 * input_bytes, rel=0.01)


@pytest.mark.parametrize("num_layers", [4, 16])
def test_full_holds_an_input_a_block_and_one_block(num_layers: int) -> None:
    shape = dataclasses.replace(LLAMA, num_layers=num_layers)
    one, all_kept = (
        activations(shape, Strategy(recompute=policy(t)), 64, 2, "float32")
        for t in ("full", "none")
    )
    stream_bytes = 64 * 2 * shape.hidden * 4
    assert one.blocks == num_layers * stream_bytes
    assert one.recomputed == all_kept.blocks // num_layers - stream_bytes


def test_no_casts_where_weights_are_gathered_in_the_compute_dtype() -> None:
    with_casts, without = (
        activations(LLAMA, Strategy.parse(text), 8, 1, "bfloat16") for text in ("dp2", "fsdp2")
    )
    assert activations(LLAMA, Strategy(), 8, 1, "bfloat16", has_casts=False) == without
    matrices = 4 * 64 * 64 + 3 * 64 * 176
    assert with_casts.kept - without.kept == LLAMA.num_layers * matrices * 2


def test_a_segment_longer_than_the_model_is_refused() -> None:
    with pytest.raises(StrategyError, match="4 blocks"):
        activations(LLAMA, Strategy(recompute=policy("every/5")), 8, 1, "float32")
