"""The decoder's own laws: documents, dropout, precision, weights."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.models.attention import rotation
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.models.loss import IGNORE
from phalanx.models.random import row_keys
from phalanx.models.shape import LatentShape, ModelShape, Yarn
from phalanx.verify.plain import PlainDecoder

LLAMA = ModelShape(
    vocab_size=61,
    num_layers=2,
    hidden=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn=48,
    max_seq_len=64,
    qk_norm=True,
)
GPT2 = dataclasses.replace(
    LLAMA,
    num_kv_heads=4,
    qk_norm=False,
    norm="layer",
    position="learned",
    mlp="gelu",
    bias=True,
    tied=True,
)
QWEN2 = dataclasses.replace(LLAMA, qk_norm=False, bias="qkv")
MISTRAL = dataclasses.replace(LLAMA, qk_norm=False, window=5)
OLMO2 = dataclasses.replace(LLAMA, norm_at="output", qk_norm="projection")
GEMMA3 = dataclasses.replace(
    LLAMA,
    norm="rms+1",
    norm_at="both",
    window=5,
    full_every=2,
    window_theta=100.0,
    mlp="geglu",
    tied=True,
    scaled_embedding=True,
)
SHAPES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen2": QWEN2,
    "mistral": MISTRAL,
    "olmo2": OLMO2,
    "gemma3": GEMMA3,
}
FAMILIES = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def make(shape: ModelShape) -> Decoder:
    model = Decoder(shape)
    model.initialize(0)
    return model.double()


def tokens(num_rows: int, length: int) -> Tensor:
    return torch.randint(0, 61, (num_rows, length), generator=torch.Generator().manual_seed(0))


YARN = Yarn(factor=6.0, original_length=8)
COARSE = Yarn(factor=9.0, original_length=400, beta_fast=8.0, truncate=False, attention_factor=1.3)
BY_HEADS = Yarn(factor=6.0, original_length=8, beta_slow=0.1, mscale=0.7, mscale_all_dim=1.1)
STRETCHED = {
    "yarn": dataclasses.replace(LLAMA, rope_scaling=YARN),
    "yarn, coarse": dataclasses.replace(LLAMA, rope_scaling=COARSE),
    "yarn, latent": dataclasses.replace(
        LLAMA,
        num_kv_heads=4,
        head_dim=10,
        qk_norm=False,
        rope_scaling=BY_HEADS,
        latent=LatentShape(query_rank=None, kv_rank=12, plain_dim=6, rope_dim=4, value_dim=7),
    ),
}


@pytest.mark.parametrize(
    "shape", [*SHAPES.values(), *STRETCHED.values()], ids=[*SHAPES, *STRETCHED]
)
def test_equals_the_plain_decoder(shape: ModelShape) -> None:
    model, plain = make(shape), PlainDecoder(shape).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    plain.load_state_dict(model.state_dict())
    tokens_BT, labels_BT = tokens(2, 24), tokens(2, 24).roll(-1, 1)
    positions_BT = torch.tensor([[*range(9), *range(15)], [*range(24)]])
    documents_BT = torch.tensor([[0] * 9 + [1] * 15, [4] * 24])
    where = {"positions_BT": positions_BT, "documents_BT": documents_BT}
    loss = model(tokens_BT, labels_BT, **where)
    expected = plain(tokens_BT, labels_BT, **where, dropout_keys_B=None)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-9, atol=1e-11)


@FAMILIES
def test_packed_documents_equal_separate_rows(shape: ModelShape) -> None:
    model = make(shape)
    tokens_BT = tokens(2, 24)
    borders = [0, 9, 24]
    documents_BT = torch.tensor([[0] * 9 + [1] * 15, [4] * 24])
    positions_BT = torch.tensor([[*range(9), *range(15)], [*range(24)]])
    packed = model(tokens_BT, positions_BT=positions_BT, documents_BT=documents_BT)
    for start, stop in itertools.pairwise(borders):
        alone = model(tokens_BT[:1, start:stop])
        torch.testing.assert_close(packed[:1, start:stop], alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(packed[1:], model(tokens_BT[1:]), rtol=1e-12, atol=1e-12)


@FAMILIES
def test_two_stages_with_some_of_the_blocks_each_are_the_whole(shape: ModelShape) -> None:
    model = make(shape)
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.blocks, last.blocks = model.blocks[:1], model.blocks[1:]
    tokens_BT, positions_BT = tokens(2, 12), torch.arange(12)[None]
    sent_BTD = first.run_blocks(
        first.embed(tokens_BT, positions_BT, None), positions_BT, None, None
    )
    loss = last.read(last.run_blocks(sent_BTD, positions_BT, None, None), tokens_BT)
    assert torch.equal(loss, model(tokens_BT, tokens_BT))


@FAMILIES
def test_later_tokens_do_not_matter(shape: ModelShape) -> None:
    model = make(shape)
    tokens_BT = tokens(2, 24)
    changed_BT = tokens_BT.clone()
    changed_BT[:, 12:] = 0
    torch.testing.assert_close(
        model(tokens_BT)[:, :12], model(changed_BT)[:, :12], rtol=1e-12, atol=1e-12
    )


@FAMILIES
def test_no_valid_token_gives_zero_gradients_to_all(shape: ModelShape) -> None:
    model = make(shape)
    loss = model(tokens(2, 8), torch.full((2, 8), IGNORE))
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@FAMILIES
def test_bfloat16_compute_leaves_fp32_parameters_and_gradients(shape: ModelShape) -> None:
    model = make(shape).float()
    exact = model(tokens(2, 24), tokens(2, 24))
    model.compute_dtype = torch.bfloat16
    assert model(tokens(2, 24)).dtype == torch.bfloat16
    loss = model(tokens(2, 24), tokens(2, 24))
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        assert parameter.grad.any() or name.endswith("k.bias"), name


def test_dropout_is_the_rows_own() -> None:
    model = make(dataclasses.replace(LLAMA, dropout=0.2))
    tokens_BT, keys_B = tokens(4, 16), row_keys(0, 3, torch.arange(4))
    whole = model(tokens_BT, dropout_keys_B=keys_B)
    apart = [model(tokens_BT[i : i + 1], dropout_keys_B=keys_B[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(torch.cat(apart), whole, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(
        whole, model(tokens_BT, dropout_keys_B=row_keys(0, 4, torch.arange(4)))
    )


def test_dropout_needs_keys_in_training_and_none_in_evaluation() -> None:
    model = make(dataclasses.replace(LLAMA, dropout=0.2))
    with pytest.raises(ConfigError, match=r"dropout is 0\.2.*needs dropout_keys_B"):
        model(tokens(1, 4))
    plain = make(LLAMA)
    assert torch.equal(model.eval()(tokens(1, 4)), plain(tokens(1, 4)))


def test_angles_come_from_whole_positions_whatever_the_arithmetic() -> None:
    """Bf16 holds no odd number above 256: positions in it would turn heads by the wrong angle."""
    positions_BT = torch.arange(5000)[None]
    exact = rotation(LLAMA, positions_BT, torch.float64)
    narrow = rotation(LLAMA, positions_BT, torch.bfloat16)
    assert exact is not None and narrow is not None
    for found, wanted in zip(narrow, exact, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=0.0, atol=1e-7)


def test_a_long_row_in_bfloat16_turns_each_head_by_its_own_position() -> None:
    """Neighbours far into the row would share an angle if positions were narrow."""
    model = Decoder(dataclasses.replace(LLAMA, max_seq_len=4096, num_layers=1))
    model.initialize(0)
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[1][0]))
    model.compute_dtype = torch.bfloat16
    with torch.no_grad():
        model(tokens(1, 2048))
    cosines_T = seen[0][0, :, 0, 0]  # of the fastest pair: a radian a position
    torch.testing.assert_close(
        cosines_T.double(), torch.arange(2048).double().cos(), rtol=0, atol=1e-7
    )


def test_rows_beyond_max_seq_len_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows of 65 tokens; max_seq_len is 64"):
        make(LLAMA)(tokens(1, 65))


def test_tie_survives_meta_copy_and_state_dict() -> None:
    with torch.device("meta"):
        model = Decoder(GPT2)
    model.to_empty(device="cpu")
    model.initialize(0)
    twin = copy.deepcopy(model)
    assert "output.weight" not in model.state_dict()
    before = twin(tokens(1, 4))
    with torch.no_grad():
        twin.embedding.weight.mul_(2)
    # Logits pass through a final norm, so doubling only the embedding's reading would hardly show.
    assert (twin(tokens(1, 4)) / before).median().item() > 1.5


@FAMILIES
def test_initial_weights_by_parts_and_in_fp64(shape: ModelShape) -> None:
    single, double = Decoder(shape), Decoder(shape).double()
    single.initialize(7)
    double.initialize(7)
    for name, whole in single.named_parameters():
        assert torch.equal(whole.double(), double.get_parameter(name)), name
        half = whole.shape[0] // 2
        part = torch.empty_like(whole[half:])
        offset = [half] + [0] * (whole.ndim - 1)
        fill_initial(shape, 7, part, name, whole.shape, offset)
        assert torch.equal(part, whole[half:]), name
    other = Decoder(shape)
    other.initialize(8)
    assert not torch.equal(other.embedding.weight, single.embedding.weight)


def test_initial_spread() -> None:
    model = Decoder(dataclasses.replace(LLAMA, hidden=256, ffn=512, num_layers=8))
    model.initialize(0)
    block = model.blocks[3]
    narrow = (2 / (5 * 256)) ** 0.5
    assert model.embedding.weight.std().item() == pytest.approx(narrow, rel=0.05)
    assert block.attention.q.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention.output.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert bool((model.norm.weight == 1).all())
