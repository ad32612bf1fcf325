"""Recomputation changes what is kept, and not one bit of what is computed."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.errors import StrategyError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.random import row_keys
from phalanx.models.shape import ModelShape
from phalanx.parallel import recompute
from phalanx.parallel.plan import Plan
from phalanx.strategy import Recompute, Strategy

LLAMA = ModelShape(
    vocab_size=61,
    num_layers=5,
    hidden=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn=48,
    max_seq_len=24,
    qk_norm=True,
    tied=True,
    dropout=0.1,
)
GPT2 = dataclasses.replace(
    LLAMA, num_kv_heads=4, qk_norm=False, norm="layer", position="learned", mlp="gelu", bias=True
)
SHAPES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "no dropout": dataclasses.replace(LLAMA, dropout=0.0, tied=False),
}
POLICIES = ("full", "every/2", "every/5", "sqrt", "selective")


def policy(text: str) -> Recompute:
    return Strategy.parse(f"recompute:{text}").recompute


def build(shape: ModelShape, dtype: torch.dtype, text: str) -> Decoder:
    model = Decoder(shape)
    model.initialize(0)
    model.to(torch.float64 if dtype == torch.float64 else torch.float32)
    model.compute_dtype = dtype
    recompute.apply(model, policy(text))
    return model


def loss_of(model: Decoder, rows_B: Tensor, *, has_documents: bool = False) -> Tensor:
    tokens_BT = (rows_B[:, None] * 24 + torch.arange(24)) * 7 % 61
    return model(
        tokens_BT,
        tokens_BT.roll(-1, 1),
        documents_BT=(torch.arange(24) > 9).long().expand_as(tokens_BT) if has_documents else None,
        dropout_keys_B=row_keys(0, 1, rows_B),
    )


def step(model: Decoder, **settings: bool) -> list[Tensor]:
    """Return the loss and every gradient."""
    loss = loss_of(model, torch.arange(2), **settings)
    loss.backward()
    return [loss.detach(), *gradients(model)]


def gradients(model: nn.Module) -> list[Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    return [grad for grad in grads if grad is not None]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("has_documents", [by_hand(False), True])
@pytest.mark.parametrize("dtype", [torch.float64, by_hand(torch.float32), torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_gradients_are_bit_equal(
    name: str, dtype: torch.dtype, has_documents: bool
) -> None:
    shape = SHAPES[name]
    expected = step(build(shape, dtype, "none"), has_documents=has_documents)
    for text in POLICIES:
        assert_same_bits(step(build(shape, dtype, text), has_documents=has_documents), expected)


def test_names_stay_and_evaluation_is_as_before() -> None:
    plain = build(LLAMA, torch.float64, "none").eval()
    for text in POLICIES:
        model = build(LLAMA, torch.float64, text).eval()
        assert list(model.state_dict()) == list(plain.state_dict())
        with torch.no_grad():
            assert torch.equal(loss_of(model, torch.arange(2)), loss_of(plain, torch.arange(2)))


@pytest.mark.parametrize("text", POLICIES)
def test_a_copy_runs_itself(text: str) -> None:
    model = build(LLAMA, torch.float64, text)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_bits(step(twin), step(build(LLAMA, torch.float64, "none")))
    assert not gradients(model)


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: collections.Counter[Any] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_selective_runs_no_product_and_no_attention_again(dtype: torch.dtype) -> None:
    aten = torch.ops.aten
    attention = (
        torch.ops.phalanx.causal_attention
        if dtype == torch.bfloat16
        else aten._scaled_dot_product_flash_attention_for_cpu
    )
    count = {}
    for text in ("none", "selective", "full"):
        with Calls() as calls:
            step(build(LLAMA, dtype, text))
        count[text] = calls.count
    for operator in (aten.mm, aten.bmm, aten.baddbmm, aten.addmm, attention):
        assert count["selective"][operator] == count["none"][operator], operator
    assert count["none"][attention] == LLAMA.num_layers
    assert count["full"][attention] == 2 * LLAMA.num_layers
    assert count["full"][aten.mm] > count["none"][aten.mm]
    # The activation function is what is cheap to run again.
    assert count["selective"][aten.silu] == 2 * count["none"][aten.silu] == 2 * LLAMA.num_layers


# While Dynamo traces, it does what PyTorch itself warns of, and hides it from all but "error".
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("text", "num_layers"), [by_hand("full", 1), by_hand("every/2", 2), ("selective", 1)]
)
def test_a_compiled_block_is_traced_whole(text: str, num_layers: int) -> None:
    """`aot_eager` traces and differentiates as every backend does, and generates no code."""
    shape = dataclasses.replace(LLAMA, num_layers=num_layers)
    expected = step(build(shape, torch.float64, "none"))
    torch.compiler.reset()
    model = build(shape, torch.float64, text)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for found, exact in zip(step(model), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-13)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + self.dropout(self.linear(x).tanh()) * scale


class Own(nn.Module):
    """A user's model: dropout by torch's generator, keyword arguments, a loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


@pytest.mark.parametrize("text", ["full", "every/1", "selective"])
@pytest.mark.parametrize("replaced", ["", "by a function", "by another's method"])
def test_a_users_module_with_torchs_dropout(text: str, replaced: str) -> None:
    results: list[list[Tensor]] = []
    for recompute_policy in ("none", text):
        model = Own()
        for layer in model.layers if replaced else ():  # as tools do that move or adapt weights
            new = wrapped(layer.forward) if replaced == "by a function" else Adapter(layer).forward
            layer.forward = new  # type: ignore[method-assign]
        recompute.apply(model, policy(recompute_policy))
        torch.manual_seed(1)
        loss = model(torch.linspace(-1, 1, 24).view(3, 8)).square().sum()
        loss.backward()
        # What is drawn next is not disturbed either.
        results.append([loss.detach(), torch.rand(3), *gradients(model)])
    assert_same_bits(*results)


class Adapter:
    """What is put around a layer: its `self` is not the layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.original = layer.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


def wrapped(forward: Any) -> Any:
    return lambda *args, **kwargs: forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("model", "text", "words"),
    [
        (nn.Linear(2, 2), "full", "recompute:full needs a ModuleList.*nearest is .*none"),
        (nn.Linear(2, 2), "sqrt", "recompute:sqrt needs a ModuleList.* this Linear has none"),
        (Own(), "every/2", "recompute:every/2: Own cannot run 2 blocks.*nearest is .*full"),
        (Own(), "sqrt", "recompute:sqrt: Own cannot run 2 blocks"),
        (Own(), "every/5", "recompute:every/5: the model has 4 blocks; the nearest is .*every/4"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(model: nn.Module, text: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        recompute.apply(model, policy(text))
    with pytest.raises(StrategyError, match=words):  # before any process starts
        Plan(Strategy.parse(f"dp2,recompute:{text}"), model)


def sharded_steps(texts: list[str]) -> list[tuple[list[Tensor], dict[str, int]]]:
    comm = Ranks(Strategy.parse("fsdp2"), "cpu")
    return [sharded_step(comm, text) for text in texts]


def sharded_step(comm: Ranks, text: str) -> tuple[list[Tensor], dict[str, int]]:
    """Take a step with FSDP2 on each block; return loss and gradients, and gathers by phase."""
    model = build(LLAMA, torch.float64, text)
    for block in model.blocks:
        fully_shard(block, mesh=comm.mesh["fsdp"])
    fully_shard(model, mesh=comm.mesh["fsdp"], reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    with Ledger(comm) as ledger:
        with ledger.phase("forward"):
            loss = loss_of(model, torch.arange(4)[dist.get_rank() :: 2])
        with ledger.phase("backward"):
            loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    gathers = {e.phase: e.calls for e in ledger.entries() if e.op == "all_gather"}
    return [total, *(grad.full_tensor() for grad in gradients(model))], gathers  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "texts", [["full", "selective"], by_hand(["none", "every/2", "every/5"])], ids=" ".join
)
def test_under_fsdp2_each_block_is_gathered_once_in_backward(texts: list[str]) -> None:
    alone = build(LLAMA, torch.float64, "none")
    loss = loss_of(alone, torch.arange(4))
    loss.backward()
    for steps in run_ranks(sharded_steps, 2, texts):
        for found, gathers in steps:
            for a, b in zip(found, [loss.detach(), *gradients(alone)], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
            # The blocks, and in forward the rest, which is kept.
            assert gathers == {"forward": LLAMA.num_layers + 1, "backward": LLAMA.num_layers}
