"""The reference: a training step in plain PyTorch that shares no code with `train.step`.

One process computes each global batch at once. The loss normalization, the norm, clipping, the
learning-rate schedule, Muon and the dropout masks are implemented again here, AdamW is torch's, and
the decoder is `PlainDecoder`. So an error common to all strategies of the trainer, one process
included, is found too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.comm.ledger import Phase, no_phase
from phalanx.config import OptimizerConfig
from phalanx.data.rows import cast_batch, count_rows, take_rows
from phalanx.models.decoder import Decoder
from phalanx.verify.plain import Masks, PlainDecoder, PlainRouter
from phalanx.verify.settings import ROUTING, STATE

if TYPE_CHECKING:
    from phalanx.verify.record import Case

NORMS = (1.0, 2.0, math.inf)
"""Values of p of the norms that are compared, whichever norm is used for clipping."""


MOMENTS = {"first moment": "exp_avg", "second moment": "exp_avg_sq"}
"""AdamW's moments -> their keys in torch's optimizer state."""

Values = Mapping[str, Tensor | float]
"""Values of one quantity of a step, by parameter name; norms by p; a single value by ""."""

StepRecord = Mapping[str, Values]
"""Quantities of one step: `loss`, `buffer`, `gradient` and `norm` before clipping, `learning rate`,
both moments and `weight`.

Tensors are full and on the CPU; quantities are in the order in which a step computes them.
"""


class Routed(NamedTuple):
    """What the scores of a router select for each token of a batch, and by what margin."""

    selected_BTE: Tensor
    margins_BT: Tensor


@dataclass(frozen=True)
class Training:
    """Optimizer, scheduler and clipping of a user's `Trainer`, for the reference.

    Attributes:
        optimizer: creates the optimizer from the parameters.
        scheduler: creates the scheduler from the optimizer; it is stepped after each step.
        max_norm: largest 2-norm of the gradient, to which a larger one is scaled; 0: no clipping.
        pieces: number of microbatches of a batch on one process; BatchNorm takes each separately.
    """

    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    scheduler: Callable[[Any], Any] | None = None
    max_norm: float = 0.0
    pieces: int = 1


class ReferenceRun:
    """The reference run of a case, which takes steps in plain PyTorch."""

    def __init__(self, case: Case, device: torch.device, *, perturbation: int = 0) -> None:
        """Build the model and the optimizer; for `perturbation` see `begin_from`."""
        self._case = case
        self._device = device
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        build, self._objective = case.reference or (case.build, case.objective)
        self.model = in_training(_in_plain(build())).to(device, self._dtype)
        if perturbation:
            _perturb(self.model, perturbation)
        own = case.training
        self._optimizer = (
            own.optimizer(self.model.parameters())
            if own
            else _optimizer(self.model, case.optimizer)
        )
        self._scheduler = own and own.scheduler and own.scheduler(self._optimizer)
        self._masks = Masks(self.model, case.dropout_seed)
        self._decoders = [m for m in self.model.modules() if isinstance(m, PlainDecoder)]
        self._routers = {n: m for n, m in self.model.named_modules() if isinstance(m, PlainRouter)}

    def steps(self, phase: Phase = no_phase) -> Iterator[StepRecord]:
        """Take the steps one by one, with `phase("forward")` around each forward."""
        for step in range(len(self._case.batches)):
            made = self.compute(step, phase)
            yield {**made, **self.update(step, made)}

    def compute(self, step: int, phase: Phase = no_phase) -> StepRecord:
        """Compute the gradients of a step; return the quantities that precede the update."""
        batch = self._case.batches[step]
        moved = cast_batch(batch, self._dtype, self._device)
        num_valid = int(self._objective.num_valid(moved))
        self.model.zero_grad(set_to_none=True)
        # With `training`, rows are numbered across all steps, otherwise from 0 in each step.
        own, batches = self._case.training, self._case.batches
        first = sum(count_rows(each) for each in batches[:step]) if own else 0
        loss = torch.zeros((), dtype=torch.float64)
        for rows in torch.arange(count_rows(batch)).tensor_split(own.pieces if own else 1):
            piece = take_rows(moved, rows)
            self._masks.begin(step, first + rows)
            with phase("forward"):
                loss_sum = self._objective.loss_sum(self.model, piece, step)
            share = loss_sum / max(1, num_valid)
            for decoder in self._decoders:
                share = share + decoder.auxiliary_loss()
            share.backward()
            loss += share.detach().cpu()
        named = self.model.named_parameters()
        gradients = dense({n: p.grad for n, p in named if p.grad is not None})
        # The biases of routers, a plain decoder's buffers, change in the update.
        buffers = {} if self._routers else {"buffer": _copied(dict(self.model.named_buffers()))}
        return {
            "loss": {"": float(loss)},
            **buffers,
            "gradient": _copied(gradients),
            "norm": {f"{p:g}": norm_of(list(gradients.values()), p) for p in NORMS},
        }

    def update(self, step: int, made: StepRecord) -> StepRecord:
        """Clip the gradients and step the optimizer; `made` has their norms and the loss.

        Skip both if the loss or the 2-norm is not finite.
        """
        settings, own = self._case.optimizer, self._case.training
        numbers = [made["loss"][""], made["norm"]["2"]]
        groups = self._optimizer.param_groups
        if own is None:
            for group in groups:
                group["lr"] = rate_at(settings, step, len(self._case.batches))
        rates = {str(number) if number else "": group["lr"] for number, group in enumerate(groups)}
        rates = rates if own else {"": rates[""]}
        if all(math.isfinite(number) for number in numbers):
            p, limit = (2, own.max_norm) if own else (settings.clip_p, settings.clip_norm)
            norm = float(made["norm"][f"{p:g}"])
            for parameter in self.model.parameters() if 0 < limit < norm else ():
                if parameter.grad is not None:
                    parameter.grad *= limit / (norm + 1e-6)
            self._optimizer.step()
            for decoder in self._decoders:
                decoder.update_biases()
        if self._scheduler is not None:
            self._scheduler.step()
        made = {"learning rate": rates, **self.state()}
        return made if self._routers else {q: of for q, of in made.items() if q != "buffer"}

    def _kept(self) -> StepRecord:
        """Return the optimizer state of each parameter, by quantity."""
        states = {n: self._optimizer.state.get(p, {}) for n, p in self.model.named_parameters()}
        kept: dict[str, Values] = {} if self._case.training else {what: {} for what in MOMENTS}
        return {**kept, **{q: _copied(of) for q, of in kept_by(states).items()}}

    @torch.no_grad()
    def evaluate(self, phase: Phase = no_phase) -> Tensor:
        """Return `Case.infer` of the last batch in `eval()`."""
        moved = cast_batch(self._case.batches[-1], self._dtype, self._device)
        with evaluating(self.model), phase("forward"):
            return self._case.infer(self._objective, self.model, moved).cpu()

    def state(self) -> StepRecord:
        """Return copies of the buffers, the optimizer state and the weights."""
        weights, buffers = self.model.named_parameters(), self.model.named_buffers()
        copied = {"buffer": _copied(dict(buffers)), **self._kept()}
        return {**copied, "weight": _copied(dict(weights))}

    def routed(self) -> dict[str, Routed]:
        """Return what each router of a plain decoder has selected in the last forward."""
        return {
            name: Routed(router.selected.cpu(), router.margins.cpu())
            for name, router in self._routers.items()
        }

    @torch.no_grad()
    def begin_from(self, state: StepRecord, perturbation: int = 0) -> None:
        """Set weights, buffers and moments to `state`, such as the record of a step.

        Forwards replay the routes in `state`, if any, by router: experts [B, T, k].
        A `perturbation` above 0 is the seed of a random relative change of each weight by plus or
        minus the data type's epsilon.
        """
        for name, tensor in {**state["weight"], **state["buffer"]}.items():
            held = self.model.get_parameter if name in state["weight"] else self.model.get_buffer
            held(name).copy_(torch.as_tensor(tensor))
        for name, router in self._routers.items():
            route = state.get(ROUTING, {}).get(name)
            router.replayed = None if route is None else torch.as_tensor(route)
        self._optimizer.state.clear()
        others = (each for each in state if each.startswith(f"{STATE} "))
        keys = MOMENTS | {each: each.removeprefix(f"{STATE} ") for each in others}
        for name, parameter in self.model.named_parameters():
            kept = {
                key: torch.as_tensor(state[quantity][name]).to(parameter, copy=True)
                for quantity, key in keys.items()
                if name in state.get(quantity, {})
            }
            if name in state.get("first moment", {}):
                kept["step"] = torch.as_tensor(state["step counter"][name]).clone()
            if kept:
                self._optimizer.state[parameter] = kept
        if perturbation:
            _perturb(self.model, perturbation)

    def take_gradients(self, gradients: Values) -> None:
        """Replace the gradients of the model by `gradients`, for the next update."""
        for name, parameter in self.model.named_parameters():
            given = gradients.get(name)
            parameter.grad = (
                None if given is None else torch.as_tensor(given).to(parameter, copy=True)
            )


def kept_by(states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer state, by quantity and parameter name, without step counters."""
    names = {key: quantity for quantity, key in MOMENTS.items()}
    found: dict[str, dict[str, Tensor]] = {}
    for name, state in states.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and (value.ndim or key in names):
                quantity = names.get(key, f"{STATE} {key}")
                found.setdefault(quantity, {})[name] = value
    return found


def in_training(model: nn.Module) -> nn.Module:
    """Put the model into training mode, unless it is; then its modules keep their modes."""
    return model if model.training else model.train()


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Put a model into `eval()` inside the block, and restore the mode of each module after."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    yield
    for module, is_training in modes.items():
        module.training = is_training


def dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, sparse ones (gradients of `nn.Embedding(sparse=True)`) as dense ones."""
    return {name: t.to_dense() if t.is_sparse else t for name, t in tensors.items()}


def norm_of(tensors: list[Tensor], p: float) -> float:
    """Return the p-norm of all tensors as one vector, computed in float64."""
    if math.isinf(p):
        return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)
    return float(sum(float(t.double().abs().pow(p).sum()) for t in tensors)) ** (1 / p)


def rate_at(settings: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate: linear warm-up, then half-cosine decay to the minimum."""
    warmup = settings.warmup_steps
    warmup = min(200, num_steps // 10) if warmup is None else warmup
    if step < warmup:
        return settings.lr / (warmup + 1) * (step + 1)
    share = (step - warmup) / max(1, num_steps - 1 - warmup)
    lowest = settings.lr * settings.min_lr_ratio
    return lowest + (settings.lr - lowest) * math.cos(math.pi / 2 * min(1.0, share)) ** 2


def _optimizer(model: nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    hidden = {n: p for n, p in trained.items() if settings.kind == "muon" and _is_hidden(n, p)}
    others = [p for n, p in trained.items() if n not in hidden]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    how: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "foreach": False,
        "fused": False,
    }
    if settings.kind == "adamw":
        return torch.optim.AdamW(groups, **how)
    return _PlainMuon([*groups, {"params": [*hidden.values()]}], settings, **how)


def _is_hidden(name: str, parameter: nn.Parameter) -> bool:
    """Return whether Muon updates a parameter: a matrix of a block, or a stack of experts."""
    in_block, is_selector = name.startswith("blocks."), "router" in name or "shared_gate" in name
    return in_block and not is_selector and parameter.ndim > 1


class _PlainMuon(torch.optim.AdamW):
    """Muon of the last group, in the data type of the parameter, and AdamW of the others.

    As published: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerConfig, **how: Any) -> None:
        super().__init__(groups, **how)
        self._settings = settings

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        every, settings = self.param_groups, self._settings
        self.param_groups = every[:-1]
        super().step(closure)
        self.param_groups = every
        rate = every[-1]["lr"] * (settings.matrix_lr or settings.lr) / settings.lr
        for parameter in every[-1]["params"]:
            if parameter.grad is None:
                continue
            momentum, gradient = settings.momentum, parameter.grad
            mean = self.state[parameter].get("momentum_buffer", torch.zeros_like(gradient))
            mean = momentum * mean + (1 - momentum) * gradient
            self.state[parameter]["momentum_buffer"] = mean
            ahead = momentum * mean + (1 - momentum) * gradient if settings.nesterov else mean
            parameter *= 1 - rate * settings.weight_decay
            each = (parameter, ahead) if ahead.ndim == 3 else (parameter[None], ahead[None])
            for rows, matrix in zip(*each, strict=True):
                by_size = max(1.0, len(rows) / rows.shape[1]) ** 0.5
                if settings.adjust_lr == "match_rms_adamw":
                    by_size = 0.2 * max(rows.shape) ** 0.5
                rows -= rate * by_size * _polar(matrix, settings.ns_steps)


def _polar(matrix: Tensor, num_steps: int) -> Tensor:
    """Return the orthogonal factor of a matrix, about: its singular values are driven to 1."""
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(num_steps):
        outer = x @ x.T if len(x) <= x.shape[1] else x.T @ x
        change = 2.0315 * outer @ outer - 4.7750 * outer
        x = 3.4445 * x + (change @ x if len(x) <= x.shape[1] else x @ change)
    return x


def _in_plain(model: nn.Module) -> nn.Module:
    """Return a model with plain ones for decoders, whose experts leave losses to `train.step`."""
    for name, child in model.named_children():
        setattr(model, name, _in_plain(child))
    if not isinstance(model, Decoder) or model.shape.experts is None or model.shape.lora:
        return model
    with torch.device("meta"):  # without a draw
        made = PlainDecoder(model.shape)
    made.load_state_dict(model.state_dict(), assign=True)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    return made


def _perturb(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            signs = signs.to(parameter.device, parameter.dtype)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
