import pytest
import torch
from torch import nn

from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.skeleton import blocks_of, skeleton_of_shape


def test_the_blocks_of_a_decoder() -> None:
    shape = ModelShape(
        vocab_size=11,
        num_layers=3,
        hidden=8,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        ffn=8,
        max_seq_len=8,
    )
    decoder = Decoder(shape)
    assert blocks_of(decoder) == [(f"blocks.{i}", decoder.blocks[i]) for i in range(3)]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2)])


@pytest.mark.parametrize("first_dense", [0, 1, 3])
def test_a_shape_with_experts_has_the_parameters_of_its_model(first_dense: int) -> None:
    """One block of each kind stands for the others, under its own name."""
    experts = ExpertShape(num_experts=4, top_k=2, ffn=8, first_dense=first_dense)
    shape = ModelShape(
        vocab_size=16, num_layers=5, hidden=8, num_heads=2, num_kv_heads=2, head_dim=4, ffn=12,
        max_seq_len=8, experts=experts,
    )  # fmt: skip
    found = skeleton_of_shape(shape, torch.float32)
    model = Decoder.on_meta(shape, torch.float32)
    assert [each.shape for each in found.parameters()] == [p.shape for p in model.parameters()]
    named = {name for weight in found.weights for name in found.named(weight.name)}
    assert named == {name for name, _ in model.named_parameters()}
    # A stage of the last two blocks has them alone.
    stage = found.part([], [f"blocks.{at}" for at in range(3)])
    names = {name for weight in stage.weights for name in stage.named(weight.name)}
    assert {name.split(".")[1] for name in names if name.startswith("blocks.")} == {"3", "4"}


def test_only_the_outermost_lists_count_and_containers_are_no_blocks() -> None:
    shared = Experts()
    model = nn.ModuleDict(
        {
            "stages": nn.ModuleList(
                [nn.ModuleList([shared, Experts()]), nn.ModuleList([Experts()])]
            ),
            "again": nn.ModuleList([shared]),
            "head": nn.Linear(2, 2),
        }
    )
    assert [name for name, _ in blocks_of(model)] == ["stages.0.0", "stages.0.1", "stages.1.0"]
    assert blocks_of(nn.Linear(2, 2)) == []
