"""Record inputs, outputs and their gradients for every module, and align them with the reference.

The reference computes the global batch at once; a rank has some of its rows, under cp some of its
positions, and under tp some of the positions or features. So each rank slices from the reference's
tensor the shard that it should have, by cp's order of positions and tp's layout, and compares this
shard. No tensor is gathered, and the rank with the fault is found.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from phalanx.parallel.accumulate import Runner
from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.context.positions import PositionOrder
from phalanx.parallel.pipeline.stage import Absent
from phalanx.parallel.pipeline.unknown_tensor import UnknownTensor, received_for
from phalanx.parallel.plan import shard_of
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.spec import Spec
from phalanx.verify.compare import same

Contribution = tuple[tuple[int, ...], Tensor]
"""Offset of a part of a parameter, and its gradient."""


class Kind(Enum):
    """Role of a recorded tensor for its module."""

    INPUT = auto()
    OUTPUT = auto()
    OUTPUT_GRADIENT = auto()
    INPUT_GRADIENT = auto()


class Key(NamedTuple):
    """Identifies a tensor by its module, the call of the module, and its role in the call.

    Attributes:
        call: number of the module's call in one forward of the model.
        slot: path of the tensor in the arguments or results, such as "[0][1]".
    """

    module: str
    call: int
    kind: Kind
    slot: str


@dataclass(frozen=True)
class Event:
    """A copy of a tensor at the time of its module's call, or of its gradient in backward.

    Attributes:
        caller: name of the module whose forward made the call; None for a call of the model itself.
    """

    key: Key
    caller: str | None
    microbatch: int
    tensor: Tensor


class Recorder:
    """Hooks on every module of a model that record a step.

    Attributes:
        events: recorded tensors, in order of time.
        is_on: whether the current step is recorded; not at first.
        contribution: gradient of the parameter `suspect` from this rank, before reduction, with the
            offset of what it has of the parameter.
        gradient: reduced gradient of `suspect` in a step in which modules read copies.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: Runner | None = None,
        *,
        copies: bool = True,
        suspect: str | None = None,
    ) -> None:
        """Register the hooks.

        Args:
            model: model, already split by the strategy.
            runner: source of the number of the current microbatch; if None, there is only one.
            copies: whether modules read copies of their inputs, so that in-place writes do no harm;
                False gives views, for tp, which identifies its placeholders by their addresses.
            suspect: name of the parameter whose gradient is recorded before reduction.
        """
        self._model = model
        self.events: list[Event] = []
        self.is_on = False
        self.contribution: Contribution | None = None
        self.gradient: Tensor | None = None
        self._copies = copies
        self._suspect = suspect
        self._hooked: set[int] = set()
        self._calls: Counter[str] = Counter()
        self._stack: list[tuple[str, int]] = []
        self._runner = runner
        self._is_forward = False
        for name, module in model.named_modules():
            if isinstance(module, Absent):
                continue
            module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            module.register_forward_hook(partial(self._after, name))

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Track a phase of the step; reset the call counts at a forward."""
        if name == "forward":
            self._calls.clear()
            self._stack.clear()  # a pipeline stage leaves its forward early, with entries left
        if name == "clip" and self.is_on and self._copies and self._suspect is not None:
            suspect = dict(self._model.named_parameters()).get(self._suspect)
            if suspect is not None and suspect.grad is not None:
                self.gradient = suspect.grad.detach().clone()
        self._is_forward = name == "forward"
        try:
            yield
        finally:
            self._is_forward = False

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._stack.append((name, self._calls[name]))
        self._calls[name] += 1
        # The suspect is read by its owner, or by the model if the embedding is tied to the output.
        if self._suspect is not None and name in ("", self._suspect.rpartition(".")[0]):
            # Looked up at each call, because fsdp replaces the parameter by a gathered one.
            parameter = dict(self._model.named_parameters()).get(self._suspect)
            is_new = parameter is not None and id(parameter) not in self._hooked
            if parameter is not None and parameter.requires_grad and is_new:
                self._hooked.add(id(parameter))
                parameter.register_hook(self._add)  # from autograd, before any reduction
        return self._pass((args, kwargs), Kind.INPUT, Kind.INPUT_GRADIENT)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        del name, module, args
        output = self._pass(output, Kind.OUTPUT, Kind.OUTPUT_GRADIENT)
        self._stack.pop()
        return output

    def _pass(self, values: Any, *kinds: Kind) -> Any:
        """Record inputs or outputs of the module on the stack, and register their gradients."""
        name, call = self._stack[-1]
        caller = self._stack[-2][0] if len(self._stack) > 1 else None
        named, form = tree_flatten_with_path(values)
        leaves: list[Any] = [leaf for _, leaf in named]
        for index, (path, leaf) in enumerate(named):
            leaf = received_for(leaf)
            if not isinstance(leaf, Tensor) or isinstance(
                leaf, nn.Parameter | DTensor | UnknownTensor
            ):
                continue
            note, note_gradient = (
                self._noter(Key(name, call, kind, keystr(path)), caller) for kind in kinds
            )
            note(leaf)
            if leaf.requires_grad:
                leaves[index] = cast(Tensor, _Tap.apply(leaf, note_gradient, self._copies))
        return tree_unflatten(leaves, form)

    def _noter(self, key: Key, caller: str | None) -> Callable[[Tensor], None]:
        """Return a function that records a tensor; it does nothing in a recomputed forward."""
        if not (self.is_on and self._is_forward):
            return lambda tensor: None
        microbatch = 0 if self._runner is None else self._runner.microbatch

        def note(tensor: Tensor) -> None:
            copy = tensor.detach().cpu().clone()
            self.events.append(Event(key, caller, microbatch, copy))

        return note

    def _add(self, gradient: Tensor) -> None:
        # Replicas may have equal gradients or terms of a sum, so what they contribute is unknown.
        if self.is_on and not (
            isinstance(gradient, DTensor) and all(p.is_replicate() for p in gradient.placements)
        ):
            shard, offset = shard_of(gradient.detach())
            term = shard.double().cpu()
            self.contribution = (
                (offset, term)
                if self.contribution is None
                else (offset, self.contribution[1] + term)
            )


class _Tap(Function):
    """Identity on x for one use of x, to record the gradient of this use alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[Tensor], None], copies: bool) -> Tensor:
        ctx.note = note
        return x.clone() if copies else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.note(grad_outputs[0])
        return grad_outputs[0], None, None


@dataclass(frozen=True)
class Aligner:
    """Slices a rank's shard from the reference's tensors.

    Attributes:
        num_rows: number of rows of the global batch.
        layout: tp's layout of activations; None without tp.
        roles: module name -> role under tp, for modules that have a role.
        order: cp's order of positions; None without cp.
        context_rank: this rank's coordinate on cp.
    """

    num_rows: int
    layout: Layout | None = None
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    order: PositionOrder | None = None
    context_rank: int = 0

    def pair(self, event: Event, reference: Tensor, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return this rank's tensor and the same shard of the reference's, both without padding.

        Returns:
            The pair; None if no layout maps the reference's shape to this rank's, or the tensor may
            be a term of a sum over tp.
        """
        key, local = event.key, event.tensor
        if local.ndim == reference.ndim - 1 and len(local) % max(1, len(rows)) == 0 < len(rows):
            local = local.unflatten(0, (len(rows), -1))  # tokens [N, ..] as [B, T, ..]
        is_input = key.kind in (Kind.INPUT, Kind.INPUT_GRADIENT)
        # A mask may be boolean on one side, and numbers to add to the scores on the other.
        is_other_kind = local.is_floating_point() != reference.is_floating_point()
        # Under tp the input of a column map is a placeholder: its product is already computed.
        if is_other_kind or (is_input and self.roles.get(key.module) == "column"):
            return None
        if self._may_be_term(key):
            return None
        for of_rows in self._of_rows(reference, rows):
            for full, is_real in self._of_positions(of_rows):
                for spec in self._specs(key.module, is_input):
                    if found := self._cut(full, local, spec):
                        real = self._cut(is_real, local, spec)
                        assert real is not None, "it is cut as the tensor is"
                        return found[0][real[1]], found[1][real[1]]
        return None

    def _may_be_term(self, key: Key) -> bool:
        """Return whether tp may leave a term of a sum on each rank, in a branch with experts.

        The branch makes the sums whole, see `bind_experts`, and its own tensors are compared.
        """
        branches = tuple(f"{name}." for name, role in self.roles.items() if role == "experts")
        if key.kind == Kind.OUTPUT:
            return key.module.startswith(branches) and key.module.endswith((".shared", ".down"))
        return key.kind != Kind.INPUT and key.module.startswith(branches)

    def _of_rows(self, reference: Tensor, rows: Tensor) -> Iterator[Tensor]:
        if reference.ndim and len(reference) and len(reference) % self.num_rows == 0:
            by_row = reference.unflatten(0, (self.num_rows, -1))
            yield by_row[rows].flatten(0, 1)
        yield reference

    def _of_positions(self, full: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield possible cp shards of a tensor for this rank, with masks of valid positions."""
        if self.order is not None and full.ndim > 1:
            length = full.shape[1]
            num_held = self.order.num_held(length)
            positions_T = self.order.positions(self.context_rank, num_held)
            is_real_T = (positions_T < length).view(-1, *[1] * (full.ndim - 2))
            cut = full.index_select(1, positions_T.clamp(max=length - 1))
            yield cut, is_real_T.expand(cut.shape)
        yield full, torch.ones((), dtype=torch.bool).expand(full.shape)

    def _specs(self, module: str, is_input: bool) -> Sequence[Spec]:
        """Return the possible tp layouts of a module's tensor, the most likely first."""
        full = Spec("B T D")
        if self.layout is None:
            return [full]
        residual, inner = self.layout.residual, self.layout.inner
        role = self.roles.get(module)
        is_inner = role in ("local", "column") or (role == "row" and is_input)
        if role is None:  # it may be between the column and the row map of a branch
            branches = (f"{name}." for name, role in self.roles.items() if role == "branch")
            is_inner = module.startswith(tuple(branches))
        order = [inner, residual] if is_inner else [residual, inner]
        return [*order, Spec.of(inner.axes[0], (), ()), full]

    def _cut(self, full: Tensor, local: Tensor, spec: Spec) -> tuple[Tensor, Tensor] | None:
        if self.layout is None or spec.is_replicated:
            return (local, full) if local.shape == full.shape else None
        if full.ndim != local.ndim or full.ndim < 2:
            return None
        num_rows, length, num_features = (*full.shape, 1)[:3]
        held = self.layout.shard_ranges(spec, BatchShape(num_rows, length), num_features)[
            : full.ndim
        ]
        if tuple(local.shape) != (*map(len, held), *full.shape[len(held) :]):
            return None
        shard = full[tuple(slice(indices.start, indices.stop) for indices in held)]
        return local[tuple(slice(0, size) for size in shard.shape)], shard


def gap(ours: Tensor, reference: Tensor) -> float:
    """Return max |a - b|; infinite if non-finite elements differ, or integers differ at all."""
    if ours.numel() == 0:
        return 0.0
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, reference.to(ours.dtype)) else float("inf")
    difference = (ours.double() - reference.double()).abs()
    difference[same(ours.double(), reference.double())] = 0  # both NaN, or the same infinity
    return float(difference.nan_to_num(float("inf"), float("inf")).max())
