"""MFU of a plain multi-layer perceptron: an upper bound for the MFU of training on a device.

The model is a stack of square linear layers with ReLU. The input has as many rows as columns, so
every product is square, as in the ceiling's table. A step is forward, backward and optimizer, and
counts as 6 x layers x width^2 x rows FLOPs. There are two recipes:

    plain     parameters, gradients and optimizer state all in the data type under test, no biases,
              fused AdamW, one input for all steps. The input requires a gradient, as the layer's
              input would inside a larger model, so backward is exactly twice forward.
    lecture   a first version by a typical user: float32 parameters with biases, the data type under
              test by autocast, Adam with its defaults and lr 1e-4, the mean squared error between
              input and output as the loss, and a new random input inside each timed step. The input
              requires no gradient, so 1 / (3 layers) of the counted FLOPs are not executed.

The table also shows the two times whose quotient is the MFU: t_theoretical, the time of the counted
FLOPs at the ceiling, and t_actual, the median step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from phalanx.account.flops import Flops
from phalanx.bench.verb import (
    BenchResult,
    DeviceConfig,
    OnDevice,
    PrintLine,
    device_fields,
    resolve_device,
)
from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.measure.environment import MEMORY_SHARE, free_memory_bytes
from phalanx.measure.products import arithmetic_of, measure_matmul, quick_ceiling
from phalanx.measure.utilization import Utilization
from phalanx.report.output import values_of
from phalanx.report.tabular import Table
from phalanx.report.units import percent

Recipe = Literal["plain", "lecture"]

LARGEST_WIDTH = 8192
_SMALLEST_WIDTH = 256
_NUM_WARMUP = 1
_FEWEST_STEPS = 3
_MOST_STEPS = 50
_LIKELY_MFU = 0.6


@dataclass(frozen=True, kw_only=True)
class MlpRun(OnDevice):
    """The measured steps and utilization of a perceptron."""

    recipe: Recipe
    num_layers: int
    width: int
    num_rows: int
    choice: str
    """Reason for this width, in a sentence."""
    is_compiled: bool
    num_steps: int
    """Steps measured, after the warm-up."""
    best_step_s: float
    optimizer_s: float
    """Median seconds of the optimizer in a step."""
    utilization: Utilization
    """Utilization of the median step."""

    @property
    def theoretical_s(self) -> float:
        """Seconds that the counted FLOPs of a step take at the ceiling."""
        flops = _flops(self.num_layers, self.width).model
        return flops / (self.utilization.ceiling_flops_per_s or math.inf)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the table, each with a name and a text."""
        utilization = self.utilization
        rows = [
            ("layers x width, rows", f"{self.num_layers} x {self.width}, {self.num_rows}"),
            ("compiled", "yes" if self.is_compiled else "no"),
            ("steps measured", str(self.num_steps)),
            ("t_theoretical, at the ceiling", f"{self.theoretical_s:.4g} s"),
            ("t_actual, median (best)", f"{utilization.time_s:.4g} s ({self.best_step_s:.4g} s)"),
            ("optimizer, of t_actual", percent(self.optimizer_s / utilization.time_s)),
            ("rate", utilization.rate_text()),
        ]
        if utilization.peak is not None:
            rows.append(("MFU of data sheet", percent(utilization.mfu("data sheet"))))
        return [*rows, ("MFU of ceiling", percent(utilization.mfu("ceiling")))]


@dataclass(frozen=True, kw_only=True)
class MfuConfig(DeviceConfig):
    """Measure MFU and HFU of a plain perceptron: forward, backward and optimizer."""

    layers: Annotated[int, Range(1, 10_000, "[]")] = 8
    """Linear layers."""
    width: Annotated[int | None, Range(1)] = None
    """Rows and columns of each; the largest of 8192, 4096, ... for time and memory if unset."""
    compile: bool = False
    """Compile the perceptron with torch.compile."""
    recipe: Recipe = "plain"
    """lecture: float32 weights under autocast, biases, Adam, new inputs; reported next to plain."""


def run(config: MfuConfig, say: PrintLine) -> BenchResult:
    """Measure the perceptron; return a table and the formulas of its MFU."""
    del say
    recipes: tuple[Recipe, ...] = ("plain",) if config.recipe == "plain" else ("lecture", "plain")
    config = dataclasses.replace(config, budget_s=config.budget_s / len(recipes))
    results: list[MlpRun] = []
    for recipe in recipes:  # both recipes use the width of the first
        results.append(measure_mlp(dataclasses.replace(config, recipe=recipe)))
        config = dataclasses.replace(config, width=results[0].width)
    result, *beside = results
    name = f"mfu-{result.device}-{result.arithmetic}"
    name += "" if result.recipe == "plain" else f"-{result.recipe}"
    columns = [dict(each.rows()) for each in results]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    headings = ("recipe", *(each.recipe for each in results)) if beside else ("", "")
    return BenchResult(
        name=f"{name}-compiled" if result.is_compiled else name,
        shown=[
            f"MFU of a perceptron in {result.arithmetic}, {result.machine}",
            Table("", headings, rows, headings[1:]),
            result.choice,
            *(f"{each.recipe}: {each.utilization.text()}" for each in results),
        ],
        values=values_of(result) | ({"beside": values_of(beside)} if beside else {}),
    )


def measure_mlp(config: MfuConfig) -> MlpRun:
    """Train the perceptron for some steps, and compute its utilization from FLOPs and times.

    The ceiling is the best rate of quick products before the steps, and of the square product of
    the perceptron's width, before and after the steps in the same process.
    """
    device, arithmetic = resolve_device(config)
    ceiling = quick_ceiling(device, arithmetic)
    with arithmetic_of(arithmetic) as dtype:
        width, choice = _choose_width(config, device, dtype, ceiling)
        ceiling = max(ceiling, _square_rate(device, dtype, width))
        make = _lecture if config.recipe == "lecture" else _plain
        make_loss, optimizer = make(device, dtype, config.layers, width, config.compile)
        step_times_s: list[float] = []
        optimizer_times_s: list[float] = []
        begin_s = time.perf_counter()
        for step in range(_NUM_WARMUP + _MOST_STEPS):
            _wait(device)
            first_s = time.perf_counter()
            make_loss().backward()
            # Wait, so that the time of the optimizer does not include backward on a GPU.
            _wait(device)
            second_s = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            _wait(device)
            third_s = time.perf_counter()
            if step >= _NUM_WARMUP:
                step_times_s.append(third_s - first_s)
                optimizer_times_s.append(third_s - second_s)
            if len(step_times_s) >= _FEWEST_STEPS and third_s - begin_s > config.budget_s:
                break
        ceiling = max(ceiling, _square_rate(device, dtype, width))
    about = OnDevice(**device_fields(device, arithmetic))
    return MlpRun(
        **vars(about),
        recipe=config.recipe,
        num_layers=config.layers,
        width=width,
        num_rows=width,
        choice=choice,
        is_compiled=config.compile,
        num_steps=len(step_times_s),
        best_step_s=min(step_times_s),
        optimizer_s=statistics.median(optimizer_times_s),
        utilization=Utilization(
            causal=_flops(config.layers, width),
            full=None,
            time_s=statistics.median(step_times_s),
            num_devices=1,
            peak=about.peak,
            ceiling_flops_per_s=ceiling,
        ),
    )


def _flops(num_layers: int, width: int) -> Flops:
    return Flops(linear_forward=2 * num_layers * width**3, attention_forward=0)


def _choose_width(
    config: MfuConfig, device: torch.device, dtype: torch.dtype, flops_per_s: float
) -> tuple[int, str]:
    """Return the width to train with, given the ceiling, and a sentence with the reason."""
    free_bytes = free_memory_bytes(device)
    # Of each element of a layer's matrix: the parameter, its gradient, two moments and three
    # activations, all square; under autocast also a copy of the parameter in the narrower type.
    bytes_of_layer = 7 * dtype.itemsize
    if config.recipe == "lecture":
        bytes_of_layer = 4 * 4 + 4 * dtype.itemsize
    element_bytes = bytes_of_layer * config.layers
    if config.width is not None:
        need_bytes = element_bytes * config.width**2
        if need_bytes > free_bytes:
            raise ConfigError(
                f"width {config.width} needs about {need_bytes / 2**30:.1f} GiB, but "
                f"{free_bytes / 2**30:.1f} GiB are free on {device}; use a smaller --width"
            )
        return config.width, f"width {config.width}, as given by --width"
    # The largest width whose warm-up and fewest steps fit the time, at a likely MFU, and whose
    # parameters, moments and activations fit the memory.
    width = LARGEST_WIDTH
    while width > _SMALLEST_WIDTH:
        step_s = _flops(config.layers, width).model / (_LIKELY_MFU * flops_per_s)
        fits_time = (_NUM_WARMUP + _FEWEST_STEPS) * step_s <= config.budget_s
        if fits_time and element_bytes * width**2 <= MEMORY_SHARE * free_bytes:
            break
        width //= 2
    if width == LARGEST_WIDTH:
        return width, f"width {width}, as in the literature"
    limit = f"{config.budget_s:.0f} s and {free_bytes / 2**30:.1f} GiB of free memory"
    return width, f"width {width}, the largest power of two below {LARGEST_WIDTH} for {limit}"


def _square_rate(device: torch.device, dtype: torch.dtype, width: int) -> float:
    point = measure_matmul(device, dtype, width, width, width, budget_s=1.0)
    return point.best_flops_per_s


Steps = tuple[Callable[[], Tensor], torch.optim.Optimizer]
"""Function that returns the loss of a step, and the optimizer."""


def _plain(
    device: torch.device, dtype: torch.dtype, num_layers: int, width: int, compile: bool
) -> Steps:
    generator = torch.Generator(device).manual_seed(0)
    model = _perceptron(num_layers, width, compile, bias=False, device=device, dtype=dtype)
    for weight in model.parameters():
        nn.init.normal_(weight, std=(2 / width) ** 0.5, generator=generator)
    x = torch.randn(width, width, device=device, generator=generator).to(dtype)
    x.requires_grad_()

    def loss() -> Tensor:
        x.grad = None
        return model(x).square().mean()

    return loss, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def _lecture(
    device: torch.device, dtype: torch.dtype, num_layers: int, width: int, compile: bool
) -> Steps:
    master = torch.promote_types(dtype, torch.float32)
    model = _perceptron(num_layers, width, compile, device=device, dtype=master)

    def loss() -> Tensor:
        x = torch.randn(width, width, device=device, dtype=master)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != master):
            return nn.functional.mse_loss(model(x), x)

    return loss, torch.optim.Adam(model.parameters(), lr=1e-4)


def _perceptron(num_layers: int, width: int, compile: bool, **of_linear: Any) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(width, width, **of_linear), nn.ReLU()]
    model = nn.Sequential(*layers)
    if compile:
        model.compile()
    return model


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
