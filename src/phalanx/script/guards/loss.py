"""A loss that is not of the whole batch: its gradient would be of some rows, or count rows twice.

What ranks say of their losses travels in the sum that each backward makes (`Sums`), so all ranks
refuse alike:

    loss of the whole batch    equal on all ranks; its terms pass a gather, or are of parameters
    loss of own rows           with a count; every rank reaches as many gathers
    either                     reaches no parameter outside the prepared model
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.comm.comm import Comm, local_shard
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.models.attention import to_device
from phalanx.parallel.reduce import GradientReducer
from phalanx.script.gather import Gathers, is_gather
from phalanx.script.loss import FORMS, RowsLoss

_MOST_SPREAD: Final = 1e-6
"""Largest relative spread of a whole-batch loss over the ranks: rounding on unlike processors."""

_LEAST_LOSS: Final = 1e-9
"""Loss below which rounding may exceed `_MOST_SPREAD`."""


class Sums(NamedTuple):
    """Sums over the data ranks of what each says of its loss in a call of `run.backward`.

    Attributes:
        loss: losses, or sums of the losses of own rows.
        counts: counts of own rows; squares of losses of the whole batch.
        num_whole: ranks that give a loss of the whole batch.
        num_illegal: ranks with a count that is negative or not finite.
        num_own: ranks whose loss reaches parameters without passing a gather, where that is due.
        num_empty: ranks with a mean over 0 rows that is not finite.
        gathers: gathers that a loss of own rows reaches.
        squares: their squares.
    """

    loss: float
    counts: float
    num_whole: float
    num_illegal: float
    num_own: float
    num_empty: float
    gathers: float
    squares: float


class OwnTerms(NamedTuple):
    """What a loss is computed from on paths without a gather.

    Attributes:
        parameters: those that the loss reaches: in a penalty on weights, in a layer that takes
            gathered rows, or in a term of this rank's own rows.
        num_gathers: gathers that other paths pass; one more if a checkpoint may contain another.
        is_hidden: whether a path passes a reentrant checkpoint, which shows no graph.
        num_nodes: nodes of the graph between the loss and the gathers or leaves.
    """

    parameters: list[nn.Parameter]
    num_gathers: int
    is_hidden: bool
    num_nodes: int


def own_terms(loss: Tensor, *, stops_at_gathers: bool = True) -> OwnTerms:
    """Return what a loss is computed from on paths without a gather, or on all paths."""
    seen, parameters = set[Any](), list[nn.Parameter]()
    num_gathers, is_hidden = 0, False
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_gather(node):
            num_gathers += 1
            if stops_at_gathers:
                continue
        is_hidden |= type(node).__name__ == "CheckpointFunctionBackward"
        if isinstance(variable := getattr(node, "variable", None), nn.Parameter):
            parameters.append(variable)
        left.extend(following for following, _ in node.next_functions)
    return OwnTerms(parameters, num_gathers + is_hidden, is_hidden, len(seen))


class LossGuard:
    """Checks the losses of the calls of `run.backward`.

    Attributes:
        terms: of the current loss, if it is of the whole batch and there are several data ranks.
        is_gathered: whether a loss since the last step came from gathered rows, or with a count.
    """

    def __init__(
        self, comm: Comm, model: nn.Module, gathers: Gathers, reducer: GradientReducer | None
    ) -> None:
        self._comm, self._model, self._gathers, self._reducer = comm, model, gathers, reducer
        self._known = {*map(id, model.parameters())}
        self._checked: set[tuple[frozenset[int], int]] = set()
        self.terms = OwnTerms([], num_gathers=0, is_hidden=False, num_nodes=0)
        self.is_gathered = False

    def numbers(self, loss: Tensor | RowsLoss, *, is_first: bool, is_early: bool) -> Tensor:
        """Return what this rank says of its loss, see `Sums`; float64.

        Args:
            loss: this rank's loss.
            is_first: whether each own term must be looked at, though another call had it too.
            is_early: whether the sums are read before the backward.
        """
        device, has_others = self._comm.device, self._comm.size("data") > 1
        numbers = torch.zeros(len(Sums._fields), dtype=torch.float64, device=device)
        if isinstance(loss, RowsLoss):
            self.is_gathered, count = True, loss.count
            if isinstance(count, Tensor):
                count = to_device(count, device).double()
                numbers[3] = (~((count >= 0) & count.isfinite())).double()
            numbers[1] = count
            # A mean over 0 rows, times 0 rows, is NaN, and its gradient may be.
            total = loss.sum.detach().double()
            numbers[5] = (~total.isfinite() & (numbers[1] == 0)).double()
            numbers[0] = torch.where(numbers[1] > 0, total, 0.0)
            if self._gathers.has_graph and has_others:
                num_gathers = own_terms(loss.sum).num_gathers
                numbers[6], numbers[7] = num_gathers, num_gathers**2
            return numbers
        value = loss.detach().double()
        numbers[0], numbers[1], numbers[2] = value, value**2, 1.0
        if has_others:
            self.terms = own_terms(loss)
            self.is_gathered |= self.terms.num_gathers > 0
            # The number of nodes shows a new term of parameters that were reached before.
            reached = (frozenset(map(id, self.terms.parameters)), self.terms.num_nodes)
            is_due = is_early and (is_first or reached not in self._checked)
            self._checked.add(reached)
            numbers[4] = bool(self.terms.parameters) and is_due
        return numbers

    def check(self, loss: Tensor | RowsLoss, sums: Sums) -> bool:
        """Refuse losses that are no loss of the whole batch; all ranks decide alike.

        Returns:
            Whether the loss is finite on all ranks.
        """
        num_ranks = self._comm.size("data")
        if 0 < sums.num_whole < num_ranks:
            raise ScriptError(
                f"backward: {sums.num_whole:g} of {num_ranks} data ranks give a loss of the whole "
                "batch and the others a loss of their rows; write the same call on every rank"
            )
        if sums.gathers**2 != sums.squares * num_ranks:
            raise ScriptError(
                "backward: the losses of rows reach other gathers on some ranks, so that gradients "
                "would wait for one another; use what run.gather returns on every rank, with "
                "weight 0 where it does not count"
            )
        if sums.num_illegal or (isinstance(loss, RowsLoss) and sums.counts == 0):
            counts = [*map(float, gather_objects(loss.count if isinstance(loss, RowsLoss) else 0))]
            raise ScriptError(
                f"backward: the counts of the ranks are {', '.join(f'{n:g}' for n in counts)}; "
                "expected numbers of rows or tokens, finite and not negative, and one above 0"
            )
        if not (math.isfinite(sums.loss) and math.isfinite(sums.counts)):
            return False
        if not isinstance(loss, RowsLoss) and num_ranks > 1:
            mean = sums.loss / num_ranks
            spread = math.sqrt(max(sums.counts / num_ranks - mean**2, 0.0))
            eps = torch.finfo(loss.dtype).eps
            if spread > max(_MOST_SPREAD, 2 * eps) * abs(mean) + _LEAST_LOSS:
                self._refuse_unequal(loss)
            if sums.num_own:
                self._refuse_own_terms(loss)
        return True

    def strangers(self, loss: Tensor) -> list[nn.Parameter]:
        """Return parameters that a loss reaches outside the model: each rank has its own gradient.

        Of the parameters that FSDP2 gathers, those that it has freed again are among them; their
        gradients are removed in the backward.
        """
        known = self._known.union(map(id, self._model.parameters()))
        reached = own_terms(loss, stops_at_gathers=False).parameters
        return [each for each in reached if id(each) not in known]

    def refuse_strangers(self, strangers: list[nn.Parameter]) -> None:
        """Refuse `strangers` that have a gradient after the backward."""
        if (lost := next((each for each in strangers if each.grad is not None), None)) is not None:
            raise ScriptError(
                f"backward: the loss reaches a parameter of shape {tuple(lost.shape)} that is not "
                "in the prepared model, so no rank would add up its gradient; put both into one "
                "module, as nn.ModuleDict, before run.prepare"
            )

    def before_step(self) -> None:
        """Refuse a step of losses that ranks computed from their own rows alone."""
        if self._comm.size("data") > 1 and not self.is_gathered:
            raise ScriptError(
                "optimizer.step(): no loss since the last step is computed from rows that "
                f"run.gather returned, so ranks used their own rows or the same; {FORMS}"
            )

    def _refuse_unequal(self, loss: Tensor) -> None:
        """Refuse a loss that differs between ranks, and name the cause; all ranks call this."""
        values = gather_objects((float(loss.detach()), own_terms(loss).num_gathers > 0))
        other = max(range(len(values)), key=lambda rank: abs(values[rank][0] - values[0][0]))
        (first, _), (last, _) = values[0], values[other]
        what = (
            f"backward: the loss is {first:.8g} on rank 0 and {last:.8g} on rank {other}; expected "
            "the loss of the whole batch, equal on every rank"
        )
        if all(is_gathered for _, is_gathered in values):
            raise ScriptError(
                f"{what}: a part of it is computed from this rank's own rows, or from random "
                "numbers that differ; compute every term from what run.gather returned, and draw "
                "random numbers by run.draw, or from a torch.Generator with a seed"
            )
        raise ScriptError(f"{what}; {FORMS}")

    def _refuse_own_terms(self, loss: Tensor) -> None:
        """Refuse gradients from terms of a rank's own rows; all ranks call this together.

        Terms of parameters alone, as a penalty, and of gathered rows have equal gradients on all
        ranks. Such a loss may be equal on all ranks though a term is not, as `(p - p.detach())`.
        """
        comm = self._comm
        place = tuple(comm.coord(axis) for axis in comm.axes if axis not in comm.axes_of("data"))
        gradients: dict[str, tuple[float, float]] = {}
        of: dict[Tensor, str] = {p: name for name, p in self._model.named_parameters()}
        reached = {
            of.get(each, f"parameter {number}, of shape {tuple(each.shape)},"): each
            for number, each in enumerate(self.terms.parameters)
        }
        names = gather_objects((self.terms.is_hidden, *reached))
        if any(is_hidden for is_hidden, *_ in names):
            raise ScriptError(
                "backward: the loss reaches parameters through a reentrant checkpoint, within "
                "which no gather shows; give torch.utils.checkpoint use_reentrant=False, or call "
                "run.gather on its result"
            )
        if all(each == names[0] for each in names):  # else backwards would not match
            if self._reducer is not None:
                self._reducer.keep()
            with self._gathers.passing(is_cut=True):
                cut: Any = torch.autograd.grad(
                    loss, [*reached.values()], retain_graph=True, allow_unused=True
                )
            for name, gradient in zip(reached, cut, strict=True):
                if gradient is not None:
                    flat = local_shard(gradient).double().reshape(-1)
                    signs = torch.arange(len(flat), device=flat.device).double().cos()
                    gradients[name] = float(flat.norm()), float(flat.real @ signs)
        else:
            gradients = dict.fromkeys(reached, (math.nan, 0.0))
        first: dict[Any, tuple[int, dict[str, tuple[float, float]]]] = {}
        for rank, (where, theirs) in enumerate(gather_objects((place, gradients))):
            root, mine = first.setdefault(where, (rank, theirs))
            for name in mine | theirs:
                (a, b), (c, d) = (each.get(name, (0.0, 0.0)) for each in (mine, theirs))
                if not abs(a - c) + abs(b - d) <= 1e-4 * max(a, c):
                    raise ScriptError(
                        "backward: a term of the loss is computed from this rank's own rows: "
                        f"without gathered rows the gradient of {name} has the norm {a:.4g} on "
                        f"rank {root} and {c:.4g} on rank {rank}; compute the term from rows that "
                        "run.gather returned"
                    )
