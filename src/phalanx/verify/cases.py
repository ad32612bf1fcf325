"""The decoders that `phalanx verify` runs: awkward shapes and weights, beside a plain twin."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import nn

from phalanx.config import OptimizerConfig
from phalanx.errors import StrategyError
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Axis, Strategy
from phalanx.train.objective import NextToken
from phalanx.verify.batches import decoder_batches
from phalanx.verify.plain import PlainDecoder, PlainNextToken
from phalanx.verify.record import Case

MOST_RANKS = 6
"""Ranks that are started for an axis of three where the strategy has one of two."""


OPTIMIZER = OptimizerConfig(lr=1e-2, clip_norm=0.2, warmup_steps=0)
"""A rate by which weights move far, and a limit that every step's gradient is cut to."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is done with a shape.

    Attributes:
        steps: optimizer steps.
        accumulation: microbatches of each data rank.
        seq_len: tokens of a row.
        dtype: of weights and arithmetic.
        seed: of weights, batches and masks.
        num_rows: of a global batch; an odd number that leaves shares uneven if None.
        optimizer: AdamW's settings.
        device: "cpu" or "cuda".
    """

    steps: int = 4
    accumulation: int = 2
    seq_len: int = 17
    dtype: str = "float64"
    seed: int = 0
    num_rows: int | None = None
    optimizer: OptimizerConfig = OPTIMIZER
    device: str = "cpu"


def awkward_shapes(strategy: Strategy) -> dict[str, ModelShape]:
    """Return two small shapes which between them have every layer of our decoders.

    Sizes are odd where the strategy allows it: tp divides heads and widths, and beside fsdp some
    layouts want an even vocabulary.
    """
    unit = strategy.tp.degree if strategy.tp.degree > 1 else 3
    llama = ModelShape(
        vocab_size=67, num_layers=2, hidden=6 * unit, num_heads=2 * unit, num_kv_heads=unit,
        head_dim=4, ffn=11 * unit, max_seq_len=32, qk_norm=True, tied=True, dropout=0.1,
    )  # fmt: skip
    gpt2 = dataclasses.replace(
        llama, num_kv_heads=2 * unit, norm="layer", position="learned", mlp="gelu", bias=True,
        qk_norm=False, tied=False, dropout=0.2,
    )  # fmt: skip
    return {"llama": _that_fits(llama, strategy), "gpt2": _that_fits(gpt2, strategy)}


def _that_fits(shape: ModelShape, strategy: Strategy) -> ModelShape:
    """Return the shape, with an even vocabulary where the strategy refuses an odd one."""
    if splits(shape, strategy):
        return shape
    return dataclasses.replace(shape, vocab_size=2 * strategy.tp.degree * 17)


def splits(shape: ModelShape, strategy: Strategy) -> bool:
    """Return whether the strategy can split a decoder of this shape."""
    try:
        plan_decoder(strategy, shape)
    except StrategyError:
        return False
    return True


def initial_decoder(shape: ModelShape, seed: int) -> Decoder:
    """Return a float64 decoder with its first weights; norms and biases are no ones and zeros."""
    model = Decoder(shape).to(torch.float64)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).double()
    return model


def plain_decoder(shape: ModelShape, seed: int) -> nn.Module:
    """Return the plain decoder with the weights of `initial_decoder`."""
    return as_plain(initial_decoder(shape, seed))


def as_plain(decoder: Decoder) -> PlainDecoder:
    """Return the plain decoder with the weights of a float64 one."""
    model = PlainDecoder(decoder.shape).to(torch.float64)
    model.load_state_dict(decoder.state_dict())
    return model


def decoder_case(shape: ModelShape, strategy: Strategy, settings: Settings) -> Case:
    """Return a case of a decoder, whose reference is a plain one."""
    num_places, seed = strategy.data_ranks, settings.seed
    num_rows = settings.num_rows or 3 * settings.accumulation * num_places // 2 * 2 + 1
    return Case(
        functools.partial(initial_decoder, shape, seed),
        NextToken(seed, shape.dropout),
        decoder_batches(shape, settings.steps, num_rows, settings.seq_len, num_places, seed),
        settings.accumulation,
        settings.dtype,
        settings.optimizer,
        reference=(
            functools.partial(plain_decoder, shape, seed),
            PlainNextToken(seed, shape.dropout),
        ),
        device=settings.device,
    )


def with_three(strategy: Strategy) -> Strategy | None:
    """Return the strategy with three ranks on an axis that has two, the innermost that may.

    What two ranks send to each other has one order only; three show more.

    Returns:
        None if an axis has more than two already, or none may have three.
    """
    if any(axis.degree > 2 for _, axis in strategy.axes()):
        return None
    return next(_wider(strategy), None)


def _wider(strategy: Strategy) -> Iterator[Strategy]:
    for name in ("fsdp", "dp", "tp"):
        axis: Axis = getattr(strategy, name)
        if axis.degree == 2 and (name != "tp" or axis.kind in ("1d", "megatron")):
            wider = dataclasses.replace(strategy, **{name: dataclasses.replace(axis, degree=3)})
            if wider.num_ranks <= MOST_RANKS:
                yield wider
