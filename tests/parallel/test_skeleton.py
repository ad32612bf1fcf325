from torch import nn

from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.skeleton import blocks_of


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
