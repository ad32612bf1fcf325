"""Benchmark of each layer of a decoder, and the best cut into pipeline stages by these times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from phalanx.account.fit import check_fit
from phalanx.account.planned import DecoderModel, PlannedStep
from phalanx.bench.verb import BenchResult, DecoderConfig, PrintLine
from phalanx.config.fields import Positional, Range
from phalanx.config.schema import MOST_ROWS
from phalanx.errors import ConfigError
from phalanx.launch.process_memory import keep_freed_memory
from phalanx.measure.environment import has_fast_bfloat16
from phalanx.models.decoder import Decoder
from phalanx.models.random import row_keys
from phalanx.models.registry import shape_of, with_sizes
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import chain_flops, ranges_of
from phalanx.parallel.pipeline.measured import link_times, with_best_cut
from phalanx.parallel.pipeline.partition import imbalance, stage_costs
from phalanx.parallel.pipeline.stage import DecoderStages
from phalanx.parallel.plan import plan_decoder
from phalanx.report.tabular import Number, Table
from phalanx.report.units import percent
from phalanx.strategy import Strategy, require_built


@dataclass(frozen=True, kw_only=True)
class CutConfig(DecoderConfig):
    """Measure the layers of a decoder one by one, and cut it into stages by their times."""

    strategy: Annotated[str, Positional("[STRATEGY]")] = "pp2"
    """A strategy with pp, such as pp4 or pp2:zbv."""
    microbatch: Annotated[int, Range(1, MOST_ROWS, "[]")] = 4
    """Sequences in one forward pass."""
    rounds: Annotated[int, Range(1)] = 7
    """Rounds; each runs every layer once."""

    @property
    def model_shape(self) -> ModelShape:
        """Shape of the decoder; `max_seq_len` is at least `seq_len`."""
        sizes = with_sizes(shape_of(self.model), self.shape)
        return dataclasses.replace(sizes, max_seq_len=max(self.seq_len, sizes.max_seq_len))


def run(config: CutConfig, say: PrintLine) -> BenchResult:
    """Measure the layers; return tables of the layers and of the cuts by FLOPs and by times."""
    strategy, shape = Strategy.parse(config.strategy), config.model_shape
    require_built(strategy)
    if strategy.pp.degree == 1 or strategy.cut:
        raise ConfigError(
            f"strategy is '{config.strategy}'; expected one with pp, such as pp2, and without a "
            "cut, because this verb finds the cut"
        )
    plain = Strategy(pp=strategy.pp, dp=strategy.dp, fsdp=strategy.fsdp)
    if strategy != plain:
        raise ConfigError(
            f"strategy is '{config.strategy}'; layers are timed unsplit on one rank, so the "
            f"strategy can have only pp, dp and fsdp; the nearest is {plain}"
        )
    model = DecoderModel(shape, config.seq_len, config.precision, moments=0)
    alone = PlannedStep(model, Strategy(), config.microbatch, 1)
    check_fit(alone, config.model, 1, has_activations=False)
    cut = plan_decoder(strategy, shape).cut
    assert cut is not None, "the strategy has pp"
    by_flops = dataclasses.replace(strategy, cut=tuple(map(len, cut)))
    keep_freed_memory()  # as ranks in training do
    torch.set_num_threads(config.threads or 1)
    precision = config.precision
    if precision == "auto":
        precision = "bfloat16" if has_fast_bfloat16("cpu") else "float32"
    say(f"{shape.num_layers + 2} layers, {1 + config.rounds} rounds in {precision} ...")
    times = measure(config, shape, precision)
    of_both = [forward_s + backward_s for forward_s, backward_s in times]
    by_times = with_best_cut(strategy, of_both)
    cuts = {"FLOPs": by_flops, "times": by_times}
    return BenchResult(
        name=f"cut-{config.model}-pp{strategy.pp.degree}",
        shown=[
            _table_of_layers(shape, times),
            _table_of_cuts(cuts, of_both),
            f"phalanx train --strategy {by_times}",
        ],
        values={
            "shape": dataclasses.asdict(shape),
            "precision": precision,
            "microbatch": config.microbatch,
            "seq_len": config.seq_len,
            "threads": torch.get_num_threads(),
            "forward_s": [forward_s for forward_s, _ in times],
            "backward_s": [backward_s for _, backward_s in times],
            "cuts": {by: str(cut) for by, cut in cuts.items()},
        },
    )


def measure(config: CutConfig, shape: ModelShape, precision: str) -> list[tuple[float, float]]:
    """Return the median seconds of forward and backward of embedding, each block and head."""
    compute: torch.dtype = getattr(torch, precision)
    model = Decoder(shape).to(torch.float64 if precision == "float64" else torch.float32).train()
    model.compute_dtype = compute
    model.initialize(0)
    num_links = shape.num_layers + 2
    stages = DecoderStages(model, ranges_of([1] * num_links), range(num_links))
    draw = torch.Generator().manual_seed(0)
    size = (config.microbatch, config.seq_len + 1)
    tokens = torch.randint(shape.vocab_size, size, generator=draw)
    keys = row_keys(0, 0, torch.arange(config.microbatch)) if shape.dropout else None

    def forward() -> torch.Tensor:
        return model(tokens[:, :-1], tokens[:, 1:], dropout_keys_B=keys)

    return link_times(stages, forward, config.rounds)


def _table_of_layers(shape: ModelShape, times: Sequence[tuple[float, float]]) -> Table:
    flops, whole = chain_flops(shape), sum(sum(each) for each in times)
    names = ["embedding", *(f"block {at}" for at in range(shape.num_layers)), "norm and head"]
    rows = [
        (name, *each, sum(each) / whole, of_flops / sum(flops))
        for name, each, of_flops in zip(names, times, flops, strict=True)
    ]
    ms = (Number(f"{name} ms", ".2f", 1e-3) for name in ("forward", "backward"))
    shares = (Number(f"of {name}", percent) for name in ("time", "FLOPs"))
    return Table("", ["layer", *ms, *shares], rows)


def _table_of_cuts(cuts: dict[str, Strategy], times: Sequence[float]) -> Table:
    rows: list[tuple[str, str, float, float]] = []
    for by, strategy in cuts.items():
        stages = ranges_of(strategy.cut)
        slowest_s = max(stage_costs(times, stages))
        layers = "+".join(map(str, strategy.cut))
        rows.append((by, layers, slowest_s, imbalance(times, stages)))
    numbers = Number("slowest stage, ms", ".2f", 1e-3), Number("slowest / mean", ".2f")
    return Table("", ("cut by", "layers", *numbers), rows)
