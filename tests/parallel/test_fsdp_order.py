"""The order in which fsdp gathers, computes, reduces and updates, read from a run."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from phalanx.comm.calls import Call
from phalanx.comm.comm import Ranks
from phalanx.comm.watch import Watch
from phalanx.launch.local import run_ranks
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy

NUM_BLOCKS, WIDTH, VOCABULARY = 4, 8, 20
DOCUMENT = Path(__file__).parents[2] / "docs/strategies.md"


class Block(nn.Module):
    """Each of another size, so that a collective of its parameters can be told by its length."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * (index + 1), bias=False)
        self.down = nn.Linear(2 * (index + 1), WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(index) for index in range(NUM_BLOCKS))
        self.scale = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(WIDTH, 2, bias=False)
        self.ends = [self.embedding], [self.head]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Order(Watch):
    """Notes gathers and reductions by the block that they are of."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.events: list[str] = []
        self._names = names

    @override
    def run_call(self, call: Call, run: Callable[[], Any]) -> Any:
        if call.op in ("all_gather", "reduce_scatter"):
            whole = call.outputs if call.op == "all_gather" else call.inputs
            tensors = whole if isinstance(whole, (list, tuple)) else [whole]
            name = self._names[sum(tensor.numel() for tensor in tensors)]
            self.events.append(f"{'gather' if call.op == 'all_gather' else 'reduce'} {name}")
        return run()


def events_of(text: str) -> list[str]:
    """Return what one step of this rank did, in order."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    model = Blocks()
    sizes = {sum(p.numel() for p in b.parameters()): str(i) for i, b in enumerate(model.blocks)}
    order = Order(sizes | {2: "rest", 2 * WIDTH: "head", VOCABULARY * WIDTH: "embedding"})
    reducer = Plan(strategy, model).build(comm).reducer
    optimizer = torch.optim.SGD(model.parameters())
    for index, block in enumerate(model.blocks):
        # Inside the block: after its parameters were gathered for it.
        block.up.register_forward_pre_hook(
            lambda *_, index=index: order.events.append(f"forward {index}")
        )
        block.down.register_full_backward_pre_hook(
            lambda *_, index=index: order.events.append(f"backward {index}")
        )
    model.head.register_forward_pre_hook(lambda *_: order.events.append("forward head"))
    model.head.register_full_backward_pre_hook(lambda *_: order.events.append("backward head"))
    model.embedding.register_forward_pre_hook(lambda *_: order.events.append("forward embedding"))
    optimizer.register_step_pre_hook(lambda *_: order.events.append("update"))
    with order:
        loss = model(torch.arange(2)).sum()
        reducer.before_backward(reducer.parameters)
        loss.backward()
        reducer.finish()
    optimizer.step()
    return order.events


def test_the_document_shows_the_order_of_a_run() -> None:
    ((text, shown),) = re.findall(r"```order (\S+)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    expected = re.findall(r"[a-z]+(?: \w+)?", shown)
    assert text == "fsdp2"
    for events in run_ranks(events_of, 2, text, threads=1):
        assert events == expected
    # zero2 keeps what it has gathered: its backward gathers nothing.
    end = expected.index("backward head")
    backward = [event for event in expected[end:] if not event.startswith("gather ")]
    assert len(backward) == len(expected) - end - 3
    for events in run_ranks(events_of, 2, "fsdp2:zero2", threads=1):
        assert events == expected[:end] + backward
