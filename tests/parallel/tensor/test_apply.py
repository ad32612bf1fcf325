"""What apply() makes: parts of the first weights, and the private names of PyTorch that it uses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from parts import Cut
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan, shard_of
from phalanx.parallel.sharded import mesh_dims
from phalanx.strategy import Strategy

SHAPE = ModelShape(
    vocab_size=67, num_layers=2, hidden=32, num_heads=8, num_kv_heads=4, head_dim=4, ffn=48,
    max_seq_len=32, norm="layer", position="learned", bias=True,
)  # fmt: skip


def fill(part: Tensor, name: str, whole: tuple[int, ...], offset: tuple[int, ...]) -> None:
    fill_initial(SHAPE, 5, part, name, whole, offset)


def parts_made(text: str) -> tuple[int, list[tuple[str, list[int], Tensor]], dict[str, Tensor]]:
    """Return the elements held, each part with its name and place, and the whole parameters."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    with torch.device("meta"):
        model = Decoder(SHAPE)
    Plan(strategy, model).build(comm, fill)
    parts: list[tuple[str, list[int], Tensor]] = []
    for name, parameter in model.named_parameters():
        part, offset = shard_of(parameter)
        parts.append((name, list(offset), part.clone()))
    held = sum(part.numel() for _, _, part in parts)
    whole = {
        name: parameter.full_tensor().detach()
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
    }
    return held, parts, whole if dist.get_rank() == 0 else {}


@pytest.mark.parametrize(
    "text, num_parts",
    [
        ("tp2", 2), by_hand("dp2,tp4", 4), ("tp4:2d", 4), by_hand("tp8:2.5d/2", 4),
        by_hand("tp8:3d", 8), by_hand("fsdp2,tp4:2d", 8),
    ],
)  # fmt: skip
def test_first_weights_are_those_of_one_process_by_parts(text: str, num_parts: int) -> None:
    alone = Decoder(SHAPE)
    alone.initialize(5)
    expected = dict(alone.named_parameters())
    total = sum(p.numel() for p in expected.values())
    vectors = sum(p.numel() for p in expected.values() if p.ndim == 1)
    odd = SHAPE.vocab_size * SHAPE.hidden  # its parts are uneven, by a row of each table
    results = run_ranks(parts_made, Strategy.parse(text).num_ranks, text, threads=1)
    for held, parts, _ in results:
        assert held <= total / num_parts + vectors + 0.1 * odd + SHAPE.max_seq_len * SHAPE.hidden
        assert [name for name, _, _ in parts] == list(expected)
        for name, offset, part in parts:
            place = zip(offset, part.shape, strict=True)
            index = tuple(slice(first, first + size) for first, size in place)
            assert torch.equal(part, expected[name][index]), name
    whole = results[0][2]
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)


def shape_and_offset() -> tuple[list[int], list[int], list[int]]:
    cut = Cut("tp4:2d")
    places = (Shard(1), Shard(0))
    mesh = cut.comm.mesh
    shape, offset = compute_local_shape_and_global_offset((7, 6), mesh, places)
    whole = torch.arange(42).view(7, 6)
    index = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
    part = DTensor.from_local(
        whole[index],
        cut.comm.mesh,
        places,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    assert torch.equal(part.full_tensor(), whole)
    assert part.redistribute(placements=[Replicate(), Replicate()]).shape == (7, 6)
    return list(shape), list(offset), whole[index].flatten().tolist()[:1]


def test_where_parts_lie() -> None:
    """compute_local_shape_and_global_offset is of a private module."""
    assert run_ranks(shape_and_offset, 4, threads=1) == [
        ([4, 3], [0, 0], [0]),
        ([3, 3], [4, 0], [24]),
        ([4, 3], [0, 3], [3]),
        ([3, 3], [4, 3], [27]),
    ]


def test_fsdp_takes_the_names_of_its_axes() -> None:
    """DataParallelMeshDims is new in torch 2.12."""
    dims = mesh_dims()(shard="fsdp", replicate="dp")
    assert (dims.shard, dims.replicate) == ("fsdp", "dp")
