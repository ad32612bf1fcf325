"""Cases of `phalanx verify`: decoders with awkward shapes, with plain references, and modules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

import torch
from torch import Tensor, nn

from phalanx.account.fit import check_fit
from phalanx.account.planned import decoder_step
from phalanx.comm.axes import AXIS_SETS
from phalanx.config import OptimizerConfig
from phalanx.data.samples import Batch
from phalanx.errors import ConfigError, StrategyError
from phalanx.models.decoder import Decoder
from phalanx.models.registry import shape_of, with_sizes
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.pipeline.cut import num_stages
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken, Objective
from phalanx.verify.batches import decoder_batches
from phalanx.verify.plain import PlainDecoder, PlainNextToken
from phalanx.verify.record import Case
from phalanx.verify.settings import VerifyConfig

MOST_TOKENS = 1 << 24
"""Most tokens of all steps together, because one process holds all of them in memory at once."""

MOST_RANKS = 6
"""Most ranks that are started when `with_three` widens an axis from two ranks to three."""


def awkward_shapes(strategy: Strategy) -> dict[str, ModelShape]:
    """Return small shapes that together contain every kind of layer of `Decoder`.

    Sizes are odd where the strategy allows it: tp divides heads and widths, Ulysses divides heads,
    and with fsdp some layouts need an even vocabulary.
    """
    of_tp = strategy.tp.degree if strategy.tp.degree > 1 else 3
    by_heads = strategy.cp.degree if strategy.cp.kind == "ulysses" else 1
    unit = next(u for u in count(of_tp, of_tp) if 2 * u % (strategy.tp.degree * by_heads) == 0)
    # Every stage of a pipeline has a block, and one has two, unless the cut sets the number.
    num_layers = 2 if strategy.pp.degree == 1 else num_stages(strategy) + 1
    num_layers = max(1, sum(strategy.cut) - 2) if strategy.cut else num_layers
    llama = ModelShape(
        vocab_size=67, num_layers=num_layers, hidden=6 * unit, num_heads=2 * unit,
        num_kv_heads=unit, head_dim=4, ffn=11 * unit, max_seq_len=32, qk_norm=True, tied=True,
        dropout=0.1, window=12, full_every=2,  # more positions than a rank of cp holds
    )  # fmt: skip
    gpt2 = dataclasses.replace(
        llama, num_kv_heads=2 * unit, norm="layer", position="learned", mlp="gelu", bias=True,
        qk_norm=False, tied=False, dropout=0.2, window=None, full_every=None,
    )  # fmt: skip
    windowed = dataclasses.replace(
        llama, norm="rms+1", norm_at="both", window=5, full_every=2, window_theta=100.0,
        mlp="geglu", bias="qkv", qk_norm="projection", scaled_embedding=True,
    )  # fmt: skip
    shapes = {"llama": llama, "gpt2": gpt2, "windowed": windowed}
    if (num_ranks := strategy.ep.degree) > 1:  # which splits nothing else
        of_llama = ExpertShape(
            num_experts=3 * num_ranks, top_k=2, ffn=5 * unit, shared_ffn=3 * unit,
            has_shared_gate=True, aux_loss=0.01, z_loss=0.001,
        )  # fmt: skip
        of_windowed = ExpertShape(
            num_experts=4 * num_ranks, top_k=3, ffn=5 * unit, score="sigmoid", renormalizes=True,
            scaling=2.5, num_groups=2 * num_ranks, top_groups=2, has_bias=True, bias_rate=0.01,
        )  # fmt: skip
        with_limit = dataclasses.replace(of_llama, has_shared_gate=False, capacity=1.0)
        shapes = {
            "llama": dataclasses.replace(llama, experts=of_llama),
            "capacity": dataclasses.replace(llama, experts=with_limit),
            "windowed": dataclasses.replace(windowed, experts=of_windowed),
        }
    even = 2 * strategy.tp.degree * 17
    return {
        name: shape if splits(shape, strategy) else dataclasses.replace(shape, vocab_size=even)
        for name, shape in shapes.items()
    }


def splits(shape: ModelShape, strategy: Strategy) -> bool:
    """Return whether the strategy can split a decoder of this shape."""
    try:
        plan_decoder(strategy, shape)
    except StrategyError:
        return False
    return True


def shapes_to_verify(config: VerifyConfig, strategy: Strategy) -> dict[str, ModelShape]:
    """Return the configured preset, or else the awkward shapes, with the configured sizes."""
    shapes = awkward_shapes(strategy)
    if config.model is not None:
        shapes = {config.model: shape_of(config.model)}
    return {name: with_sizes(shape, config.shape) for name, shape in shapes.items()}


def initial_decoder(shape: ModelShape, seed: int) -> Decoder:
    """Return a float64 decoder with its initial weights."""
    model = Decoder(shape).to(torch.float64)
    model.initialize(seed)
    return model


def awkward_decoder(shape: ModelShape, seed: int) -> Decoder:
    """Return a float64 decoder with noise on its norms and biases, initially ones and zeros."""
    model = initial_decoder(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).double()
    return model


def plain(decoder: Callable[[ModelShape, int], Decoder], shape: ModelShape, seed: int) -> nn.Module:
    """Return the plain decoder with the weights of `decoder(shape, seed)`."""
    model = PlainDecoder(shape).to(torch.float64)
    model.load_state_dict(decoder(shape, seed).state_dict())
    return model


def logits_of(objective: Objective, model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a decoder, [B, T, V]."""
    del objective
    return model(batch.tokens_BT, positions_BT=batch.positions_BT, documents_BT=batch.documents_BT)


def decoder_case(
    shape: ModelShape,
    batches: Sequence[Batch],
    seed: int,
    optimizer: OptimizerConfig,
    decoder: Callable[[ModelShape, int], Decoder] = awkward_decoder,
) -> Case:
    """Return a case of `decoder(shape, seed)`, whose reference is a `PlainDecoder`."""
    return Case(
        functools.partial(decoder, shape, seed),
        NextToken(seed, shape.dropout),
        batches,
        optimizer=optimizer,
        reference=(
            functools.partial(plain, decoder, shape, seed),
            PlainNextToken(seed, shape.dropout),
        ),
        infer=logits_of,
    )


def configured_cases(strategy: Strategy, config: VerifyConfig) -> dict[str, Case]:
    """Return all cases of a configuration: decoders, and modules such as users write."""
    shapes = shapes_to_verify(config, strategy)
    cases = {name: configured_case(shape, strategy, config) for name, shape in shapes.items()}
    if config.model is None:
        if strategy.pp.degree > 1 and config.accumulation is None:
            # A schedule is built for a multiple of the ranks, and cut: one case needs all of it.
            full = dataclasses.replace(config, accumulation=2 * strategy.pp.degree)
            name = "gpt2" if "gpt2" in shapes else "windowed"
            cases[name] = configured_case(shapes[name], strategy, full)
        accumulation, num_rows = _sizes(strategy, config)
        cases |= module_cases(strategy, config, num_rows, accumulation)
    return cases


def _sizes(strategy: Strategy, config: VerifyConfig) -> tuple[int, list[int]]:
    """Return the number of microbatches of a step, and the number of rows of each step.

    By default data ranks have unequal numbers of rows. The second step has more rows, in unequal
    microbatches, so that sizes change between steps. On one data rank the microbatches of all other
    steps are equal in size, so that a mix-up of two microbatches raises no shape error.
    """
    # Enough to fill, run and drain a pipeline; otherwise 3: first, middle and last microbatch.
    accumulation = config.accumulation or (3 if strategy.pp.degree == 1 else strategy.pp.degree + 1)
    least = accumulation * strategy.data_ranks
    usual, more = 2 * least + (strategy.data_ranks > 1), 3 * least + 1
    num_rows = [more if step == 1 else usual for step in range(config.steps)]
    return accumulation, [config.global_size or rows for rows in num_rows]


def check_sizes(config: VerifyConfig, strategy: Strategy) -> None:
    """Raise ConfigError if the model or the steps are too large for the reference's one process."""
    for name, shape in shapes_to_verify(config, strategy).items():
        load = decoder_step(shape, Strategy(), config.seq_len, 1, 1, config.dtype)
        check_fit(load, name, 1, has_activations=False)
    _, num_rows = _sizes(strategy, dataclasses.replace(config, steps=2))
    num_tokens = max(num_rows) * config.seq_len * config.steps
    if num_tokens > MOST_TOKENS:
        raise ConfigError(
            f"{config.steps:,} steps of {max(num_rows):,} rows of {config.seq_len:,} tokens are "
            f"{num_tokens:,} tokens, all of which one process computes, too; expected at most "
            f"{MOST_TOKENS:,}: lower steps, accumulation, global_size or seq_len"
        )


def configured_case(shape: ModelShape, strategy: Strategy, config: VerifyConfig) -> Case:
    """Return the case of a decoder with the configured settings, on awkward batches."""
    accumulation, num_rows = _sizes(strategy, config)
    batches = decoder_batches(
        shape, config.steps, num_rows, config.seq_len, strategy.data_ranks, config.seed
    )
    return dataclasses.replace(
        decoder_case(shape, batches, config.seed, config.optimizer),
        accumulation=accumulation,
        dtype=config.dtype,
        device=config.device,
    )


def with_three(strategy: Strategy) -> Strategy | None:
    """Return the strategy with one axis of two ranks widened to three, inner data axes first.

    Between two ranks every order of messages is the same; three ranks expose errors in the order.

    Returns:
        The wider strategy; None if an axis already has more than two ranks, or none can have three.
    """
    if any(axis.degree > 2 for _, axis in strategy.axes()):
        return None
    axes = dict(reversed([*strategy.axes()]))
    for name in sorted(axes, key=lambda name: name not in AXIS_SETS["data"]):
        if axes[name].degree == 2:
            with suppress(StrategyError):  # some kinds of an axis do not allow three ranks
                wider = strategy.with_degree(name, 3)
                if wider.num_ranks <= MOST_RANKS:
                    return wider
    return None


WIDTH = 6
"""Number of features of a row."""


class Twice(nn.Module):
    """Residual block that uses one weight twice, with dropout between; x[B, D] to y[B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        """Add to x the result of two uses of one linear map."""
        return x + self.map(self.dropout(self.map(x).tanh()))


class Reused(nn.Module):
    """`Twice` blocks between two linear maps; x[B, D] to y[B, 1]."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Twice() for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the first map, the blocks and the last map."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Normed(nn.Module):
    """BatchNorm, with statistics over all rows of the batch; x[B, D] to y[B, 1].

    The forward calls the modules in the reverse of the order in which they are registered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the first map, BatchNorm, tanh and the last map."""
        return self.last(self.norm(self.first(x)).tanh())


class SquaredError:
    """Objective: squared error of a module's output, with the sine of each row's sum as target."""

    def loss_sum(self, model: nn.Module, microbatch: Tensor, step: int) -> Tensor:
        """Return the sum of the squared errors of the rows."""
        del step
        return (model(microbatch) - microbatch.sum(-1, keepdim=True).sin()).square().sum()

    def num_valid(self, microbatch: Tensor) -> int:
        """Count the rows."""
        return len(microbatch)


def _seeded(seed: int, module: Callable[..., nn.Module], *sizes: int) -> nn.Module:
    torch.manual_seed(seed)
    return module(*sizes)


def module_cases(
    strategy: Strategy, config: VerifyConfig, num_rows: Sequence[int], accumulation: int
) -> dict[str, Case]:
    """Return cases of modules that the strategy splits without roles, with `num_rows` per step.

    The BatchNorm case takes each step's rows in one microbatch; a pipeline or servers exclude it.
    """
    if not strategy.has_whole_samples or strategy.cut or strategy.ep.degree > 1:
        return {}
    generator = torch.Generator().manual_seed(config.seed)
    batches = [
        torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) for count in num_rows
    ]
    case = functools.partial(
        Case,
        objective=SquaredError(),
        batches=batches,
        dtype=config.dtype,
        optimizer=config.optimizer,
        device=config.device,
        dropout_seed=config.seed,
    )
    blocks = functools.partial(_seeded, config.seed, Reused, num_stages(strategy) + 1)
    found = {"reused": case(blocks, accumulation=accumulation)}
    if strategy.pp.degree == 1 and not strategy.is_served:  # workers of servers share no statistics
        found["normed"] = case(functools.partial(_seeded, config.seed, Normed), batch_norm="global")
    return found
