"""What travels together under fsdp: which parameters, and how many bytes at most."""

import dataclasses

import pytest
import torch
from torch import nn

from phalanx.comm.axes import DENSE, EXPERT
from phalanx.errors import StrategyError
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.expert_split import ExpertSplit
from phalanx.parallel.groups import (
    Group,
    Parameter,
    Place,
    groups_of,
    peak_gathered_bytes,
    peak_gradient_bytes,
)
from phalanx.parallel.skeleton import skeleton_of
from phalanx.parallel.split import Target
from phalanx.strategy import Strategy

TIED = ModelShape(
    vocab_size=67,
    num_layers=3,
    hidden=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn=24,
    max_seq_len=16,
    tied=True,
)


def decoder_groups(**sizes: object) -> list[Group]:
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(TIED, **sizes))
    groups = groups_of(Target(Strategy(), skeleton_of(model), torch.bfloat16))
    shapes = [p.shape for g in groups for p in g.parameters]
    assert sorted(shapes) == sorted(tuple(p.shape) for p in model.parameters())
    for group in groups:
        assert group.gathered == (torch.bfloat16 if group.place == "block" else torch.float32)
    return groups


BLOCKS = [(("blocks.0",), False, True), (("blocks.1",), False, True), (("blocks.2",), True, False)]
HEAD = (("norm", "output"), True, False)


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({}, [*BLOCKS, (("",), True, False)]),
        ({"tied": False}, [(("embedding",), False, False), *BLOCKS, HEAD]),
        (
            {"tied": False, "position": "learned"},
            [(("embedding", "position_embedding"), False, False), *BLOCKS, HEAD],
        ),
    ],
)
def test_groups_are_the_blocks_the_ends_and_the_rest(sizes: dict, expected: list) -> None:
    """A tied weight is read at both ends, so the ends are of the rest then."""
    found = [(g.names, g.stays_gathered, g.is_gathered_again) for g in decoder_groups(**sizes)]
    assert found == expected


def group(place: Place, num_elements: int) -> Group:
    parameters = (Parameter((num_elements,)),)
    return Group(place, (place,), parameters, torch.float32, torch.float32, place != "block", 4)


def sizes_of(**elements: int) -> list[Group]:
    """Four blocks of 800 elements between an embedding and a head, and a rest."""
    blocks = [group("block", 800) for _ in range(4)]
    ends = {place: [group(place, size)] if size else [] for place, size in elements.items()}
    return [*ends["embedding"], *blocks, *ends["head"], *ends["rest"]]


@pytest.mark.parametrize(
    "embedding, head, rest, segment_size, most",
    [
        (0, 0, 0, 1, 1600),  # a block at work, and one on its way
        (1200, 400, 40, 1, 1640),
        (4000, 400, 40, 1, 4040),  # the embedding alone, in forward
        (1200, 4000, 40, 1, 4840),  # the head and the last block
        (1200, 400, 0, 2, 2400),
    ],
)
def test_the_most_that_is_gathered(
    embedding: int, head: int, rest: int, segment_size: int, most: int
) -> None:
    groups = sizes_of(embedding=embedding, head=head, rest=rest)
    assert peak_gathered_bytes(groups, segment_size) == 4 * most


@pytest.mark.parametrize(
    "embedding, head, rest, first, shares, full",
    [
        (0, 0, 0, 1000 + 3 * 200, 1000 + 4 * 200, 3 * 800 + 1000),
        # At the embedding, at the embedding, and at the head, where all is full.
        (4000, 400, 40, 40 + 5000 + 900, 40 + 10 + 5000 + 1900, 40 + 4000 + 3200 + 500),
        (400, 8000, 0, 10000, 10000 + 2000 + 4 * 200 + 100, 400 + 3200 + 10000),
    ],
)
def test_the_most_of_gradients(
    embedding: int, head: int, rest: int, first: int, shares: int, full: int
) -> None:
    """A group's one gradient is full until its share, a quarter of it, is there."""
    groups = sizes_of(embedding=embedding, head=head, rest=rest)
    assert peak_gradient_bytes(groups, "none") == 4 * first
    assert peak_gradient_bytes(groups, "shards") == 4 * shares
    assert peak_gradient_bytes(groups, "full") == 4 * full


class Odd(nn.Module):
    """Blocks between two ends, made wrong by each test."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.ends = [self.first], [self.head]


def tie_blocks(model: Odd) -> None:
    model.blocks[1].weight = model.blocks[0].weight


def tie_block_and_head(model: Odd) -> None:
    model.head.weight = model.blocks[0].weight


def tie_ends(model: Odd) -> None:
    model.head.weight = model.first.weight


def add_scalar(model: Odd) -> None:
    model.head.scale = nn.Parameter(torch.ones(()))


def add_empty(model: Odd) -> None:
    model.head.scale = nn.Parameter(torch.ones(0, 3))


def transpose(model: Odd) -> None:
    model.head.weight = nn.Parameter(torch.ones(4, 3).T)


def mix_types(model: Odd) -> None:
    model.blocks[0].weight.data = model.blocks[0].weight.data.double()


def name_another(model: Odd) -> None:
    model.ends = [nn.Linear(4, 4)], [model.head]


@pytest.mark.parametrize(
    "spoil, words",
    [
        (tie_blocks, "'blocks.0.weight' and 'blocks.1.weight' are one parameter"),
        (tie_block_and_head, "'blocks.0.weight' and 'head.weight' are one parameter"),
        (tie_ends, "'first.weight' and 'head.weight' are one parameter"),
        (add_scalar, r"'head.scale' of shape \(\) has no rows"),
        (add_empty, r"'head.scale' of shape \(0, 3\) has no rows"),
        (transpose, "'head.weight' is not contiguous"),
        (mix_types, "trained parameters of 'blocks.0' are of several data types, torch.float32, "),
        (name_another, "`ends` of Odd list a Linear that is not a submodule of"),
    ],
)
def test_what_cannot_be_gathered_is_refused(spoil, words: str) -> None:
    model = Odd()
    spoil(model)
    with pytest.raises(StrategyError, match=words):
        groups_of(Target(Strategy(), skeleton_of(model)))


def test_a_narrower_frozen_weight_is_stored_and_gathered_in_its_own_type() -> None:
    model = Odd().requires_grad_(False)
    model.blocks.bfloat16()
    model.blocks[1].bias = nn.Parameter(model.blocks[1].bias.float())
    target = Target(Strategy.parse("fsdp2"), skeleton_of(model), torch.float32)
    first, second = groups_of(target)[1:3]
    assert first.parameter_bytes == first.gathered_bytes == 2 * 20
    assert second.parameter_bytes == second.gathered_bytes == 2 * 16 + 4 * 4
    assert second.shard_bytes == 2 * 4


def test_a_list_of_modules_is_refused() -> None:
    with pytest.raises(StrategyError, match="is a ModuleList, which has no forward"):
        groups_of(Target(Strategy(), skeleton_of(Odd().blocks)))


EXPERTS = dataclasses.replace(
    TIED, num_layers=2, tied=False, experts=ExpertShape(num_experts=4, top_k=2, ffn=12)
)


def expert_groups(text: str) -> list[Group]:
    with torch.device("meta"):
        model = Decoder(EXPERTS)
    target = Target(Strategy.parse(text), skeleton_of(model))
    return groups_of(ExpertSplit(target).next_target() if "ep" in text else target)


@pytest.mark.parametrize(
    "text, num_shards, dims",
    [
        ("fsdp2,ep2", (4, 2), [0, 0, 0]),
        ("fsdp3,ep2", (6, 3), [1, 1, 2]),  # 2 experts of a rank, of inner size 12
        ("fsdp2,cp2,ep2", (8, 4), [1, 1, 1]),
    ],
)
def test_experts_are_a_group_beside_their_block(
    text: str, num_shards: tuple[int, int], dims: list[int]
) -> None:
    groups = expert_groups(text)
    of_blocks = [g for g in groups if g.place == "block"]
    assert sorted(g.names[0] for g in of_blocks) == ["blocks.0"] * 2 + ["blocks.1"] * 2
    assert {(g.axes, g.num_shards) for g in of_blocks} == {
        (DENSE, num_shards[0]),
        (EXPERT, num_shards[1]),
    }
    for group in (g for g in of_blocks if g.axes == EXPERT):
        assert [p.shape for p in group.parameters] == [(2, 12, 16), (2, 12, 16), (2, 16, 12)]
        assert [p.dim for p in group.parameters] == dims
        assert group.gathered_bytes == 4 * 3 * 2 * 12 * 16  # nothing is padded
        assert group.shard_bytes * num_shards[1] == group.gathered_bytes
    assert {g.names[0] for g in groups if g.stays_gathered} == {"blocks.1", "norm"}


def test_without_ep_experts_belong_to_their_block() -> None:
    groups = expert_groups("fsdp3")
    assert [g.names[0] for g in groups if g.place == "block"] == ["blocks.0", "blocks.1"]
    assert {g.axes for g in groups} == {DENSE}
    assert [p.dim for p in groups[1].parameters if len(p.shape) == 3] == [1, 1, 2]


def test_gathers_and_gradients_of_a_block_count_its_experts() -> None:
    """Blocks of 800 elements, 300 of them in experts, count as blocks of 800."""
    groups = sizes_of(embedding=1200, head=400, rest=40)
    divided: list[Group] = []
    for number, each in enumerate(groups):
        if each.place == "block":
            for size, axes in ((500, DENSE), (300, EXPERT)):
                part = dataclasses.replace(group("block", size), names=(f"{number}",), axes=axes)
                divided.append(part)
        else:
            divided.append(each)
    assert peak_gathered_bytes(divided, 1) == peak_gathered_bytes(groups, 1)
    full = peak_gradient_bytes(groups, "full")
    assert peak_gradient_bytes(divided, "full") == full


def test_uneven_shards_of_experts_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"5 shards, which no dimension .* write 'ep2'"):
        expert_groups("fsdp5,ep2")
